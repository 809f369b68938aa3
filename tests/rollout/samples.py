"""Small real episodes, and a clock that stands still until it is told to move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from embodied_rl.rollout.groups import Assignment
from embodied_rl.types import Episode, EpisodeGroup


def episode(score: float = 0.0, *, versions: Sequence[int] = (0,), seed: int = 0, domain: str = "only", **changes: Any) -> Episode:
    """One message per version; `score` comes with the last one."""
    length = len(versions)
    reward = np.zeros(length, np.float32)
    reward[-1] = score
    fields: dict[str, Any] = {
        "observation": {"state": np.zeros((length, 2), np.float32)},
        "action": np.zeros((length, 1), np.float32),
        "log_prob": np.zeros((length, 1), np.float32),
        "reward": reward,
        "terminated": True,
        "truncated": False,
        "success": score > 0,
        "seed": seed,
        "domain": domain,
        "policy_version": np.array(versions, np.int64),
        "final_observation": {"state": np.zeros(2, np.float32)},
    }
    return Episode(**{**fields, **changes})


def answer(assignment: Assignment, score: float = 0.0, *, versions: Sequence[int] | None = None, **changes: Any) -> Episode:
    """The episode that was asked for."""
    versions = (assignment.version,) if versions is None else versions
    return episode(score, versions=versions, seed=assignment.seed, domain=assignment.domain, **changes)


def group(scores: Sequence[float], *, domain: str = "only", number: int = 0, **changes: Any) -> EpisodeGroup:
    return EpisodeGroup(number, domain, 0, 0, tuple(episode(score, domain=domain, **changes) for score in scores))


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
