"""What fills the one training loop: how experience comes about, and what is learned from it.

Fixed rollouts of all slots (`rollout`), groups of whole episodes (`groups`), and steps that are kept, recorded or played (`stored`,
`cloning`, `off_policy`).
"""

from __future__ import annotations

from embodied_rl.methods.base import Experience, Method
from embodied_rl.methods.demonstrations import training_sim

__all__ = ["Experience", "Method", "training_sim"]
