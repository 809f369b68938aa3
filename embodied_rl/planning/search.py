"""Every placement that is worth simulating on a cluster, from the fastest to the slowest, and why others are impossible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from embodied_rl.config.placement import PlacementConfig, PlacementKind, WorkloadConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.placement import Cluster, resolve
from embodied_rl.planning.model import Outlook, simulate

_STAGES = (1, 2, 4)
_SHARES = (1 / 8, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4)
_KINDS: tuple[PlacementKind, ...] = ("collocated", "hybrid", "disaggregated", "multiplexed")


@dataclass(frozen=True)
class Refused:
    """A placement that is impossible here."""

    kind: PlacementKind
    reason: str


@dataclass(frozen=True)
class Plan:
    """All placements of a workload on a cluster."""

    outlooks: Sequence[Outlook]
    """Fastest first; never empty."""
    refused: Sequence[Refused]
    """The first of each kind."""

    @property
    def best(self) -> Outlook:
        return self.outlooks[0]

    @property
    def best_of_each_kind(self) -> list[Outlook]:
        """The fastest of each kind, fastest first."""
        seen: dict[str, Outlook] = {}
        for outlook in self.outlooks:
            seen.setdefault(outlook.placement.kind, outlook)
        return list(seen.values())


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
                        continue  # nothing would be left to generate on
                    yield PlacementConfig(kind, num_stages, env, train)


def plan(workload: WorkloadConfig, cluster: Cluster, *, only: Sequence[PlacementConfig] | None = None, seed: int = 0) -> Plan:
    """Simulate every candidate (or those of `only`).

    Raises:
        UserError: none is possible; with the reason of the first.
    """
    outlooks: list[Outlook] = []
    refused: list[Refused] = []
    seen: set[object] = set()
    for config in only or candidates(workload, len(cluster.compute)):
        try:
            placement = resolve(config, cluster, simulator=workload.simulator)
            # With simulators on processors, hybrid is collocated with stages.
            key = (tuple(placement.roles.items()), placement.num_pipeline_stages, placement.num_takeover)
            if key in seen:
                continue
            seen.add(key)
            outlooks.append(simulate(workload, placement, cluster, seed=seed))
        except UserError as error:
            if all(known.kind != config.kind for known in refused):
                refused.append(Refused(config.kind, str(error)))
    if not outlooks:
        raise UserError(f"No placement is possible on '{cluster.config.name}'. {refused[0].reason}")
    outlooks.sort(key=lambda outlook: -outlook.steps_per_s)
    return Plan(outlooks, refused)
