"""Python programs that somebody else wrote, in processes of their own.

What is held back, on Linux, by the kernel:

- time: the program and everything it started is killed after `timeout_s`; `RLIMIT_CPU` besides.
- memory: `RLIMIT_AS` for each process; files it writes: `RLIMIT_FSIZE`; core dumps: none.
- network: a network namespace of its own without any interface, so that no address can be reached, loopback included.
- processes: a process namespace of its own; when the program ends, whatever it started ends.

What is not: the program runs as our user and may read what that user may read, and write where it may write (it starts in an empty folder
that is deleted). Pathname Unix sockets can be reached. The number of processes is not limited. For programs that are hostile and not only
wrong, run the whole of this in a container.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import IO

from embodied_rl.errors import UserError

_READ_S = 30.0
"""For what a program has printed before it ended to be read, on a busy machine."""
_NO_NAMESPACE = 97
"""Exit status of the runner where the kernel gives it no namespaces."""
_LAUNCH = """
import ctypes, os, resource, signal, sys
isolate, memory, cpu, size, length = (int(word) for word in sys.argv[1:6])
libc = ctypes.CDLL(None, use_errno=True)
if isolate:
    pids, net, user = 0x20000000, 0x40000000, 0x10000000
    if libc.unshare(user | net | pids) and libc.unshare(net | pids):
        os._exit(NO_NAMESPACE)
for _ in range(2):
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
    libc.prctl(1, signal.SIGKILL)
for name, limit in (("AS", memory), ("CPU", cpu), ("FSIZE", size), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
code = b""
while len(code) < length and (part := os.read(0, length - len(code))):  # not a byte more: the rest is the program's own input
    code += part
code = code.decode("utf-8", "replace")
sys.argv[:] = ["program.py"]
exec(compile(code, "program.py", "exec"), {"__name__": "__main__"})
""".replace("NO_NAMESPACE", str(_NO_NAMESPACE))
"""Runs before the program: namespaces; a child, which is the first process of its namespace, and whose end ends all others; its child,
which is the program (a first process would not hear its own signals); limits."""


@dataclass(frozen=True)
class PythonLimits:
    """What one program may use. Raises UserError for a limit that is not above 0."""

    timeout_s: float = 10.0
    memory_mb: int = 512
    """Address space (2**20 bytes) of each process."""
    file_mb: int = 16
    """Of one file."""
    output_bytes: int = 2**16
    """What a program prints beyond is thrown away."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise UserError(f"{name} must be > 0, got {value}.")


@cache
def can_isolate() -> bool:
    """Whether this kernel lets us make the namespaces that keep a program from the network."""
    if not sys.platform.startswith("linux"):
        return False
    return run_program("", PythonLimits(), isolate=True).status == 0


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


def run_program(code: str, limits: PythonLimits, *, isolate: bool, stdin: str = "", separate: bool = False) -> ProgramEnd:
    """Run a program to its end, or to the end of its time.

    Args:
        isolate: without network, in namespaces of its own (`can_isolate`).
        stdin: what it can read.
        separate: keep its error stream apart from its output.
    """
    source = code.encode("utf-8", "surrogatepass")
    limits_of = (int(isolate), limits.memory_mb * 2**20, int(limits.timeout_s) + 1, limits.file_mb * 2**20, len(source))
    words = [str(number) for number in limits_of]
    with tempfile.TemporaryDirectory(prefix="agent-python-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LAUNCH, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if separate else subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        output, errors = _Output(process.stdout, limits.output_bytes), _Output(process.stderr, limits.output_bytes)
        # Beside: a program that reads nothing would hold us up beyond its time.
        writer = threading.Thread(target=_write, args=(process, source + stdin.encode("utf-8", "surrogatepass")), daemon=True)
        writer.start()
        timed_out = False
        try:
            process.wait(limits.timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # also what a program that ended by itself left behind
        process.wait()
        writer.join(1.0)
        status = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return ProgramEnd(status, output.text(), errors.text(), timed_out)


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
