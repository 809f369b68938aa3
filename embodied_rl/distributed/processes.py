"""Starting a module of this package as a separate process, for simulators, ranks, rollout workers and token processes alike."""

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
    """``python -m module arguments``: a fresh interpreter, never a fork of ours, which may hold threads, locks and graphics contexts.

    It finds this package also where we run from a checkout that is not installed. It is in its own process group, so that Ctrl-C reaches
    only us; it ends when its connection to us closes. Its garbage collector is off until it calls `started`.

    Args:
        pass_fds: descriptors that stay open in it, under their numbers.
        environment: variables beside ours, or in place of ours.
        output: gets what it prints; None: printed where we print.

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
    """Called by what `start_module` runs, when it has imported what it needs: the garbage collector begins, and looks through none of it.

    Collecting while libraries are imported frees next to nothing, and takes a sixth of their time (of transformers', a quarter).
    """
    gc.freeze()
    gc.enable()


def end_process(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Wait for a process that is to end by itself, since its connection is closed; end it by SIGKILL where it does not in time."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
