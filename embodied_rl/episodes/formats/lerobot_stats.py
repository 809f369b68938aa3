"""Statistics of features, as LeRobot keeps them: per episode and of the whole data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_PICTURES, _SIDE = 100, 150
"""At most so many pictures of an episode, and about so many lines and columns of each, are looked at."""

Stats = dict[str, np.ndarray]
"""{min, max, mean, std, count, q01 … q99: array}; ``count`` is [1], the others have a number per column of the feature."""


def vector_stats(rows: np.ndarray) -> Stats:
    """Of numbers [T, …, D]: over everything but the last axis, [D] ([1] for [T]); float64, min and max in the rows' own type."""
    flat = rows.reshape(-1, 1) if rows.ndim == 1 else rows.reshape(-1, rows.shape[-1])
    values = flat.astype(np.float64)
    stats = {"min": flat.min(axis=0), "max": flat.max(axis=0), "mean": values.mean(axis=0), "std": values.std(axis=0)}
    stats["count"] = np.array([len(rows)])
    return stats | dict(zip(QUANTILES, np.quantile(values, list(QUANTILES.values()), axis=0), strict=True))


def picture_stats(pictures: np.ndarray) -> Stats:
    """Of pictures [T, H, W, C] uint8: per channel, scaled to 0 … 1, [C, 1, 1]; of a sample of the pictures and of their pixels."""
    count = min(len(pictures), _PICTURES)
    chosen = np.round(np.linspace(0, len(pictures) - 1, count)).astype(int)
    stride = max(1, max(pictures.shape[1:3]) // _SIDE)
    sample = np.asarray(pictures[chosen])[:, ::stride, ::stride] / 255.0
    stats = vector_stats(sample.reshape(-1, sample.shape[-1]))
    shaped = {name: value[:, None, None] for name, value in stats.items() if name != "count"}
    return shaped | {"count": np.array([count])}


def pooled(episodes: Sequence[Stats]) -> Stats:
    """Of several episodes together, from each one's own: exact but for the quantiles, which are the mean of the episodes', by count."""
    weights = np.array([stats["count"][0] for stats in episodes], np.float64)
    weights /= weights.sum()

    def mean(name: str) -> np.ndarray:
        return np.asarray(sum(weight * np.asarray(stats[name], np.float64) for weight, stats in zip(weights, episodes, strict=True)))

    centre = mean("mean")
    spread = sum(w * (s["std"] ** 2 + (s["mean"] - centre) ** 2) for w, s in zip(weights, episodes, strict=True))
    whole = {
        "min": np.min([stats["min"] for stats in episodes], axis=0),
        "max": np.max([stats["max"] for stats in episodes], axis=0),
        "mean": centre,
        "std": np.sqrt(spread),
        "count": np.array([sum(int(stats["count"][0]) for stats in episodes)]),
    }
    return whole | {name: mean(name) for name in QUANTILES}


def to_lists(stats: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """JSON-able."""
    return {name: value.tolist() for name, value in stats.items()}
