"""A Ray cluster for one run: connected or started, checked for what the roles need, and divided among them."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import embodied_rl
from embodied_rl.config import HybridConfig, RayConfig
from embodied_rl.config.placement import ClusterConfig, NodesConfig
from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.hybrid.placement import Cluster, Role, resolve

_HEAD = "node:__internal_head__"
_KNOCK_S = 10.0


@dataclass(frozen=True)
class Need:
    """What one actor takes."""

    role: Role
    cpus: float
    gpus: float

    def fits(self, free: Mapping[str, float]) -> bool:
        """Whether so much is free."""
        return self.cpus <= free.get("CPU", 0.0) + 1e-9 and self.gpus <= free.get("GPU", 0.0) + 1e-9

    def taken_from(self, free: Mapping[str, float]) -> dict[str, float]:
        """What remains."""
        return {"CPU": free.get("CPU", 0.0) - self.cpus, "GPU": free.get("GPU", 0.0) - self.gpus}

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray takes it."""
        return {name: value for name, value in (("CPU", self.cpus), ("GPU", self.gpus)) if value > 0}

    def __str__(self) -> str:
        return f"{self.role} {self.cpus:g} CPUs" + (f" and {self.gpus:g} GPUs" if self.gpus else "")


def needs_of(config: HybridConfig) -> list[Need]:
    """What every actor of a run takes: env, generation, train, and each reward worker. Raises UserError for an actor without anything."""
    roles: list[Role] = ["env", "generation", "train"]
    if config.reward_worker is not None:
        roles += ["reward"] * config.reward_worker.num_workers
    needs = [Need(role, getattr(config.ray.cpus, role), getattr(config.ray.gpus, role)) for role in roles]
    for need in needs:
        if not need.bundle:
            raise UserError(f"hybrid.ray gives role {need.role} neither CPUs nor GPUs: it needs some of one of them.")
    return needs


def why_never(needs: Sequence[Need], nodes: Sequence[Mapping[str, float]], strategy: str) -> str | None:
    """Why nodes with these resources, all of them free, could never hold the actors; None: they could."""
    for need in needs:
        if not any(need.fits(node) for node in nodes):
            cpus, gpus = (max((node.get(kind, 0.0) for node in nodes), default=0.0) for kind in ("CPU", "GPU"))
            return f"role {need}, and no node has that: the most are {cpus:g} CPUs and {gpus:g} GPUs of one node"
    if strategy == "STRICT_SPREAD" and len(nodes) < len(needs):
        return f"a node each for {len(needs)} actors (hybrid.ray.strategy=STRICT_SPREAD), and there are {len(nodes)}"
    if strategy == "STRICT_PACK":
        whole = Need("env", sum(need.cpus for need in needs), sum(need.gpus for need in needs))
        if not any(whole.fits(node) for node in nodes):
            return f"{whole.cpus:g} CPUs and {whole.gpus:g} GPUs of one node for all roles (collocated, or STRICT_PACK), and none has that"
    if not _place(sorted(needs, key=lambda need: (-need.gpus, -need.cpus)), list(nodes), strategy == "STRICT_SPREAD"):
        have = " + ".join(f"{node.get('CPU', 0.0):g} CPUs, {node.get('GPU', 0.0):g} GPUs" for node in nodes)
        return f"{', '.join(map(str, needs))} at the same time, and the nodes have {have}"
    return None


def _place(needs: Sequence[Need], nodes: list[Mapping[str, float]], apart: bool) -> bool:
    """Whether the actors fit the nodes, by trying; equal nodes are tried once."""
    if not needs:
        return True
    seen: list[Mapping[str, float]] = []
    for place, node in enumerate(nodes):
        if node in seen or not needs[0].fits(node):
            continue
        seen.append(node)
        rest: list[Mapping[str, float]] = [*nodes[:place], *([] if apart else [needs[0].taken_from(node)]), *nodes[place + 1 :]]
        if _place(needs[1:], rest, apart):
            return True
    return False


class RayCluster:
    """The connection of this process, and a place for each role."""

    def __init__(self, config: HybridConfig) -> None:
        """Connect, or start a cluster on this machine.

        Raises:
            MissingExtraError: Ray is not installed.
            UserError: nobody answers at the address; the cluster can never have what the roles need, or does not have it in time.
        """
        self.config = config
        self.ray = prepare(config.ray)
        self._group: Any = None
        self._owned = not self.ray.is_initialized()
        if self._owned:
            self._connect()
        try:
            self._needs = needs_of(config)
            self._nodes = self._chosen_nodes()
            self.check()
            if self._nodes is None:
                self._reserve()
        except BaseException:
            self.close()
            raise

    @property
    def _strategy(self) -> str:
        return "STRICT_PACK" if self.config.placement.kind == "collocated" else self.config.ray.strategy

    def check(self) -> None:
        """Raises UserError, at once, where the nodes that live can never hold the roles: Ray itself would wait without a word."""
        alive = self._alive()
        nodes = [node["Resources"] for node in alive]
        if self._nodes is None:
            reason = why_never(self._needs, nodes, self._strategy)
        else:
            there = {node["NodeID"]: node["Resources"] for node in alive}
            gone = [role for role, node in self._nodes.items() if node not in there]
            reason = f"the node that hybrid.placement names for {gone[0]}, and it has gone" if gone else None
            for node in set(self._nodes.values()) & there.keys() if reason is None else ():
                own = [need for need in self._needs if self._nodes[need.role] == node]
                reason = reason or why_never(own, [there[node]], "PACK")
        if reason is not None:
            raise UserError(
                f"hybrid.cluster=ray: this run can never begin on a cluster of {len(nodes)} nodes. It needs {reason}. Ask for less "
                "(hybrid.ray.cpus, hybrid.ray.gpus), or add nodes; the nearest possible without Ray: hybrid=disaggregated."
            )

    def options(self, role: Role, number: int = 0) -> dict[str, Any]:
        """Of ``Actor.options``: where actor `number` of a role goes, and what it takes there."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        need = [need for need in self._needs if need.role == role][number]
        resources = {"num_cpus": need.cpus, "num_gpus": need.gpus}
        if self._nodes is not None:
            return {**resources, "scheduling_strategy": NodeAffinitySchedulingStrategy(self._nodes[role], soft=False)}
        index = [place for place, other in enumerate(self._needs) if other.role == role][number]
        strategy = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=index)
        return {**resources, "scheduling_strategy": strategy}

    def close(self) -> None:
        """Give everything back; ends the cluster that was started here. May be called twice."""
        group, self._group = self._group, None
        if group is not None and self.ray.is_initialized():
            from ray.util import remove_placement_group

            remove_placement_group(group)
        if self._owned and self.ray.is_initialized():
            self.ray.shutdown()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        path = [str(Path(embodied_rl.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        common: dict[str, Any] = {
            "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(path)}},
            "logging_level": "error",
            "log_to_driver": False,
        }
        address = self.config.ray.address
        if address is None:
            self.ray.init(address="local", include_dashboard=False, **common)
            return
        try:
            _knock(address)
            self.ray.init(address=address, **common)
        except (OSError, RuntimeError, ValueError) as error:
            line = (str(error).strip().splitlines() or ["no answer"])[0]
            raise UserError(
                f"hybrid.ray.address={address}: no Ray cluster could be reached there ({line}). Start one with `ray start --head`, or "
                "leave the address out: one is started on this machine."
            ) from error

    def _alive(self) -> list[dict[str, Any]]:
        """Nodes, the head first: 0, 1, … of hybrid.placement."""
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        return sorted(nodes, key=lambda node: (_HEAD not in node["Resources"], node["NodeManagerAddress"], node["NodeID"]))

    def _chosen_nodes(self) -> dict[Role, str] | None:
        """The node of each role, where hybrid.placement names devices; None: Ray chooses."""
        if self.config.placement.kind != "explicit":
            return None
        alive = self._alive()
        described = tuple(
            NodesConfig(cores=max(int(node["Resources"].get("CPU", 1)), 1), gpus=int(node["Resources"].get("GPU", 0))) for node in alive
        )
        placement = resolve(self.config.placement, Cluster(ClusterConfig(described, name="the Ray cluster")))
        chosen: dict[Role, str] = {}
        for need in self._needs:
            nodes = sorted({device.node for device in placement[need.role]})
            if len(nodes) > 1:
                raise UserError(
                    f"hybrid.placement gives role {need.role} {len(nodes)} nodes, and with Ray each role is one actor: name one, such as "
                    f"{need.role}: ['{nodes[0]}/cpu']."
                )
            chosen[need.role] = alive[nodes[0]]["NodeID"]
        return chosen

    def _reserve(self) -> None:
        from ray.util import placement_group

        self._group = placement_group([need.bundle for need in self._needs], strategy=self._strategy)
        timeout_s = self.config.ray.start_timeout_s
        if not self._group.wait(timeout_s):
            free = self.ray.available_resources()
            raise UserError(
                f"hybrid.cluster=ray: {', '.join(map(str, self._needs))} were not free within {timeout_s:g} s "
                f"(hybrid.ray.start_timeout_s): others hold them; free are {free.get('CPU', 0.0):g} CPUs, {free.get('GPU', 0.0):g} GPUs."
            )


def _knock(address: str) -> None:
    """Whether anybody listens there: Ray itself tries for minutes. Raises OSError."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


def prepare(config: RayConfig) -> Any:
    """Import Ray, so that a cluster which is started here asks for a token: whoever reaches a Ray cluster may run anything in it, and its
    servers listen on every interface.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray reads this when it is imported; a process that has done so keeps what it has.
    if config.address is None and "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("hybrid.cluster=ray", "ray", error) from error
    return ray
