"""Choose and remember the `auto` values of `sim.num_workers`, `sim.pipeline_groups` and `sim.placement`."""

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
"""Speed-up that justifies a costlier setting. More workers need more memory, unsynchronised slots wake workers more often, and bound
workers cannot move away from other programs."""
_PER_GPU = "embodied_rl.sim.robots.maniskill_gpu:"
_FOLDER = "workers"
_MEASURED = 11
"""Version of the measurement; raise it when the measurement changes, so that remembered results are measured again."""
_TOLERANCE = 0.03
"""Smallest relative speed-up over the leader that keeps a setting in the comparison."""
_NOISE, _DOUBT = 0.1, 2.5
"""Assumed spread of equal settings while samples are few, and the standard errors that make a difference count as measured."""
LEAST_ROUNDS = 3
"""Rounds that a setting takes part in before it may be dropped."""
_STEADY = 1.5
"""Median time over best time of the leader from which a measurement counts as disturbed by other programs."""
_SAMPLE_S = 0.1
"""Seconds of rollouts that make one sample."""
_FREE_S, _SHARE = 1.5, 0.02
"""Budget for trying slower settings: seconds available at once, and share of the rollout time added to them."""
AS_READY = 0
"""`num_turns` value for slots that are stepped one by one, each as soon as it is ready."""


@dataclass(frozen=True, order=True)
class Setting:
    """One choice: how many workers, how their slots are stepped, and whether the workers are bound to cores."""

    num_workers: int
    num_turns: int
    """Groups of slots that are stepped in turns; 1: all together; `AS_READY`: one by one."""
    bound: bool = False
    """Whether each worker is bound to its own cores."""

    def __str__(self) -> str:
        return f"{self.num_workers}x{self.num_turns}{'b' * self.bound}"

    @staticmethod
    def read(text: str) -> Setting:
        """The inverse of `str`. Raises ValueError."""
        workers, turns = text.removesuffix("b").split("x")
        return Setting(int(workers), int(turns), text.endswith("b"))


class Comparison:
    """Measures settings side by side, in rounds, and drops each one that is measurably slower than the leader or less than 3% faster.

    All settings of a round see the same machine and policy, so the comparison uses differences within rounds. It compares means, because a
    run has the slow moments too.
    """

    most_rounds = 60
    """Rounds after which the leader is chosen; what is still open is as fast, or the measurement is noise."""
    leader: Setting
    """Fastest open setting after its price (`WORTH`) is added."""
    _middle: Callable[[Sequence[float]], float] = staticmethod(statistics.fmean)

    def __init__(self, settings: Iterable[Setting], rounds: Iterable[Mapping[Setting, float]] = ()) -> None:
        """Replay `rounds`, which were measured before. Raises KeyError as `add`."""
        self.open = sorted(settings)
        """Settings that are still being compared."""
        if self.open:
            self.leader = self.open[0]
        self.rounds: list[dict[Setting, float]] = []
        """Seconds per step of each setting, one dictionary per round."""
        numbers = sorted({each.num_workers for each in self.open})
        self._price = {each: WORTH ** (numbers.index(each.num_workers) + (each.num_turns != 1) + each.bound) for each in self.open}
        for each in rounds:
            self.add(each)

    def add(self, seconds: Mapping[Setting, float]) -> None:
        """Add a round of seconds per step: of all settings, later of the leader and any others. Raises KeyError for a wrong set."""
        asked = {self.leader} if self.rounds else set(self.open)
        if wrong := (asked - seconds.keys()) | (seconds.keys() - self._price.keys()):
            raise KeyError(", ".join(map(str, sorted(wrong))))
        self.rounds.append(dict(seconds))
        self.leader = min(self.open, key=self._behind_by)
        self.open = [each for each in self.open if not self._is_out(each)] if len(self.rounds) < self.most_rounds else [self.leader]

    @property
    def met(self) -> Iterable[Setting]:
        """Settings that were measured."""
        return self.rounds[0] if self.rounds else ()

    def _both(self, setting: Setting, other: Setting) -> list[tuple[float, float]]:
        """(seconds of `setting`, seconds of `other`) of each round that has both."""
        return [(each[setting], each[other]) for each in self.rounds if setting in each and other in each]

    def _behind(self, setting: Setting) -> list[float]:
        """How much slower than the leader in each shared round, as a share of the leader's mean time; prices are included."""
        own, best = self._price[setting], self._price[self.leader]
        both = self._both(setting, self.leader)
        mean = self._middle([best * theirs for _, theirs in both])
        return [(own * ours - best * theirs) / mean for ours, theirs in both]

    def _behind_by(self, setting: Setting) -> float:
        return self._middle(self._behind(setting))

    def _is_out(self, setting: Setting) -> bool:
        behind = self._behind(setting)
        if setting == self.leader or len(behind) < LEAST_ROUNDS:
            return False
        middle = self._middle(behind)
        error = math.sqrt(_NOISE**2 + sum((each - middle) ** 2 for each in behind)) / len(behind)
        return middle - _DOUBT * error > -_TOLERANCE

    @property
    def is_steady(self) -> bool:
        """Whether the leader was near its best time in most rounds."""
        taken = [seconds[self.leader] for seconds in self.rounds if self.leader in seconds]
        return not taken or statistics.median(taken) < _STEADY * min(taken)

    def gain(self, setting: Setting, other: Setting) -> float:
        """How many times as fast `setting` is as `other` over their shared rounds; 1 if they share none."""
        both = self._both(setting, other)
        return 1.0 + self._middle([theirs - own for own, theirs in both]) / self._middle([own for own, _ in both]) if both else 1.0


class NumberComparison(Comparison):
    """Finds the number of workers before a run. Each round keeps the faster half of the settings of each number, until one is left to meet
    those of other numbers: the luckiest of four samples would seem faster than it is. It compares medians, because the samples are short,
    the first ones are cold, and one interruption makes a sample far longer."""

    most_rounds = 20
    """Enough for two or three starts of a run; each start has to launch the other workers again."""
    _middle = staticmethod(statistics.median)

    def add(self, seconds: Mapping[Setting, float]) -> None:
        super().add(seconds)
        if not self.has_number:
            by_number = [[each for each in self.open if each.num_workers == number] for number in self._numbers]
            halves = [sorted(own, key=self._behind_by)[: (len(own) + 1) // 2] for own in by_number]
            self.open = sorted(each for half in halves for each in half)

    def play(self, seconds: Callable[[Setting], float], longest_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """Measure until the number is known or `longest_s` have passed, one round at least. `seconds` plays a sample: seconds per step."""
        until = clock() + longest_s
        while not self.rounds or (not self.has_number and clock() < until):
            order = self.open[:: -1 if len(self.rounds) % 2 else 1]
            self.add({each: seconds(each) for each in order})

    @property
    def has_number(self) -> bool:
        """Whether the number of workers is decided."""
        return len(self._numbers) == 1

    def rival(self, num_workers: int) -> Setting:
        """Best measured setting with `num_workers`: the one in the most rounds, then the fastest."""
        own = [each for each in self.met if each.num_workers == num_workers]
        return min(own, key=lambda each: (-sum(each in one for one in self.rounds), self.gain(self.leader, each)))

    @property
    def _numbers(self) -> set[int]:
        return {each.num_workers for each in self.open}


class Trials:
    """Tries the open settings in turns during a run's rollouts, until the fastest is known.

    Slower settings may cost `_FREE_S` and a share of the rollout time. Slower settings are tried less often; the leader plays meanwhile.
    """

    def __init__(self, comparison: Comparison, note: Callable[[], object]) -> None:
        """`note` is called once the comparison is decided, or at the end of the run if it is still open."""
        self._comparison, self._note = comparison, note
        self._sample: list[tuple[float, int]] | None = None
        """(seconds, steps) of rollouts with the present setting; None: the next rollout is a warm-up and does not count."""
        self._affordable_s = _FREE_S
        """Seconds that trying slower settings may still cost."""
        self._cost_s: dict[Setting, float] = {}
        """Smallest extra seconds that a sample of each setting has cost over the leader's."""
        self._begin()

    @property
    def setting(self) -> Setting:
        """Setting of the next rollout."""
        return self._left[0]

    @property
    def leader(self) -> Setting:
        """Fastest setting so far."""
        return self._comparison.leader

    @property
    def decided(self) -> bool:
        """Whether one setting is left."""
        return len(self._comparison.open) == 1

    def took(self, seconds: float, num_steps: int) -> None:
        """Record a rollout of `num_steps` steps with `setting`."""
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
        """Save an undecided comparison at the end of the run, so that the next run continues it."""
        if not self.decided and self._comparison.rounds:
            self._note()

    def _begin(self) -> None:
        """Start a round of the leader and the settings that the budget allows, cheapest first. Rounds rotate which one begins."""
        left_s, self._left = self._affordable_s, [self.leader]
        for each in sorted(self._comparison.open, key=lambda each: self._cost_s.get(each, 0.0)):
            if each != self.leader and (left_s := left_s - self._cost_s.get(each, 0.0)) >= 0.0:
                self._left.append(each)
        first = len(self._comparison.rounds) % len(self._left)
        self._left = self._left[first:] + self._left[:first]
        self._round: dict[Setting, tuple[float, int]] = {}
        """(seconds, steps) of each setting's sample in this round."""

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
    """What was measured, and the fastest setting."""

    sim: str
    num_slots: int
    start: NumberComparison
    """Comparison before the run, which finds the number of workers."""
    run: Comparison
    """Comparison in the run's rollouts with that number; empty if rollouts try nothing."""

    @property
    def setting(self) -> Setting:
        """Fastest setting so far."""
        return self.run.leader if self.run.rounds else self.start.leader

    @property
    def decided(self) -> bool:
        """Whether nothing is left to compare."""
        return self.start.has_number and len(self.run.open) <= 1

    def __str__(self) -> str:
        """One line about the settings known so far and their gains; empty if nothing is known."""
        said, number = list[str](), self.start.leader.num_workers
        if others := {each.num_workers for each in self.start.met} - {number}:
            other = 1 if number > 1 else max(others)
            gain = self.start.gain(self.start.leader, self.start.rival(other))
            workers = "1 worker" if number == 1 else f"{number} workers"
            said.append(f"sim.num_workers=auto: {workers} for {self.num_slots} slots of {self.sim}, {gain:.2f} times as fast as {other}")
        if len(self.run.open) <= 1:
            said += self._of_the_rest(after=bool(said))
        return f"{'; '.join(said)} when it was measured here." if said else ""

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
    """Reject ``auto`` with a UserError for a simulator with one process per GPU: measuring cores cannot tell how many."""
    if config.num_workers == "auto" and config.target.startswith(_PER_GPU):
        raise UserError(
            f"sim.num_workers=auto: '{config.name}' runs one process for each GPU. Give their number: sim.num_workers=1 for one GPU."
        )


def candidates(num_slots: int) -> list[int]:
    """Numbers of workers to compare, ascending: 1, half the cores and all cores, each at most `num_slots`."""
    cores = available_cores()
    return sorted({min(max(number, 1), num_slots) for number in (1, cores // 2, cores)})


@dataclass(frozen=True)
class Circumstances:
    """What a choice depends on; the choice is remembered for these values on this machine."""

    config: SimConfig
    chunk_size: int = 1
    rollouts: bool = False
    """Whether rollouts of all slots are played; False: episodes of groups, for which slots are stepped as they are ready."""
    policy: str | None = None
    """Description of the policy that plays during the measurement; None: a pause replaces it."""
    tried: tuple[int, ...] = ()
    """Values of `num_turns` that rollouts try; empty: none."""
    most_bound: int = 0
    """Most workers that can be bound to one core each now."""

    def at_start(self) -> list[Setting]:
        """Settings to compare before the run, ascending: every number of workers, also bound if allowed; several workers also together if
        rollouts may use that. One worker always steps its slots in groups, because the policy acts meanwhile."""
        groups = self.config.num_groups
        several = sorted({*(turns for turns in self.tried if turns != AS_READY), groups})
        return [each for number in candidates(self.config.num_slots) for each in self._with(number, several if number > 1 else [groups])]

    def in_run(self, start: NumberComparison) -> list[Setting]:
        """Settings that rollouts try with the chosen number of workers; empty if there is only one."""
        number = start.leader.num_workers
        found = self._with(number, [each for each in self.tried if each != AS_READY or number > 1])
        return found if len(found) > 1 else []

    def _with(self, number: int, turns: Iterable[int]) -> list[Setting]:
        """Settings of `number` workers with these turns. Bound workers are not stepped one by one, which would not be faster."""
        may_bind = 1 < number <= self.most_bound
        return [Setting(number, each, bound) for each in turns for bound in ((False, True) if may_bind and each != AS_READY else (False,))]

    def compared(self, rounds: Sequence[Mapping[Setting, float]] = ()) -> NumberComparison:
        """Comparison before the run that starts from `rounds`. Raises KeyError for rounds of other settings."""
        settings = self.at_start()
        if rounds and not rounds[0].keys() <= set(settings):
            raise KeyError(str(rounds[0]))
        return NumberComparison([each for each in settings if not rounds or each in rounds[0]], rounds)

    def choice(self, start: NumberComparison, run: Iterable[Mapping[Setting, float]] = ()) -> WorkerChoice:
        """Choice that follows from these measurements. Raises KeyError for rounds of other settings."""
        return WorkerChoice(self.config.name, self.config.num_slots, start, Comparison(self.in_run(start), run))

    def remembered(self) -> WorkerChoice | None:
        """Choice from earlier measurements; None if there are none."""
        answer: Any = RememberedAnswers(_FOLDER).read(*self._question())
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            start, run = (
                [{Setting.read(key): _positive(seconds) for key, seconds in each.items()} for each in answer[part]]
                for part in ("start", "run")
            )
            return self.choice(self.compared(start), run)
        return None

    def remember(self, choice: WorkerChoice) -> None:
        """Save the measurements, unless other programs disturbed them. If the folder is not writable, the next run measures again."""
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
    """`config.num_workers` as a number, if need be from earlier training; None: one per core. Raises UserError as `check_auto`."""
    check_auto(config)
    number = config.fixed_workers
    if config.num_workers == "auto" and num_slots == config.num_slots:
        found = (RememberedAnswers(_FOLDER).read(*_simulator(config, chunk_size)) or {}).get("num_workers")
        number = found if isinstance(found, int) and found > 0 else None
    return None if number is None else min(number, num_slots)


def _simulator(config: SimConfig, chunk_size: int) -> tuple[str, object]:
    """Key of a simulator with its slots on this machine."""
    code = [__version__, _source(config.target)]
    simulator = [config.target, code, config.task, sorted(config.kwargs.items(), key=str), config.num_slots, chunk_size]
    machine = [platform.node(), platform.machine(), available_cores(), config.placement]
    return config.name, [_MEASURED, simulator, machine]


def _source(target: str) -> int | None:
    """Checksum of the simulator's source file (not imported), because an edit may change the cost of a step; None: no such file."""
    places = [Path(folder, *target.partition(":")[0].split(".")) for folder in sys.path]
    files = (file for place in places for file in (place.with_suffix(".py"), place / "__init__.py"))
    return next((zlib.crc32(file.read_bytes()) for file in files if file.is_file()), None)
