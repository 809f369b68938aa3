"""Environment steps a second of a simulator that steps many environments at once on the GPU, through our environment manager.

``python benchmarks/maniskill_gpu.py``: ManiSkill PushCube-v1, random actions, a growing number of slots in one worker. The steps that count
are those whose observations lie in the manager's memory.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
from tables import provenance, text_table

from embodied_rl.config import load_sim_config
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds


def measure(sim: str, slots: int, seconds: float) -> tuple[float, float]:
    """(seconds to start, steps a second) of `slots` environments."""
    begun = time.perf_counter()
    config = replace(load_sim_config(sim), num_slots=slots, num_workers=1, pipeline_groups=1)
    generator, every = np.random.default_rng(0), np.arange(slots)
    with EnvManager.from_config(config, EpisodeSeeds.training(0)) as manager:
        action = manager.spec.action

        def step() -> None:
            if action.kind == "discrete":
                chosen = generator.integers(action.num_actions, size=(slots, 1))
            else:
                chosen = action.denormalise(generator.uniform(-1.0, 1.0, (slots, action.dim)).astype(np.float32))
            manager.send(every, chosen)
            manager.recv(every)

        manager.reset()
        step()
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            step()
            steps += slots
        return start - begun, steps / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sim", default="maniskill_pushcube_gpu")
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=15.0, help="of stepping, for each number of slots")
    options = parser.parse_args()
    print(provenance("mani-skill", "sapien"))
    speeds = {slots: measure(options.sim, slots, options.seconds) for slots in options.slots}
    rows = [[str(slots), f"{start:.1f}", f"{speed:,.0f}"] for slots, (start, speed) in speeds.items()]
    print(f"{options.sim}, one worker, random actions\n\n{text_table(['slots', 's to start', 'steps/s'], rows)}\n")
    best = max(speeds, key=lambda slots: speeds[slots][1])
    print(f"figure: {options.sim} {speeds[best][1]:,.0f} steps/s with {best} slots")


if __name__ == "__main__":
    main()
