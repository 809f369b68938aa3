"""Plays a batch of ManiSkill environments and as many by themselves side by side, and holds every number of one against the other's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from embodied_rl.sim.robots import maniskill
from embodied_rl.types import StepBuffers


def batch_of(task: str, num_envs: int, **kwargs: Any) -> Any:
    """A batch, whatever the self-check says of it."""
    from embodied_rl.sim.robots.maniskill_batch.sim import ManiSkillBatchSim

    ours = {"render": False, "render_size": 64, "camera_size": None}
    given = {name: kwargs.pop(name, value) for name, value in ours.items()}
    return ManiSkillBatchSim(task, num_envs, **given, kwargs=kwargs)


class Pair:
    """The same task twice, with everything done to both and compared bit for bit."""

    aggregates: frozenset[str] = frozenset()
    """Infos that the task gives as a mean over its batch, of which a batch says nothing."""

    def __init__(self, task: str, num_envs: int, **kwargs: Any) -> None:
        self.alone: Any = maniskill.make(task, num_envs, batched=False, **kwargs)
        self.batch: Any = batch_of(task, num_envs, **kwargs)
        assert self.alone.spec == self.batch.spec
        self.num_envs, self.spec = num_envs, self.alone.spec
        self.outs = [StepBuffers.allocate(self.spec, num_envs) for _ in range(2)]

    def reset(self, rows: Sequence[int], seeds: Sequence[int], options: dict[str, Any] | None = None) -> None:
        self._both(lambda sim, out: sim.reset(rows, seeds, out, options), rows, f"reset {seeds} {options}")

    def step(self, rows: Sequence[int], actions: np.ndarray) -> None:
        self._both(lambda sim, out: sim.step(rows, actions, out), rows, "step")

    def restore_from(self, source: str, saved: int, restored: int) -> None:
        """Save environment `saved` on both sides and take the bytes of one of them up in `restored`, on both sides."""
        data = {"alone": self.alone.snapshot(saved), "batch": self.batch.snapshot(saved)}[source]
        self.alone.restore(restored, data)
        self.batch.restore(restored, data)

    def compare_physics(self, env_id: int) -> None:
        one, other = self.alone.physics(env_id), self.batch.physics(env_id)
        assert one.keys() == other.keys()
        for name, row in one.items():
            np.testing.assert_array_equal(row, other[name], err_msg=name)

    def close(self) -> None:
        self.alone.close()
        self.batch.close()

    def _both(self, act: Callable[[Any, StepBuffers], None], rows: Sequence[int], what: str) -> None:
        one, other = self.outs
        act(self.alone, one)
        act(self.batch, other)
        for i in rows:
            for key, part in one.observation.items():
                np.testing.assert_array_equal(part[i], other.observation[key][i], err_msg=f"{what}, environment {i}, '{key}'")
            if what == "step":
                for name in ("reward", "terminated", "truncated", "success"):
                    assert getattr(one, name)[i] == getattr(other, name)[i], (i, name)
                told = other.info[i]
                assert told == {key: one.info[i][key] for key in told}, i
                assert one.info[i].keys() - told.keys() <= self.aggregates


def play(pair: Pair, steps: int, *, snapshots: bool = True) -> None:
    """Random actions with all that a worker does in between: partial resets, new scenes, steps of some, snapshots either way."""
    num, rng, action = pair.num_envs, np.random.default_rng(0), pair.spec.action
    everybody = list(range(num))
    pair.reset(everybody, [10 + i for i in everybody])
    for t in range(steps):
        rows = [i for i in everybody if (i + t) % 3] if t % 7 == 3 else everybody
        pair.step(rows, rng.uniform(action.low, action.high, (len(rows), action.dim)).astype(np.float32))
        if t % 9 == 5:
            pair.reset([t % num], [1000 + t], {"reconfigure": True} if t % 18 == 5 else None)
        if snapshots and t % 40 in (15, 30):
            pair.restore_from("alone" if t % 40 == 15 else "batch", 1, t // 40 % num)
