"""`sim.num_workers=auto`, `sim.pipeline_groups=auto` and `sim.placement=auto`, measured: before a run begins, which number of workers, with
the same slots over different numbers of them; in the first rollouts of the run, what can be changed between two: whether slots are stepped
together, in turns or each by itself, and whether workers keep to cores of their own.

Before the run, measured are short rollouts too, by a policy of the run's kind with random weights. Of policies that are not built for that,
and for episodes of groups, time that passes stands for acting, and actions hold still. Several workers are also stepped together, and
bound, so that each number is compared at its best. First as many workers as there are cores step: where fewer would need longer for the
simulation by itself than these need for everything, no others are started. The measured workers are ended, or, where they give the same
numbers afterwards as before, go on as the run's: the choice changes nothing but time.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.sim.core_binding import CoreBinding
from embodied_rl.sim.faults import SimFault
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.topology import Topology
from embodied_rl.sim.worker_choice import (
    LEAST_ROUNDS,
    Circumstances,
    NumberComparison,
    Setting,
    Trials,
    WorkerChoice,
    candidates,
    check_auto,
)
from embodied_rl.sim.worker_pool import split_slots
from embodied_rl.types import ActionSpec, StepBatch

_LONGEST_START_S = 2.5
"""A simulator that takes longer to start is not started again to be measured: what takes long to start takes long to step, and is the
faster the more workers there are."""
_LEAST_START_S = 1.25
"""Of processor time, of each worker: below, it was the machine that was busy, and up to `_BUSY` times as long may have passed."""
_BUSY = 4
_UPDATE_S, _WINDOW_S = 0.002, 0.012
"""Each setting is stepped so long in each round, after something like an update, in which the workers fall asleep."""
_LONGEST_S = 0.4
"""No further round begins after so long: the next run goes on where the number of workers is in question still."""
_CLEARLY = 1.3
"""As many workers as there are cores are so many times as fast as fewer could be at best: these are not started."""
_LONG_STEP_S = 100e-6
"""Of a core, for a step: what it takes to wake workers, and so where they are, is next to nothing."""
_COMPARED_STEPS, _ENOUGH_S = (3, 8), 0.03
"""So many steps, the fewer where they take longer than this, say whether workers give the same numbers as before."""
_STEPS, _SIMULATED_S = (4, 32), 0.03
"""Of each slot, in a short rollout: as many as are simulated in this time. In fewer, the beginning and the end, where nothing goes on
beside acting, count for more than in a run, and slots in groups seem slower than they are."""
_NOT_MEASURED = ("embodied_rl.sim.remote:",)
"""Begins of targets whose simulators are elsewhere: their services are asked for episodes, and for nothing else."""

_THINK_S = 200e-6
"""Of a call of a policy that does not play, which takes a core meanwhile."""

Told = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Player:
    """A policy of the run's kind, that plays rollouts while workers are chosen."""

    described: str
    """What its time depends on: a choice is remembered for it."""
    seconds: Callable[[EnvManager, int], Callable[[], tuple[float, int]]]
    """(a manager, steps of each slot) → what plays such a rollout in it, stepped as `EnvManager.num_turns` says: (seconds, steps)."""


def start_measured(
    config: SimConfig,
    seeds: EpisodeSeeds,
    *,
    tell: Told,
    num_slots: int | None = None,
    autoreset: bool = True,
    chunk_size: int = 1,
    rollouts: bool = False,
    tried: Sequence[int] = (),
    player: Player | None = None,
) -> EnvManager:
    """`EnvManager.from_config` for a run that will last: what ``auto`` stands for is measured where it is not yet known, the number of
    workers now and the rest, where rollouts try it, in the first of them (`EnvManager.rollout_took`).

    Args:
        tell: takes the lines that say what was chosen.
        rollouts: whether rollouts of all slots are played; False: slots are not stepped together, but as they come.
        tried: numbers of turns that rollouts try, see `Circumstances`.
        player: plays while it is measured; None: a fraction of a millisecond stands for each call of the policy.

    Raises UserError: the simulator rejects its configuration; SimFault: a worker failed to build.
    """

    def manager(num_workers: int | None) -> EnvManager:
        wanted = config if num_workers is None else dataclasses.replace(config, num_workers=num_workers)
        return EnvManager.from_config(wanted, seeds, num_slots=num_slots, autoreset=autoreset, chunk_size=chunk_size)

    if config.num_workers != "auto" or num_slots not in (None, config.num_slots):
        return manager(None)
    check_auto(config)
    numbers = candidates(config.num_slots)
    with ExitStack() as undo:
        binding = CoreBinding.take() if config.placement == "auto" and max(numbers) > 1 and rollouts else None
        if binding is not None:
            undo.callback(binding.release)
        described = None if player is None else player.described
        asked = Circumstances(config, chunk_size, rollouts, described, tuple(tried), 0 if binding is None else binding.most_workers)
        if config.target.startswith(_NOT_MEASURED):
            return manager(None)
        choice = asked.remembered()
        if choice is not None and choice.has_number:
            started = manager(choice.setting.num_workers)
        else:
            started, choice = _Measurement(asked, manager, binding, player).chosen(choice)
        if choice is not None:
            undo.pop_all()
            started.core_binding = binding
            _settle(started, asked, choice, tell)
        return started


def _settle(manager: EnvManager, asked: Circumstances, choice: WorkerChoice, tell: Told) -> None:
    """Step as was chosen, and try in the run's rollouts what is in question."""

    def note() -> None:
        asked.remember(choice)
        if choice.decided:
            tell(str(choice))

    if line := str(choice):
        tell(line)
    if not choice.decided and choice.run.open:
        manager.try_settings(Trials(choice.run, note))
    else:
        manager.step_as(choice.setting, for_good=True)


class _Measurement:
    """Managers with different numbers of workers, all alive, and what is measured of them."""

    def __init__(
        self, asked: Circumstances, manager: Callable[[int | None], EnvManager], binding: CoreBinding | None, player: Player | None
    ) -> None:
        """`manager` starts one with so many workers."""
        self._asked, self._manager, self._binding, self._player = asked, manager, binding, player
        self._numbers = candidates(asked.config.num_slots)
        self._found: dict[int, EnvManager] = {}
        self._plays: dict[int, Callable[[], tuple[float, int]]] = {}
        self._num_steps = 0
        """Of each slot, in a short rollout."""

    def chosen(self, before: WorkerChoice | None) -> tuple[EnvManager, WorkerChoice | None]:
        """The manager that measuring says to take; as many workers as there are cores where it cannot say. `before`: what was measured."""
        began, most = time.perf_counter(), self._numbers[-1]
        first = self._found[most] = self._manager(most)
        slow = _starts_slowly(first, time.perf_counter() - began)
        # Text is answered by models and judges, which cost; what steps all its environments together may draw for all of them at once.
        if first.spec.action.kind == "text" or first.spec.steps_together:
            return first, None
        if slow:  # in question is only how so many are stepped; their time before the run is compared with nothing
            known = self._asked.choice(self._asked.compared([{Setting(most, self._asked.config.num_groups): 1.0}]))
            self._asked.remember(known)
            return first, known
        choice = None
        try:
            start = self._asked.compared([] if before is None else before.start.rounds)
            if len(self._numbers) > 1:
                start = self._measured(start)
            choice = self._asked.choice(start)
            self._asked.remember(choice)
        except (SimFault, UserError, ValueError):
            pass  # whatever it is, the run meets it in its own words
        number = most if choice is None else choice.setting.num_workers
        for other in [other for other in self._found if choice is None or other != number]:
            self._found.pop(other).close()
        return self._found.pop(number) if number in self._found else self._manager(number), choice

    def _measured(self, start: NumberComparison) -> NumberComparison:
        """Measure what is in question, and keep the chosen manager where it is as it was at its start."""
        most = self._numbers[-1]
        steps = {most: self._begin(most)}
        core_s = steps[most][2]
        takes_long = core_s >= _LONG_STEP_S * self._found[most].num_slots
        clear = self._if_clear(core_s) if takes_long and not start.rounds else None
        if clear is not None:
            start = clear
        else:
            if takes_long and not start.rounds:
                start = NumberComparison(each for each in start.open if not each.bound)
            for number in self._numbers[:-1]:
                self._found[number] = self._manager(number)
                steps[number] = self._begin(number)
            start.play(self._seconds, _LONGEST_S)
        for manager in self._found.values():
            manager.num_turns = None
        number = start.leader.num_workers
        if _first_steps(self._found[number], steps[number][0])[0] == steps[number][0] and not self._found[number].fault_records:
            self._found[number].reset()
        else:  # the past of these workers shows
            self._found.pop(number).close()
        return start

    def _begin(self, number: int) -> tuple[list[bytes], float, float]:
        """What `_first_steps` tells of so many workers, for which the policy is built then."""
        timed = _first_steps(manager := self._found[number])
        self._num_steps = self._num_steps or min(max(int(_SIMULATED_S / timed[1]), _STEPS[0]), _STEPS[1])
        if self._player is not None:
            self._plays[number] = self._player.seconds(manager, self._num_steps)
        return timed

    def _if_clear(self, core_s: float) -> NumberComparison | None:
        """As if fewer workers had been measured, where the simulation by itself would take them much longer than everything takes as many
        as there are cores. `core_s`: of one core, for a step of all slots."""
        most, groups, cores = self._numbers[-1], self._asked.config.num_groups, Topology.read(with_gpus=False)
        # Two threads of one core hold each other up: one of them by itself would be faster.
        one_s = self._num_steps * core_s * len(cores.physical_cores) / len(cores.cores)
        seconds, steps = min(self._play(Setting(most, groups))() for _ in range(2))
        if one_s < _CLEARLY * self._numbers[-2] * seconds:
            return None
        taken_s = {Setting(number, groups): one_s / number for number in self._numbers[:-1]} | {Setting(most, groups): seconds}
        return self._asked.compared([{each: taken_s[each] / steps for each in taken_s}] * LEAST_ROUNDS)

    def _seconds(self, setting: Setting) -> float:
        """Of a step, in one window after something like an update; what wakes the workers does not count where the window is short."""
        manager = self._found[setting.num_workers]
        manager.num_turns = setting.num_turns
        if self._binding is not None and setting.bound:
            self._binding.bind(manager.worker_pids())
        play = self._play(setting)
        _think(_UPDATE_S)
        seconds, steps = play()
        if seconds < _WINDOW_S:
            seconds, steps = 0.0, 0
        while seconds < _WINDOW_S:
            one = play()
            seconds, steps = seconds + one[0], steps + one[1]
        if self._binding is not None:
            self._binding.unbind()
        return seconds / steps

    def _play(self, setting: Setting) -> Callable[[], tuple[float, int]]:
        """A short rollout with these workers, stepped in the groups of slots that `setting` has."""
        manager, groups = self._found[setting.num_workers], self._asked.config.num_groups
        return self._plays.get(setting.num_workers) or Turns(manager, setting.num_turns, groups, self._num_steps).play


def _starts_slowly(manager: EnvManager, seconds: float) -> bool:
    """Whether a simulator whose workers were there after so many seconds is better not started a second time."""
    if seconds <= _LONGEST_START_S:
        return False
    try:
        used = [Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split() for pid in manager.worker_pids()]
        busy_s = max(int(fields[11]) + int(fields[12]) for fields in used) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):  # other systems than Linux have no /proc: only the wall time is known
        return True
    return busy_s > _LEAST_START_S or seconds > _BUSY * _LONGEST_START_S


class Turns:
    """The slots of a manager, stepped in turns as a rollout does, by actions that hold still."""

    def __init__(self, manager: EnvManager, num_turns: int, num_calls: int, num_steps: int) -> None:
        """Resets all slots. `num_calls`: of the policy, for all slots; `num_steps`: of each slot, in a rollout."""
        self._manager, self._num_steps, num_groups = manager, num_steps, min(num_turns, manager.num_slots)
        self._groups = [group for group in split_slots(range(manager.num_slots), num_groups) if len(group)]
        self._actions = [still_actions(manager, len(group)) for group in self._groups]
        self._think_s = _THINK_S * num_calls / len(self._groups)
        manager.reset()

    def play(self) -> tuple[float, int]:
        """(seconds, steps) of some steps of all slots."""
        for group, actions in zip(self._groups, self._actions, strict=True):
            self._manager.send(group, actions)
        started = time.perf_counter()
        for number in range(self._num_steps):
            for group, actions in zip(self._groups, self._actions, strict=True):
                begin_ended(self._manager, self._manager.recv(group))
                if number < self._num_steps - 1:
                    _think(self._think_s)
                    self._manager.send(group, actions)
        return time.perf_counter() - started, self._num_steps * self._manager.num_slots


def _think(seconds: float) -> None:
    """Take a core for so long."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def begin_ended(manager: EnvManager, batch: StepBatch) -> None:
    """New episodes where some ended, of a manager that begins none by itself."""
    if not manager.autoreset and batch.done.any():
        ended = batch.slots[batch.done]
        manager.begin(ended, ended.tolist())
        manager.recv(ended)


def still_actions(manager: EnvManager, num_slots: int) -> np.ndarray:
    """Actions that do as little as can be: the middle of the bounds, or number 0. [n, A], or chunks [n, K, A]."""
    spec: ActionSpec = manager.spec.action
    shape = (num_slots, spec.dim) if manager.chunk_size == 1 else (num_slots, manager.chunk_size, spec.dim)
    if spec.kind != "continuous":
        return np.zeros(shape, spec.dtype)
    middle = (np.asarray(spec.low) + np.asarray(spec.high)) / 2
    return np.broadcast_to(np.where(np.isfinite(middle), middle, 0.0), shape).astype(spec.dtype)


def _first_steps(manager: EnvManager, before: Sequence[bytes] = ()) -> tuple[list[bytes], float, float]:
    """(what comes of a reset and some steps, as many as `before` is of, bit by bit; seconds that one of these steps of all slots took at
    least, and seconds of one core, other programs or not)."""
    actions, slots = still_actions(manager, manager.num_slots), range(manager.num_slots)
    batch, seen, taken_s, core_s = manager.reset(), list[bytes](), list[float](), list[float]()
    least, most = _COMPARED_STEPS
    while len(seen) < len(before) if before else len(taken_s) < least or (len(taken_s) < most and sum(taken_s) < _ENOUGH_S):
        seen += [batch.observation[key].tobytes() for key in manager.spec.tensors]
        begin_ended(manager, batch)
        used_s, began = _processor_s(manager), time.perf_counter()
        manager.send(slots, actions)
        batch = manager.recv(slots)
        taken_s.append(time.perf_counter() - began)
        core_s.append(min(taken_s[-1] * manager.num_workers, (_processor_s(manager) - used_s) or math.inf))
        seen.append(batch.reward.tobytes())
    return seen, min(taken_s), min(core_s)


def _processor_s(manager: EnvManager) -> float:
    """Processor time of the workers' main threads, which other programs that take the cores hardly change; 0 where it is not known."""
    try:
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) for pid in manager.worker_pids()) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
