"""What a snapshot costs: bytes per environment, milliseconds to take and to restore it; docs/snapshots.md shows the table.

``python benchmarks/snapshot_table.py``: medians over `--repeats` on one environment each, mid-episode, in this process; milliseconds
of CPU time, which other work on the machine disturbs less than the clock. Exactness is what tests/sim/robots/test_snapshots.py and
test_snapshots_maniskill.py prove; here only the cost is measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from tables import markdown_table, provenance

from embodied_rl.errors import UserError
from embodied_rl.sim.factory import SimFactory
from embodied_rl.types import StepBuffers

ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("gymnasium:make", "CartPole-v1", {}),
    ("mujoco:make", "HalfCheetah-v5", {}),
    ("mujoco:make", "Ant-v5", {}),
    ("mujoco:make", "Humanoid-v5", {}),
    ("gymnasium_robotics:make", "FetchPickAndPlace-v4", {}),
    ("metaworld:make", "drawer-open-v3", {}),
    ("pixel_reach:PixelReach", "PixelReach", {"pixels": False}),
    ("maniskill:make", "PushCube-v1", {}),
    ("maniskill:make", "PegInsertionSide-v1", {}),
    ("maniskill:make", "MS-AntRun-v1", {}),
)
NUM_WARM_STEPS = 20


def measure(target: str, task: str, kwargs: dict[str, Any], repeats: int) -> tuple[str, int, float, float]:
    """Kind, bytes, and medians in ms of CPU time of `snapshot` and `restore`."""
    sim: Any = SimFactory(f"embodied_rl.sim.robots.{target}", task, kwargs).make(1)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [1], out)
    rng = np.random.default_rng(0)
    for _ in range(NUM_WARM_STEPS):
        if sim.spec.action.kind == "discrete":
            action = rng.integers(sim.spec.action.num_actions, size=(1, 1))
        else:
            action = rng.uniform(sim.spec.action.low, sim.spec.action.high, (1, sim.spec.action.dim)).astype(np.float32)
        sim.step([0], action, out)
    taken, restored, data = [], [], b""
    for _ in range(repeats):
        start = time.process_time()
        data = sim.snapshot(0)
        taken.append(time.process_time() - start)
        start = time.process_time()
        sim.restore(0, data)
        restored.append(time.process_time() - start)
    kind = sim.spec.snapshots
    sim.close()
    return kind, len(data), 1e3 * statistics.median(taken), 1e3 * statistics.median(restored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="+", metavar="TASK", help="tasks of the table; by default all")
    arguments = parser.parse_args()
    print(provenance("mujoco", "metaworld", "gymnasium-robotics", "mani-skill"))
    rows: list[tuple[str, ...]] = []
    costs: dict[str, float] = {}
    for target, task, kwargs in ROWS:
        if arguments.only and task not in arguments.only:
            continue
        try:
            kind, size, taken_ms, restored_ms = measure(target, task, kwargs, arguments.repeats)
        except UserError as error:
            print(f"left out: {task} ({error})")
            continue
        rows.append((target.partition(":")[0], task, kind, f"{size / 1000:.1f}", f"{taken_ms:.2f}", f"{restored_ms:.2f}"))
        costs[task] = taken_ms + restored_ms
    print(markdown_table(("simulator", "task", "snapshots", "kB per slot", "snapshot, ms", "restore, ms"), rows))
    print("figure: snapshot and restore together, ms: " + ", ".join(f"{task} {cost:.2f}" for task, cost in costs.items()))


if __name__ == "__main__":
    main()
