"""What a run gets that leaves `sim.num_workers`, `sim.pipeline_groups` and `sim.placement` alone, against every fixed setting of all three.

    python benchmarks/auto_workers.py --minutes 12
    python benchmarks/auto_workers.py --only halfcheetah ant --seconds 60
    python benchmarks/auto_workers.py --first metaworld_push hopper --minutes 25 --into auto.jsonl

For each simulator `auto` first chooses with nothing remembered: before the run, and in the first rollouts of a real policy with random
weights, as a training run does. Then its setting and the others take turns in playing such rollouts, each after something like an update:
one worker and several, together, in two groups and one by one, free to move and bound to cores. A number of workers that was far behind
before the run is left out. `chose in s` is what the start took longer than a later one of the chosen workers, the faster of two, and than
the look at what other processes take, for which a run's imports leave time.

A ratio is auto's rate over another setting's, over rounds in which both played side by side, with twice its standard error. It is a miss
where all of that is below 0.95. Another setting is played no more once it is slower than auto's beyond doubt.

What is printed at the end is the table of docs/results.md. Rows go into a file as they come; with the same file, `--into FILE`, a second
call goes on with the simulators that are not in it.
Simulators that are not installed here are left out with a line each; robosuite's, which starts slowly, has fewer slots.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tables import markdown_table, provenance

from embodied_rl.config import SimConfig, TrainConfig
from embodied_rl.config.compose import load_train_config
from embodied_rl.errors import UserError
from embodied_rl.generation import make_generator
from embodied_rl.learning.devices import set_compute_threads
from embodied_rl.methods.building import make_rollout_collector
from embodied_rl.policies.build import build_policy
from embodied_rl.roles.components import start_simulators
from embodied_rl.sim.core_binding import CoreBinding
from embodied_rl.sim.faults import SimFault
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.worker_choice import AS_READY, Setting

SIMS = (
    *("cartpole", "pendulum", "halfcheetah", "hopper", "walker2d", "ant", "humanoid", "key_door", "pixel_reach", "pixel_tasks", "pusht"),
    *("pusht_pixels", "fetch_reach", "fetch_push", "hand_manipulate_block", "adroit_door", "adroit_pen", "metaworld_reach"),
    *("metaworld_push", "metaworld_button_press", "pointmaze", "aloha_transfer_cube", "robosuite_lift"),
)
"""Of configs/sim, what is neither text nor stepped as a batch."""
OVERRIDES = {
    "pixel_reach": ("policy=cnn", "algorithm.rollout_steps=24"),
    "pixel_tasks": ("experiment=tiny_vla", "algorithm.rollout_steps=16"),
    "pusht_pixels": ("policy=cnn", "algorithm.rollout_steps=24"),
    "robosuite_lift": ("sim.num_slots=4", "algorithm.rollout_steps=32"),
}
"""Policies that see, and rollouts that leave time for some rounds."""
LONGEST_START_S = 25.0
"""What takes longer to start is left out."""
UPDATE_S, SAMPLE_S = 0.01, 0.1
REACH = 0.95
"""Auto is to reach this share of the best setting's rate."""
CHOOSING = 0.4
"""Of a simulator's seconds, at most, until auto has decided; it plays with the fastest so far then."""
FAR_BEHIND = 1.9
"""Times as fast before the run: the other number of workers is not compared."""


class Player:
    """A manager with a policy that plays rollouts in it."""

    def __init__(self, config: TrainConfig, manager: EnvManager) -> None:
        self.manager, self._version = manager, 0
        torch.manual_seed(0)
        policy = build_policy(config.policy, manager.spec)
        generator = make_generator(config.generation, policy)
        generator.publish(0)
        self._collector = make_rollout_collector(config, manager, generator, policy.action_layout)
        self._collector.restart(reconfigure=False)
        self._binding: CoreBinding | None = None

    def rollout(self) -> tuple[float, int]:
        """(seconds, steps) of one, after something like an update."""
        until = time.perf_counter() + UPDATE_S
        while time.perf_counter() < until:
            pass
        rollout = self._collector.next_rollout(self._version)
        self._version += 1
        return self._collector.times.simulate_s + self._collector.times.act_s, rollout.num_steps

    def seconds(self, setting: Setting, binding: CoreBinding | None) -> float:
        """Of a step, in a sample."""
        self.manager.core_binding = binding
        self.manager.step_as(setting)
        seconds, steps = 0.0, 0
        while seconds < SAMPLE_S:
            one = self.rollout()
            seconds, steps = seconds + one[0], steps + one[1]
        if binding is not None:
            binding.unbind()
        self.manager.core_binding = None
        return seconds / steps


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What auto came to."""

    setting: Setting
    decided: bool
    seconds: float
    """Of start and rollouts until then."""
    start_s: float
    """That the start took longer than one with a choice that is known."""


def choose(config: TrainConfig, seconds: float, undo: ExitStack) -> tuple[Player, Chosen, str]:
    """Start as a run does, and play until auto has decided. Returns auto's line too. Raises UserError, SimFault, TimeoutError."""
    looked, told = time.perf_counter(), list[str]()
    if (binding := CoreBinding.take()) is not None:
        binding.release()
    look_s, began = time.perf_counter() - looked, time.perf_counter()
    manager = start_simulators(config, told.append).simulators
    undo.callback(manager.close)
    assert isinstance(manager, EnvManager)
    if (start_s := time.perf_counter() - began) > LONGEST_START_S:
        raise TimeoutError(f"took {start_s:.0f} s to start.")
    sim, again = dataclasses.replace(config.sim, num_workers=manager.num_workers), time.perf_counter()
    known_s = min(_start_s(sim, config) for _ in range(2))
    start_s, began = start_s - known_s - look_s, began + time.perf_counter() - again
    player, until = Player(config, manager), time.perf_counter() + seconds
    while manager.trials is not None and time.perf_counter() < until:
        player.rollout()
    decided = manager.trials is None
    if manager.trials is not None:
        manager.step_as(manager.trials.leader, for_good=True)
        manager.trials = None
    bound = manager.core_binding is not None
    if manager.core_binding is not None:
        manager.core_binding.release()
        manager.core_binding = None
    turns = config.sim.num_groups if manager.num_turns is None else manager.num_turns
    setting = Setting(manager.num_workers, turns, bound)
    return player, Chosen(setting, decided, time.perf_counter() - began, start_s), told[0] if told else ""


def _start_s(sim: SimConfig, config: TrainConfig) -> float:
    """Seconds until these workers are there, and have reset once."""
    began = time.perf_counter()
    with EnvManager.from_config(sim, EpisodeSeeds.training(config.seed), chunk_size=config.policy.chunk_size) as manager:
        manager.reset()
        return time.perf_counter() - began


def ratio(own: list[float], other: list[float]) -> tuple[float, float]:
    """(auto's rate over the other's, twice its standard error), of seconds a step side by side."""
    mean = statistics.mean(other) / statistics.mean(own)
    apart = [(theirs - mean * mine) / statistics.mean(own) for mine, theirs in zip(own, other, strict=True)]
    return mean, 2 * statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 2 else math.inf


def compare(
    chosen: Setting, settings: list[Setting], seconds_of: Callable[[Setting], float], until: float
) -> dict[Setting, tuple[list[float], list[float]]]:
    """{setting: seconds a step of auto's, and its own, in rounds that both were in}; auto's own is measured twice."""
    pairs: dict[Setting, tuple[list[float], list[float]]] = {each: ([], []) for each in settings}
    going, number = list(settings), 0
    while time.perf_counter() < until or number <= 2:
        # Auto's setting is played in the middle of the others, which begin with another one each time.
        order = going[number % len(going) :] + going[: number % len(going)]
        middle = len(order) // 2
        order.insert(middle, chosen)
        taken = [(each, seconds_of(each)) for each in order]
        own = taken.pop(middle)[1]
        for each, seconds in taken:
            pairs[each][0].append(own)
            pairs[each][1].append(seconds)
        for each in list(going):
            mean, error = ratio(*pairs[each])
            if each != chosen and mean - error > 1.02 and number > 2:
                going.remove(each)
        number += 1
    return pairs


def measure(name: str, seconds: float) -> dict[str, Any]:
    """A row. Raises UserError or SimFault where the simulator cannot be had here, TimeoutError where it starts slowly."""
    began = time.perf_counter()
    config = load_train_config([f"sim={name}", "hybrid.device=cpu", *OVERRIDES.get(name, ())])
    with ExitStack() as undo:
        player, chosen, line = choose(config, seconds * CHOOSING, undo)
        print(f"{name}: {line}", flush=True)
        players = {player.manager.num_workers: player}
        cores = len(os.sched_getaffinity(0))
        gains = [float(part.split(" times")[0].rsplit(" ", 1)[-1]) for part in line.split(";") if "sim.num_workers=auto" in part]
        for number in {1, min(cores, config.sim.num_slots)} - players.keys():
            if not gains or gains[0] < FAR_BEHIND:
                sim = dataclasses.replace(config.sim, num_workers=number)
                manager = EnvManager.from_config(sim, EpisodeSeeds.training(config.seed), chunk_size=config.policy.chunk_size)
                undo.callback(manager.close)
                players[number] = Player(config, manager)
        binding = CoreBinding.take()
        if binding is not None:
            undo.callback(binding.release)
        settings = [
            Setting(number, turns, bound)
            for number in players
            for turns in ((1, 2, AS_READY) if number > 1 else (1, 2))
            for bound in ((False, True) if number > 1 and binding is not None else (False,))
        ]

        def seconds_of(setting: Setting) -> float:
            return players[setting.num_workers].seconds(setting, binding)

        pairs = compare(chosen.setting, settings, seconds_of, began + seconds)
    found = {str(each): ratio(*pair) for each, pair in pairs.items()}
    return {
        "sim": name,
        "slots": config.sim.num_slots,
        "auto": str(chosen.setting),
        "decided": chosen.decided,
        "choosing_s": round(chosen.seconds, 1),
        "start_s": round(chosen.start_s, 2),
        "steps_per_s": round(1 / statistics.mean(pairs[chosen.setting][0])),
        "rounds": len(pairs[chosen.setting][0]),
        "ratios": {each: [round(mean, 3), round(error, 3)] for each, (mean, error) in found.items()},
    }


def worst(row: dict[str, Any]) -> tuple[str, float, float]:
    """(the setting that auto is furthest behind, ratio, twice its standard error)"""
    others = {each: one for each, one in row["ratios"].items() if each != row["auto"]} or {row["auto"]: (1.0, 0.0)}
    name = min(others, key=lambda each: others[each][0])
    return name, *others[name]


def report(rows: list[dict[str, Any]]) -> str:
    """The table of docs/results.md, and whether auto kept what we want of it."""
    settings = {Setting.read(each) for row in rows for each in row["ratios"]}
    columns = sorted(settings, key=lambda each: (each.num_workers, each.num_turns or math.inf, each.bound))
    lines = []
    for row in rows:
        ratios = [row["ratios"].get(str(each)) for each in columns]
        cells = ["" if one is None else f"{one[0]:.2f} ± {one[1]:.2f}" for one in ratios]
        chosen = [row["auto"] + ("" if row["decided"] else ", undecided"), f"{row['start_s']:.2f}", f"{row['choosing_s']:.0f}"]
        lines.append([row["sim"], str(row["slots"]), *cells, *chosen])
    heads = [f"{each.num_workers} × {each.num_turns}{' b' * each.bound}" for each in columns]
    missed = [row["sim"] for row in rows if sum(worst(row)[1:]) < REACH]
    within = sum(worst(row)[1] >= REACH for row in rows)
    told = f" ({', '.join(missed)})" if missed else ""
    return (
        f"{markdown_table(['', 'slots', *heads, 'auto took', 'chose in, s', 'decided after, s'], lines)}\n\n"
        "workers × turns (0: one by one; b: bound); undecided: the fastest so far\n"
        f"figure: auto is beyond doubt behind {REACH:.0%} of the best setting with {len(missed)} of {len(rows)} simulators{told}; "
        f"its mean is at {REACH:.0%} or more with {within}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SIMS), metavar="NAME", help="names of configs/sim")
    parser.add_argument("--first", nargs="+", default=[], metavar="NAME", help="of these, what begins")
    parser.add_argument("--minutes", type=float, default=12.0, help="for all that are left; no simulator begins later")
    parser.add_argument("--seconds", type=float, default=None, help="for each simulator; by default its share of the minutes")
    parser.add_argument("--into", type=Path, default=None, help="rows as they come, one JSON object a line; what is there is not repeated")
    arguments = parser.parse_args()
    print(provenance())
    set_compute_threads(1, 1)  # as a run acts; numpy's threads would go on spinning where workers are to step
    into: Path | None = arguments.into
    rows = [json.loads(line) for line in into.read_text().splitlines()] if into is not None and into.exists() else []
    names = dict.fromkeys([*arguments.first, *arguments.only])
    left, until = [name for name in names if name not in {row["sim"] for row in rows}], time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        while left and (left_s := until - time.monotonic()) > 0:
            name = left.pop(0)
            try:
                row = measure(name, arguments.seconds or left_s / (len(left) + 1))
            except (UserError, SimFault, TimeoutError) as error:
                print(f"{name}: left out: {str(error).splitlines()[0][:160]}", flush=True)
                continue
            rows.append(row)
            best, mean, noise = worst(row)
            print(f"{name}: auto took {row['auto']}: {mean:.2f} ± {noise:.2f} of {best}, the best other", flush=True)
            if into is not None:
                with into.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    if left:
        print(f"The minutes are over. Left: {', '.join(left)}. Go on with --into FILE.")
    print(f"\n{report(rows)}")


if __name__ == "__main__":
    main()
