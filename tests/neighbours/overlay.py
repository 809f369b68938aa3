"""Other people's packages beside ours: each test's in a folder of its own, so that none disturbs the environment that the suite runs in."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodied-rl-tests"


def overlay(*packages: str, options: tuple[str, ...] = (), prepare: Callable[[Path], None] | None = None) -> Path:
    """A folder with exactly these packages, ``name==version`` each, and none of what they ask for; kept for the next run.

    What they ask for beyond this list must be in the environment already. `options` are pip's; `prepare` is called with the folder once.
    Skips the test, with pip's last line, where the registry does not have one of them.
    """
    folder = _CACHE / hashlib.sha256("\n".join((sys.version, *packages, *options)).encode()).hexdigest()[:16]
    if not (folder / ".whole").exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--upgrade",
            "--target",
            str(folder),
            *options,
            *packages,
        ]
        installed = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if installed.returncode:
            pytest.skip(f"{packages[0]} cannot be installed here: {(installed.stderr.strip() or 'pip failed').splitlines()[-1]}")
        if prepare is not None:
            prepare(folder)
        (folder / ".whole").touch()
    return folder


def separate(*packages: str) -> Path:
    """The interpreter of an environment of its own, with these packages and all that they ask for; kept for the next run.

    Skips the test, with pip's last line, where the registry does not have one of them.
    """
    folder = _CACHE / hashlib.sha256("\n".join((sys.version, "separate", *packages)).encode()).hexdigest()[:16]
    python = folder / "bin" / "python"
    if not (folder / ".whole").exists():
        venv.create(folder, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", *packages]
        installed = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if installed.returncode:
            pytest.skip(f"{packages[0]} cannot be installed here: {(installed.stderr.strip() or 'pip failed').splitlines()[-1]}")
        (folder / ".whole").touch()
    return python


def run_with(folder: Path | None, program: str, *arguments: str, timeout_s: float = 300.0) -> str:
    """What a program prints in a Python that sees the overlay before the environment; fails with its last words where it does."""
    places = [str(folder)] if folder is not None else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*places, str(REPOSITORY)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
