"""The policy class: LeRobot's observations in, actions of an embodied_rl checkpoint out."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

import embodied_rl
from embodied_rl.errors import UserError
from embodied_rl.lerobot.configuration_embodied_rl import EmbodiedRLConfig
from embodied_rl.policies.lerobot import TASK, match_features
from embodied_rl.types import TensorSpec


class EmbodiedRLPolicy(PreTrainedPolicy):
    """Plays a checkpoint by its likeliest actions."""

    config_class = EmbodiedRLConfig
    name = "embodied_rl"

    def __init__(self, config: EmbodiedRLConfig, **_: Any) -> None:
        """Raises UserError: no checkpoint is named, it cannot be read, or its observations are not in LeRobot's environment."""
        super().__init__(config)
        if not config.checkpoint:
            raise UserError("--policy.checkpoint=FOLDER is missing: the folder of a run, or of one of its checkpoints.")
        self.inner = embodied_rl.load_policy(config.checkpoint)
        shapes = {name: tuple(feature.shape) for name, feature in config.input_features.items()}
        parts = {key: self.inner.spec.observation[key] for key in self.inner.keys}
        read = {key: part for key, part in parts.items() if isinstance(part, TensorSpec)}
        self._parts = read
        self._features = {key: feature for feature, key in match_features(shapes, read, config.keys).items()}
        if lacking := [key for key in read if key not in self._features]:
            fix = f"Name the feature: --policy.keys={{FEATURE: {lacking[0]}}}."
            raise UserError(f"The policy reads '{lacking[0]}'; the environment shows {', '.join(shapes)}. {fix}")
        self._steps: deque[Tensor] = deque()

    def get_optim_params(self) -> dict[str, Any]:
        return {}

    def reset(self) -> None:
        self._steps.clear()
        self.inner.reset()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any] | None]:
        """Raises UserError: LeRobot does not train embodied_rl policies."""
        raise UserError("A policy of embodied_rl is trained by python -m embodied_rl.train.")

    def predict_action_chunk(self, batch: dict[str, Any], **_: Any) -> Tensor:
        """Next chunk of actions [B, K, A], in the units of the policy's simulator."""
        observation = {key: _as_ours(batch[feature], self._parts[key]) for key, feature in self._features.items()}
        if "instruction" in self.inner.keys:
            observation["instruction"] = np.array(batch[TASK], object)
        action = torch.from_numpy(np.asarray(self.inner.predict(observation)))
        return action if action.ndim == 3 else action[:, None]

    def select_action(self, batch: dict[str, Any], **_: Any) -> Tensor:
        """Next action [B, A] of the chunk; computes a new chunk when the last one is used up."""
        if not self._steps:
            self._steps.extend(self.predict_action_chunk(batch).unbind(dim=1))
        return self._steps.popleft()


def _as_ours(values: Tensor, part: TensorSpec) -> np.ndarray:
    """Convert pictures [B, C, H, W] in 0 … 1 to [B, H, W, C] bytes; leave other values unchanged."""
    array = values.detach().cpu()
    if part.dtype == "uint8":
        array = (array.permute(0, 2, 3, 1) * 255).round().clamp(0, 255)
    return array.numpy().astype(part.dtype)
