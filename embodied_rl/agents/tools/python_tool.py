"""Python programs of an agent, in processes of their own.

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
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from embodied_rl.agents.tools.base import ToolError, argument, text_schema
from embodied_rl.errors import UserError

_NO_NAMESPACE = 97
"""Exit status of the runner where the kernel gives it no namespaces."""
_LAUNCH = """
import ctypes, os, resource, signal, sys
isolate, memory, cpu, size = (int(word) for word in sys.argv[1:5])
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
code = sys.stdin.buffer.read().decode("utf-8", "replace")
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


class PythonTool:
    """The tool ``python``: {code} to what it prints. Every call is a new interpreter in an empty folder."""

    name = "python"
    description = "Run a Python program and get what it prints. Nothing is kept between calls; there is no network."
    parameters = text_schema("code", "the program; print what you want to see")

    def __init__(self, limits: PythonLimits | None = None, *, allow_network: bool = False) -> None:
        """
        Args:
            allow_network: also run where the network cannot be cut off, and do not cut it off.

        Raises:
            UserError: this kernel gives no namespaces, so that the network cannot be cut off, and `allow_network` is False.
        """
        self._limits, self._isolate = limits or PythonLimits(), not allow_network
        if self._isolate and not can_isolate():
            raise UserError(
                "The python tool cannot cut programs off from the network here: the kernel gives no network namespace (containers often "
                "forbid it). Allow namespaces, or pass allow_network=True where that is no danger."
            )

    def run(self, arguments: Mapping[str, Any]) -> str:
        """See `Tool.run`. A program that fails is a ToolError with its output and traceback."""
        status, output, timed_out = run_program(argument(arguments, "code", str), self._limits, isolate=self._isolate)
        if timed_out:
            raise ToolError(f"the program did not end within {self._limits.timeout_s:g} s and was stopped\n{output}".rstrip())
        if status != 0:
            how = f"was killed by {signal.Signals(status - 128).name}" if status > 128 else f"ended with status {status}"
            raise ToolError(f"the program {how}\n{output}".rstrip())
        return output

    def close(self) -> None:
        """Nothing is held."""


@cache
def can_isolate() -> bool:
    """Whether this kernel lets us make the namespaces that keep a program from the network."""
    if not sys.platform.startswith("linux"):
        return False
    return run_program("", PythonLimits(), isolate=True)[0] == 0


def run_program(code: str, limits: PythonLimits, *, isolate: bool) -> tuple[int, str, bool]:
    """(exit status, what it printed on either stream, whether its time was over); 128 + n: killed by signal n."""
    words = [str(int(isolate)), str(limits.memory_mb * 2**20), str(int(limits.timeout_s) + 1), str(limits.file_mb * 2**20)]
    with tempfile.TemporaryDirectory(prefix="agent-python-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LAUNCH, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        output = _Output(process, limits.output_bytes)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(code.encode("utf-8", "surrogatepass"))
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        timed_out = False
        try:
            process.wait(limits.timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # also what a program that ended by itself left behind
        process.wait()
        return process.returncode if process.returncode >= 0 else 128 - process.returncode, output.text(), timed_out


class _Output:
    """The first bytes that a process prints; the rest is read and dropped, so that it never waits for a reader."""

    def __init__(self, process: subprocess.Popen[bytes], most: int) -> None:
        self._process, self._most, self._kept = process, most, bytearray()
        self._dropped = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):
            while part := os.read(stream.fileno(), 65536):
                room = self._most - len(self._kept)
                self._kept += part[:room]
                self._dropped += max(len(part) - room, 0)

    def text(self) -> str:
        self._thread.join(1.0)
        if not self._thread.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()
        more = f"\n… {self._dropped} bytes were thrown away" if self._dropped else ""
        return self._kept.decode("utf-8", "replace") + more
