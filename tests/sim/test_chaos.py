"""Workers are killed, stopped and made to fail at random for thousands of steps; every episode is accounted for."""

from __future__ import annotations

import os
import signal

import numpy as np
import psutil
import pytest

from embodied_rl.sim.env import SimFactory
from embodied_rl.sim.faults import FaultKind, FaultPolicy
from embodied_rl.sim.manager import EnvManager
from tests.sim.runs import Trace, assert_same, play_asynchronously

SLOTS, WORKERS, LENGTH = 6, 3, 23


def make(policy: FaultPolicy, **kwargs) -> EnvManager:
    return EnvManager(
        SimFactory("tests.sim.toy:CountingSim", kwargs={"length": LENGTH, **kwargs}),
        SLOTS,
        num_workers=WORKERS,
        faults=policy,
        spare_workers=1,
        step_timeout_s=4.0,
    )


class Chaos:
    """Every so many calls, or as soon as one works, one worker is SIGKILLed, or SIGSTOPped (a step that never returns)."""

    def __init__(self, manager: EnvManager, every: int, seed: int = 0) -> None:
        self.manager, self.every, self.calls, self.attacks = manager, every, 0, 0
        self.random = np.random.default_rng(seed)

    def __call__(self) -> None:
        self.calls += 1
        if self.calls < self.every:
            return
        victim = self.manager.worker_pids()[self.random.integers(WORKERS)]
        # Only one that works: who is on the way back already would not be a fault of its own.
        if psutil.pid_exists(victim) and psutil.Process(victim).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
            os.kill(victim, signal.SIGSTOP if self.attacks % 4 == 3 else signal.SIGKILL)
            self.attacks += 1
            self.calls = 0


def accounts(trace: Trace, manager: EnvManager) -> None:
    """Each slot's episodes 0, 1, 2, … are either recorded once or given up with a record."""
    given_up = {(s.slot, s.episode) for record in manager.fault_records for s in record.slots if s.outcome == "aborted"}
    for slot, steps in trace.items():
        recorded = [step[5].index for step in steps if step[5]]
        lost = {episode for s, episode in given_up if s == slot}
        assert len(recorded) == len(set(recorded))
        assert not set(recorded) & lost
        ended = len(recorded) + len([episode for episode in lost if episode < max(recorded)])
        assert sorted({*recorded, *(e for e in lost if e < max(recorded))}) == list(range(ended))
        assert all(step[5].length == LENGTH for step in steps if step[5])


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.timeout(900)
def test_ten_thousand_steps_of_chaos_change_nothing() -> None:
    messages = -(-10_000 // SLOTS)
    patient = FaultPolicy(max_restarts=1000, backoff_s=0.0)
    with make(patient) as manager:
        manager.reset()
        clean = play_asynchronously(manager, messages)
    with make(patient) as manager:
        manager.reset()
        chaos = Chaos(manager, every=120)
        trace = play_asynchronously(manager, messages, between=chaos, timeout_s=None)
        kinds = [record.kind for record in manager.fault_records]
        assert chaos.attacks >= 12
        assert kinds.count(FaultKind.DIED) >= 6
        assert kinds.count(FaultKind.TIMED_OUT) >= 2
        assert {len(steps) for steps in trace.values()} == {messages}  # every slot finished its quota
        accounts(trace, manager)
        assert all(s.drift in (None, 0.0) for record in manager.fault_records for s in record.slots)
    assert_same(trace, clean)


def test_chaos_with_restarts_loses_nothing_without_a_record() -> None:
    with make(FaultPolicy(recovery="restart", max_restarts=1000, backoff_s=0.0)) as manager:
        manager.reset()
        chaos = Chaos(manager, every=100, seed=1)
        trace = play_asynchronously(manager, 300, between=chaos, timeout_s=None)
        assert manager.fault_records
        assert {len(steps) for steps in trace.values()} == {300}
        accounts(trace, manager)
