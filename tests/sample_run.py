"""A small configuration, specification and episodes that several tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.config import TrainConfig
from embodied_rl.types import ActionSpec, EpisodeSummary, SimSpec, TensorSpec

SPEC = SimSpec(
    task="FetchReachDense-v4",
    observation={"state": TensorSpec((16,), "float32")},
    action=ActionSpec.continuous([-1, -1, -1, -1], [1, 1, 1, 1]),
    max_episode_steps=50,
    control_hz=25.0,
    reports_success=True,
    can_render=True,
)


def make_config(run_dir: Path | str, **changes: Any) -> TrainConfig:
    """A valid configuration; ``sim={"num_slots": 4}`` and the like change single values."""
    data: dict[str, Any] = {
        "sim": {"name": "fetch_reach", "target": "gymnasium:make", "task": "FetchReachDense-v4", "num_slots": 8},
        "policy": {"hidden_sizes": [8]},
        "algorithm": {"rollout_steps": 32},
        "generation": {},
        "hybrid": {},
        "logger": {"names": ["jsonl"]},
        "evaluation": {"num_episodes": 10},
        "checkpoint": {"keep_last": 2},
        "video": {"num_episodes": 2, "size": 64},
        "run_dir": str(run_dir),
    }
    for key, value in changes.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) else value
    return TrainConfig.from_dict(data)


def make_episodes(successes: list[bool], first_seed: int = 2**30) -> list[EpisodeSummary]:
    """One episode per flag: returns -0, -1, -2, …, lengths 50, 49, …; seeds follow one another."""
    return [
        EpisodeSummary(
            slot=index % 2,
            index=index // 2,
            seed=first_seed + index,
            episode_return=-float(index),
            length=50 - index,
            success_once=success,
            success_at_end=success and index % 2 == 0,
            terminated=False,
            final_info={"distance_m": np.float32(0.5)},
        )
        for index, success in enumerate(successes)
    ]
