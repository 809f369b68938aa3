"""Recordings to convert, and what must come back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode, Recording, RecordingInfo
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec
from tests.episodes.episode_toys import assert_same_rows, make_episode

STATE = SimSpec("Push-v1", {"state": TensorSpec((3,))}, ActionSpec.continuous([-1, -2], [1, 2]), 50, 20.0, "push", reports_success=True)
PICTURES = SimSpec(
    "Look-v1",
    {
        "rgb": TensorSpec((33, 40, 3), "uint8"),
        "rgb.wrist": TensorSpec((8, 8, 3), "uint8"),
        "depth": TensorSpec((4, 5, 1), "int16"),
        "state": TensorSpec((2, 3), "float64"),
        "button": TensorSpec((1,), "bool"),
    },
    ActionSpec.continuous([-1], [1]),
    control_hz=12.5,
    reports_success=True,
)
CHOICES = SimSpec("Maze-v0", {"cell": TensorSpec((), "int64")}, ActionSpec.discrete(4))
WORDS = SimSpec("Chat-v0", {"text": VariableSpec("text"), "turn": TensorSpec((1,))}, ActionSpec.text(), control_hz=1.0)
PLAIN_FIELDS = ("action", "reward", "terminated", "truncated", "success")
EXTRA_FIELDS = ("sampled_action", "log_prob", "value", "policy_version", "chunk")


def info_of(spec: SimSpec) -> RecordingInfo:
    """Everything that a recording can say about itself."""
    return RecordingInfo(
        spec,
        sim={"name": "toy", "target": "toy:make", "task": spec.task, "kwargs": {"control_mode": "delta"}},
        policy={"kind": "random", "noise_seed": 3},
        command="python -m embodied_rl.record sim=toy",
        versions={"python": "3.11"},
        created="2026-01-02T03:04:05+00:00",
        metadata={"note": ["ü", {"deep": None}]},
    )


def rich_episode(spec: SimSpec, seed: int, num_steps: int, **fields: Any) -> RecordedEpisode:
    """An episode with every optional field."""
    rng = np.random.default_rng([seed, 7])
    steps, around = num_steps, num_steps + 1
    everything = {
        "sampled_action": rng.normal(size=(steps, 2)).astype(np.float32),
        "log_prob": rng.normal(size=(steps, 2)).astype(np.float32),
        "value": rng.normal(size=steps).astype(np.float32),
        "policy_version": np.arange(steps) // 3,
        "chunk": np.arange(steps) // 2,
        "state": {
            "actors/cube": rng.normal(size=(around, 13)).astype(np.float32),
            "articulations/panda": rng.normal(size=(around, 31)),
        },
        "images": {"front": rng.integers(0, 256, (around, 16, 18, 3), np.uint8)},
        "metadata": {"reset_options": {"level": 2}, "score": 0.5, "words": ["a", "ü"]},
        "instruction": "the other one" if seed % 2 else None,
        "task": "Push-v2" if seed % 3 == 2 else None,
    }
    return make_episode(spec, seed, num_steps, **(everything | fields))


def words_episode(seed: int, num_steps: int) -> RecordedEpisode:
    """Texts, which may be empty, and a line of a log-probability for each."""
    texts = np.empty(num_steps + 1, object)
    texts[:] = [f"Frage {seed}: {'ä€𝄞' * row}\n" if row else "" for row in range(num_steps + 1)]
    turn = np.arange(num_steps + 1, dtype=np.float32)[:, None]
    return make_episode(WORDS, seed, num_steps, observation={"text": texts, "turn": turn}, log_prob=-turn[1:])


def record(folder: Path, info: RecordingInfo, episodes: Sequence[RecordedEpisode]) -> Recording:
    """A recording of our own, pictures as arrays."""
    with RecordingWriter(folder, info, video="raw") as writer:
        for episode in episodes:
            writer.add(episode)
    return open_recording(folder)


def assert_same_episode(found: RecordedEpisode, expected: RecordedEpisode, *, whole: bool = True, pictures: bool = True) -> None:
    """Bit by bit. Without `whole`, all but what comes after the last step."""
    for name in ("seed", "task", "instruction"):
        assert getattr(found, name) == getattr(expected, name), name
    metadata = {key: value for key, value in found.metadata.items() if key != "final_observation"}
    assert metadata == dict(expected.metadata)
    for name in (*PLAIN_FIELDS, *EXTRA_FIELDS):
        part = getattr(expected, name)
        if part is None:
            assert getattr(found, name) is None, name
        else:
            assert_same_rows(getattr(found, name), part, name)
    rows = slice(None) if whole else slice(-1)
    rooms = [("observation", found.observation, expected.observation), ("state", found.state or {}, expected.state or {})]
    for room, there, here in [*rooms, ("images", found.images, expected.images)]:
        assert list(there) == list(here), room
        for key, part in here.items():
            if pictures or part.dtype != np.uint8:
                assert_same_rows(there[key][rows], part[rows], f"{room}.{key}")
