"""Credit assignment: from rewards and values to advantages. Pure functions over numpy arrays."""

from __future__ import annotations

import numpy as np


def gae(
    *,
    reward: np.ndarray,
    value: np.ndarray,
    last_value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    final_value: np.ndarray,
    gamma: float,
    gae_lambda: float,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (Schulman et al. 2016), time-major.

    delta_t = r_t + gamma V_(t+1) (1 - terminated_t) - V_t and A_t = delta_t + gamma lambda (1 - done_t) A_(t+1). A step
    that is truncated but not terminated bootstraps from the value of its episode's final observation, since the slot's
    next observation already belongs to another episode.

    Args:
        reward, value: [T, N] float32 or float64.
        last_value: [N] value after the last step.
        terminated, truncated: [T, N] bool.
        final_value: [K] values of the final observations, in the order of ``np.argwhere(truncated & ~terminated)``.
        mask: [T, N] bool; steps that count (None: all). The others carry value and advantage through, and get 0.

    Returns:
        Advantages and returns (advantage + value, 0 where masked), both [T, N] of the type of `value`.

    Raises:
        ValueError: shapes do not agree, or there is not one final value for each truncated step.
    """
    from embodied_rl.algorithms.kernels import gae_kernel

    shape = reward.shape
    if len(shape) != 2 or any(array.shape != shape for array in (value, terminated, truncated)) or last_value.shape != shape[1:]:
        shapes = [array.shape for array in (reward, value, terminated, truncated, last_value)]
        raise ValueError(f"reward, value, terminated, truncated must be [T, N] and last_value [N], got {shapes}.")
    num_cut = int(np.count_nonzero(truncated & ~terminated))
    if final_value.shape != (num_cut,):
        raise ValueError(f"final_value must hold one value for each of the {num_cut} truncated steps, got shape {final_value.shape}.")
    if mask is None:
        mask = np.ones(shape, bool)
    advantage = np.empty(shape, value.dtype)
    gae_kernel(reward, value, last_value, terminated, truncated, final_value, mask, gamma, gae_lambda, advantage)
    return advantage, np.where(mask, advantage + value, 0).astype(value.dtype, copy=False)


def whiten(x: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """(x - mean) / sqrt(variance + 1e-8) with the unbiased variance over all entries, or over those in `mask` (0 elsewhere).

    A single entry has no variance: it becomes 0.
    """
    chosen = x.astype(np.float64) if mask is None else x[mask].astype(np.float64)
    if chosen.size < 2:
        return np.zeros_like(x)
    whitened = ((x - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)).astype(x.dtype)
    return whitened if mask is None else np.where(mask, whitened, 0).astype(x.dtype)
