"""Playing a manager with known actions and writing down what each slot saw, for comparing runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from embodied_rl.sim.manager import EnvManager
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
