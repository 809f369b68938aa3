"""Short measurements of a run on this machine for the planner: times of stepping, acting and training."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.config import TrainConfig
from embodied_rl.config.hybrid import BatchTimeConfig, ClusterConfig, NodesConfig, PlacementConfig, SpreadConfig, WorkloadConfig
from embodied_rl.errors import UserError
from embodied_rl.sim.affinity import available_cores
from embodied_rl.trainer import Trainer
from embodied_rl.types import Observation

if TYPE_CHECKING:
    from embodied_rl.methods import Experience

_STEP_S = 2.0
"""Seconds for timing single steps."""
_ACT_REPEATS = 12
"""Repetitions for each batch size of actions."""
_Z95 = 1.6449
"""95% quantile of the standard normal distribution."""


@dataclass(frozen=True)
class Measurement:
    """Measured figures of a run."""

    workload: WorkloadConfig
    steps_per_s: float
    """Environment steps per second of one whole iteration on this machine, to compare with the simulation."""
    num_stages: int
    """Stages of that iteration."""


def measure(config: TrainConfig, *, iterations: int = 4) -> Measurement:
    """Run some iterations of a training run, and time single steps and batches of actions.

    Args:
        config: configuration of the run; nothing is logged or kept.
        iterations: number of iterations; the first, with kernel compilation and memory allocation, does not count.

    Raises UserError: the algorithm plays no episodes, or its policy does not act on batches of observations; give the times instead.
    """
    if config.keeps_steps:
        raise UserError(f"algorithm={config.algorithm.name} has no rollouts to plan: measure an on-policy algorithm.")
    here, command = in_one_process(config), "python -m embodied_rl.plan"
    with tempfile.TemporaryDirectory() as folder, Trainer(here, Path(folder), command=command) as trainer:
        trainer.engine.publish(version=0)
        trainer.method.restart(0)
        experience, train_s, seconds = _iterations(trainer, iterations)
        with trainer.engine.generation():
            observation = trainer.manager.reset().observation
            if not all(part.dtype != object for part in observation.values()):
                raise UserError(
                    f"sim={config.sim.name} uses text, whose generation cannot be measured in batches of observations. Give the times: "
                    "workload=FILE."
                )
            act = act_time(trainer, observation, _ACT_REPEATS)
            step = step_time(trainer, _STEP_S)
        workload = _workload(config, trainer, experience, train_s, act, step)
        return Measurement(
            workload, experience.num_steps / seconds, (trainer.manager.num_turns or config.sim.num_groups) if workload.rollout_steps else 1
        )


def in_one_process(config: TrainConfig) -> TrainConfig:
    """The run with all its parts in one process, wherever it would place them, so that each is timed separately; without loggers."""
    whole: dict[str, Any] = {"placement": PlacementConfig(), "cluster": "local", "players": 1, "publish": "full", "reward_worker": None}
    hybrid, logger = dataclasses.replace(config.hybrid, **whole), dataclasses.replace(config.logger, names=())
    return dataclasses.replace(config, logger=logger, resume=None, hybrid=hybrid)


def _iterations(trainer: Trainer, count: int) -> tuple[Experience, float, float]:
    """(last experience, median seconds of training, median seconds of an iteration)"""
    method = trainer.method
    train_s: list[float] = []
    all_s: list[float] = []
    for iteration in range(max(count, 2)):
        started = time.perf_counter()
        with trainer.engine.generation():
            experience = method.collect(iteration)
        middle = time.perf_counter()
        with trainer.engine.training():
            method.update(method.prepare(experience), iteration=iteration, steps=experience.num_steps * iteration)
            if experience.observation:
                trainer.policy.update_statistics(experience.observation)
        trained = time.perf_counter()
        trainer.engine.publish(version=iteration + 1)
        method.published(iteration + 1)
        train_s.append(trained - middle)
        all_s.append(time.perf_counter() - started)
    return experience, float(np.median(train_s[1:])), float(np.median(all_s[1:]))


def act_time(trainer: Trainer, observation: Observation, repeats: int) -> BatchTimeConfig:
    """Seconds of acting for n observations, n = 1, 2, 4, …, fitted by a straight line in n."""
    most = trainer.manager.num_slots
    sizes = sorted({min(2**power, most) for power in range(most.bit_length() + 1)})
    medians = []
    for size in sizes:
        rows = {key: part[:size] for key, part in observation.items()}
        taken = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            trainer.generator.send(np.arange(size), rows, None)
            trainer.generator.recv()
            taken.append(time.perf_counter() - started)
        medians.append(float(np.median(taken[1:])))
    return fit_line(sizes, medians)


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> BatchTimeConfig:
    """Least squares of relative errors, base and slope at least 0."""
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    columns = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    base, slope = np.linalg.lstsq(columns, np.ones_like(y), rcond=None)[0]
    if slope < 0 or len(x) == 1:
        return BatchTimeConfig(float(np.mean(y)), 0.0)
    if base < 0:
        return BatchTimeConfig(0.0, float(np.mean(y / x)))
    return BatchTimeConfig(float(base), float(slope))


def step_time(trainer: Trainer, budget_s: float) -> SpreadConfig:
    """Seconds of one decision of one environment on one core: the mean when all step together, the spread when only one steps."""
    num_slots = trainer.manager.num_slots
    workers = min(trainer.manager.num_workers, available_cores())
    together = np.median(_timed_steps(trainer, range(num_slots), budget_s / 2)) * workers / num_slots
    single = fit_spread(_timed_steps(trainer, range(1), budget_s / 2))
    # Below a millisecond, the spread comes from the system's scheduling of processes.
    sigma = single.sigma if single.median > 1e-3 else 0.0
    return SpreadConfig(float(together) / math.exp(sigma**2 / 2), sigma)


def _timed_steps(trainer: Trainer, slots: range, budget_s: float) -> np.ndarray:
    """Seconds of every step of these slots, played by the policy."""
    manager, generator = trainer.manager, trainer.generator
    rows = {key: part[: len(slots)] for key, part in manager.reset().observation.items()}
    taken: list[float] = []
    ends, seed = time.perf_counter() + budget_s, 0
    while len(taken) < 8 or (time.perf_counter() < ends and len(taken) < 5000):
        generator.send(np.arange(len(slots)), rows, None)
        action = generator.recv().for_simulator(manager.spec.action, manager.chunk_size)
        started = time.perf_counter()
        manager.send(slots, action)
        batch = manager.recv(slots)
        taken.append(time.perf_counter() - started)
        if not manager.autoreset and batch.done.any():
            seed += len(slots)
            manager.begin(slots, [seed + slot for slot in slots])
            batch = manager.recv(slots)
        rows = batch.observation
    return np.asarray(taken[1:])


def fit_spread(values: np.ndarray) -> SpreadConfig:
    """The lognormal with the values' median and their 95th percentile."""
    median, high = float(np.median(values)), float(np.percentile(values, 95))
    return SpreadConfig(median, min(max(math.log(high / median) / _Z95, 0.0), 5.0))


def this_machine() -> ClusterConfig:
    """This machine as far as it can be read; links are guesses (`NodesConfig`)."""
    import psutil
    import torch

    gpus = torch.cuda.device_count()
    memory = min((torch.cuda.get_device_properties(index).total_memory for index in range(gpus)), default=80 * 2**30)
    total = psutil.virtual_memory().total / 2**30
    return ClusterConfig((NodesConfig(1, available_cores(), total, gpus, memory / 2**30),), "this machine")


def _workload(
    config: TrainConfig, trainer: Trainer, experience: Experience, train_s: float, act: BatchTimeConfig, step: SpreadConfig
) -> WorkloadConfig:
    import psutil

    decisions = experience.num_steps / max(config.policy.chunk_size, 1)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in trainer.policy.state_dict().values()) / 2**30
    resident = [psutil.Process(pid).memory_info().rss for pid in trainer.manager.worker_pids()]
    groups = config.algorithm.groups
    lengths = np.asarray([length for _, _, length in experience.finished] or [1]) / max(config.policy.chunk_size, 1)
    return WorkloadConfig(
        name=config.sim.name,
        num_slots=trainer.manager.num_slots,
        act=act,
        step=step,
        train_per_decision_s=train_s / decisions,
        rollout_steps=config.algorithm.rollout_steps if groups is None else 0,
        episodes_per_iteration=0 if groups is None else groups.groups_per_step * groups.group_size,
        group_size=1 if groups is None else groups.group_size,
        episode_decisions=fit_spread(np.maximum(lengths, 1.0)),
        steps_per_decision=config.policy.chunk_size,
        weights_gib=weights,
        train_state_gib=4 * weights,  # weights, gradients and Adam's two moments
        gib_per_slot=sum(resident) / 2**30 / trainer.manager.num_slots,
        max_staleness=0 if groups is None else groups.max_staleness,
    )
