"""Grafting: the scene of one environment of a batch is replaced by the scene of a separate environment, the donor.

The donor is an ordinary ManiSkill environment. It rebuilds its scene, restores a saved state or draws an episode as usual, bit for bit.
Then its bodies replace the old ones, and its attributes replace those rows of the batch's.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from mani_skill.agents.base_agent import BaseAgent
from mani_skill.agents.controllers.base_controller import BaseController
from mani_skill.agents.multi_agent import MultiAgent
from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG
from mani_skill.sensors.base_sensor import BaseSensor
from mani_skill.utils.structs import Pose, RenderCamera
from mani_skill.utils.structs.base import BaseStruct

from embodied_rl.sim.robots.maniskill_batch import UnsupportedTask
from embodied_rl.sim.robots.maniskill_batch.physics import STRUCTS, BatchScene, BatchSystem
from embodied_rl.sim.robots.maniskill_state import LEFT, Bodies, EpisodeState, bodies_of, owners_of, physics_of, places_of
from embodied_rl.sim.snapshots import SnapshotError

if TYPE_CHECKING:
    from mani_skill.envs.sapien_env import BaseEnv
    from mani_skill.envs.scene import ManiSkillScene


# ---- rows of the Python state of a batch ------------------------------------------------------------------------------


@contextmanager
def kept_rows(env: BaseEnv, rows: Sequence[int]) -> Iterator[None]:
    """Undo all changes to the attributes of environments other than `rows` afterwards."""
    num_envs = env.num_envs
    if len(rows) == num_envs:
        yield
        return
    others = torch.ones(num_envs, dtype=torch.bool)
    others[list(rows)] = False
    before = [(owner, {name: tensor.clone() for name, tensor in _by_row(owner, num_envs)}) for _, owner in owners_of(env)]
    try:
        yield
    finally:
        for owner, copies in before:
            for name, now in _by_row(owner, num_envs):
                if name in copies and now.shape == copies[name].shape:
                    now[others] = copies[name][others]


def _by_row(owner: object, num_envs: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Attributes with a row for each environment: tensors, and those of poses."""
    for name, value in vars(owner).items():
        tensor = value.raw_pose if type(value) is Pose else value
        if type(tensor) is torch.Tensor and tensor.ndim and tensor.shape[0] == num_envs:
            yield name, tensor


def row_of(value: object, single: object, i: int, num_envs: int, seen: dict[int, object]) -> object:
    """Environment `i`'s part of an attribute, in the form that it has in a separate environment.

    Args:
        single: the attribute of a separate environment; a value of the same shape there is shared by all environments.
        seen: parts of objects met before, so that attributes which are one object stay one.
    """
    if id(value) in seen:
        return seen[id(value)]
    part = value
    if isinstance(value, torch.Tensor | np.ndarray):
        if _is_row_by_row(value, single, num_envs):
            part = _copy(value[i : i + 1])
    elif isinstance(value, Pose):
        part = Pose(raw_pose=row_of(value.raw_pose, single.raw_pose if isinstance(single, Pose) else None, i, num_envs, seen))
    elif isinstance(value, BatchedRNG):
        part = BatchedRNG(rngs=[value.rngs[i]])
    elif type(value) is dict:
        others = single if type(single) is dict else {}
        part = {key: row_of(item, others.get(key), i, num_envs, seen) for key, item in value.items()}
    elif type(value) is list and len(value) == num_envs and not (type(single) is list and len(single) == num_envs):
        part = [value[i]]
    seen[id(value)] = part
    return part


def with_row(value: Any, single: object, i: int, num_envs: int) -> object:
    """The batch's attribute with environment `i`'s part replaced by a separate environment's; the inverse of `row_of`."""
    if isinstance(single, torch.Tensor) and value is None and single.ndim and single.shape[0] == 1:
        value = torch.zeros((num_envs, *single.shape[1:]), dtype=single.dtype)
    if isinstance(single, torch.Tensor | np.ndarray):
        if isinstance(value, type(single)) and _is_row_by_row(value, single, num_envs):
            value = _copy(value)
            value[i] = single[0]
    elif isinstance(single, Pose):
        raw = with_row(value.raw_pose if isinstance(value, Pose) else None, single.raw_pose, i, num_envs)
        value = Pose(raw_pose=raw)
    elif isinstance(single, BatchedRNG) and isinstance(value, BatchedRNG):
        value.rngs[i] = single.rngs[0]
    elif type(single) is dict and type(value) is dict:
        value.update({key: with_row(value.get(key), item, i, num_envs) for key, item in single.items() if key in value})
    elif (
        type(single) is list
        and type(value) is list
        and len(single) == 1
        and len(value) == num_envs
        and not isinstance(single[0], BaseStruct)
    ):
        value[i] = single[0]
    return value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


def _is_row_by_row(value: torch.Tensor | np.ndarray, single: object, num_envs: int) -> bool:
    if not value.ndim or value.shape[0] != num_envs:
        return False
    return not isinstance(single, torch.Tensor | np.ndarray) or tuple(single.shape) == (1, *value.shape[1:])


# ---- a rebuilt scene --------------------------------------------------------------------------------------------------


_OBJECTS = ("_objs", "_bodies", "_physx_articulations")
_OF_THE_DONOR = ("num_envs", "reconfiguration_freq")
"""Attributes that depend on the number of environments; a saved episode has them as a separate environment does."""


class Grafts:
    """Replaces scenes and episodes of a batch through its donor.

    Args:
        donor: a separate environment of the same task and arguments; nothing else may step or reset it.
        renders: whether both were made with a rendering device.
    """

    def __init__(self, env: BaseEnv, donor: BaseEnv, renders: bool) -> None:
        self.env, self.donor = env, donor
        self.frequency = int(donor.reconfiguration_freq)
        """Episodes that a separate environment plays in one scene; 0: any number."""
        self._state = EpisodeState(donor, renders)
        self._scene_seeds = [int(seed) for seed in env._episode_seed]
        self._left = [int(donor._reconfig_counter)] * env.num_envs

    def rebuilds(self, i: int) -> bool:
        """Whether the next episode of environment `i` begins in a new scene unasked."""
        return self.frequency != 0 and self._left[i] == 0

    def began(self, i: int) -> None:
        """Record that an episode of environment `i` began in the present scene."""
        self._left[i] -= self.frequency != 0

    def begin(self, i: int, seed: int, options: dict[str, Any]) -> Any:
        """Begin an episode of environment `i` in a new scene; returns the separate environment's observation."""
        observation, _ = self.donor.reset(seed=seed, options={**options, "reconfigure": True})
        self._graft(i)
        return observation

    def capture(self, i: int) -> dict[str, Any]:
        """State that `EpisodeState.capture` returns for a separate environment; call `restore` here too afterwards."""
        env, donors, seen = self.env, dict(owners_of(self.donor)), {}  # type: ignore[var-annotated]
        env.scene.px.flush()
        attributes: dict[str, dict[str, Any]] = {}
        for name, owner in owners_of(env):
            single = vars(donors[name])
            attributes[name] = dict(vars(owner))
            for key, value in vars(owner).items():
                if key in single and (key in _OF_THE_DONOR or isinstance(single[key], gymnasium.Space)):
                    attributes[name][key] = single[key]
                elif key not in LEFT:
                    attributes[name][key] = row_of(value, single.get(key), i, env.num_envs, seen)
        attributes["env"] |= {"_reconfig_counter": self._left[i], "_episode_rng": env._batched_episode_rng.rngs[i]}
        return self._state.pack(self._scene_seeds[i], int(env._episode_seed[i]), physics_of(self._bodies(i)), attributes)

    def _bodies(self, i: int) -> Bodies:
        """Bodies of scene `i`, by their names in a separate scene."""
        mine, single = bodies_of(self.env.scene, i), bodies_of(self.donor.scene)
        return Bodies(
            dict(zip(single.articulations, mine.articulations.values(), strict=True)),
            dict(zip(single.actors, mine.actors.values(), strict=True)),
        )

    def restore(self, i: int, state: dict[str, Any]) -> None:
        """Resume a captured episode in environment `i`. Raises SnapshotError for another task or robot."""
        try:
            with torch.inference_mode():
                self._state.restore(state)
                self._graft(i)
        except UnsupportedTask as error:
            raise SnapshotError(f"Snapshot cannot be restored in a batch of environments: {error}.") from error

    def _graft(self, i: int) -> None:
        env, donor = self.env, self.donor
        donor_scene = donor.scene
        env.scene.px.flush()
        for struct, donated in _pairs(env.scene, i, donor_scene):
            _replace_objects(struct, donated, i)
        env.scene.sub_scenes[i] = donor_scene.sub_scenes[0]
        kinds = (env.scene.sensors, donor_scene.sensors), (env.scene.human_render_cameras, donor_scene.human_render_cameras)
        for mine, theirs in kinds:
            for name, sensor in mine.items():
                camera = sensor.camera
                camera._render_cameras[i] = theirs[name].camera._render_cameras[0]
                for key in [key for key in vars(camera) if key.startswith("_cached_")]:
                    setattr(camera, key, None)
        env.scene.px.replace(i, donor_scene.sub_scenes[0])
        donors = dict(owners_of(donor))
        for name, owner in owners_of(env):
            present = vars(owner)
            for key, single in vars(donors[name]).items():
                if key in LEFT:
                    continue
                if isinstance(single, torch.Tensor | np.ndarray | Pose | dict | list) or type(single) is type(env._batched_episode_rng):
                    present[key] = with_row(present.get(key), single, i, env.num_envs)
        self._scene_seeds[i], self._left[i] = self._state.scene_seed, int(donor._reconfig_counter)


def _pairs(scene: BatchScene, i: int, donor_scene: ManiSkillScene) -> list[tuple[BaseStruct, BaseStruct]]:
    """(struct of the batch with something in scene `i`, struct that the donor made at the same point)."""
    mine = [struct for struct in vars(scene)[STRUCTS] if places_of(struct, i)]
    theirs = vars(donor_scene)[STRUCTS]
    kinds, donated = [type(one) for one in mine], [type(one) for one in theirs]
    if kinds != donated:
        raise UnsupportedTask(f"its scene is made of {len(kinds)} parts in a batch and of {len(donated)} by itself")
    return list(zip(mine, theirs, strict=True))


def _replace_objects(struct: BaseStruct, donated: BaseStruct, i: int) -> None:
    places = places_of(struct, i)
    if len(places) != len(donated._objs):
        raise UnsupportedTask(f"'{struct.name}' has {len(places)} objects in a scene of the batch and {len(donated._objs)} by itself")
    for name in _OBJECTS:
        for k, thing in zip(places, getattr(donated, name, None) or (), strict=False):
            getattr(struct, name)[k] = thing
    present = vars(struct)
    for name in list(present):  # drop values computed from the objects, but keep the hash, which dictionaries use
        if isinstance(getattr_static(type(struct), name, None), cached_property) and name != "__maniskill_hash__":
            del present[name]
    initial = vars(donated).get("initial_pose")
    if isinstance(initial, Pose):
        rows = struct.initial_pose.raw_pose
        if len(rows) == 1 and len(struct._objs) > 1 and not torch.equal(rows, initial.raw_pose):
            rows = rows.repeat(len(struct._objs), 1)
        if len(rows) == len(struct._objs):
            rows = rows.clone()
            rows[places] = initial.raw_pose
        struct.initial_pose = Pose(raw_pose=rows)


# ---- one environment of a batch as a separate ManiSkill environment ---------------------------------------------------


_VIEWED = (BaseStruct, BaseAgent, MultiAgent, BaseController, BaseSensor, RenderCamera, BatchScene, BatchSystem)


class _Rows:
    """State that the views of one environment share."""

    def __init__(self, env: BaseEnv, i: int) -> None:
        self.env, self.i, self.num_envs = env, i, env.num_envs
        self.made: dict[int, tuple[Any, _View]] = {}

    def shown(self, value: object, places: list[int] | None = None, num: int | None = None) -> Any:
        """Row of a value, a view of an object, or the value itself."""
        places, num = [self.i] if places is None else places, num or self.num_envs
        if isinstance(value, torch.Tensor | np.ndarray):
            return value[places] if value.ndim and value.shape[0] == num > 1 else value
        if isinstance(value, Pose):
            return Pose(raw_pose=self.shown(value.raw_pose, places, num))
        if type(value) is list or type(value) is tuple:
            return type(value)([self.shown(item, places, num) for item in value])
        if type(value) is dict:
            return {key: self.shown(item, places, num) for key, item in value.items()}
        if isinstance(value, types.MethodType):
            return self._method(value, places, num)
        if not isinstance(value, _VIEWED):
            return value
        return self.made.setdefault(id(value), (value, _View(self, value)))[1]

    def _method(self, method: Callable[..., object], places: list[int], num: int) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> Any:
            scene = self.env.scene
            with scene.only((self.i,)), scene.drawing(self.i):
                result = method(*[_plain(arg) for arg in args], **{key: _plain(arg) for key, arg in kwargs.items()})
            return self.shown(result, places, num)

        return call


class _View:
    def __init__(self, rows: _Rows, viewed: object) -> None:
        object.__setattr__(self, "_of_view", rows)
        object.__setattr__(self, "_viewed", viewed)

    def __getattr__(self, name: str) -> Any:
        rows, viewed = self._of_view, self._viewed
        value = getattr(viewed, name)
        if not isinstance(viewed, BaseStruct):
            if name in ("_render_cameras", "sub_scenes", "systems"):
                return [value[rows.i]]
            return rows.shown(value)
        places = places_of(viewed, rows.i)
        if name in _OBJECTS:
            rows.env.scene.px.flush()
            return [value[k] for k in places]
        return rows.shown(value, places, len(viewed._scene_idxs))

    def __setattr__(self, name: str, value: object) -> None:
        with self._of_view.env.scene.only((self._of_view.i,)):
            setattr(self._viewed, name, _plain(value))


class EnvView(_View):
    """View of the task, its robots, controllers, scene, actors and links in which attributes have one environment's row: shapes [1, …].

    Methods run with only this environment acting and drawn.
    """

    def __init__(self, env: BaseEnv, i: int) -> None:
        super().__init__(_Rows(env, i), env)

    @property
    def unwrapped(self) -> EnvView:
        return self

    def forget(self) -> None:
        """Drop all views: the scene was rebuilt, and everything is a new object."""
        self._of_view.made.clear()


def _plain(value: object) -> object:
    return value._viewed if isinstance(value, _View) else value
