"""Three placements of simulators, policy and training on eight GPUs, with processes that sleep as long as the GPUs would work.

``python benchmarks/pipelining.py``: the environment manager, the collector and their signals are the real ones; the simulator's step, the
policy's forward and the update are sleeps of base + rows · per_row, rows spread over the devices of the role (see `sleepers`).

- collocated: simulators, policy and training take turns on all eight, and each change moves states out and in;
- disaggregated: each has its own GPUs all the time and waits for the others (synchronous: no staleness);
- hybrid: simulators and policy have their own halves and work at the same time on two stages of slots; training then takes all eight.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import dataclass

import numpy as np
from sleepers import LineTime, SleepingDevice, SleepingGenerator
from tables import provenance, text_table

from embodied_rl.planning.stations import pipelined_rollout
from embodied_rl.rollout.collector import RolloutCollector
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager

NUM_GPUS = 8
SPLIT = (2, 3, 3)
"""GPUs of simulators, policy and training where each has its own: as equal as eight GPUs allow."""


@dataclass(frozen=True)
class Trace:
    """Seconds on one device; the real ones of OpenVLA-like policies are about thirty times as long."""

    name: str
    step: LineTime
    act: LineTime
    train_per_row_s: float
    """Of one decision, on one GPU."""
    switch_s: float
    """Collocated: moving states out or in."""


@dataclass(frozen=True)
class Side:
    """A placement: devices of each role, and how the rollout goes."""

    name: str
    env: int
    policy: int
    train: int
    stages: int = 1
    shared: bool = False


def traces(num_slots: int) -> list[Trace]:
    """The same work with more and more of it in what more devices do not divide: at two GPUs, simulating takes as long as acting."""
    made = []
    for name, share in (("bound by rows", 0.1), ("between", 0.4), ("bound by base", 0.8)):
        whole = 0.032  # a step of all slots, on two GPUs
        line = LineTime(share * whole, (1 - share) * whole * 2 / num_slots)
        # Training takes as long as the rollout would on all devices.
        made.append(Trace(name, line, line, 2 * line.of(num_slots, NUM_GPUS) * NUM_GPUS / num_slots, 0.02))
    return made


def sides() -> list[Side]:
    """The placements that are compared."""
    half = NUM_GPUS // 2
    env, policy, train = SPLIT
    return [
        Side("collocated", NUM_GPUS, NUM_GPUS, NUM_GPUS, shared=True),
        Side("disaggregated", env, policy, train),
        Side("disaggregated, 2 stages", env, policy, train, stages=2),
        Side("hybrid, 1 stage", half, half, NUM_GPUS),
        Side("hybrid, 2 stages", half, half, NUM_GPUS, stages=2),
    ]


def predicted_s(trace: Trace, side: Side, num_slots: int, rounds: int) -> float:
    """Of an iteration, by the planner's arithmetic."""
    shape, rows = (1, rounds, side.stages), num_slots / side.stages
    step_s, act_s = np.full(shape, trace.step.of(rows, side.env)), np.full(shape, trace.act.of(rows, side.policy))
    rollout = float(pipelined_rollout(step_s, act_s, shared=side.shared)[0])
    return rollout + train_s(trace, side, num_slots, rounds)


def train_s(trace: Trace, side: Side, num_slots: int, rounds: int) -> float:
    """Of the update, with the change of states before and after it where devices are shared."""
    return trace.train_per_row_s * num_slots * rounds / side.train + (2 * trace.switch_s if side.shared else 0.0)


def best_split(trace: Trace, num_slots: int, rounds: int) -> Side:
    """The disaggregated placement that is fastest by the arithmetic."""
    splits = [split for split in itertools.product(range(1, NUM_GPUS), repeat=3) if sum(split) == NUM_GPUS]
    all_of = [Side("disaggregated, best split", *split, stages=stages) for split in splits for stages in (1, 2)]
    return min(all_of, key=lambda side: predicted_s(trace, side, num_slots, rounds))


@dataclass(frozen=True)
class Devices:
    """The processes of policy and training, which all sides use in turn."""

    policy: SleepingDevice
    trainer: SleepingDevice


def measured_s(trace: Trace, side: Side, devices: Devices, num_slots: int, rounds: int, iterations: int) -> float:
    """Median over iterations."""
    rows = trace.step.per_row_s / side.env
    factory = SimFactory("sleepers:SleepingSim", kwargs={"base_s": trace.step.base_s, "per_row_s": rows})
    with EnvManager(factory, num_slots, num_workers=1, num_groups=side.stages) as manager:
        generator = SleepingGenerator(devices.policy, LineTime(trace.act.base_s, trace.act.per_row_s / side.policy))
        collector = RolloutCollector(manager, generator, rollout_steps=rounds, num_groups=side.stages, seed=0)
        collector.restart(seed_round=0, reconfigure=False)
        seconds = []
        for iteration in range(iterations + 1):
            started = time.perf_counter()
            rollout = collector.next_rollout(iteration)
            devices.trainer.wait(train_s(trace, side, num_slots, rounds))
            seconds.append(time.perf_counter() - started)
            assert rollout.reward.sum() == num_slots * rounds, "a step was lost"
        return float(np.median(seconds[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10, help="decisions of each slot between two updates")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--traces", nargs="+", default=[trace.name for trace in traces(64)], help="which kinds of work")
    options = parser.parse_args()
    print(provenance())
    devices = Devices(SleepingDevice(), SleepingDevice())
    ratios, found = {}, {}
    for trace in [trace for trace in traces(options.slots) if trace.name in options.traces]:
        compared = [*sides(), best_split(trace, options.slots, options.rounds)]
        times, rows = {}, []
        for side in compared:
            times[side.name] = measured_s(trace, side, devices, options.slots, options.rounds, options.iterations)
            expected = predicted_s(trace, side, options.slots, options.rounds)
            gpus = f"{side.env}/{side.policy}/{side.train}"
            rows.append([side.name, gpus, f"{times[side.name]:.3f}", f"{expected:.3f}", f"{times[side.name] / expected:.2f}"])
        hybrid = times["hybrid, 2 stages"]
        print(f"\n{trace.name}, {options.slots} slots, {options.rounds} decisions each")
        for row in rows:
            row.append(f"{times[row[0]] / hybrid:.2f}x")
        print(text_table(["placement", "GPUs", "iteration s", "simulated s", "ratio", "to hybrid"], rows))
        ratios[trace.name] = times["disaggregated"] / hybrid
        found[trace.name] = times["disaggregated, best split"] / hybrid
    devices.policy.close()
    devices.trainer.close()
    told = "; ".join(f"{name} {ratio:.2f}x (its best split {found[name]:.2f}x)" for name, ratio in ratios.items())
    print(f"\nfigure: disaggregated / hybrid with two stages: {told} (RLinf-VLA reports 1.61-1.88x)")


if __name__ == "__main__":
    main()
