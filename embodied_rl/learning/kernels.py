"""Compiled inner loops of `fused`. Import this module only in functions that use it: importing numba takes a third of a second."""

from __future__ import annotations

import math

import numba
import numpy as np


@numba.njit(cache=True, nogil=True, error_model="numpy")
def adam_kernel(
    parameter: np.ndarray,
    gradient: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    scale: float,
    beta1: float,
    rest1: float,
    beta2: float,
    rest2: float,
    step_size: float,
    sqrt_correction: float,
    eps: float,
) -> None:
    """One Adam step (Kingma and Ba 2015) on flat vectors, with the gradient scaled first.

    Scalars must have the vectors' own type: a single float64 would turn the whole loop into slow float64.

    Args:
        rest1, rest2: 1 - beta1 and 1 - beta2, rounded once.
        step_size: learning rate / (1 - beta1**step).
        sqrt_correction: 1 / sqrt(1 - beta2**step).
    """
    for i in range(parameter.size):
        g = gradient[i] * scale
        exp_avg[i] = beta1 * exp_avg[i] + rest1 * g
        exp_avg_sq[i] = beta2 * exp_avg_sq[i] + rest2 * g * g
        parameter[i] -= step_size * exp_avg[i] / (np.sqrt(exp_avg_sq[i]) * sqrt_correction + eps)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def gaussian_ppo_kernel(
    mean: np.ndarray,
    log_std: np.ndarray,
    action: np.ndarray,
    old_log_prob: np.ndarray,
    advantage: np.ndarray,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    max_log_ratio: float,
    k3_slope: float,
    mean_gradient: np.ndarray,
    log_std_gradient: np.ndarray,
) -> tuple[float, float, float]:
    """Clipped surrogate of a diagonal Gaussian; see `embodied_rl.algorithms.losses.ppo_clip_loss`.

    With z = (a - mean) / std: d log p / d mean = z / std, and d log p / d log_std = z^2 - 1. The derivative of a row's loss
    -A r by its log-probability is -A r again if the unclipped ratio r counts, and 0 if a bound does.

    Args:
        mean, action: [n, A].
        old_log_prob, advantage: [n]
        dual_clip: infinite if off.
        k3_slope: `embodied_rl.algorithms.kl.K3_SLOPE`.
        mean_gradient: [n, A], written: gradient of the loss averaged over the rows.
        log_std_gradient: [A], written.

    Returns loss, KL (k3) and clip fraction, averaged over the rows.
    """
    num_rows, num_dims = mean.shape
    inverse_std = np.exp(-log_std)
    constant = 0.5 * num_dims * math.log(2.0 * math.pi) + log_std.sum()
    weight = 1.0 / num_rows
    loss, kl, num_clipped = 0.0, 0.0, 0
    k3_far = math.log1p(k3_slope)
    log_std_gradient[:] = 0.0
    for i in range(num_rows):
        squares = 0.0
        for j in range(num_dims):
            z = (action[i, j] - mean[i, j]) * inverse_std[j]
            squares += z * z
        raw = -0.5 * squares - constant - old_log_prob[i]
        # NaN passes through unchanged, so that the loss shows it.
        log_ratio = -max_log_ratio if raw < -max_log_ratio else (max_log_ratio if raw > max_log_ratio else raw)
        ratio = math.exp(log_ratio)
        a = advantage[i]
        row_loss = -a * ratio
        slope = row_loss if log_ratio == raw else 0.0
        if ratio > 1.0 + clip_high:
            num_clipped += 1
            if a > 0.0:
                row_loss, slope = -a * (1.0 + clip_high), 0.0
        elif ratio < 1.0 - clip_low:
            num_clipped += 1
            if a < 0.0:
                row_loss, slope = -a * (1.0 - clip_low), 0.0
        if a < 0.0 and ratio > dual_clip:
            row_loss, slope = -a * dual_clip, 0.0
        loss += row_loss
        # k3 as in `embodied_rl.algorithms.kl.kl_estimate`, continued by its tangent.
        kl += k3_slope - k3_far + k3_slope * (raw - k3_far) if raw > k3_far else math.expm1(raw) - raw
        slope *= weight
        for j in range(num_dims):
            z = (action[i, j] - mean[i, j]) * inverse_std[j]
            mean_gradient[i, j] = slope * z * inverse_std[j]
            log_std_gradient[j] += slope * (z * z - 1.0)
    return loss * weight, kl * weight, num_clipped * weight


@numba.njit(cache=True, nogil=True, error_model="numpy")
def value_kernel(
    value: np.ndarray, returns: np.ndarray, old_value: np.ndarray, clip: float, coefficient: float, gradient: np.ndarray
) -> float:
    """Squared error, clipped if `clip` is finite; see `embodied_rl.algorithms.losses.value_loss`.

    Args:
        value, returns, old_value: [n]
        coefficient: factor of the loss in the whole objective; scales only the gradient.
        gradient: [n], written: gradient of the loss averaged over the rows.

    Returns the loss, averaged over the rows.
    """
    num_rows = value.size
    loss = 0.0
    for i in range(num_rows):
        error = value[i] - returns[i]
        row_loss, slope = error * error, 2.0 * error
        change = value[i] - old_value[i]
        if abs(change) > clip:
            clipped_error = old_value[i] + math.copysign(clip, change) - returns[i]
            if clipped_error * clipped_error > row_loss:
                row_loss, slope = clipped_error * clipped_error, 0.0
        loss += row_loss
        gradient[i] = slope * coefficient / num_rows
    return loss / num_rows


@numba.njit(cache=True, nogil=True, error_model="numpy")
def relu_kernel(x: np.ndarray, bias: np.ndarray) -> None:
    """Compute max(x [n, W] + bias [W], 0), in place."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            v = x[i, j] + bias[j]
            x[i, j] = x.dtype.type(0.0) if v < 0 else v  # NaN stays


@numba.njit(cache=True, nogil=True, error_model="numpy")
def relu_slope_kernel(gradient: np.ndarray, activated: np.ndarray) -> None:
    """Turn the gradient [n, W] after a ReLU with output `activated` into the one before it, in place."""
    for i in range(gradient.shape[0]):
        for j in range(gradient.shape[1]):
            gradient[i, j] *= gradient.dtype.type(1.0) if activated[i, j] > 0 else gradient.dtype.type(0.0)
