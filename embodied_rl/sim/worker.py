"""The simulator process: ``python -m embodied_rl.sim.worker SOCKET LIFE THREAD``, started by the manager and by nothing else.

It steps the slots that the manager marked, counts episodes, resets where one ended (keeping the final observation) and
rings. It never imports torch by itself, and ends when the manager does.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.channel import Channel, ChannelClosed
from embodied_rl.sim.env import SimEnv, SimFactory
from embodied_rl.sim.faults import FaultKind
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.transport import ENDED, IDLE, PENDING, READY, Bell, Layout, Slab, fence, memory_of
from embodied_rl.types import StepBuffers

_NEVER = float("inf")


class NonFiniteOutput(Exception):
    """The simulator returned NaN or infinity; `rows` are the environments concerned."""

    def __init__(self, rows: list[int], what: str) -> None:
        super().__init__(what)
        self.rows = rows


class Worker:
    """Slots [start, stop) of the slab, stepped by one simulator."""

    def __init__(self, channel: Channel, sim: SimEnv, slab: Slab, setup: dict[str, Any], released: threading.Event) -> None:
        self.channel, self.sim, self._released = channel, sim, released
        self.start, self.stop = setup["start"], setup["stop"]
        self.num_envs, self.num_slots, self.index = self.stop - self.start, setup["num_slots"], setup["worker"]
        self.seeds = EpisodeSeeds(**setup["seeds"])
        self.seed_round = 0
        self.max_episode_steps: int | None = setup["max_episode_steps"]
        self.success_ends_episode: bool = setup["success_ends_episode"]
        self.options: dict[str, Any] = {}
        arrays, rows = slab.arrays, slice(self.start, self.stop)
        self.state = arrays["slot_state"][rows]
        self.state_bytes = memory_of(self.state)
        self.action = arrays["action"][rows]
        self.out = StepBuffers(
            observation=slab.group("observation", self.start, self.stop),
            reward=arrays["reward"][rows],
            terminated=arrays["terminated"][rows],
            truncated=arrays["truncated"][rows],
            success=arrays["success"][rows],
            info=[None] * self.num_envs,
        )
        self.final_observation = slab.group("final_observation", self.start, self.stop)
        self.reported = {name: arrays[f"episode_{name}"][rows] for name in ("return", "length", "seed", "index", "success_once")}
        self.control_pending = arrays["control_pending"][self.index]
        self.failed = arrays["failed"][self.index]
        self.bell = Bell(arrays["worker_bell"][self.index, :1], arrays["worker_waiting"][self.index, :1])
        self.manager_bell = Bell(arrays["manager_bell"], arrays["manager_waiting"])
        # Of the running episodes:
        self.returns = np.zeros(self.num_envs, np.float64)
        self.lengths = np.zeros(self.num_envs, np.int64)
        self.success_once = np.zeros(self.num_envs, bool)
        self.episode_seed = np.zeros(self.num_envs, np.int64)
        self.episode_index = np.zeros(self.num_envs, np.int64)
        self._floats = [part for part in self.out.observation.values() if part.dtype.kind == "f"]
        self._all = list(range(self.num_envs))
        self._all_pending = bytes([PENDING]) * self.num_envs
        self._parent = os.getppid()

    # ---- loop -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the manager lets go (ChannelClosed). What the simulator raises goes up as it is."""
        while True:
            self.bell.wait(self._has_work, _NEVER, self._check_parent)
            if self.control_pending[0]:
                self.control_pending[0] = 0
                self._control()
            self._step_pending()

    def _has_work(self) -> bool:
        return PENDING in self.state_bytes.tobytes() or bool(self.control_pending[0])

    def _check_parent(self) -> None:
        if self._released.is_set() or os.getppid() != self._parent:
            raise ChannelClosed("the manager let go of this worker")

    def _step_pending(self) -> None:
        marks = self.state_bytes.tobytes()
        fence()
        if marks == self._all_pending:
            self._step(self._all, slice(None))
        elif PENDING in marks:
            ids = [env_id for env_id, mark in enumerate(marks) if mark == PENDING]
            self._step(ids, np.asarray(ids))

    def _step(self, ids: list[int], rows: Any) -> None:
        out = self.out
        self.sim.step(ids, self.action[rows], out)
        if ids is self._all:
            self._count_all()
        else:
            self._count(rows)
        self._check_finite(rows)
        done = out.terminated[rows] | out.truncated[rows]
        marks: Any = READY
        if np.count_nonzero(done):
            self._finish([env_id for env_id, over in zip(ids, done.tolist(), strict=True) if over])
            # In one write: a slot must never be seen as READY when it has ENDED.
            marks = np.where(done, np.uint8(ENDED), np.uint8(READY))
        fence()
        self.state[rows] = marks
        self.manager_bell.ring()

    def _count_all(self) -> None:
        """`_count` of every environment, in place: a microsecond here is a microsecond of every step."""
        out = self.out
        np.add(self.returns, out.reward, out=self.returns)
        np.add(self.lengths, 1, out=self.lengths)
        if self.sim.spec.reports_success:
            np.logical_or(self.success_once, out.success, out=self.success_once)
            if self.success_ends_episode:
                np.logical_or(out.truncated, out.success & ~out.terminated, out=out.truncated)
        if self.max_episode_steps is not None:
            over = self.lengths >= self.max_episode_steps
            np.logical_or(out.truncated, over & ~out.terminated, out=out.truncated)

    def _count(self, rows: np.ndarray) -> None:
        """Add the step to the running episodes of `rows`, and cut those that are over by our own rules."""
        out = self.out
        self.returns[rows] += out.reward[rows]
        self.lengths[rows] += 1
        self.success_once[rows] |= out.success[rows]
        if self.success_ends_episode:
            out.truncated[rows] |= out.success[rows] & ~out.terminated[rows]
        if self.max_episode_steps is not None:
            out.truncated[rows] |= (self.lengths[rows] >= self.max_episode_steps) & ~out.terminated[rows]

    def _check_finite(self, rows: Any) -> None:
        # One dot product carries every NaN and infinity into one number; the exact look is for when it is not finite.
        for part in (self.out.reward, *self._floats):
            flat = part.reshape(-1)
            if not math.isfinite(np.dot(flat, flat)):
                bad = ~np.isfinite(part.reshape(self.num_envs, -1)).all(axis=1)
                touched = np.arange(self.num_envs)[rows]
                culprits = [int(row) for row in touched if bad[row]]
                if culprits:
                    what = "reward" if part is self.out.reward else "observation"
                    raise NonFiniteOutput(culprits, f"NaN or infinity in the {what}: {part[culprits[0]]!r}")

    def _finish(self, ended: list[int]) -> None:
        """Keep what the ended episodes leave behind, then start the next ones in place."""
        rows = np.asarray(ended)
        for key, part in self.out.observation.items():
            self.final_observation[key][rows] = part[rows]
        self.reported["return"][rows] = self.returns[rows]
        self.reported["length"][rows] = self.lengths[rows]
        self.reported["seed"][rows] = self.episode_seed[rows]
        self.reported["index"][rows] = self.episode_index[rows]
        self.reported["success_once"][rows] = self.success_once[rows]
        self.episode_index[rows] += 1
        self._reset(ended)

    def _reset(self, ids: list[int]) -> None:
        rows = np.asarray(ids)
        seeds = [self.seeds.seed(self.start + env_id, int(self.episode_index[env_id]), self.num_slots, self.seed_round) for env_id in ids]
        self.episode_seed[rows] = seeds
        self.returns[rows], self.lengths[rows], self.success_once[rows] = 0.0, 0, False
        self.sim.reset(ids, seeds, self.out, self.options)
        self._check_finite(rows)

    # ---- rare requests ----------------------------------------------------------------------------------------------

    def _control(self) -> None:
        message, _ = self.channel.recv()
        try:
            self._answer(message)
        except UserError as error:  # what was asked cannot be done here (no pictures, say); stepping can go on
            self.channel.send({"kind": "user_error", "message": str(error)})

    def _answer(self, message: dict[str, Any]) -> None:
        operation = message["operation"]
        if operation == "reset":
            self.seeds, self.seed_round = EpisodeSeeds(**message["seeds"]), message["seed_round"]
            self.episode_index[:] = 0
            self.options = {"reconfigure": True} if message["reconfigure"] else {}
            for name in ("reward", "terminated", "truncated", "success"):
                getattr(self.out, name)[:] = 0
            self._reset(self._all)
            self.options = {}
            self.state[:] = IDLE
            self.channel.send({"kind": "done"})
        elif operation == "render":
            frame = np.ascontiguousarray(self.sim.render(message["env_id"]), np.uint8)
            self.channel.send({"kind": "frame", "shape": frame.shape}, frame.tobytes())
        else:
            raise AssertionError(f"unknown operation {operation!r}")

    def where(self, rows: list[int]) -> dict[str, Any]:
        """Slots, episode seeds and step numbers of environments, for a fault report."""
        return {
            "slots": [self.start + row for row in rows],
            "seeds": [int(self.episode_seed[row]) for row in rows],
            "steps": [int(self.lengths[row]) for row in rows],
        }

    def stepping(self) -> list[int]:
        """Environments that were being stepped."""
        return [row for row in self._all if self.state[row] == PENDING] or self._all


# ---- process --------------------------------------------------------------------------------------------------------


def _live_with_parent(life_fd: int, die_with_thread: bool, released: threading.Event) -> None:
    """Set `released` when the manager lets go or dies, and end this process a second later, even in the middle of a step.

    Linux sends the death signal when the *thread* that started us ends, so it is asked for only where that is the main one.
    """
    parent = os.getppid()
    if sys.platform == "linux" and die_with_thread:
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(life_fd, 1)  # returns only when the manager's end is closed
        released.set()
        time.sleep(1.0)  # an idle worker closes its simulator within this time
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _serve(channel: Channel, sim: SimEnv, setup: dict[str, Any], released: threading.Event) -> None:
    channel.send({"kind": "spec", "spec": sim.spec.to_dict()})
    layout, _ = channel.recv()
    fields = {name: (offset, tuple(shape), dtype) for name, (offset, shape, dtype) in layout["fields"].items()}
    slab = Slab(Layout(fields, layout["num_bytes"]), channel.recv_fd())
    worker = Worker(channel, sim, slab, setup, released)
    channel.send({"kind": "done"})
    try:
        worker.run()
    except ChannelClosed:
        return
    except UserError as error:
        _report(channel, worker, {"kind": "user_error", "message": str(error)})
    except NonFiniteOutput as error:
        _report(channel, worker, {"kind": "fault", "fault": FaultKind.NON_FINITE.name, "detail": str(error), **worker.where(error.rows)})
    except Exception:
        detail = traceback.format_exc()
        _report(channel, worker, {"kind": "fault", "fault": FaultKind.RAISED.name, "detail": detail, **worker.where(worker.stepping())})


def _report(channel: Channel, worker: Worker, message: dict[str, Any]) -> None:
    channel.send(message)
    worker.failed[0] = 1
    worker.manager_bell.ring()


def main() -> None:
    """Take the set-up from the socket, build the simulator, serve, close."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the manager's affair
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=False)  # the manager asks a hanging worker where it is
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    released = threading.Event()
    _live_with_parent(int(sys.argv[2]), sys.argv[3] == "main", released)
    setup, _ = channel.recv()
    sys.path[:] = setup["sys_path"]
    sim: SimEnv | None = None
    try:
        try:
            sim = SimFactory(**setup["factory"]).make(setup["stop"] - setup["start"])
        except UserError as error:
            channel.send({"kind": "user_error", "message": str(error)})
        except Exception:
            channel.send({"kind": "fault", "fault": FaultKind.RAISED.name, "detail": traceback.format_exc()})
        else:
            _serve(channel, sim, setup, released)
    except ChannelClosed:
        pass
    finally:
        if sim is not None:
            with contextlib.suppress(Exception):
                sim.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # native libraries may hang in their exit handlers


if __name__ == "__main__":
    main()
