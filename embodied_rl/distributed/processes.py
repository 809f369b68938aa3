"""Start modules of this package as separate processes: simulators, ranks, rollout workers and token processes alike."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import embodied_rl


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
