"""A `gymnasium.vector.VectorEnv` as a SimEnv, for simulators that step a whole batch at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from embodied_rl.errors import UserError
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.robots.spaces import (
    SUCCESS_KEYS,
    action_converter,
    action_spec,
    action_splits,
    control_hz,
    describe,
    info_row,
    observation_parts,
    row_of,
    row_writer,
)
from embodied_rl.types import SimSpec, StepBuffers


class VectorEnvSim(SimEnv):
    """Steps all environments of one VectorEnv together; resets the ones it is asked to.

    The vector environment must not reset by itself (autoreset mode DISABLED), because the worker keeps final observations
    and chooses seeds. A SyncVectorEnv is switched over; others are made with ``autoreset_mode="Disabled"``.

    Its episodes cannot be taken up again one by one: to replay one's actions would step all the others.

    Args:
        env: the vector environment.
        task: name in the spec; by default the registered id.

    Raises:
        UserError: it resets by itself, or has spaces that cannot be adapted.
    """

    def __init__(self, env: VectorEnv, task: str | None = None) -> None:
        if not isinstance(env, VectorEnv):
            raise UserError(
                f"A simulator factory that takes num_envs must return a SimEnv or a gymnasium.vector.VectorEnv, got {type(env).__name__}."
            )
        if action_splits(env.single_action_space):
            raise UserError(f"Action space {env.single_action_space} of a vector environment cannot be adapted; Box and Discrete can.")
        _disable_autoreset(env)
        self.env = env
        parts = observation_parts(env.single_observation_space)
        _, info = env.reset(seed=0)
        registered = env.spec
        self._success_key = self._probe(info)
        self.spec = SimSpec(
            task=task or (registered.id if registered is not None else type(env.unwrapped).__name__),
            observation={part.name: part.spec for part in parts},
            action=action_spec(env.single_action_space),
            max_episode_steps=registered.max_episode_steps if registered is not None else None,
            control_hz=control_hz(env),
            reports_success=self._success_key is not None,
            can_render=env.render_mode == "rgb_array",
            snapshots="none",
            steps_together=True,
            spaces={"observation": describe(env.single_observation_space), "action": describe(env.single_action_space)},
        )
        self._write = row_writer(parts)
        self._to_action = action_converter(env.single_action_space)

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        chosen = np.zeros(self.env.num_envs, bool)
        asked: Any = [0] * self.env.num_envs  # gymnasium's annotation says int; vector environments take a list
        for i, seed in zip(env_ids, seeds, strict=True):
            chosen[i], asked[i] = True, int(seed)
        passed: dict[str, Any] = {key: value for key, value in (options or {}).items() if key != "reconfigure"}
        if not chosen.all():
            passed["reset_mask"] = chosen
        observation, _ = self.env.reset(seed=asked, options=passed or None)
        for i in env_ids:
            self._write(out.observation, i, row_of(observation, i))

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        if len(env_ids) != self.env.num_envs:
            raise UserError(
                f"'{self.spec.task}' steps its {self.env.num_envs} environments together and was asked for {len(env_ids)} of them: "
                "set sim.pipeline_groups=1."
            )
        order = np.argsort(np.asarray(env_ids))
        rows = self._to_action(actions[order])
        observation, reward, terminated, truncated, info = self.env.step(np.asarray(rows))
        out.reward[:], out.terminated[:], out.truncated[:] = reward, terminated, truncated
        out.success[:] = False if self._success_key is None else np.asarray(info.get(self._success_key, False), bool)
        for i in range(self.env.num_envs):
            self._write(out.observation, i, row_of(observation, i))
            out.info[i] = info_row(info, i)

    def render(self, env_id: int) -> np.ndarray:
        """One frame [H, W, 3] uint8. Raises UserError where the vector environment cannot render."""
        if not self.spec.can_render:
            raise UserError(f"Task '{self.spec.task}' was made without render_mode='rgb_array', or cannot render.")
        frames: Any = self.env.render()
        return np.asarray(frames[env_id], np.uint8)

    def close(self) -> None:
        self.env.close()

    def _probe(self, reset_info: Mapping[str, Any]) -> str | None:
        self.env.action_space.seed(0)
        *_, step_info = self.env.step(self.env.action_space.sample())
        return next((key for key in SUCCESS_KEYS if key in step_info or key in reset_info), None)


def _disable_autoreset(env: VectorEnv) -> None:
    base: Any = env.unwrapped
    if isinstance(base, SyncVectorEnv) and base.autoreset_mode is not AutoresetMode.DISABLED:
        base.autoreset_mode = AutoresetMode.DISABLED
        base.metadata = {**base.metadata, "autoreset_mode": AutoresetMode.DISABLED}
    mode = env.metadata.get("autoreset_mode")
    if mode is not AutoresetMode.DISABLED and mode != "Disabled":
        raise UserError(
            f"Vector environment {type(base).__name__} resets by itself (autoreset mode {mode}). "
            "Make it with autoreset_mode='Disabled' (gymnasium.make_vec: vector_kwargs={'autoreset_mode': 'Disabled'})."
        )
