"""Small simulators with known arithmetic, run in real worker processes by the tests of the manager."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.snapshots import decode_state, encode_state
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec, VariableSpec


class CountingSim(SimEnv):
    """Observation = [seed, steps taken, sum of actions]; ends (terminated) after ``length`` steps; reward = action.

    `misbehave` says what happens at step `at`: raise, raise at length, wait and raise, exit, hang, leak, nan_observation, nan_reward.
    With `once`, the path of a file that does not exist yet, it happens a single time, whichever process comes first; with `victim`, only in
    the episode of that seed. With `once`, a file of that name and ``.hangs`` says that it hangs.
    """

    def __init__(
        self,
        num_envs: int,
        length: int = 5,
        misbehave: str | None = None,
        at: int = 3,
        image: bool = False,
        task: str | None = None,
        once: str | None = None,
        victim: int | None = None,
        step_s: float = 0.0,
        busy_s: float = 0.0,
    ) -> None:
        self.once, self.victim, self.step_s, self.busy_s, self.leaked = once, victim, step_s, busy_s, b""
        observation = {"state": TensorSpec((3,), "float64")}
        if image:
            observation["rgb"] = TensorSpec((8, 8, 3), "uint8")
        self.spec = SimSpec(task or "count", observation, ActionSpec.continuous([-10.0], [10.0]), reports_success=True, can_render=True)
        self.length, self.misbehave, self.at, self.image = length, misbehave, at, image
        self.state = np.zeros((num_envs, 3))

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for env_id, seed in zip(env_ids, seeds, strict=True):
            self.state[env_id] = (seed, 0, 0)
            self._observe(env_id, out)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        for row, env_id in enumerate(env_ids):
            self.state[env_id, 1] += 1
            self.state[env_id, 2] += actions[row, 0]
            if self.step_s:
                time.sleep(self.step_s)
            until = time.thread_time() + self.busy_s
            while time.thread_time() < until:
                pass
            out.reward[env_id] = actions[row, 0]
            if self.misbehave and self.state[env_id, 1] == self.at and self._is_time(env_id):
                self._misbehave(env_id)
                if self.misbehave == "nan_reward":
                    out.reward[env_id] = np.nan
            out.terminated[env_id] = self.state[env_id, 1] >= self.length
            out.truncated[env_id] = False
            out.success[env_id] = self.state[env_id, 2] >= 3
            out.info[env_id] = {"total": float(self.state[env_id, 2]), "path": np.arange(3), "left out": object()}
            self._observe(env_id, out)

    def render(self, env_id: int) -> np.ndarray:
        if self.misbehave == "blind":
            raise UserError("Task 'count' cannot be drawn here.")
        return np.full((4, 6, 3), int(self.state[env_id, 1]), np.uint8)

    def close(self) -> None:
        pass

    def _observe(self, env_id: int, out: StepBuffers) -> None:
        out.observation["state"][env_id] = self.state[env_id]
        if self.image:
            out.observation["rgb"][env_id] = int(self.state[env_id, 1])

    def _is_time(self, env_id: int) -> bool:
        if self.victim is not None and self.state[env_id, 0] != self.victim:
            return False
        if self.once is None:
            return True
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _misbehave(self, env_id: int) -> None:
        if self.misbehave == "leak":
            self.leaked = b"x" * (400 * 2**20)  # written to, so that it is resident
            time.sleep(600)  # until it is noticed, however late
        if self.misbehave == "raise":
            raise RuntimeError("the gripper fell off")
        if self.misbehave == "raise at length":
            raise RuntimeError("x" * 1_000_000)
        if self.misbehave == "wait and raise":
            open(f"{self.once}.hangs", "w").close()
            while not os.path.exists(f"{self.once}.goes_on"):
                time.sleep(0.01)
            raise RuntimeError("the gripper fell off")
        if self.misbehave == "exit":
            os._exit(7)
        if self.misbehave == "hang":
            self._hang_here()
        if self.misbehave == "nan_observation":
            self.state[env_id, 2] = np.nan

    def _hang_here(self) -> None:
        if self.once is not None:
            open(f"{self.once}.hangs", "w").close()
        while True:
            time.sleep(0.01)


class UnseenSim(CountingSim):
    """Cannot be drawn."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.spec = dataclasses.replace(self.spec, can_render=False)


class TurnedSim(CountingSim):
    """Lists the parts of its observation in another order if it has one environment."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, image=True)
        if num_envs == 1:
            self.spec = dataclasses.replace(self.spec, observation=dict(reversed(self.spec.observation.items())))


class SplitCountingSim(CountingSim):
    """The same, writing observations where it is asked to; its info counts those of the running episode (`together`: all step at once)."""

    step = SimEnv.step

    def __init__(self, num_envs: int, together: bool = False, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        self.spec = dataclasses.replace(self.spec, steps_together=together, snapshots="none" if together else "replay")
        self._unread = StepBuffers.allocate(self.spec, num_envs).observation
        self.observed = np.zeros(num_envs, int)

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        super().reset(env_ids, seeds, out, options)
        self.observed[list(env_ids)] = 0

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        CountingSim.step(self, env_ids, actions, dataclasses.replace(out, observation=self._unread))
        for env_id in env_ids:
            out.info[env_id] = {**(out.info[env_id] or {}), "observed": int(self.observed[env_id])}

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        for env_id in env_ids:
            self.observed[env_id] += 1
            self._observe(env_id, out)


class StartingSim(CountingSim):
    """Starts what sleeps for ten minutes: a child, one in its own session, a daemon, a fork. `folder` gets a file named after each."""

    def __init__(self, num_envs: int, folder: str, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        sleep = ["sleep", "600"]
        daemon = ["sh", "-c", "setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $!"]
        if (fork := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        pids = {
            "child": subprocess.Popen(sleep).pid,
            "session": subprocess.Popen(sleep, start_new_session=True).pid,
            "daemon": int(subprocess.run(daemon, stdout=subprocess.PIPE, check=True).stdout),
            "fork": fork,
        }
        for name, pid in pids.items():
            with open(os.path.join(folder, str(pid)), "w", encoding="ascii") as file:
                file.write(name)


class SavedCountingSim(CountingSim):
    """The same with a state that can be saved: exact, or off by 0.25 in its sum (`drifts`)."""

    def __init__(self, num_envs: int, drifts: bool = False, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        self.spec = dataclasses.replace(self.spec, snapshots="approximate" if drifts else "exact")
        self._drifts = drifts

    def snapshot(self, env_id: int) -> bytes:
        return encode_state(self.state[env_id].copy())

    def restore(self, env_id: int, data: bytes) -> None:
        self.state[env_id] = decode_state(data)
        self.state[env_id, 2] += 0.25 * self._drifts


class ForgottenSim(CountingSim):
    """An episode of it cannot be taken up again."""

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        self.spec = dataclasses.replace(self.spec, snapshots="none")


class HeavySavedSim(SavedCountingSim):
    """Each of its snapshots takes 300 kB: a few of them are more than a socket holds."""

    def snapshot(self, env_id: int) -> bytes:
        return encode_state([self.state[env_id].copy(), np.ones(300_000, np.uint8)])

    def restore(self, env_id: int, data: bytes) -> None:
        self.state[env_id], _ = decode_state(data)


class TalkingSim(SimEnv):
    """Parts of varying size: what it was told, `words` times; a list of the lengths so far; an image that grows by a row a step."""

    def __init__(self, num_envs: int, words: int = 1, length: int = 4, room: int = 1000) -> None:
        parts = {
            "text": VariableSpec("text", room),
            "lengths": VariableSpec("json", 200),
            "picture": VariableSpec("array", 10_000),
            "state": TensorSpec((1,)),
        }
        self.spec = SimSpec("talk", parts, ActionSpec.text(64))
        self.words, self.length = words, length
        self.lengths: list[list[int]] = [[] for _ in range(num_envs)]
        self.text = [""] * num_envs

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for env_id, seed in zip(env_ids, seeds, strict=True):
            self.lengths[env_id], self.text[env_id] = [], f"seed {seed}"
            self._observe(env_id, out)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        for env_id, action in zip(env_ids, actions, strict=True):
            self.text[env_id] = " ".join([action] * self.words)
            self.lengths[env_id].append(len(action))
            out.reward[env_id] = len(action)
            out.terminated[env_id] = len(self.lengths[env_id]) >= self.length
            out.truncated[env_id] = out.success[env_id] = False
            self._observe(env_id, out)

    def render(self, env_id: int) -> np.ndarray:
        return np.zeros((2, 2, 3), np.uint8)

    def close(self) -> None:
        pass

    def _observe(self, env_id: int, out: StepBuffers) -> None:
        steps = len(self.lengths[env_id])
        out.observation["text"][env_id] = self.text[env_id]
        out.observation["lengths"][env_id] = list(self.lengths[env_id])
        out.observation["picture"][env_id] = np.full((steps + 1, 5, 3), steps, np.uint8)
        out.observation["state"][env_id] = steps


class BentEnv(gymnasium.Env):
    """Returns an observation of 3 numbers, and at step `at` (once, see `CountingSim`) one of 4."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def __init__(self, once: str, at: int = 4) -> None:
        self.once, self.at, self.steps = once, at, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        bent = self.steps == self.at and not os.path.exists(self.once)
        if bent:
            open(self.once, "w").close()
        return np.full(4 if bent else 3, self.steps, np.float32), 1.0, self.steps >= 6, False, {}


def cartpole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


def vector_cartpoles(num_envs: int) -> gymnasium.vector.VectorEnv:
    return gymnasium.vector.SyncVectorEnv([cartpole] * num_envs)


class NoOpSim(SimEnv):
    """Does nothing, for measuring the transport: observations of `num_floats` float32, or a frame of `image` pixels per side."""

    def __init__(self, num_envs: int, num_floats: int = 25, image: int = 0) -> None:
        observation = {"rgb": TensorSpec((image, image, 3), "uint8")} if image else {"state": TensorSpec((num_floats,))}
        self.spec = SimSpec("no-op", observation, ActionSpec.continuous([-1.0], [1.0]))
        self._rows = [{key: np.ones(part.shape, part.dtype) for key, part in observation.items()} for _ in range(num_envs)]

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        self._write(env_ids, out)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        self._write(env_ids, out)

    def render(self, env_id: int) -> np.ndarray:
        return np.zeros((2, 2, 3), np.uint8)

    def close(self) -> None:
        pass

    def _write(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        for key, rows in out.observation.items():
            for env_id in env_ids:
                rows[env_id] = self._rows[env_id][key]


class RememberingSim(CountingSim):
    """A `CountingSim` whose past shows: the observation's first entry is the number of resets that its process has seen."""

    num_resets = 0

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        self.num_resets += 1
        super().reset(env_ids, [self.num_resets] * len(env_ids), out, options)
