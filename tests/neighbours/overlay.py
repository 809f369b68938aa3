"""Other people's packages beside ours: each test's in a folder of its own, so that none disturbs the environment that the suite runs in."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodied-rl-tests"


def overlay(*packages: str, options: tuple[str, ...] = (), prepare: Callable[[Path], None] | None = None) -> Path:
    """A folder with exactly these packages, ``name==version`` each, and none of what they ask for; kept for the next run.

    What they ask for beyond this list must be in the environment already. `options` are pip's; `prepare` is called with the folder once.
    Skips the test, with pip's last line, where the registry does not have one of them.
    """
    folder = _folder(*packages, *options)
    with _built_once(folder) as missing:
        if missing:
            _install(sys.executable, ["--no-deps", "--upgrade", "--target", str(folder), *options, *packages], packages[0], 600.0)
            if prepare is not None:
                prepare(folder)
    return folder


def separate(*packages: str, limit_s: float = 600.0) -> Path:
    """The interpreter of an environment of its own, with these packages and all that they ask for; kept for the next run.

    `limit_s`: of the installation, longer where something is built from its source.
    Skips the test, with pip's last line, where the registry does not have one of them.
    """
    folder = _folder("separate", *packages)
    python = folder / "bin" / "python"
    with _built_once(folder) as missing:
        if missing:
            venv.create(folder, with_pip=True, clear=True)
            _install(str(python), packages, packages[0], limit_s)
    return python


def _folder(*words: str) -> Path:
    return _CACHE / hashlib.sha256("\n".join((sys.version, *words)).encode()).hexdigest()[:16]


@contextmanager
def _built_once(folder: Path) -> Iterator[bool]:
    """Whether it must still be built: by one of the processes that want it, while the others wait."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        missing = not (folder / ".whole").exists()
        yield missing
        if missing:
            (folder / ".whole").touch()


def _install(python: str, words: Sequence[str], first: str, limit_s: float) -> None:
    command = [python, "-m", "pip", "install", "--quiet", *words]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if installed.returncode:
        pytest.skip(f"{first} cannot be installed here: {(installed.stderr.strip() or 'pip failed').splitlines()[-1]}")


def run_with(folder: Path | None, program: str, *arguments: str, timeout_s: float = 300.0) -> str:
    """What a program prints in a Python that sees the overlay before the environment; fails with its last words where it does."""
    places = [str(folder)] if folder is not None else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*places, str(REPOSITORY)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
