"""Measure `sim.num_workers=auto`, `sim.pipeline_groups=auto` and `sim.placement=auto`.

Before a run begins, the measurement compares numbers of workers for the same slots. The first rollouts then try what can change between two
rollouts: whether slots are stepped together, in turns or one by one, and whether workers are bound to cores.

The measurement before the run plays short rollouts with a policy of the run's kind and random weights. Policies that are not built for
this, and episodes of groups, get a pause for each call and constant actions. Several workers are also tried together and bound, so that
each number competes at its best. As many workers as there are cores go first; if fewer would need longer for the simulation than these need
for everything, no others are started. The chosen workers go on as the run's if they reproduce their first numbers; else they are replaced.
The choice changes nothing but time.
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
"""Seconds of a start from which a simulator is not started again to be measured: its steps are slow too, and more workers win."""
_LEAST_START_S = 1.25
"""Processor seconds of a worker below which a slow start counts as the machine's fault, up to `_BUSY` times the longest start."""
_BUSY = 4
_UPDATE_S, _WINDOW_S = 0.002, 0.012
"""Seconds of the pause before each window, in which workers fall asleep as during an update, and of the window itself."""
_LONGEST_S = 0.4
"""Seconds after which no further round begins; the next run continues an undecided comparison."""
_CLEARLY = 1.3
"""Speed-up of as many workers as there are cores over the best case of fewer; from it, fewer are not started."""
_LONG_STEP_S = 100e-6
"""Core seconds of one step from which the time to wake workers is negligible, and so is the core they run on."""
_COMPARED_STEPS, _ENOUGH_S = (3, 8), 0.03
"""Fewest and most steps that check whether workers reproduce their numbers; no more than fit into these seconds beyond the fewest."""
_STEPS, _SIMULATED_S = (4, 32), 0.03
"""Bounds on steps per slot of a short rollout, and seconds to simulate. In shorter rollouts the beginning and the end, which overlap with
no acting, count for more than in a run, and slots in groups seem slower than they are."""
_NOT_MEASURED = ("embodied_rl.sim.remote:",)
"""Prefixes of targets whose simulators run elsewhere; their services are asked for episodes only."""

_THINK_S = 200e-6
"""Seconds that a call of a policy takes a core if no `Player` plays."""

Told = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Player:
    """Plays rollouts with a policy of the run's kind while the workers are chosen."""

    described: str
    """Description of what the policy's time depends on; part of the key of a remembered choice."""
    seconds: Callable[[EnvManager, int], Callable[[], tuple[float, int]]]
    """(manager, steps of each slot) → a function that plays one rollout as `EnvManager.num_turns` says: (seconds, steps)."""


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
    """`EnvManager.from_config` for a long run: measure the ``auto`` settings that are not known yet. The number of workers is measured now,
    the rest in the first rollouts if they try it (`EnvManager.rollout_took`).

    Args:
        tell: takes the lines that report the choice.
        rollouts: whether rollouts of all slots are played; False: slots are stepped as they are ready.
        tried: values of `num_turns` that rollouts try, see `Circumstances`.
        player: plays during the measurement; None: a pause of `_THINK_S` replaces each call of the policy.

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
        if choice is not None and choice.start.has_number:
            started = manager(choice.setting.num_workers)
        else:
            started, choice = _Measurement(asked, manager, binding, player).chosen(choice)
        if choice is not None:
            undo.pop_all()
            started.core_binding = binding
            _settle(started, asked, choice, tell)
        return started


def _settle(manager: EnvManager, asked: Circumstances, choice: WorkerChoice, tell: Told) -> None:
    """Use the choice, and let the run's rollouts try the settings that are still open."""

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
    """Measures managers with different numbers of workers, all alive at once."""

    def __init__(
        self, asked: Circumstances, manager: Callable[[int | None], EnvManager], binding: CoreBinding | None, player: Player | None
    ) -> None:
        """`manager` starts a manager with the given number of workers."""
        self._asked, self._manager, self._binding, self._player = asked, manager, binding, player
        self._numbers = candidates(asked.config.num_slots)
        self._found: dict[int, EnvManager] = {}
        self._plays: dict[int, Callable[[], tuple[float, int]]] = {}
        self._num_steps = 0
        """Steps of each slot in a short rollout."""

    def chosen(self, before: WorkerChoice | None) -> tuple[EnvManager, WorkerChoice | None]:
        """Manager to use and the choice; without a measurement as many workers as cores, and None. `before`: earlier measurements."""
        began, most = time.perf_counter(), self._numbers[-1]
        first = self._found[most] = self._manager(most)
        slow = _starts_slowly(first, time.perf_counter() - began)
        # Models and judges that answer text cost. A simulator that steps all environments together may draw for all at once.
        if first.spec.action.kind == "text" or first.spec.steps_together:
            return first, None
        if slow:  # only how these workers are stepped is still open; their time before the run is compared with nothing
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
            pass  # the run meets the same error and reports it
        number = most if choice is None else choice.setting.num_workers
        for other in [other for other in self._found if choice is None or other != number]:
            self._found.pop(other).close()
        return self._found.pop(number) if number in self._found else self._manager(number), choice

    def _measured(self, start: NumberComparison) -> NumberComparison:
        """Measure the open settings, and keep the chosen manager if its workers reproduce their first steps."""
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
        else:  # these workers depend on what they played before
            self._found.pop(number).close()
        return start

    def _begin(self, number: int) -> tuple[list[bytes], float, float]:
        """`_first_steps` of `number` workers; also builds their policy."""
        timed = _first_steps(manager := self._found[number])
        self._num_steps = self._num_steps or min(max(int(_SIMULATED_S / timed[1]), _STEPS[0]), _STEPS[1])
        if self._player is not None:
            self._plays[number] = self._player.seconds(manager, self._num_steps)
        return timed

    def _if_clear(self, core_s: float) -> NumberComparison | None:
        """Comparison as if fewer workers had been measured, if their simulation would take much longer than everything takes with all
        cores; else None. `core_s`: core seconds of one step of all slots."""
        most, groups, cores = self._numbers[-1], self._asked.config.num_groups, Topology.read(with_gpus=False)
        # Two hardware threads of one core slow each other down; a single one would be faster.
        one_s = self._num_steps * core_s * len(cores.physical_cores) / len(cores.cores)
        seconds, steps = min(self._play(Setting(most, groups))() for _ in range(2))
        if one_s < _CLEARLY * self._numbers[-2] * seconds:
            return None
        taken_s = {Setting(number, groups): one_s / number for number in self._numbers[:-1]} | {Setting(most, groups): seconds}
        return self._asked.compared([{each: taken_s[each] / steps for each in taken_s}] * LEAST_ROUNDS)

    def _seconds(self, setting: Setting) -> float:
        """Seconds per step in one window after a pause like an update; a first play that only wakes the workers does not count."""
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
        """A function that plays a short rollout with these workers, in the groups of slots of `setting`."""
        manager, groups = self._found[setting.num_workers], self._asked.config.num_groups
        return self._plays.get(setting.num_workers) or turns(manager, setting.num_turns, groups, self._num_steps)


def _starts_slowly(manager: EnvManager, seconds: float) -> bool:
    """Whether a simulator that started in `seconds` is too slow to be started a second time."""
    if seconds <= _LONGEST_START_S:
        return False
    try:
        used = [Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split() for pid in manager.worker_pids()]
        busy_s = max(int(fields[11]) + int(fields[12]) for fields in used) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):  # only Linux has /proc: elsewhere only the wall time is known
        return True
    return busy_s > _LEAST_START_S or seconds > _BUSY * _LONGEST_START_S


def turns(manager: EnvManager, num_turns: int, num_calls: int, num_steps: int) -> Callable[[], tuple[float, int]]:
    """Reset all slots; returns a function that plays a rollout with constant actions and slots in turns: (seconds, steps of all slots).
    `num_calls`: calls of the policy per step of all slots; `num_steps`: steps of each slot in a rollout."""
    groups = [group for group in split_slots(range(manager.num_slots), min(num_turns, manager.num_slots)) if len(group)]
    acted = [(group, still_actions(manager, len(group))) for group in groups]
    think_s = _THINK_S * num_calls / len(groups)
    manager.reset()

    def play() -> tuple[float, int]:
        for group, actions in acted:
            manager.send(group, actions)
        started = time.perf_counter()
        for number in range(num_steps):
            for group, actions in acted:
                begin_ended(manager, manager.recv(group))
                if number < num_steps - 1:
                    _think(think_s)
                    manager.send(group, actions)
        return time.perf_counter() - started, num_steps * manager.num_slots

    return play


def _think(seconds: float) -> None:
    """Keep a core busy for `seconds`."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def begin_ended(manager: EnvManager, batch: StepBatch) -> None:
    """Begin new episodes in the slots that ended, if the manager does not reset by itself."""
    if not manager.autoreset and batch.done.any():
        ended = batch.slots[batch.done]
        manager.begin(ended, ended.tolist())
        manager.recv(ended)


def still_actions(manager: EnvManager, num_slots: int) -> np.ndarray:
    """Actions that do as little as possible: the middle of the bounds, or number 0. [n, A], or chunks [n, K, A]."""
    spec: ActionSpec = manager.spec.action
    shape = (num_slots, spec.dim) if manager.chunk_size == 1 else (num_slots, manager.chunk_size, spec.dim)
    if spec.kind != "continuous":
        return np.zeros(shape, spec.dtype)
    middle = (np.asarray(spec.low) + np.asarray(spec.high)) / 2
    return np.broadcast_to(np.where(np.isfinite(middle), middle, 0.0), shape).astype(spec.dtype)


def _first_steps(manager: EnvManager, before: Sequence[bytes] = ()) -> tuple[list[bytes], float, float]:
    """Reset, then step all slots (as often as in `before`); returns (exact bytes of everything seen, shortest seconds of such a step,
    smallest core seconds of one). Core seconds hardly depend on other programs."""
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
    """Processor seconds of the workers' main threads, which other programs hardly change; 0 if unknown."""
    try:
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) for pid in manager.worker_pids()) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
