"""What `auto` stands for in `sim.num_workers`, `sim.pipeline_groups` and `sim.placement`: remembered for a simulator, its slots and this
machine."""

from __future__ import annotations

import math
import platform
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied_rl import __version__
from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.files import RememberedAnswers
from embodied_rl.sim.affinity import available_cores

WORTH = 1.02
"""More workers take more memory, slots that are not stepped together wake workers more often, bound workers cannot get out of the way of
other programs: each of these must be so many times as fast."""
_PER_GPU = "embodied_rl.sim.robots.maniskill_gpu:"
_FOLDER = "workers"
_MEASURED = 11
"""To be raised when the measurement changes, so that what is remembered is measured again."""
_TOLERANCE = 0.03
"""A setting is out of the question once it is not so much faster than the fastest, beyond doubt."""
_NOISE, _DOUBT = 0.1, 2.5
"""How far apart samples of equal settings are taken to be while few are known; so many standard errors are beyond doubt."""
LEAST_ROUNDS = 3
"""Before these nothing is out."""
_STEADY = 1.5
"""Times as slow as in its best moment the leader is at the start, where other work came in between."""
_SAMPLE_S = 0.1
"""Rollouts that took so long together are a sample."""
_FREE_S, _SHARE = 1.5, 0.02
"""What trying slower settings may cost: so many seconds at once, and this share of the time that rollouts take."""
AS_READY = 0
"""Number of turns where slots are stepped each by itself, and acted for as they are ready."""


@dataclass(frozen=True, order=True)
class Setting:
    """What is chosen."""

    num_workers: int
    num_turns: int
    """Groups of slots that are stepped in turns; 1: all together; `AS_READY`: each slot by itself."""
    bound: bool = False
    """Whether each worker keeps to its own cores."""

    def __str__(self) -> str:
        return f"{self.num_workers}x{self.num_turns}{'b' * self.bound}"

    @staticmethod
    def read(text: str) -> Setting:
        """The inverse of `str`. Raises ValueError."""
        workers, turns = text.removesuffix("b").split("x")
        return Setting(int(workers), int(turns), text.endswith("b"))


class Comparison:
    """Settings that are measured in turns, round by round, until the others are slower than the fastest, or no faster worth a word, beyond
    doubt.

    Times of a round stand side by side: what the machine or the policy did meanwhile, it did to all of them. Compared are mean times, since
    a run has the slow moments too.
    """

    most_rounds = 60
    """After these the leader is taken: the others are as fast, or what is measured is noise."""
    leader: Setting
    """The fastest of those that are in question, its price paid."""

    def __init__(self, settings: Iterable[Setting], rounds: Iterable[Mapping[Setting, float]] = ()) -> None:
        """`rounds`: what was measured before. Raises KeyError as `add`."""
        self.open = sorted(settings)
        """In question."""
        if self.open:
            self.leader = self.open[0]
        self.rounds: list[dict[Setting, float]] = []
        """Seconds a step."""
        numbers = sorted({each.num_workers for each in self.open})
        self._price = {each: WORTH ** (numbers.index(each.num_workers) + (each.num_turns != 1) + each.bound) for each in self.open}
        for each in rounds:
            self.add(each)

    def add(self, seconds: Mapping[Setting, float]) -> None:
        """One more round: seconds a step, of all settings in the first one, later of the leader and others. Raises KeyError for one that is
        missing or unknown."""
        asked = {self.leader} if self.rounds else set(self.open)
        if wrong := (asked - seconds.keys()) | (seconds.keys() - self._price.keys()):
            raise KeyError(", ".join(map(str, sorted(wrong))))
        self.rounds.append(dict(seconds))
        self.leader = min(self.open, key=self._behind_by)
        self.open = [each for each in self.open if not self._is_out(each)] if len(self.rounds) < self.most_rounds else [self.leader]

    @property
    def met(self) -> Iterable[Setting]:
        """All that were measured."""
        return self.rounds[0] if self.rounds else ()

    def _both(self, setting: Setting, other: Setting) -> list[tuple[float, float]]:
        """Their seconds in the rounds that both were in."""
        return [(each[setting], each[other]) for each in self.rounds if setting in each and other in each]

    def _behind(self, setting: Setting) -> list[float]:
        """By what share of the leader's mean time it was slower, in each round that both were in, prices paid."""
        own, best = self._price[setting], self._price[self.leader]
        both = self._both(setting, self.leader)
        mean = self._middle([best * theirs for _, theirs in both])
        return [(own * ours - best * theirs) / mean for ours, theirs in both]

    def _behind_by(self, setting: Setting) -> float:
        return self._middle(self._behind(setting))

    @staticmethod
    def _middle(values: Sequence[float]) -> float:
        return statistics.mean(values)

    def _is_out(self, setting: Setting) -> bool:
        behind = self._behind(setting)
        if setting == self.leader or len(behind) < LEAST_ROUNDS:
            return False
        middle = self._middle(behind)
        error = math.sqrt(_NOISE**2 + sum((each - middle) ** 2 for each in behind)) / len(behind)
        return middle - _DOUBT * error > -_TOLERANCE

    @property
    def is_steady(self) -> bool:
        """Whether the leader was near its best in most rounds."""
        taken = [seconds[self.leader] for seconds in self.rounds if self.leader in seconds]
        return not taken or statistics.median(taken) < _STEADY * min(taken)

    def gain(self, setting: Setting, other: Setting) -> float:
        """Times as fast, over the rounds that both were in; 1 where they never met."""
        both = self._both(setting, other)
        return 1.0 + self._middle([theirs - own for own, theirs in both]) / self._middle([own for own, _ in both]) if both else 1.0


class NumberComparison(Comparison):
    """Before a run: which number of workers. Of equally many, only the faster half goes on to the next round, until one is left, which
    meets those of other numbers in all further rounds: the luckiest of four would seem faster than it is. Compared are medians: samples are
    short, so that whatever holds one up makes it far longer, and the first ones are cold."""

    most_rounds = 20
    """Of two or three starts: other workers are started for them."""

    def add(self, seconds: Mapping[Setting, float]) -> None:
        super().add(seconds)
        if not self.has_number:
            by_number = [[each for each in self.open if each.num_workers == number] for number in self._numbers]
            halves = [sorted(own, key=self._behind_by)[: (len(own) + 1) // 2] for own in by_number]
            self.open = sorted(each for half in halves for each in half)

    def play(self, seconds: Callable[[Setting], float], longest_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """Rounds until the number is known, at least one; none begins after `longest_s`. `seconds`: plays a sample; of a step in it."""
        until = clock() + longest_s
        while not self.rounds or (not self.has_number and clock() < until):
            order = self.open[:: -1 if len(self.rounds) % 2 else 1]
            self.add({each: seconds(each) for each in order})

    @property
    def has_number(self) -> bool:
        """Whether the number of workers is not in question."""
        return len(self._numbers) == 1

    def rival(self, num_workers: int) -> Setting:
        """The best of those with so many workers: what was in the most rounds, the fastest where several were."""
        own = [each for each in self.met if each.num_workers == num_workers]
        return min(own, key=lambda each: (-sum(each in one for one in self.rounds), self.gain(self.leader, each)))

    @property
    def _numbers(self) -> set[int]:
        return {each.num_workers for each in self.open}

    @staticmethod
    def _middle(values: Sequence[float]) -> float:
        return statistics.median(values)


class Trials:
    """The settings that are in question take turns over the rollouts of a run, until the fastest is known.

    Trying may cost `_FREE_S` and a share of the time: the slower a setting was, the less often it is tried, and the fastest so far plays
    meanwhile.
    """

    def __init__(self, comparison: Comparison, note: Callable[[], object]) -> None:
        """`note` is called when it is decided, and when the run ends before."""
        self._comparison, self._note = comparison, note
        self._sample: list[tuple[float, int]] | None = None
        """(seconds, steps) of rollouts with the present setting; None: the next one does not count, in which everything warms up."""
        self._affordable_s = _FREE_S
        """What trying may cost yet."""
        self._cost_s: dict[Setting, float] = {}
        """How much longer than the leader's a sample took, at least."""
        self._begin()

    @property
    def setting(self) -> Setting:
        """Of the next rollout; what was decided stays."""
        return self._left[0]

    @property
    def leader(self) -> Setting:
        """The fastest so far."""
        return self._comparison.leader

    @property
    def decided(self) -> bool:
        """Whether it is the only one left."""
        return len(self._comparison.open) == 1

    def took(self, seconds: float, num_steps: int) -> None:
        """A rollout of so many steps with `setting` took so long."""
        if self._sample is None:
            self._sample = []
            return
        self._sample.append((seconds, num_steps))
        if (sampled_s := sum(each for each, _ in self._sample)) < _SAMPLE_S:
            return
        self._round[self._left.pop(0)] = sampled_s, sum(steps for _, steps in self._sample)
        self._sample = []
        if not self._left:
            self._end_round()
            self._begin()
            if self.decided:
                self._note()

    def end(self) -> None:
        """The run is over: what is known so far goes into the next one."""
        if not self.decided and self._comparison.rounds:
            self._note()

    def _begin(self) -> None:
        """A round of the leader and of what may be tried, what costs least first. Each begins with another one."""
        left_s, self._left = self._affordable_s, [self.leader]
        for each in sorted(self._comparison.open, key=lambda each: self._cost_s.get(each, 0.0)):
            if each != self.leader and (left_s := left_s - self._cost_s.get(each, 0.0)) >= 0.0:
                self._left.append(each)
        first = len(self._comparison.rounds) % len(self._left)
        self._left = self._left[first:] + self._left[:first]
        self._round: dict[Setting, tuple[float, int]] = {}
        """(seconds, steps) of its samples."""

    def _end_round(self) -> None:
        rates = {each: seconds / steps for each, (seconds, steps) in self._round.items()}
        if len(rates) > 1:
            self._comparison.add(rates)
        best = rates.get(self.leader, min(rates.values()))
        for each, (seconds, steps) in self._round.items():
            lost_s = max(0.0, seconds - steps * best)
            self._cost_s[each] = min(lost_s, self._cost_s.get(each, lost_s))
            self._affordable_s += _SHARE * seconds - lost_s


@dataclass(frozen=True)
class WorkerChoice:
    """What was measured, and the setting that is the fastest."""

    sim: str
    num_slots: int
    start: NumberComparison
    """Before a run began: which number of workers."""
    run: Comparison
    """In rollouts, with so many; none where nothing is tried there."""

    @property
    def setting(self) -> Setting:
        """The fastest so far."""
        return self.run.leader if self.run.rounds else self.start.leader

    @property
    def decided(self) -> bool:
        """Whether nothing is in question any more."""
        return self.has_number and len(self.run.open) <= 1

    @property
    def has_number(self) -> bool:
        """Whether the number of workers is not in question."""
        return self.start.has_number

    def __str__(self) -> str:
        """One line of what is known by now, and what it gains; empty: nothing is."""
        said = self._of_workers()
        if len(self.run.open) <= 1:
            said += self._of_the_rest(after=bool(said))
        return f"{'; '.join(said)} when it was measured here." if said else ""

    def _of_workers(self) -> list[str]:
        number = self.start.leader.num_workers
        others = [each for each in self.start.met if each.num_workers != number]
        if not others:
            return []
        other = 1 if number > 1 else max(each.num_workers for each in others)
        gain = self.start.gain(self.start.leader, self.start.rival(other))
        workers = "1 worker" if number == 1 else f"{number} workers"
        return [f"sim.num_workers=auto: {workers} for {self.num_slots} slots of {self.sim}, {gain:.2f} times as fast as {other}"]

    def _of_the_rest(self, after: bool) -> list[str]:
        chosen, compared = self.setting, self.run if self.run.rounds else self.start
        gains = {each: compared.gain(chosen, each) for each in compared.met if each.num_workers == chosen.num_workers and each != chosen}
        said, ways = [], {each.num_turns: gain for each, gain in gains.items() if each.bound == chosen.bound}
        if ways:
            slots = "stepped" if after else f"{self.num_slots} slots of {self.sim} are stepped"
            other = min(ways, key=ways.__getitem__)
            gain = f"{ways[other]:.2f} times as fast as {_way(other)}"
            said.append(f"sim.pipeline_groups=auto: {slots} {_way(chosen.num_turns)}, {gain}")
        if chosen.bound:
            free = [gain for each, gain in gains.items() if not each.bound]
            said.append(f"sim.placement=auto: each worker on its own cores, {min(free):.2f} times as fast as where they may move")
        return said


def _way(num_turns: int) -> str:
    return {AS_READY: "one by one", 1: "together", 2: "in two groups"}.get(num_turns, f"in {num_turns} groups")


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


@dataclass(frozen=True)
class Circumstances:
    """What a choice depends on. It is remembered for these, on this machine."""

    config: SimConfig
    chunk_size: int = 1
    rollouts: bool = False
    """Whether rollouts of all slots are played; False: episodes of groups, for which slots are stepped as they come."""
    policy: str | None = None
    """Of the policy that plays while it is measured; None: time that passes stands for it."""
    tried: tuple[int, ...] = ()
    """Numbers of turns that rollouts try; empty: they try nothing."""
    most_bound: int = 0
    """So many workers may be bound to a core each now."""

    def at_start(self) -> list[Setting]:
        """What is compared before the run, ascending: every number of workers, also bound where they may be, and several also stepped
        together where rollouts may go on so. One worker steps its slots in groups, and the policy acts meanwhile."""
        groups = self.config.num_groups
        several = sorted({*(turns for turns in self.tried if turns != AS_READY), groups})
        return [each for number in candidates(self.config.num_slots) for each in self._with(number, several if number > 1 else [groups])]

    def in_run(self, start: NumberComparison) -> list[Setting]:
        """What rollouts try with the number of workers that was chosen."""
        number = start.leader.num_workers
        found = self._with(number, [each for each in self.tried if each != AS_READY or number > 1])
        return found if len(found) > 1 else []

    def _with(self, number: int, turns: Iterable[int]) -> list[Setting]:
        """Bound workers are not stepped one by one: where they are the fastest, that is no faster."""
        may_bind = 1 < number <= self.most_bound
        return [Setting(number, each, bound) for each in turns for bound in ((False, True) if may_bind and each != AS_READY else (False,))]

    def compared(self, rounds: Sequence[Mapping[Setting, float]] = ()) -> NumberComparison:
        """Before the run, in these rounds. Raises KeyError for rounds of other settings."""
        settings = self.at_start()
        if rounds and not rounds[0].keys() <= set(settings):
            raise KeyError(str(rounds[0]))
        return NumberComparison([each for each in settings if not rounds or each in rounds[0]], rounds)

    def choice(self, start: NumberComparison, run: Iterable[Mapping[Setting, float]] = ()) -> WorkerChoice:
        """What comes of these measurements. Raises KeyError for rounds of other settings."""
        return WorkerChoice(self.config.name, self.config.num_slots, start, Comparison(self.in_run(start), run))

    def remembered(self) -> WorkerChoice | None:
        """What was measured before; None: nothing was."""
        answer: Any = RememberedAnswers(_FOLDER).read(*self._question())
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            start, run = (
                [{Setting.read(key): _positive(seconds) for key, seconds in each.items()} for each in answer[part]]
                for part in ("start", "run")
            )
            return self.choice(self.compared(start), run)
        return None

    def remember(self, choice: WorkerChoice) -> None:
        """Keep what was measured, unless something else took the machine meanwhile. A folder that cannot be written keeps nothing: it is
        measured again next time."""
        if not choice.start.is_steady:
            return
        kept = {
            part: [
                {str(each): float(f"{seconds:.4g}") for each, seconds in one.items()} for one in comparison.rounds if comparison.is_steady
            ]
            for part, comparison in (("start", choice.start), ("run", choice.run))
        }
        RememberedAnswers(_FOLDER).write(*self._question(), kept)
        number = {"num_workers": choice.start.leader.num_workers}
        RememberedAnswers(_FOLDER).write(*_simulator(self.config, self.chunk_size), number)

    def _question(self) -> tuple[str, object]:
        name, simulator = _simulator(self.config, self.chunk_size)
        return name, [simulator, self.config.pipeline_groups, self.rollouts, self.policy, self.tried, self.most_bound]


def _positive(seconds: float) -> float:
    if not 0 < seconds < math.inf:
        raise ValueError(f"{seconds} seconds")
    return float(seconds)


def auto_workers(config: SimConfig, num_slots: int, chunk_size: int) -> int | None:
    """`config.num_workers` as a number for so many slots, as any training found it; None: as many as there are cores.

    Raises UserError as `check_auto`."""
    check_auto(config)
    number = config.fixed_workers
    if config.num_workers == "auto" and num_slots == config.num_slots:
        found = (RememberedAnswers(_FOLDER).read(*_simulator(config, chunk_size)) or {}).get("num_workers")
        number = found if isinstance(found, int) and found > 0 else None
    return None if number is None else min(number, num_slots)


def _simulator(config: SimConfig, chunk_size: int) -> tuple[str, object]:
    """A simulator, its slots and this machine."""
    code = [__version__, _source(config.target)]
    simulator = [config.target, code, config.task, sorted(config.kwargs.items(), key=str), config.num_slots, chunk_size]
    machine = [platform.node(), platform.machine(), available_cores(), config.placement]
    return config.name, [_MEASURED, simulator, machine]


def _source(target: str) -> int | None:
    """A sum over a simulator's file, which is not imported: edited, its steps may cost something else. None: there is no such file."""
    places = [Path(folder, *target.partition(":")[0].split(".")) for folder in sys.path]
    files = (file for place in places for file in (place.with_suffix(".py"), place / "__init__.py"))
    return next((zlib.crc32(file.read_bytes()) for file in files if file.is_file()), None)
