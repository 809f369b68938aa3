"""How processes of one run are started, and what they say to each other."""
