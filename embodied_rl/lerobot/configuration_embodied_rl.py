"""LeRobot's configuration of an embodied_rl policy: ``--policy.type=embodied_rl`` and the location of its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

from lerobot.configs.policies import PreTrainedConfig
from lerobot.optim import AdamConfig

from embodied_rl.errors import UserError


@PreTrainedConfig.register_subclass("embodied_rl")
@dataclass
class EmbodiedRLConfig(PreTrainedConfig):
    """An embodied_rl checkpoint for LeRobot's commands. LeRobot plays it; ``python -m embodied_rl.train`` trains it."""

    checkpoint: str = ""
    """Folder of a run or of one of its checkpoints."""
    keys: dict[str, str] = field(default_factory=dict)
    """{LeRobot's feature: part of the policy's observation}, for features whose name does not match."""
    push_to_hub: bool = False

    @property
    def observation_delta_indices(self) -> None:
        return None

    @property
    def action_delta_indices(self) -> None:
        return None

    @property
    def reward_delta_indices(self) -> None:
        return None

    def get_optimizer_preset(self) -> AdamConfig:
        """Raises UserError: LeRobot does not train embodied_rl policies."""
        raise UserError("A policy of embodied_rl is trained by python -m embodied_rl.train.")

    def get_scheduler_preset(self) -> None:
        return None

    def validate_features(self) -> None:
        """Do nothing: the features are known after the checkpoint is open."""
