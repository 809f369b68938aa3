"""What the doctor tries and what comes of it: the rows of its report, and the probes that run in separate processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

Status = Literal["ok", "missing", "failed"]


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    group: str
    name: str
    status: Status
    detail: str
    fix: str = ""
    """The command or step that mends it; empty when all is well."""
    required: bool = False
    """Whether training cannot run without it."""


@dataclass(frozen=True)
class Probe:
    """Something tried in a separate process."""

    group: str
    name: str
    run: Callable[[], str]
    """Runs in the child; returns the detail to show, raises where it does not work."""
    fix: str
    environment: tuple[tuple[str, str], ...] = ()
    package: str | tuple[str, ...] | None = None
    """Distribution that must be there for the probe to make sense; several: any one of them."""
    package_fix: str | None = None
    """What brings the distribution, where that is not `fix`."""
    required: bool = False


class NotHere(Exception):
    """What was to be tried is not on this machine: missing, rather than broken."""

    def __init__(self, detail: str, fix: str = "") -> None:
        """`fix` is what brings it, where that is not the probe's own `fix`."""
        super().__init__(detail)
        self.fix = fix


def installed_version(package: str) -> str | None:
    """Of a distribution; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def extra_fix(extra: str) -> str:
    """The command that brings an extra of setup.cfg."""
    return f'pip install "embodied-rl[{extra}]"'
