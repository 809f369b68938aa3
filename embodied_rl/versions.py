"""Origin of a result: installed versions and the machine, found without importing anything heavy."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from embodied_rl import __version__

_PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "mani_skill", "sapien", "metaworld", "gymnasium-robotics", "gym-pusht", "numba")


@cache
def versions() -> dict[str, str]:
    """{name: version} of Python, this package and every installed package that a result may depend on."""
    found = {"embodied_rl": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def machine() -> dict[str, Any]:
    """{"cpu": model name, "cores": usable by this process, "memory_gib", "system"}."""
    memory_gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0)), "memory_gib": memory_gib, "system": platform.platform()}


def provenance(command: str) -> dict[str, Any]:
    """Entries of a result's file about its origin: the command, the time, versions and the machine."""
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": command, "finished": finished, "versions": versions(), "machine": machine()}


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
