"""Environment steps per second with real simulators, as a share of the physical limit: a plain loop's speed × cores.

    python benchmarks/env_throughput.py

Eight environments of HalfCheetah-v5 (about 30 µs a step: transport decides) and of Ant-v5 (about 200 µs: waiting for the slowest
decides) with the same random actions, drawn beforehand. Sides: our EnvManager in lockstep, with two alternating groups (both also with
each worker bound to a core) and asynchronously; gymnasium's AsyncVectorEnv; stable-baselines3's SubprocVecEnv; EnvPool, synchronous and
asynchronous; `multiprocessing.Queue` workers (RLinf's and verl's way); a Ray actor per environment. They take turns within each round;
the limit is measured in the same rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping

from contest import Entry, Measured, add_arguments, contest, only_possible
from steppers import Env, Side
from tables import provenance, text_table

from embodied_rl.sim.affinity import available_cores

NUM_ENVS = 8
TASKS = ("HalfCheetah-v5", "Ant-v5")
PLAIN, PER_CORE = "plain loop, one process", "plain loops, one per core at once"
ASYNC = "gymnasium AsyncVectorEnv"
REACH = {"HalfCheetah-v5": 0.75, "Ant-v5": 0.85}
"""Share of the limit that we want with our best way, on two cores."""


def task_env(task: str) -> Env:
    """The registered task without gymnasium's checker, which ours leaves out too; EnvPool has it in C++."""
    ours = {"target": "embodied_rl.sim.robots.mujoco:make", "task": task}
    return Env("gymnasium:make", {"id": task, "disable_env_checker": True}, ours=ours, envpool=task)


def entries(task: str, cores: int) -> list[Entry]:
    """All sides with one task."""
    env, workers, half = task_env(task), min(cores, NUM_ENVS), NUM_ENVS // 2
    return [
        Entry(PLAIN, Side("plain", env, NUM_ENVS)),
        Entry(PER_CORE, Side("plain_per_core", env, NUM_ENVS, workers)),
        Entry("ours, lockstep", Side("ours", env, NUM_ENVS, workers, {"mode": "lockstep"})),
        Entry("ours, two alternating groups", Side("ours", env, NUM_ENVS, workers, {"mode": "halves"})),
        Entry("ours, lockstep, workers pinned", Side("ours", env, NUM_ENVS, workers, {"mode": "lockstep", "placement": "spread"})),
        Entry(
            "ours, two alternating groups, workers pinned", Side("ours", env, NUM_ENVS, workers, {"mode": "halves", "placement": "spread"})
        ),
        Entry(f"ours, asynchronous (min_ready={half})", Side("ours", env, NUM_ENVS, workers, {"mode": "asynchronous", "min_ready": half})),
        Entry("ours, asynchronous (min_ready=1)", Side("ours", env, NUM_ENVS, workers, {"mode": "asynchronous", "min_ready": 1})),
        Entry("EnvPool, synchronous", Side("envpool", env, NUM_ENVS, workers)),
        Entry(f"EnvPool, asynchronous (batch_size={half})", Side("envpool", env, NUM_ENVS, workers, {"batch_size": half})),
        Entry("EnvPool, asynchronous (batch_size=2)", Side("envpool", env, NUM_ENVS, workers, {"batch_size": 2})),
        Entry(ASYNC, Side("async", env, NUM_ENVS)),
        Entry("SB3 SubprocVecEnv", Side("subproc", env, NUM_ENVS)),
        Entry("mp.Queue workers", Side("queue", env, NUM_ENVS, workers)),
        Entry("Ray actors", Side("ray", env, NUM_ENVS)),
    ]


def shares(measured: Mapping[str, Measured], cores: int) -> dict[str, list[float]]:
    """{side: its share of the limit, one per round}: (steps/s of it) / (steps/s of the plain loop in that round × cores)."""
    plain = measured[PLAIN].us
    return {name: [limit / cores / us for limit, us in zip(plain, one.us, strict=True)] for name, one in measured.items()}


def report(task: str, measured: Mapping[str, Measured], cores: int) -> str:
    """The table of one task."""
    found = shares(measured, cores)
    slowest = measured[ASYNC].median if ASYNC in measured else float("nan")
    rows = []
    for name, one in sorted(measured.items(), key=lambda item: -statistics.median(found[item[0]])):
        share = found[name]
        cells = [f"{1e6 / one.median:,.0f}", f"{statistics.median(share):.2f}", f"{min(share):.2f}", f"{max(share):.2f}"]
        rows.append([name, *cells, f"{one.cpu_us:.1f}", f"{slowest / one.median:.1f}x"])
    header = [f"{task}, {NUM_ENVS} environments, {cores} cores", "steps/s", "share", "min", "max", "cpu µs/step", "AsyncVectorEnv / it"]
    return text_table(header, rows)


def figure(task: str, measured: Mapping[str, Measured], cores: int) -> str:
    """The figure we quote: shares of the best of ours and of EnvPool, and how many times as fast as AsyncVectorEnv ours is."""
    found = {name: statistics.median(share) for name, share in shares(measured, cores).items()}
    ours = max((name for name in found if name.startswith("ours")), key=lambda name: found[name])
    parts = [f"ours {found[ours]:.2f} ({ours.removeprefix('ours, ')})"]
    if PER_CORE in found:
        parts.append(f"plain loops on all cores at once {found[PER_CORE]:.2f}")
    pools = [name for name in found if name.startswith("EnvPool")]
    if pools:
        pool = max(pools, key=lambda name: found[name])
        parts.append(f"EnvPool {found[pool]:.2f} ({pool.removeprefix('EnvPool, ')})")
    if ASYNC in found:
        parts.append(f"AsyncVectorEnv {found[ASYNC]:.2f}, {found[ours] / found[ASYNC]:.1f}x slower than ours")
    kept = "kept" if found[ours] >= REACH[task] else "missed"
    return f"figure: share of plain loop x {cores} cores on {task}: {'; '.join(parts)} (reach for ours: {REACH[task]}, {kept})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_arguments(parser, rounds=9, segment_s=0.5)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--only", nargs="+", default=[], metavar="SIDE", help="beginnings of names of sides; the plain loop always runs")
    arguments = parser.parse_args()
    cores = available_cores()
    print(provenance("mujoco", "stable-baselines3", "envpool", "ray"))
    results = {}
    for task in arguments.tasks:
        wanted = [e for e in entries(task, cores) if e.name == PLAIN or not arguments.only or e.name.startswith(tuple(arguments.only))]
        possible, notes = only_possible(wanted, arguments.python)
        results[task] = contest(possible, arguments.rounds, arguments.segment_s)
    for task, measured in results.items():
        print(f"\n{report(task, measured, cores)}")
    print(f"\nmedians of {arguments.rounds} interleaved rounds; share: of (plain loop in the same round) x cores")
    print("\n".join(notes), end="\n" if notes else "")
    for task, measured in reversed(results.items()):
        print(figure(task, measured, cores))


if __name__ == "__main__":
    main()
