"""Programs in a sandbox: their rights and limits, how Python code of a model runs, and what each level of protection stops.

`tests/sandbox` runs a program for each cell of the table in docs/sandbox.md.
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

from embodied_rl.errors import Limits, UserError, require_known
from embodied_rl.sandbox import landlock

Level = Literal["namespaces", "landlock", "prlimit"]
"""Levels of protection, the strongest first; `embodied_rl.sandbox.box` compares them."""
Network = Literal["none", "ports", "open"]
"""none: not even this machine. ports: TCP connections to the named ports. open: any."""

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
"""Files that are readable if the program shares our root; in namespaces the program gets its own."""
_DEVICES = ("/dev/null", "/dev/full")
_GRACE_S = 10.0


class Spec(TypedDict):
    """A `Box` in plain values for the launching process, which imports little."""

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
    """One program's rights. Paths are absolute; sizes are in 2**20 bytes; limits apply to the program and its descendants together."""

    level: Level
    network: Network = "none"
    ports: tuple[int, ...] = ()
    """TCP ports that it may connect to, with network=ports."""
    readable: tuple[str, ...] = ()
    """Readable files and folders, in addition to the system's and the interpreter's."""
    writable: tuple[str, ...] = ()
    """Writable files and folders, in addition to its scratch folder."""
    memory_mb: int = 512
    address_mb: int = 0
    """Address space of each process, which then has no memory beyond its mappings and named files; 0: unlimited."""
    processes: int = 64
    """Most processes and threads at a time."""
    open_files: int = 256
    """Most open files of each process."""
    cpu_s: float = 0.0
    """Seconds of processor time; 0: unlimited."""
    timeout_s: float = 0.0
    """Seconds until the program is ended; 0: unlimited."""
    scratch_mb: int = 64
    """Size of the files in its scratch folder."""
    landlock_abi: int | None = None
    """Landlock version whose restrictions are used; None: the kernel's."""

    def spec(self, scratch: str, cwd: str, words: Sequence[str], code_bytes: int, report: int) -> Spec:
        """Values for the launching process. `cwd`: replaced by `scratch` if the program could not see it."""
        network = _NETWORK if self.network != "none" else ()
        readable = [*_SYSTEM, *(f"/etc/{name}" for name in _ETC.split()), *network, *interpreter_folders(), *self.readable]
        is_seen = self.level == "prlimit" or any(is_below(cwd, path) for path in (*self.readable, *self.writable, scratch))
        mine = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        mine |= {"landlock_abi": landlock.version() if self.landlock_abi is None else self.landlock_abi, "readable": readable}
        places = {"temp": os.path.dirname(scratch), "scratch": scratch, "cwd": cwd if is_seen else scratch}
        about = {"parent": os.getpid(), "report": report, "words": list(words), "code_bytes": code_bytes}
        # A shared mapping of it is memory that no process's figures show.
        devices = [*_DEVICES, *([] if self.address_mb else ["/dev/zero"])]
        return cast(Spec, {**mine, "shown": list(_SHOWN), "devices": devices, **places, **about})


def interpreter_folders() -> list[str]:
    """Folders of this interpreter and its packages; never a folder that contains the user's home."""
    home = os.path.realpath(os.path.expanduser("~"))
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    found = {*folders, *map(os.path.realpath, folders)}
    return sorted(path for path in found if path != "/" and not is_below(home, path))


def is_below(path: str, folder: str) -> bool:
    """Whether `path` is a folder or in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


class Sandboxed:
    """A program running in a `Box`, and its scratch folder."""

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
        """Args:
        words: the command; empty: Python, whose source is the first `code_bytes` of its input.
        env: all its variables; HOME and TMPDIR become its scratch folder.
        cwd: working folder; None: its scratch folder.
        report: a descriptor for the sentence about an exceeded limit; None: its error stream.

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
        """End what still runs and delete the folder; returns the exit status, or minus the number of the signal that ended the program."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:  # the supervisor does not answer: its processes die with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        try:
            self._folder.cleanup()
        except RecursionError:  # folders in folders, a thousand deep
            subprocess.run(["rm", "-rf", "--", self._folder.name], check=False)
        return self.process.returncode


_READ_S = 30.0
"""Seconds to read a program's last output, on a busy machine."""
_LATE_S = 10.0
"""Seconds after the timeout from which the supervisor, which keeps the time, counts as lost."""


@dataclass(frozen=True)
class PythonLimits(Limits):
    """Limits of one program and its descendants. Raises UserError for a limit that is not above 0 and finite, or None."""

    timeout_s: float = 10.0
    """Seconds on the clock, and of processor time: on average it may use one core."""
    memory_mb: int = 512
    """Memory (2**20 bytes) of all its processes together, and address space of each."""
    scratch_mb: int = 16
    """Size of all files in its folder (2**20 bytes)."""
    processes: int = 64
    """Most processes and threads at a time."""
    output_bytes: int = 2**16
    """Most bytes of output; the rest is dropped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in vars(self).items():
            if value is None:  # what a model wrote always has limits
                raise UserError(f"{name} must be a finite number above 0, got null.")

    def box(self, level: Level, *, network: bool = False) -> Box:
        """Rights of a program. `network`: let it use our network; all other limits stay."""
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
    """Outcome of a program."""

    status: int
    """Exit status; 128 + n: killed by signal n."""
    output: str
    """Output, with the error stream unless that was kept separate."""
    errors: str
    """Output of the error stream if it was kept separate."""
    timed_out: bool
    stopped: str = ""
    """Sentence about another exceeded limit; empty: none."""


def run_program(code: str, box: Box, output_bytes: int = 2**16, *, stdin: str = "", separate: bool = False) -> ProgramEnd:
    """Run a program until it ends or its time is over.

    Args:
        output_bytes: most bytes of its output; the rest is dropped.
        separate: keep its error stream separate from its output.
    """
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
    readers = [_Output(stream, output_bytes) for stream in (process.stdout, process.stderr) if stream is not None]
    # In parallel: a program that reads nothing would delay us beyond its timeout.
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
    texts = [reader.text() for reader in readers]
    errors = texts[1] if separate else ""
    return ProgramEnd(returned if returned >= 0 else 128 - returned, texts[0], errors, late or ended_by == "time", stopped)


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(data)
    with contextlib.suppress(OSError):
        process.stdin.close()


class _Output:
    """The first bytes of a process's output; the rest is read and dropped, so that it never waits for a reader."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._most, self._kept = stream, most, bytearray()
        self._dropped = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while part := os.read(self._stream.fileno(), 65536):
                room = self._most - len(self._kept)
                self._kept += part[:room]
                self._dropped += max(len(part) - room, 0)

    def text(self) -> str:
        self._thread.join(1.0)
        # On a busy machine the reader may not have run yet. (A process that outlives the program may keep an empty pipe open.)
        until = time.monotonic() + _READ_S
        while self._thread.is_alive() and self._has_more() and time.monotonic() < until:
            self._thread.join(0.05)
        if not self._thread.is_alive():
            self._stream.close()
        more = f"\n… {self._dropped} bytes were thrown away" if self._dropped else ""
        return self._kept.decode("utf-8", "replace") + more

    def _has_more(self) -> bool:
        """Whether the pipe has data or has ended."""
        poll = select.poll()
        poll.register(self._stream.fileno(), select.POLLIN)
        return bool(poll.poll(0))


LEVELS: tuple[Level, ...] = get_args(Level)
"""All levels, the strongest first."""
FIXES = {
    "namespaces": "let users make namespaces: sysctl user.max_user_namespaces=10000, "
    "on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; "
    "in a container: docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined …",
    "landlock": "a kernel from 5.13 with Landlock among its security modules (lsm=landlock,… at boot), on x86-64 or ARM64",
}
"""How to make a level available."""


NUM_ATTACKS = 23
STOPPED: dict[Level, int] = {"namespaces": 23, "landlock": 23, "prlimit": 12}
"""{level: attacks that it stops, of the `NUM_ATTACKS` in docs/sandbox.md}; `tests/sandbox` runs a program for each."""


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
    """Reason why a level is not available here; empty: it is. The first call tries it with a program."""
    if not sys.platform.startswith("linux"):
        return "the sandbox needs Linux"
    with tempfile.TemporaryDirectory(prefix="embodied-sandbox-") as folder, socket.create_server(("127.0.0.1", 0)) as server:
        Path(folder, "secret").write_text("x", encoding="ascii")
        os.chmod(folder, 0o777)  # the sandbox must protect the folder, not its mode
        code = _PROBE.format(folder=folder, parent=os.getpid(), port=server.getsockname()[1])
        ended = run_program(code, PythonLimits(timeout_s=60.0).box(level))
    lines = ended.output.strip().splitlines()
    if ended.status != 0 or len(lines) < 2 or lines[-1] != "done":
        return ended.stopped or (lines[-1] if lines else f"status {ended.status}")
    return "" if level == "prlimit" or lines[-2] == "[]" else f"a program could {lines[-2]}"


def strongest() -> Level | None:
    """Strongest level that is available here; None: not even limits can be set."""
    return next((level for level in LEVELS if not failure(level)), None)


def protection(minimum: str, key: str) -> Level:
    """The strongest level of this machine.

    Args:
        minimum: the weakest acceptable level.
        key: name of the setting with `minimum`, for the message.

    Raises UserError: `minimum` is not a level, or the machine has only weaker ones.
    """
    require_known(minimum, LEVELS, f"{key}='{minimum}' is not a choice.")
    found = strongest()
    if found is None:
        raise UserError(f"Programs cannot be run in a sandbox here: {failure('prlimit')}.")
    if LEVELS.index(found) > LEVELS.index(minimum):
        price = ", where programs see your files and the network" if found == "prlimit" else ""
        raise UserError(
            f"{key}={minimum}: this machine has only the sandbox '{found}' ({failure(LEVELS[LEVELS.index(found) - 1])[:120]}). `python -m "
            f"embodied_rl.doctor` shows how to get a stronger one; or set {key}={found}{price}."
        )
    return found
