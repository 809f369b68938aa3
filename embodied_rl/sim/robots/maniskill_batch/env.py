"""A ManiSkill task as N environments on the CPU engine: the task's own class, with another scene underneath."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from mani_skill.envs import sapien_env
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.structs.base import BaseStruct

from embodied_rl.sim.robots.maniskill_batch import UnsupportedTask
from embodied_rl.sim.robots.maniskill_batch.physics import make_scenes
from embodied_rl.sim.robots.maniskill_batch.rows import kept_rows
from embodied_rl.sim.robots.maniskill_batch.scene import BatchScene
from embodied_rl.sim.robots.maniskill_batch.structs import install

FIRST_SEED = 2022
"""ManiSkill builds a scene with this seed; here every environment uses it, as each does by itself."""


class BatchedTask(BaseEnv):
    """Goes before the task's class. `gpu_sim_enabled` is False, so that tasks take their CPU branches, while the scene's is True."""

    gpu_sim_enabled = False

    def _setup_scene(self) -> None:
        self._set_scene_config()
        self.scene = BatchScene(
            make_scenes(self.num_envs, self._render_device),
            sim_config=self.sim_config,
            device=self.device,
            backend=self.backend,
        )
        self.scene.px.timestep = 1.0 / self._sim_freq

    def _reconfigure(self, options: Any = None) -> None:
        super()._reconfigure({} if options is None else options)
        self.scene.px.lay_out()

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        """Only for the constructor: builds everything as for an environment by itself."""
        return super().reset(seed=[FIRST_SEED] * self.num_envs, options=options)

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        for index in env_idx:
            with self.scene.only((int(index),)):
                super()._initialize_episode(index[None], options)

    def begin(self, rows: Sequence[int], seeds: Sequence[int], options: Mapping[str, Any]) -> Any:
        """New episodes in some environments, drawn one after another as a single environment draws its own; the observation of all.

        ManiSkill's own reset of several seeds torch from the first one and resets the controllers of all.
        """
        with kept_rows(self, rows):
            for i, seed in zip(rows, seeds, strict=True):
                with self.scene.only((i,)):
                    self._begin_one(i, seed, dict(options))
            with self.scene.only(tuple(rows)):
                observation = self.get_obs(self.get_info())
            self.scene.px.flush()
        return observation

    def _begin_one(self, i: int, seed: int, options: dict[str, Any]) -> None:
        seeds: np.ndarray = self._episode_seed
        seeds[i] = seed
        self._batched_episode_rng.rngs[i] = self._episode_rng = np.random.RandomState(seed)
        self._elapsed_steps[i] = 0
        self._clear_sim_state()
        if self.agent is not None:
            self.agent.reset()
        generator = torch.random.get_rng_state()
        torch.default_generator.manual_seed(seed)
        try:
            super()._initialize_episode(torch.tensor([i]), options)
        finally:
            torch.random.set_rng_state(generator)
        if self.agent is not None:
            controller = self.agent.controller
            for one in controller.values() if isinstance(controller, dict) else (controller,):
                one.reset()

    def advance(self, rows: Sequence[int], action: Any) -> tuple[Any, torch.Tensor, dict[str, Any]]:
        """One control step of some environments; `action` has a row for every one, those of the others are not looked at.

        Returns:
            Observation, reward and info of all environments.
        """
        with kept_rows(self, rows), self.scene.only(tuple(rows)):
            if len(rows) < self.num_envs:  # ManiSkill counts a step of all: what the task sees of the others is what they are
                self._elapsed_steps -= 1
                self._elapsed_steps[list(rows)] += 1
            observation, reward, _, _, info = self.step(action)
            self.scene.px.flush()
        return observation, reward, info

    def look(self, rows: Sequence[int], info: dict[str, Any]) -> Any:
        """The observation of all environments; `info` of the step that brought `rows` where they are."""
        with kept_rows(self, rows), self.scene.only(tuple(rows)):
            return self.get_obs(info)


def make_batched(registered: Any, num_envs: int, made: Mapping[str, Any]) -> Any:
    """`num_envs` environments of a registered task, in one object.

    Args:
        registered: ManiSkill's specification of the task.
        made: arguments of the constructor but ``num_envs`` and ``sim_backend``.

    Raises:
        UnsupportedTask: its scenes differ, bodies lack their shapes, or its code takes no part of a batch.
    """
    install()
    task = registered.cls
    for name in ("reset", "step", "_setup_scene", "_step_action", "get_obs"):
        if getattr(task, name) is not getattr(BaseEnv, name):
            raise UnsupportedTask(f"it has its own `{name}`")
    cls = type(task.__name__, (BatchedTask, task), {"__module__": task.__module__})
    arguments = {**registered.default_kwargs, **made, "num_envs": num_envs, "sim_backend": "physx_cpu"}
    with mock.patch.object(sapien_env, "CPU_SIM_BACKENDS", ()):  # one environment, it says
        try:
            env = cls(**arguments)
        except UnsupportedTask:
            raise
        except Exception as error:  # it can be made by itself: that has been done
            raise UnsupportedTask(f"its code takes no part of a batch ({type(error).__name__}: {error})") from error
    env._episode_seed = np.array(env._episode_seed, np.int64)
    env.reconfiguration_freq = 0  # a scene is built anew by grafting, each for itself
    _check_shapes(env)
    return env


def _check_shapes(env: Any) -> None:
    """Raise UnsupportedTask where the same body has fewer collision shapes in one scene than in another: it would fall through a floor."""
    for thing in env.scene.actors.values():
        counts = {len(body.collision_shapes) for body in thing._bodies if body is not None}
        if len(counts) > 1:
            raise UnsupportedTask(f"'{thing.name}' has collision shapes in some scenes only")
    for articulation in env.scene.articulations.values():
        link: BaseStruct
        for link in articulation.links:
            if len({len(body.collision_shapes) for body in link._bodies}) > 1:
                raise UnsupportedTask(f"link '{link.name}' has collision shapes in some scenes only")
