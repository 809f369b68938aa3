"""ManiSkill on processors, environment steps per second, as multiples of a plain loop's speed × cores; and physics' share of the time.

    python benchmarks/maniskill.py

PushCube-v1, PickCube-v1 and StackCube-v1 from state with random actions drawn beforehand. Sides: ManiSkill's plain loop over
environments in one process (the limit is its speed × cores) and in one process for each core; gymnasium's AsyncVectorEnv, a process
for each environment, over fewer environments because of its memory; ours with environments one by one and as a batch, in lockstep and
in two alternating groups. They take turns within each round. Physics' share is measured apart, in this process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from contest import Entry, Measured, add_arguments, contest, only_possible
from steppers import Env, Side
from tables import provenance, text_table

from embodied_rl.sim.affinity import available_cores

TASKS = ("PushCube-v1", "PickCube-v1", "StackCube-v1")
PLAIN, PER_CORE, ASYNC = "ManiSkill, plain loop in one process", "ManiSkill, plain loops, one per core at once", "gymnasium AsyncVectorEnv"
SINGLES, BATCH, HALVES = "ours, one by one, lockstep", "ours, batch, lockstep", "ours, batch, two alternating groups"
REACH = {"PushCube-v1": 2.5, "PickCube-v1": 3.5, "StackCube-v1": 3.5}
"""Multiples of plain loop × cores that we want of our best way."""


def make(task: str) -> Any:
    """ManiSkill's environment as a gymnasium.Env without a batch dimension, by its own wrapper; success ends no episode, as on our side."""
    import gymnasium

    from embodied_rl.sim.robots.maniskill_sim import registered_tasks
    from embodied_rl.sim.robots.maniskill_state import no_render_materials

    registered_tasks()
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    with no_render_materials(active=True):
        env = gymnasium.make(
            task, obs_mode="state", reward_mode="normalized_dense", sim_backend="physx_cpu", render_backend="none", reconfiguration_freq=0
        )
    return CPUGymWrapper(env, ignore_terminations=True)


def task_env(task: str, batched: bool) -> Env:
    ours = {
        "target": "embodied_rl.sim.robots.maniskill:make",
        "task": task,
        "kwargs": {"reward_mode": "normalized_dense", "batched": batched},
    }
    return Env("maniskill:make", {"task": task}, ours=ours)


def entries(task: str, cores: int, num_envs: int, async_envs: int) -> list[Entry]:
    """All sides with one task."""
    alone, batch = task_env(task, batched=False), task_env(task, batched=True)
    return [
        Entry(PLAIN, Side("plain", alone, num_envs)),
        Entry(PER_CORE, Side("plain_per_core", alone, num_envs, cores)),
        Entry(ASYNC, Side("async", alone, async_envs)),
        Entry(SINGLES, Side("ours", alone, num_envs, cores, {"mode": "lockstep"})),
        Entry(BATCH, Side("ours", batch, num_envs, cores, {"mode": "lockstep"})),
        Entry(HALVES, Side("ours", batch, num_envs, cores, {"mode": "halves"})),
    ]


def multiples(measured: Mapping[str, Measured], cores: int) -> dict[str, list[float]]:
    """{side: (steps/s of it) / (steps/s of the plain loop in that round × cores), one per round}."""
    plain = measured[PLAIN].us
    return {name: [limit / cores / us for limit, us in zip(plain, one.us, strict=True)] for name, one in measured.items()}


def report(task: str, measured: Mapping[str, Measured], cores: int) -> str:
    """The table of one task."""
    found = multiples(measured, cores)
    rows = []
    for name, one in sorted(measured.items(), key=lambda item: -statistics.median(found[item[0]])):
        share = found[name]
        cells = [f"{1e6 / one.median:,.0f}", *(f"{number:.2f}" for number in (statistics.median(share), min(share), max(share)))]
        rows.append([name, *cells, f"{one.cpu_us:.0f}"])
    return text_table([f"{task}, {cores} cores", "steps/s", "x plain x cores", "min", "max", "cpu µs/step"], rows)


def figure(task: str, measured: Mapping[str, Measured], cores: int) -> str:
    """The figure we quote: the best of ours, against the plain loop × cores and against AsyncVectorEnv."""
    found = {name: statistics.median(share) for name, share in multiples(measured, cores).items()}
    ours = max((name for name in found if name.startswith("ours")), key=lambda name: found[name])
    parts = [f"{ours} {found[ours]:.2f}"]
    if ASYNC in found:
        parts.append(f"{found[ours] / found[ASYNC]:.1f}x AsyncVectorEnv")
    kept = "kept" if found[ours] >= REACH[task] else "missed"
    return f"figure: {task}, multiple of ManiSkill's plain loop x {cores} cores: {'; '.join(parts)} (reach: {REACH[task]}, {kept})"


class Physics:
    """Seconds of processor time that PhysX's steps took while `counting`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        from mani_skill.envs.scene import ManiSkillScene

        from embodied_rl.sim.robots.maniskill_batch.physics import BatchSystem

        with (
            mock.patch.object(ManiSkillScene, "step", self._timed(ManiSkillScene.step)),
            mock.patch.object(BatchSystem, "flush", self._timed(BatchSystem.flush)),
        ):
            yield

    def _timed(self, function: Any) -> Any:
        def timed(*arguments: Any) -> None:
            started = time.process_time()
            function(*arguments)
            self.seconds += time.process_time() - started

        return timed


def physics_share(task: str, num_envs: int, num_steps: int, batched: bool) -> tuple[float, float]:
    """Processor time of our simulator by itself, in this process: microseconds per environment step, and the share that is physics."""
    from embodied_rl.sim.factory import SimFactory
    from embodied_rl.types import StepBuffers

    sim = SimFactory(**task_env(task, batched).ours).make(num_envs)
    out, rows, rng = StepBuffers.allocate(sim.spec, num_envs), list(range(num_envs)), np.random.default_rng(0)
    sim.reset(rows, rows, out)
    actions = rng.uniform(sim.spec.action.low, sim.spec.action.high, (num_steps, num_envs, sim.spec.action.dim)).astype(np.float32)
    sim.step(rows, actions[0], out)
    physics = Physics()
    with physics.counting():
        started = time.process_time()
        for t in range(num_steps):
            sim.step(rows, actions[t], out)
        seconds = time.process_time() - started
    sim.close()
    return 1e6 * seconds / (num_steps * num_envs), physics.seconds / seconds


def shares(task: str, num_envs: int, num_steps: int) -> str:
    """One line on a task's physics."""
    told = []
    for name, batched in (("one by one", False), (f"as a batch of {num_envs}", True)):
        us, share = physics_share(task, num_envs, num_steps, batched)
        told.append(f"{share:.0%} of {us:.0f} µs {name}")
    return f"physics' share of a step of {task}: {', '.join(told)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_arguments(parser, rounds=7, segment_s=1.5)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--num-envs", type=int, default=64, help="of ours and of the plain loop; over all workers")
    parser.add_argument("--async-envs", type=int, default=8, help="of AsyncVectorEnv: each is a process of 0.2 GB and more")
    parser.add_argument("--share-steps", type=int, default=60, help="steps of which physics' share is measured")
    parser.add_argument("--only", nargs="+", default=[], metavar="SIDE", help="beginnings of names of sides; the plain loop always runs")
    arguments = parser.parse_args()
    cores = available_cores()
    print(provenance("mani-skill", "sapien"))
    results, lines = {}, []
    for task in arguments.tasks:
        wanted = entries(task, cores, arguments.num_envs, arguments.async_envs)
        wanted = [e for e in wanted if e.name == PLAIN or not arguments.only or e.name.startswith(tuple(arguments.only))]
        possible, notes = only_possible(wanted, arguments.python)
        results[task] = contest(possible, arguments.rounds, arguments.segment_s)
        print(f"\n{report(task, results[task], cores)}", flush=True)
        lines += notes
    for task in arguments.tasks:
        lines.append(shares(task, max(2, arguments.num_envs // cores), arguments.share_steps))
    print(
        f"\nmedians of {arguments.rounds} interleaved rounds, {arguments.num_envs} environments ({arguments.async_envs} of AsyncVectorEnv)"
    )
    print("\n".join(lines))
    for task, measured in reversed(results.items()):
        print(figure(task, measured, cores))


if __name__ == "__main__":
    main()
