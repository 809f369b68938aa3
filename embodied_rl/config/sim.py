"""One simulator task and how its processes run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from embodied_rl.bounds import Bounds, Megabytes, Processes, Retries, Seconds, Slots
from embodied_rl.config.building import Config, require


@dataclass(frozen=True)
class SimConfig(Config, place="sim"):
    """One simulator task and how its processes run."""

    name: str
    """Of the simulator, as its file in configs/sim is called."""
    target: str
    """``package.module:Attribute`` of a SimEnv, gymnasium.Env or VectorEnv factory."""
    task: str | None = None
    """The simulator's name of the task; null: the target has one task."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the target."""
    extra: str | None = None
    """Which extra of the package brings the simulator."""
    num_slots: Slots = 16
    """Environments that are stepped side by side."""
    num_workers: Processes | Literal["auto"] | None = "auto"
    """Processes; auto: as many as were the fastest when training with this simulator first began on this machine, as many as there are
    cores where that was not measured; null: as many as there are cores, at most one per slot. Results do not depend on it."""
    placement: Literal["auto", "none", "pack", "spread", "near_gpu"] = "auto"
    """Which cores and memory each worker gets; auto: near_gpu or spread on a machine with several NUMA nodes that is only ours,
    none elsewhere."""
    pipeline_groups: Slots = 2
    """Slots are stepped in this many alternating groups: one group simulates while the policy acts for another."""
    max_episode_steps: Annotated[int, Bounds(1, 1_000_000_000)] | None = None
    """Truncate after this many steps; null: what the simulator says."""
    success_ends_episode: bool = False
    """End an episode (as truncated) at its first success."""
    step_timeout_s: Seconds = 60.0
    """A worker that does nothing for so long while it should step is replaced."""
    start_timeout_s: Seconds = 180.0
    """The same for building and restoring."""
    reset_timeout_s: Seconds | None = None
    """The same for a reset of all slots; null: ten times the longest so far, or before the first of what building took; at least
    20 s (60 s until every worker has reset once) and at most sim.start_timeout_s."""
    on_fault: Literal["restore", "restart", "stop"] = "restore"
    """When a worker fails: take its episodes up where they were (restore), begin new ones (restart), or end the run (stop)."""
    non_finite: Literal["stop", "recover"] = "stop"
    """NaN or infinity from a simulator: end the run and dump what led to it, or treat it as any other fault."""
    max_restarts: Retries = 5
    """End the run when a worker fails more often than this in a row."""
    memory_limit_mb: Megabytes | None = None
    """Resident size of one worker beyond which it is replaced; null: no limit."""
    spare_workers: Annotated[int, Bounds(0, 65_536)] = 0
    """Workers built ahead, which take a failed one's place at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        workers, slots = self.fixed_workers, self.num_slots
        require(workers is None or workers <= slots, "sim.num_workers", f"<= sim.num_slots ({slots})", workers)
        require(self.pipeline_groups <= slots, "sim.pipeline_groups", f"<= sim.num_slots ({slots})", self.pipeline_groups)

    @property
    def fixed_workers(self) -> int | None:
        """`num_workers` where it is a number; None where the machine decides."""
        return self.num_workers if isinstance(self.num_workers, int) else None
