"""The ranges that actions and robot states were scaled by in training, and the way back.

Shape legend: A action dimensions, D dimensions of the robot's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from embodied_rl.errors import UserError, did_you_mean

Bounds = Literal["quantiles", "extremes"]
"""quantiles: the 1st and 99th percentile are -1 and 1 (OpenVLA; OFT on LIBERO and Bridge). extremes: minimum and maximum (OFT on ALOHA)."""


@dataclass(frozen=True, eq=False)
class Range:
    """A linear scale between values in a robot's units and [-1, 1]."""

    low: np.ndarray
    """[A] float64, what -1 stands for."""
    high: np.ndarray
    """[A] float64, what 1 stands for."""
    mask: np.ndarray
    """[A] bool: False where values pass unscaled (the gripper, as a rule)."""
    epsilon: float = 0.0
    """Added to the width: 1e-8 in OpenVLA-OFT, nothing in OpenVLA."""

    @property
    def dim(self) -> int:
        return int(self.low.size)

    def unnormalise(self, normalised: np.ndarray) -> np.ndarray:
        """[..., A] in [-1, 1] → [..., A] float64 in the robot's units."""
        scaled = 0.5 * (normalised + 1.0) * (self.high - self.low + self.epsilon) + self.low
        return np.where(self.mask, scaled, normalised)

    def normalise(self, values: np.ndarray) -> np.ndarray:
        """[..., A] in the robot's units → [..., A] float64 clipped to [-1, 1]."""
        width = np.maximum(self.high - self.low + self.epsilon, 1e-8)
        return np.clip(np.where(self.mask, 2.0 * (values - self.low) / width - 1.0, values), -1.0, 1.0)


def range_of(
    norm_stats: Mapping[str, Any],
    key: str | None,
    part: Literal["action", "proprio"] = "action",
    *,
    bounds: Bounds = "quantiles",
    epsilon: float = 0.0,
) -> Range:
    """Read one data set's range out of a checkpoint's statistics.

    Args:
        key: the data set; None where the checkpoint has only one.

    Raises:
        UserError: no such data set (the choices are listed), or its entry lacks something.
    """
    name = resolve_key(norm_stats, key)
    entry = norm_stats[name]
    if part not in entry:
        raise UserError(f"norm_stats['{name}'] has no '{part}'.{did_you_mean(part, entry)}")
    statistics = entry[part]
    low_name, high_name = ("q01", "q99") if bounds == "quantiles" else ("min", "max")
    missing = [field for field in (low_name, high_name) if field not in statistics]
    if missing:
        raise UserError(f"norm_stats['{name}']['{part}'] has no '{missing[0]}'.{did_you_mean(missing[0], statistics)}")
    low, high = (np.asarray(statistics[field], np.float64) for field in (low_name, high_name))
    mask = np.asarray(statistics.get("mask", np.ones(low.shape, bool)), bool)
    if not low.shape == high.shape == mask.shape or low.ndim != 1:
        raise UserError(
            f"norm_stats['{name}']['{part}']: sizes differ: {low_name} {low.shape}, {high_name} {high.shape}, mask {mask.shape}."
        )
    return Range(low, high, mask, epsilon)


def resolve_key(norm_stats: Mapping[str, Any], key: str | None) -> str:
    """The data set's name; None is allowed where there is only one. Raises UserError with the choices."""
    if key is None:
        if len(norm_stats) == 1:
            return next(iter(norm_stats))
        raise UserError(
            f"policy.unnorm_key must name the data set whose action ranges are used. Known: {', '.join(sorted(norm_stats)) or '(none)'}."
        )
    if key not in norm_stats:
        raise UserError(f"policy.unnorm_key='{key}' is not in the checkpoint's norm_stats.{did_you_mean(key, norm_stats)}")
    return key
