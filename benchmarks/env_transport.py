"""Microseconds per environment step of a no-op environment: our manager against the ways that others use between processes.

    python benchmarks/env_transport.py

Sides: our EnvManager; the least that its scheme can cost (`prototype.py`: a slab and a flag each way, nothing else); gymnasium's
AsyncVectorEnv; stable-baselines3's SubprocVecEnv; `multiprocessing.Queue` workers (RLinf's and verl's way); a Ray actor per
environment. A step ends when the observations lie in memory that belongs to the caller. The sides take turns within each round, so
that a change of the machine's load meets all of them; medians over rounds.

`--against prototype` leaves the peers out, and adds more workers than a small machine has cores.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping

from contest import Entry, Measured, add_arguments, contest, only_possible
from no_op import COUNT_MODULUS
from steppers import Env, Side
from tables import provenance, text_table

from embodied_rl.sim.affinity import available_cores

NUM_ENVS = 8
PAYLOADS: dict[str, dict[str, int]] = {"100 B": {"num_floats": 25}, "4 KB": {"num_floats": 1024}, "224x224x3": {"image": 224}}
ASYNC, ASYNC_VIEWS, SUBPROC = "gymnasium AsyncVectorEnv", "gymnasium AsyncVectorEnv, copy=False", "SB3 SubprocVecEnv"
QUEUE, RAY = "mp.Queue workers", "Ray actors"
REACH_US = {"100 B": 3.0, "224x224x3": 25.0}
"""What we want to stay below with our best configuration, on two cores."""


def our_name(env: str, num_workers: int, halves: bool) -> str:
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    return f"ours, {env}, {workers}, {'halves' if halves else 'lockstep'}"


def default_name() -> str:
    """What a user gets who sets nothing: a gymnasium.Env, as many workers as there are cores, two alternating groups."""
    return our_name("gymnasium.Env", default_workers(), halves=True)


def default_workers() -> int:
    return min(available_cores(), NUM_ENVS)


def entries(payload: str) -> list[Entry]:
    """All sides with one payload."""
    plain = Env("no_op:NoOpEnv", PAYLOADS[payload])
    native = Env("no_op:NoOpEnv", PAYLOADS[payload], ours={"target": "no_op:NoOpSim", "kwargs": PAYLOADS[payload]})
    found = []
    for name, env in (("gymnasium.Env", plain), ("native SimEnv", native)):
        for num_workers in sorted({1, 2, default_workers()}):
            for halves in (False, True):
                options = {"mode": "halves" if halves else "lockstep"}
                found.append(Entry(our_name(name, num_workers, halves), Side("ours", env, NUM_ENVS, num_workers, options)))
    found.append(Entry(ASYNC, Side("async", plain, NUM_ENVS, options={"copy": True})))
    found.append(Entry(ASYNC_VIEWS, Side("async", plain, NUM_ENVS, options={"copy": False})))
    found.append(Entry(SUBPROC, Side("subproc", plain, NUM_ENVS)))
    found.append(Entry(QUEUE, Side("queue", plain, NUM_ENVS, default_workers())))
    found.append(Entry(RAY, Side("ray", plain, NUM_ENVS)))
    return found


PROTOTYPE_WORKERS = (1, 2, 4)
PROTOTYPE_REACH = 1.5
"""What we want to stay below against the prototype, with the same workers in lockstep."""


def prototype_name(num_workers: int) -> str:
    return f"prototype, {num_workers} worker{'s' * (num_workers > 1)}"


def against_prototype(payload: str) -> list[Entry]:
    """Ours and the prototype, in lockstep with the same simulator."""
    env = Env("no_op:NoOpEnv", PAYLOADS[payload], ours={"target": "no_op:NoOpSim", "kwargs": PAYLOADS[payload]})
    found = []
    for num_workers in PROTOTYPE_WORKERS:
        found.append(Entry(our_name("native SimEnv", num_workers, False), Side("ours", env, NUM_ENVS, num_workers)))
        found.append(Entry(prototype_name(num_workers), Side("prototype", env, NUM_ENVS, num_workers)))
    return found


def prototype_report(payload: str, measured: Mapping[str, Measured]) -> str:
    """The table of one payload against the prototype: ratios are medians of each round's."""
    rows = []
    for num_workers in PROTOTYPE_WORKERS:
        ours, least = measured[our_name("native SimEnv", num_workers, False)], measured[prototype_name(num_workers)]
        ratio = statistics.median(a / b for a, b in zip(ours.us, least.us, strict=True))
        kept = "kept" if ratio <= PROTOTYPE_REACH else "missed"
        rows.append([str(num_workers), f"{ours.median:.2f}", f"{least.median:.2f}", f"{ratio:.2f}x", kept])
    return text_table([f"{payload}, workers", "ours, µs/step", "prototype", "ratio", f"reach {PROTOTYPE_REACH:g}x"], rows)


def peer_us(measured: Mapping[str, Measured]) -> float:
    """The faster of AsyncVectorEnv's two settings."""
    return min(measured[ASYNC].median, measured[ASYNC_VIEWS].median)


def report(payload: str, measured: Mapping[str, Measured]) -> str:
    """The table of one payload."""
    peer = peer_us(measured)
    rows = [
        [name, f"{one.median:.2f}", f"{min(one.us):.2f}", f"{max(one.us):.2f}", f"{one.cpu_us:.1f}", f"{peer / one.median:.1f}x"]
        for name, one in sorted(measured.items(), key=lambda item: item[1].median)
    ]
    return text_table([f"{payload}, {NUM_ENVS} environments", "µs/step", "min", "max", "cpu µs/step", "AsyncVectorEnv / it"], rows)


def best_of_ours(measured: Mapping[str, Measured], env: str) -> str:
    """The name of our fastest configuration with this kind of environment."""
    return min((name for name in measured if name.startswith(f"ours, {env}")), key=lambda name: measured[name].median)


def ratios(payload: str, measured: Mapping[str, Measured]) -> str:
    """How many times longer the others take than our best configuration with the environment that all of them run."""
    best = best_of_ours(measured, "gymnasium.Env")
    ours = measured[best].median
    peers = [f"{name} {one.median / ours:.1f}x" for name, one in measured.items() if not name.startswith("ours")]
    reach = REACH_US.get(payload)
    wanted = "" if reach is None else f" (reach: {reach:g} µs, {'kept' if ours <= reach else 'missed'})"
    return f"{payload}: ours {ours:.2f} µs{wanted}; to ours: {', '.join(peers)}"


def figure(payload: str, measured: Mapping[str, Measured]) -> str:
    """The figure we quote: our default and our best configuration, both with the gymnasium.Env that the peer runs too."""
    peer = peer_us(measured)
    parts = [f"{peer / measured[default_name()].median:.1f}x by default"]
    for env in ("gymnasium.Env", "native SimEnv"):
        best = best_of_ours(measured, env)
        parts.append(f"{peer / measured[best].median:.1f}x at best ({best.removeprefix('ours, ')})")
    return f"figure: AsyncVectorEnv / ours at {payload}: {'; '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_arguments(parser, rounds=15, segment_s=0.2)
    parser.add_argument("--payloads", nargs="+", choices=list(PAYLOADS), default=list(PAYLOADS))
    parser.add_argument("--against", choices=["peers", "prototype"], default="peers", help="whom to measure beside us")
    arguments = parser.parse_args()
    if arguments.against == "prototype":
        print(provenance())
        for payload in arguments.payloads:
            print(
                f"\n{prototype_report(payload, contest(against_prototype(payload), arguments.rounds, arguments.segment_s, COUNT_MODULUS))}"
            )
        return
    print(provenance("stable-baselines3"))
    results = {}
    for payload in arguments.payloads:
        possible, notes = only_possible(entries(payload), arguments.python)
        results[payload] = contest(possible, arguments.rounds, arguments.segment_s, COUNT_MODULUS)
    for payload, measured in results.items():
        print(f"\n{report(payload, measured)}")
    print(f"\nmedians of {arguments.rounds} interleaved rounds; by default: {default_name().removeprefix('ours, ')}")
    print("\n".join([*notes, *(ratios(payload, measured) for payload, measured in results.items())]))
    for payload, measured in reversed(results.items()):
        print(figure(payload, measured))


if __name__ == "__main__":
    main()
