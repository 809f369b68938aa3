"""Steps whose outcome lies in the same arrays every time hold, after being gathered as bytes, what sinks would have written."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.episodes.folder import validate
from embodied_rl.episodes.layout import Column
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.episodes.sink import SteadyGroup
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.errors import UserError
from embodied_rl.rollout.batch_sinks import BatchSinks
from embodied_rl.sim.instrumented import PHYSICS
from embodied_rl.types import ActionSpec, SimSpec, StepBatch, TensorSpec
from tests.episodes.episode_toys import assert_same_episode, info_of, make_episode

SPEC = SimSpec(
    "toy",
    {"state": TensorSpec((3,)), "flag": TensorSpec((), "bool"), "wide": TensorSpec((2, 200), "float64")},
    ActionSpec.continuous([-1, -2], [1, 2]),
)
FLAGS = ("reward", "terminated", "truncated", "success")


class Slab:
    """Arrays of four slots in one block of memory, as workers leave their outcome."""

    def __init__(self) -> None:
        parts: dict[str, tuple[tuple[int, ...], str]] = {
            "reward": ((), "float32"),
            "terminated": ((), "bool"),
            "truncated": ((), "bool"),
            "success": ((), "bool"),
        }
        parts |= {f"observation.{key}": (part.shape, part.dtype) for key, part in SPEC.tensors.items()}
        parts |= {"state.q": ((2,), "float64")}
        memory, offset, self.arrays = np.zeros(2**16, np.uint8), 64, dict[str, np.ndarray]()
        for name, (shape, dtype) in parts.items():
            size = 4 * int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
            self.arrays[name] = memory[offset : offset + size].view(dtype).reshape(4, *shape)
            offset += -(-size // 64) * 64

    def of(self, first: int, count: int) -> dict[str, np.ndarray]:
        return {name: array[first : first + count] for name, array in self.arrays.items()}

    def batch(self, first: int, count: int) -> StepBatch:
        """What a manager hands out of neighbouring slots."""
        arrays = self.of(first, count)
        seen = as_seen({name: array for name, array in arrays.items() if "." in name})
        return StepBatch(np.arange(first, first + count), seen, *(arrays[name] for name in FLAGS), final_observation=seen, episodes=())


@pytest.mark.parametrize("block_bytes", [2**20, 60_000, 1])
@pytest.mark.parametrize("seed", range(4))
def test_what_steady_groups_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, seed: int) -> None:
    """Four slots play episodes of 1 to 30 steps: pairs and all four in steady groups, single ones otherwise, in any order."""
    monkeypatch.setattr("embodied_rl.rollout.batch_sinks._STEADY_BYTES", block_bytes)
    rng, slab = np.random.default_rng(seed), Slab()
    ranges = [(0, 2), (2, 2), (0, 4), (1, 3)]
    batches = {part: slab.batch(*part) for part in ranges}
    episodes = {number: an_episode(number, int(rng.integers(1, 31))) for number in range(24)}
    with RecordingWriter(tmp_path / "r", info_of(SPEC)) as writer:
        sinks, playing, coming = BatchSinks(writer, 4), dict[int, list[int]](), iter(episodes)
        steady = 0
        while True:
            for slot in set(range(4)) - set(playing):
                if (number := next(coming, None)) is not None:
                    begin(sinks, slot, number, episodes[number])
                    playing[slot] = [number, 0]
            if not playing:
                break
            # Mostly the same pair again: only so rows of many steps are together.
            part = ranges[int(rng.choice(4, p=[0.6, 0.2, 0.1, 0.1]))]
            chosen = [slot for slot in range(part[0], sum(part)) if slot in playing]
            if not chosen:
                continue
            batch = batches[part]
            steady += id(batch) in sinks._known
            if len(chosen) < part[1] or rng.random() < 0.1:
                batch = apart(slab, chosen)
            step(sinks, batch, chosen, playing, episodes, slab)
        assert steady > 20
    with open_recording(tmp_path / "r") as recording:
        assert validate(recording) == []
        assert sorted(recording.seeds) == sorted(episodes)
        for episode in recording:
            assert_same_episode(episode, episodes[episode.seed])


def begin(sinks: BatchSinks, slot: int, number: int, episode: Any) -> None:
    first, state = ({key: rows[:1] for key, rows in room.items()} for room in (episode.observation, episode.state))
    sinks.start(slot, number, first, 0, state=state)


def as_seen(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns under the names that an instrumented simulator shows them by."""
    return {name.replace("observation.", "").replace("state.", PHYSICS): rows for name, rows in columns.items()}


def apart(slab: Slab, slots: list[int]) -> StepBatch:
    """A batch of these slots that lies elsewhere; `step` fills it."""
    arrays = {name: array[slots] for name, array in slab.arrays.items()}
    seen = as_seen({name: array for name, array in arrays.items() if "." in name})
    return StepBatch(np.array(slots), seen, *(arrays[name] for name in FLAGS), final_observation=seen, episodes=())


def step(sinks: BatchSinks, batch: StepBatch, slots: list[int], playing: Any, episodes: Any, slab: Slab) -> None:
    """One step of some slots' episodes, with the manager's batch or one that lies apart; those that end are finished."""
    final, given = put(slab, slots, playing, episodes)
    if not np.shares_memory(batch.reward, slab.arrays["reward"]):
        batch = apart(slab, slots)
    over = [row for row, slot in enumerate(slots) if playing[slot][1] + 1 == episodes[playing[slot][0]].num_steps]
    if over:
        batch = dataclasses.replace(batch, final_observation=as_seen(final))
    assert sinks.step_batch(batch, given) == over
    sinks.settle()
    for row, slot in enumerate(slots):
        playing[slot][1] += 1
        if row in over:
            sinks.finish(slot)
            del playing[slot]


def an_episode(number: int, length: int) -> Any:
    rng = np.random.default_rng(number)
    return make_episode(
        SPEC, number, length, value=rng.random(length), chunk=np.arange(length) // 2, state={"q": rng.random((length + 1, 2))}
    )


def put(slab: Slab, slots: list[int], playing: Any, episodes: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Leave a step's outcome in the slab, with nonsense where an episode is over; returns what is right there, and what was done."""
    final = {name: np.zeros((len(slots), *array.shape[1:]), array.dtype) for name, array in slab.arrays.items() if "." in name}
    given: dict[str, list[Any]] = {"action": [], "value": [], "chunk": []}
    for row, slot in enumerate(slots):
        episode, time = episodes[playing[slot][0]], playing[slot][1]
        for name in FLAGS:
            slab.arrays[name][slot] = getattr(episode, name)[time]
        for name in final:
            room, _, key = name.partition(".")
            final[name][row] = slab.arrays[name][slot] = getattr(episode, room)[key][time + 1]
            if time + 1 == episode.num_steps:
                slab.arrays[name][slot] = 77
        for name, values in given.items():
            values.append(getattr(episode, name)[time])
    return final, {name: np.stack(values) for name, values in given.items()}


def test_rows_that_were_given_up_are_not_written(tmp_path: Path) -> None:
    slab = Slab()
    batch = slab.batch(0, 2)
    with RecordingWriter(tmp_path / "r", info_of(SPEC)) as writer:
        sinks, episodes = BatchSinks(writer, 4), {number: an_episode(number, 8) for number in range(3)}
        playing = {0: [0, 0], 1: [1, 0]}
        for slot in playing:
            begin(sinks, slot, slot, episodes[slot])
        for time in range(13):
            if time == 5:
                assert sinks._known
                sinks.discard(1)
                playing[1] = [2, 0]
                begin(sinks, 1, 2, episodes[2])
            step(sinks, batch if len(playing) == 2 else apart(slab, [1]), sorted(playing), playing, episodes, slab)
    with open_recording(tmp_path / "r") as recording:
        assert recording.seeds.tolist() == [0, 2]
        for episode in recording:
            assert_same_episode(episode, episodes[episode.seed])


def test_small_and_large_arrays_are_kept_as_they_are() -> None:
    """What "wide" takes for two slots, 6400 bytes, is copied apart from the rest."""
    slab, own = Slab(), np.arange(6, dtype=np.int16).reshape(2, 3)
    outcome = {**slab.of(2, 2), "own": own}
    columns = tuple(Column(name, "array", "step", array.dtype.str, array.shape[1:]) for name, array in outcome.items())
    steady = SteadyGroup([2, 3], outcome, [], columns, 5 * sum(array.nbytes for array in outcome.values()))
    assert steady.max_rows == 5
    for time in range(5):
        for name, array in slab.arrays.items():
            array[2:] = 10 * time + (name == "reward")
        own += 1
        steady.keep(())
    found = dict(steady.of_slot(1))
    assert found["own"].tolist() == [[time + 4, time + 5, time + 6] for time in range(5)]
    assert found["reward"].tolist() == [10 * time + 1 for time in range(5)]
    assert found["observation.wide"].tolist() == [[[10.0 * time] * 200] * 2 for time in range(5)]
    assert found["observation.flag"].tolist() == [time > 0 for time in range(5)]
    for array in (np.zeros((4, 4))[:, 1], np.array(["a"], object)):
        with pytest.raises(ValueError, match="one piece"):
            SteadyGroup([0], {"reward": array}, [], (Column("reward", "array", "step", "<f8"),), 1000)


def test_what_was_done_is_stacked_whatever_arrays_it_comes_in() -> None:
    """Of another dtype, or not in one piece; another shape is an error that names the field."""
    columns = Column("reward", "array", "step", "<f4"), Column("value", "array", "step", "<f8", (2,))

    def group() -> SteadyGroup:
        return SteadyGroup([0, 1], {"reward": np.array([1.0, 2.0], np.float32)}, ["value"], columns, 10**6)

    right, steady = np.array([[1.5, 2.5], [3.5, 4.5]]), group()
    for rows in (right, right.T.copy().T, right.astype(np.float32), right.tolist()):
        steady.keep((rows,))
    found = dict(steady.of_slot(1))
    assert found["value"].tolist() == [[3.5, 4.5]] * 4
    assert found["value"].dtype == np.float64
    assert found["reward"].tolist() == [2.0] * 4
    for wrong in (right[:1], right[:, :1], None):
        steady = group()
        steady.keep((right,))
        with pytest.raises(RecordingError, match=r"Field 'value' must be \[2, 2\], got \["):
            steady.keep((wrong,))


@pytest.mark.parametrize("apart_steps", [0, 40])
def test_an_episode_that_is_much_waits_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart_steps: int) -> None:
    """Steps of 3.3 kB, of which some 900 are in one slot's group when the episode ends, more than its columns keep in memory.

    `apart_steps`: how many steps are taken apart at the episode's beginning.
    """
    monkeypatch.setattr("embodied_rl.rollout.batch_sinks._STEADY_BYTES", 2**22)
    monkeypatch.setattr("embodied_rl.episodes.sink._MAX_ROWS", 1024)
    slab = Slab()
    batch, episodes = slab.batch(0, 1), {0: an_episode(0, 900), 1: an_episode(1, 4)}
    with RecordingWriter(tmp_path / "r", info_of(SPEC), gather_s=1e9) as writer:
        sinks, playing = BatchSinks(writer, 1), {0: [1, 0]}
        begin(sinks, 0, 1, episodes[1])
        for _ in range(4):
            step(sinks, batch, [0], playing, episodes, slab)
        (known,) = sinks._known.values()
        playing[0] = [0, 0]
        begin(sinks, 0, 0, episodes[0])
        for time in range(900):
            if time == 899:
                assert known.group.fill > 800
            step(sinks, apart(slab, [0]) if time < apart_steps else batch, [0], playing, episodes, slab)
        assert len(writer.gathering.waiting) == 2
    with open_recording(tmp_path / "r") as recording:
        assert validate(recording) == []
        for found in recording:
            assert_same_episode(found, episodes[found.seed])


@pytest.mark.parametrize(("spill_bytes", "written"), [(20_000, [1, 2]), (15_000, [2])])
def test_a_full_disk_does_not_lose_what_others_have_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spill_bytes: int, written: list[int]
) -> None:
    """Slot 0 has so many rows that they belong in a file, which cannot be made; slot 1 finished two episodes beside it.

    With 15 kB, the first and longer of these belongs in a file, too.
    """
    slab, episodes = Slab(), {number: an_episode(number, length) for number, length in enumerate((90, 5, 3, 4))}
    batch, playing = slab.batch(0, 2), {0: [0, 0], 1: [1, 0]}

    def is_full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with RecordingWriter(tmp_path / "r", info_of(SPEC), gather_s=1e9) as writer:
        sinks = BatchSinks(writer, 2)
        begin(sinks, 0, 0, episodes[0])
        for number in (1, 2, 3):
            playing[1] = [number, 0]
            begin(sinks, 1, number, episodes[number])
            for _ in range((5, 3, 2)[number - 1]):
                step(sinks, batch, [0, 1], playing, episodes, slab)
        monkeypatch.setattr("embodied_rl.episodes.buffers.tempfile.TemporaryFile", is_full)
        for module in ("sink", "buffers"):
            monkeypatch.setattr(f"embodied_rl.episodes.{module}.SPILL_BYTES", spill_bytes)
        with contextlib.suppress(UserError):
            writer.flush()
        with pytest.raises(UserError, match="No space left"):
            step(sinks, batch, [0, 1], playing, episodes, slab)
    with open_recording(tmp_path / "r") as recording:
        assert recording.seeds.tolist() == written
        for found in recording:
            assert_same_episode(found, episodes[found.seed])
