"""Steps whose outcome lies in the same arrays every time hold, after being gathered as bytes, what sinks would have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.episodes.layout import Column
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.episodes.slots import SlotSinks
from embodied_rl.episodes.steady import Places, SteadyGroup
from embodied_rl.episodes.validation import validate
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec
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


@pytest.mark.parametrize("block_bytes", [2**20, 60_000, 1])
@pytest.mark.parametrize("seed", range(4))
def test_what_steady_groups_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, seed: int) -> None:
    """Four slots play episodes of 1 to 30 steps: pairs and all four in steady groups, single ones otherwise, in any order."""
    monkeypatch.setattr("embodied_rl.episodes.slots._BLOCK_BYTES", block_bytes)
    monkeypatch.setattr("embodied_rl.episodes.slots._STEADY_BYTES", block_bytes)
    rng, slab = np.random.default_rng(seed), Slab()
    ranges = [(0, 2), (2, 2), (0, 4), (1, 3)]
    places = {part: slab.of(*part) for part in ranges}
    episodes = {number: an_episode(number, int(rng.integers(1, 31))) for number in range(24)}
    groups: dict[tuple[int, int], SteadyGroup] = {}
    with RecordingWriter(tmp_path / "r", info_of(SPEC)) as writer:
        sinks, playing, coming = SlotSinks(writer, 4), dict[int, list[int]](), iter(episodes)
        steady = 0
        while True:
            for slot in set(range(4)) - set(playing):
                if (number := next(coming, None)) is not None:
                    first = [{key: rows[:1] for key, rows in room.items()} for room in rooms_of(episodes[number])]
                    sinks.start(slot, number, first[0], 0, state=first[1])
                    playing[slot] = [number, 0]
            if not playing:
                break
            # Mostly the same pair again: only so rows of many steps are together.
            first_slot, count = ranges[int(rng.choice(4, p=[0.6, 0.2, 0.1, 0.1]))]
            chosen = list(range(first_slot, first_slot + count))
            if not set(chosen) <= playing.keys():
                chosen = [slot for slot in chosen if slot in playing]
                if not chosen:
                    continue
            group = groups.get((first_slot, count)) if len(chosen) == count and rng.random() < 0.9 else None
            final, given = put(slab, chosen, playing, episodes)
            over = [row for row, slot in enumerate(chosen) if playing[slot][1] + 1 == episodes[playing[slot][0]].num_steps]
            if group is not None:
                sinks.step_steady(group, tuple(given.values()), over, final)
                steady += 1
            else:
                rows: dict[str, Any] = {name: array[chosen] for name, array in slab.arrays.items()}
                fields: dict[str, Any] = {name: rows[name] for name in FLAGS}
                after = {name: final[name] for name in final} if over else {name: rows[name] for name in final}
                part: dict[str, Any] = by_room(after)
                assert sinks.step(np.array(chosen), **given, **fields, **part) == over
                if len(chosen) == count and (first_slot, count) not in groups:
                    made = sinks.steady(np.array(chosen), places[first_slot, count], given)
                    assert made is not None
                    groups[first_slot, count] = made
            for row, slot in enumerate(chosen):
                playing[slot][1] += 1
                if row in over:
                    sinks.finish(slot)
                    del playing[slot]
        assert steady > 20
    with open_recording(tmp_path / "r") as recording:
        assert validate(recording) == []
        assert sorted(recording.seeds) == sorted(episodes)
        for episode in recording:
            assert_same_episode(episode, episodes[episode.seed])


def an_episode(number: int, length: int) -> Any:
    rng = np.random.default_rng(number)
    return make_episode(
        SPEC, number, length, value=rng.random(length), chunk=np.arange(length) // 2, state={"q": rng.random((length + 1, 2))}
    )


def rooms_of(episode: Any) -> tuple[Any, Any]:
    return episode.observation, episode.state


def by_room(columns: dict[str, Any]) -> dict[str, Any]:
    """{room: {key: rows}} of the columns named ``room.key``."""
    return {
        room: {n.partition(".")[2]: rows for n, rows in columns.items() if n.startswith(f"{room}.")} for room in ("observation", "state")
    }


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


def test_rows_that_were_given_up_are_nobodys(tmp_path: Path) -> None:
    slab = Slab()
    with RecordingWriter(tmp_path / "r", info_of(SPEC)) as writer:
        sinks, episodes = SlotSinks(writer, 4), {number: an_episode(number, 5) for number in range(3)}
        for slot in (0, 1):
            sinks.start(
                slot, slot, {key: rows[:1] for key, rows in episodes[slot].observation.items()}, 0, state=first_state(episodes[slot])
            )
        group, playing = None, {0: [0, 0], 1: [1, 0]}
        for time in range(8):
            if time == 3:
                sinks.discard(1)
                playing[1] = [2, 0]
                sinks.start(1, 2, {key: rows[:1] for key, rows in episodes[2].observation.items()}, 0, state=first_state(episodes[2]))
            chosen = [slot for slot in (0, 1) if playing[slot][1] < 5]
            final, given = put(slab, chosen, playing, episodes)
            over = [row for row, slot in enumerate(chosen) if playing[slot][1] == 4]
            if group is None or len(chosen) < 2:
                rows: dict[str, Any] = {name: final.get(name, array[chosen]) for name, array in slab.arrays.items()}
                fields: dict[str, Any] = {name: rows[name] for name in FLAGS}
                sinks.step(np.array(chosen), **given, **fields, **by_room(rows))
                group = group or sinks.steady(np.arange(2), slab.of(0, 2), given)
                assert group is not None
            else:
                sinks.step_steady(group, tuple(given.values()), over, final)
            for row, slot in enumerate(chosen):
                playing[slot][1] += 1
                if row in over:
                    sinks.finish(slot)
    with open_recording(tmp_path / "r") as recording:
        assert recording.seeds.tolist() == [0, 2]
        for episode in recording:
            assert_same_episode(episode, episodes[episode.seed])


def first_state(episode: Any) -> dict[str, np.ndarray]:
    return {key: rows[:1] for key, rows in episode.state.items()}


def test_places_copy_what_lies_close_together_at_once() -> None:
    slab = Slab()
    own = np.arange(6, dtype=np.int16).reshape(2, 3)
    places = Places({**slab.of(2, 2), "own": own}, 5, 10**6)
    # The rows of "wide" take 6400 bytes for two slots: what lies before them and behind them is not joined to the rows of the others.
    assert len(places.copies) == 3
    assert places.max_rows == 5
    for time in range(5):
        for name, array in slab.arrays.items():
            array[2:] = 10 * time + (name == "reward")
        own += 1
        for room, source, rows in places.copies:
            room[rows[time]] = source
    for time in range(5):
        assert places["own"][time].tolist() == [[time + 1, time + 2, time + 3], [time + 4, time + 5, time + 6]]
        assert places["reward"][time].tolist() == [10 * time + 1] * 2
        assert places["observation.wide"][time].tolist() == [[[10.0 * time] * 200] * 2] * 2
        assert places["observation.flag"][time].tolist() == [time > 0] * 2
    with pytest.raises(ValueError, match="one piece"):
        Places({"strided": np.zeros((4, 4))[:, 1]}, 5, 1000)
    with pytest.raises(ValueError, match="one piece"):
        Places({"words": np.array(["a"], object)}, 5, 1000)


def test_what_was_done_is_stacked_whatever_arrays_it_comes_in() -> None:
    """Of another dtype, or not in one piece; another shape is an error that names the field."""
    columns = {"reward": Column("reward", "array", "step", "<f4"), "value": Column("value", "array", "step", "<f8", (2,))}

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


@pytest.mark.parametrize("apart", [0, 40])
def test_an_episode_that_is_much_waits_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: int) -> None:
    """Steps of 3.3 kB, of which some 900 are in one slot's group when the episode ends, more than its columns keep in memory.

    `apart`: how many steps are taken apart at the episode's beginning.
    """
    monkeypatch.setattr("embodied_rl.episodes.slots._STEADY_BYTES", 2**22)
    monkeypatch.setattr("embodied_rl.episodes.steady._MAX_ROWS", 1024)
    slab, episode = Slab(), an_episode(0, 900)
    with RecordingWriter(tmp_path / "r", info_of(SPEC), gather_s=1e9) as writer:
        sinks, playing, episodes = SlotSinks(writer, 1), {0: [0, 0]}, {0: episode, 1: an_episode(1, 1)}
        first = {key: rows[:1] for key, rows in episodes[1].observation.items()}
        sinks.start(0, 1, first, 0, state=first_state(episodes[1]))
        final, given = put(slab, [0], {0: [1, 0]}, episodes)
        fields: dict[str, Any] = {name: slab.arrays[name][:1] for name in FLAGS}
        sinks.step(np.array([0]), **given, **fields, **by_room(final))
        group = sinks.steady(np.arange(1), slab.of(0, 1), given)
        assert group is not None
        sinks.finish(0)
        sinks.start(0, 0, {key: rows[:1] for key, rows in episode.observation.items()}, 0, state=first_state(episode))
        for time in range(900):
            playing[0][1] = time
            final, given = put(slab, [0], playing, episodes)
            if time < apart:
                fields = {name: slab.arrays[name][:1] for name in FLAGS}
                sinks.step(np.array([0]), **given, **fields, **by_room(final))
            else:
                sinks.step_steady(group, tuple(given.values()), [0] if time == 899 else [], final)
        assert group.fill > 800
        sinks.finish(0)
        assert len(writer.gathering.waiting) == 2
    with open_recording(tmp_path / "r") as recording:
        assert validate(recording) == []
        for found in recording:
            assert_same_episode(found, episodes[found.seed])
