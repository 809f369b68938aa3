"""Environments behind HTTP: `python -m embodied_rl.serve_envs`."""
