"""What each level of the sandbox stops, which levels this machine has, and the choice between them.

The table in docs/sandbox.md is `protection_table`, and `tests/sandbox` runs a program for each of its cells.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.sandbox.box import Level
from embodied_rl.sandbox.python import PythonLimits, run_program

LEVELS: tuple[Level, ...] = get_args(Level)
"""The strongest first."""
FIXES = {
    "namespaces": "let users make namespaces: sysctl user.max_user_namespaces=10000, "
    "on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; "
    "in a container: docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined …",
    "landlock": "a kernel from 5.13 with Landlock among its security modules (lsm=landlock,… at boot), on x86-64 or ARM64",
}
"""What brings a level."""


@dataclass(frozen=True)
class Attack:
    """One thing that a program may try."""

    name: str
    told: str
    """What the program does, for the documentation."""
    stopped: tuple[Level, ...]
    """The levels that stop it, without a network."""


_ALL, _KERNEL = LEVELS, LEVELS[:2]
ATTACKS = (
    Attack("home", "reads `~/.ssh` or another file of the user", _KERNEL),
    Attack("others", "reads other users' files", _KERNEL),
    Attack("environ", "reads `/proc/PARENT/environ`", _KERNEL),
    Attack("write", "writes outside its folder", _KERNEL),
    Attack("modes", "changes the mode of a file outside its folder", _KERNEL),
    Attack("connect", "connects to a port, loopback included", _KERNEL),
    Attack("unix", "connects to another program's Unix socket", _KERNEL),
    Attack("signal", "sends a signal to a process outside", _KERNEL),
    Attack("ptrace", "escapes into another process through `ptrace`", _KERNEL),
    Attack("namespace", "makes namespaces in which it is root", _KERNEL),
    Attack("forks", "runs 300 processes", _ALL),
    Attack("bomb", "forks without end", _ALL),
    Attack("memory", "holds 800 MB in eight processes, with a limit of 512", _ALL),
    Attack("unmapped", "holds memory in files without a name", _ALL),
    Attack("processor", "uses more processor time than it has, in several processes", _ALL),
    Attack("time", "does not end", _ALL),
    Attack("disk", "fills the disk with files in its folder", _ALL),
    Attack("deleted", "fills the disk with deleted files that it holds open", _ALL),
    Attack("outlive", "leaves a process behind, in its own session", _ALL),
    Attack("orphan", "goes on after our process was killed with SIGKILL", _ALL),
)


def protection_table() -> str:
    """Which attack each level stops, in Markdown."""
    rows = ["| A program that … | " + " | ".join(f"`{level}`" for level in LEVELS) + " |", "|---" * (len(LEVELS) + 1) + "|"]
    for attack in ATTACKS:
        cells = ["stopped" if level in attack.stopped else "**not stopped**" for level in LEVELS]
        rows.append(f"| {attack.told} | {' | '.join(cells)} |")
    return "\n".join(rows)


_PROBE = """
import json, os, socket
def can(what):
    try:
        what()
    except OSError:
        return False
    return True
folder, parent, port = {folder!r}, {parent}, {port}
print(json.dumps([name for name, what in dict(
    read=lambda: open(folder + "/secret").read(),
    write=lambda: open(folder + "/new", "w"),
    environ=lambda: open("/proc/%d/environ" % parent, "rb").read(),
    connect=lambda: socket.create_connection(("127.0.0.1", port), 5),
    signal=lambda: os.kill(parent, 0),
).items() if can(what)]))
open("own", "w").write("x")
print("done")
"""


@cache
def failure(level: Level) -> str:
    """Why a level does not hold here; empty: it does. Tried with a program the first time that it is asked."""
    if not sys.platform.startswith("linux"):
        return "the sandbox needs Linux"
    with tempfile.TemporaryDirectory(prefix="embodied-sandbox-") as folder, socket.create_server(("127.0.0.1", 0)) as server:
        Path(folder, "secret").write_text("x", encoding="ascii")
        os.chmod(folder, 0o777)  # it is the sandbox that is to hold, not the mode
        code = _PROBE.format(folder=folder, parent=os.getpid(), port=server.getsockname()[1])
        ended = run_program(code, PythonLimits(timeout_s=60.0), level)
    lines = ended.output.strip().splitlines()
    if ended.status != 0 or len(lines) < 2 or lines[-1] != "done":
        return ended.stopped or (lines[-1] if lines else f"status {ended.status}")
    return "" if level == "prlimit" or lines[-2] == "[]" else f"a program could {lines[-2]}"


def strongest() -> Level | None:
    """The first level that holds here; None: not even limits can be set."""
    return next((level for level in LEVELS if not failure(level)), None)


def protection(minimum: str, key: str) -> Level:
    """The strongest level of this machine.

    Args:
        minimum: the weakest that will do.
        key: the name of the setting that says so, for the message.

    Raises:
        UserError: `minimum` is no level, or the machine has only weaker ones.
    """
    if minimum not in LEVELS:
        raise UserError(f"{key}='{minimum}' is not a choice.{did_you_mean(str(minimum), LEVELS)}")
    found = strongest()
    if found is None:
        raise UserError(f"Programs cannot be run in a sandbox here: {failure('prlimit')}.")
    if LEVELS.index(found) > LEVELS.index(minimum):
        price = ", where programs see your files and the network" if found == "prlimit" else ""
        raise UserError(
            f"{key}={minimum}: this machine has only the sandbox '{found}' ({failure(LEVELS[LEVELS.index(found) - 1])[:120]}). "
            f"`python -m embodied_rl.doctor` says what brings more; or set {key}={found}{price}."
        )
    return found
