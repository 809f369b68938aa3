"""`ManiSkillSim` with all environments of a process in one batch: the same numbers with a fraction of the Python per step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from inspect import getattr_static
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from mani_skill.envs import sapien_env
from mani_skill.envs.sapien_env import BaseEnv

from embodied_rl.errors import brief
from embodied_rl.sim.robots.maniskill_batch import UnsupportedTask, structs
from embodied_rl.sim.robots.maniskill_batch.graft import EnvView, Grafts, kept_rows
from embodied_rl.sim.robots.maniskill_batch.physics import BatchScene, make_scenes
from embodied_rl.sim.robots.maniskill_sim import ManiSkillSim
from embodied_rl.sim.robots.maniskill_state import named_parts, no_render_materials, unobserved
from embodied_rl.types import StepBuffers

if TYPE_CHECKING:
    from mani_skill.utils.registration import EnvSpec

    from embodied_rl.sim.robots.maniskill_state import Tensors

# ---- the task ---------------------------------------------------------------------------------------------------------


FIRST_SEED = 2022
"""Seed with which ManiSkill builds a scene; here every environment uses it, as separate ones do."""


class BatchedTask(BaseEnv):
    """Mixed in before the task's class. `gpu_sim_enabled` is False, so that tasks use their CPU branches; the scene's is True."""

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

    def _reconfigure(self, options: dict[str, Any] | None = None) -> None:
        super()._reconfigure({} if options is None else options)
        self.scene.complete()

    def reset(self, seed: object = None, options: dict[str, Any] | None = None) -> tuple[Tensors, dict[str, Any]]:
        """For the constructor only: builds everything as for a separate environment."""
        return super().reset(seed=[FIRST_SEED] * self.num_envs, options=options)

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        for index in env_idx:
            with self.scene.only((int(index),)):
                super()._initialize_episode(index[None], options)

    def begin(self, rows: Sequence[int], seeds: Sequence[int], options: Mapping[str, Any]) -> Tensors:
        """Begin episodes in some environments, drawn one after another as single environments do; returns the observation of all.

        ManiSkill's own reset with several seeds uses the first one for torch, and resets the controllers of all environments.
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

    def advance(self, rows: Sequence[int], action: torch.Tensor | dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Take one control step in some environments; `action` has a row for every environment, and rows of others are ignored.

        Returns reward and info of all environments.
        """
        with kept_rows(self, rows), self.scene.only(tuple(rows)):
            if len(rows) < self.num_envs:  # ManiSkill counts a step for all; restore what the task sees of the others
                self._elapsed_steps -= 1
                self._elapsed_steps[list(rows)] += 1
            _, reward, _, _, info = self.step(action)
            self.scene.px.flush()
        return reward, info

    def look(self, rows: Sequence[int], info: dict[str, Any]) -> Tensors:
        """Observation of all environments; `info`: of the step that moved `rows`."""
        with kept_rows(self, rows), self.scene.only(tuple(rows)):
            return self.get_obs(info)


def make_batched(registered: EnvSpec, num_envs: int, made: Mapping[str, Any]) -> BatchedTask:
    """`num_envs` environments of a registered task, in one object.

    `made`: arguments of the constructor except ``num_envs`` and ``sim_backend``.

    Raises UnsupportedTask: its scenes differ, bodies lack their shapes, or its code does not support parts of a batch.
    """
    assert structs, "it has patched ManiSkill's classes"
    task = registered.cls
    for name in ("reset", "step", "_setup_scene", "_step_action", "get_obs"):
        if getattr_static(task, name) is not getattr_static(BaseEnv, name):
            raise UnsupportedTask(f"it has its own `{name}`")
    cls = type(task.__name__, (BatchedTask, task), {"__module__": task.__module__})
    arguments = {**registered.default_kwargs, **made, "num_envs": num_envs, "sim_backend": "physx_cpu"}
    with mock.patch.object(sapien_env, "CPU_SIM_BACKENDS", ()):  # otherwise ManiSkill allows one environment only
        try:
            env = cls(**arguments)
        except UnsupportedTask:
            raise
        except Exception as error:  # a separate environment can be made: that was done before
            raise UnsupportedTask(f"its code takes no part of a batch ({type(error).__name__}: {error})") from error
    env._episode_seed = np.array(env._episode_seed, np.int64)
    env.reconfiguration_freq = 0  # scenes are rebuilt by grafting, each separately
    _check_shapes(env)
    return env


def _check_shapes(env: BatchedTask) -> None:
    """Raise UnsupportedTask if a body has fewer collision shapes in one scene than in another: it would fall through a floor."""
    links = (link for articulation in env.scene.articulations.values() for link in articulation.links)
    for thing in (*env.scene.actors.values(), *links):
        if len({len(body.collision_shapes) for body in thing._bodies if body is not None}) > 1:
            raise UnsupportedTask(f"'{thing.name}' has collision shapes in some scenes only")


# ---- the simulator ----------------------------------------------------------------------------------------------------


class ManiSkillBatchSim(ManiSkillSim):
    """`ManiSkillSim` with equal numbers, whose `envs` are views of the batch's rows.

    Raises UnsupportedTask: the task cannot be stepped as a batch.
    """

    def _build_each(self, registered: EnvSpec, made: dict[str, Any], num_envs: int) -> BaseEnv:
        self._first = registered.make(**made)  # a separate environment, whose scenes are grafted into the batch
        self._batch = make_batched(registered, num_envs, made)
        self._grafts = Grafts(self._batch, self._first, self._render)
        self.envs = [EnvView(self._batch, i) for i in range(num_envs)]
        self._info: dict[str, Any] = {}
        """Info of all environments, from the last step."""
        if not self._grafts.frequency:
            self._batch.begin((0,), (0,), {})  # as a separate environment does for its spec
        return self._first

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        asked = dict(options or {})
        anew = [bool(asked.get("reconfigure")) or self._grafts.rebuilds(i) for i in env_ids]
        with torch.inference_mode(), no_render_materials(active=any(anew) and not self._render):
            plain = [(i, int(seed)) for i, seed, builds in zip(env_ids, seeds, anew, strict=True) if not builds]
            for i, seed, builds in zip(env_ids, seeds, anew, strict=True):
                if builds:
                    observation = self._grafts.begin(i, int(seed), asked)
                    self.envs[i].forget()
                    self._write(out, i, observation)
            if plain:
                rows = [i for i, _ in plain]
                observation = self._batch.begin(rows, [seed for _, seed in plain], asked)
                for i in rows:
                    self._grafts.began(i)
                self._write_rows(out, rows, _arrays(observation))
        self._elapsed[list(env_ids)] = 0

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        rows = list(env_ids)
        with torch.inference_mode():
            self._write_rows(out, rows, _arrays(self._batch.look(rows, self._info)))

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        """Take one control step in these environments; the others do not move. Raises ValueError for NaN in an action."""
        rows = list(env_ids)
        given = np.asarray(actions, np.float32)
        if np.isnan(given).any():
            wrong = [i for i, row in zip(rows, given, strict=True) if np.isnan(row).any()]
            raise ValueError(f"Actions cannot be NaN: those of environments {wrong} of '{self.spec.task}' are.")
        full = np.zeros((len(self.envs), given.shape[1]), np.float32)
        full[rows] = given
        with torch.inference_mode():
            with unobserved(self._batch):
                reward, info = self._batch.advance(rows, self._by_robot(torch.from_numpy(full)))
            self._info = info
            # Single numbers (means over the batch) describe no environment.
            tensors = {key: value for key, value in info.items() if isinstance(value, torch.Tensor) and value.numel() == len(self.envs)}
            self._put(out, rows, reward.numpy(), {key: value.reshape(-1).tolist() for key, value in tensors.items()})

    def _saved(self, env_id: int) -> dict[str, Any]:
        return {"elapsed": int(self._elapsed[env_id]), "episode": self._grafts.capture(env_id)}

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        self._grafts.restore(env_id, saved["episode"])
        self._elapsed[env_id] = saved["elapsed"]
        self.envs[env_id].forget()

    def close(self) -> None:
        self._batch.close()
        self._first.close()


def _arrays(observation: Tensors) -> dict[str, np.ndarray]:
    return {key: part.numpy() for key, part in named_parts(observation).items()}


# ---- the self-check: two environments of a batch against two separate ones, with everything that a worker does --------


_STEPS = 24


def difference(task: str, arguments: Mapping[str, Any], num_envs: int) -> str | None:
    """First difference between a batch of `num_envs` and separate environments; None: they are equal bit for bit.

    Compares the first and the last of the batch. The size matters: for some shapes torch sums in another order than for one row. Raises
    UserError: the task cannot be made with these arguments, batch or not.
    """
    asked = {"render": False, "render_size": 64, "camera_size": None, **arguments}
    with closing(ManiSkillSim(task, 2, **asked)) as single:
        try:
            with closing(ManiSkillBatchSim(task, num_envs, **asked)) as batch:
                try:
                    return _play(single, batch, num_envs)
                except Exception as error:
                    return f"{type(error).__name__} in a batch: {brief(error, 150)}"
        except UnsupportedTask as error:
            return brief(error, 200)


def _play(single: ManiSkillSim, batch: ManiSkillSim, num_envs: int) -> str | None:
    """First difference between the first and the last environment of a batch and two separate ones."""
    for (when, one), (_, other) in zip(_played(single, [0, num_envs - 1]), _played(batch, range(num_envs)), strict=True):
        for name, value in other.items():
            if name not in one or not np.array_equal(one[name], value):
                apart = f" by {np.abs(np.asarray(one[name], float) - np.asarray(value, float)).max():.2g}" if name in one else ""
                return f"{when} '{name}' differs{apart}"
    return None


def _played(sim: ManiSkillSim, numbers: Sequence[int]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What the first and the last environment put out in steps of all and of some, a reset of one, a snapshot and a new scene: (when,
    {name: value}).

    `numbers`: those of the simulator's environments in the whole batch, ascending.
    """
    first, last = 0, len(numbers) - 1
    out, action, rng = StepBuffers.allocate(sim.spec, len(numbers)), sim.spec.action, np.random.default_rng(0)

    def shown(when: str, rows: Sequence[int] = (first, last)) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for i in rows:
            yield when, {name: part[i] for name, part in {**out.observation, **out.scalars}.items()}
            yield f"{when} info", out.info[i] or {}

    sim.reset(range(len(numbers)), [100 + number for number in numbers], out)
    yield from shown("at the reset")
    for t in range(_STEPS):
        actions = rng.uniform(action.low, action.high, (numbers[-1] + 1, action.dim)).astype(np.float32)
        rows: Sequence[int] = [last] if t == 5 else range(len(numbers))
        sim.step(rows, actions[[numbers[i] for i in rows]], out)
        when = f"after {t + 1} steps"
        yield from shown(when, [last] if t == 5 else (first, last))
        if t == 8:
            sim.reset([last], [7], out)
            yield from shown(when, [last])
        if t == 12:
            sim.snapshot(first)
        if t == 16:
            sim.reset([first], [9], out, {"reconfigure": True})
            yield from shown(when, [first])
    for i in (first, last):
        state = sim.physics(i)
        yield "at the end", {"number of bodies": len(state), **{f"state of {name}": row for name, row in state.items()}}
