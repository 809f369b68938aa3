"""State offload and warm pool: bytes a slot, milliseconds, memory freed, and whether the episodes go on as if nothing had been.

    python benchmarks/env_offload.py

Offload: every slot's episode is saved and the processes end; onload starts them and takes the episodes up. The comparison is what
one does without it: end the manager, start it anew and reset, with the episodes lost. Warm pool: another task's workers are built
while the present one goes on stepping; the comparison is a cold start of that task.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import psutil
from tables import provenance, text_table

from embodied_rl.config import load_sim_config
from embodied_rl.sim.affinity import available_cores
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager

SIMS = ("halfcheetah", "ant", "metaworld_reach", "maniskill_pushcube")
WARM = ("maniskill_pushcube", "maniskill_pickcube")
STEPS_BEFORE = 25
"""Steps of the episodes before they are saved."""
STEPS_AFTER = 50
"""Steps over which the continuation is compared."""


def factory_of(name: str) -> SimFactory:
    """The simulator of ``configs/sim/<name>.yaml``."""
    config = load_sim_config(name)
    return SimFactory(config.target, config.task, config.kwargs, config.extra)


@dataclass
class Offload:
    """One simulator; one entry per round."""

    kind: str = ""
    """Its `SimSpec.snapshots`."""
    bytes_per_slot: list[float] = field(default_factory=list)
    snapshot_ms: list[float] = field(default_factory=list)
    """Of all slots."""
    offload_ms: list[float] = field(default_factory=list)
    onload_ms: list[float] = field(default_factory=list)
    anew_ms: list[float] = field(default_factory=list)
    """Ending the manager, starting another and resetting it."""
    freed_mb: list[float] = field(default_factory=list)
    """Proportional set size of the workers, which end."""
    drift: list[float] = field(default_factory=list)
    """Largest difference of an observation or reward, over STEPS_AFTER steps, to the run that was not interrupted."""

    @property
    def ratio(self) -> float:
        """Median of (anew) / (offload + onload) within a round."""
        return statistics.median(anew / (off + on) for anew, off, on in zip(self.anew_ms, self.offload_ms, self.onload_ms, strict=True))


@dataclass
class Warm:
    """The warm pool; one entry per round."""

    switch_ms: list[float] = field(default_factory=list)
    """Going over to workers that are there, first reset included."""
    cold_ms: list[float] = field(default_factory=list)
    """Starting a manager, first reset included."""
    steps_per_s: list[float] = field(default_factory=list)
    """Of the present task before the other is prepared."""
    steps_per_s_meanwhile: list[float] = field(default_factory=list)
    """While it is."""

    @property
    def ratio(self) -> float:
        return statistics.median(cold / warm for cold, warm in zip(self.cold_ms, self.switch_ms, strict=True))


def actions_of(manager: EnvManager, num_steps: int, seed: int) -> np.ndarray:
    """[num_steps, N, A] uniform between the bounds."""
    spec = manager.spec.action
    return np.random.default_rng(seed).uniform(spec.low, spec.high, (num_steps, manager.num_slots, spec.dim)).astype(np.float32)


def played(manager: EnvManager, actions: np.ndarray) -> np.ndarray:
    """[num_steps, N, D + 1] observations and rewards of these actions, all parts flattened side by side."""
    rows = []
    for action in actions:
        batch = manager.step(action)
        parts = [part.reshape(manager.num_slots, -1) for part in batch.observation.values()]
        rows.append(np.concatenate([*parts, batch.reward[:, None]], axis=1, dtype=np.float64))
    return np.stack(rows)


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def measure_offload(name: str, num_slots: int, num_workers: int, into: Offload) -> None:
    """One round with one simulator."""
    factory = factory_of(name)
    manager = EnvManager(factory, num_slots, num_workers=num_workers)
    try:
        into.kind = manager.spec.snapshots
        slots, saved = range(num_slots), []
        before, after = actions_of(manager, STEPS_BEFORE, seed=0), actions_of(manager, STEPS_AFTER, seed=1)
        # The same episodes twice. The uninterrupted ones are saved too, for that may nudge a simulator (ManiSkill).
        manager.reset(reconfigure=True)
        played(manager, before)
        into.snapshot_ms.append(milliseconds(lambda: saved.extend(manager.snapshot(slots))))
        into.bytes_per_slot.append(sum(len(snapshot.to_bytes()) for snapshot in saved) / num_slots)
        uninterrupted = played(manager, after)
        manager.reset(reconfigure=True)
        played(manager, before)
        into.freed_mb.append(sum(psutil.Process(pid).memory_full_info().pss for pid in manager.worker_pids()) / 1e6)
        into.offload_ms.append(milliseconds(manager.offload))
        into.onload_ms.append(milliseconds(manager.onload))
        into.drift.append(float(np.abs(played(manager, after) - uninterrupted).max()))

        def anew() -> None:
            nonlocal manager
            manager.close()
            manager = EnvManager(factory, num_slots, num_workers=num_workers)
            manager.reset()

        into.anew_ms.append(milliseconds(anew))
    finally:
        manager.close()


def measure_warm(num_slots: int, num_workers: int, into: Warm) -> None:
    """One round: cold start of the other task, then from the present one to the other through the pool."""
    present, other = (factory_of(name) for name in WARM)

    started = time.perf_counter()
    with EnvManager(other, num_slots, num_workers=num_workers) as manager:
        manager.reset()
        into.cold_ms.append(1e3 * (time.perf_counter() - started))
    with EnvManager(present, num_slots, num_workers=num_workers) as manager:
        manager.reset()
        into.steps_per_s.append(steps_per_s(manager, 1.0))
        manager.prepare(other)
        # Twice a cold start, for both share the cores.
        into.steps_per_s_meanwhile.append(steps_per_s(manager, 2e-3 * into.cold_ms[-1]))

        def switch() -> None:
            manager.switch(other)
            manager.reset()

        into.switch_ms.append(milliseconds(switch))


def steps_per_s(manager: EnvManager, seconds: float) -> float:
    """Environment steps per second over about so many seconds."""
    actions = actions_of(manager, 1, seed=2)[0]
    steps, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        manager.step(actions)
        steps += manager.num_slots
    return steps / passed


def report(measured: Mapping[str, Offload], num_slots: int, num_workers: int) -> str:
    """The table of the offload, medians over rounds."""
    header = [f"{num_slots} slots, {num_workers} workers", "snapshots", "bytes/slot", "snapshot ms", "offload ms", "onload ms"]
    header += ["both ms", "anew ms", "anew / both", "freed MB", f"drift in {STEPS_AFTER} steps"]
    rows = []
    for name, one in measured.items():
        middle = statistics.median
        both = [off + on for off, on in zip(one.offload_ms, one.onload_ms, strict=True)]
        cells = [f"{middle(one.bytes_per_slot):,.0f}", f"{middle(one.snapshot_ms):.1f}", f"{middle(one.offload_ms):.0f}"]
        cells += [f"{middle(one.onload_ms):.0f}", f"{middle(both):.0f}", f"{middle(one.anew_ms):.0f}", f"{one.ratio:.2f}x"]
        worst = max(one.drift)
        rows.append([name, one.kind, *cells, f"{middle(one.freed_mb):.0f}", "none" if worst == 0 else f"{worst:.1g}"])
    return text_table(header, rows)


def report_warm(warm: Warm) -> str:
    """Lines about the warm pool, medians over rounds."""
    middle = statistics.median
    return (
        f"warm pool, {WARM[0]} to {WARM[1]}: switch + reset {middle(warm.switch_ms):.0f} ms, cold start + reset "
        f"{middle(warm.cold_ms):.0f} ms; the present task stepped {middle(warm.steps_per_s_meanwhile):.0f} steps/s meanwhile, "
        f"{middle(warm.steps_per_s):.0f} before"
    )


def figure(measured: Mapping[str, Offload], warm: Warm | None) -> str:
    """The figure we quote."""
    parts = []
    for name, one in measured.items():
        both = statistics.median(off + on for off, on in zip(one.offload_ms, one.onload_ms, strict=True))
        exact = "exact" if max(one.drift) == 0 else f"drift {max(one.drift):.1g}"
        parts.append(f"{name} {statistics.median(one.bytes_per_slot):,.0f} B/slot, {both:.0f} ms, {exact}")
    if warm is not None:
        parts.append(f"warm switch {warm.ratio:.1f}x faster than a cold start")
    return f"figure: offload + onload: {'; '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-slots", type=int, default=8)
    parser.add_argument("--sims", nargs="+", choices=SIMS, default=list(SIMS))
    parser.add_argument("--no-warm-pool", action="store_true", help="leave the warm pool out")
    arguments = parser.parse_args()
    workers = min(available_cores(), arguments.num_slots)
    print(provenance("mujoco", "metaworld", "mani_skill"))
    measured = {name: Offload() for name in arguments.sims}
    warm = None if arguments.no_warm_pool else Warm()
    for _ in range(arguments.rounds):
        for name, into in measured.items():
            measure_offload(name, arguments.num_slots, workers, into)
        if warm is not None:
            measure_warm(arguments.num_slots, workers, warm)
    print(f"\n{report(measured, arguments.num_slots, workers)}\n")
    if warm is not None:
        print(report_warm(warm))
    print(figure(measured, warm))


if __name__ == "__main__":
    main()
