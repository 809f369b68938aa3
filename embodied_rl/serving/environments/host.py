"""The process of one environment of the service: `main` is called by `embodied_rl.sim.keeper` with SOCKET LIFE.

It answers one request after the other with a status and a body that is JSON already, so that pictures are compressed here and not in the
server. What a simulator raises while it is stepped ends the process: its state is unknown afterwards.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from embodied_rl.distributed.channel import Channel, ChannelClosed, ChannelGarbled
from embodied_rl.errors import UserError
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultKind, WrongShapeError
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.sim.variable_length import plain_info
from embodied_rl.sim.wire import Encoding, decode_action, decode_snapshot, encode_array, encode_observation, encode_snapshot, encode_spec
from embodied_rl.types import StepBuffers


class Refused(Exception):
    """A request that cannot be done now; the environment is as it was."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class NonFiniteOutput(Exception):
    """NaN or infinity from the simulator."""


class Host:
    """One environment: resets, steps, snapshots and pictures of environment 0 of a simulator made with ``num_envs=1``."""

    def __init__(self, sim: SimEnv, encoding: Encoding) -> None:
        self._sim, self._encoding = sim, encoding
        self._out = StepBuffers.allocate(sim.spec, 1)
        self._running = False
        self.operations: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "reset": self._reset,
            "step": self._step,
            "snapshot": self._snapshot,
            "restore": self._restore,
            "render": self._render,
        }

    def answer(self, message: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """(status, body). Raises what the simulator raises, other than UserError."""
        try:
            return 200, self.operations[message["operation"]](message["arguments"])
        except Refused as error:
            return error.status, {"error": str(error), "kind": error.kind, "choices": []}
        except SnapshotError as error:
            return 422, {"error": str(error), "kind": "snapshot_error", "choices": []}
        except UserError as error:
            return 422, {"error": str(error), "kind": "user_error", "choices": []}

    def _reset(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        options = arguments.get("options") or None
        self._running = False
        self._sim.reset([0], [int(arguments["seed"])], self._out, options)
        self._running = True
        return {"observation": self._observation()}

    def _step(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if not self._running:
            raise Refused(409, "not_reset", "The environment has no episode yet: reset it, or restore a snapshot, first.")
        action = decode_action(self._sim.spec.action, arguments["action"])
        out = self._out
        out.info[0] = None
        self._sim.step([0], action, out)
        reward = float(out.reward[0])
        if not math.isfinite(reward):
            raise NonFiniteOutput(f"NaN or infinity in the reward: {reward}")
        return {
            "observation": self._observation(),
            "reward": reward,
            "terminated": bool(out.terminated[0]),
            "truncated": bool(out.truncated[0]),
            "success": bool(out.success[0]),
            "info": _finite(plain_info(out.info[0])),
        }

    def _snapshot(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"snapshot": encode_snapshot(self._sim.snapshot(0))}

    def _restore(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self._sim.restore(0, decode_snapshot(arguments["snapshot"]))
        self._running = True
        return {}

    def _render(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"image": encode_array(np.ascontiguousarray(self._sim.render(0), np.uint8), self._encoding)}

    def _observation(self) -> dict[str, Any]:
        parts = {key: part[0] for key, part in self._out.observation.items()}
        for key in self._sim.spec.tensors:
            if parts[key].dtype.kind == "f" and not np.isfinite(parts[key]).all():
                raise NonFiniteOutput(f"NaN or infinity in the observation '{key}'")
        return encode_observation(self._sim.spec, parts, self._encoding)


def _finite(value: Any) -> Any:
    """JSON has no NaN: in an info, which training does not read, it becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


# ---- process --------------------------------------------------------------------------------------------------------


def _live_with_server(life_fd: int, connection: socket.socket) -> None:
    """End this process when the server lets go or dies, even in the middle of a step."""

    def watch() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # only the main thread is to print where it is
        with contextlib.suppress(OSError):
            os.read(life_fd, 1)  # returns only when the server's end is closed
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # wakes the wait for the next request
        time.sleep(1.0)  # an idle environment closes its simulator within this time
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _limit(cpu_s: float | None) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if cpu_s is not None:
        seconds = max(math.ceil(cpu_s), 1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))  # SIGXCPU at the first, SIGKILL at the second


def _serve(channel: Channel, host: Host) -> None:
    while True:
        message, _, _ = channel.next_request()
        try:
            status, body = host.answer(message)
            payload = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        except NonFiniteOutput as error:
            return _report(channel, FaultKind.NON_FINITE, str(error))
        except WrongShapeError as error:
            return _report(channel, FaultKind.WRONG_SHAPE, str(error))
        except MemoryError:
            return _report(channel, FaultKind.OUT_OF_MEMORY, traceback.format_exc())
        except Exception:
            return _report(channel, FaultKind.RAISED, traceback.format_exc())
        channel.answer({"kind": "done", "status": status}, payload)


def _report(channel: Channel, kind: FaultKind, detail: str) -> None:
    channel.answer({"kind": "fault", "fault": kind.name, "detail": detail})


def main() -> None:
    """Take the set-up from the socket, set the limits, build the simulator, serve, close."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's affair
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the server asks a hanging environment where it is
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    _live_with_server(int(sys.argv[2]), channel.socket)
    setup, _, _ = channel.next_request()
    sys.path[:] = setup["sys_path"]
    _limit(setup["cpu_s"])
    sim: SimEnv | None = None
    try:
        try:
            sim = SimFactory(**setup["factory"]).make(1)
        except UserError as error:
            channel.answer({"kind": "user_error", "message": str(error)})
        except MemoryError:
            _report(channel, FaultKind.OUT_OF_MEMORY, traceback.format_exc())
        except Exception:
            _report(channel, FaultKind.RAISED, traceback.format_exc())
        else:
            channel.answer({"kind": "done", "spec": encode_spec(sim.spec)})
            _serve(channel, Host(sim, setup["encoding"]))
    except ChannelClosed:
        pass
    except ChannelGarbled as error:
        _report(channel, FaultKind.GARBLED, f"On its own side there came {error}.")
    finally:
        if sim is not None:
            with contextlib.suppress(Exception):
                sim.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # native libraries may hang in their exit handlers
