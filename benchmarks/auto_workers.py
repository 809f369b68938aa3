"""What a run gets that leaves `sim.num_workers`, `sim.pipeline_groups` and `sim.placement` alone, against fixed settings of all three.

    python benchmarks/auto_workers.py
    python benchmarks/auto_workers.py --sims halfcheetah ant --rounds 9

For each simulator `auto` first chooses with nothing remembered, as a training run's start does. Then what it chose and all fixed settings
are alive and take turns: slots stepped together or in groups by turns, with a policy's thinking in between (`Acting`). Rates are over all
rounds. What auto is measured against is the best of all: every number of workers with one group and with two, and what was chosen with
workers bound to cores. A policy of discrete actions acts for two halves by two calls where auto steps them together.

Simulators that are not installed here, or take long to start, are left out with a line each.

Cores are not chosen by time: two runs on one machine would bind their workers to the same. The table says what that costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Literal

from tables import provenance, text_table

from embodied_rl.config import SimConfig
from embodied_rl.config.files import load_sim_config
from embodied_rl.errors import UserError
from embodied_rl.sim.faults import SimFault
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.measured_workers import Turns, start_measured
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.worker_choice import Acting, candidates

SIMS = (
    *("cartpole", "pendulum", "halfcheetah", "hopper", "walker2d", "ant", "humanoid", "key_door", "pixel_reach", "pixel_tasks", "pusht"),
    *("pusht_pixels", "fetch_reach", "fetch_push", "hand_manipulate_block", "adroit_door", "adroit_pen", "metaworld_reach"),
    *("metaworld_push", "metaworld_button_press", "pointmaze", "aloha_transfer_cube", "robosuite_lift"),
)
"""Of configs/sim, what is neither text nor stepped as a batch."""
PIXELS = ("pixel_reach", "pixel_tasks", "pusht_pixels")
"""Whose policies are no small networks."""
GROUPS = (1, 2)
LONGEST_START_S = 20.0
"""What takes longer to start is as a rule not measured by `auto` either, and left out."""
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
    auto: float
    """Environment steps per second of what `auto` chose."""
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
        return self.auto / self.rates[self.best]

    @property
    def share_unbound(self) -> float:
        """The same where placement may not differ: workers and groups are what auto chooses."""
        return self.auto / max(rate for each, rate in self.rates.items() if each.placement == "auto")


def settings_of(config: SimConfig, chosen: Setting) -> list[Setting]:
    """Every number of workers with one group and with two; what was chosen also bound to cores."""
    numbers = [Setting(number, groups) for number in candidates(config.num_slots) for groups in GROUPS]
    bound = Setting(chosen.num_workers, chosen.groups, "spread")
    return sorted(each for each in {*numbers, bound} if each.groups <= config.num_slots)


def measure(config: SimConfig, rounds: int, segment_s: float) -> Row:
    """Choose, then compare. Raises UserError or SimFault where the simulator cannot be had here, TimeoutError where it starts slowly."""
    begun = time.perf_counter()
    managers: dict[Setting | None, EnvManager] = {None: start_measured(config, SEEDS, tell=print, small=config.name not in PIXELS)}
    try:
        auto = managers[None]
        start_s, acting = time.perf_counter() - begun, Acting.of(config.name not in PIXELS, auto.spec.action, config.num_groups)
        if start_s > LONGEST_START_S:
            raise TimeoutError(f"took {start_s:.0f} s to start.")
        chosen = Setting(auto.num_workers, auto.num_turns or config.num_groups)
        turns: dict[Setting | None, Turns] = {None: Turns(auto, chosen.groups, acting.think_s(chosen.groups))}
        for setting in settings_of(config, chosen):
            begun = time.perf_counter()
            fixed = dataclasses.replace(
                config, num_workers=setting.num_workers, pipeline_groups=setting.groups, placement=setting.placement
            )
            managers[setting] = EnvManager.from_config(fixed, SEEDS)
            turns[setting] = Turns(managers[setting], setting.groups, acting.call_s)
            if setting == chosen:
                plain_start_s = time.perf_counter() - begun
        rates: dict[Setting | None, list[float]] = {setting: [] for setting in turns}
        for _ in range(rounds):
            for setting, turn in turns.items():
                rates[setting].append(turn.steps_per_s(segment_s))
    finally:
        for manager in managers.values():
            manager.close()
    means = {setting: statistics.harmonic_mean(own) for setting, own in rates.items() if setting is not None}
    return Row(config.name, config.num_slots, means, chosen, statistics.harmonic_mean(rates[None]), start_s, plain_start_s)


def measured_rows(sims: Sequence[str], rounds: int, segment_s: float, minutes: float) -> list[Row]:
    """One for each simulator that is here and begins in time; a line says why another does not."""
    rows, until = [], time.monotonic() + 60.0 * minutes
    for name in sims:
        try:
            if time.monotonic() > until:
                raise TimeoutError("the minutes are over.")
            rows.append(measure(load_sim_config(name), rounds, segment_s))
        except (UserError, SimFault, TimeoutError) as error:
            print(f"{name}: left out: {str(error).splitlines()[0][:160]}", flush=True)
    return rows


def report(rows: list[Row]) -> str:
    """The table, and whether auto kept what we want of it."""
    lines = [
        [
            row.sim,
            str(row.num_slots),
            "  ".join(f"{setting}: {rate:,.0f}" for setting, rate in sorted(row.rates.items())),
            f"{row.chosen}: {row.auto:,.0f}",
            f"{row.share_unbound:.2f}",
            str(row.best),
            f"{row.share:.2f}",
            f"{row.start_s - row.plain_start_s:.1f}",
        ]
        for row in rows
    ]
    heads = ["simulator", "slots", "steps/s with workers × groups", "auto", "auto / best unbound", "best", "auto / best", "measuring, s"]
    unbound, kept = sum(row.share_unbound >= REACH for row in rows), sum(row.share >= REACH for row in rows)
    return (
        f"{text_table(heads, lines)}\n\nfigure: auto reaches {REACH:.0%} of the best fixed workers and groups with {unbound} of "
        f"{len(rows)} simulators, of the best fixed setting of all with {kept}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sims", nargs="+", default=list(SIMS), help="names of configs/sim")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--segment-s", type=float, default=0.1, help="seconds that each setting is measured in each round")
    parser.add_argument("--minutes", type=float, default=5.5, help="after so many no further simulator begins")
    arguments = parser.parse_args()
    print(provenance())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        rows = measured_rows(arguments.sims, arguments.rounds, arguments.segment_s, arguments.minutes)
    print(f"\n{report(rows)}")


if __name__ == "__main__":
    main()
