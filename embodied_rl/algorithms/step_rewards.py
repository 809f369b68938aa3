"""Rewards as they are learned from, of rollouts and of whole episodes alike, with what runs on across updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.kl import KlCoefficient, kl_estimate
from embodied_rl.algorithms.rewards import ReturnNormalizer, clip_reward, kl_in_reward
from embodied_rl.config import AlgorithmConfig, KlConfig
from embodied_rl.errors import IncompatibleCheckpointError


class KlTerm:
    """The divergence from the first policy that a configuration asks for, in the loss or in the reward, and its present coefficient."""

    def __init__(self, config: KlConfig) -> None:
        self.config = config
        self.coefficient = KlCoefficient(config.coef, target=config.target, horizon=config.horizon)

    @property
    def in_reward(self) -> bool:
        return self.config.coef > 0 and self.config.place == "reward"

    @property
    def in_loss(self) -> bool:
        return self.config.coef > 0 and self.config.place == "loss"

    def divergence(self, log_prob: Tensor | None, reference: Tensor | None) -> Tensor | None:
        """The estimate of KL(present || first policy), unit by unit; None where the reward has no KL term. What has several units has
        the sum of their estimates."""
        if not self.in_reward:
            return None
        assert log_prob is not None, "the learner computes both"
        assert reference is not None, "the learner computes both"
        return kl_estimate(log_prob=log_prob, reference_log_prob=reference, kind=self.config.kind)

    def penalized(self, reward: Tensor, kl: Tensor | None, mask: Tensor | None) -> tuple[Tensor, dict[str, float]]:
        """Rewards less the divergence, which the coefficient then follows, with ``kl`` and ``kl_penalty``; as they are where it is not in
        the reward. `kl`: as `reward`, of `divergence`; `mask`: what counts, None: all."""
        if not self.in_reward:
            return reward, {}
        assert kl is not None, "`divergence` gives it"
        taken, metrics = kl_in_reward(reward=reward, kl=kl, coefficient=self.coefficient.value, mask=mask)
        figures = {name: float(value) for name, value in metrics.items()}
        self.coefficient.update(figures["kl"], reward.numel() if mask is None else int(mask.sum()))
        return taken, figures

    def measured(self, stats: Mapping[str, float], num_samples: int) -> dict[str, float]:
        """``kl_coef`` after the divergence that an update measured in its loss; nothing where none was measured."""
        if "kl" not in stats or not self.in_loss:
            return {}
        return {"kl_coef": self.coefficient.update(stats["kl"], num_samples)}


class StepRewards:
    """Rewards of single steps before credit is assigned, of rollouts and of whole episodes: what `algorithm.reward`, `algorithm.kl` and
    `algorithm.normalize_reward` say of them, with what runs on across updates."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.kl = KlTerm(config.kl)
        self.reward_normalizer = ReturnNormalizer(config.gamma, config.reward_clip) if config.normalize_reward else None

    def scaled(self, reward: Tensor, mask: Tensor | None) -> Tensor:
        """Clipped, then scaled; `mask`: what counts, None: all."""
        limit = self.config.reward.clip
        if limit is not None:
            reward = clip_reward(reward=reward, low=-limit, high=limit, mask=mask)
        return reward * self.config.reward.scale

    def less_costs(self, reward: Tensor, kl: Tensor | None, mask: Tensor | None) -> tuple[Tensor, dict[str, float]]:
        """Less the divergence `kl` (see `KlTerm.penalized`), and what each step costs; with figures of the divergence."""
        reward, figures = self.kl.penalized(reward, kl, mask)
        price = self.config.reward.length_penalty
        return (reward - price * (1.0 if mask is None else mask)) if price else reward, figures

    def of_steps(self, reward: np.ndarray) -> np.ndarray:
        """Stored steps' rewards, any shape: clipped, scaled, less what each costs; `reward_normalizer` divides them when they are drawn."""
        return self.less_costs(self.scaled(torch.tensor(reward), None), None, None)[0].numpy()

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs, JSON-able."""
        normalizer = None if self.reward_normalizer is None else self.reward_normalizer.state_dict()
        return {"reward_normalizer": normalizer, "kl_coefficient": self.kl.coefficient.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises IncompatibleCheckpointError when the state was made with the other setting of ``normalize_reward``."""
        saved = state.get("reward_normalizer")
        if (saved is None) != (self.reward_normalizer is None):
            raise IncompatibleCheckpointError(
                f"algorithm.normalize_reward={self.config.normalize_reward} now, but {saved is not None} in the checkpoint: "
                "the value function would mean something else. Resume with the checkpoint's setting."
            )
        if self.reward_normalizer is not None and saved is not None:
            self.reward_normalizer.load_state_dict(saved)
        if "kl_coefficient" in state:  # before November 2026 rollouts had none
            self.kl.coefficient.load_state_dict(state["kl_coefficient"])

    def restart_episodes(self) -> None:
        """All episodes begin anew, outside a rollout: returns that were being summed are over."""
        if self.reward_normalizer is not None:
            self.reward_normalizer.restart_episodes()
