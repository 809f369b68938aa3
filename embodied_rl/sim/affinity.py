"""Cores this process may use: what the scheduler allows, cut by the container's quota."""

from __future__ import annotations

import math
import os
from pathlib import Path


def available_cores(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Number of cores usable by this process, at least 1 (affinity mask, then cgroup v2 or v1 CPU quota)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(float(cores), _quota(cgroup_root))))


def _quota(root: Path) -> float:
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu/cpu.cfs_period_us").read_text())
        return limit_us / period_us if limit_us > 0 else math.inf
    except (OSError, ValueError):
        return math.inf
