"""Bytes that nobody of ours wrote, on the sockets between a manager and its workers, while episodes are played."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from embodied_rl.distributed import channel
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultKind, FaultPolicy, SimFault
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from tests.chaos.harness import Attack

SLOTS, WORKERS, LENGTH = 4, 2, 7
DEADLINE_S = 60.0
"""Of one attempt, on a busy machine: a hang would last the manager's 180 s."""
_PIDFD_GETFD = 438
_HEADER = struct.Struct("<8sQIQ")
KINDS = (
    *("noise", "text", "fake done", "half a header", "2^60", "all ones", "closed"),
    *(
        "keyed invalid json",
        "keyed list",
        "keyed deep json",
        "keyed 2^60",
        "keyed number",
        "keyed cut off",
        "keyed done",
        "keyed descriptors",
    ),
)
"""The keyed ones know what only the two ends should know."""


class Sockets(Attack):
    """Every attempt spoils one worker's socket, in one direction; then all episodes go on, and are what they would have been."""

    name = "sockets"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._manager: EnvManager | None = None
        self._replaced = self._steps = 0
        self._stall_s, channel.Channel.stall_s = channel.Channel.stall_s, 0.5

    def attempt(self, number: int, chance: random.Random) -> str | None:
        kind, worker, to_worker, pending = chance.choice(KINDS), chance.randrange(WORKERS), chance.random() < 0.5, chance.random() < 0.3
        if kind in ("keyed done", "keyed cut off"):  # the one would be an answer, and the other waits for the worker's own 10 s
            to_worker = False
        what = f"{kind} {'to' if to_worker else 'from'} worker {worker}{' in a step' if pending else ''}"
        begun = time.monotonic()
        try:
            problem = self._attempt(kind, worker, to_worker, pending, chance)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        if problem is None and time.monotonic() - begun > DEADLINE_S:
            problem = f"took {time.monotonic() - begun:.0f} s"
        if problem is not None:
            self._end()
        return None if problem is None else f"{what}: {problem}"

    def count(self) -> dict[str, int]:
        return {"workers replaced": self._replaced, "steps compared": self._steps}

    def close(self) -> None:
        channel.Channel.stall_s = self._stall_s
        self._end()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _attempt(self, kind: str, worker: int, to_worker: bool, pending: bool, chance: random.Random) -> str | None:
        manager = self._begin()
        assert manager._pool is not None
        process, slot = manager._pool.workers[worker], manager._pool.slots_of[worker][0]
        before = len(manager.fault_records)
        if pending:
            manager.send(range(SLOTS), self._actions(chance))
        end = process.channel.socket.dup() if to_worker else worker_end(process.pid)
        with end, suppress(BrokenPipeError):
            end.settimeout(10.0)
            spoil(end, kind, process.channel, chance)
        if pending:
            self._expect(manager.recv(range(SLOTS), timeout_s=DEADLINE_S).observation["state"])
        frame = manager.render([slot])[0]
        if (frame != int(self._state[slot, 1])).any():
            return "a picture of another step"
        for _ in range(chance.randrange(1, 4)):
            manager.send(range(SLOTS), self._actions(chance))
            self._expect(manager.recv(range(SLOTS), timeout_s=DEADLINE_S).observation["state"])
        records = manager.fault_records[before:]
        self._replaced += len(records)
        if not records:
            return "nobody noticed"
        if strange := [record.kind.name for record in records if record.kind not in (FaultKind.GARBLED, FaultKind.DIED)]:
            return f"a fault of another kind: {strange}"
        if lost := [slot for record in records for slot in record.slots if slot.outcome != "restored" or slot.drift not in (None, 0.0)]:
            return f"episodes that were not restored: {lost}"
        return None

    def _begin(self) -> EnvManager:
        if self._manager is None:
            factory = SimFactory("tests.sim.toy:CountingSim", kwargs={"length": LENGTH})
            self._manager = EnvManager(
                factory, SLOTS, num_workers=WORKERS, spare_workers=1, faults=FaultPolicy(max_restarts=10_000, backoff_s=0.0)
            )
            self._seeds, self._episode = EpisodeSeeds.training(0), np.zeros(SLOTS, int)
            self._state = np.array([[self._seeds.seed(slot, 0, SLOTS), 0.0, 0.0] for slot in range(SLOTS)])
            self._expect_same(self._manager.reset().observation["state"])
        return self._manager

    def _end(self) -> None:
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _actions(self, chance: random.Random) -> np.ndarray:
        """Drawn, and what follows from them by the toy's own arithmetic."""
        actions = np.array([[float(chance.randrange(-3, 4))] for _ in range(SLOTS)])
        for slot in range(SLOTS):
            self._state[slot] += (0.0, 1.0, actions[slot, 0])
            if self._state[slot, 1] == LENGTH:
                self._episode[slot] += 1
                self._state[slot] = (self._seeds.seed(slot, int(self._episode[slot]), SLOTS), 0.0, 0.0)
        return actions

    def _expect(self, observation: np.ndarray) -> None:
        self._steps += SLOTS
        self._expect_same(observation)

    def _expect_same(self, observation: np.ndarray) -> None:
        if not np.array_equal(observation, self._state):
            raise SimFault(FaultKind.RAISED, -1, f"observations {observation.tolist()} instead of {self._state.tolist()}")


def spoil(end: socket.socket, kind: str, asking: channel.Channel, chance: random.Random) -> None:
    """Write what `kind` says as if this end did; the keyed kinds steal key and number of `asking`, the manager's side."""
    assert asking._key is not None
    key, number = asking._key, asking.number + 1  # of the request that comes next

    def keyed(text: bytes, payload: int = 0, number: int = number) -> bytes:
        return _HEADER.pack(key, number, len(text), payload) + text

    if kind == "closed":
        end.shutdown(socket.SHUT_RDWR)
    elif kind == "keyed descriptors":
        with open(os.devnull, "rb") as file:
            socket.send_fds(end, [keyed(b'{"kind": "done", "operation": "render", "slot": 0}', number=number - 1)], [file.fileno()] * 3)
    else:
        done = b'{"kind": "done"}'
        end.sendall(
            {
                "noise": lambda: chance.randbytes(chance.choice((1, 7, 8, 27, 28, 29, 500, 70_000))),
                "text": lambda: b"Warning: no display found, falling back to software\n" * chance.randrange(1, 5),
                "fake done": lambda: struct.pack("<II", len(done), 0) + done,
                "half a header": lambda: chance.randbytes(14),
                "2^60": lambda: struct.pack("<Q", 1 << 60),
                "all ones": lambda: b"\xff" * 64,
                "keyed invalid json": lambda: keyed(b"{no"),
                "keyed list": lambda: keyed(b"[1]"),
                "keyed deep json": lambda: keyed(b"[" * 100_000),
                "keyed 2^60": lambda: keyed(done, 1 << 60),
                "keyed number": lambda: keyed(done, number=chance.choice((0, number - 1, number + 1, 2**64 - 1))),
                "keyed cut off": lambda: keyed(done)[: chance.randrange(9, 40)],
                "keyed done": lambda: keyed(done),
            }[kind]()
        )


def worker_end(pid: int) -> socket.socket:
    """The end of its socket that a worker holds, as whatever else runs in its process could use it."""
    handle = os.pidfd_open(pid)
    try:
        for name in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                descriptor = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, int(name), 0)
                if descriptor < 0:
                    raise OSError(ctypes.get_errno(), "a descriptor of the worker cannot be had")
                return socket.socket(fileno=descriptor)
    finally:
        os.close(handle)
    raise OSError("the worker has no socket")
