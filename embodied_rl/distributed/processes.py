"""Start modules of this package as separate processes: simulators, ranks, rollout workers and token processes alike."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import embodied_rl


class Output:
    """What a process prints, in a file without a name. The file can be cut while the process writes: what is written goes to its end."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the process
        fcntl.fcntl(self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) | os.O_APPEND)

    def size(self) -> int:
        """Number of bytes that are there."""
        return os.fstat(self.file.fileno()).st_size

    def read(self, start: int) -> bytes:
        """Output from byte `start` on, or from the first one if that is negative."""
        start = max(0, start)
        return os.pread(self.file.fileno(), max(0, self.size() - start), start)

    def cut(self, most: int, kept: int) -> None:
        """Drop all but the last `kept` bytes if there are more than `most`."""
        if (size := self.size()) > most:
            tail = self.read(size - kept)
            self.file.truncate(0)
            self.file.write(tail)


def start_module(
    module: str,
    *arguments: object,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Run ``python -m module arguments`` in a fresh interpreter, never a fork, which might inherit threads, locks and graphics contexts.

    The process finds this package even in a checkout that is not installed. It has its own process group, so Ctrl-C reaches only the
    parent; it ends when its connection to the parent closes. Its garbage collector is off until it calls `started`.

    Args:
        pass_fds: descriptors that stay open in it, with the same numbers.
        environment: variables that extend or replace the parent's.
        output: receives its output; None: it prints where the parent prints.

    Raises OSError: no process can be started.
    """
    variables = {**os.environ, **(environment or {})}
    path = [str(Path(embodied_rl.__file__).parents[1]), *filter(None, [variables.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-X", "embodied_rl_starts", "-m", module, *map(str, arguments)],
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**variables, "PYTHONPATH": os.pathsep.join(path)},
        process_group=0,
    )


def started() -> None:
    """Turn the garbage collector on, after a module from `start_module` has made its imports; imported objects are exempt from collection.

    Collections during imports free next to nothing and take a sixth of the import time (a quarter for transformers).
    """
    gc.freeze()
    gc.enable()


def end_process(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Wait for a process to end after its connection was closed; kill it (SIGKILL) if it does not end in time."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
