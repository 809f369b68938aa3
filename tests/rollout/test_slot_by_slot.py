"""Slots recorded side by side hold what a sink of their own would have written."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.config import load_sim_config
from embodied_rl.episodes.folder import validate
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordingError, RecordingInfo
from embodied_rl.episodes.sink import EpisodeSink
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.rollout.batch_sinks import BatchSinks
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.instrumented import IMAGE, PHYSICS
from embodied_rl.sim.manager import EnvManager
from embodied_rl.types import ActionSpec, SimSpec, StepBatch, TensorSpec, VariableSpec
from tests.episodes.episode_toys import assert_same_episode, info_of, make_episode, stream

FLAGS = ("reward", "terminated", "truncated", "success")
SPEC = SimSpec(
    "toy",
    {"state": TensorSpec((3,)), "rgb": TensorSpec((16, 20, 3), "uint8"), "text": VariableSpec("text")},
    ActionSpec.continuous([-1, -2], [1, 2]),
)


@pytest.mark.parametrize("order", ["groups", "any"])
def test_slots_write_what_sinks_write(tmp_path: Path, order: str) -> None:
    """Four slots play three episodes each, in pairs or in any order, with columns that vary in size and snapshots."""
    episodes, rng = {}, np.random.default_rng(0)
    for slot in range(4):
        for turn in range(3):
            seed, length = 10 * slot + turn, 3 + 7 * turn + slot
            around = {"images": {"front": np.full((length + 1, 16, 16, 3), seed, np.uint8)}, "state": {"q": rng.random((length + 1, 2))}}
            between = {"log_prob": rng.random((length, 2)).astype(np.float32), "chunk": np.arange(length) // 2}
            episodes[seed] = make_episode(SPEC, seed, length, snapshots={length - 1: bytes([seed])}, **around, **between)
    with RecordingWriter(tmp_path / "slots", info_of(SPEC), video="raw") as writer:
        sinks = BatchSinks(writer, 4)
        playing = {slot: [10 * slot, 0] for slot in range(4)}
        for slot, (seed, _) in playing.items():
            sinks.start(slot, seed, *first_of(episodes[seed], slot), **first_around(episodes[seed], slot))
        groups = [np.array([0, 1]), np.array([2, 3])]
        while playing:
            chosen = groups[0] if order == "groups" else np.flatnonzero(rng.random(4) < 0.5)
            groups.reverse()
            slots = np.array([slot for slot in chosen if slot in playing], np.int64)
            if not slots.size:
                continue
            batch, given, snapshots = batch_of(episodes, playing, slots)
            sinks.step_batch(batch, given, snapshots=snapshots)
            for slot in slots.tolist():
                seed, time = playing[slot]
                playing[slot] = [seed, time + 1]
                if time + 1 == episodes[seed].num_steps:
                    sinks.finish(slot)
                    del playing[slot]
                    if seed % 10 < 2:
                        playing[slot] = [seed + 1, 0]
                        sinks.start(slot, seed + 1, *first_of(episodes[seed + 1], slot), **first_around(episodes[seed + 1], slot))
    with open_recording(tmp_path / "slots") as recording:
        assert sorted(recording.seeds) == sorted(episodes)
        assert validate(recording) == []
        for episode in recording:
            assert_same_episode(episode, episodes[episode.seed])


def first_of(episode: Any, slot: int) -> tuple[dict[str, Any], int]:
    """A batch of four rows, of which one is the slot's."""
    return {key: [rows[0] if row == slot else None for row in range(4)] for key, rows in episode.observation.items()}, slot


def first_around(episode: Any, slot: int) -> dict[str, Any]:
    return {room: {key: [rows[0]] * 4 for key, rows in getattr(episode, room).items()} for room in ("state", "images")}


def batch_of(episodes: Any, playing: Any, slots: np.ndarray) -> tuple[StepBatch, dict[str, Any], list[bytes | None]]:
    """What a manager with automatic resets hands out: after an end, the observation is the next episode's (here: nonsense)."""
    at = [(episodes[playing[slot][0]], playing[slot][1]) for slot in slots.tolist()]

    def rows(values: list[Any]) -> Any:
        if isinstance(values[0], str):
            column = np.empty(len(values), object)
            column[:] = values
            return column
        return np.stack(values)

    outcome = {name: rows([getattr(episode, name)[time] for episode, time in at]) for name in FLAGS}
    given = {name: rows([getattr(episode, name)[time] for episode, time in at]) for name in ("action", "log_prob", "chunk")}
    final = {key: rows([episode.observation[key][time + 1] for episode, time in at]) for key in SPEC.observation}
    for prefix, room in ((PHYSICS, "state"), (IMAGE, "images")):
        final |= {f"{prefix}{key}": rows([getattr(e, room)[key][t + 1] for e, t in at]) for key in getattr(at[0][0], room)}
    over = outcome["terminated"] | outcome["truncated"]
    nonsense = {key: part.copy() for key, part in final.items()}
    for key, part in nonsense.items():
        part[over] = "nonsense" if key == "text" else 99
    batch = StepBatch(slots, nonsense, **outcome, final_observation=final, episodes=())
    return batch, given, [episode.snapshots.get(time) for episode, time in at]


def test_mistakes_are_said(tmp_path: Path) -> None:
    spec = SimSpec("toy", {"state": TensorSpec((3,))}, ActionSpec.continuous([-1], [1]))
    seen, ends = {"state": np.zeros((2, 3), np.float32)}, np.zeros(2, bool)
    action = np.zeros((2, 1), np.float32)

    def batch(truncated: np.ndarray = ends) -> StepBatch:
        return StepBatch(np.arange(2), seen, np.zeros(2, np.float32), ends, truncated, ends, seen, ())

    with RecordingWriter(tmp_path / "r", info_of(spec)) as writer:
        sinks = BatchSinks(writer, 2)
        with pytest.raises(RecordingError, match="Slot 0 has no episode in progress"):
            sinks.finish(0)
        sinks.start(0, 1, seen, 0)
        with pytest.raises(RecordingError, match="slot 0 is in progress"):
            sinks.start(0, 2, seen, 0)
        sinks.start(1, 2, seen, 1)
        sinks.step_batch(batch(), {"action": action})
        with pytest.raises(RecordingError, match="seed 1 had no 'value' before, and has one at step"):
            sinks.step_batch(batch(), {"action": action, "value": np.zeros(2)})
        with pytest.raises(RecordingError, match="seed 1 lacks 'action' at step"):
            sinks.step_batch(batch(), {})
        sinks.discard(0)
        sinks.start(0, 3, seen, 0)
        with pytest.raises(RecordingError, match=r"Field 'action' must hold rows <f4 \[1\], got \[\]"):
            sinks.step_batch(batch(), {"action": action[:, 0]})
        sinks.discard(0)
        sinks.start(0, 4, seen, 0)
        sinks.step_batch(batch(np.array([False, True])), {"action": action})
        with pytest.raises(RecordingError, match="The episode of slot 1 has ended"):
            sinks.step_batch(batch(), {"action": action})
        sinks.discard(0)
        assert not sinks.in_progress(0)
        sinks.finish(1)
    with open_recording(tmp_path / "r") as recording:
        assert recording.seeds.tolist() == [2]
        assert recording.lengths.tolist() == [2]


def test_a_real_simulator_recorded_in_batches_and_one_by_one(tmp_path: Path) -> None:
    """FetchReach in two workers: what the batches hold, slot by slot, against the same episodes streamed through sinks."""
    config = load_sim_config("fetch_reach")
    with EnvManager(SimFactory(config.target, config.task, config.kwargs, config.extra), 4, num_workers=2) as manager:
        info = RecordingInfo(dataclasses.replace(manager.spec), {}, {"kind": "random"})
        rng, low, high = np.random.default_rng(0), manager.spec.action.low, manager.spec.action.high
        with RecordingWriter(tmp_path / "slots", info) as writer:
            sinks, batch = BatchSinks(writer, 4), manager.reset()
            kept: dict[int, list[dict[str, Any]]] = {slot: [] for slot in range(4)}
            first = {key: part.copy() for key, part in batch.observation.items()}
            for slot in range(4):
                sinks.start(slot, slot, batch.observation, slot)
            for _ in range(50):
                action = rng.uniform(low, high, (4, len(low))).astype(np.float32)
                batch = manager.step(action)
                flags = {name: getattr(batch, name) for name in ("reward", "terminated", "truncated", "success")}
                sinks.step_batch(batch, {"action": action})
                after = batch.final_observation if batch.done.any() else batch.observation
                for slot in range(4):
                    row = {"action": action[slot].copy(), **{name: part[slot].copy() for name, part in flags.items()}}
                    kept[slot].append({**row, "observation": {key: part[slot].copy() for key, part in after.items()}})
            # FetchReach has 50 steps, and all slots began together.
            assert batch.done.all()
            for slot in range(4):
                sinks.finish(slot)
        with RecordingWriter(tmp_path / "sinks", info) as writer:
            for slot in range(4):
                sink = EpisodeSink(writer, slot)
                sink.start({key: part[slot] for key, part in first.items()})
                for row in kept[slot]:
                    sink.step(**row)
                sink.finish()
    with open_recording(tmp_path / "slots") as left, open_recording(tmp_path / "sinks") as right:
        assert len(left) == len(right) == 4
        for found, expected in zip(left, right, strict=True):
            assert found.num_steps == 50
            assert_same_episode(found, expected)


def test_streamed_and_whole_are_the_same_bytes(tmp_path: Path) -> None:
    episode = make_episode(SPEC, 5, 40)
    for name in ("streamed", "whole"):
        with RecordingWriter(tmp_path / name, info_of(SPEC)) as writer:
            _ = stream(writer, episode) if name == "streamed" else writer.add(episode)
    for file in ("observation.state.npy", "action.npy", "observation.text.bin", "episodes.jsonl"):
        assert (tmp_path / "streamed/part-0000" / file).read_bytes() == (tmp_path / "whole/part-0000" / file).read_bytes(), file
