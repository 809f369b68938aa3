"""The ground of the environment manager: memory, doorbells, cores and the socket, each on its own."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.distributed import channel
from embodied_rl.distributed.channel import Channel, ChannelClosed, ChannelGarbled
from embodied_rl.sim import affinity, transport
from embodied_rl.sim.affinity import available_cores
from embodied_rl.sim.transport import Doorbell, Slab, slab_layout
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec

ROOT = Path(__file__).resolve().parents[2]


# ---- layout and slab ------------------------------------------------------------------------------------------------


def places(slab: Slab) -> dict[str, int]:
    """Where each array begins, counted from the first."""
    first = min(array.ctypes.data for array in slab.arrays.values())
    return {name: array.ctypes.data - first for name, array in slab.arrays.items()}


def test_fields_begin_at_cache_lines() -> None:
    slab = Slab(
        {
            "a": ((3,), "uint8"),  # 3 bytes
            "b": ((2, 8), "float32"),  # 2 * 8 * 4 = 64 bytes, exactly one line
            "c": ((5, 13), "uint8"),  # 65 bytes, one too many
            "d": ((0, 4), "float64"),  # nothing, which has a place all the same
            "e": ((), "int64"),  # one number
            "f": ((1,), "bool"),
        }
    )
    assert places(slab) == {"a": 0, "b": 64, "c": 128, "d": 256, "e": 320, "f": 384}
    assert [(array.shape, array.dtype.name) for array in slab.arrays.values()][-2:] == [((), "int64"), ((1,), "bool")]
    assert os.fstat(slab.fd).st_size == 448
    slab.close()


def test_slab_has_a_row_per_slot_and_a_line_per_worker() -> None:
    spec = SimSpec("t", {"state": TensorSpec((3,)), "rgb": TensorSpec((4, 4, 3), "uint8")}, ActionSpec.continuous([-1, -1], [1, 1]))
    layout = slab_layout(spec, num_slots=5, num_workers=3)
    assert layout["action"] == ((5, 2), "float32")
    for name in ("observation", "final_observation"):
        assert layout[f"{name}/state"] == ((5, 3), "float32")
        assert layout[f"{name}/rgb"] == ((5, 4, 4, 3), "uint8")
    for name in ("worker_doorbell", "worker_waiting", "control_pending", "failed"):
        (workers, words), dtype = layout[name]
        assert (workers, words * np.dtype(dtype).itemsize) == (3, 64)
    slab = Slab(layout)
    ends = sorted((place, place + slab.arrays[name].nbytes) for name, place in places(slab).items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert ends[-1][1] <= os.fstat(slab.fd).st_size
    slab.close()
    discrete = slab_layout(SimSpec("t", {"state": TensorSpec((3,))}, ActionSpec.discrete(4)), 5, 1)
    assert discrete["action"] == ((5, 1), "int64")


def test_slab_is_the_same_memory_through_another_descriptor() -> None:
    layout = {"observation/state": ((4, 2), "float32"), "observation/rgb": ((4, 3), "uint8"), "reward": ((4,), "float64")}
    ours = Slab(layout)
    theirs = Slab(layout, os.dup(ours.fd))
    ours.arrays["reward"][:] = [1.0, 2.0, 3.0, 4.0]
    theirs.arrays["observation/state"][2] = (5.0, 6.0)
    np.testing.assert_array_equal(theirs.arrays["reward"], [1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(ours.arrays["observation/state"], [[0, 0], [0, 0], [5, 6], [0, 0]])
    assert not ours.arrays["observation/rgb"].any()
    rows = ours.group("observation", 1, 3)
    assert set(rows) == {"state", "rgb"}
    np.testing.assert_array_equal(rows["state"], [[0, 0], [5, 6]])
    rows["state"][0] = 7.0
    np.testing.assert_array_equal(theirs.arrays["observation/state"][1], [7.0, 7.0])
    ours.close()
    theirs.close()


def test_views_outlive_a_closed_slab() -> None:
    slab = Slab({"x": ((1000,), "float64")})
    fd, view = slab.fd, slab.arrays["x"][10:20]
    view[:] = np.arange(10.0)
    slab.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    np.testing.assert_array_equal(view, np.arange(10.0))
    view[3] = 42.0
    assert view[3] == 42.0
    # A second time does nothing, even though the descriptor's number is somebody else's by now.
    with open(os.devnull) as other:
        slab.close()
        os.fstat(other.fileno())


def test_slabs_leave_no_name_and_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    names = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    slabs = [Slab({"x": ((1 << 18,), "float64")}) for _ in range(8)]
    if names:
        assert not {name for name in set(os.listdir("/dev/shm")) - names if "embodied" in name}
    for slab in slabs:
        slab.close()
    del slabs, slab
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) <= before  # fewer where garbage of other tests went meanwhile


# ---- doorbell -----------------------------------------------------------------------------------------------------------


def make_doorbell() -> tuple[Slab, Doorbell, np.ndarray]:
    slab = Slab({"word": ((1,), "uint32"), "waiting": ((1,), "uint32"), "flag": ((1,), "uint8")})
    return slab, Doorbell(slab.arrays["word"], slab.arrays["waiting"]), slab.arrays["flag"]


def test_bell_that_is_ready_does_not_wait() -> None:
    _, doorbell, _ = make_doorbell()
    assert doorbell.wait(lambda: True, deadline=0.0)  # long past


@pytest.mark.parametrize("patience_s", [0.0, 0.05, 0.3])
def test_bell_gives_up_at_its_deadline(patience_s: float) -> None:
    slab, doorbell, flag = make_doorbell()
    started = time.perf_counter()
    assert not doorbell.wait(lambda: bool(flag[0]), started + patience_s)
    waited = time.perf_counter() - started
    assert waited >= patience_s
    assert slab.arrays["waiting"][0] == 0  # nobody need ring any more


def test_blocked_waiter_looks_after_its_peer() -> None:
    _, doorbell, flag = make_doorbell()
    calls: list[float] = []

    def look() -> None:
        calls.append(time.perf_counter())
        flag[0] = len(calls) == 13

    started = time.perf_counter()
    assert doorbell.wait(lambda: bool(flag[0]), started + 120.0, look)
    # Every 20 ms of blocking, later on a busy machine.
    assert len(calls) == 13
    assert calls[-1] - started >= 12 * 0.02
    flag[0] = 0

    def peer_is_dead() -> None:
        raise ChannelClosed("gone")

    with pytest.raises(ChannelClosed, match="gone"):
        doorbell.wait(lambda: bool(flag[0]), time.perf_counter() + 60.0, peer_is_dead)


@pytest.mark.skipif(transport._FUTEX_SYSCALL is None, reason="no futex here: waiters nap instead")
def test_ring_wakes_a_blocked_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ring and nothing else: a block would last beyond the test."""
    monkeypatch.setattr(transport, "_BLOCK_SLICE_S", 3600.0)
    slab, doorbell, flag = make_doorbell()
    outcome: list[bool] = []

    def wait() -> None:
        outcome.append(doorbell.wait(lambda: bool(flag[0]), time.perf_counter() + 3600.0))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    limit = time.perf_counter() + 240.0
    while not slab.arrays["waiting"][0] and time.perf_counter() < limit:
        time.sleep(0.001)
    time.sleep(0.05)  # from announcing to sleeping
    assert waiter.is_alive()
    # A ring without the thing waited for must not let it through.
    doorbell.ring()
    time.sleep(0.05)
    assert waiter.is_alive()
    flag[0] = 1
    doorbell.ring()
    waiter.join(240.0)
    assert outcome == [True]
    assert slab.arrays["waiting"][0] == 0


WAITER = """
import sys, time
from embodied_rl.sim.transport import Doorbell, Slab
import embodied_rl.sim.transport as transport
transport._BLOCK_SLICE_S = float(sys.argv[2])
slab = Slab({"word": ((1,), "uint32"), "waiting": ((1,), "uint32"), "flag": ((1,), "uint8")}, int(sys.argv[1]))
flag = slab.arrays["flag"]
print("here", flush=True)
found = Doorbell(slab.arrays["word"], slab.arrays["waiting"]).wait(lambda: flag[0] == 7, time.perf_counter() + 3600.0)
print(found, flush=True)
"""


@pytest.mark.parametrize("slice_s", [3600.0, 0.02])
def test_ring_wakes_another_process(slice_s: float) -> None:
    """Once by the ring alone, and once as it is, where the slices also bound a wake-up that was missed."""
    if slice_s > 1 and transport._FUTEX_SYSCALL is None:
        pytest.skip("no futex here: waiters nap instead")
    slab, doorbell, flag = make_doorbell()
    command = [sys.executable, "-c", WAITER, str(slab.fd), str(slice_s)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, pass_fds=[slab.fd], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "here\n"
            limit = time.perf_counter() + 240.0
            while not slab.arrays["waiting"][0] and time.perf_counter() < limit:
                time.sleep(0.001)
            assert slab.arrays["waiting"][0] == 1
            time.sleep(0.05)
            flag[0] = 7
            doorbell.ring()
            assert process.communicate(timeout=240)[0] == "True\n"
        finally:
            process.kill()
    slab.close()


@pytest.mark.parametrize("spins", [True, False])
def test_two_sides_hand_over_without_losing_a_turn(monkeypatch: pytest.MonkeyPatch, spins: bool) -> None:
    """400 turns each way, by rings alone where there is a futex: a block would last beyond the deadline, and so would a lost wake-up."""
    monkeypatch.setattr(transport, "_BLOCK_SLICE_S", 3600.0)
    slab = Slab(dict.fromkeys(("word_a", "wait_a", "word_b", "wait_b", "turn"), ((1,), "uint32")))
    arrays = slab.arrays
    ours, theirs = (Doorbell(arrays[f"word_{side}"], arrays[f"wait_{side}"], spins=spins) for side in "ab")
    turn = arrays["turn"]
    deadline = time.perf_counter() + 400.0
    late = []

    def other() -> None:
        for number in range(400):
            if not theirs.wait(lambda number=number: turn[0] == 2 * number + 1, deadline):
                late.append(number)
                return
            turn[0] = 2 * number + 2
            ours.ring()

    thread = threading.Thread(target=other)
    thread.start()
    for number in range(400):
        turn[0] = 2 * number + 1
        theirs.ring()
        assert ours.wait(lambda number=number: turn[0] == 2 * number + 2, deadline), f"turn {number} did not come back"
    thread.join(400.0)
    assert not late
    assert turn[0] == 800


# ---- cores ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose scheduler allows this process cores 0 to 15."""
    monkeypatch.setattr(affinity.os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 16),  # no limit
        ("400000 100000", 4),
        ("150000 100000", 2),  # one and a half: the half is usable too
        ("10000 100000", 1),  # a tenth of a core is still one worker
        ("3200000 100000", 16),  # more than there are
        ("200000 50000", 4),
        ("nonsense", 16),
    ],
)
def test_cgroup_v2_quota(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert available_cores(tmp_path) == cores


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("quota_us", "period_us", "cores"), [(-1, 100_000, 16), (300_000, 100_000, 3), (250_000, 100_000, 3), (1, 100_000, 1)]
)
def test_cgroup_v1_quota(tmp_path: Path, quota_us: int, period_us: int, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text(f"{period_us}\n")
    assert available_cores(tmp_path) == cores


@pytest.mark.usefixtures("sixteen_cores")
def test_v2_goes_before_v1_and_without_either_the_scheduler_decides(tmp_path: Path) -> None:
    assert available_cores(tmp_path) == 16
    assert available_cores(tmp_path / "absent") == 16
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    assert available_cores(tmp_path) == 16  # a quota without its period says nothing
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert available_cores(tmp_path) == 3
    (tmp_path / "cpu.max").write_text("500000 100000\n")
    assert available_cores(tmp_path) == 5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cores(tmp_path) == 16  # "no limit" is an answer, so version 1 is not asked


def test_affinity_mask_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity.os, "sched_getaffinity", lambda pid: {3, 9}, raising=False)
    (tmp_path / "cpu.max").write_text("800000 100000\n")
    assert available_cores(tmp_path) == 2
    # macOS has no such call.
    monkeypatch.delattr(affinity.os, "sched_getaffinity")
    monkeypatch.setattr(affinity.os, "cpu_count", lambda: 6)
    assert available_cores(tmp_path) == 6
    monkeypatch.setattr(affinity.os, "cpu_count", lambda: None)
    assert available_cores(tmp_path) == 1


# ---- channel --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = socket.socketpair()
    left, right = Channel(one, asks=True), Channel(other)
    yield left, right
    left.close()
    right.close()


def test_messages_come_in_order_and_whole(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    # 3 MiB and a bit: more than a socket holds and more than one read takes, with every byte value in it.
    big = np.random.default_rng(0).integers(0, 256, (3 << 20) + 17, dtype=np.uint8).tobytes()
    assert len(set(big)) == 256
    sent = [
        ({"kind": "a", "größe": [1, 2.5, None, True]}, b""),
        ({"kind": "frame"}, big),
        ({}, b"\x00"),
        ({"text": "x" * (2 << 20)}, b"end"),
    ]

    def send() -> None:
        for message, payload in sent:
            left.ask(message, payload)

    sender = threading.Thread(target=send)
    sender.start()
    for message, payload in sent:
        got = right.next_request()
        assert got[0] == message
        assert got[1] == payload
    sender.join(240.0)
    right.answer({"back": 1})
    assert left.next_answer(240.0) == ({"back": 1}, b"")


def test_closed_peer_is_told_after_its_last_words(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    left.ask({"last": "words"})
    left.close()
    assert right.next_request() == ({"last": "words"}, b"", [])
    with pytest.raises(ChannelClosed, match="closed the connection"):
        right.next_request()
    with pytest.raises(ChannelClosed):
        right.answer({"anybody": "there"}, bytes(1 << 20))


def asked(ends: tuple[Channel, Channel]) -> tuple[Channel, Channel]:
    """Both know the key of their channel; request 1 waits for its answer."""
    ends[0].ask({"do": "it"})
    ends[1].next_request()
    return ends


def written(end: Channel, message: dict[str, Any], payload: bytes = b"") -> bytes:
    """What this end would send as its answer."""
    mine, theirs = socket.socketpair()
    real, end.socket = end.socket, mine
    end.answer(message, payload)
    end.socket = real
    mine.close()
    data = theirs.recv(1 << 20)
    theirs.close()
    return data


def test_a_peer_that_answers_at_once_and_ends_is_heard(ends: tuple[Channel, Channel]) -> None:
    """As an environment does whose step raises: nothing is sent to it after its request is whole."""
    left, right = ends

    class Answered(socket.socket):
        def sendall(self, data: Any, *flags: int) -> None:
            super().sendall(data, *flags)
            right.next_request()
            right.answer({"kind": "fault"})
            right.close()

    left.socket = Answered(fileno=left.socket.detach())
    left.ask({"operation": "step"})
    assert left.next_answer(5.0) == ({"kind": "fault"}, b"")


def test_peer_that_dies_in_the_middle_of_a_message_is_told(ends: tuple[Channel, Channel]) -> None:
    left, right = asked(ends)
    right.socket.sendall(written(right, {"kind": "done"})[:-3])
    right.close()
    with pytest.raises(ChannelClosed):
        left.next_answer(240.0)


def test_nothing_in_time_is_a_timeout(ends: tuple[Channel, Channel]) -> None:
    left, _ = asked(ends)
    started = time.perf_counter()
    with pytest.raises(TimeoutError):
        left.next_answer(0.2)
    assert time.perf_counter() - started > 0.15


def test_a_message_that_was_cut_off_is_garbled(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel.Channel, "stall_s", 0.2)
    left, right = asked(ends)
    right.socket.sendall(written(right, {"kind": "done"})[:-3])
    with pytest.raises(ChannelGarbled, match="cut off: 3 of 16 bytes"):
        left.next_answer(240.0)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"printed by a library\n", "not a message"),
        (b"x", "not a message"),
        (struct.pack("<II", 15, 0) + b'{"kind":"done"}', "not a message"),
        (struct.pack("<Q", 1 << 60), "not a message"),
    ],
)
def test_bytes_without_the_key_are_garbled_at_once(ends: tuple[Channel, Channel], data: bytes, what: str) -> None:
    left, right = asked(ends)
    for near, far in ((left, right), (right, left)):
        near.socket.sendall(data)
        with pytest.raises(ChannelGarbled, match=what):
            far.next_answer(240.0)


def test_messages_with_the_key_are_looked_at_too(ends: tuple[Channel, Channel]) -> None:
    left, right = asked(ends)
    header = written(right, {})[:28]
    key = header[:8]
    for data, what in (
        (header[:20] + struct.pack("<Q", 1 << 60), "1,152,921,504,606,846,976 bytes"),
        (key + struct.pack("<QIQ", 1, 3, 0) + b"{no", "not JSON"),
        (key + struct.pack("<QIQ", 1, 100_000, 0) + b"[" * 100_000, "not JSON"),
        (key + struct.pack("<QIQ", 1, 3, 0) + b"[1]", "a list instead of an object"),
        (key + struct.pack("<QIQ", 0, 2, 0) + b"{}", "number 0 instead of 1"),
    ):
        right.socket.sendall(data)
        with pytest.raises(ChannelGarbled, match=what):
            left.next_answer(240.0)
        while left.has_message():
            left.socket.recv(1 << 20)
    left.ask({"do": "the next"})
    right.next_request()
    right.socket.sendall(key + struct.pack("<QIQ", 1, 15, 0) + b'{"kind":"done"}')
    with pytest.raises(ChannelGarbled, match="number 1 instead of 2"):
        left.next_answer(240.0)


def test_descriptor_travels_with_its_request(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    slab = Slab({"x": ((4,), "int64")})
    left.ask({"take": "this"}, fds=[slab.fd])
    message, _, (received,) = right.next_request(num_fds=1)
    assert message == {"take": "this"}
    assert received != slab.fd
    theirs = Slab({"x": ((4,), "int64")}, received)
    slab.arrays["x"][:] = (1, 2, 3, 4)
    np.testing.assert_array_equal(theirs.arrays["x"], [1, 2, 3, 4])
    theirs.close()
    before = len(os.listdir("/proc/self/fd"))
    for fds, wanted in (([slab.fd] * 2, 1), ([], 1), ([slab.fd], 0)):
        left.ask({"take": "these"}, fds=fds)
        with pytest.raises(ChannelGarbled, match=f"{len(fds)} file descriptors came instead of {wanted}"):
            right.next_request(num_fds=wanted)
    assert len(os.listdir("/proc/self/fd")) == before, "what came is closed"
    slab.close()


@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 16])
def test_marks_are_written_to_their_slots_alone(start: int, length: int) -> None:
    from embodied_rl.sim.transport import ABORTED, READY, Marks

    state = np.full(32, 9, np.uint8)
    marks = Marks(state, [range(start, start + length)])
    for mark in (READY, ABORTED, 0):
        marks.write(mark)
        assert state.tolist() == [9] * start + [mark] * length + [9] * (32 - start - length)
