"""How many worker processes `sim.num_workers=auto` stands for: remembered for a simulator, its slots and this machine."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.files import RememberedAnswers
from embodied_rl.sim.affinity import available_cores

WORTH = 1.03
"""More workers take more memory: they must be so many times as fast."""
_PER_GPU = "embodied_rl.sim.robots.maniskill_gpu:"
_FOLDER = "workers"
_MEASURED = 1
"""To be raised when the measurement changes, so that what is remembered is measured again."""


@dataclass(frozen=True)
class WorkerChoice:
    """The number of workers that was the fastest, and what was measured."""

    sim: str
    num_slots: int
    num_workers: int
    steps_per_s: Mapping[str, float]
    """{number of workers: environment steps per second}"""

    @staticmethod
    def of(sim: str, num_slots: int, steps_per_s: Mapping[int, float]) -> WorkerChoice:
        """The fewest workers that no larger number beats by more than `WORTH`."""
        best = min(steps_per_s)
        for num_workers in sorted(steps_per_s):
            if steps_per_s[num_workers] > WORTH * steps_per_s[best]:
                best = num_workers
        return WorkerChoice(sim, num_slots, best, {str(number): round(rate, 1) for number, rate in sorted(steps_per_s.items())})

    @property
    def gain(self) -> float:
        """Times as fast as one worker."""
        return self.steps_per_s[str(self.num_workers)] / self.steps_per_s["1"]

    def __str__(self) -> str:
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        rates = {int(number): rate for number, rate in self.steps_per_s.items()}
        if self.num_workers == 1:
            most = max(rates)
            gained = f"{rates[1] / rates[most]:.2f} times as fast as {most}"
        else:
            gained = f"{self.gain:.2f} times as fast as 1"
        return f"sim.num_workers=auto: {workers} for {self.num_slots} slots of {self.sim}, {gained} when it was measured here."


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


def remembered(config: SimConfig, chunk_size: int = 1) -> WorkerChoice | None:
    """What was chosen for this simulator, these slots and this machine; None: it has not been measured."""
    answer = RememberedAnswers(_FOLDER).read(*_question(config, chunk_size))
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        found = WorkerChoice(**answer)  # type: ignore[arg-type]
        known = {str(number) for number in candidates(config.num_slots)}
        if set(found.steps_per_s) == known and str(found.num_workers) in known and found.gain > 0:
            return found
    return None


def remember(config: SimConfig, choice: WorkerChoice, chunk_size: int = 1) -> None:
    """Keep a choice. A folder that cannot be written keeps nothing: it is measured again next time."""
    RememberedAnswers(_FOLDER).write(*_question(config, chunk_size), asdict(choice))


def auto_workers(config: SimConfig, num_slots: int, chunk_size: int) -> int | None:
    """`config.num_workers` as a number for so many slots; None: as many as there are cores. Raises UserError as `check_auto`."""
    check_auto(config)
    number = config.fixed_workers
    if config.num_workers == "auto" and num_slots == config.num_slots and (choice := remembered(config, chunk_size)) is not None:
        number = choice.num_workers
    return None if number is None else min(number, num_slots)


def _question(config: SimConfig, chunk_size: int) -> tuple[str, object]:
    simulator = [config.target, config.task, sorted(config.kwargs.items(), key=str), config.num_slots, config.pipeline_groups, chunk_size]
    machine = [platform.node(), platform.machine(), available_cores(), config.placement]
    return config.name, [_MEASURED, simulator, machine]
