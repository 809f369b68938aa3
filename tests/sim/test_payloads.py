"""Text, lists and images of varying size between a simulator and the manager."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.transport import INFO_BUFFER, VariableLengthBuffers, buffer_fields, plain_info
from embodied_rl.types import VariableSpec

pytestmark = pytest.mark.usefixtures("forked")

TALKING = "tests.sim.toy:TalkingSim"


def buffers(spec: VariableSpec, slots: int = 2) -> VariableLengthBuffers:
    arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in buffer_fields("part", spec, slots).items()}
    return VariableLengthBuffers("part", spec, arrays, 0, slots)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("text", ""), ("text", "Grüße 🤖\x00"), ("json", {"a": [1, 2.5, None, True], "b": {}}), ("json", None), ("json", [])],
)
def test_values_come_back_as_they_were(kind: str, value: object) -> None:
    own = buffers(VariableSpec(kind, 100))  # type: ignore[arg-type]
    own.write(1, value)
    assert own.read(1) == value
    assert own.read(0) is None


@pytest.mark.parametrize(
    "array", [np.zeros((0, 3)), np.array(3, np.int8), np.arange(24, dtype=">f4").reshape(2, 3, 4)[:, ::2], np.array([True])]
)
def test_arrays_keep_shape_and_dtype(array: np.ndarray) -> None:
    own = buffers(VariableSpec("array", 1000))
    own.write(0, array)
    back = own.read(0)
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(back, array)


def test_a_shorter_value_leaves_nothing_of_a_longer_one() -> None:
    own = buffers(VariableSpec("text", 100))
    own.write(0, "a long text")
    own.write(0, "short")
    assert own.read(0) == "short"


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("text", "x" * 100, r"'part' of slot 0 takes 101 bytes and its buffer is 100"),
        ("text", 3, "must be a str, got int"),
        ("json", {1, 2}, "what JSON can"),
        ("array", np.zeros(100), "takes .* bytes and its buffer is 100"),
        ("array", np.array(["a"]), "numeric array"),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_sizes(kind: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        buffers(VariableSpec(kind, 100)).write(0, value)  # type: ignore[arg-type]


def test_an_info_is_cut_to_what_can_travel() -> None:
    info = {"n": np.float32(2.5), "ok": np.bool_(True), "t": (1, 2), "big": np.zeros(65), "deep": {"x": 1, "o": object()}, 3: "three"}
    assert plain_info(info) == {"n": 2.5, "ok": True, "t": [1, 2], "deep": {"x": 1}, "3": "three"}
    assert plain_info(None) == {}
    assert plain_info({"novel": "x" * INFO_BUFFER.max_bytes, "kept": 1}) == {"kept": 1}


def test_a_conversation_crosses_the_processes() -> None:
    with EnvManager(SimFactory(TALKING, kwargs={"words": 2}), 3, num_workers=2) as manager:
        first = manager.reset()
        assert [text.startswith("seed ") for text in first.observation["text"]] == [True] * 3
        batch = manager.step(["ja", "nein", "Größe"])
        assert batch.observation["text"].tolist() == ["ja ja", "nein nein", "Größe Größe"]
        assert batch.observation["lengths"].tolist() == [[2], [4], [5]]
        assert [picture.shape for picture in batch.observation["picture"]] == [(2, 5, 3)] * 3
        assert batch.reward.tolist() == [2, 4, 5]
        assert batch.observation["state"].tolist() == [[1], [1], [1]]
        manager.send([2], ["allein"])
        alone = manager.recv([2])
        assert alone.observation["text"].tolist() == ["allein allein"]
        assert alone.observation["picture"][0].shape == (3, 5, 3)
        for word in ("c", "d"):
            manager.send([2], [word])
            alone = manager.recv([2])
        assert alone.terminated.tolist() == [True]
        assert alone.final_observation["text"].tolist() == ["d d"]
        assert alone.final_observation["lengths"].tolist() == [[5, 6, 1, 1]]
        assert alone.observation["text"][0].startswith("seed ")
        assert alone.observation["lengths"].tolist() == [[]]
        shown = manager.texts(7)
        assert (manager.texts(), len(set(shown))) == (shown[:3], 7), "other processes have the further slots"
    with EnvManager(SimFactory(TALKING, kwargs={"words": 2}), 7) as manager:
        assert manager.texts() == shown


def test_a_conversation_survives_a_killed_worker_and_an_offload() -> None:
    import psutil

    transcripts = []
    for trouble in (False, True):
        with EnvManager(SimFactory(TALKING), 2, num_workers=1) as manager:
            manager.reset()
            seen = []
            for number in range(10):
                if trouble and number == 3:
                    psutil.Process(manager.worker_pids()[0]).kill()
                if trouble and number == 6:
                    manager.offload()
                    manager.onload()
                batch = manager.step([f"{number} one", f"{number} two"])
                seen.append((batch.observation["text"].tolist(), batch.observation["lengths"].tolist(), batch.reward.tolist()))
            transcripts.append(seen)
            assert all(slot.drift in (None, 0.0) for record in manager.fault_records for slot in record.slots)
    assert transcripts[0] == transcripts[1]


def test_an_observation_that_outgrows_its_room_names_the_key_and_the_sizes() -> None:
    with EnvManager(SimFactory(TALKING, kwargs={"words": 30, "room": 100}), 2, num_workers=1) as manager:
        manager.reset()
        with pytest.raises(UserError, match=r"'observation/text' of slot 1 takes 150 bytes and its buffer is 100"):
            manager.step(["a", "four"])


def test_a_text_action_that_outgrows_its_room_is_refused_before_it_is_sent() -> None:
    with EnvManager(SimFactory(TALKING), 1) as manager:
        manager.reset()
        with pytest.raises(UserError, match="'action' of slot 0 takes 101 bytes and its buffer is 64"):
            manager.step(["x" * 100])
        assert manager.step(["fine"]).observation["text"].tolist() == ["fine"]
        with pytest.raises(ValueError, match="One text for each of 1 slots"):
            manager.step("fine")
