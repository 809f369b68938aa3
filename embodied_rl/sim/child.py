"""Life of a keeper's child (a manager's worker or a service's environment): set-up, simulators, requests, faults, end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from embodied_rl.distributed.channel import Channel, ChannelClosed, ChannelGarbled
from embodied_rl.distributed.processes import started
from embodied_rl.errors import UserError
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.faults import FaultKind, WrongShapeError
from embodied_rl.sim.slots import NonFiniteOutput

_KINDS: dict[type[Exception], FaultKind] = {NonFiniteOutput: FaultKind.NON_FINITE, WrongShapeError: FaultKind.WRONG_SHAPE}


def live(
    build: Callable[[dict[str, Any], list[SimEnv]], dict[str, Any]],
    serve: Callable[[Channel, dict[str, Any], list[SimEnv], dict[str, Any]], None],
    let_go: Callable[[Channel], None],
) -> None:
    """Read the set-up from the socket, build the simulators, serve, close them, and end this process.

    Args:
        build: appends the simulators of a set-up to the list, which are closed at the end, and returns facts for the other end.
        serve: answers, with those facts, until the other end lets go (ChannelClosed) or something fails.
        let_go: called in a thread when the other end lets go or dies; one second later this process ends, even in the middle of a step.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other end handles Ctrl-C
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=False)  # the signal asks a hanging process for its stack
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    threading.Thread(target=_watch, args=(int(sys.argv[2]), partial(let_go, channel)), daemon=True).start()
    setup, _, _ = channel.next_request()
    sys.path[:] = setup["sys_path"]
    sims: list[SimEnv] = []
    try:
        try:
            facts = build(setup, sims)
        except UserError as error:
            channel.answer({"kind": "user_error", "message": str(error)})
        except Exception as error:
            channel.answer(fault(error))
        else:
            started()
            serve(channel, setup, sims, facts)
    except ChannelClosed:
        pass
    except (ChannelGarbled, KeyError, TypeError, ValueError, OSError):
        channel.answer(_fault(FaultKind.GARBLED, traceback.format_exc()))
    finally:
        for sim in sims:
            with contextlib.suppress(Exception):
                sim.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # native libraries may hang in their exit handlers


def fault(error: Exception) -> dict[str, Any]:
    """Message about a simulator's exception, with the kind of fault; call it inside the `except` block."""
    if isinstance(error, ChannelGarbled):
        return _fault(FaultKind.GARBLED, f"On its own side there came {error}.")
    if (kind := _KINDS.get(type(error))) is not None:
        return _fault(kind, str(error))
    return _fault(FaultKind.OUT_OF_MEMORY if isinstance(error, MemoryError) else FaultKind.RAISED, traceback.format_exc())


def _fault(kind: FaultKind, detail: str) -> dict[str, Any]:
    return {"kind": "fault", "fault": kind.name, "detail": detail}


def _watch(life_fd: int, let_go: Callable[[], None]) -> None:
    if hasattr(signal, "pthread_sigmask"):  # only the main thread reports where it hangs
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    with contextlib.suppress(OSError):
        os.read(life_fd, 1)  # returns only when the other end is closed
    let_go()
    time.sleep(1.0)  # an idle process closes its simulators within this time
    os._exit(1)
