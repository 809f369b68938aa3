"""The simulator process; only `embodied_rl.sim.keeper` calls `main`, with SOCKET LIFE.

It steps the marked slots when the manager rings, answers rare requests over its socket, never imports torch, and ends with the manager.
"""

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
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from embodied_rl.distributed.channel import Channel, ChannelClosed, ChannelGarbled
from embodied_rl.distributed.processes import started
from embodied_rl.errors import UserError
from embodied_rl.sim.affinity import apply_placement, limit_threads
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultKind, WrongShapeError
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.slots import NonFiniteOutput, SlotRunner
from embodied_rl.sim.snapshots import decode_state, encode_state
from embodied_rl.sim.transport import PENDING, Doorbell, Slab

# ---- life of a keeper's child (a manager's worker or a service's environment): set-up, simulators, requests, faults, end ----


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
    """Message about a simulator's exception: a user's error, or the kind of fault; call it inside the `except` block."""
    if isinstance(error, UserError):
        return {"kind": "user_error", "message": str(error)}
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


# ---- the worker -----------------------------------------------------------------------------------------------------


_NEVER = float("inf")


class Worker:
    """Steps slots and answers requests until the manager lets go."""

    def __init__(self, channel: Channel, runners: list[SlotRunner], slab: Slab, released: threading.Event, *, spins: bool) -> None:
        self.channel, self.runners, self._released = channel, runners, released
        self.current = runners[0]
        """Runner whose simulator was called last."""
        arrays, index = slab.arrays, runners[0].index
        self._control_pending = arrays["control_pending"][index, :1].data.cast("B").cast("I")
        self._states = [runner.state_bytes for runner in runners]
        self.failed = arrays["failed"][index]
        self.doorbell = Doorbell(arrays["worker_doorbell"][index, :1], arrays["worker_waiting"][index, :1], spins=spins)
        self.manager_doorbell = Doorbell(arrays["manager_doorbell"], arrays["manager_waiting"])
        self._parent = os.getppid()

    def run(self) -> None:
        """Serve until the manager lets go (ChannelClosed). The simulator's exceptions pass through unchanged."""
        while True:
            self.doorbell.wait(self._has_work, _NEVER, self._check_parent)
            if self._control_pending[0]:
                self._control_pending[0] = 0
                self._control()
            for runner in self.runners:
                self.current = runner
                if runner.step_pending():
                    self.manager_doorbell.ring()

    def _has_work(self) -> bool:
        if self._control_pending[0]:
            return True
        for state in self._states:  # noqa: SIM110  # a generator would cost more than the loop
            if PENDING in state.tobytes():
                return True
        return False

    def _of(self, slot: int) -> SlotRunner:
        self.current = next(runner for runner in self.runners if runner.start <= slot < runner.stop)
        return self.current

    def _check_parent(self) -> None:
        if self._released.is_set() or os.getppid() != self._parent:
            raise ChannelClosed("the manager let go of this worker")

    def report(self, error: Exception) -> None:
        """Tell the manager what ends this worker, and which slots were being stepped; call it inside the `except` block."""
        rows = error.rows if isinstance(error, NonFiniteOutput) else self.current.stepping()
        where = {} if isinstance(error, UserError | ChannelGarbled) else self.current.where(rows)
        # Set before the message, because the manager reads a message that exceeds the socket's buffer only once this is set.
        self.failed[0] = 1
        self.manager_doorbell.ring()
        self.channel.answer({**fault(error), **where})

    def _control(self) -> None:
        message, payload, _ = self.channel.next_request()
        try:
            self._answer(message, payload)
        except UserError as error:  # this request is impossible (no pictures, say); stepping can continue
            self.channel.answer(fault(error))

    def _answer(self, message: dict[str, Any], payload: bytes) -> None:
        operation = message.get("operation")
        if operation == "reset":
            for runner in self.runners:
                self.current = runner
                runner.reset_all(EpisodeSeeds.from_dict(message["seeds"]), message["seed_round"], message["reconfigure"])
            self.channel.answer({"kind": "done"})
        elif operation in ("render", "snapshot"):
            read = SlotRunner.render if operation == "render" else SlotRunner.snapshot
            values = [read(self._of(slot), slot - self.current.start) for slot in message["slots"]]
            self.channel.answer({"kind": "done", "slots": message["slots"]}, encode_state(values))
        elif operation == "resume":
            self.channel.answer({"kind": "done", "drift": self.resume(payload)})
        else:
            raise ChannelGarbled(f"a request for {operation!r:.40}")

    def resume(self, payload: bytes) -> dict[str, float | None]:
        """Resume episodes; returns {slot: see `SlotRunner.resume`}."""
        drift: dict[str, float | None] = {}
        for item in decode_state(payload):
            runner = self._of(int(item["slot"]))
            runner.mark_stepping(int(item["slot"]) - runner.start)
            drift[str(item["slot"])] = runner.resume(item)
        self.current.mark_stepping(None)
        return drift


# ---- process --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _own_warnings() -> Iterator[list[str]]:
    """Collect this package's warnings; the manager passes them on, because this process's output is read after a fault only."""
    said: list[str] = []
    show, package = warnings.showwarning, Path(__file__).parents[1]

    def keep(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **named: Any) -> None:
        if category is UserWarning and Path(filename).is_relative_to(package):
            said.append(str(message))
        else:
            show(message, category, filename, *rest, **named)

    warnings.showwarning = keep
    try:
        yield said
    finally:
        warnings.showwarning = show


def _build(setup: dict[str, Any], sims: list[SimEnv]) -> dict[str, Any]:
    applied = apply_placement(*placement) if (placement := setup["placement"]) else {}  # before the simulator is imported
    # One simulator per run of slots, because the runs of different groups are stepped separately.
    with _own_warnings() as said:
        sims.extend(SimFactory(**setup["factory"]).make(num_envs) for num_envs in setup["num_envs"])
    limit_threads(1)  # for pools that ignore the environment variables
    return {"placement": applied, "warnings": said}


def _serve(released: threading.Event, channel: Channel, setup: dict[str, Any], sims: list[SimEnv], facts: dict[str, Any]) -> None:
    channel.answer({"kind": "done", "spec": sims[0].spec.to_dict(), **facts})
    assignment, payload, (fd,) = channel.next_request(num_fds=1)  # a spare waits here until it is needed
    slab = Slab(assignment["layout"], fd)
    if placement := assignment["placement"]:
        apply_placement(*placement)
    runners = [SlotRunner(sim, slab, assignment, start, stop) for sim, (start, stop) in zip(sims, assignment["runs"], strict=True)]
    worker = Worker(channel, runners, slab, released, spins=assignment["spins"])
    try:
        channel.answer({"kind": "done", "drift": worker.resume(payload) if payload else {}})
        del payload  # saved episodes may be large
        worker.run()
    except ChannelClosed:
        return
    except Exception as error:
        worker.report(error)


def main() -> None:
    """Read the set-up from the socket, move to the planned cores, build the simulator, serve, close."""
    released = threading.Event()
    live(_build, partial(_serve, released), lambda channel: released.set())
