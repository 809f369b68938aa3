"""What goes over the wire comes back as it was."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from embodied_rl.agents.parsing import InvalidAction, MalformedCall, ParsedAction, ToolCall, ToolRequest, ValidAction
from embodied_rl.agents.turns import AgentEpisode, Turn, episode_of
from embodied_rl.distributed.channel import can_be_read
from embodied_rl.errors import UserError
from embodied_rl.roles import role_process
from embodied_rl.roles.role_process import run_role
from embodied_rl.roles.wire import RoleError, RoleLink, decode_error, encode_error
from embodied_rl.rollout.groups import BatchNeverFullError
from embodied_rl.sim.faults import FaultKind, FaultRecord, NonFiniteSimulationError, SimFault, SlotFault
from embodied_rl.types import Episode, EpisodeGroup


def sent(value: Any) -> Any:
    """Through a real socket."""
    ours, theirs = socket.socketpair()
    sender, receiver = RoleLink(ours, begins=True), RoleLink(theirs)
    sender.send_value(value)
    received = receiver.recv_value(10.0)
    sender.close()
    receiver.close()
    return received


def test_the_one_of_several_descriptors_that_can_be_read_is_noticed() -> None:
    """Without a limit on the wait, too; the end of the other side is something to read."""
    pairs = [socket.socketpair() for _ in range(3)]
    ours = [one.fileno() for one, _ in pairs]
    assert not can_be_read(*ours, timeout_s=0.0)
    assert not can_be_read(timeout_s=0.01)
    pairs[2][1].send(b"x")
    assert can_be_read(*ours, timeout_s=None)
    assert [can_be_read(one, timeout_s=0.0) for one in ours] == [False, False, True]
    pairs[0][1].close()
    assert can_be_read(ours[0], timeout_s=None)
    for one, other in pairs:
        one.close()
        other.close()


def same(one: Any, other: Any) -> bool:
    """Of one type and with the same bits, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.dtype == object:
            return all(same(a, b) for a, b in zip(one.reshape(-1), other.reshape(-1), strict=True))
        return one.tobytes() == other.tobytes()
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "three", True, (4, [])],
        {1: "a key that is no text", "$": "array", ("x", 2): None},
        {"nan": float("nan"), "exact": 0.1 + 0.2, "huge": 2**80},
        np.float64(0.1),
        np.int32(-3),
        np.array([0.1, np.nan, -0.0], np.float32),
        np.arange(24, dtype=np.int64).reshape(2, 3, 4)[:, ::2].transpose(2, 0, 1),
        np.arange(3000, dtype=np.float64).reshape(30, 100)[:, ::2],
        np.zeros((0, 3), np.uint8),
        np.array(True),
        np.array(["a", "longer"]),
        np.array(["text", None, {"of": [1]}, np.arange(3)], object),
        np.array([["a", "b"], ["c", "d"]], object),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values(value: Any) -> None:
    assert same(sent(value), value)


def test_arrays_have_their_own_memory() -> None:
    value = [np.arange(5), np.ones(2, np.float32), np.arange(5, 9).reshape(2, 2), np.arange(2000), np.zeros(0, np.int64)]
    again = sent(value)
    assert same(again, value)
    again[0][:] = -1
    assert same(again[2], value[2])
    assert again[0].base is None, "one array would keep all of them"


def test_groups_of_episodes() -> None:
    def episode(seed: int) -> Episode:
        return Episode(
            observation={"state": np.random.default_rng(seed).random((3, 2), np.float32), "text": np.array(["a", "b", "c"], object)},
            action=np.array([[0], [1], [0]]),
            log_prob=np.full((3, 1), -0.7, np.float32),
            reward=np.array([1, 2, 3], np.float32),
            terminated=False,
            truncated=True,
            success=True,
            seed=7,
            domain="toy",
            policy_version=np.array([1, 1, 2]),
            final_observation={"state": np.zeros(2, np.float32), "text": np.array("the end", object)},
            metadata={"final_info": {"score": np.float32(0.5)}, "greedy": False},
        )

    group = EpisodeGroup(number=3, domain="toy", seed=7, created_version=1, episodes=(episode(0), episode(1)))
    assert same(sent([group]), [group])


def test_episodes_of_agents() -> None:
    def turn(parsed: ParsedAction, version: int, **options: Any) -> Turn:
        return Turn(
            observation="a board",
            prompt_ids=np.array([4, 5, 6]),
            token_ids=np.array([7, 8]),
            log_prob=np.array([-0.1, -2.5], np.float32),
            version=np.array([version, version + 1]),
            answer="left",
            parsed=parsed,
            reward=-0.1,
            game_reward=0.1 + 0.2,
            **options,
        )

    calls = ToolRequest((ToolCall("calculator", {"expression": "6 * 7", "digits": [1, None]}), MalformedCall("not closed", "{")))
    turns = [
        turn(ValidAction("left"), 3, dropped=2),
        turn(InvalidAction("cut", "lef"), 4, images=(np.arange(12, dtype=np.uint8).reshape(2, 2, 3),)),
        turn(calls, 4),
    ]
    whole = episode_of(turns, terminated=True, truncated=False, success=True, seed=5, domain="lake", final_text="goal", greedy=True)
    group = EpisodeGroup(number=3, domain="lake", seed=5, created_version=3, episodes=(whole,))
    again = sent([group])
    assert same(again, [group])
    assert type(again[0].episodes[0]) is AgentEpisode
    assert again[0].episodes[0].turns[2].parsed == calls
    assert again[0].episodes[0].game_return == whole.game_return


def test_a_text_without_axes_in_an_observation() -> None:
    assert sent({"text": "plain"}) == {"text": "plain"}


def test_tensors_and_records_of_faults() -> None:
    record = FaultRecord(FaultKind.DIED, 1, 42, "why", (3,), (SlotFault(3, 0, 9, 5, "restored"),), 1, 0.25)
    assert sent(record) == record
    tensors = [
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        torch.tensor(7),
        torch.tensor([True]).expand(3),
        torch.zeros(0, 4, dtype=torch.float64),
        torch.from_numpy(np.arange(0)),
    ]
    torch.testing.assert_close(sent(tensors), tensors, rtol=0, atol=0, equal_nan=True)


def test_unknown_objects_arrive_as_text_and_unknown_types_are_refused() -> None:
    assert sent({"what": slice(1, 2)}) == {"what": "slice(1, 2, None)"}
    assert sent([{object}]) == [repr({object})]
    ours, theirs = socket.socketpair()
    sender, receiver = RoleLink(ours, begins=True), RoleLink(theirs)
    sender.send_bytes({"value": ["D", "Popen", {"args": "true"}]}, b"")
    with pytest.raises(ValueError, match=r"unknown .*'Popen'"):
        receiver.recv_value(10.0)
    for one in (sender, receiver):
        one.close()


class Echo:
    """A role that answers with what it gets. Implements `Role`."""

    asked: ClassVar[dict[str, Callable[..., Any]]] = {"echo": lambda value: value}
    works_after = ()

    def __init__(self, link: RoleLink) -> None:
        self.close = link.close

    def pump(self) -> bool:
        return False


def test_large_requests_and_large_answers_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds more than a socket does, and no answer is read before all requests are sent. The role runs in a thread here."""

    def start(module: str, descriptor: int, **_: object) -> Any:
        served = threading.Thread(target=run_role, args=(os.dup(descriptor), Echo), daemon=True)
        served.start()
        return SimpleNamespace(wait=served.join, returncode=0)

    monkeypatch.setattr(role_process, "start_module", start)
    role = role_process.RoleProcess("", "The role")
    calls: list[role_process.RoleCall] = []
    rooms = [np.full(2**20, number, np.uint8) for number in range(4)]
    asking = threading.Thread(target=lambda: calls.extend(role.begin("echo", value=room) for room in rooms), daemon=True)
    asking.start()
    asking.join(20.0)
    assert len(calls) == len(rooms), "both ends wait"
    for call, room in zip(calls, rooms, strict=True):
        assert np.array_equal(call.value(), room)
    role.close()


@pytest.mark.parametrize(
    "error",
    [
        UserError("mend it"),
        BatchNeverFullError("never"),
        SimFault(FaultKind.DIED, 2, "its traceback", slots=[1], seeds=[7], steps=[3]),
        NonFiniteSimulationError(FaultKind.NON_FINITE, 2, "NaN", slots=[1], seeds=[7], steps=[3]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_raised_as_what_they_were(error: Exception) -> None:
    again = decode_error(json.loads(json.dumps(encode_error(error))))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert {name: value for name, value in vars(again).items() if name != "batch"} == {
        name: value for name, value in vars(error).items() if name != "batch"
    }


def test_what_is_unexpected_brings_its_traceback() -> None:
    empty: dict[str, int] = {}
    try:
        empty["missing"]
    except KeyError as error:
        again = decode_error(encode_error(error))
    assert isinstance(again, RoleError)
    assert "test_wire.py" in str(again)
    assert "KeyError: 'missing'" in str(again)
