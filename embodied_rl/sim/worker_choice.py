"""What `auto` stands for in `sim.num_workers`, `sim.pipeline_groups` and `sim.placement`: remembered for a simulator, its slots and this
machine."""

from __future__ import annotations

import dataclasses
import functools
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.files import RememberedAnswers
from embodied_rl.sim.affinity import available_cores
from embodied_rl.types import ActionSpec, Observation, SimSpec

WORTH = 1.03
"""More workers take more memory: they must be so many times as fast."""
BOUND_WORTH = 1.05
"""Bound workers cannot get out of the way of other programs: they must be so many times as fast as any that may move."""
TURNS_WORTH = 1.05
"""Stepping in turns wakes workers more often, and is less steady for it: it must be so many times as fast as stepping together."""
_PER_GPU = "embodied_rl.sim.robots.maniskill_gpu:"
_FOLDER = "workers"
_MEASURED = 5
"""To be raised when the measurement changes, so that what is remembered is measured again."""


@dataclass(frozen=True, order=True)
class Setting:
    """What is chosen."""

    num_workers: int
    num_turns: int
    """Groups of slots that are stepped in turns; 1: all together."""
    bound: bool = False
    """Whether each worker keeps to its own cores."""

    def __str__(self) -> str:
        return f"{self.num_workers}x{self.num_turns}{'b' * self.bound}"

    @staticmethod
    def read(text: str) -> Setting:
        """The inverse of `str`. Raises ValueError."""
        workers, turns = text.removesuffix("b").split("x")
        return Setting(int(workers), int(turns), text.endswith("b"))


@dataclass(frozen=True)
class TimedPolicy:
    """A policy whose acting takes long enough to be timed before workers are chosen beside it."""

    described: str
    """What its time depends on: a choice is remembered for it."""
    call_s: Callable[[SimSpec, Observation], float]
    """(the simulator's spec, observations [n, ...]) → seconds of a call for these rows."""


@dataclass(frozen=True)
class Acting:
    """How a policy acts, as far as a rollout's time depends on it."""

    call_s: float
    """Of one call, with what the collector does around it; both take a core."""
    calls: int
    """For all slots, where these are stepped together; each group that is stepped by itself takes one."""
    LONGEST_S = 0.01
    """A call that takes longer is taken for one of this: stepping hides behind either, and a window holds some of these."""

    @staticmethod
    def of(small: bool | None, action: ActionSpec, num_groups: int, call_s: float = 0.0) -> Acting:
        """Of a small Gaussian network, which numpy computes for all slots at once (`Generator.act_in_parts`), or of another policy, whose
        calls take `call_s` by themselves."""
        if small and action.kind == "continuous":
            return Acting(30e-6, 1)
        return Acting(min(max(200e-6, call_s), Acting.LONGEST_S), num_groups)

    def think_s(self, num_turns: int) -> float:
        """Seconds of thinking in each of so many turns."""
        return self.call_s * (self.calls if num_turns == 1 else 1)


@dataclass(frozen=True)
class WorkerChoice:
    """What was measured, and the setting that is the fastest."""

    sim: str
    num_slots: int
    steps_per_s: Mapping[Setting, float]
    """{setting: environment steps per second}"""

    @functools.cached_property
    def setting(self) -> Setting:
        """The fewest workers that no larger number beats by more than `WORTH`, with the turns that suit them best; bound ones
        where they are `BOUND_WORTH` times as fast."""
        free, bound = (self._by_workers(bound=bound) for bound in (False, True))
        best = free[min(free)]
        for _, each in sorted(free.items()):
            if self.steps_per_s[each] > WORTH * self.steps_per_s[best]:
                best = each
        better = [each for each in bound.values() if self.steps_per_s[each] > BOUND_WORTH * self.steps_per_s[best]]
        return max(better, key=self.steps_per_s.__getitem__, default=best)

    def _by_workers(self, *, bound: bool) -> dict[int, Setting]:
        """{number of workers: the setting with the turns that suit them}"""
        found: dict[int, Setting] = {}
        for each in sorted(each for each in self.steps_per_s if each.bound == bound):  # together comes first
            least = self.steps_per_s[found[each.num_workers]] * TURNS_WORTH if each.num_workers in found else 0.0
            if self.steps_per_s[each] > least:
                found[each.num_workers] = each
        return found

    def gain(self, other: int) -> float:
        """Times as fast as so many workers, with the turns that suit them best."""
        theirs = max(rate for each, rate in self.steps_per_s.items() if each.num_workers == other)
        return self.steps_per_s[self.setting] / theirs

    def __str__(self) -> str:
        said, chosen = [], self.setting
        if len(numbers := {each.num_workers for each in self.steps_per_s}) > 1:
            workers = "1 worker" if chosen.num_workers == 1 else f"{chosen.num_workers} workers"
            other = max(numbers) if chosen.num_workers == 1 else 1
            said.append(
                f"sim.num_workers=auto: {workers} for {self.num_slots} slots of {self.sim}, {self.gain(other):.2f} times as fast as {other}"
            )
        same = {each: rate for each, rate in self.steps_per_s.items() if each.num_workers == chosen.num_workers}
        others = [rate for each, rate in same.items() if each.bound == chosen.bound and each != chosen]
        if others:
            ways = ("together", "in two groups") if chosen.num_turns == 1 else ("in two groups", "together")
            slots = "stepped" if said else f"{self.num_slots} slots of {self.sim} are stepped"
            gain = self.steps_per_s[chosen] / max(others)
            said.append(f"sim.pipeline_groups=auto: {slots} {ways[0]}, {gain:.2f} times as fast as {ways[1]}")
        if chosen.bound:
            gain = self.steps_per_s[chosen] / max(rate for each, rate in same.items() if not each.bound)
            said.append(f"sim.placement=auto: each worker on its own cores, {gain:.2f} times as fast as where they may move")
        return f"{'; '.join(said)} when it was measured here."


def check_auto(config: SimConfig) -> None:
    """Raises UserError for ``auto`` where a simulator runs a process for each GPU: no measurement of cores can say how many."""
    if config.num_workers == "auto" and config.target.startswith(_PER_GPU):
        raise UserError(
            f"sim.num_workers=auto: '{config.name}' runs one process for each GPU. Give their number: sim.num_workers=1 for one GPU."
        )


def candidates(num_slots: int) -> list[int]:
    """Numbers of workers that are compared, ascending: one, half the cores, all cores; never more than slots."""
    cores = available_cores()
    return sorted({min(max(number, 1), num_slots) for number in (1, cores // 2, cores)})


def settings(config: SimConfig, turns: Sequence[int], may_bind: Callable[[int], bool] | None = None) -> list[Setting]:
    """What is compared, ascending: every number of workers with each of these numbers of turns, also bound where so many may be."""
    numbers = candidates(config.num_slots)
    free = [Setting(number, each) for number in numbers for each in turns]
    return sorted(free + [dataclasses.replace(each, bound=True) for each in free if may_bind is not None and may_bind(each.num_workers)])


def remembered(
    config: SimConfig,
    chunk_size: int = 1,
    *,
    small: bool | None = None,
    policy: str | None = None,
    turns: Sequence[int] = (),
    may_bind: Callable[[int], bool] | None = None,
) -> WorkerChoice | None:
    """What was chosen for this simulator, these slots and this machine; None: it has not been measured.

    Args:
        small: see `Acting.of`; None: with episodes of groups.
        policy: what a `TimedPolicy` is remembered for; None: the last one, or one that was not timed.
        turns: what has to be among what was measured; empty: whatever was.
        may_bind: whether so many workers may be bound now, which then has to be among it; None: none may, whatever was measured.
    """
    answer: Any = RememberedAnswers(_FOLDER).read(*_question(config, chunk_size, small, policy))
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        rates = {Setting.read(key): float(rate) for key, rate in answer.items()}
        known = settings(config, turns or sorted({each.num_turns for each in rates}), may_bind)
        measured = {each: rates[each] for each in known}
        if measured and all(0 < rate < math.inf for rate in measured.values()):
            return WorkerChoice(config.name, config.num_slots, measured)
    return None


def remember(config: SimConfig, choice: WorkerChoice, chunk_size: int = 1, *, small: bool | None = None, policy: str | None = None) -> None:
    """Keep what was measured. A folder that cannot be written keeps nothing: it is measured again next time."""
    rates = {str(each): round(rate, 1) for each, rate in sorted(choice.steps_per_s.items())}
    for described in {policy, None}:
        RememberedAnswers(_FOLDER).write(*_question(config, chunk_size, small, described), rates)


def auto_workers(config: SimConfig, num_slots: int, chunk_size: int) -> int | None:
    """`config.num_workers` as a number for so many slots, as any training found it; None: as many as there are cores.

    Raises UserError as `check_auto`."""
    check_auto(config)
    number = config.fixed_workers
    if config.num_workers == "auto" and num_slots == config.num_slots:
        found = (remembered(config, chunk_size, small=small) for small in (True, False, None))
        number = next((choice.setting.num_workers for choice in found if choice is not None), None)
    return None if number is None else min(number, num_slots)


def _question(config: SimConfig, chunk_size: int, small: bool | None, policy: str | None) -> tuple[str, object]:
    simulator = [config.target, config.task, sorted(config.kwargs.items(), key=str), config.num_slots, config.pipeline_groups, chunk_size]
    machine = [platform.node(), platform.machine(), available_cores(), config.placement]
    return config.name, [_MEASURED, simulator, machine, small, policy]
