"""Reward scaling."""

from __future__ import annotations

from typing import Any

import numpy as np


class ReturnNormalizer:
    """Divide rewards by the running standard deviation of the discounted return, then clip (Engstrom et al. 2020, "code-level" PPO).

    The return of a slot is summed forward, R_t = r_t + gamma R_(t-1), across rollouts, and starts again after an episode's
    end, be it a termination or a truncation. A rollout is folded in as a whole before its rewards are divided, so that all of
    them are divided by the same number. The mean is not subtracted: that would change which policy is best.
    """

    def __init__(self, gamma: float, clip: float = 10.0, eps: float = 1e-8) -> None:
        self.gamma = gamma
        self.clip = clip
        self.eps = eps
        self.mean = 0.0
        self.var = 0.0
        """Biased variance (divided by the count)."""
        self.count = 0.0
        self.carried: np.ndarray | None = None
        """[N] float64 discounted return of each slot's running episode."""

    def __call__(self, reward: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Fold in rewards [T, N] with dones [T, N]; return them normalised, in the same type."""
        from embodied_rl.algorithms.kernels import discounted_returns_kernel

        if self.carried is None or self.carried.shape != reward.shape[1:]:
            self.carried = np.zeros(reward.shape[1], np.float64)
        returns = np.empty(reward.shape, np.float64)
        discounted_returns_kernel(reward, done, self.gamma, self.carried, returns)
        self._merge(returns)
        return np.clip(reward / np.sqrt(self.var + self.eps), -self.clip, self.clip).astype(reward.dtype)

    def _merge(self, returns: np.ndarray) -> None:
        # Pairwise update of Chan, Golub and LeVeque (1979).
        total = self.count + returns.size
        delta = float(returns.mean()) - self.mean
        squares = self.var * self.count + float(returns.var()) * returns.size + delta**2 * self.count * returns.size / total
        self.mean += delta * returns.size / total
        self.var, self.count = squares / total, total

    def restart_episodes(self) -> None:
        """Forget the returns of running episodes, not the statistics."""
        self.carried = None

    def state_dict(self) -> dict[str, Any]:
        """JSON-able numbers and lists; floats survive JSON bit for bit."""
        carried = None if self.carried is None else self.carried.tolist()
        return {"mean": self.mean, "var": self.var, "count": self.count, "carried": carried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.var, self.count = float(state["mean"]), float(state["var"]), float(state["count"])
        self.carried = None if state["carried"] is None else np.asarray(state["carried"], np.float64)
