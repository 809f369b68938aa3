"""Shapes the rewards of rollouts and of whole episodes for learning, with state across updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.advantage_table import advantage_info
from embodied_rl.algorithms.kl import kl_estimate
from embodied_rl.algorithms.rewards import ReturnNormalizer, clip_reward, kl_in_reward
from embodied_rl.config import AlgorithmConfig, KlConfig
from embodied_rl.errors import IncompatibleCheckpointError


class KlTerm:
    """The configured divergence from the first policy, in the loss or in the reward, and its present coefficient.

    The coefficient may follow a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2). e = clip(KL / target - 1, -0.2, 0.2) and
    value <- value (1 + e min(n / horizon, 1)), with n the samples of the step: a proportional controller on the logarithm of the
    coefficient. One measurement moves it by at most a fifth, whatever its number of samples: beyond five horizons the paper's factor
    1 + e n / horizon would fall to 0, which it never leaves.
    """

    MAX_ERROR = 0.2

    def __init__(self, config: KlConfig) -> None:
        self.config, self.coefficient = config, config.coef

    def update(self, kl: float, num_samples: int) -> float:
        """Take the divergence of the last step; return the new coefficient. A NaN changes nothing: the loss or reward that contains it
        raises where it is computed."""
        target, horizon = self.config.target, self.config.horizon
        if target is not None and not math.isnan(kl):
            error = min(max(kl / target - 1.0, -self.MAX_ERROR), self.MAX_ERROR)
            # In this order for steps within the horizon, so that older runs resume bit for bit.
            self.coefficient *= 1.0 + (error * num_samples / horizon if num_samples <= horizon else error)
        return self.coefficient

    @property
    def in_reward(self) -> bool:
        return self.config.coef > 0 and self.config.place == "reward"

    @property
    def in_loss(self) -> bool:
        return self.config.coef > 0 and self.config.place == "loss"

    def divergence(self, log_prob: Tensor | None, reference: Tensor | None) -> Tensor | None:
        """Estimate of KL(present || first policy) for each unit, or the sum of estimates if an entry has several units; None if the reward
        has no KL term."""
        if not self.in_reward:
            return None
        assert log_prob is not None, "the learner computes both"
        assert reference is not None, "the learner computes both"
        return kl_estimate(log_prob=log_prob, reference_log_prob=reference, kind=self.config.kind)

    def measured(self, stats: Mapping[str, float], num_samples: int) -> dict[str, float]:
        """``kl_coef`` after the divergence that an update measured in its loss; empty if it measured none."""
        if "kl" not in stats or not self.in_loss:
            return {}
        return {"kl_coef": self.update(stats["kl"], num_samples)}


class StepRewards:
    """Rewards of single steps before credit assignment, for rollouts and whole episodes, as `algorithm.reward`, `algorithm.kl` and
    `algorithm.normalize_reward` configure them, with state across updates."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config, self.advantage = config, advantage_info(config.advantage)
        self.kl = KlTerm(config.kl)
        self.reward_normalizer = ReturnNormalizer(config.gamma, config.reward_clip) if config.normalize_reward else None

    @property
    def looks_into_chunks(self) -> bool:
        """Whether the advantage is computed from the rewards of a chunk's steps."""
        return "executed" in self.advantage.inputs

    def scaled(self, reward: Tensor, mask: Tensor | None) -> Tensor:
        """Clip, then scale rewards; `mask`: entries that count, None: all."""
        limit = self.config.reward.clip
        if limit is not None:
            reward = clip_reward(reward=reward, low=-limit, high=limit, mask=mask)
        return reward * self.config.reward.scale

    def less_costs(
        self, reward: Tensor, kl: Tensor | None, mask: Tensor | None, learned: Tensor | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Subtract the divergence, if the reward has a KL term, and each step's cost; update the term's coefficient, and return ``kl`` and
        ``kl_penalty``. `kl`: a `KlTerm.divergence`, shaped as `reward`; `mask`: entries that count, None: all; `learned`: entries whose
        divergence is measured, None: those of `mask`."""
        figures: dict[str, float] = {}
        if self.kl.in_reward:
            assert kl is not None, "`divergence` gives it"
            measured = mask if learned is None else learned
            reward, metrics = kl_in_reward(reward=reward, kl=kl, coefficient=self.kl.coefficient, mask=mask, counted=measured)
            figures = {name: float(value) for name, value in metrics.items()}
            self.kl.update(figures["kl"], reward.numel() if measured is None else int(measured.sum()))
        price = self.config.reward.length_penalty
        return (reward - price * (1.0 if mask is None else mask)) if price else reward, figures

    def of_steps(self, reward: np.ndarray) -> np.ndarray:
        """Shape stored steps' rewards: clip, scale, subtract each step's cost; `reward_normalizer` divides them when they are drawn."""
        return self.less_costs(self.scaled(torch.tensor(reward), None), None, None)[0].numpy()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state that a resume needs."""
        normalizer = None if self.reward_normalizer is None else self.reward_normalizer.state_dict()
        return {"reward_normalizer": normalizer, "kl_coefficient": {"value": self.kl.coefficient}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Raises IncompatibleCheckpointError if it was made with the other setting of ``normalize_reward``."""
        saved = state.get("reward_normalizer")
        if (saved is None) != (self.reward_normalizer is None):
            raise IncompatibleCheckpointError(
                f"algorithm.normalize_reward={self.config.normalize_reward} now, but {saved is not None} in the checkpoint, whose value "
                "function has that scale. Resume with the checkpoint's setting."
            )
        if self.reward_normalizer is not None and saved is not None:
            self.reward_normalizer.load_state_dict(saved)
        if "kl_coefficient" in state:  # before November 2026 rollouts had none
            self.kl.coefficient = float(state["kl_coefficient"]["value"])

    def restart_episodes(self) -> None:
        """Note that all episodes begin anew outside a rollout, so that the running sums of returns end."""
        if self.reward_normalizer is not None:
            self.reward_normalizer.restart_episodes()
