"""What LeRobot knows of a policy of ours: ``--policy.type=embodied_rl`` and where its checkpoint lies."""

from __future__ import annotations

from dataclasses import dataclass, field

from lerobot.configs.policies import PreTrainedConfig
from lerobot.optim import AdamConfig

from embodied_rl.errors import UserError


@PreTrainedConfig.register_subclass("embodied_rl")
@dataclass
class EmbodiedRLConfig(PreTrainedConfig):
    """A checkpoint of ours as LeRobot's commands see it. It is played; what trains it is ``python -m embodied_rl.train``."""

    checkpoint: str = ""
    """The folder of a run, or of one of its checkpoints."""
    keys: dict[str, str] = field(default_factory=dict)
    """{LeRobot's feature: our part of the observation}, for those whose names do not say it."""
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
        """Raises UserError: LeRobot does not train our policies."""
        raise UserError("A policy of embodied_rl is trained by python -m embodied_rl.train.")

    def get_scheduler_preset(self) -> None:
        return None

    def validate_features(self) -> None:
        """Nothing to say before the checkpoint is open."""
