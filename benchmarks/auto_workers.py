"""What a run gets that leaves `sim.num_workers`, `sim.pipeline_groups` and `sim.placement` alone, against fixed settings of all three.

    python benchmarks/auto_workers.py
    python benchmarks/auto_workers.py --sims halfcheetah ant --rounds 9

For each simulator `auto` first chooses with nothing remembered, as a training run's start does. Then all fixed settings are alive and take
turns: groups of slots stepped alternately, with a small policy's thinking in between. Medians over rounds. Auto's rate is that of the
setting that it chose; what it is measured against is the best of all: every number of workers, and with the chosen one every number of
groups in `GROUPS` and workers bound to cores.

Groups are not chosen by time: a policy that acts for 8 slots at once sums in another order than for 16, so that a run's numbers would
depend on a clock. Cores are not either: two runs on one machine would bind their workers to the same. The table says what that costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from typing import Literal

from tables import provenance, text_table

from embodied_rl.config import SimConfig
from embodied_rl.config.files import load_sim_config
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.measured_workers import Turns, start_measured
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.worker_choice import candidates

SIMS = ("cartpole", "pendulum", "halfcheetah", "hopper", "walker2d", "ant", "humanoid", "key_door", "pixel_reach", "pixel_tasks", "pusht")
GROUPS = (1, 2, 4)
REACH = 0.95
"""Auto is to reach this share of the best fixed setting's rate."""
SEEDS = EpisodeSeeds.training(0)


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """What a user could have fixed."""

    num_workers: int
    groups: int
    placement: Literal["auto", "spread"] = "auto"

    def __str__(self) -> str:
        bound = ", bound" if self.placement == "spread" else ""
        return f"{self.num_workers} × {self.groups}{bound}"


@dataclasses.dataclass(frozen=True)
class Row:
    """One simulator."""

    sim: str
    num_slots: int
    rates: dict[Setting, float]
    """{setting: environment steps per second}"""
    chosen: Setting
    start_s: float
    """Of the manager, the measurement included."""
    plain_start_s: float
    """Of a manager with the chosen number."""

    @property
    def best(self) -> Setting:
        """The fastest setting."""
        return max(self.rates, key=lambda setting: self.rates[setting])

    @property
    def share(self) -> float:
        """Auto's rate over the best fixed setting's."""
        return self.rates[self.chosen] / self.rates[self.best]

    @property
    def share_of_workers(self) -> float:
        """The same where only the number of workers may differ: what auto chooses."""
        alike = (each for each in self.rates if (each.groups, each.placement) == (self.chosen.groups, self.chosen.placement))
        return self.rates[self.chosen] / max(self.rates[each] for each in alike)


def settings_of(config: SimConfig, chosen: int) -> list[Setting]:
    """Every number of workers with the simulator's groups; with the chosen number every number of groups, and bound to cores."""
    numbers = [Setting(number, config.pipeline_groups) for number in candidates(config.num_slots)]
    groups = [Setting(chosen, number) for number in GROUPS if number <= config.num_slots]
    return sorted({*numbers, *groups, Setting(chosen, config.pipeline_groups, "spread")})


def measure(config: SimConfig, rounds: int, segment_s: float) -> Row:
    """Choose, then compare. Raises UserError where the simulator cannot be had here."""
    begun = time.perf_counter()
    with start_measured(config, SEEDS, tell=print) as manager:
        start_s, chosen = time.perf_counter() - begun, Setting(manager.num_workers, config.pipeline_groups)
    managers: dict[Setting, EnvManager] = {}
    try:
        for setting in settings_of(config, chosen.num_workers):
            begun = time.perf_counter()
            fixed = dataclasses.replace(
                config, num_workers=setting.num_workers, pipeline_groups=setting.groups, placement=setting.placement
            )
            managers[setting] = EnvManager.from_config(fixed, SEEDS)
            if setting == chosen:
                plain_start_s = time.perf_counter() - begun
        turns = {setting: Turns(manager, setting.groups) for setting, manager in managers.items()}
        rates: dict[Setting, list[float]] = {setting: [] for setting in managers}
        for _ in range(rounds):
            for setting, turn in turns.items():
                rates[setting].append(turn.steps_per_s(segment_s))
    finally:
        for manager in managers.values():
            manager.close()
    medians = {setting: statistics.median(own) for setting, own in rates.items()}
    return Row(config.name, config.num_slots, medians, chosen, start_s, plain_start_s)


def report(rows: list[Row]) -> str:
    """The table, and whether auto kept what we want of it."""
    lines = [
        [
            row.sim,
            str(row.num_slots),
            "  ".join(f"{setting}: {rate:,.0f}" for setting, rate in sorted(row.rates.items())),
            str(row.chosen),
            f"{row.share_of_workers:.2f}",
            str(row.best),
            f"{row.share:.2f}",
            f"{row.start_s - row.plain_start_s:.1f}",
        ]
        for row in rows
    ]
    heads = ["simulator", "slots", "steps/s with workers × groups", "auto", "auto / best workers", "best", "auto / best", "measuring, s"]
    workers, kept = sum(row.share_of_workers >= REACH for row in rows), sum(row.share >= REACH for row in rows)
    return (
        f"{text_table(heads, lines)}\n\nfigure: auto reaches {REACH:.0%} of the best fixed number of workers with {workers} of {len(rows)} "
        f"simulators, of the best fixed setting of all with {kept}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sims", nargs="+", default=list(SIMS), help="names of configs/sim")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--segment-s", type=float, default=0.2, help="seconds that each setting is measured in each round")
    arguments = parser.parse_args()
    print(provenance())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        rows = [measure(load_sim_config(name), arguments.rounds, arguments.segment_s) for name in arguments.sims]
    print(f"\n{report(rows)}")


if __name__ == "__main__":
    main()
