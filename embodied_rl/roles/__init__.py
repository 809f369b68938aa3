"""The roles of a run and their locations: this process, other processes of this machine, or actors of a Ray cluster."""
