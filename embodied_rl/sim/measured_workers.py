"""`sim.num_workers=auto`, `sim.pipeline_groups=auto` and `sim.placement=auto`, measured before a run begins: the same slots over different
numbers of workers take turns in being stepped, half of the slots after the other and all together, by workers that may move and by ones
that keep to cores of their own.

Measured is what a rollout does: groups of slots in turns, with a policy's thinking in between that takes a core while the others
simulate. Actions are those that hold still. The measured workers are ended, or, where they give the same numbers afterwards as before,
go on as the run's: the choice changes nothing but time.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.sim.core_binding import CoreBinding
from embodied_rl.sim.faults import SimFault
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.worker_choice import (
    Acting,
    Setting,
    TimedPolicy,
    WorkerChoice,
    candidates,
    check_auto,
    remember,
    remembered,
    settings,
)
from embodied_rl.sim.worker_pool import split_slots
from embodied_rl.types import ActionSpec, Observation, StepBatch

_LONGEST_START_S = 2.5
"""A simulator that takes longer to start is not started again to be measured: what takes long to start takes long to step, and is the
faster the more workers there are."""
_LEAST_START_S = 1.25
"""Of processor time, of each worker: below, it was the machine that was busy, and up to `_BUSY` times as long may have passed."""
_BUSY = 4
_UPDATE_S, _WINDOW_S = 0.01, 0.045
_ROUNDS, _MORE_ROUNDS, _IN_QUESTION = 2, 4, 0.8
"""Each setting is stepped so long, so often, each time after something like an update; those that reach that share of the fastest, some
times more."""
_STEADY = 1.5
"""Largest rate over smallest, beyond which a choice holds for this run only."""
_COMPARED_STEPS = 8
_NOT_MEASURED = ("embodied_rl.sim.remote:",)
"""Begins of targets whose simulators are elsewhere: their services are asked for episodes, and for nothing else."""

Told = Callable[[str], None]


def start_measured(
    config: SimConfig,
    seeds: EpisodeSeeds,
    *,
    tell: Told,
    num_slots: int | None = None,
    autoreset: bool = True,
    chunk_size: int = 1,
    small: bool | None = None,
    timed: TimedPolicy | None = None,
) -> EnvManager:
    """`EnvManager.from_config` for a run that will last: what ``num_workers=auto`` stands for is measured where it is not yet known, and
    with it ``pipeline_groups=auto``: `num_turns` of the manager.

    Args:
        tell: takes the line that says what was chosen.
        small: whether the policy is a small Gaussian network; None: slots are not stepped together, but as they come.
        timed: of another policy, how its time is found out; None: a fraction of a millisecond is taken for it.

    Raises:
        UserError: the simulator rejects its configuration.
        SimFault: a worker failed to build.
    """

    def manager(num_workers: int | None) -> EnvManager:
        wanted = config if num_workers is None else dataclasses.replace(config, num_workers=num_workers)
        return EnvManager.from_config(wanted, seeds, num_slots=num_slots, autoreset=autoreset, chunk_size=chunk_size)

    if config.num_workers != "auto" or num_slots not in (None, config.num_slots):
        return manager(None)
    check_auto(config)
    groups = config.num_groups
    turns = (1, groups) if small is not None and config.pipeline_groups == "auto" and groups > 1 else (groups,)
    described = None if timed is None else timed.described
    numbers = candidates(config.num_slots)
    with ExitStack() as undo:
        binding = CoreBinding.take() if config.placement == "auto" and max(numbers) > 1 and small is not None else None
        may_bind = None if binding is None else binding.suits
        if binding is not None:
            undo.callback(binding.release)
        if (choice := remembered(config, chunk_size, small=small, policy=described, turns=turns, may_bind=may_bind)) is not None:
            started = manager(choice.setting.num_workers)
        elif len(numbers) * len(turns) == 1 or config.target.startswith(_NOT_MEASURED):
            return manager(None)
        else:
            started, choice = _chosen(config, manager, turns, chunk_size, small, timed, binding)
        if choice is not None:
            _settle(started, choice, turns, tell)
        if choice is not None and choice.setting.bound and binding is not None:
            binding.bind(started.worker_pids())
            started.core_binding = binding
            undo.pop_all()
        return started


def _chosen(
    config: SimConfig,
    manager: Callable[[int | None], EnvManager],
    turns: tuple[int, ...],
    chunk_size: int,
    small: bool | None,
    timed: TimedPolicy | None,
    binding: CoreBinding | None,
) -> tuple[EnvManager, WorkerChoice | None]:
    """The manager that measuring says to take; as many workers as there are cores where it cannot say."""
    numbers = candidates(config.num_slots)
    began = time.perf_counter()
    found = {numbers[-1]: manager(numbers[-1])}
    slow = _starts_slowly(found[numbers[-1]], time.perf_counter() - began)
    spec = found[numbers[-1]].spec
    # Text is answered by models and judges, which cost; what steps all its environments together may draw for all of them at once.
    if slow or spec.action.kind == "text" or spec.steps_together:
        return found[numbers[-1]], None
    try:
        others = {number: partial(manager, number) for number in numbers[:-1]}
        call_s = 0.0 if timed is None else timed.call_s(spec, _of_group(found[numbers[-1]], config.num_groups))
        choice, steady = _measured(config, found, others, turns, Acting.of(small, spec.action, config.num_groups, call_s), binding)
        if steady:
            remember(config, choice, chunk_size, small=small, policy=None if timed is None else timed.described)
    except (SimFault, UserError, ValueError):
        choice = None  # whatever it is, the run meets it in its own words
    chosen = numbers[-1] if choice is None else choice.setting.num_workers
    for number in [number for number in found if choice is None or number != chosen]:
        found.pop(number).close()
    return found.pop(chosen) if chosen in found else manager(chosen), choice


def _of_group(manager: EnvManager, num_groups: int) -> Observation:
    """What the first of so many groups of slots sees at its beginning."""
    group = split_slots(range(manager.num_slots), num_groups)[0]
    return {key: part[group.start : group.stop] for key, part in manager.reset().observation.items()}


def _settle(manager: EnvManager, choice: WorkerChoice, turns: tuple[int, ...], tell: Told) -> None:
    """Take the turns that were chosen, where there was a choice."""
    if len(turns) > 1:
        manager.num_turns = choice.setting.num_turns
    tell(str(choice))


def _measured(
    config: SimConfig,
    found: dict[int, EnvManager],
    others: Mapping[int, Callable[[], EnvManager]],
    ways: tuple[int, ...],
    acting: Acting,
    binding: CoreBinding | None,
) -> tuple[WorkerChoice, bool]:
    """Start the others too, measure all, and leave the chosen one in `found` if it is as it was at its start.

    Returns the choice, and whether it was measured steadily enough to be remembered: other work on the machine may have come in between.
    """
    for number, start in others.items():
        found[number] = start()
    before = {number: _first_steps(manager) for number, manager in found.items()}
    compared = settings(config, ways, None if binding is None else binding.suits)
    turns = {each: Turns(found[each.num_workers], each.num_turns, acting.think_s(each.num_turns)) for each in compared}
    windows: dict[Setting, list[float]] = {each: [] for each in turns}
    # The rate over all windows. More processes than cores are twice as fast in one window as in the next, depending on which of them the
    # kernel puts on one core when they wake; a run has the slow ones too, and they take most of its time.
    rates: dict[Setting, float] = {}
    for number in range(_ROUNDS + _MORE_ROUNDS):
        for each, turn in turns.items():
            if number >= _ROUNDS and max(windows[each]) < _IN_QUESTION * max(rates.values()):
                continue
            if binding is not None:
                binding.bind(found[each.num_workers].worker_pids()) if each.bound else binding.unbind()
            windows[each].append(turn.steps_per_s(_WINDOW_S))
        rates = {each: statistics.harmonic_mean(own) for each, own in windows.items()}
    if binding is not None:
        binding.unbind()
    choice = WorkerChoice(config.name, config.num_slots, rates)
    manager = found[choice.setting.num_workers]
    same = _first_steps(manager) == before[choice.setting.num_workers] and not manager.fault_records
    if not same:  # the past of these workers shows
        found.pop(choice.setting.num_workers).close()
    else:
        manager.reset()
    chosen = windows[choice.setting]
    return choice, max(chosen) < _STEADY * min(chosen)


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
    """The slots of a manager, stepped in turns as a rollout does. Several may share a manager, one after another."""

    def __init__(self, manager: EnvManager, num_groups: int, think_s: float) -> None:
        """Resets all slots. `think_s`: of the policy, for each group."""
        self._manager = manager
        self._groups = [group for group in split_slots(range(manager.num_slots), min(num_groups, manager.num_slots)) if len(group)]
        self._actions = [still_actions(manager, len(group)) for group in self._groups]
        self._think_s = think_s
        manager.reset()

    def steps_per_s(self, seconds: float) -> float:
        """Environment steps per second of about so long, after something like an update, in which the workers fall asleep; the first
        round, in which they wake, does not count."""
        _think(_UPDATE_S)
        for group, actions in zip(self._groups, self._actions, strict=True):
            self._manager.send(group, actions)
        self._round()
        started, rounds = time.perf_counter(), 0
        while (taken := time.perf_counter() - started) < seconds or rounds < 2:
            self._round()
            rounds += 1
        for group in self._groups:
            begin_ended(self._manager, self._manager.recv(group))
        return rounds * self._manager.num_slots / max(taken, 1e-9)

    def _round(self) -> None:
        for group, actions in zip(self._groups, self._actions, strict=True):
            begin_ended(self._manager, self._manager.recv(group))
            _think(self._think_s)
            self._manager.send(group, actions)


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


def _first_steps(manager: EnvManager) -> list[bytes]:
    """What comes of a reset and some steps, bit by bit."""
    actions, slots = still_actions(manager, manager.num_slots), range(manager.num_slots)
    batch, seen = manager.reset(), []
    for _ in range(_COMPARED_STEPS):
        seen += [batch.observation[key].tobytes() for key in manager.spec.tensors]
        begin_ended(manager, batch)
        manager.send(slots, actions)
        batch = manager.recv(slots)
        seen.append(batch.reward.tobytes())
    return seen
