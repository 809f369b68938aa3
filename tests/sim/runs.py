"""Playing a manager with known actions and writing down what each slot saw, for comparing runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from embodied_rl.sim import worker_pool as process
from embodied_rl.sim import worker_simulators
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.transport import PENDING
from embodied_rl.types import StepBatch

Trace = dict[int, list[tuple]]
"""{slot: [(observation, reward, terminated, truncated, success, summary of an ended episode or None), …]}"""


def action_of(slot: int, number: int, dim: int = 1) -> np.ndarray:
    """The action of a slot's `number`-th message, [dim]: a function of both alone."""
    return np.random.default_rng([slot, number]).uniform(-1.0, 1.0, dim)


def note(trace: Trace, batch: StepBatch) -> None:
    summaries = {episode.slot: episode for episode in batch.episodes}
    for row, slot in enumerate(batch.slots.tolist()):
        observation = {key: np.copy(part[row]) for key, part in batch.observation.items()}
        flags = (float(batch.reward[row]), bool(batch.terminated[row]), bool(batch.truncated[row]), bool(batch.success[row]))
        final = {key: np.copy(part[row]) for key, part in batch.final_observation.items()} if batch.done[row] else None
        trace.setdefault(slot, []).append((observation, *flags, summaries.get(slot), final))


def play_lockstep(manager: EnvManager, messages: int, before: Callable[[int], None] = lambda number: None, start: int = 0) -> Trace:
    """Step all slots together; `before(number)` runs before each message."""
    trace: Trace = {}
    dim = manager.spec.action.dim
    for number in range(start, start + messages):
        before(number)
        note(trace, manager.step(np.stack([action_of(slot, number, dim) for slot in range(manager.num_slots)])))
    return trace


def play_asynchronously(
    manager: EnvManager, messages: int, min_ready: int = 1, between: Callable[[], None] = lambda: None, timeout_s: float | None = 30.0
) -> Trace:
    """Send every slot its `messages` messages, each as soon as the one before is answered."""
    trace: Trace = {}
    dim = manager.spec.action.dim
    sent = np.zeros(manager.num_slots, int)

    def send(slots: list[int]) -> None:
        if slots:
            manager.send(slots, np.stack([action_of(slot, int(sent[slot]), dim) for slot in slots]))
            sent[slots] += 1

    send(list(range(manager.num_slots)))
    in_flight = manager.num_slots
    while in_flight:
        between()
        batch = manager.recv(min_ready=min(min_ready, in_flight), timeout_s=timeout_s)
        note(trace, batch)
        again = [int(slot) for slot in batch.slots if sent[slot] < messages]
        in_flight -= len(batch.slots) - len(again)
        send(again)
    return trace


def assert_same(one: Trace, other: Trace) -> None:
    """Bit by bit."""
    assert one.keys() == other.keys()
    for slot in one:
        assert len(one[slot]) == len(other[slot])
        for number, (mine, theirs) in enumerate(zip(one[slot], other[slot], strict=True)):
            assert mine[1:6] == theirs[1:6], f"slot {slot}, message {number}"
            for a, b in ((mine[0], theirs[0]), (mine[6], theirs[6])):
                assert (a is None) == (b is None)
                if a is not None:
                    for key in a:
                        np.testing.assert_array_equal(a[key], b[key], err_msg=f"slot {slot}, message {number}, {key}")


class PassingTime:
    """The clock by which the manager judges its workers: real time, and hours more from the moment that a test chooses.

    So a deadline is over when it should be, and not because the machine stood still for a while.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead_s, self._hung, self._looks, self._hours_pass = 0.0, lambda: False, 0, 0
        monkeypatch.setattr(worker_simulators, "time", SimpleNamespace(perf_counter=self._now, sleep=time.sleep))
        monkeypatch.setattr(process, "_STACK_S", 120.0)  # for a worker to say where it hangs, whenever the machine lets it

    def pass_hours(self, looks: int = 3) -> None:
        """Two before each of the manager's next `looks`."""
        self._hours_pass = looks

    def pass_hours_when_hanging(self, manager: EnvManager, once: Path) -> None:
        """As soon as the simulator that was given this `once` hangs, and no other worker has anything to do."""

        def hung() -> bool:
            pool = manager._pool
            if pool is None or not hangs(once):
                return False
            pending = {int(pool.worker_of[slot]) for slot in range(manager.num_slots) if pool.state[slot] == PENDING}
            return len(pending) == 1

        self._hung = hung

    def _now(self) -> float:
        if self._hung():
            self._looks += 1
            if self._looks == 3:  # it was seen to do nothing before
                self._hung = lambda: False
                self.pass_hours()
        if self._hours_pass:
            self._hours_pass -= 1
            self._ahead_s += 2 * 3600.0
        return time.perf_counter() + self._ahead_s


def hangs(once: Path) -> bool:
    """Whether the simulator that was given this `once` hangs (`tests.sim.toy.CountingSim`)."""
    return once.with_name(f"{once.name}.hangs").exists()
