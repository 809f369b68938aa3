"""How often each scripted expert succeeds, how long it takes, and what its episodes cost; docs/recording.md shows the tables.

``python benchmarks/experts.py``: `--episodes` seeds of each task from `--first-seed` on, one environment in this process. Our
controllers were adjusted while looking at seeds below 30, so the default begins far from there. An episode ends with its first
success or at the task's limit. Meta-World's fifty tasks come last; `--only metaworld` plays them alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator

import numpy as np
from tables import markdown_table, provenance

from embodied_rl.config import SimConfig, load_sim_config
from embodied_rl.errors import UserError
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.instrumented import EXPERT, instrumented
from embodied_rl.sim.robots.experts import expert_target
from embodied_rl.statistics import wilson_interval
from embodied_rl.types import StepBuffers

CONTROL_MODES = ("pd_ee_delta_pos", "pd_ee_delta_pose", "pd_joint_delta_pos")
METAWORLD = "metaworld"


@dataclasses.dataclass(frozen=True)
class Measured:
    """An expert's episodes."""

    successes: int
    lengths: list[int]
    """Steps of the successful ones."""
    cpu_s: float
    """Of all episodes, the simulator's own time included."""


def subjects() -> Iterator[tuple[str, str, SimConfig]]:
    """(simulator, variant, configuration) of every task that has an expert."""
    for name in ("maniskill_pushcube", "maniskill_pickcube", "maniskill_stackcube", "maniskill_liftpegupright"):
        config = load_sim_config(name)
        for mode in CONTROL_MODES:
            yield name, mode, dataclasses.replace(config, kwargs={**config.kwargs, "control_mode": mode})
    for name in ("fetch_reach", "fetch_push", "key_door"):
        yield name, "", load_sim_config(name)
    pixels = load_sim_config("pixel_reach")
    yield "pixel_reach", "from state", dataclasses.replace(pixels, kwargs={**pixels.kwargs, "pixels": False})
    try:
        from embodied_rl.sim.robots.metaworld import tasks

        names = tasks()
    except UserError as error:
        print(f"left out: Meta-World ({error})")
        return
    for task in names:
        yield METAWORLD, task, dataclasses.replace(load_sim_config("metaworld_reach"), task=task)


def measure(config: SimConfig, num_episodes: int, first_seed: int) -> Measured:
    """Play `num_episodes` seeds from `first_seed` on. Raises UserError where the simulator is not installed."""
    shown = instrumented(config, expert=expert_target(config))
    sim = SimFactory(shown.target, shown.task, shown.kwargs, shown.extra).make(1)
    out = StepBuffers.allocate(sim.spec, 1)
    limit = config.max_episode_steps or sim.spec.max_episode_steps
    assert limit is not None, "an expert that fails would play for ever"
    lengths, started = [], time.process_time()
    for seed in range(first_seed, first_seed + num_episodes):
        sim.reset([0], [seed], out)
        for step in range(1, limit + 1):
            sim.step([0], out.observation[EXPERT].copy(), out)
            if out.success[0]:
                lengths.append(step)
            if out.success[0] or out.terminated[0] or out.truncated[0]:
                break
    cpu_s = time.process_time() - started
    sim.close()
    return Measured(len(lengths), lengths, cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=2000)
    parser.add_argument("--only", nargs="+", metavar="SIM", help="simulators of the table, or Meta-World tasks; by default all")
    arguments = parser.parse_args()
    print(provenance("mujoco", "metaworld", "gymnasium-robotics", "mani-skill"), flush=True)
    header = ("simulator", "variant", "success", "95% interval", "steps, mean (longest)", "CPU ms per episode")
    rows: list[tuple[str, ...]] = []
    rates: dict[str, list[float]] = {}
    for name, variant, config in subjects():
        if arguments.only and not {name, variant} & set(arguments.only):
            continue
        try:
            found = measure(config, arguments.episodes, arguments.first_seed)
        except UserError as error:
            print(f"left out: {name} {variant} ({error})")
            continue
        low, high = wilson_interval(found.successes, arguments.episodes)
        steps = f"{np.mean(found.lengths):.0f} ({max(found.lengths)})" if found.lengths else "-"
        interval = f"{100 * low:.0f} – {100 * high:.0f}%"
        per_episode = f"{1000 * found.cpu_s / arguments.episodes:.0f}"
        rows.append((name, variant, f"{found.successes / arguments.episodes:.0%}", interval, steps, per_episode))
        rates.setdefault(name, []).append(found.successes / arguments.episodes)
        print(" | ".join(rows[-1]), flush=True)
    print()
    print(markdown_table(header, rows))
    worst = ", ".join(f"{name} {min(values):.0%}" for name, values in rates.items())
    print(f"figure: lowest success of the experts on {arguments.episodes} seeds from {arguments.first_seed} on: {worst}")


if __name__ == "__main__":
    main()
