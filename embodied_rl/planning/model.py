"""One placement, simulated: seconds per iteration, how busy each role's devices are, and what lies in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from embodied_rl.config.placement import BatchTimeConfig, SpreadConfig, WorkloadConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.placement import Cluster, Placement
from embodied_rl.planning.costs import Costs, costs
from embodied_rl.planning.episodes import EpisodeRun, EpisodeSimulation
from embodied_rl.planning.lockstep import iterations, pipelined_rollout, slowest_of, stage_steps

_REPETITIONS = 8
_MOST_DRAWS = 400_000
_MOST_EVENTS = 30_000
_VERSIONS, _WARM_UP = 8, 2


@dataclass(frozen=True)
class Outlook:
    """What is expected of a placement."""

    placement: Placement
    iteration_s: float
    steps_per_s: float
    """Environment steps."""
    rollout_s: float
    train_s: float
    """With gradients added up over the devices."""
    busy: Mapping[str, float]
    """{role: share of its devices' time in which they work for it}"""
    bubble: float
    """Share of all compute devices' time in which they do nothing."""
    costs: Costs
    ages: Mapping[int, float] = field(default_factory=dict)
    """{versions between admission and training: share of what is trained on}"""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "placement": self.placement.to_dict(),
            "kind": self.placement.kind,
            "label": self.placement.label,
            "iteration_s": self.iteration_s,
            "steps_per_s": self.steps_per_s,
            "rollout_s": self.rollout_s,
            "train_s": self.train_s,
            "busy": dict(self.busy),
            "bubble": self.bubble,
            "costs": asdict(self.costs),
            "ages": {str(age): share for age, share in self.ages.items()},
        }


@dataclass(frozen=True)
class _Speeds:
    copies: int
    act: BatchTimeConfig
    step: SpreadConfig
    cores_per_copy: float
    shared: bool
    """Simulators and the policy compute on the same devices: nothing overlaps."""


def simulate(workload: WorkloadConfig, placement: Placement, cluster: Cluster, *, seed: int = 0) -> Outlook:
    """Expected speed of a workload under a placement. Groups of devices that are alike are simulated once: thousands take no longer.

    Raises:
        UserError: it does not fit into memory, has more copies of the policy than environments, or more stages than a copy has slots.
    """
    if placement.kind == "multiplexed" and not workload.episodes_per_iteration:
        raise UserError(
            "hybrid.placement=multiplexed consolidates the episodes that take longest, and this workload collects a fixed number of steps "
            "from every slot. The nearest possible: collocated, or episodes_per_iteration in place of rollout_steps."
        )
    spent = costs(workload, placement, cluster)
    speeds = _speeds(workload, placement, cluster)
    rng = np.random.default_rng(seed)
    if workload.rollout_steps:
        return _steps(workload, placement, cluster, spent, speeds, rng)
    return _episodes(workload, placement, cluster, spent, speeds, rng)


def train_seconds(workload: WorkloadConfig, placement: Placement, cluster: Cluster, decisions: float) -> float:
    """Of one update on so many decisions, gradients' way excluded."""
    devices = placement["train"]
    specs = [cluster.nodes[device.node] for device in devices]
    on_gpus = devices[0].kind == "gpu"
    speed = min(spec.gpu_speed if on_gpus else spec.core_speed for spec in specs)
    return workload.train_base_s + workload.train_per_decision_s * decisions / (len(devices) * speed)


def _speeds(workload: WorkloadConfig, placement: Placement, cluster: Cluster) -> _Speeds:
    generation = placement["generation"]
    copies = len(generation) // workload.devices_per_copy
    on_gpus = generation[0].kind == "gpu"
    if copies < 1:
        raise UserError(
            f"{placement.label}: one copy of the policy takes {workload.devices_per_copy} devices, and generation has {len(generation)}. "
            f"The nearest possible: {workload.devices_per_copy} devices for generation."
        )
    per_copy = workload.num_slots // copies
    if per_copy < placement.num_pipeline_stages:
        least = copies * placement.num_pipeline_stages
        raise UserError(
            f"{placement.label}: {copies} copies of the policy with {placement.num_pipeline_stages} stages each need {least} slots, and "
            f"there are {workload.num_slots}. The nearest possible: workload.num_slots={least}, or "
            f"{max(workload.num_slots // placement.num_pipeline_stages, 1) * workload.devices_per_copy} devices for generation."
        )
    specs = [cluster.nodes[device.node] for device in generation]
    speed = min(spec.gpu_speed if on_gpus else spec.core_speed for spec in specs)
    act = BatchTimeConfig(workload.act.base_s / speed, workload.act.per_row_s / speed)
    hosts = [cluster.nodes[device.node] for device in placement["env"]]
    core_speed = min(spec.core_speed for spec in hosts)
    step = SpreadConfig(workload.step.median / core_speed, workload.step.sigma, workload.step.most)
    acting_nodes = {device.node for device in generation if device.kind == "cpu"}
    # Where the policy acts on a processor while others are simulated, it takes one of the cores; a single core does both in turns.
    taken = acting_nodes if placement.num_pipeline_stages > 1 or workload.episodes_per_iteration else set()
    cores = sum(max(spec.cores - (device.node in taken), 1) for spec, device in zip(hosts, placement["env"], strict=True))
    single = all(cluster.nodes[node].cores == 1 for node in acting_nodes) and bool(acting_nodes)
    shared = not placement.simulates_apart if workload.simulator == "gpu" else single
    return _Speeds(copies, act, step, cores / copies, shared)


def _steps(
    workload: WorkloadConfig, placement: Placement, cluster: Cluster, spent: Costs, speeds: _Speeds, rng: np.random.Generator
) -> Outlook:
    """A fixed number of decisions of every slot."""
    stages = placement.num_pipeline_stages
    rows = -(-workload.num_slots // speeds.copies)
    stage_rows = -(-rows // stages)
    rounds = max(1, min(workload.rollout_steps, _MOST_DRAWS // max(_REPETITIONS * rows, 1)))
    shape = (_REPETITIONS, rounds, stages)
    if workload.simulator == "gpu":
        assert workload.step_batch is not None
        gpus = placement["env"]
        speed = min(cluster.nodes[device.node].gpu_speed for device in gpus)
        step_s = np.full(shape, workload.step_batch.of(workload.num_slots / stages / len(gpus)) / speed)
    else:
        step_s = stage_steps(rng, shape, stage_rows, speeds.cores_per_copy, speeds.step.median, speeds.step.sigma)
    act_s = np.full(shape, speeds.act.of(stage_rows))
    times = pipelined_rollout(step_s, act_s, shared=speeds.shared)
    scale = workload.rollout_steps / rounds
    mean = float(times.seconds.mean())
    # A sum of more rounds has a mean that grows with their number and a spread that grows with its root.
    rollout_s = mean * scale + (slowest_of(times.seconds, speeds.copies) - mean) * math.sqrt(scale)
    decisions = workload.num_slots * workload.rollout_steps
    reward_s = workload.reward_per_decision_s * decisions / len(placement["reward"])
    train_s = train_seconds(workload, placement, cluster, decisions) + spent.train_gather_s
    overlap = placement.trains_apart and workload.max_staleness > 0
    published = iterations(
        np.full(16, rollout_s + reward_s), train_s + spent.switch_s, spent.publish_s, workload.max_staleness, overlap=overlap
    )
    iteration_s = float(published[-1] - published[7]) / 8
    env, act = (float(part.mean()) * scale / iteration_s for part in (times.env_busy_s, times.act_busy_s))
    busy = {"env": env, "generation": act, "train": train_s / iteration_s}
    ages = {workload.max_staleness if overlap else 0: 1.0}
    return _outlook(workload, placement, cluster, spent, decisions, iteration_s, rollout_s, train_s, busy, ages)


def _episodes(
    workload: WorkloadConfig, placement: Placement, cluster: Cluster, spent: Costs, speeds: _Speeds, rng: np.random.Generator
) -> Outlook:
    """Whole episodes in groups, by a cell that stands for all others like it."""
    if workload.simulator == "gpu":
        raise UserError(
            "Whole episodes on simulators that run on GPUs cannot be planned: their slots step together. Give rollout_steps in place of "
            "episodes_per_iteration."
        )
    groups = workload.episodes_per_iteration // workload.group_size
    takeover = placement.num_takeover // workload.devices_per_copy
    events = 3 * workload.episodes_per_iteration * _mean(workload.episode_decisions) * _VERSIONS
    copies = _cell(speeds.copies, takeover, groups, workload.num_slots, events)
    cells = speeds.copies / copies
    apart = placement.trains_apart
    fixed_s = spent.train_gather_s + (0.0 if takeover or apart else spent.switch_s)

    def train_s(decisions: int) -> float:
        whole = decisions * cells
        reward_s = workload.reward_per_decision_s * whole / len(placement["reward"])
        return train_seconds(workload, placement, cluster, whole) + fixed_s + reward_s

    run = EpisodeRun(
        num_slots=max(round(workload.num_slots / cells), 1),
        num_cores=speeds.cores_per_copy * copies,
        num_devices=copies,
        devices_while_training=copies - round(takeover / cells) if takeover else copies if apart else 0,
        groups_per_batch=max(round(groups / cells), 1),
        group_size=workload.group_size,
        length=workload.episode_decisions,
        step=speeds.step,
        act=speeds.act,
        train_s=train_s,
        publish_s=spent.publish_s,
        switch_s=spent.switch_s if takeover else 0.0,
        max_staleness=workload.max_staleness if apart or takeover else 0,
    )
    outcome = EpisodeSimulation(run, rng).simulate(_VERSIONS)
    durations = np.diff(outcome.published_s[_WARM_UP - 1 :])
    # Where all wait for the slowest, the slowest of all cells counts; else the cells even each other out.
    iteration_s = slowest_of(durations, round(cells)) if run.max_staleness == 0 else float(durations.mean())
    decisions = float(np.mean(outcome.decisions[_WARM_UP:])) * cells
    elapsed = outcome.published_s[-1]
    busy = {
        "env": outcome.env_busy_s / elapsed / max(1, math.floor(run.num_cores)),
        "generation": outcome.act_busy_s / elapsed / copies,
        "train": outcome.train_busy_s / elapsed,
    }
    mean_train_s = train_s(round(decisions / cells))
    rollout_s = max(iteration_s - mean_train_s - spent.publish_s, 0.0) if run.max_staleness == 0 else iteration_s
    total = sum(outcome.ages.values())
    ages = {age: count / total for age, count in sorted(outcome.ages.items())}
    return _outlook(workload, placement, cluster, spent, decisions, iteration_s, rollout_s, mean_train_s, busy, ages)


def _outlook(
    workload: WorkloadConfig,
    placement: Placement,
    cluster: Cluster,
    spent: Costs,
    decisions: float,
    iteration_s: float,
    rollout_s: float,
    train_s: float,
    busy: Mapping[str, float],
    ages: Mapping[int, float],
) -> Outlook:
    compute = set(cluster.compute)
    shares = _per_device(busy, workload.simulator == "gpu" or not cluster.gpus)
    worked = sum(len(compute & set(placement[role])) * share for role, share in shares.items())
    bubble = min(max(1.0 - worked / len(compute), 0.0), 1.0)
    speed = decisions * workload.steps_per_decision / iteration_s
    return Outlook(placement, iteration_s, speed, rollout_s, train_s, {k: min(v, 1.0) for k, v in busy.items()}, bubble, spent, ages)


def _per_device(busy: Mapping[str, float], with_env: bool) -> dict[Any, float]:
    """Shares that count for compute devices: simulators on processors do not, where the policy runs on GPUs."""
    roles: dict[Any, float] = {"generation": min(busy["generation"], 1.0), "train": min(busy["train"], 1.0)}
    return roles | ({"env": min(busy["env"], 1.0)} if with_env else {})


def _cell(copies: int, takeover: int, groups: int, slots: int, events: float) -> int:
    """Copies of the policy in a cell that stands for all: as many as the number of events allows, and among about as many those whose
    share of groups, slots and of the copies that leave for training comes nearest to whole numbers."""
    least = max(math.ceil(copies / groups), math.ceil(copies / slots), 2 if takeover else 1)
    most = min(copies, max(least, math.floor(copies * _MOST_EVENTS / events)))

    def error(size: int) -> float:
        parts = [total * size / copies for total in (groups, slots, *([takeover] if takeover else []))]
        leaving = round(takeover * size / copies)
        if takeover and not 0 < leaving < size and takeover < copies:
            return math.inf
        return max(abs(round(part) - part) / part for part in parts)

    sizes = range(max(least, most // 2), most + 1) if most < copies else [copies]
    return min(sizes, key=lambda size: (round(error(size), 3), -size))


def _mean(spread: SpreadConfig) -> float:
    mean = spread.median * math.exp(spread.sigma**2 / 2)
    return mean if spread.most is None else min(mean, spread.most)
