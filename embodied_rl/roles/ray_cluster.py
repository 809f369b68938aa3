"""A Ray cluster for one run: connects to or starts it, checks it against the needs of the roles, and assigns nodes to actors."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import embodied_rl
from embodied_rl.config import HybridConfig, RayConfig
from embodied_rl.config.hybrid import ClusterConfig, NodesConfig
from embodied_rl.errors import UserError, from_extra
from embodied_rl.hybrid.placement import ROLES, Cluster, Device, Role, resolve
from embodied_rl.roles.device_lease import HostPlan, plan_hosts
from embodied_rl.roles.ray_watch import ClusterWatch

_HEAD = "node:__internal_head__"
_KNOCK_S = 10.0
_NO_OTHERS_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
"""Hides all GPUs from actors that get none: otherwise Ray 2.60 shows them those of the node."""


@dataclass(frozen=True)
class Need:
    """Resources of one actor."""

    role: Role
    cpus: float
    gpus: float

    @property
    def bundle(self) -> dict[str, float]:
        """The resources in Ray's form."""
        return {name: value for name, value in (("CPU", self.cpus), ("GPU", self.gpus)) if value > 0}

    def fits(self, free: Mapping[str, float]) -> bool:
        """Whether these resources are free."""
        return all(amount <= free.get(name, 0.0) + 1e-9 for name, amount in self.bundle.items())

    def copies_in(self, free: Mapping[str, float]) -> int:
        """Number of such actors that fit the free resources."""
        return min(int((free.get(name, 0.0) + 1e-9) / amount) for name, amount in self.bundle.items())

    def taken_from(self, free: Mapping[str, float]) -> dict[str, float]:
        """Free resources that remain."""
        return {name: free.get(name, 0.0) - self.bundle.get(name, 0.0) for name in ("CPU", "GPU")}

    def __str__(self) -> str:
        return f"{self.role} {self.cpus:g} CPUs" + (f" and {self.gpus:g} GPUs" if self.gpus else "")


def needs_of(config: HybridConfig) -> list[Need]:
    """Resources of every actor of a run: env and generation of each rollout worker (in a multiplexed run one generation actor per host),
    each rank of train, and each reward worker.

    Raises UserError: an actor has no resources.
    """
    num_ranks = 1 if config.sharding is None else config.sharding.num_ranks
    players, hosts = config.players, 1 if (plan := _hosts_of(config)) is None else plan.num_hosts
    num_rewards = 0 if config.reward_worker is None else config.reward_worker.num_workers * players
    needs: list[Need] = []
    actors: list[tuple[Role, int]] = [("env", players), ("generation", players * hosts), ("train", num_ranks), ("reward", num_rewards)]
    all_cpus, all_gpus = dataclasses.asdict(config.ray.cpus), dataclasses.asdict(config.ray.gpus)
    for role, num in actors:
        cpus, gpus = all_cpus[role], all_gpus[role]
        if role == "train":
            # The ranks share the resources; Ray counts in steps of 0.0001.
            cpus, gpus = (math.floor(amount / num_ranks * 1e4 + 1e-6) / 1e4 for amount in (cpus, gpus))
        needs += [Need(role, cpus, gpus)] * num
    for need in needs:
        if not need.bundle:
            raise UserError(f"hybrid.ray gives role {need.role} neither CPUs nor GPUs: set at least one of them above 0.")
    return needs


@dataclass(frozen=True)
class Bundle:
    """Actors that always share a node and a GPU."""

    whole: Need
    """Resources that the bundle reserves."""
    actors: tuple[int, ...]
    """Indices of the actors' needs."""


def bundles_of(config: HybridConfig, needs: Sequence[Need]) -> list[Bundle]:
    """One bundle per actor. A host that is lent to training shares its bundle with that training rank, since Ray assigns a part of a GPU to
    an actor for life, and both need the same GPU. The `DeviceLease` decides whose turn it is, as without Ray."""
    plan = _hosts_of(config)
    if plan is None:
        return [Bundle(need, (place,)) for place, need in enumerate(needs)]
    of = {role: [place for place, need in enumerate(needs) if need.role == role] for role in ROLES}
    guests = {host: of["train"][number :: plan.num_lent] for number, host in enumerate(of["generation"][: plan.num_lent])}
    bundles: list[Bundle] = []
    for place, need in enumerate(needs):
        if need.role == "train":
            continue
        own = [place, *guests.get(place, [])]
        # A host that is never lent shares its GPU with no other actor.
        gpus = need.gpus + (needs[of["train"][0]].gpus if need.role == "generation" else 0.0)
        bundles.append(Bundle(Need(need.role, sum(needs[one].cpus for one in own), gpus), tuple(own)))
    return bundles


def _hosts_of(config: HybridConfig) -> HostPlan | None:
    return plan_hosts(config, num_gpus=0, num_cores=1) if config.placement.kind == "multiplexed" else None


def why_never(needs: Sequence[Need], nodes: Sequence[Mapping[str, float]], strategy: str) -> str | None:
    """Reason why nodes with these resources, all of them free, could never hold the actors; None: they could."""
    for need in needs:
        if not any(need.fits(node) for node in nodes):
            cpus, gpus = (max((node.get(kind, 0.0) for node in nodes), default=0.0) for kind in ("CPU", "GPU"))
            return f"role {need}, but no node has that; the maximum is {cpus:g} CPUs and {gpus:g} GPUs of one node"
    if strategy == "STRICT_SPREAD" and len(nodes) < len(needs):
        return f"a node each for {len(needs)} actors (hybrid.ray.strategy=STRICT_SPREAD), and there are {len(nodes)}"
    if strategy == "STRICT_PACK":
        whole = Need("env", sum(need.cpus for need in needs), sum(need.gpus for need in needs))
        if not any(whole.fits(node) for node in nodes):
            return f"{whole.cpus:g} CPUs and {whole.gpus:g} GPUs on one node for all roles (collocated, or STRICT_PACK), which no node has"
    enough = all(
        sum(wanted) <= sum(node.get(kind, 0.0) for node in nodes) + 1e-9
        for kind, wanted in (("CPU", [need.cpus for need in needs]), ("GPU", [need.gpus for need in needs]))
    )
    if not enough or not _place(sorted(needs, key=lambda need: (-need.gpus, -need.cpus)), list(nodes), strategy == "STRICT_SPREAD"):
        have = " + ".join(f"{node.get('CPU', 0.0):g} CPUs, {node.get('GPU', 0.0):g} GPUs" for node in nodes)
        return f"{_listed(needs)} at the same time, and the nodes have {have}"
    return None


def _listed(needs: Sequence[Need]) -> str:
    counts = Counter(map(str, needs))
    return ", ".join(f"{count} x {need}" if count > 1 else need for need, count in counts.items())


def _place(needs: Sequence[Need], nodes: list[Mapping[str, float]], apart: bool, first: int = 0) -> bool:
    """Whether the actors fit the nodes, by backtracking; equal nodes are tried once, and equal (neighbouring) actors in order.
    `first`: index of the first node that the first actor may use."""
    if not needs:
        return True
    equal = len(list(itertools.takewhile(lambda need: need == needs[0], needs)))
    if equal > sum(1 if apart else needs[0].copies_in(node) for node in nodes[first:] if needs[0].fits(node)):
        return False  # otherwise hundreds of ranks would mean as many orders to try
    seen: list[Mapping[str, float]] = []
    for place, node in enumerate(nodes):
        if place < first or node in seen or not needs[0].fits(node):
            continue
        seen.append(node)
        rest: list[Mapping[str, float]] = [*nodes[:place], *([] if apart else [needs[0].taken_from(node)]), *nodes[place + 1 :]]
        if _place(needs[1:], rest, apart, place if needs[1:] and needs[1] == needs[0] else 0):
            return True
    return False


class RayCluster:
    """Connection of this process to the cluster, with a location for each role."""

    def __init__(self, config: HybridConfig) -> None:
        """Connect, or start a cluster on this machine.

        Raises:
            MissingExtraError: Ray is not installed.
            UserError: no server answers at the address; the cluster can never provide what the roles need, or does not in time.
        """
        self.config = config
        self.ray = prepare(config.ray)
        self._group: Any = None
        self._watch: ClusterWatch | None = None
        self._owned = not self.ray.is_initialized()
        try:
            if self._owned:
                self._connect()
            self._needs = needs_of(config)
            self._bundles = bundles_of(config, self._needs)
            self._nodes = self._chosen_nodes()
            self.check()
            if self._nodes is None:
                self._reserve()
            if self._watch is not None:
                self._watch.began()
        except BaseException:
            self.close()
            raise

    @property
    def _strategy(self) -> str:
        return "STRICT_PACK" if self.config.placement.kind == "collocated" else self.config.ray.strategy

    def check(self) -> None:
        """Raise UserError at once if the live nodes can never hold the roles: Ray itself would wait silently."""
        alive = self._alive()
        nodes = [node["Resources"] for node in alive]
        if self._nodes is None:
            reason = why_never([bundle.whole for bundle in self._bundles], nodes, self._strategy)
        else:
            there = {node["NodeID"]: node["Resources"] for node in alive}
            gone = [need.role for need, node in zip(self._needs, self._nodes, strict=True) if node not in there]
            reason = f"the node that hybrid.placement gives to {gone[0]}, which has left the cluster" if gone else None
            for node in set(self._nodes) & there.keys() if reason is None else ():
                own = [need for need, its in zip(self._needs, self._nodes, strict=True) if its == node]
                reason = reason or why_never(own, [there[node]], "PACK")
        if reason is not None:
            raise UserError(
                f"hybrid.cluster=ray: this run cannot start on this cluster of {len(nodes)} nodes. It needs {reason}. Request less "
                "(hybrid.ray.cpus, hybrid.ray.gpus), add nodes, or run without Ray: hybrid=disaggregated."
            )

    def options(self, role: Role, number: int = 0) -> dict[str, Any]:
        """Arguments for ``Actor.options``: location and resources of actor `number` of a role."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        index = [place for place, need in enumerate(self._needs) if need.role == role][number]
        resources = {"num_cpus": self._needs[index].cpus, "num_gpus": self._needs[index].gpus}
        if self._nodes is not None:
            return {**resources, "scheduling_strategy": NodeAffinitySchedulingStrategy(self._nodes[index], soft=False)}
        own = next(number for number, bundle in enumerate(self._bundles) if index in bundle.actors)
        strategy = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=own)
        return {**resources, "scheduling_strategy": strategy}

    def close(self) -> None:
        """Release everything; end the cluster if it was started here. May be called twice."""
        if self._watch is not None:
            self._watch.began()
        group, self._group = self._group, None
        if group is not None and self.ray.is_initialized():
            from ray.util import remove_placement_group

            remove_placement_group(group)
        if self._owned and self.ray.is_initialized():
            self.ray.shutdown()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        path = [str(Path(embodied_rl.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        common: dict[str, Any] = {
            "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(path), **_NO_OTHERS_GPUS}},
            "logging_level": "error",
            "log_to_driver": False,
        }
        address = self.config.ray.address
        if address is None:
            # The watch ends the cluster's processes, however this process ends.
            self._watch = ClusterWatch() if sys.platform == "linux" else None
            self.ray.init(address="local", include_dashboard=False, **common)
            return
        try:
            _knock(address)
            self.ray.init(address=address, **common)
        except (OSError, RuntimeError, ValueError) as error:
            line = (str(error).strip().splitlines() or ["no answer"])[0]
            raise UserError(
                f"hybrid.ray.address={address}: no Ray cluster could be reached there ({line}). Start one with `ray start --head`, or "
                "leave the address out to start one on this machine."
            ) from error

    def _alive(self) -> list[dict[str, Any]]:
        """Live nodes, the head first: numbers 0, 1, … in hybrid.placement."""
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        return sorted(nodes, key=lambda node: (_HEAD not in node["Resources"], node["NodeManagerAddress"], node["NodeID"]))

    def _chosen_nodes(self) -> list[str] | None:
        """Node of each need, if hybrid.placement names devices; None: Ray chooses."""
        if self.config.placement.kind != "explicit":
            return None
        alive = self._alive()
        described = tuple(
            NodesConfig(cores=max(int(node["Resources"].get("CPU", 1)), 1), gpus=int(node["Resources"].get("GPU", 0))) for node in alive
        )
        placement = resolve(self.config.placement, Cluster(ClusterConfig(described, name="the Ray cluster")))
        chosen: list[str] = []
        for role, group in itertools.groupby(need.role for need in self._needs):
            numbers = nodes_of(placement[role], role, len(list(group)), players=self.config.players)
            chosen += [alive[number]["NodeID"] for number in numbers]
        return chosen

    def _reserve(self) -> None:
        from ray.util import placement_group

        self._group = placement_group([bundle.whole.bundle for bundle in self._bundles], strategy=self._strategy)
        timeout_s = self.config.ray.start_timeout_s
        deadline = time.monotonic() + timeout_s
        while not self._group.wait(min(1.0, timeout_s)):
            self.check()  # Ray notices the loss of a node only after a while
            if time.monotonic() < deadline:
                continue
            free = self.ray.available_resources()
            raise UserError(
                f"hybrid.cluster=ray: {_listed(self._needs)} were not free within {timeout_s:g} s (hybrid.ray.start_timeout_s): other "
                f"jobs use them; {free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs are free."
            )


def nodes_of(devices: Sequence[Device], role: Role, num: int, *, players: int = 1) -> list[int]:
    """Node of each of a role's actors: one training rank per GPU that the role names, or equally many actors per node. With one player, its
    roles, and rewards always, are on one node.
    Raises UserError if the actors cannot be divided in this way."""
    nodes = sorted({device.node for device in devices})
    given = f"hybrid.placement gives role {role} {len(nodes)} nodes, and"
    if role == "train" and devices[0].kind == "gpu" and num > 1:
        if len(devices) != num:
            raise UserError(
                f"hybrid.placement gives role train {len(devices)} GPUs, and hybrid.sharding has {num} ranks: each needs its own. Name "
                "num_shards x num_replicas x num_tensor_shards GPUs."
            )
        return [device.node for device in sorted(devices)]
    if role == "reward" or (role != "train" and players == 1):
        if len(nodes) > 1:
            raise UserError(
                f"{given} with Ray this role is one actor (of rewards: on one node): name one, such as {role}: ['{nodes[0]}/cpu']"
                + ("." if role == "reward" else f", or set hybrid.players={len(nodes)}.")
            )
        return nodes * num
    if num % len(nodes):
        ranks = f"{num} ranks" if num > 1 else "1 rank (hybrid.sharding is null)"
        there, key = (f"training has {ranks}", "sharding.num_shards") if role == "train" else (f"there are {num} players", "players")
        raise UserError(
            f"{given} {there}: as many go to each node. Name fewer nodes, such as {role}: ['{devices[0].name}'], or set hybrid.{key} to a "
            f"multiple of {len(nodes)}."
        )
    return [node for node in nodes for _ in range(num // len(nodes))]


def _knock(address: str) -> None:
    """Check that a server listens at the address; Ray itself tries for minutes. Raises OSError."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


def prepare(config: RayConfig) -> Any:
    """Import Ray so that a cluster started here requires a token: any client of a Ray cluster can run code in it, and its servers listen on
    every interface. Raises MissingExtraError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Actors have an environment of their own, which processes that Ray starts beforehand, one per core, do not have.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray reads this variable on import; a process that has imported it already keeps its setting.
    if config.address is None and "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    with from_extra("hybrid.cluster=ray", "ray"):
        import ray
    return ray
