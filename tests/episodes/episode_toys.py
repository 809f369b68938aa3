"""Made-up episodes of any simulator's spec, and what makes two of them equal."""

from __future__ import annotations

from typing import Any

import numpy as np

from embodied_rl.episodes.recording import RecordedEpisode, RecordingInfo
from embodied_rl.episodes.sink import EpisodeSink
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec

STATE_SPEC = SimSpec(
    "toy", {"state": TensorSpec((3,))}, ActionSpec.continuous([-1, -2], [1, 2]), control_hz=20, instruction="move", reports_success=True
)


def info_of(spec: SimSpec = STATE_SPEC, **policy: Any) -> RecordingInfo:
    return RecordingInfo(spec, {"target": "toy:make"}, policy or {"kind": "random"}, created="2025-01-01T00:00:00Z")


def rows_of(part: TensorSpec | VariableSpec, count: int, rng: np.random.Generator) -> np.ndarray:
    """[count, ...] random rows of a part of an observation."""
    if isinstance(part, VariableSpec):
        rows = np.empty(count, object)
        for row in range(count):
            size = int(rng.integers(0, 5))
            values = {
                "text": "".join(rng.choice(list("aé\n€𝄞\x00\ud800"), size)),
                "json": {"n": rng.integers(0, 9, size).tolist(), "x": [None, True, 0.1, "ü"]},
                "array": rng.normal(size=(size, 2)).astype(np.float32),
            }
            rows[row] = values[part.kind]
        return rows
    dtype, shape = np.dtype(part.dtype), (count, *part.shape)
    if dtype.kind == "f":
        return rng.normal(size=shape).astype(dtype)
    return rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)


def make_episode(
    spec: SimSpec = STATE_SPEC, seed: int = 0, num_steps: int = 4, *, ends: str = "terminated", success: bool = True, **fields: Any
) -> RecordedEpisode:
    """Random content of the right kinds, the same for the same arguments; `ends`: terminated, truncated or nothing."""
    rng = np.random.default_rng([seed, num_steps])
    if spec.action.kind == "text":
        action = np.array([f"say {step} {seed}" for step in range(num_steps)], object)
    elif spec.action.kind == "discrete":
        action = rng.integers(0, spec.action.num_actions, (num_steps, 1))
    else:
        action = rng.uniform(spec.action.low, spec.action.high, (num_steps, spec.action.dim)).astype(np.float32)
    last = np.arange(num_steps) == num_steps - 1
    return RecordedEpisode(
        **{
            "seed": seed,
            "observation": {key: rows_of(part, num_steps + 1, rng) for key, part in spec.observation.items()},
            "action": action,
            "reward": rng.normal(size=num_steps).astype(np.float32),
            "terminated": last & (ends == "terminated"),
            "truncated": last & (ends == "truncated"),
            "success": last & success,
            **fields,
        }
    )


def assert_same_rows(found: Any, expected: Any, name: str = "") -> None:
    """Bit by bit, dtype included; object arrays value by value."""
    assert len(found) == len(expected), name
    if isinstance(expected, np.ndarray) and expected.dtype.kind == "O":
        for row, (left, right) in enumerate(zip(found, expected, strict=True)):
            if isinstance(right, np.ndarray):
                assert left.dtype == right.dtype, f"{name}[{row}]"
                np.testing.assert_array_equal(left, right, f"{name}[{row}]")
            else:
                assert left == right, f"{name}[{row}]"
        return
    assert found.dtype == expected.dtype, name
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected), name)


def assert_same_episode(found: RecordedEpisode, expected: RecordedEpisode, images: bool = True) -> None:
    for name in ("seed", "task", "instruction"):
        assert getattr(found, name) == getattr(expected, name), name
    assert dict(found.metadata) == dict(expected.metadata)
    assert dict(found.snapshots) == dict(expected.snapshots)
    for name in ("action", "reward", "terminated", "truncated", "success"):
        assert_same_rows(getattr(found, name), getattr(expected, name), name)
    for name in ("sampled_action", "log_prob", "value", "policy_version", "chunk"):
        left, right = getattr(found, name), getattr(expected, name)
        assert (left is None) == (right is None), name
        if right is not None:
            assert_same_rows(left, right, name)
    rooms: list[tuple[Any, Any]] = [(found.observation, expected.observation), (found.state or {}, expected.state or {})]
    rooms += [(found.images, expected.images)] if images else []
    for left, right in rooms:
        assert left.keys() == right.keys()
        for key in right:
            assert_same_rows(left[key], right[key], key)


def moving_square(num: int, height: int, width: int) -> np.ndarray:
    """[num, H, W, 3] a square that moves over a smooth background."""
    ramp = np.linspace(60, 200, width).astype(np.uint8)
    frames = np.broadcast_to(ramp[None, None, :, None], (num, height, width, 3)).copy()
    for time in range(num):
        frames[time, 10:24, 2 * time : 2 * time + 14] = (200, 40, 40)
    return frames


def stream(writer: RecordingWriter, episode: RecordedEpisode, finish: bool = True) -> Any:
    """Give an episode step by step, as a recorder does: in buffers that are used again."""
    sink = EpisodeSink(writer, episode.seed, task=episode.task, instruction=episode.instruction, metadata=episode.metadata)
    reused: dict[str, Any] = {}

    def at(rows: Any, time: int, name: str) -> Any:
        value = rows[time]
        if not isinstance(value, np.ndarray):
            return value
        if name not in reused or reused[name].shape != value.shape:
            reused[name] = np.empty_like(value)
        reused[name][...] = value
        return reused[name]

    def around(time: int) -> tuple[Any, Any, Any]:
        rooms = (episode.observation, episode.state, episode.images)
        return tuple(None if room is None else {k: at(v, time, f"{i}{k}") for k, v in room.items()} for i, room in enumerate(rooms))  # type: ignore[return-value]

    sink.start(*around(0))
    optional = ("sampled_action", "log_prob", "value", "policy_version", "chunk")
    for time in range(episode.num_steps):
        observation, state, images = around(time + 1)
        fields = {name: getattr(episode, name)[time] for name in ("reward", "terminated", "truncated", "success")}
        given = {name: at(rows, time, name) for name in optional if (rows := getattr(episode, name)) is not None}
        fields |= {"action": at(episode.action, time, "action"), **given}
        sink.step(**fields, observation=observation, state=state, images=images, snapshot=episode.snapshots.get(time))
    return sink.finish() if finish else sink
