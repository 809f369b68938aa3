"""Small recordings in memory that the tests of learning share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.episodes.recording import EpisodeTable, RecordedEpisode, Recording, RecordingInfo
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec

SPEC = SimSpec(
    "Line-v0", {"state": TensorSpec((2,))}, ActionSpec.continuous([-2.0, 0.0], [2.0, 10.0]), max_episode_steps=20, reports_success=True
)


class MemoryRecording(Recording):
    """Episodes that lie in memory, as a recording."""

    def __init__(self, info: RecordingInfo, episodes: list[RecordedEpisode], name: str = "memory") -> None:
        super().__init__(Path(name), info, EpisodeTable.of(map(vars, episodes)))
        self._episodes = episodes

    def episode(self, number: int) -> RecordedEpisode:
        return self._episodes[self._position(number)]


def recording(episodes: list[RecordedEpisode], spec: SimSpec = SPEC, name: str = "line") -> Recording:
    return MemoryRecording(RecordingInfo(spec, sim={"name": name}, policy={"kind": "expert"}), episodes, name)


def episode(length: int, number: int = 0, *, terminated: bool = False, truncated: bool = True, **changes: Any) -> RecordedEpisode:
    """Step t of episode e observes [e, t], acts [2 · (t mod 3 - 1), t mod 11], and gets the reward 10 e + t + 1."""
    steps = np.arange(length)
    last = steps == length - 1
    fields: dict[str, Any] = {
        "seed": number,
        "observation": {"state": np.stack([np.full(length + 1, number), np.arange(length + 1)], 1).astype(np.float32)},
        "action": np.stack([2.0 * (steps % 3 - 1), steps % 11], 1).astype(np.float32),
        "reward": (10.0 * number + steps + 1.0).astype(np.float32),
        "terminated": last & terminated,
        "truncated": last & truncated,
        "success": np.zeros(length, bool),
    }
    return RecordedEpisode(**{**fields, **changes})
