"""The simulator process: `main` is called by `embodied_rl.sim.keeper` with SOCKET LIFE, and by nothing else.

It steps the slots that the manager marked and rings, answers rare requests over its socket, never imports torch by itself,
and ends when the manager does.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from embodied_rl.distributed.channel import Channel, ChannelClosed, ChannelGarbled
from embodied_rl.distributed.processes import started
from embodied_rl.errors import UserError
from embodied_rl.sim.affinity import Placement, apply_placement, limit_threads
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultKind, WrongShapeError
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.slots import NonFiniteOutput, SlotRunner
from embodied_rl.sim.snapshots import decode_state, encode_state
from embodied_rl.sim.transport import PENDING, Doorbell, Layout, Slab, memory_of

_NEVER = float("inf")


class Worker:
    """The loop of the process: steps and requests, until the manager lets go."""

    def __init__(
        self, channel: Channel, runners: list[SlotRunner], slab: Slab, released: threading.Event, *, awaits_resume: bool, spins: bool
    ) -> None:
        self.channel, self.runners, self._released, self._awaits_resume = channel, runners, released, awaits_resume
        self.current = runners[0]
        """Whose simulator was called last."""
        arrays, index = slab.arrays, runners[0].index
        self._control_pending = memory_of(arrays["control_pending"][index, :1]).cast("B").cast("I")
        self._states = [runner.state_bytes for runner in runners]
        self.failed = arrays["failed"][index]
        self.doorbell = Doorbell(arrays["worker_doorbell"][index, :1], arrays["worker_waiting"][index, :1], spins=spins)
        self.manager_doorbell = Doorbell(arrays["manager_doorbell"], arrays["manager_waiting"])
        self._parent = os.getppid()

    def run(self) -> None:
        """Serve until the manager lets go (ChannelClosed). What the simulator raises goes up as it is."""
        while True:
            self.doorbell.wait(self._has_work, _NEVER, self._check_parent)
            if self._control_pending[0]:
                self._control_pending[0] = 0
                self._control()
            if not self._awaits_resume:
                for runner in self.runners:
                    self.current = runner
                    if runner.step_pending():
                        self.manager_doorbell.ring()

    def _has_work(self) -> bool:
        if self._control_pending[0]:
            return True
        if not self._awaits_resume:
            for state in self._states:  # a generator would cost more than the look
                if PENDING in state.tobytes():
                    return True
        return False

    def _of(self, slot: int) -> SlotRunner:
        """The runner of a slot."""
        self.current = next(runner for runner in self.runners if runner.start <= slot < runner.stop)
        return self.current

    def _check_parent(self) -> None:
        if self._released.is_set() or os.getppid() != self._parent:
            raise ChannelClosed("the manager let go of this worker")

    def stepping(self) -> dict[str, Any]:
        """Where the simulator was that raised, for a fault report."""
        return self.current.where(self.current.stepping())

    def _control(self) -> None:
        message, payload, _ = self.channel.next_request()
        try:
            self._answer(message, payload)
        except UserError as error:  # what was asked cannot be done here (no pictures, say); stepping can go on
            self.channel.answer({"kind": "user_error", "message": str(error)})

    def _answer(self, message: dict[str, Any], payload: bytes) -> None:
        operation = message.get("operation")
        if operation == "reset":
            for runner in self.runners:
                self.current = runner
                runner.reset_all(EpisodeSeeds.from_dict(message["seeds"]), message["seed_round"], message["reconfigure"])
            self.channel.answer({"kind": "done"})
        elif operation == "render":
            runner = self._of(message["slot"])
            frame = np.ascontiguousarray(runner.sim.render(message["slot"] - runner.start), np.uint8)
            self.channel.answer({"kind": "done", "shape": frame.shape}, frame.tobytes())
        elif operation == "snapshot":
            states = [self._of(slot).snapshot(slot - self.current.start) for slot in message["slots"]]
            self.channel.answer({"kind": "done"}, encode_state(states))
        elif operation == "resume":
            drift: dict[str, float | None] = {}
            for item in decode_state(payload):
                runner = self._of(int(item["slot"]))
                runner.mark_stepping(int(item["slot"]) - runner.start)
                drift[str(item["slot"])] = runner.resume(item)
            self.current.mark_stepping(None)
            self._awaits_resume = False
            self.channel.answer({"kind": "done", "drift": drift})
        else:
            raise ChannelGarbled(f"a request for {operation!r:.40}")


# ---- process --------------------------------------------------------------------------------------------------------


def _live_with_manager(life_fd: int, released: threading.Event) -> None:
    """Set `released` when the manager lets go or dies, and end this process a second later, even in the middle of a step."""

    def watch() -> None:
        if hasattr(signal, "pthread_sigmask"):  # only the main thread is to report where it hangs
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        with contextlib.suppress(OSError):
            os.read(life_fd, 1)  # returns only when the manager's end is closed
        released.set()
        time.sleep(1.0)  # an idle worker closes its simulator within this time
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _take_place(placement: dict[str, Any] | None) -> dict[str, Any]:
    """Go to the planned cores and memory nodes, before the simulator is imported; returns what really holds."""
    if placement is None:
        return {}
    return apply_placement(Placement.from_dict(placement)).to_dict()


@contextlib.contextmanager
def _own_warnings() -> Iterator[list[str]]:
    """What this package warns of in the block: the manager passes it on, for this process's output is read after a fault only."""
    said: list[str] = []
    show, package = warnings.showwarning, Path(__file__).parents[1]

    def keep(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
    ) -> None:
        if category is UserWarning and Path(filename).is_relative_to(package):
            said.append(str(message))
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = keep
    try:
        yield said
    finally:
        warnings.showwarning = show


def _serve(channel: Channel, sims: list[SimEnv], told: dict[str, Any], released: threading.Event) -> None:
    channel.answer({"kind": "done", "spec": sims[0].spec.to_dict(), **told})
    message, _, (fd,) = channel.next_request(num_fds=1)  # a spare waits here until it is needed
    fields = {name: (offset, tuple(shape), dtype) for name, (offset, shape, dtype) in message["fields"].items()}
    slab, assignment = Slab(Layout(fields, message["num_bytes"]), fd), message["assignment"]
    _take_place(assignment["placement"])
    runners = [SlotRunner(sim, slab, assignment, start, stop) for sim, (start, stop) in zip(sims, assignment["runs"], strict=True)]
    worker = Worker(channel, runners, slab, released, awaits_resume=assignment["awaits_resume"], spins=assignment["spins"])
    channel.answer({"kind": "done"})
    try:
        worker.run()
    except ChannelClosed:
        return
    except ChannelGarbled as error:
        _report(channel, worker, _fault(FaultKind.GARBLED, f"On its own side there came {error}.", {}))
    except UserError as error:
        _report(channel, worker, {"kind": "user_error", "message": str(error)})
    except NonFiniteOutput as error:
        _report(channel, worker, _fault(FaultKind.NON_FINITE, str(error), worker.current.where(error.rows)))
    except WrongShapeError as error:
        _report(channel, worker, _fault(FaultKind.WRONG_SHAPE, str(error), worker.stepping()))
    except MemoryError:
        _report(channel, worker, _fault(FaultKind.OUT_OF_MEMORY, traceback.format_exc(), worker.stepping()))
    except Exception:
        _report(channel, worker, _fault(FaultKind.RAISED, traceback.format_exc(), worker.stepping()))


def _fault(kind: FaultKind, detail: str, where: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "fault", "fault": kind.name, "detail": detail, **where}


def _report(channel: Channel, worker: Worker, message: dict[str, Any]) -> None:
    channel.answer(message)
    worker.failed[0] = 1
    worker.manager_doorbell.ring()


def main() -> None:
    """Take the set-up from the socket, go where it says, build the simulator, serve, close."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the manager's affair
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=False)  # the manager asks a hanging worker where it is
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    released = threading.Event()
    _live_with_manager(int(sys.argv[2]), released)
    setup, _, _ = channel.next_request()
    sys.path[:] = setup["sys_path"]
    sims: list[SimEnv] = []
    try:
        try:
            applied = _take_place(setup["placement"])
            # One for each run of slots: runs of several groups are stepped apart.
            with _own_warnings() as said:
                sims.extend(SimFactory(**setup["factory"]).make(num_envs) for num_envs in setup["num_envs"])
            limit_threads(setup["threads"])  # of pools that do not read the environment's variables
        except UserError as error:
            channel.answer({"kind": "user_error", "message": str(error)})
        except Exception:
            channel.answer(_fault(FaultKind.RAISED, traceback.format_exc(), {}))
        else:
            started()
            _serve(channel, sims, {"placement": applied, "warnings": said}, released)
    except ChannelClosed:
        pass
    except (ChannelGarbled, KeyError, TypeError, ValueError, OSError):  # on its way to its slots
        channel.answer(_fault(FaultKind.GARBLED, traceback.format_exc(), {}))
    finally:
        for sim in sims:
            with contextlib.suppress(Exception):
                sim.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # native libraries may hang in their exit handlers
