"""What a manager hands out, recorded from views that are known and, for comparison, from every batch by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.config import load_sim_config
from embodied_rl.episodes.folder import validate
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordingInfo
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.rollout.batch_sinks import BatchSinks
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.instrumented import instrumented, plain_spec, split
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds, SeedStream
from embodied_rl.types import ActionSpec, SimSpec, StepBatch, TensorSpec
from tests.episodes.episode_toys import assert_same_episode

NUM_SLOTS, STEPS = 4, 45


class Forgetful(BatchSinks):
    """Takes every batch apart."""

    def _get_to_know(self, batch: StepBatch, given: Any) -> None:
        pass


def record(folder: Path, kind: type[BatchSinks], resets: str, gather_s: float = 0.0) -> int:
    """Two groups of FetchReach with its physical state, episodes of 9 steps cut at different times; returns how often views were known.

    `resets`: "automatic"; "alone": an episode begins before the others step on; "beside": while they do.
    """
    autoreset, begun = resets == "automatic", set[int]()
    config = instrumented(load_sim_config("fetch_reach"), physics=True)
    factory = SimFactory(config.target, config.task, config.kwargs, config.extra)
    seeds, known, rng = EpisodeSeeds.training(0), 0, np.random.default_rng(0)
    with EnvManager(factory, NUM_SLOTS, num_workers=1, num_groups=2, autoreset=autoreset, max_episode_steps=9) as manager:
        action, info = manager.spec.action, RecordingInfo(plain_spec(manager.spec), {}, {"kind": "random"})
        with RecordingWriter(folder, info, duplicates="allow", gather_s=gather_s) as writer:
            sinks, episodes = kind(writer, NUM_SLOTS), [0] * NUM_SLOTS
            streams = [SeedStream(seeds, 0, slot, NUM_SLOTS) for slot in range(NUM_SLOTS)]

            def start(batch: StepBatch, row: int) -> None:
                seen, slot = split(batch.observation), int(batch.slots[row])
                sinks.start(slot, streams[slot].seed(episodes[slot]), seen.observation, row, state=seen.state)

            def step(slots: range) -> None:
                nonlocal known
                drawn = rng.uniform(action.low, action.high, (len(slots), action.dim)).astype(np.float32)
                stepping = [row for row, slot in enumerate(slots) if slot not in begun]
                if stepping:
                    manager.send([slots[row] for row in stepping], drawn[stepping])
                batch = manager.recv(slots)
                known += id(batch) in sinks._known
                for slot in begun.intersection(slots):
                    start(batch, slot - slots.start)
                begun.difference_update(slots)
                rows = None if len(stepping) == len(slots) else stepping
                given = {"action": drawn, "value": rng.random(len(slots))}
                for row in sinks.step_batch(batch, given, rows=rows) if stepping else ():
                    slot = int(batch.slots[row])
                    sinks.finish(slot)
                    episodes[slot] += 1
                    if autoreset:
                        start(batch, row)
                    elif resets == "beside":
                        manager.begin([slot], [streams[slot].seed(episodes[slot])])
                        begun.add(slot)
                    else:
                        manager.begin([slot], [streams[slot].seed(episodes[slot])])
                        start(manager.recv([slot]), 0)

            batch = manager.reset(seeds)
            for slot in range(NUM_SLOTS):
                start(batch, slot)
            for first in (1, 3):  # so that the episodes end one after another
                step(range(first, NUM_SLOTS))
            for _ in range(STEPS):
                step(range(2))
                step(range(2, NUM_SLOTS))
    return known


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What is recorded where every batch is taken apart."""

    @cache
    def recorded(resets: str) -> Path:
        folder = tmp_path_factory.mktemp(resets)
        assert record(folder / "apart", Forgetful, resets) == 0
        return folder / "apart"

    return recorded


@pytest.mark.parametrize(("resets", "gather_s"), [("automatic", 0.0), ("automatic", 1e9), ("alone", 1e9), ("beside", 0.0), ("beside", 1e9)])
def test_known_views_and_batches_taken_apart_give_the_same_episodes(
    tmp_path: Path, apart: Callable[[str], Path], resets: str, gather_s: float
) -> None:
    # Of 90 batches of groups about 20 end an episode, and each group is known from its third batch on.
    assert record(tmp_path / "known", BatchSinks, resets, gather_s) >= 2 * (STEPS - 2) - 24
    with open_recording(apart(resets)) as left, open_recording(tmp_path / "known") as right:
        assert validate(right) == []
        assert len(left) == len(right) == (16 if resets == "beside" else 20)
        assert left.seeds.tolist() == right.seeds.tolist()
        for expected, found in zip(left, right, strict=True):
            assert found.num_steps == 9
            assert found.state is not None
            assert_same_episode(found, expected)


def test_what_was_given_is_not_asked_for_again(tmp_path: Path) -> None:
    """Another set of columns than before is an error, from a known batch too."""
    config = load_sim_config("fetch_reach")
    with (
        EnvManager(SimFactory(config.target, config.task, config.kwargs, config.extra), 2, num_workers=1) as manager,
        RecordingWriter(tmp_path / "r", RecordingInfo(manager.spec, {}, {"kind": "random"})) as writer,
    ):
        sinks, batch = BatchSinks(writer, 2), manager.reset()
        for slot in range(2):
            sinks.start(slot, slot, batch.observation, slot)
        for _ in range(4):
            action = np.zeros((2, manager.spec.action.dim), np.float32)
            sinks.step_batch(manager.step(action), {"action": action})
        assert sinks._known
        with pytest.raises(Exception, match="seed 0 had no 'value' before, and has one"):
            sinks.step_batch(manager.step(action), {"action": action, "value": np.zeros(2)})
        sinks.forget_batches()
        assert not sinks._known
        for _ in range(4):
            sinks.step_batch(manager.step(action), {"action": action})
        for slot in range(2):
            sinks.finish(slot)
    with open_recording(tmp_path / "r") as recording:
        assert recording.lengths.tolist() == [8, 8]


def test_batches_of_other_arrays_each_time_are_written_as_rows_are(tmp_path: Path) -> None:
    """Three slots whose episodes end at different steps, now and then without one of them, and with snapshots in between. At first state
    and goal are one array."""
    seen_spec = {"state": TensorSpec((4,)), "goal": TensorSpec((4,)), "picture": TensorSpec((2, 2, 3), "uint8")}
    spec = SimSpec("x", seen_spec, ActionSpec.continuous([-1.0] * 2, [1.0] * 2))

    def written(folder: Path, kind: type[BatchSinks]) -> int:
        rng, moving, seeds = np.random.default_rng(0), 0, itertools.count()

        def seen(step: int) -> dict[str, np.ndarray]:
            state = rng.normal(size=(3, 4)).astype(np.float32)
            picture = rng.integers(0, 255, (3, 2, 2, 3)).astype(np.uint8)
            return {"state": state, "goal": state if step < 2 else -state, "picture": picture}

        with RecordingWriter(folder, RecordingInfo(spec, {}, {"kind": "random"}), video="raw") as writer:
            sinks, observation = kind(writer, 3), seen(0)
            for slot in range(3):
                sinks.start(slot, next(seeds), observation, slot)
            for step in range(60):
                ends = np.array([step % 7 == 6, step % 11 == 10, False])
                flags = (ends, np.zeros(3, bool), rng.random(3) < 0.2)
                reward = rng.normal(size=3).astype(np.float32)
                batch = StepBatch(np.arange(3), seen(step), reward, *flags, seen(step), ())
                rows = [0, 2] if step in (20, 21, 40) else None
                snapshots = [b"x", None, None] if step == 30 else None
                given = {"action": rng.normal(size=(3, 2)).astype(np.float32), "value": rng.random(3)}
                moving += any(known.moved is not None for known in sinks._known.values())
                for row in sinks.step_batch(batch, given, rows=rows, snapshots=snapshots):
                    sinks.finish(row)
                    sinks.start(row, next(seeds), batch.observation, row)
            sinks.finish(2)
        return moving

    assert written(tmp_path / "rows", Forgetful) == 0
    assert written(tmp_path / "moving", BatchSinks) >= 50
    with open_recording(tmp_path / "rows") as left, open_recording(tmp_path / "moving") as right:
        assert validate(right) == []
        assert left.seeds.tolist() == right.seeds.tolist()
        assert len(left) > 10
        for expected, found in zip(left, right, strict=True):
            assert_same_episode(found, expected)
