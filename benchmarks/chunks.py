"""Rollouts of a policy that acts in chunks, with observations drawn at every step and where they are read: `tiny_vla` on `pixel_tasks`.

``python benchmarks/chunks.py``: simulator, policy, workers and collector are those of ``experiment=tiny_vla``; the policy is untrained.
Workers are what a training run would take (``sim.num_workers=auto``), for both sides.
The sides take turns, rollout by rollout, and play the same episodes: their rollouts are compared bit by bit. Beside the clock stands the
processor time of each decision, of this process and of the simulators: of a busy machine it is what can be compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tables import provenance, text_table

from embodied_rl.compose import load_train_config
from embodied_rl.config import SimConfig, TrainConfig
from embodied_rl.rollout.collector import Rollout, RolloutCollector
from embodied_rl.sim.factory import SimFactory, SimWrapper, wrapped
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds

MOST_TRIALS = 100
"""Rollouts in which turns are chosen; the leader is taken after them."""
EVERY_STEP, WHERE_READ = "drawn at every step", "drawn where it is read"


class Observing(SimWrapper):
    """Passes everything on to a simulator, and has it observe whenever it steps."""

    def __init__(self, num_envs: int, inner: Mapping[str, Any]) -> None:
        super().__init__(SimFactory(**inner).make(num_envs))


def observing(config: SimConfig) -> SimConfig:
    """The same simulator, observed at every step."""
    return wrapped(config, "chunks:Observing")


class Side:
    """A collector with simulators and a policy of its own."""

    def __init__(self, name: str, config: TrainConfig, manager: EnvManager, rollout_steps: int) -> None:
        import torch

        from embodied_rl.generation.torch_backend import TorchGenerator
        from embodied_rl.policies.build import build_policy

        self.name, self.manager = name, manager
        torch.manual_seed(config.seed)
        policy = build_policy(config.policy, self.manager.spec)
        generator = TorchGenerator(policy)
        generator.publish(0)
        self.collector = RolloutCollector(
            self.manager,
            generator,
            rollout_steps=rollout_steps,
            num_groups=config.sim.num_groups,
            seed=config.seed,
            layout=policy.action_layout,
        )
        self.collector.restart(seed_round=0, reconfigure=False)
        self.seconds: list[float] = []
        self.num_steps: list[int] = []
        self.processor_s: list[tuple[float, float]] = []
        """Of this process, and of the simulators."""
        self._workers = [psutil.Process(pid) for pid in self.manager.worker_pids()]

    def _processor_s(self) -> tuple[float, float]:
        return time.process_time(), sum(sum(worker.cpu_times()[:2]) for worker in self._workers)

    def rollout(self, number: int) -> Rollout:
        """The next one, timed; acted in by one thread, as a training run does."""
        from embodied_rl.learning.devices import compute_threads

        started, before = time.perf_counter(), self._processor_s()
        with compute_threads(1):
            rollout = self.collector.next_rollout(number)
        self.seconds.append(time.perf_counter() - started)
        after = self._processor_s()
        self.processor_s.append((after[0] - before[0], after[1] - before[1]))
        self.num_steps.append(int(np.sum(rollout.executed)))
        return rollout


def chosen(config: TrainConfig, rollout_steps: int) -> tuple[TrainConfig, int | None]:
    """With the number of workers that a run of this configuration takes here, and the turns that its first rollouts choose."""
    from embodied_rl.roles.components import start_simulators

    simulators = start_simulators(config, print).simulators
    assert isinstance(simulators, EnvManager)
    try:
        number, side = 0, Side(WHERE_READ, config, simulators, rollout_steps)
        while simulators.trials is not None and number < MOST_TRIALS:
            side.rollout(number)
            number += 1
        if simulators.trials is not None:
            simulators.step_as(simulators.trials.leader)
        workers, turns = simulators.num_workers, simulators.num_turns
    finally:
        simulators.close()
    return dataclasses.replace(config, sim=dataclasses.replace(config.sim, num_workers=workers)), turns


def started(config: TrainConfig, sim: SimConfig, turns: int | None) -> EnvManager:
    """Simulators that are stepped so."""
    manager = EnvManager.from_config(sim, EpisodeSeeds.training(config.seed), chunk_size=config.policy.chunk_size)
    manager.num_turns = turns
    return manager


def require_equal(first: Rollout, second: Rollout) -> None:
    """Raises AssertionError where two rollouts differ in a bit."""
    for name, part in first.observation.items():
        np.testing.assert_array_equal(part, second.observation[name], err_msg=name)
    for name in ("action", "log_prob", "reward", "terminated", "truncated", "chunk_reward", "executed"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)


def measure(config: TrainConfig, turns: int | None, rollout_steps: int, rounds: int) -> list[Side]:
    """The two sides after `rounds` timed rollouts each, and one before them that warms up."""
    sides = [
        Side(EVERY_STEP, config, started(config, observing(config.sim), turns), rollout_steps),
        Side(WHERE_READ, config, started(config, config.sim, turns), rollout_steps),
    ]
    try:
        for number in range(rounds + 1):
            turns = sides if number % 2 else sides[::-1]
            rollouts = {side.name: side.rollout(number) for side in turns}
            require_equal(rollouts[EVERY_STEP], rollouts[WHERE_READ])
    finally:
        for side in sides:
            side.manager.close()
    for side in sides:
        del side.seconds[0], side.num_steps[0], side.processor_s[0]
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="timed rollouts of each side")
    parser.add_argument("--rollout-steps", type=int, help="decisions of each slot in a rollout; by default the experiment's")
    parser.add_argument("overrides", nargs="*", help="of experiment=tiny_vla, such as sim.num_workers=1 or policy.chunk=8")
    options = parser.parse_intermixed_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # the workers import `Observing` from here
    config = load_train_config(["experiment=tiny_vla", *options.overrides])
    rollout_steps = options.rollout_steps or config.algorithm.rollout_steps
    config, turns = chosen(config, rollout_steps)
    every, read = measure(config, turns, rollout_steps, options.rounds)
    print(provenance("mujoco"))
    print(
        f"{config.sim.num_slots} slots, {every.manager.num_workers} workers, {config.policy.chunk_size} steps a chunk; "
        f"{options.rounds} rounds of {rollout_steps} chunks a slot, in turn; equal bit by bit"
    )
    rows = [
        [side.name, *(f"{1e3 * value:.0f}" for value in (statistics.median(side.seconds), min(side.seconds), max(side.seconds)))]
        for side in (every, read)
    ]
    decisions = config.sim.num_slots * rollout_steps * options.rounds
    spent = {side.name: [1e3 * sum(part) / decisions for part in zip(*side.processor_s, strict=True)] for side in (every, read)}
    for row, side in zip(rows, (every, read), strict=True):
        row += [f"{sum(side.num_steps) / sum(side.seconds):.0f}", *(f"{part:.2f}" for part in spent[side.name])]
    print(text_table(["observation", "rollout ms", "min", "max", "steps/s", "processor ms a decision: here", "simulators"], rows))
    ratio = statistics.median(one / other for one, other in zip(every.seconds, read.seconds, strict=True))
    print(
        f"\nfigure: rollouts where observations are drawn as they are read: {ratio:.2f}x (chunks of {config.policy.chunk_size}); "
        f"by processor time {sum(spent[EVERY_STEP]) / sum(spent[WHERE_READ]):.2f}x"
    )


if __name__ == "__main__":
    main()
