"""Parts of one's own for embodied_rl."""
