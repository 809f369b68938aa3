"""One simulator task and how its processes run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from embodied_rl.config.building import build, require


@dataclass(frozen=True)
class SimConfig:
    """One simulator task and how its processes run."""

    name: str
    target: str
    """``package.module:Attribute`` of a SimEnv, gymnasium.Env or VectorEnv factory."""
    task: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the target."""
    extra: str | None = None
    """Which extra of the package brings the simulator."""
    num_slots: int = 16
    num_workers: int | None = None
    """Processes; null: as many as there are cores, at most one per slot."""
    placement: Literal["auto", "none", "pack", "spread", "near_gpu"] = "auto"
    """Which cores and memory each worker gets; auto: near_gpu or spread on a machine with several NUMA nodes that is ours alone,
    none elsewhere."""
    pipeline_groups: int = 2
    """Slots are stepped in this many alternating groups: one group simulates while the policy acts for another."""
    max_episode_steps: int | None = None
    """Truncate after this many steps; null: what the simulator says."""
    success_ends_episode: bool = False
    """End an episode (as truncated) at its first success."""
    step_timeout_s: float = 60.0
    """A worker that does nothing for so long while it should step is replaced."""
    start_timeout_s: float = 180.0
    """The same for building, resetting and restoring."""
    on_fault: Literal["restore", "restart", "stop"] = "restore"
    """When a worker fails: take its episodes up where they were (restore), begin new ones (restart), or end the run (stop)."""
    non_finite: Literal["stop", "recover"] = "stop"
    """NaN or infinity from a simulator: end the run and dump what led to it, or treat it as any other fault."""
    max_restarts: int = 5
    """End the run when a worker fails more often than this in a row."""
    memory_limit_mb: float | None = None
    """Resident size of one worker beyond which it is replaced; null: no limit."""
    spare_workers: int = 0
    """Workers built ahead, which take a failed one's place at once."""

    def __post_init__(self) -> None:
        workers, slots, limit = self.num_workers, self.num_slots, self.max_episode_steps
        require(slots >= 1, "sim.num_slots", ">= 1", slots)
        require(workers is None or workers >= 1, "sim.num_workers", ">= 1 or null", workers)
        require(workers is None or workers <= slots, "sim.num_workers", f"<= sim.num_slots ({slots})", workers)
        require(1 <= self.pipeline_groups <= slots, "sim.pipeline_groups", f"between 1 and sim.num_slots ({slots})", self.pipeline_groups)
        require(limit is None or limit >= 1, "sim.max_episode_steps", ">= 1 or null", limit)
        for name in ("step_timeout_s", "start_timeout_s"):
            require(getattr(self, name) > 0, f"sim.{name}", "> 0", getattr(self, name))
        require(self.max_restarts >= 0, "sim.max_restarts", ">= 0", self.max_restarts)
        require(self.memory_limit_mb is None or self.memory_limit_mb > 0, "sim.memory_limit_mb", "> 0 or null", self.memory_limit_mb)
        require(self.spare_workers >= 0, "sim.spare_workers", ">= 0", self.spare_workers)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SimConfig:
        """Build and validate. Raises UserError naming the key, the value and the choices."""
        return build(SimConfig, data, "sim")
