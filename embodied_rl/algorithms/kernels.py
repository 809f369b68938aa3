"""Recursions over time, compiled. Import this module where it is used: numba takes a third of a second to import."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def gae_kernel(
    reward: np.ndarray,
    value: np.ndarray,
    last_value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    final_value: np.ndarray,
    mask: np.ndarray,
    gamma: float,
    gae_lambda: float,
    advantage: np.ndarray,
) -> None:
    """Fill `advantage` [T, N]; see `embodied_rl.algorithms.advantages.gae`. Sums are float64 whatever the arrays are."""
    num_steps, num_slots = reward.shape
    next_value = np.empty(num_slots, np.float64)
    carried = np.zeros(num_slots, np.float64)
    for n in range(num_slots):
        next_value[n] = last_value[n]
    k = final_value.size
    for t in range(num_steps - 1, -1, -1):
        for n in range(num_slots - 1, -1, -1):
            cut = truncated[t, n] and not terminated[t, n]
            if cut:
                k -= 1
            if not mask[t, n]:
                advantage[t, n] = 0.0
                continue
            if terminated[t, n]:
                bootstrap, carry = 0.0, 0.0
            elif cut:
                bootstrap, carry = final_value[k], 0.0
            else:
                bootstrap, carry = next_value[n], carried[n]
            carried[n] = reward[t, n] + gamma * bootstrap - value[t, n] + gamma * gae_lambda * carry
            advantage[t, n] = carried[n]
            next_value[n] = value[t, n]


@numba.njit(cache=True, nogil=True)
def discounted_returns_kernel(reward: np.ndarray, done: np.ndarray, gamma: float, carried: np.ndarray, returns: np.ndarray) -> None:
    """Fill `returns` [T, N] with R_t = r_t + gamma R_(t-1), forgotten after a done; `carried` [N] goes in and comes out."""
    num_steps, num_slots = reward.shape
    for t in range(num_steps):
        for n in range(num_slots):
            carried[n] = carried[n] * gamma + reward[t, n]
            returns[t, n] = carried[n]
            if done[t, n]:
                carried[n] = 0.0
