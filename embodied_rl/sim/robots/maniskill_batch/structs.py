"""ManiSkill's structs (actors, links, articulations, joints, cameras) over the N scenes of a `BatchScene`.

ManiSkill has a path for one scene on a CPU and one for many on a GPU. This module, when it is imported, adds a third to each property and
method that needs it; objects of other scenes keep their own path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import sapien
import torch
from mani_skill.agents.controllers.pd_ee_pose import PDEEPosController
from mani_skill.agents.controllers.utils.kinematics import Kinematics
from mani_skill.utils import common, sapien_utils
from mani_skill.utils.building.actor_builder import ActorBuilder
from mani_skill.utils.structs import Actor, Articulation, ArticulationJoint, Link, Pose, RenderCamera
from mani_skill.utils.structs.base import BaseStruct, PhysxRigidBodyComponentStruct, PhysxRigidDynamicComponentStruct

from embodied_rl.sim.robots.maniskill_batch.physics import STRUCTS, BatchScene

Values = torch.Tensor | np.ndarray | Sequence[float] | Sequence[Sequence[float]]
"""Arguments of ManiSkill's setters: one row per object, or one row for all."""


# ---- how a property or method gets its third path -------------------------------------------------------------------


def _laid_out(struct: BaseStruct) -> bool:
    """Whether a struct belongs to a complete batched scene, so that its buffers can be read."""
    return type(struct.scene) is BatchScene and struct.scene.px.ready


def _method(cls: type, name: str) -> Callable[[Callable[..., Any]], None]:
    """Decorator: replace a method by `function(self, original, …)` for objects in a batched scene."""

    def put(function: Callable[..., Any]) -> None:
        original = getattr(cls, name)

        def method(self: BaseStruct, *args: Any, **kwargs: Any) -> Any:
            if type(self.scene) is BatchScene:
                return function(self, original, *args, **kwargs)
            return original(self, *args, **kwargs)

        setattr(cls, name, method)

    return put


def _property(cls: type, name: str, read: Callable[[Any], Any] | None, write: Callable[[Any, Any], None] | None = None) -> None:
    """Replace a property's getter, setter or both for objects in a batched scene; None: it stays. The getter stays until the scene is
    complete."""
    original = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
    own_get, own_set = original.fget, original.fset

    def get(self: BaseStruct) -> Any:
        return read(self) if _laid_out(self) else own_get(self)  # type: ignore[misc]

    def assign(self: BaseStruct, value: Values | Pose | sapien.Pose) -> None:
        (write if type(self.scene) is BatchScene else own_set)(self, value)  # type: ignore[misc]

    setattr(cls, name, property(own_get if read is None else get, own_set if write is None else assign))


# ---- which of a struct's objects act, and what is written to each ---------------------------------------------------


def writing(struct: BaseStruct, values: np.ndarray | sapien.Pose) -> Iterator[tuple[int, Any]]:
    """(index among the struct's objects, its row of `values`) of the objects in acting scenes; cached reads of these become stale.

    `values`: an array [n, …] with a row for each object, for each that acts, or one for all; a `sapien.Pose` applies to all.
    """
    px, scenes = struct.scene.px, struct._embodied_rl_scenes
    px.flush()
    acting = px.rows
    places = range(len(scenes)) if len(acting) == len(px.scenes) else [k for k, i in enumerate(scenes) if i in acting]
    if isinstance(values, sapien.Pose) or len(values) == 1:
        row = values if isinstance(values, sapien.Pose) else values[0]
        yield from ((k, row) for k in places)
    elif len(values) == len(places):
        yield from zip(places, values, strict=True)
    elif len(values) == len(scenes):
        yield from ((k, values[k]) for k in places)
    else:
        raise ValueError(f"{len(values)} rows cannot be written to {len(places)} of {len(scenes)} objects of {struct.name}.")
    px.moved([scenes[k] for k in places])


def _vectors(value: Values) -> np.ndarray:
    """[n, d] float32 from a tensor, array or list [n, d] or [d]."""
    array = np.asarray(common.to_numpy(value), np.float32)
    return array[None] if array.ndim == 1 else array


def _set_each(objects: str, attribute: str, values: Callable[[Values], np.ndarray] = _vectors) -> Callable[[Any, Values], None]:
    """Setter of an attribute of a struct's `objects` (``_objs``, ``_bodies``)."""

    def write(self: BaseStruct, value: Values) -> None:
        things = getattr(self, objects)
        for k, row in writing(self, values(value)):
            setattr(things[k], attribute, row)

    return write


def _of_each(objects: str, attribute: str) -> Callable[[Any], torch.Tensor]:
    """Getter of an attribute of a struct's `objects`, read one by one."""

    def read(self: BaseStruct) -> torch.Tensor:
        self.px.flush()
        return torch.from_numpy(np.stack([getattr(thing, attribute) for thing in getattr(self, objects)]))

    return read


# ---- what is known of a struct ---------------------------------------------------------------------------------------


def _cached(cls: type, name: str, find: Callable[[Any], Any]) -> None:
    """Replace a cached property for objects in a batched scene, or add one; `graft` drops its value when their objects are replaced."""
    original = vars(cls).get(name)

    def get(self: BaseStruct) -> Any:
        return find(self) if original is None or _laid_out(self) else original.func(self)

    put: cached_property[Any] = cached_property(get)
    put.__set_name__(cls, name)
    setattr(cls, name, put)


post_init = BaseStruct.__post_init__


def post_init_and_remember(self: BaseStruct) -> None:
    post_init(self)
    vars(self.scene).setdefault(STRUCTS, []).append(self)


BaseStruct.__post_init__ = post_init_and_remember
_cached(BaseStruct, "_embodied_rl_scenes", lambda self: self._scene_idxs.tolist())
_cached(PhysxRigidBodyComponentStruct, "_body_data_index", lambda self: self.px.rows_of(body.entity for body in self._bodies))
_cached(Articulation, "_data_index", lambda self: self.px.rows_of(self._objs))
_cached(ArticulationJoint, "_data_index", lambda self: self.px.rows_of(self._physx_articulations))


# ---- actors and links ------------------------------------------------------------------------------------------------


def _pose(self: Actor | Link) -> Pose:
    return Pose(raw_pose=self.px.poses()[self._body_data_index, :7])


def _set_pose(self: Actor | Link, value: Values | Pose | sapien.Pose) -> None:
    values = value if isinstance(value, sapien.Pose) else _vectors(value.raw_pose if isinstance(value, Pose) else value)
    for k, row in writing(self, values):
        self._objs[k].pose = row if isinstance(row, sapien.Pose) else sapien.Pose(row[:3], row[3:])


for cls in (Actor, Link):
    _property(cls, "pose", _pose, _set_pose)
for name, columns in (("linear_velocity", slice(7, 10)), ("angular_velocity", slice(10, 13))):

    def of_actor(self: Actor, columns: slice = columns) -> torch.Tensor:
        return self.px.bodies()[self._body_data_index, columns]

    _property(PhysxRigidDynamicComponentStruct, name, of_actor, _set_each("_bodies", name))
    _property(Link, name, _of_each("_bodies", name))  # links are packed without their velocities


@_method(Actor, "set_state")
def set_state(self: Actor, original: Callable[..., Any], state: Values, env_idx: torch.Tensor | None = None) -> None:
    rows = common.to_tensor(state)
    with self.scene.only_indexed(env_idx):
        self.set_pose(Pose.create(rows[:, :7]))
        if self.px_body_type == "dynamic":
            self.set_linear_velocity(rows[:, 7:10])
            self.set_angular_velocity(rows[:, 10:13])


@_method(Actor, "apply_force")
def apply_force(self: Actor, original: Callable[..., Any], force: Values) -> None:
    for k, row in writing(self, _vectors(force)):
        body = self._bodies[k]
        body.add_force_at_point(force=row, point=(body.pose * body.cmass_local_pose).p)


# ---- articulations ---------------------------------------------------------------------------------------------------


for name in ("qpos", "qvel"):

    def from_buffer(self: Articulation, name: str = name) -> torch.Tensor:
        return getattr(self.px, f"cuda_articulation_{name}").torch()[self._data_index, : self.max_dof]

    _property(Articulation, name, from_buffer, _set_each("_objs", name))
_property(Articulation, "qf", _of_each("_objs", "qf"), _set_each("_objs", "qf"))
_property(Articulation, "qacc", _of_each("_objs", "qacc"))
for name in ("root_linear_velocity", "root_angular_velocity"):
    _property(Articulation, name, None, _set_each("_objs", name))


@_method(Articulation, "set_state")
def set_state_of_joints(self: Articulation, original: Callable[..., Any], state: Values, env_idx: torch.Tensor | None = None) -> None:
    with self.scene.only_indexed(env_idx):
        original(self, state)


for name in ("set_joint_drive_targets", "set_joint_drive_velocity_targets"):
    attribute = name.removeprefix("set_joint_").removesuffix("s")

    @_method(Articulation, name)
    def set_drives(
        self: Articulation,
        original: Callable[..., Any],
        targets: Values,
        joints: list[ArticulationJoint] | None = None,
        joint_indices: Sequence[int] | torch.Tensor = (),
        attribute: str = attribute,
    ) -> None:
        if joints is None:
            joints = [self.active_joints[int(j)] for j in joint_indices]
        driven = [joint._objs for joint in joints]
        for k, row in writing(self, _vectors(targets)):
            for j, objects in enumerate(driven):
                setattr(objects[k], attribute, row[j : j + 1])


@_method(Articulation, "compute_passive_force")
def compute_passive_force(self: Articulation, original: Callable[..., Any], *args: Any, **kwargs: Any) -> np.ndarray:
    self.px.flush()
    return np.stack([a.compute_passive_force(*args, **kwargs) for a in self._objs])


@_method(Articulation, "get_link_incoming_joint_forces")
def get_link_incoming_joint_forces(self: Articulation, original: Callable[..., Any]) -> torch.Tensor:
    self.px.flush()
    return torch.from_numpy(np.stack([a.get_link_incoming_joint_forces() for a in self._objs]))


# ---- joints ----------------------------------------------------------------------------------------------------------


def _columns(value: Values) -> np.ndarray:
    """[n, 1] from one number for each joint, or for all."""
    return np.asarray(common.to_numpy(value), np.float32).reshape(-1, 1)


def set_qpos(self: ArticulationJoint, value: Values) -> None:
    for k, row in writing(self, _columns(value)):
        articulation, position = self._physx_articulations[k], self._physx_articulations[k].qpos
        position[int(self.active_index[k])] = row[0]
        articulation.qpos = position


_property(ArticulationJoint, "qpos", None, set_qpos)
for name in ("drive_target", "drive_velocity_target"):
    _property(ArticulationJoint, name, None, _set_each("_objs", name, _columns))


# ---- contacts, summed in the order of ManiSkill's CPU path, so that the last bits agree ------------------------------


@_method(PhysxRigidBodyComponentStruct, "get_net_contact_impulses")
def of_body(self: PhysxRigidBodyComponentStruct, original: Callable[..., Any]) -> torch.Tensor:
    rows = []
    for i, body in zip(self._embodied_rl_scenes, self._bodies, strict=True):
        mine = body.entity
        found = [(contact, a == mine) for contact, a, b in self.px.contacts(i) if a == mine or b == mine]
        rows.append(sapien_utils.compute_total_impulse(found))
    return common.to_tensor(rows)


@_method(Articulation, "get_net_contact_impulses")
def of_links(self: Articulation, original: Callable[..., Any], link_names: list[str]) -> torch.Tensor:
    impulses = torch.zeros(len(self._objs), len(link_names), 3)
    for k, i in enumerate(self._embodied_rl_scenes):
        links = [self.links_map[name]._objs[k].entity for name in link_names]
        touching = defaultdict(list)
        for contact, a, b in self.px.contacts(i):
            if a in links:
                touching[a].append((contact, True))
            elif b in links:
                touching[b].append((contact, False))
        for place, link in enumerate(links):
            if link in touching:
                impulses[k, place] = common.to_tensor(sapien_utils.compute_total_impulse(touching[link]))
    return impulses


# ---- what a single scene does differently: visibility, and controllers that go to a target pose, not by the Jacobian ---


for cls, name in ((Actor, "hide_visual"), (Actor, "show_visual"), (PDEEPosController, "set_action")):

    @_method(cls, name)
    def as_on_a_cpu(self: Actor | PDEEPosController, original: Callable[..., Any], *args: torch.Tensor) -> None:
        with self.scene.as_on_a_cpu():
            original(self, *args)


compute_ik = Kinematics.compute_ik


def compute_row_by_row(self: Kinematics, pose: Pose, q0: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    scene = self.articulation.scene
    if type(scene) is not BatchScene:
        return compute_ik(self, pose, q0, *args, **kwargs)
    solved = q0[:, self.active_joint_indices].clone()  # without a solution the joints stay, as in a single scene
    for i in scene.px.rows:
        found = compute_ik(self, pose[i], q0[i : i + 1], *args, **kwargs)
        if found is not None:
            solved[i] = found[0]
    return solved


Kinematics.compute_ik = compute_row_by_row


# ---- cameras ---------------------------------------------------------------------------------------------------------


@_method(RenderCamera, "take_picture")
def take_picture(self: RenderCamera, original: Callable[..., Any]) -> None:
    for i in self.scene.shown():
        self._render_cameras[i].take_picture()


@_method(RenderCamera, "get_picture")
def get_picture(self: RenderCamera, original: Callable[..., Any], names: str | list[str]) -> list[torch.Tensor]:
    shown = list(self.scene.shown())
    pictures = []
    for name in [names] if isinstance(names, str) else names:
        drawn = torch.stack([common.to_tensor(self._render_cameras[i].get_picture(name)) for i in shown])
        if self.scene.drawn is None and len(shown) < len(self._render_cameras):
            rows = torch.zeros((len(self._render_cameras), *drawn.shape[1:]), dtype=drawn.dtype)
            rows[shown] = drawn
            drawn = rows
        pictures.append(drawn)
    return pictures


for name in ("get_extrinsic_matrix", "get_model_matrix"):

    @_method(RenderCamera, name)
    def matrices(self: RenderCamera, original: Callable[..., Any], name: str = name) -> torch.Tensor:
        self.scene.px.flush()
        return common.to_tensor(np.stack([getattr(camera, name)() for camera in self._render_cameras]))


@_method(RenderCamera, "get_local_pose")
def get_local_pose(self: RenderCamera, original: Callable[..., Any]) -> Pose:
    return Pose.create([camera.get_local_pose() for camera in self._render_cameras])


def global_pose(self: RenderCamera) -> Pose:
    self.scene.px.flush()
    return Pose.create([camera.get_global_pose() for camera in self._render_cameras])


_property(RenderCamera, "global_pose", global_pose)


# ---- builders --------------------------------------------------------------------------------------------------------


@_method(ActorBuilder, "build_physx_component")
def with_every_plane(self: ActorBuilder, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # On a GPU one ground serves all scenes, so the builder skips it after the first; here every scene needs its own.
    self._plane_collision_poses.clear()
    return original(self, *args, **kwargs)
