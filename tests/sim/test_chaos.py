"""Workers are killed, stopped and made to fail at random for thousands of steps; every episode is accounted for."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import psutil
import pytest

from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultKind, FaultPolicy, FaultRecord
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.worker_simulators import _Phase, _Watch
from tests.sim.runs import Trace, assert_same, play_asynchronously

SLOTS, WORKERS, LENGTH = 6, 3, 23


pytestmark = pytest.mark.usefixtures("forked")


def make(policy: FaultPolicy, **kwargs) -> EnvManager:
    return EnvManager(
        SimFactory("tests.sim.toy:CountingSim", kwargs={"length": LENGTH, **kwargs}),
        SLOTS,
        num_workers=WORKERS,
        faults=policy,
        spare_workers=1,
        step_timeout_s=3600.0,  # however long the machine stands still; for a worker that is stopped here the time is put forward
    )


class Chaos:
    """Every so many calls, or as soon as there is one to attack, a worker is SIGKILLed, or SIGSTOPped (a step that never returns).

    Also one that is on its way back from a fault, until it is handed the episodes. From then on to the end of its next step it is left
    alone: an episode that is touched when two workers end at the same point is given up, and rightly.
    """

    def __init__(self, manager: EnvManager, every: int, seed: int = 0, parents: bool = False) -> None:
        """`parents`: every second kill is of the worker's parent, with which it ends."""
        self.parents = parents
        self.manager, self.every, self.calls = manager, every, 0
        self.random = np.random.default_rng(seed)
        self.kills: list[int] = []
        """Numbers of the processes."""
        self.stops: list[int] = []

    @property
    def attacks(self) -> int:
        return len(self.kills) + len(self.stops)

    def __call__(self) -> None:
        self._pass_time()
        self.calls += 1
        if self.calls < self.every:
            return
        index = int(self.random.integers(WORKERS))
        watch, victim = self._watch(index), self.manager.worker_pids()[index]
        if victim in self.kills or victim in self.stops:
            return  # nobody has noticed yet
        back = watch.phase is _Phase.LIVE and not watch.is_cautious(self.manager._supervisor._progress(index))
        if self.attacks % 4 == 3:
            if back:
                os.kill(victim, signal.SIGSTOP)
                self.stops.append(victim)
                self.calls = 0
        elif back or watch.phase is _Phase.STARTING:
            above = self.parents and len(self.kills) % 2 == 1
            os.kill(psutil.Process(victim).ppid() if above else victim, signal.SIGKILL)
            self.kills.append(victim)
            self.calls = 0

    def _pass_time(self) -> None:
        """Who was stopped has been for hours."""
        for index, pid in enumerate(self.manager.worker_pids()):
            if pid in self.stops and (since := self._watch(index).waits_since) is not None:
                self._watch(index).waits_since = since - 2 * 3600.0

    def _watch(self, index: int) -> _Watch:
        return self.manager._supervisor._watches[index]

    def noticed(self) -> list[FaultRecord]:
        """What the manager made of it, once it has seen every death and everybody is back."""
        deadline = time.monotonic() + 120
        while set(self.kills) & set(self.manager.worker_pids()) and time.monotonic() < deadline:
            self.manager._supervisor.poll()
            time.sleep(0.01)
        self.manager._supervisor.settle()
        return self.manager.fault_records


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
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("steps", "every", "attacks"), [pytest.param(2_000, 60, 3, marks=pytest.mark.ci_sample), (10_000, 100, 12)])
def test_thousands_of_steps_of_chaos_change_nothing(steps: int, every: int, attacks: int) -> None:
    messages = -(-steps // SLOTS)
    patient = FaultPolicy(max_restarts=1000, backoff_s=0.0)
    with make(patient) as manager:
        manager.reset()
        clean = play_asynchronously(manager, messages)
    with make(patient) as manager:
        manager.reset()
        chaos = Chaos(manager, every=every)
        trace = play_asynchronously(manager, messages, between=chaos, timeout_s=1.0)
        records = chaos.noticed()
        # No call hands a slot out twice: there are as many calls as a slot has messages, or more.
        assert chaos.attacks >= attacks
        assert {record.pid for record in records if record.kind is FaultKind.DIED} == set(chaos.kills)
        # The last one may have had nothing to do any more.
        assert {record.pid for record in records if record.kind is FaultKind.TIMED_OUT} == set(chaos.stops) - set(manager.worker_pids())
        assert len(records) == len(chaos.kills) + len(set(chaos.stops) - set(manager.worker_pids()))
        assert {len(steps) for steps in trace.values()} == {messages}  # every slot finished its quota
        accounts(trace, manager)
        assert all(slot.outcome == "restored" and slot.drift in (None, 0.0) for record in records for slot in record.slots)
    assert_same(trace, clean)


def test_chaos_with_restarts_loses_nothing_without_a_record() -> None:
    with make(FaultPolicy(recovery="restart", max_restarts=1000, backoff_s=0.0)) as manager:
        manager.reset()
        chaos = Chaos(manager, every=100, seed=1)
        trace = play_asynchronously(manager, 300, between=chaos, timeout_s=1.0)
        assert chaos.noticed()
        assert {len(steps) for steps in trace.values()} == {300}
        accounts(trace, manager)
