"""Bodies of the command lines; ``python -m embodied_rl.X`` reaches them through a short module at the top."""
