"""`sim.num_workers=auto` against fixed numbers of workers, for simulators of the catalogue.

    python benchmarks/auto_workers.py
    python benchmarks/auto_workers.py --sims halfcheetah ant --rounds 9

For each simulator `auto` first chooses with nothing remembered, as a training run's start does. Then all fixed numbers are alive and
take turns: groups of slots stepped alternately, with a small policy's thinking in between. Medians over rounds. Auto's column is the
fixed number that it chose; what it is measured against is the best of all.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time

from tables import provenance, text_table

from embodied_rl.config import SimConfig
from embodied_rl.config.files import load_sim_config
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.measured_workers import Turns, start_measured
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.worker_choice import candidates

SIMS = ("cartpole", "pendulum", "halfcheetah", "hopper", "walker2d", "ant", "humanoid", "key_door", "pixel_reach", "pixel_tasks", "pusht")
REACH = 0.95
"""Auto is to reach this share of the best fixed number's rate."""
SEEDS = EpisodeSeeds.training(0)


@dataclasses.dataclass(frozen=True)
class Row:
    """One simulator."""

    sim: str
    num_slots: int
    rates: dict[int, float]
    """{number of workers: environment steps per second}"""
    chosen: int
    start_s: float
    """Of the manager, the measurement included."""
    plain_start_s: float
    """Of a manager with the chosen number."""

    @property
    def share(self) -> float:
        """Auto's rate over the best fixed number's."""
        return self.rates[self.chosen] / max(self.rates.values())


def measure(config: SimConfig, rounds: int, segment_s: float) -> Row:
    """Choose, then compare. Raises UserError where the simulator cannot be had here."""
    begun = time.perf_counter()
    with start_measured(config, SEEDS, tell=print) as manager:
        start_s, chosen = time.perf_counter() - begun, manager.num_workers
    managers: dict[int, EnvManager] = {}
    try:
        for number in candidates(config.num_slots):
            begun = time.perf_counter()
            managers[number] = EnvManager.from_config(dataclasses.replace(config, num_workers=number), SEEDS)
            if number == chosen:
                plain_start_s = time.perf_counter() - begun
        turns = {number: Turns(manager, config.pipeline_groups) for number, manager in managers.items()}
        rates: dict[int, list[float]] = {number: [] for number in managers}
        for _ in range(rounds):
            for number, turn in turns.items():
                rates[number].append(turn.steps_per_s(segment_s))
    finally:
        for manager in managers.values():
            manager.close()
    medians = {number: statistics.median(own) for number, own in rates.items()}
    return Row(config.name, config.num_slots, medians, chosen, start_s, plain_start_s)


def report(rows: list[Row]) -> str:
    """The table, and whether auto kept what we want of it."""
    numbers = sorted({number for row in rows for number in row.rates})
    lines = [
        [
            row.sim,
            str(row.num_slots),
            *(f"{row.rates[number]:,.0f}" if number in row.rates else "–" for number in numbers),
            str(row.chosen),
            f"{row.share:.2f}",
            f"{row.start_s - row.plain_start_s:.1f}",
        ]
        for row in rows
    ]
    heads = ["simulator", "slots", *(f"steps/s, {number} worker{'s' * (number > 1)}" for number in numbers)]
    kept = sum(row.share >= REACH for row in rows)
    table = text_table([*heads, "auto chose", "auto / best", "measuring, s"], lines)
    return f"{table}\n\nfigure: auto reaches {REACH:.0%} of the best fixed number with {kept} of {len(rows)} simulators"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sims", nargs="+", default=list(SIMS), help="names of configs/sim")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--segment-s", type=float, default=0.2, help="seconds that each number is measured in each round")
    arguments = parser.parse_args()
    print(provenance())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        rows = [measure(load_sim_config(name), arguments.rounds, arguments.segment_s) for name in arguments.sims]
    print(f"\n{report(rows)}")


if __name__ == "__main__":
    main()
