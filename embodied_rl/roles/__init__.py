"""The roles of a run and where they live: in this process, in processes of this machine, or in actors of a Ray cluster."""
