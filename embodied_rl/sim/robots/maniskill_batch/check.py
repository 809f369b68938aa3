"""The self-check: two environments of a batch against two by themselves, with all that a worker does to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from embodied_rl.sim.robots.maniskill_batch import UnsupportedTask
from embodied_rl.sim.robots.maniskill_batch.sim import ManiSkillBatchSim
from embodied_rl.sim.robots.maniskill_sim import ManiSkillSim
from embodied_rl.types import StepBuffers

_STEPS = 24


def difference(task: str, arguments: Mapping[str, Any], num_envs: int) -> str | None:
    """What a batch of `num_envs` does otherwise than environments by themselves; None: nothing, bit for bit.

    The first and the last of the batch are compared. Its size matters: for some shapes torch sums in another order than for one row.

    Raises:
        UserError: the task cannot be made with these arguments, batch or not.
    """
    asked = {"render": False, "render_size": 64, "camera_size": None, **arguments}
    single = ManiSkillSim(task, 2, **asked)
    try:
        batch = ManiSkillBatchSim(task, num_envs, **asked)
    except UnsupportedTask as error:
        single.close()
        return " ".join(str(error).split())[:200]
    try:
        return _play(single, batch, num_envs)
    except Exception as error:
        return f"{type(error).__name__} in a batch: {' '.join(str(error).split())[:150]}"
    finally:
        single.close()
        batch.close()


def _play(single: ManiSkillSim, batch: ManiSkillSim, num_envs: int) -> str | None:
    """Steps of all and of some, a reset of one, a snapshot, a new scene. Describes the first difference."""
    last = num_envs - 1
    compared = {0: 0, 1: last}
    small, large = StepBuffers.allocate(single.spec, 2), StepBuffers.allocate(single.spec, num_envs)
    action, rng = single.spec.action, np.random.default_rng(0)

    def reset(row: int, seed: int, options: dict[str, Any] | None = None) -> str | None:
        single.reset([row], [seed], small, options)
        batch.reset([compared[row]], [seed], large, options)
        return _first_difference(small, large, {row: compared[row]})

    single.reset([0, 1], [100, 100 + last], small)
    batch.reset(range(num_envs), range(100, 100 + num_envs), large)
    found = _first_difference(small, large, compared)
    for t in range(_STEPS):
        actions = rng.uniform(action.low, action.high, (num_envs, action.dim)).astype(np.float32)
        if found is None:
            rows = {1: last} if t == 5 else compared
            single.step(list(rows), actions[list(rows.values())], small)
            moved = list(rows.values()) if t == 5 else list(range(num_envs))
            batch.step(moved, actions[moved], large)
            found = _first_difference(small, large, rows)
        if t == 8:
            found = found or reset(1, 7)
        if t == 12:
            single.snapshot(0)
            batch.snapshot(0)
        if t == 16:
            found = found or reset(0, 9, {"reconfigure": True})
        if found is not None:
            return f"after {t + 1} steps {found}"
    for i, k in compared.items():
        one, other = single.physics(i), batch.physics(k)
        for name in one:
            if name not in other or not np.array_equal(one[name], other[name]):
                return f"after {_STEPS} steps the state of '{name}' differs"
    return None


def _first_difference(one: StepBuffers, other: StepBuffers, rows: Mapping[int, int]) -> str | None:
    """`rows`: of `one`, and those of `other` that they are compared with."""
    values = [(f"'{key}'", part, other.observation[key]) for key, part in one.observation.items()]
    values += [(name, getattr(one, name), getattr(other, name)) for name in ("reward", "terminated", "truncated", "success")]
    for name, part, there in values:
        for i, k in rows.items():
            if not np.array_equal(part[i], there[k]):
                apart = np.abs(np.asarray(part[i], np.float64) - np.asarray(there[k], np.float64)).max()
                return f"{name} differs by {apart:.2g}"
    for i, k in rows.items():
        single, batched = one.info[i] or {}, other.info[k] or {}
        for key in batched:
            if single.get(key) != batched[key]:
                return f"info '{key}' differs"
    return None
