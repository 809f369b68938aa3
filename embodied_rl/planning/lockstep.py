"""Rollouts of a fixed number of decisions: stages of slots that go round between simulators and the policy, and what follows them.

Pure arithmetic over arrays; R repetitions at once. A stage is stepped as a whole, then acted for as a whole. With constant times s and g of
one stage, T rounds of K stages take T·(s + g) for K = 1, T·K·(s + g) where both sides share a device, and for K = 2
2·T·max(s, g) + min(s, g).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RolloutTimes:
    """Seconds of R repetitions of one group's rollout."""

    seconds: np.ndarray
    """[R] from the first step's begin to the last action's end."""
    env_busy_s: np.ndarray
    """[R] in which simulators worked."""
    act_busy_s: np.ndarray
    """[R] in which the policy acted."""


def pipelined_rollout(step_s: np.ndarray, act_s: np.ndarray, *, shared: bool) -> RolloutTimes:
    """T rounds of K stages, served in turns.

    Args:
        step_s: [R, T, K] seconds of simulating a stage.
        act_s: [R, T, K] seconds of acting for it.
        shared: both on the same device: nothing overlaps.
    """
    num_repetitions, num_rounds, num_stages = step_s.shape
    env_free = np.zeros(num_repetitions)
    act_free = np.zeros(num_repetitions)
    ready = np.zeros((num_stages, num_repetitions))
    for t in range(num_rounds):
        for k in range(num_stages):
            env_free = np.maximum(ready[k], env_free if not shared else np.maximum(env_free, act_free)) + step_s[:, t, k]
            act_free = np.maximum(env_free, act_free) + act_s[:, t, k]
            ready[k] = act_free
    return RolloutTimes(act_free, step_s.sum((1, 2)), act_s.sum((1, 2)))


def stage_steps(
    rng: np.random.Generator, shape: tuple[int, int, int], rows: int, servers: float, median_s: float, sigma: float
) -> np.ndarray:
    """[R, T, K] seconds until all `rows` environments of a stage have stepped, dealt in blocks to `servers` cores.

    With fewer than one core (a core that several groups share), a step takes that much longer.
    """
    cores = max(1, min(rows, math.floor(servers)))
    slower = 1.0 if servers >= 1 else 1.0 / servers
    if sigma == 0:
        return np.full(shape, median_s * slower * -(-rows // cores))
    per_core = -(-rows // cores)
    drawn = np.exp(rng.normal(math.log(median_s), sigma, (*shape, cores, per_core)))
    # The last cores may have one environment less than the others.
    missing = cores * per_core - rows
    if missing:
        drawn[..., cores - missing :, -1] = 0.0
    return drawn.sum(-1).max(-1) * slower


def iterations(rollout_s: np.ndarray, train_s: float, publish_s: float, max_staleness: int, *, overlap: bool) -> np.ndarray:
    """[N] seconds at which iteration n's weights are published.

    Args:
        rollout_s: [N] of each iteration's rollout.
        overlap: generation and training have separate devices: rollout n begins when it has a place, that is when version n − S is
            out (S = `max_staleness`), and training when its rollout and the update before are done.
    """
    published = np.zeros(len(rollout_s))
    collected = 0.0
    for n, seconds in enumerate(rollout_s):
        before = published[n - 1] if n else 0.0
        if overlap:
            place = published[n - 1 - max_staleness] if n - 1 - max_staleness >= 0 else 0.0
            collected = max(collected, place) + seconds
        else:
            collected = before + seconds
        published[n] = max(collected, before) + train_s + publish_s
    return published


def slowest_of(values: np.ndarray, count: int) -> float:
    """Expected largest of `count` independent draws of what `values` are a sample of.

    Blom's approximation for normal variables, mean + std · Φ⁻¹((count − 0.375) / (count + 0.25)): groups that are alike are simulated a
    few times, however many there are.
    """
    if count <= 1 or len(values) == 1:
        return float(values.mean())
    from statistics import NormalDist

    return float(values.mean() + values.std(ddof=1) * NormalDist().inv_cdf((count - 0.375) / (count + 0.25)))
