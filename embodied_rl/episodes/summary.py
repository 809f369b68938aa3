"""What the line of the index says about an episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

SUMMED = ("reward", "terminated", "truncated", "success")
"""Columns that the line of the index is summed up from."""


def summary_of(
    seed: int, task: str | None, instruction: str | None, metadata: Mapping[str, Any], summed: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """What the line of the index says about an episode."""
    reward, success = np.asarray(summed["reward"], np.float32), np.asarray(summed["success"], bool)
    return {
        "steps": len(reward),
        "seed": int(seed),
        "task": task,
        "instruction": instruction,
        "return": float(reward.sum(dtype=np.float64)),
        "success_once": bool(success.any()),
        "success_at_end": bool(success[-1]),
        "complete": bool(summed["terminated"][-1] or summed["truncated"][-1]),
        "metadata": dict(metadata),
    }
