"""Resident memory of a simulator worker beside that of the simulator alone: what a process of ours costs more.

    python benchmarks/env_memory.py

Alone: a fresh interpreter makes the same number of environments, steps them and does nothing else. gymnasium's tasks are made
without this package; ManiSkill's with our adapter, without which they need Vulkan. Each is measured in turn, several times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from steppers import Env
from tables import provenance, text_table

from embodied_rl.sim.factory import SimFactory

NUM_STEPS = 100
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "NUMEXPR_NUM_THREADS")
REACH_MB = 30.0
"""What a worker may hold more than its simulator."""
MANISKILL = {"target": "embodied_rl.sim.robots.maniskill:make", "task": "PushCube-v1"}
SIMS: dict[str, Env] = {
    "no-op": Env("no_op:NoOpEnv", {"num_floats": 25}),
    "HalfCheetah-v5": Env(
        "gymnasium:make",
        {"id": "HalfCheetah-v5", "disable_env_checker": True},
        ours={"target": "embodied_rl.sim.robots.mujoco:make", "task": "HalfCheetah-v5"},
    ),
    "PushCube-v1": Env("", ours=MANISKILL),
}


@dataclass(frozen=True)
class Memory:
    """Megabytes (10**6 bytes) of one process."""

    rss: float
    """Resident, shared libraries and shared memory included."""
    pss: float
    """Resident, what is shared divided by the number of its users."""
    uss: float
    """Its alone."""

    @staticmethod
    def of(pid: int) -> Memory:
        info = psutil.Process(pid).memory_full_info()
        return Memory(info.rss / 1e6, info.pss / 1e6, info.uss / 1e6)


def alone(name: str, num_envs: int) -> Memory:
    """Of a fresh interpreter with the simulator in it (`alone.py`). Raises RuntimeError when it fails."""
    described = json.dumps(dataclasses.asdict(SIMS[name]))
    command = [sys.executable, str(Path(__file__).resolve().with_name("alone.py")), described, str(num_envs), str(NUM_STEPS)]
    # The settings of thread pools that a worker has: their buffers are memory.
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:  # what the simulator prints comes before
            if line.strip() == b"ready":
                memory = Memory.of(process.pid)
                process.stdin.close()
                return memory
    raise RuntimeError(f"{name} alone ended with status {process.returncode}; its own message stands above")


def worker(name: str, num_envs: int) -> Memory:
    """Of the one worker of a manager with that many slots."""
    from embodied_rl.sim.manager import EnvManager

    env = SIMS[name]
    factory = SimFactory(**env.ours) if env.ours else SimFactory(env.target, kwargs=env.kwargs)
    with EnvManager(factory, num_envs, num_workers=1) as manager:
        manager.reset()
        actions = np.zeros((num_envs, manager.spec.action.dim), np.float32)
        for _ in range(NUM_STEPS):
            manager.step(actions)
        return Memory.of(manager.worker_pids()[0])


def report(measured: Mapping[str, tuple[list[Memory], list[Memory]]]) -> str:
    """The table: medians of (alone, worker)."""
    rows = []
    for name, pair in measured.items():
        cells = []
        for kind in ("rss", "pss", "uss"):
            before, after = (statistics.median(getattr(one, kind) for one in side) for side in pair)
            cells += [f"{before:.0f}", f"{after:.0f}", f"{after - before:+.1f}"]
        rows.append([name, *cells])
    header = ["MB, medians", *(f"{kind} {what}" for kind in ("RSS", "PSS", "USS") for what in ("alone", "worker", "more"))]
    return text_table(header, rows)


def more_mb(pair: tuple[list[Memory], list[Memory]]) -> float:
    """Median RSS of the worker minus that of the simulator alone, MB."""
    before, after = (statistics.median(one.rss for one in side) for side in pair)
    return after - before


def figure(measured: Mapping[str, tuple[list[Memory], list[Memory]]]) -> str:
    """The figure we quote."""
    more = {name: more_mb(pair) for name, pair in measured.items()}
    kept = "kept" if max(more.values()) <= REACH_MB else "missed"
    parts = ", ".join(f"{name} {value:+.1f} MB" for name, value in more.items())
    return f"figure: resident memory of a worker beyond its simulator's own: {parts} (reach: {REACH_MB:g} MB, {kept})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--sims", nargs="+", choices=list(SIMS), default=list(SIMS))
    arguments = parser.parse_args()
    print(provenance("mujoco", "mani_skill"))
    measured: dict[str, tuple[list[Memory], list[Memory]]] = {name: ([], []) for name in arguments.sims}
    for _ in range(arguments.rounds):
        for name, (before, after) in measured.items():
            before.append(alone(name, arguments.num_envs))
            after.append(worker(name, arguments.num_envs))
    print(f"\n{arguments.num_envs} environments in the process, {NUM_STEPS} steps\n{report(measured)}\n")
    print(figure(measured))


if __name__ == "__main__":
    main()
