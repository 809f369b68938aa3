"""Programs in a sandbox: what they may see, reach and use, Python that a model wrote, and what each level stops.

The table in docs/sandbox.md is `protection_table`, and `tests/sandbox` runs a program for each of its cells.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal, TypedDict, cast, get_args

from embodied_rl.errors import UserError, require_known
from embodied_rl.sandbox import landlock

Level = Literal["namespaces", "landlock", "prlimit"]
"""What holds a program, the strongest first; `embodied_rl.sandbox.box` compares them."""
Network = Literal["none", "ports", "open"]
"""none: not even this machine. ports: TCP connections to the ports that are named. open: any."""

_ROOT = str(Path(__file__).resolve().parents[2])
_LAUNCH = (
    "import sys; sys.path.insert(0, {root!r}); from embodied_rl.sandbox.launch import main; "
    "exec(compile(main({spec!r}), 'program.py', 'exec'), {{'__name__': '__main__'}})"
)
_ETC = (
    "ld.so.cache ld.so.conf ld.so.conf.d localtime alternatives ssl/certs ssl/openssl.cnf "
    "ca-certificates pki/tls/certs pki/ca-trust mime.types"
)
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/nix/store", "/sys/devices/system/cpu")
_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/host.conf", "/etc/services", "/etc/protocols")
_SHOWN = ("/dev/random", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/version", "/etc/passwd", "/etc/group")
"""Readable where the program shares our root; in namespaces the program gets its own."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
_GRACE_S = 10.0


class Spec(TypedDict):
    """A `Box` as the launching process takes it, which imports little: plain values."""

    level: Level
    network: Network
    ports: list[int]
    landlock_abi: int
    readable: list[str]
    shown: list[str]
    writable: list[str]
    devices: list[str]
    temp: str
    scratch: str
    cwd: str
    memory_mb: int
    address_mb: int
    processes: int
    open_files: int
    cpu_s: float
    timeout_s: float
    scratch_mb: int
    parent: int
    report: int
    words: list[str]
    code_bytes: int


@dataclass(frozen=True)
class Box:
    """One program's rights. Paths are absolute; sizes are in 2**20 bytes; limits are of the program and all that it starts together."""

    level: Level
    network: Network = "none"
    ports: tuple[int, ...] = ()
    """TCP ports that may be connected to, with network=ports."""
    readable: tuple[str, ...] = ()
    """Files and folders, beside the system's and the interpreter's."""
    writable: tuple[str, ...] = ()
    """Beside its scratch folder."""
    memory_mb: int = 512
    address_mb: int = 0
    """Address space of each process; 0: no limit."""
    processes: int = 64
    """Processes and threads at a time."""
    open_files: int = 256
    """Of each process."""
    cpu_s: float = 0.0
    """Processor time; 0: no limit."""
    timeout_s: float = 0.0
    """0: until it is ended."""
    scratch_mb: int = 64
    """Files in its scratch folder."""
    landlock_abi: int | None = None
    """Which version's restrictions are asked of Landlock; None: what the kernel has."""

    def spec(self, scratch: str, cwd: str, words: Sequence[str], code_bytes: int, report: int) -> Spec:
        """For the launching process. `cwd`: replaced by `scratch` where the program could not see it."""
        network = _NETWORK if self.network != "none" else ()
        readable = [*_SYSTEM, *(f"/etc/{name}" for name in _ETC.split()), *network, *interpreter_folders(), *self.readable]
        is_seen = self.level == "prlimit" or any(is_below(cwd, path) for path in (*self.readable, *self.writable, scratch))
        mine = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        mine |= {"landlock_abi": landlock.version() if self.landlock_abi is None else self.landlock_abi, "readable": readable}
        places = {"temp": os.path.dirname(scratch), "scratch": scratch, "cwd": cwd if is_seen else scratch}
        about = {"parent": os.getpid(), "report": report, "words": list(words), "code_bytes": code_bytes}
        return cast(Spec, {**mine, "shown": list(_SHOWN), "devices": list(_DEVICES), **places, **about})


def interpreter_folders() -> list[str]:
    """Where this interpreter and its packages are; never a folder that holds the user's home."""
    home = os.path.realpath(os.path.expanduser("~"))
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    found = {*folders, *map(os.path.realpath, folders)}
    return sorted(path for path in found if path != "/" and not is_below(home, path))


def is_below(path: str, folder: str) -> bool:
    """Whether `path` is a folder or in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


class Sandboxed:
    """A program that was started in a `Box`, and its scratch folder."""

    def __init__(
        self,
        box: Box,
        *,
        words: Sequence[str] = (),
        code_bytes: int = 0,
        env: Mapping[str, str],
        cwd: str | None = None,
        stdin: int | IO[bytes],
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        report: int | None = None,
    ) -> None:
        """
        Args:
            words: the command; none: Python, whose source is the first `code_bytes` of its input.
            env: all its variables; HOME and TMPDIR become its scratch folder.
            cwd: where it begins; None: in its scratch folder.
            report: a descriptor for the limit that it passed; None: its error stream.

        Raises OSError: no process can be started.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True)
        scratch = os.path.realpath(self._folder.name)
        spec = box.spec(scratch, cwd or scratch, words, code_bytes, 2 if report is None else report)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _LAUNCH.format(root=_ROOT, spec=dict(spec))],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env={**env, "HOME": scratch, "TMPDIR": scratch},
                pass_fds=() if report is None else (report,),
                start_new_session=True,
            )
        except BaseException:
            self._folder.cleanup()
            raise

    def end(self) -> int:
        """End whatever still runs of it and delete its folder: its exit status, minus the signal's number where one ended it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:  # the supervisor does not answer: what it started dies with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._folder.cleanup()
        return self.process.returncode


_READ_S = 30.0
"""For what a program has printed before it ended to be read, on a busy machine."""
_LATE_S = 10.0
"""The supervisor keeps the time; this much later it is taken for lost."""


@dataclass(frozen=True)
class PythonLimits:
    """What one program, with all that it starts, may use. Raises UserError for a limit that is not above 0."""

    timeout_s: float = 10.0
    """Also of processor time: on average it may use one core."""
    memory_mb: int = 512
    """Memory (2**20 bytes) of all its processes together, and address space of each."""
    scratch_mb: int = 16
    """Files in its folder, all together (2**20 bytes)."""
    processes: int = 64
    """Processes and threads at a time."""
    output_bytes: int = 2**16
    """What a program prints beyond is thrown away."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UserError(f"{name} must be > 0, got {value}.")

    def box(self, level: Level, *, network: bool) -> Box:
        return Box(
            level,
            "open" if network else "none",
            memory_mb=self.memory_mb,
            address_mb=self.memory_mb,
            processes=self.processes,
            cpu_s=self.timeout_s + 1.0,
            timeout_s=self.timeout_s,
            scratch_mb=self.scratch_mb,
        )


@dataclass(frozen=True)
class ProgramEnd:
    """What became of a program."""

    status: int
    """Exit status; 128 + n: killed by signal n."""
    output: str
    """What it printed, on either stream where they were not kept apart."""
    errors: str
    """What it printed on its error stream, where that was kept apart."""
    timed_out: bool
    stopped: str = ""
    """Which other limit it passed, as a sentence; empty: none."""


def run_program(
    code: str, limits: PythonLimits, level: Level, *, network: bool = False, stdin: str = "", separate: bool = False
) -> ProgramEnd:
    """Run a program to its end, or to the end of its time.

    Args:
        level: what holds it (`embodied_rl.sandbox.box.protection`).
        network: it may use ours; all else is held back as without.
        separate: keep its error stream apart from its output.
    """
    return run_boxed(code, limits.box(level, network=network), limits.output_bytes, stdin=stdin, separate=separate)


def run_boxed(code: str, box: Box, output_bytes: int = 2**16, *, stdin: str = "", separate: bool = False) -> ProgramEnd:
    source = code.encode("utf-8", "surrogatepass")
    reason, report = os.pipe()
    try:
        started = Sandboxed(
            box,
            code_bytes=len(source),
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if separate else subprocess.STDOUT,
            report=report,
        )
    except BaseException:
        os.close(reason)
        raise
    finally:
        os.close(report)
    process = started.process
    output, errors = _Output(process.stdout, output_bytes), _Output(process.stderr, output_bytes)
    # Beside: a program that reads nothing would hold us up beyond its time.
    writer = threading.Thread(target=_write, args=(process, source + stdin.encode("utf-8", "surrogatepass")), daemon=True)
    writer.start()
    late = False
    try:
        process.wait(box.timeout_s + _LATE_S if box.timeout_s else None)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        returned = started.end()
    writer.join(1.0)
    with os.fdopen(reason, "rb") as file:
        ended_by = file.read().decode("utf-8", "replace")
    stopped = "" if ended_by == "time" else ended_by
    return ProgramEnd(returned if returned >= 0 else 128 - returned, output.text(), errors.text(), late or ended_by == "time", stopped)


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(data)
    with contextlib.suppress(OSError):
        process.stdin.close()


class _Output:
    """The first bytes that a process prints; the rest is read and dropped, so that it never waits for a reader."""

    def __init__(self, stream: IO[bytes] | None, most: int) -> None:
        """`stream` None: there is nothing to read."""
        self._stream, self._most, self._kept = stream, most, bytearray()
        self._dropped = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        if self._stream is None:
            return
        with contextlib.suppress(OSError, ValueError):
            while part := os.read(self._stream.fileno(), 65536):
                room = self._most - len(self._kept)
                self._kept += part[:room]
                self._dropped += max(len(part) - room, 0)

    def text(self) -> str:
        self._thread.join(1.0)
        # On a busy machine the reader may not have had its turn. (A process that outlived the program may hold an empty pipe open.)
        until = time.monotonic() + _READ_S
        while self._thread.is_alive() and self._has_more() and time.monotonic() < until:
            self._thread.join(0.05)
        if not self._thread.is_alive() and self._stream is not None:
            self._stream.close()
        more = f"\n… {self._dropped} bytes were thrown away" if self._dropped else ""
        return self._kept.decode("utf-8", "replace") + more

    def _has_more(self) -> bool:
        """Whether there is something in the pipe, or its end."""
        assert self._stream is not None, "a reader of nothing ends at once"
        poll = select.poll()
        poll.register(self._stream.fileno(), select.POLLIN)
        return bool(poll.poll(0))


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
    label: str
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
        rows.append(f"| {attack.label} | {' | '.join(cells)} |")
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

    Raises UserError: `minimum` is no level, or the machine has only weaker ones.
    """
    require_known(minimum, LEVELS, f"{key}='{minimum}' is not a choice.")
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
