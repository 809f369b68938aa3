"""What a run gets that leaves `sim.num_workers`, `sim.pipeline_groups` and `sim.placement` alone, against every fixed setting of all three.

    python benchmarks/auto_workers.py
    python benchmarks/auto_workers.py --sims halfcheetah ant --rounds 9

For each simulator `auto` first chooses with nothing remembered, as a training run's start does. Then what it chose and all fixed settings
take turns: every number of workers with one group and with two, free to move and bound to cores, with a policy's thinking in between
(`Acting`). Rates are over all rounds; the setting that auto chose has been measured twice then, and both count for it. A policy of discrete
actions acts for two halves by two calls where auto steps them together.

Simulators that are not installed here are left out with a line each; robosuite's, which starts slowly, has fewer slots.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Sequence

from tables import provenance, text_table

from embodied_rl.config import SimConfig
from embodied_rl.config.files import load_sim_config
from embodied_rl.errors import UserError
from embodied_rl.sim.faults import SimFault
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.measured_workers import Turns, start_measured
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.worker_choice import Acting, Setting, settings

SIMS = (
    *("cartpole", "pendulum", "halfcheetah", "hopper", "walker2d", "ant", "humanoid", "key_door", "pixel_reach", "pixel_tasks", "pusht"),
    *("pusht_pixels", "fetch_reach", "fetch_push", "hand_manipulate_block", "adroit_door", "adroit_pen", "metaworld_reach"),
    *("metaworld_push", "metaworld_button_press", "pointmaze", "aloha_transfer_cube", "robosuite_lift"),
)
"""Of configs/sim, what is neither text nor stepped as a batch."""
PIXELS = ("pixel_reach", "pixel_tasks", "pusht_pixels")
"""Whose policies are no small networks."""
GROUPS = (1, 2)
FEWER_SLOTS = {"robosuite_lift": 4}
"""Of simulators that take long to start."""
LONGEST_START_S = 45.0
"""What takes longer to start is left out."""
REACH = 0.95
"""Auto is to reach this share of the best fixed setting's rate."""
SEEDS = EpisodeSeeds.training(0)


@dataclasses.dataclass(frozen=True)
class Row:
    """One simulator."""

    sim: str
    num_slots: int
    rates: dict[Setting, float]
    """{setting: environment steps per second}, of the chosen one over both of its measurements"""
    chosen: Setting
    again: float
    """The larger rate of the chosen setting's two measurements over the smaller one."""
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
    def share_free(self) -> float:
        """The same where the best may not be bound."""
        return self.rates[self.chosen] / max(rate for each, rate in self.rates.items() if not each.bound)


def measure(config: SimConfig, rounds: int, segment_s: float) -> Row:
    """Choose, then compare. Raises UserError or SimFault where the simulator cannot be had here, TimeoutError where it starts slowly."""
    begun, small = time.perf_counter(), config.name not in PIXELS
    managers: dict[tuple[int, bool] | None, EnvManager] = {None: start_measured(config, SEEDS, tell=print, small=small)}
    try:
        auto = managers[None]
        start_s, acting = time.perf_counter() - begun, Acting.of(small, auto.spec.action, config.num_groups)
        if start_s > LONGEST_START_S:
            raise TimeoutError(f"took {start_s:.0f} s to start.")
        chosen = Setting(auto.num_workers, auto.num_turns or config.num_groups, auto.core_binding is not None)
        turns: dict[Setting | None, Turns] = {None: Turns(auto, chosen.num_turns, acting.think_s(chosen.num_turns))}
        starts: dict[int, float] = {}
        for setting in settings(config, [each for each in GROUPS if each <= config.num_slots], lambda number: number > 1):
            own = setting.num_workers, setting.bound
            if own not in managers:
                begun = time.perf_counter()
                fixed = dataclasses.replace(config, num_workers=setting.num_workers, placement="spread" if setting.bound else "none")
                managers[own] = EnvManager.from_config(fixed, SEEDS)
                starts.setdefault(setting.num_workers, time.perf_counter() - begun)
            turns[setting] = Turns(managers[own], setting.num_turns, acting.call_s)
        rates: dict[Setting | None, list[float]] = {setting: [] for setting in turns}
        for _ in range(rounds):
            for each, turn in turns.items():
                rates[each].append(turn.steps_per_s(segment_s))
    finally:
        for manager in managers.values():
            manager.close()
    twice = [statistics.harmonic_mean(rates[None]), statistics.harmonic_mean(rates[chosen])]
    rates[chosen] += rates.pop(None)
    means = {setting: statistics.harmonic_mean(own) for setting, own in rates.items() if setting is not None}
    return Row(config.name, config.num_slots, means, chosen, max(twice) / min(twice), start_s, starts[chosen.num_workers])


def measured_rows(sims: Sequence[str], rounds: int, segment_s: float, minutes: float) -> list[Row]:
    """One for each simulator that is here and begins in time; a line says why another does not."""
    rows, until = [], time.monotonic() + 60.0 * minutes
    for name in sims:
        try:
            if time.monotonic() > until:
                raise TimeoutError("the minutes are over.")
            config = load_sim_config(name)
            fewer = dataclasses.replace(config, num_slots=FEWER_SLOTS.get(name, config.num_slots))
            rows.append(measure(fewer, rounds, segment_s))
            print(f"{name}: auto took {rows[-1].chosen}, the best is {rows[-1].best}; {rows[-1].share:.2f} of it", flush=True)
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
            str(row.chosen),
            f"{row.again:.2f}",
            f"{row.share_free:.2f}",
            str(row.best),
            f"{row.share:.2f}",
            f"{row.start_s - row.plain_start_s:.1f}",
        ]
        for row in rows
    ]
    heads = [
        "simulator",
        "slots",
        "steps/s with workers x groups (b: bound)",
        "auto",
        "again",
        "auto / best free",
        "best",
        "auto / best",
        "measuring, s",
    ]
    free, kept = sum(row.share_free >= REACH for row in rows), sum(row.share >= REACH for row in rows)
    return (
        f"{text_table(heads, lines)}\n\nfigure: auto reaches {REACH:.0%} of the best fixed workers and groups with {free} of "
        f"{len(rows)} simulators, of the best fixed setting of all with {kept}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sims", nargs="+", default=list(SIMS), help="names of configs/sim")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--segment-s", type=float, default=0.1, help="seconds that each setting is measured in each round")
    parser.add_argument("--minutes", type=float, default=9.0, help="after so many no further simulator begins")
    arguments = parser.parse_args()
    print(provenance())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        rows = measured_rows(arguments.sims, arguments.rounds, arguments.segment_s, arguments.minutes)
    print(f"\n{report(rows)}")


if __name__ == "__main__":
    main()
