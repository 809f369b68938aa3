"""The process of one environment of the service; `embodied_rl.sim.keeper` calls `main` with SOCKET LIFE.

It answers requests in sequence with a status and a JSON body, so that pictures are compressed here and not in the server. An exception of
the simulator during a step ends the process, because its state is then unknown.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from embodied_rl.distributed.channel import Channel
from embodied_rl.errors import UserError
from embodied_rl.files import finite
from embodied_rl.serving.http_server import HttpProblem
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.slots import NonFiniteOutput
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.sim.transport import plain_info
from embodied_rl.sim.wire import Encoding, decode_action, decode_snapshot, encode_array, encode_observation, encode_snapshot, encode_spec
from embodied_rl.sim.worker import fault, live
from embodied_rl.types import StepBuffers


class Host:
    """One environment: resets, steps, snapshots and pictures of environment 0 of a simulator made with ``num_envs=1``."""

    def __init__(self, sim: SimEnv, encoding: Encoding) -> None:
        self._sim, self._encoding = sim, encoding
        self._out = StepBuffers.allocate(sim.spec, 1)
        self._running = False
        self.operations: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "reset": self._reset,
            "step": self._step,
            "snapshot": lambda _: {"snapshot": encode_snapshot(sim.snapshot(0))},
            "restore": self._restore,
            "render": lambda _: {"image": encode_array(np.ascontiguousarray(sim.render(0), np.uint8), encoding)},
        }

    def answer(self, message: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """(status, body) for a request. Raises the simulator's exceptions except UserError."""
        try:
            return 200, self.operations[message["operation"]](message["arguments"])
        except HttpProblem as problem:
            return problem.status, problem.to_dict()
        except UserError as error:
            kind = "snapshot_error" if isinstance(error, SnapshotError) else "user_error"
            return 422, {"error": str(error), "kind": kind, "choices": []}

    def _reset(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        options = arguments.get("options") or None
        self._running = False
        self._sim.reset([0], [int(arguments["seed"])], self._out, options)
        self._running = True
        return {"observation": self._observation()}

    def _step(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if not self._running:
            raise HttpProblem(409, "not_reset", "The environment has no episode yet: reset it, or restore a snapshot, first.")
        action = decode_action(self._sim.spec.action, arguments["action"])
        out = self._out
        out.info[0] = None
        self._sim.step([0], action, out)
        reward = float(out.reward[0])
        if not math.isfinite(reward):
            raise NonFiniteOutput([0], f"NaN or infinity in the reward: {reward}")
        return {
            "observation": self._observation(),
            "reward": reward,
            "terminated": bool(out.terminated[0]),
            "truncated": bool(out.truncated[0]),
            "success": bool(out.success[0]),
            "info": finite(plain_info(out.info[0])),  # training does not read it
        }

    def _restore(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self._sim.restore(0, decode_snapshot(arguments["snapshot"]))
        self._running = True
        return {}

    def _observation(self) -> dict[str, Any]:
        parts = {key: part[0] for key, part in self._out.observation.items()}
        for key in self._sim.spec.tensors:
            if parts[key].dtype.kind == "f" and not np.isfinite(parts[key]).all():
                raise NonFiniteOutput([0], f"NaN or infinity in the observation '{key}'")
        return encode_observation(self._sim.spec, parts, self._encoding)


# ---- process --------------------------------------------------------------------------------------------------------


def _build(setup: dict[str, Any], sims: list[SimEnv]) -> dict[str, Any]:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if setup["cpu_s"] is not None:
        seconds = max(math.ceil(setup["cpu_s"]), 1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))  # SIGXCPU at the first, SIGKILL at the second
    sims.append(SimFactory(**setup["factory"]).make(1))
    return {"spec": encode_spec(sims[0].spec)}


def _serve(channel: Channel, setup: dict[str, Any], sims: list[SimEnv], facts: dict[str, Any]) -> None:
    channel.answer({"kind": "done", **facts})
    host = Host(sims[0], setup["encoding"])
    while True:
        message, _, _ = channel.next_request()
        try:
            status, body = host.answer(message)
            payload = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        except Exception as error:
            channel.answer(fault(error))
            return
        channel.answer({"kind": "done", "status": status}, payload)


def _wake(channel: Channel) -> None:
    """Interrupt the wait for the next request."""
    with contextlib.suppress(OSError):
        channel.socket.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Read the set-up from the socket, set the limits, build the simulator, serve, close."""
    live(_build, _serve, _wake)
