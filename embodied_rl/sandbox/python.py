"""Python programs that a model wrote, run to their end in a sandbox."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import IO

from embodied_rl.errors import UserError
from embodied_rl.sandbox.box import Box, Level, Sandboxed

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
        """Of a program with these limits."""
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
        level: what holds it (`embodied_rl.sandbox.levels.protection`).
        network: it may use ours; all else is held back as without.
        stdin: what it can read.
        separate: keep its error stream apart from its output.
    """
    return run_boxed(code, limits.box(level, network=network), limits.output_bytes, stdin=stdin, separate=separate)


def run_boxed(code: str, box: Box, output_bytes: int = 2**16, *, stdin: str = "", separate: bool = False) -> ProgramEnd:
    """`run_program` in a given box."""
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
        told = file.read().decode("utf-8", "replace")
    stopped = "" if told == "time" else told
    return ProgramEnd(returned if returned >= 0 else 128 - returned, output.text(), errors.text(), late or told == "time", stopped)


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
