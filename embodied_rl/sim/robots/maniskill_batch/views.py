"""One environment of a batch, seen as ManiSkill's environment by itself: what experts and films look at."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch
from mani_skill.agents.base_agent import BaseAgent
from mani_skill.agents.controllers.base_controller import BaseController
from mani_skill.agents.multi_agent import MultiAgent
from mani_skill.sensors.base_sensor import BaseSensor
from mani_skill.utils.structs import Pose, RenderCamera
from mani_skill.utils.structs.base import BaseStruct

from embodied_rl.sim.robots.maniskill_batch.physics import BatchSystem
from embodied_rl.sim.robots.maniskill_batch.scene import BatchScene

_VIEWED = (BaseStruct, BaseAgent, MultiAgent, BaseController, BaseSensor, RenderCamera, BatchScene, BatchSystem)


class EnvView:
    """Attributes of the task, its robots, controllers, scene, actors and links with the row of one environment: shapes [1, …].

    Methods are called with this environment acting and drawn, and no other.
    """

    def __init__(self, env: Any, i: int) -> None:
        self._of_view = _Rows(env, i)
        self._viewed = env

    @property
    def unwrapped(self) -> EnvView:
        return self

    def forget(self) -> None:
        """The scene was built anew: everything is another object from now on."""
        self._of_view.made.clear()

    def __getattr__(self, name: str) -> Any:
        return self._of_view.shown(getattr(self._viewed, name))


class _Rows:
    """What the views of one environment share."""

    def __init__(self, env: Any, i: int) -> None:
        self.env, self.i, self.num_envs = env, i, env.num_envs
        self.made: dict[int, tuple[Any, _View]] = {}

    def shown(self, value: Any, places: list[int] | None = None, num: int | None = None) -> Any:
        """The row of a value, a view of an object, or the value as it is."""
        places, num = [self.i] if places is None else places, num or self.num_envs
        if isinstance(value, torch.Tensor | np.ndarray):
            return value[places] if value.ndim and value.shape[0] == num > 1 else value
        if isinstance(value, Pose):
            return Pose(raw_pose=self.shown(value.raw_pose, places, num))
        if type(value) in (list, tuple):
            return type(value)([self.shown(item, places, num) for item in value])
        if type(value) is dict:
            return {key: self.shown(item, places, num) for key, item in value.items()}
        if isinstance(value, types.MethodType):
            return self._method(value, places, num)
        return self._view(value) if isinstance(value, _VIEWED) else value

    def _view(self, value: Any) -> _View:
        found = self.made.get(id(value))
        if found is None:
            found = self.made[id(value)] = (value, _View(self, value))
        return found[1]

    def _method(self, method: Any, places: list[int], num: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            scene = self.env.scene
            with scene.only((self.i,)), scene.drawing(self.i):
                result = method(*[_plain(arg) for arg in args], **{key: _plain(arg) for key, arg in kwargs.items()})
            return self.shown(result, places, num)

        return call


class _View:
    def __init__(self, rows: _Rows, viewed: Any) -> None:
        object.__setattr__(self, "_of_view", rows)
        object.__setattr__(self, "_viewed", viewed)

    def __getattr__(self, name: str) -> Any:
        rows, viewed = self._of_view, self._viewed
        value = getattr(viewed, name)
        if not isinstance(viewed, BaseStruct):
            if name in ("_render_cameras", "sub_scenes", "systems"):
                return [value[rows.i]]
            return rows.shown(value)
        scenes = viewed._scene_idxs.tolist()
        places = [k for k, scene in enumerate(scenes) if scene == rows.i]
        if name in ("_objs", "_bodies", "_physx_articulations"):
            rows.env.scene.px.flush()
            return [value[k] for k in places]
        return rows.shown(value, places, len(scenes))

    def __setattr__(self, name: str, value: Any) -> None:
        with self._of_view.env.scene.only((self._of_view.i,)):
            setattr(self._viewed, name, _plain(value))


def _plain(value: Any) -> Any:
    return value._viewed if isinstance(value, _View | EnvView) else value
