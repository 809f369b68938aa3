"""Devices that sleep instead of computing: a simulator on a GPU and a policy on others, as processes with calibrated times."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from embodied_rl.generation.base import ActedBatch
from embodied_rl.sim.env import SimEnv
from embodied_rl.types import ActionSpec, Observation, SimSpec, StepBuffers, TensorSpec


@dataclass(frozen=True)
class LineTime:
    """Seconds of n rows on d devices that share them: base_s + per_row_s · n / d."""

    base_s: float
    per_row_s: float

    def of(self, rows: float, devices: float = 1.0) -> float:
        return self.base_s + self.per_row_s * rows / devices


class SleepingSim(SimEnv):
    """A batch of environments whose step takes base_s + per_row_s per environment of the message, whatever the processor does."""

    def __init__(self, num_envs: int, base_s: float, per_row_s: float) -> None:
        self._time = LineTime(base_s, per_row_s)
        self.spec = SimSpec("sleeping", {"state": TensorSpec((1,))}, ActionSpec.continuous([-1.0], [1.0]))
        self._steps = np.zeros(num_envs)

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for env_id in env_ids:
            self._steps[env_id] = 0
            out.observation["state"][env_id] = 0

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        time.sleep(self._time.of(len(env_ids)))
        ids = list(env_ids)
        self._steps[ids] += 1
        out.observation["state"][ids, 0] = self._steps[ids]
        out.reward[ids] = 1.0
        out.terminated[ids] = out.truncated[ids] = out.success[ids] = False

    def render(self, env_id: int) -> np.ndarray:
        return np.zeros((2, 2, 3), np.uint8)

    def close(self) -> None:
        pass


def _serve(connection: Connection) -> None:
    """Sleep as long as one is told to, and say so."""
    while (seconds := connection.recv()) is not None:
        time.sleep(seconds)
        connection.send(True)


class SleepingDevice:
    """A process that does one thing at a time."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        self.wait(0.0)

    def start(self, seconds: float) -> None:
        self._connection.send(seconds)

    def finish(self) -> None:
        self._connection.recv()

    def wait(self, seconds: float) -> None:
        self.start(seconds)
        self.finish()

    def close(self) -> None:
        self._connection.send(None)
        self._process.join(10)


class SleepingGenerator:
    """A policy on devices of its own. Implements `Generator`."""

    def __init__(self, device: SleepingDevice, seconds: LineTime) -> None:
        self.version = 0
        self._device, self._seconds = device, seconds
        self._slots = np.zeros(0, np.int64)

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        self._slots = np.asarray(slots)
        self._device.start(self._seconds.of(len(slots)))

    def recv(self) -> ActedBatch:
        self._device.finish()
        count = len(self._slots)
        return ActedBatch(self._slots, np.zeros((count, 1), np.float32), np.zeros((count, 1), np.float32), self.version)

    def publish(self, version: int) -> None:
        self.version = version
