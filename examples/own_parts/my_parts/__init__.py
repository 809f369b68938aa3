"""Your own parts of embodied_rl: a loss, an advantage, a policy and a logger."""
