"""Compiled recursions over time. Import this module only in functions that use it: importing numba takes a third of a second."""

from __future__ import annotations

import numba
import numpy as np

_BYTE_4, _BYTES_2367, _BYTES_1357 = np.uint64(1 << 32), np.uint64(0xFFFF_0000_FFFF_0000), np.uint64(0xFF00_FF00_FF00_FF00)
"""Bit masks of a word on little-endian machines."""


@numba.njit(cache=True, nogil=True)
def find_cuts(truncated: np.ndarray, terminated: np.ndarray, cut: np.ndarray) -> int:
    """Write the flat positions of steps that are truncated and not terminated to `cut`, ascending; return their number.
    `truncated` and `terminated` [T * N] bool. Positions that do not fit into `cut` are only counted. Sixty-four steps, which rarely contain
    one, are checked as eight words: six times as fast as `np.flatnonzero`."""
    found, whole = 0, truncated.size // 64 * 8
    ends, others = truncated[: 8 * whole].view(np.uint64), terminated[: 8 * whole].view(np.uint64)
    for block in range(0, whole, 8):
        here = np.uint64(0)
        for word in range(block, block + 8):
            here |= ends[word]
        if here:
            for word in range(block, block + 8):
                left = ends[word] & ~others[word]
                while left:  # a flag is the lowest bit of its byte
                    lowest = left & (~left + np.uint64(1))
                    byte = 4 * (lowest >= _BYTE_4) + 2 * ((lowest & _BYTES_2367) != 0) + ((lowest & _BYTES_1357) != 0)
                    if found < cut.size:
                        cut[found] = 8 * word + byte
                    found += 1
                    left ^= lowest
    for step in range(8 * whole, truncated.size):
        if truncated[step] and not terminated[step]:
            if found < cut.size:
                cut[found] = step
            found += 1
    return found


@numba.njit(cache=True, nogil=True)
def _gae_row(
    reward: np.ndarray,
    value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: float,
    decay: float,
    following: np.ndarray,
    carried: np.ndarray,
    advantage: np.ndarray,
    returns: np.ndarray,
    first: int,
    num_slots: int,
) -> None:
    """One step of neighbouring slots, starting at `first` of the flat arrays [T * N]. The loop has no branch, so that it runs on whole
    vectors: five times as fast. Positions are unsigned, because possibly negative ones would be a branch; a slice of each array per row
    would cost as much as the row.

    `following` and `carried`, float64 [num_slots]: in: the values and advantages after the step; out: those of the step.
    """
    for n in range(num_slots):
        at = first + n
        here = np.float64(value[at])
        bootstrap = 0.0 if terminated[at] else following[n]
        carry = 0.0 if terminated[at] | truncated[at] else carried[n]
        carried[n] = reward[at] + gamma * bootstrap - here + decay * carry
        following[n] = here
        advantage[at] = carried[n]
        returns[at] = advantage[at] + value[at]


@numba.njit(cache=True, nogil=True)
def _gae_row_masked(
    reward: np.ndarray,
    value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    mask: np.ndarray,
    discount: np.ndarray,
    gae_lambda: float,
    following: np.ndarray,
    carried: np.ndarray,
    advantage: np.ndarray,
    returns: np.ndarray,
) -> None:
    """As `_gae_row`, with a mask and a discount for each slot. Masked entries are computed too, and then discarded."""
    for n in range(reward.size):
        bootstrap = 0.0 if terminated[n] else following[n]
        carry = 0.0 if terminated[n] | truncated[n] else carried[n]
        computed = reward[n] + discount[n] * bootstrap - value[n] + discount[n] * gae_lambda * carry
        carried[n] = computed if mask[n] else carried[n]
        following[n] = value[n] if mask[n] else following[n]
        advantage[n] = carried[n] if mask[n] else 0.0
        returns[n] = advantage[n] + value[n] if mask[n] else 0.0


@numba.njit(cache=True, nogil=True)
def gae_kernel(
    reward: np.ndarray,
    value: np.ndarray,
    last_value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    cut: np.ndarray,
    final_value: np.ndarray,
    gamma: float,
    gae_lambda: float,
    advantage: np.ndarray,
    returns: np.ndarray,
    first: int,
    stop: int,
) -> None:
    """Fill slots [first, stop) of `advantage` and `returns`; see `embodied_rl.algorithms.advantages.gae`.

    Arrays of steps are flat, [T * N]; `last_value` is [N]. Sums are float64 for every type. `cut` [K]: flat positions of truncated
    steps, ascending; `final_value` [K]: the values after them.
    """
    num_slots, own = last_value.size, np.uint64(stop - first)
    following, carried = last_value[first:stop].copy(), np.zeros(stop - first, np.float64)
    num_steps = reward.size // num_slots if num_slots else 0
    decay = gamma * gae_lambda
    k = cut.size
    for t in range(num_steps - 1, -1, -1):
        row = t * num_slots
        while k > 0 and cut[k - 1] >= row:  # steps that another value follows
            k -= 1
            n = cut[k] - row
            if first <= n < stop:
                following[n - first] = final_value[k]
        # Written out, because a tuple of arrays in between costs half as much as the row.
        at = np.uint64(row + first)
        _gae_row(reward, value, terminated, truncated, gamma, decay, following, carried, advantage, returns, at, own)


@numba.njit(cache=True, nogil=True)
def masked_gae_kernel(
    reward: np.ndarray,
    value: np.ndarray,
    last_value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    cut: np.ndarray,
    final_value: np.ndarray,
    mask: np.ndarray,
    discount: np.ndarray,
    gae_lambda: float,
    advantage: np.ndarray,
    returns: np.ndarray,
    first: int,
    stop: int,
) -> None:
    """As `gae_kernel`, for the steps in a mask, each with its own discount; arrays of steps are [T, N]."""
    num_slots = last_value.size
    following = last_value[first:stop].astype(np.float64)
    carried = np.zeros(stop - first, np.float64)
    k = cut.size
    for t in range(len(reward) - 1, -1, -1):
        while k > 0 and cut[k - 1] >= t * num_slots:
            k -= 1
            n = cut[k] - t * num_slots
            if first <= n < stop and mask[t, n]:
                following[n - first] = final_value[k]
        row = (reward[t, first:stop], value[t, first:stop], terminated[t, first:stop], truncated[t, first:stop])
        given = (mask[t, first:stop], discount[t, first:stop], gae_lambda)
        _gae_row_masked(*row, *given, following, carried, advantage[t, first:stop], returns[t, first:stop])


@numba.njit(cache=True, nogil=True)
def discounted_returns_kernel(reward: np.ndarray, done: np.ndarray, gamma: float, carried: np.ndarray, returns: np.ndarray) -> None:
    """Fill `returns` [T, N] with R_t = r_t + gamma R_(t-1), reset after a done; `carried` [N] is read and updated."""
    num_steps, num_slots = reward.shape
    for t in range(num_steps):
        for n in range(num_slots):
            carried[n] = carried[n] * gamma + reward[t, n]
            returns[t, n] = carried[n]
            if done[t, n]:
                carried[n] = 0.0


@numba.njit(cache=True, nogil=True)
def token_returns_kernel(reward: np.ndarray, mask: np.ndarray, gamma: float, returns: np.ndarray) -> None:
    """Fill `returns` [B, L] with G_l = r_l + gamma G_(l+1) along each row, over the entries in `mask` ([B, L] or empty: all)."""
    num_rows, num_units = reward.shape
    masked = mask.size > 0
    for b in range(num_rows):
        carried = 0.0
        for position in range(num_units):
            unit = num_units - 1 - position
            if masked and not mask[b, unit]:
                returns[b, unit] = 0.0
                continue
            carried = reward[b, unit] + gamma * carried
            returns[b, unit] = carried
