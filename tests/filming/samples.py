"""Filmed and recorded episodes that tests of films share."""

from __future__ import annotations

from typing import Any

import numpy as np

from embodied_rl.episodes.recording import RecordedEpisode
from embodied_rl.media.episodes import FilmedEpisode, Moment
from embodied_rl.types import ActionSpec, EpisodeSummary, SimSpec, TensorSpec

SPEC = SimSpec(
    task="Toy-v0",
    observation={"state": TensorSpec((2,))},
    action=ActionSpec.continuous([-1.0, 0.0], [1.0, 10.0]),
    instruction="push the cube",
    reports_success=True,
    can_render=True,
)


def filmed_episode(grey: int, num_steps: int, success: bool, *, size: int = 96, seed: int = 7) -> FilmedEpisode:
    """Pictures of one colour, one grey brighter with every step."""
    frames = [np.full((size, size, 3), grey + step, np.uint8) for step in range(num_steps + 1)]
    moments = [Moment(step, 1.0, float(step), success and step == num_steps) for step in range(num_steps + 1)]
    summary = EpisodeSummary(0, 0, seed, float(num_steps), num_steps, success, success, False)
    return FilmedEpisode(seed, "Toy-v0", "push the cube", frames, moments, summary)


def recorded_episode(seed: int, num_steps: int, **changes: Any) -> RecordedEpisode:
    """Pictures of the cameras "front" [32, 48] and "wrist" [16, 16], whose grey tells the step."""
    steps = np.arange(num_steps + 1)
    ends = steps[:-1] == num_steps - 1
    values: dict[str, Any] = {
        "seed": seed,
        "observation": {"state": np.stack([steps, steps], axis=1).astype(np.float32)},
        "action": np.stack([np.full(num_steps, 0.5), steps[1:]], axis=1).astype(np.float32),
        "reward": np.full(num_steps, 0.5, np.float32),
        "terminated": np.zeros(num_steps, bool),
        "truncated": ends,
        "success": ends & bool(seed % 2),
        "value": (10.0 - steps[:-1]).astype(np.float32),
        "images": {
            "front": np.broadcast_to(steps[:, None, None, None].astype(np.uint8), (num_steps + 1, 32, 48, 3)).copy(),
            "wrist": np.broadcast_to((100 + steps)[:, None, None, None].astype(np.uint8), (num_steps + 1, 16, 16, 3)).copy(),
        },
        **changes,
    }
    return RecordedEpisode(**values)
