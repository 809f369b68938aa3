"""Simulates one placement (seconds, busy devices, memory), and every placement of a cluster that is worth simulating."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from embodied_rl.config.hybrid import BatchTimeConfig, PlacementConfig, PlacementKind, SpreadConfig, WorkloadConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.placement import Cluster, Device, Placement, Role, resolve
from embodied_rl.planning.stations import EpisodeRun, EpisodeSimulation, iterations, pipelined_rollout, slowest_of, stage_steps

_GB = 1.073741824
"""10^9 bytes per GiB: link speeds are given in 10^9 bytes, memory in GiB."""


@dataclass(frozen=True)
class Costs:
    """Seconds for moving bytes, and GiB on the fullest device of each kind."""

    train_gather_s: float
    """Seconds to add up gradients over the training devices, for all updates of an iteration."""
    publish_s: float
    """Seconds to publish weights, once per iteration; generation stands still."""
    switch_s: float
    """Seconds to move one side out and in if generation and training do not fit together, and twice `WorkloadConfig.switch_s`."""
    gpu_gib: float
    """GiB on the fullest compute device; the larger of both phases if something moves out."""
    offloads: bool
    """Whether one phase has to move out for the other."""


def costs(workload: WorkloadConfig, placement: Placement, cluster: Cluster) -> Costs:
    """Costs of a placement. Raises UserError if a device's memory is too small, with the nearest placement that fits."""
    generation, train = placement["generation"], placement["train"]
    both = set(generation) & set(train)
    room = min(device.memory_gib for device in (*generation, *train))
    acting, training = _gib(workload, placement)
    simulating = _simulating_gib(workload, placement)
    offloads = bool(both) and acting + training + simulating > room
    for what, need in (("generation", acting), ("training", training)):
        if need + simulating > room:
            raise UserError(_does_not_fit(workload, placement, cluster, what, need + simulating, room))
    fullest = max(acting, training) + simulating if offloads or not both else acting + training + simulating
    _require_host_memory(workload, placement, cluster, len(both) if offloads else 0)
    switch = 2 * workload.switch_s if both else 0.0
    if offloads:
        link = min(cluster.nodes[device.node].host_link_gb_s for device in both)
        states = workload.train_state_gib / len(train) + workload.weights_gib / workload.devices_per_copy
        switch += 2 * states * _GB / link
    share = (len(train) - 1) / len(train)
    link = slowest_link(cluster, train)
    gather = workload.updates_per_iteration * 2 * share * workload.weights_gib * _GB / link if len(train) > 1 else 0.0
    return Costs(gather, _publish_s(workload, placement, cluster), switch, fullest, offloads)


def slowest_link(cluster: Cluster, devices: Sequence[Device]) -> float:
    """10^9 bytes per second of the slowest link between any two of these devices."""
    nodes = {device.node for device in devices}
    specs = [cluster.nodes[node] for node in nodes]
    return min(spec.network_gb_s for spec in specs) if len(nodes) > 1 else specs[0].gpu_link_gb_s


def _publish_s(workload: WorkloadConfig, placement: Placement, cluster: Cluster) -> float:
    generation, train = placement["generation"], placement["train"]
    bytes_gb = workload.weights_gib * _GB
    if set(generation) <= set(train):
        # Each device gathers the others' shards; a single device has them all.
        return bytes_gb * (len(train) - 1) / len(train) / slowest_link(cluster, train)
    return bytes_gb / slowest_link(cluster, (*generation, *train))


def _gib(workload: WorkloadConfig, placement: Placement) -> tuple[float, float]:
    """(GiB on a generating device, GiB on a training device)"""
    acting = workload.weights_gib / workload.devices_per_copy + workload.cache_gib
    training = workload.train_state_gib / len(placement["train"]) + workload.activations_gib
    return acting, training


def _simulating_gib(workload: WorkloadConfig, placement: Placement) -> float:
    """GiB for simulation on a GPU that also has another role."""
    others = set(placement["generation"]) | set(placement["train"])
    if workload.simulator == "cpu" or not set(placement["env"]) & others:
        return 0.0
    return workload.gib_per_slot * workload.num_slots / len(placement["env"])


def _require_host_memory(workload: WorkloadConfig, placement: Placement, cluster: Cluster, num_offloading: int) -> None:
    """Raise UserError if a machine's memory is too small."""
    slots_gib = workload.gib_per_slot * workload.num_slots / len(placement["env"]) if workload.simulator == "cpu" else 0.0
    simulating = {device.node for device in placement["env"]}
    both = sorted(set(placement["generation"]) & set(placement["train"]))[:num_offloading]
    # Caches and activations are dropped; the state of the idle side is here while the other works.
    state = max(workload.train_state_gib / len(placement["train"]), workload.weights_gib / workload.devices_per_copy)
    for node in sorted(simulating | {device.node for device in both}):
        offloaded = state * sum(device.node == node for device in both)
        need, has = slots_gib * (node in simulating) + offloaded, cluster.nodes[node].memory_gib
        if need <= has:
            continue
        if offloaded > has:
            raise UserError(
                f"{placement.label}: {offloaded:.1f} GiB are offloaded from machine {node}'s GPUs, but its memory has {has:.1f}. Nearest "
                "valid choice: disaggregated, which offloads nothing."
            )
        most = math.floor((has - offloaded) * len(placement["env"]) / workload.gib_per_slot)
        raise UserError(
            f"{placement.label}: simulators ({need - offloaded:.1f} GiB) and offloaded state ({offloaded:.1f} GiB) do not fit into "
            f"machine {node}'s memory ({has:.1f} GiB). Nearest valid choice: workload.num_slots={most}."
        )


def _does_not_fit(workload: WorkloadConfig, placement: Placement, cluster: Cluster, what: str, need: float, room: float) -> str:
    text = f"{placement.label}: {what} needs {need:.1f} GiB on each of its devices, and the smallest has {room:.1f}."
    fixed = workload.activations_gib + _simulating_gib(workload, placement)
    if what == "training" and room > fixed:
        least = math.ceil(workload.train_state_gib / (room - fixed))
        known = len(cluster.compute)
        return f"{text} Nearest valid choice: training on {least} devices" + ("." if least <= known else f"; the cluster has {known}.")
    if what == "generation" and room > workload.cache_gib + _simulating_gib(workload, placement):
        copies = math.ceil(workload.weights_gib / (room - workload.cache_gib - _simulating_gib(workload, placement)))
        return f"{text} Nearest valid choice: workload.devices_per_copy={copies}."
    return f"{text} Use devices with more memory, a smaller cache, or fewer simulators."


_REPETITIONS = 8
_MOST_DRAWS = 400_000
_MOST_EVENTS = 30_000
_VERSIONS, _WARM_UP = 8, 2


@dataclass(frozen=True)
class Outlook:
    """Expected figures of a placement."""

    placement: Placement
    iteration_s: float
    steps_per_s: float
    """Environment steps per second."""
    rollout_s: float
    train_s: float
    """Seconds of training, including the addition of gradients over the devices."""
    busy: Mapping[str, float]
    """{role: share of its devices' time in which they work for it}"""
    bubble: float
    """Share of all compute devices' time in which they are idle."""
    costs: Costs
    ages: Mapping[int, float] = field(default_factory=dict)
    """{versions between admission and training: share of the training data}"""

    def to_dict(self) -> dict[str, Any]:
        where = {"placement": self.placement.to_dict(), "kind": self.placement.kind, "label": self.placement.label}
        own = {name: value for name, value in vars(self).items() if name not in where}
        ages = {str(age): share for age, share in self.ages.items()}
        return {**where, **own, "busy": dict(self.busy), "costs": asdict(self.costs), "ages": ages}


@dataclass(frozen=True)
class _Case:
    workload: WorkloadConfig
    placement: Placement
    cluster: Cluster
    spent: Costs
    copies: int
    act: BatchTimeConfig
    step: SpreadConfig
    cores_per_copy: float
    shared: bool
    """Whether simulators and the policy compute on the same devices, so that nothing overlaps."""


def simulate(workload: WorkloadConfig, placement: Placement, cluster: Cluster, *, seed: int = 0) -> Outlook:
    """Expected speed of a workload under a placement. Groups of equal devices are simulated once, so thousands take no longer. Raises
    UserError: it does not fit into memory, has more copies of the policy than environments, or more stages than a copy has slots."""
    if placement.kind == "multiplexed" and not workload.episodes_per_iteration:
        raise UserError(
            "hybrid.placement=multiplexed needs whole episodes, and this workload collects a fixed number of steps from every slot. "
            "Nearest valid choice: collocated, or episodes_per_iteration instead of rollout_steps."
        )
    case = _case(workload, placement, cluster)
    return (_steps if workload.rollout_steps else _episodes)(case, np.random.default_rng(seed))


def _train_seconds(case: _Case, decisions: float) -> float:
    """Seconds of one update on so many decisions, without the transfer of gradients."""
    devices, nodes = case.placement["train"], case.cluster.nodes
    speed = min(nodes[one.node].gpu_speed if devices[0].kind == "gpu" else nodes[one.node].core_speed for one in devices)
    return case.workload.train_base_s + case.workload.train_per_decision_s * decisions / (len(devices) * speed)


def _case(workload: WorkloadConfig, placement: Placement, cluster: Cluster) -> _Case:
    spent = costs(workload, placement, cluster)
    generation = placement["generation"]
    copies = len(generation) // workload.devices_per_copy
    on_gpus = generation[0].kind == "gpu"
    if copies < 1:
        raise UserError(
            f"{placement.label}: one copy of the policy takes {workload.devices_per_copy} devices, and generation has {len(generation)}. "
            f"Nearest valid choice: {workload.devices_per_copy} devices for generation."
        )
    per_copy = workload.num_slots // copies
    if per_copy < placement.num_pipeline_stages:
        least = copies * placement.num_pipeline_stages
        raise UserError(
            f"{placement.label}: {copies} copies of the policy with {placement.num_pipeline_stages} stages each need {least} slots, and "
            f"there are {workload.num_slots}. Nearest valid choice: workload.num_slots={least}, or "
            f"{max(workload.num_slots // placement.num_pipeline_stages, 1) * workload.devices_per_copy} devices for generation."
        )
    specs = [cluster.nodes[device.node] for device in generation]
    speed = min(spec.gpu_speed if on_gpus else spec.core_speed for spec in specs)
    act = BatchTimeConfig(workload.act.base_s / speed, workload.act.per_row_s / speed)
    hosts = [cluster.nodes[device.node] for device in placement["env"]]
    core_speed = min(spec.core_speed for spec in hosts)
    step = SpreadConfig(workload.step.median / core_speed, workload.step.sigma, workload.step.most)
    acting_nodes = {device.node for device in generation if device.kind == "cpu"}
    # If the policy acts on a CPU during simulation, it takes one of the cores; a single core alternates.
    taken = acting_nodes if placement.num_pipeline_stages > 1 or workload.episodes_per_iteration else set()
    cores = sum(max(spec.cores - (device.node in taken), 1) for spec, device in zip(hosts, placement["env"], strict=True))
    single = all(cluster.nodes[node].cores == 1 for node in acting_nodes) and bool(acting_nodes)
    shared = not placement.simulates_apart if workload.simulator == "gpu" else single
    return _Case(workload, placement, cluster, spent, copies, act, step, cores / copies, shared)


def _steps(case: _Case, rng: np.random.Generator) -> Outlook:
    """Outlook for a fixed number of decisions of every slot."""
    workload, placement, spent = case.workload, case.placement, case.spent
    stages = placement.num_pipeline_stages
    rows = -(-workload.num_slots // case.copies)
    stage_rows = -(-rows // stages)
    rounds = max(1, min(workload.rollout_steps, _MOST_DRAWS // max(_REPETITIONS * rows, 1)))
    shape = (_REPETITIONS, rounds, stages)
    if workload.simulator == "gpu":
        assert workload.step_batch is not None
        gpus = placement["env"]
        speed = min(case.cluster.nodes[device.node].gpu_speed for device in gpus)
        step_s = np.full(shape, workload.step_batch.of(workload.num_slots / stages / len(gpus)) / speed)
    else:
        step_s = stage_steps(rng, shape, stage_rows, case.cores_per_copy, case.step.median, case.step.sigma)
    act_s = np.full(shape, case.act.of(stage_rows))
    seconds = pipelined_rollout(step_s, act_s, shared=case.shared)
    scale = workload.rollout_steps / rounds
    mean = float(seconds.mean())
    # The mean of a sum of rounds grows with their number, and its spread with the root of it.
    rollout_s = mean * scale + (slowest_of(seconds, case.copies) - mean) * math.sqrt(scale)
    decisions = workload.num_slots * workload.rollout_steps
    reward_s = workload.reward_per_decision_s * decisions / len(placement["reward"])
    train_s = _train_seconds(case, decisions) + spent.train_gather_s
    overlap = placement.trains_apart and workload.max_staleness > 0
    published = iterations(
        np.full(16, rollout_s + reward_s), train_s + spent.switch_s, spent.publish_s, workload.max_staleness, overlap=overlap
    )
    iteration_s = float(published[-1] - published[7]) / 8
    env, act = (float(part.sum((1, 2)).mean()) * scale / iteration_s for part in (step_s, act_s))
    busy = {"env": env, "generation": act, "train": train_s / iteration_s}
    ages = {workload.max_staleness if overlap else 0: 1.0}
    return _outlook(case, decisions, iteration_s, rollout_s, train_s, busy, ages)


def _episodes(case: _Case, rng: np.random.Generator) -> Outlook:
    """Outlook for whole episodes in groups, from one cell that represents all equal ones."""
    workload, placement, spent = case.workload, case.placement, case.spent
    if workload.simulator == "gpu":
        raise UserError(
            "Whole episodes on simulators that run on GPUs cannot be planned: their slots step together. Set rollout_steps instead of "
            "episodes_per_iteration."
        )
    groups = workload.episodes_per_iteration // workload.group_size
    takeover = placement.num_takeover // workload.devices_per_copy
    events = 3 * workload.episodes_per_iteration * _mean(workload.episode_decisions) * _VERSIONS
    copies = _cell(case.copies, takeover, groups, workload.num_slots, events)
    cells = case.copies / copies
    apart = placement.trains_apart
    fixed_s = spent.train_gather_s + (0.0 if takeover or apart else spent.switch_s)

    def train_s(decisions: int) -> float:
        whole = decisions * cells
        reward_s = workload.reward_per_decision_s * whole / len(placement["reward"])
        return _train_seconds(case, whole) + fixed_s + reward_s

    run = EpisodeRun(
        num_slots=max(round(workload.num_slots / cells), 1),
        num_cores=case.cores_per_copy * copies,
        num_devices=copies,
        devices_while_training=copies - round(takeover / cells) if takeover else copies if apart else 0,
        groups_per_batch=max(round(groups / cells), 1),
        group_size=workload.group_size,
        length=workload.episode_decisions,
        step=case.step,
        act=case.act,
        train_s=train_s,
        publish_s=spent.publish_s,
        switch_s=spent.switch_s if takeover else 0.0,
        max_staleness=workload.max_staleness if apart or takeover else 0,
    )
    outcome = EpisodeSimulation(run, rng).simulate(_VERSIONS)
    durations = np.diff(outcome.published_s[_WARM_UP - 1 :])
    # If all wait for the slowest, the slowest of all cells counts; otherwise the cells average out.
    iteration_s = slowest_of(durations, round(cells)) if run.max_staleness == 0 else float(durations.mean())
    decisions = float(np.mean(outcome.decisions[_WARM_UP:])) * cells
    elapsed = outcome.published_s[-1]
    busy = {
        "env": outcome.cores.busy_s / elapsed / max(1, math.floor(run.num_cores)),
        "generation": outcome.devices.busy_s / elapsed / copies,
        "train": outcome.train_busy_s / elapsed,
    }
    mean_train_s = train_s(round(decisions / cells))
    rollout_s = max(iteration_s - mean_train_s - spent.publish_s, 0.0) if run.max_staleness == 0 else iteration_s
    total = sum(outcome.ages.values())
    ages = {age: count / total for age, count in sorted(outcome.ages.items())}
    return _outlook(case, decisions, iteration_s, rollout_s, mean_train_s, busy, ages)


def _outlook(
    case: _Case, decisions: float, iteration_s: float, rollout_s: float, train_s: float, busy: dict[Any, float], ages: Mapping[int, float]
) -> Outlook:
    cluster, workload, busy = case.cluster, case.workload, {role: min(share, 1.0) for role, share in busy.items()}
    compute = set(cluster.compute)
    # CPU simulators do not count as compute devices if the policy runs on GPUs.
    with_env = workload.simulator == "gpu" or not cluster.gpus
    counted: tuple[Role, ...] = ("generation", "train", "env") if with_env else ("generation", "train")
    worked = sum(len(compute & set(case.placement[role])) * busy[role] for role in counted)
    bubble = min(max(1.0 - worked / len(compute), 0.0), 1.0)
    speed = decisions * workload.steps_per_decision / iteration_s
    return Outlook(case.placement, iteration_s, speed, rollout_s, train_s, busy, bubble, case.spent, ages)


def _cell(copies: int, takeover: int, groups: int, slots: int, events: float) -> int:
    """Copies of the policy in a cell that represents all: as many as the number of events allows. Among similar numbers, the one whose
    shares of groups, slots and copies that leave for training are closest to whole numbers."""
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


_STAGES = (1, 2, 4)
_SHARES = (1 / 8, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4)
_KINDS: tuple[PlacementKind, ...] = ("collocated", "hybrid", "disaggregated", "multiplexed")


@dataclass(frozen=True)
class Plan:
    """All placements of a workload on a cluster."""

    outlooks: Sequence[Outlook]
    """Fastest first; never empty."""
    refused: Mapping[PlacementKind, str]
    """{kind: why its first placement is impossible here}"""

    @property
    def best(self) -> Outlook:
        return self.outlooks[0]

    @property
    def best_of_each_kind(self) -> list[Outlook]:
        """The fastest of each kind."""
        return list({outlook.placement.kind: outlook for outlook in reversed(self.outlooks)}.values())


def candidates(workload: WorkloadConfig, num_devices: int) -> Iterator[PlacementConfig]:
    """Kinds × stages × shares of the devices."""
    counts = sorted({max(1, round(share * num_devices)) for share in _SHARES})
    lockstep = workload.rollout_steps > 0
    for kind in _KINDS:
        stages = _STAGES if lockstep and kind != "multiplexed" else (1,)
        on_gpus = workload.simulator == "gpu" and kind in ("hybrid", "disaggregated")
        for num_stages in stages:
            for env in counts if on_gpus else [None]:
                for train in counts if kind in ("disaggregated", "multiplexed") else [None]:
                    if (env or 0) + (train or 0) >= num_devices > 2:
                        continue  # no device would be left to generate on
                    yield PlacementConfig(kind, num_stages, env, train)


def plan(workload: WorkloadConfig, cluster: Cluster, *, only: Sequence[PlacementConfig] | None = None, seed: int = 0) -> Plan:
    """Simulate every candidate, or those of `only`. Raises UserError with the first reason if none is possible."""
    outlooks: list[Outlook] = []
    refused: dict[PlacementKind, str] = {}
    seen: set[object] = set()
    for config in only or candidates(workload, len(cluster.compute)):
        try:
            placement = resolve(config, cluster, simulator=workload.simulator)
            # With CPU simulators, hybrid is collocated with stages.
            key = (tuple(placement.roles.items()), placement.num_pipeline_stages, placement.num_takeover)
            if key in seen:
                continue
            seen.add(key)
            outlooks.append(simulate(workload, placement, cluster, seed=seed))
        except UserError as error:
            refused.setdefault(config.kind, str(error))
    if not outlooks:
        raise UserError(f"No placement is possible on '{cluster.config.name}'. {next(iter(refused.values()))}")
    outlooks.sort(key=lambda outlook: -outlook.steps_per_s)
    return Plan(outlooks, refused)
