"""Episodes as arrays, for comparing them bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied_rl.sim.env import SimEnv
from embodied_rl.types import StepBuffers


def actions_for(sim: SimEnv, num_steps: int, seed: int = 0) -> np.ndarray:
    """[num_steps, A] random actions within the simulator's bounds."""
    rng, spec = np.random.default_rng(seed), sim.spec.action
    if spec.kind == "discrete":
        return rng.integers(0, spec.num_actions, (num_steps, 1))
    return rng.uniform(spec.low, spec.high, (num_steps, spec.dim)).astype(np.float32)


def episode(
    sim: SimEnv,
    num_envs: int,
    seeds: Mapping[int, int],
    num_steps: int,
    options: Mapping[str, Any] | None = None,
    order: Sequence[int] | None = None,
    action_seed: int = 0,
) -> dict[int, list[np.ndarray]]:
    """Reset and step the environments of `seeds` (id → seed); returns everything each one put out, as flat arrays.

    An environment's actions depend on its seed, so that equal seeds have to give equal episodes.
    """
    out = StepBuffers.allocate(sim.spec, num_envs)
    ids = list(order or seeds)
    sim.reset(ids, [seeds[i] for i in ids], out, options)
    record: dict[int, list[np.ndarray]] = {i: [_row(out, i, False)] for i in ids}
    actions = {i: actions_for(sim, num_steps, action_seed + seeds[i]) for i in ids}
    for t in range(num_steps):
        sim.step(ids, np.stack([actions[i][t] for i in ids]), out)
        for i in ids:
            record[i].append(_row(out, i, True))
    return record


def _row(out: StepBuffers, i: int, stepped: bool) -> np.ndarray:
    parts = [out.observation[key][i].ravel().astype(np.float64) for key in sorted(out.observation)]
    if stepped:
        parts.append(np.array([out.reward[i], out.terminated[i], out.truncated[i], out.success[i]], np.float64))
    return np.concatenate(parts)


def assert_equal(first: list[np.ndarray], second: list[np.ndarray]) -> None:
    assert len(first) == len(second)
    for t, (a, b) in enumerate(zip(first, second, strict=True)):
        np.testing.assert_array_equal(a, b, err_msg=f"step {t}")


def assert_depends_on_seed_alone(sim: SimEnv, options: Mapping[str, Any] | None = None, num_steps: int = 20) -> None:
    """The same seed gives the same episode: in either environment, whatever ran before, whatever the neighbour does, in any order."""
    together = episode(sim, 2, {0: 7, 1: 8}, num_steps, options)
    swapped = episode(sim, 2, {0: 8, 1: 7}, num_steps, options, order=[1, 0])
    assert_equal(together[0], swapped[1])
    assert_equal(together[1], swapped[0])
    alone = episode(sim, 2, {1: 7}, num_steps, options)
    assert_equal(together[0], alone[1])
    assert any((a != b).any() for a, b in zip(together[0], together[1], strict=True)), "two seeds gave the same episode"
