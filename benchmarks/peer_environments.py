"""Virtual environments of peers, made where they are missing, in the user's cache folder.

Each peer has one of its own, in which its packages stand before those of the environment that asks: torch, MuJoCo and gymnasium
are the same on all sides, and nothing is installed beside ours. Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path


class MissingPeerError(RuntimeError):
    """A peer's packages cannot be installed here; the message says why."""


@dataclass(frozen=True)
class PeerEnvironment:
    """What a peer needs to run beside our packages."""

    name: str
    requirements: tuple[str, ...]
    """For pip."""
    without_dependencies: bool = False
    """Its pins are older than our packages: it is installed with what it lacks, and runs with ours."""
    cannot: str = ""
    """Why what the registry has of it cannot take part."""
    variables: tuple[tuple[str, str], ...] = ()
    """Of the environment that it is installed in."""

    @property
    def folder(self) -> Path:
        return (folder or cache_folder()) / self.name

    def python(self) -> Path:
        """Its interpreter; installs on the first call. Raises MissingPeerError where that fails."""
        if self.cannot:
            raise MissingPeerError(f"{self.name}: {self.cannot}")
        python, stamp = self.folder / "bin" / "python", self.folder / "installed"
        recipe = "\n".join((sys.prefix, sys.version, *self.requirements))
        if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == recipe:
            return python
        print(f"installing {self.name} into {self.folder}", file=sys.stderr, flush=True)
        _run(self.name, [sys.executable, "-m", "venv", "--clear", "--without-pip", str(self.folder)], {})
        ours = sysconfig.get_paths()["purelib"]
        own = self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (own / "ours.pth").write_text(f"{ours}\n", encoding="utf-8")
        options = ["--no-deps", "--no-build-isolation"] if self.without_dependencies else []
        _run(self.name, [str(python), "-m", "pip", "install", "--quiet", *options, *self.requirements], dict(self.variables))
        stamp.write_text(recipe, encoding="utf-8")
        return python


folder: Path | None = None
"""In which environments lie; None: the user's cache."""


def cache_folder() -> Path:
    """Where peers' environments lie: below ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "embodied_rl" / "peers"


def _run(name: str, command: list[str], variables: dict[str, str]) -> None:
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingPeerError(f"{name}: {reason_of(done.stdout + done.stderr)}")


def reason_of(output: str) -> str:
    """The line of pip's output that says what went wrong: the innermost Python error, else pip's own."""
    lines = [line.strip() for line in output.splitlines()]
    raised = [line for line in lines if line.split(":")[0].split(".")[-1].endswith(("Error", "error>")) or line.startswith("<urlopen")]
    told = [line for line in lines if line.startswith("ERROR:")]
    return next(iter([*raised[-1:], *told[:1], *lines[-1:]]), "pip said nothing")[:300]
