"""embodied_rl trains vision-language-action policies and language agents by reinforcement learning in simulators."""

__version__ = "0.1.0"
