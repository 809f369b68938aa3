"""Starting the processes of a run, and the messages between them."""
