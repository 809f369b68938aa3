"""The methods of the training loop: how experience is collected, and how policies learn from it.

Fixed rollouts of all slots (`rollout`), groups of whole episodes (`groups`), and stored steps, recorded or played (`stored`,
`cloning`, `off_policy`).
"""

from __future__ import annotations

from embodied_rl.methods.base import Experience, Method
from embodied_rl.methods.demonstrations import training_sim

__all__ = ["Experience", "Method", "training_sim"]
