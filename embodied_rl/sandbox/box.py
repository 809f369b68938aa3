"""What a sandboxed program may see, reach and use, and the process that is started for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, TypedDict

from embodied_rl.sandbox import landlock

Level = Literal["namespaces", "landlock", "prlimit"]
"""What holds a program, the strongest first; `embodied_rl.sandbox.levels` compares them."""
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
        return Spec(
            level=self.level,
            network=self.network,
            ports=list(self.ports),
            landlock_abi=landlock.version() if self.landlock_abi is None else self.landlock_abi,
            readable=readable,
            shown=list(_SHOWN),
            writable=list(self.writable),
            devices=list(_DEVICES),
            temp=os.path.dirname(scratch),
            scratch=scratch,
            cwd=cwd if is_seen else scratch,
            memory_mb=self.memory_mb,
            address_mb=self.address_mb,
            processes=self.processes,
            open_files=self.open_files,
            cpu_s=self.cpu_s,
            timeout_s=self.timeout_s,
            scratch_mb=self.scratch_mb,
            parent=os.getpid(),
            report=report,
            words=list(words),
            code_bytes=code_bytes,
        )


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

        Raises:
            OSError: no process can be started.
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
