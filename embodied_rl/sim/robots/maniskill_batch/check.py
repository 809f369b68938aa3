"""The self-check: two environments in a batch against two by themselves, with all that a worker does to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied_rl.sim.robots.maniskill_batch import UnsupportedTask
from embodied_rl.sim.robots.maniskill_batch.sim import ManiSkillBatchSim
from embodied_rl.sim.robots.maniskill_sim import ManiSkillSim
from embodied_rl.types import StepBuffers

_STEPS = 24


def difference(task: str, arguments: Mapping[str, Any]) -> str | None:
    """What a batch does otherwise than environments by themselves; None: nothing, bit for bit.

    Raises:
        UserError: the task cannot be made with these arguments, batch or not.
    """
    asked = {"render": False, "render_size": 64, "camera_size": None, **arguments}
    alone = ManiSkillSim(task, 2, **asked)
    try:
        batch = ManiSkillBatchSim(task, 2, **asked)
    except UnsupportedTask as error:
        alone.close()
        return " ".join(str(error).split())[:200]
    try:
        return _play([alone, batch])
    except Exception as error:
        return f"{type(error).__name__} in a batch: {' '.join(str(error).split())[:150]}"
    finally:
        alone.close()
        batch.close()


def _play(sims: Sequence[ManiSkillSim]) -> str | None:
    """Steps of both and of one, a reset of one, a snapshot, a new scene. The first difference in words."""
    outs = [StepBuffers.allocate(sims[0].spec, 2) for _ in sims]
    action, rng = sims[0].spec.action, np.random.default_rng(0)

    def both(rows: Sequence[int], act: Any) -> str | None:
        for sim, out in zip(sims, outs, strict=True):
            act(sim, out)
        return _first_difference(outs[0], outs[1], rows)

    found = both([0, 1], lambda sim, out: sim.reset([0, 1], [101, 102], out))
    for t in range(_STEPS):
        rows = [1] if t == 5 else [0, 1]
        actions = rng.uniform(action.low, action.high, (len(rows), action.dim)).astype(np.float32)
        found = found or both(rows, lambda sim, out, rows=rows, actions=actions: sim.step(rows, actions, out))
        if t == 8:
            found = found or both([1], lambda sim, out: sim.reset([1], [7], out))
        if t == 12:
            for sim in sims:
                sim.snapshot(0)
        if t == 16:
            found = found or both([0], lambda sim, out: sim.reset([0], [9], out, {"reconfigure": True}))
        if found is not None:
            return f"after {t + 1} steps {found}"
    for i in range(2):
        one, other = (sim.physics(i) for sim in sims)
        for name in one:
            if name not in other or not np.array_equal(one[name], other[name]):
                return f"after {_STEPS} steps the state of '{name}' differs"
    return None


def _first_difference(one: StepBuffers, other: StepBuffers, rows: Sequence[int]) -> str | None:
    values = [(f"'{key}'", part, other.observation[key]) for key, part in one.observation.items()]
    values += [(name, getattr(one, name), getattr(other, name)) for name in ("reward", "terminated", "truncated", "success")]
    for name, part, there in values:
        for i in rows:
            if not np.array_equal(part[i], there[i]):
                apart = np.abs(np.asarray(part[i], np.float64) - np.asarray(there[i], np.float64)).max()
                return f"{name} differs by {apart:.2g}"
    for i in rows:
        alone, batched = one.info[i] or {}, other.info[i] or {}
        for key in batched:
            if alone.get(key) != batched[key]:
                return f"info '{key}' differs"
    return None
