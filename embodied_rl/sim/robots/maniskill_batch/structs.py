"""ManiSkill's structs (actors, links, articulations, joints, cameras) over the N scenes of a `BatchScene`.

ManiSkill has a path for one scene on a CPU and one for many on a GPU. `install` adds a third to each property and method that needs it;
objects of other scenes keep their own path.
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

_INSTALLED = "_embodied_rl_batched"
ROW_CACHES = ("_embodied_rl_rows", "_embodied_rl_scenes")
"""Attributes that cache where a struct's objects are; deleted when the objects are replaced."""


def install() -> None:
    """Patch ManiSkill's classes, once per process."""
    if _INSTALLED in vars(BaseStruct):
        return
    setattr(BaseStruct, _INSTALLED, True)
    _remember_structs()
    _patch_rows()
    _patch_actors_and_links()
    _patch_articulations()
    _patch_joints()
    _patch_contacts()
    _patch_controllers()
    _patch_cameras()
    _patch_builders()


# ---- how a property or method gets its third path -------------------------------------------------------------------


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


def _found(cls: type, name: str) -> Any:
    """Property of a class or of one of its bases."""
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))


def _getter(cls: type, name: str) -> Callable[[Callable[[Any], Any]], None]:
    """Decorator: replace a property's getter by `function(self)`."""

    def put(function: Callable[[Any], Any]) -> None:
        original = _found(cls, name)
        read = original.__get__ if isinstance(original, cached_property) else original.fget

        def get(self: BaseStruct) -> Any:
            return function(self) if type(self.scene) is BatchScene else read(self)

        setattr(cls, name, property(get, original.fset if isinstance(original, property) else None))

    return put


def _setter(cls: type, name: str) -> Callable[[Callable[[Any, Any], None]], None]:
    """Decorator: replace a property's setter by `function(self, value)`."""

    def put(function: Callable[[Any, Any], None]) -> None:
        original = _found(cls, name)

        def assign(self: BaseStruct, value: Values | Pose | sapien.Pose) -> None:
            if type(self.scene) is BatchScene:
                function(self, value)
            else:
                original.fset(self, value)

        setattr(cls, name, property(original.fget, assign))

    return put


# ---- which of a struct's objects act, and what is written to each ---------------------------------------------------


def _scenes(struct: BaseStruct) -> list[int]:
    found = struct.__dict__.get("_embodied_rl_scenes")
    if found is None:
        found = struct.__dict__["_embodied_rl_scenes"] = struct._scene_idxs.tolist()
    return found


def writing(struct: BaseStruct, values: np.ndarray | sapien.Pose) -> Iterator[tuple[int, Any]]:
    """(index among the struct's objects, its row of `values`) of the objects in acting scenes; cached reads of these become stale.

    `values`: an array [n, …] with a row for each object, for each that acts, or one for all; a `sapien.Pose` applies to all.
    """
    px, scenes = struct.scene.px, _scenes(struct)
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


def _set_vectors(struct: BaseStruct, objects: list[Any], attribute: str, value: Values) -> None:
    for k, row in writing(struct, _vectors(value)):
        setattr(objects[k], attribute, row)


def _set_poses(struct: BaseStruct, objects: list[Any], value: Values | Pose | sapien.Pose) -> None:
    if isinstance(value, sapien.Pose):
        for k, pose in writing(struct, value):
            objects[k].pose = pose
        return
    rows = _vectors(value.raw_pose if isinstance(value, Pose) else value)
    for k, row in writing(struct, rows):
        objects[k].pose = sapien.Pose(row[:3], row[3:])


def _remember_structs() -> None:
    post_init = BaseStruct.__post_init__

    def post_init_and_remember(self: BaseStruct) -> None:
        post_init(self)
        vars(self.scene).setdefault(STRUCTS, []).append(self)

    BaseStruct.__post_init__ = post_init_and_remember


def _patch_rows() -> None:
    def remembered(self: BaseStruct, find: Callable[[], list[int]]) -> torch.Tensor:
        found = self.__dict__.get("_embodied_rl_rows")
        if found is None:
            if not self.px.ready:  # ManiSkill asks for them while cameras are still being added
                return torch.empty(0, dtype=torch.int64)
            found = self.__dict__["_embodied_rl_rows"] = torch.tensor(find(), dtype=torch.int64)
        return found

    @_getter(PhysxRigidBodyComponentStruct, "_body_data_index")
    def rows_of_bodies(self: PhysxRigidBodyComponentStruct) -> torch.Tensor:
        return remembered(self, lambda: [self.px.row_of(body.entity) for body in self._bodies])

    @_getter(Articulation, "_data_index")
    def rows_of_articulations(self: Articulation) -> torch.Tensor:
        return remembered(self, lambda: [self.px.row_of_articulation(a) for a in self._objs])

    @_getter(ArticulationJoint, "_data_index")
    def rows_of_joints(self: ArticulationJoint) -> torch.Tensor:
        return remembered(self, lambda: [self.px.row_of_articulation(a) for a in self._physx_articulations])


def _patch_actors_and_links() -> None:
    @_getter(Actor, "pose")
    def actor_pose(self: Actor) -> Pose:
        if not self.px.ready:
            return Pose.create([entity.pose for entity in self._objs])
        return Pose(raw_pose=self.px.poses()[self._body_data_index, :7])

    @_getter(Link, "pose")
    def link_pose(self: Link) -> Pose:
        if not self.px.ready:
            return Pose.create([link.entity_pose for link in self._objs])
        return Pose(raw_pose=self.px.poses()[self._body_data_index, :7])

    for cls in (Actor, Link):
        _setter(cls, "pose")(lambda self, value: _set_poses(self, self._objs, value))
    for name in ("linear_velocity", "angular_velocity"):
        columns = slice(7, 10) if name == "linear_velocity" else slice(10, 13)

        def of_actor(self: PhysxRigidDynamicComponentStruct, name: str = name, columns: slice = columns) -> torch.Tensor:
            if not self.px.ready:
                return torch.from_numpy(np.stack([getattr(body, name) for body in self._bodies]))
            return self.px.bodies()[self._body_data_index, columns]

        def of_link(self: Link, name: str = name) -> torch.Tensor:  # links are packed without their velocities
            self.px.flush()
            return torch.from_numpy(np.stack([getattr(body, name) for body in self._bodies]))

        _getter(PhysxRigidDynamicComponentStruct, name)(of_actor)
        _getter(Link, name)(of_link)
        _setter(PhysxRigidDynamicComponentStruct, name)(
            lambda self, value, name=name: _set_vectors(self, self._bodies, name, value)  # type: ignore[misc]
        )
    for name in ("hide_visual", "show_visual"):

        @_method(Actor, name)
        def by_visibility(self: Actor, original: Callable[..., Any]) -> None:
            with self.scene.as_on_a_cpu():
                original(self)

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


def _patch_articulations() -> None:
    for name, buffer in (("qpos", "cuda_articulation_qpos"), ("qvel", "cuda_articulation_qvel")):

        def read(self: Articulation, name: str = name, buffer: str = buffer) -> torch.Tensor:
            if not self.px.ready:
                return torch.from_numpy(np.stack([getattr(a, name) for a in self._objs]))
            return getattr(self.px, buffer).torch()[self._data_index, : self.max_dof]

        _getter(Articulation, name)(read)
    for name in ("qf", "qacc"):

        def read_one_by_one(self: Articulation, name: str = name) -> torch.Tensor:
            self.px.flush()
            return torch.from_numpy(np.stack([getattr(a, name) for a in self._objs]))

        _getter(Articulation, name)(read_one_by_one)
    for name in ("qpos", "qvel", "qf", "root_linear_velocity", "root_angular_velocity"):
        _setter(Articulation, name)(lambda self, value, name=name: _set_vectors(self, self._objs, name, value))  # type: ignore[misc]

    @_method(Articulation, "set_state")
    def set_state(self: Articulation, original: Callable[..., Any], state: Values, env_idx: torch.Tensor | None = None) -> None:
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


def _patch_joints() -> None:
    @_setter(ArticulationJoint, "qpos")
    def set_qpos(self: ArticulationJoint, value: Values) -> None:
        for k, row in writing(self, _columns(value)):
            articulation, position = self._physx_articulations[k], self._physx_articulations[k].qpos
            position[int(self.active_index[k])] = row[0]
            articulation.qpos = position

    for name in ("drive_target", "drive_velocity_target"):
        _setter(ArticulationJoint, name)(
            lambda self, value, name=name: _assign(self, name, _columns(value))  # type: ignore[misc]
        )


def _columns(value: Values) -> np.ndarray:
    """[n, 1] from one number for each joint, or for all."""
    return np.asarray(common.to_numpy(value), np.float32).reshape(-1, 1)


def _assign(struct: ArticulationJoint, attribute: str, rows: np.ndarray) -> None:
    for k, row in writing(struct, rows):
        setattr(struct._objs[k], attribute, row)


def _patch_contacts() -> None:
    """Sum contacts in the order of ManiSkill's CPU path, so that the last bits agree."""

    @_method(PhysxRigidBodyComponentStruct, "get_net_contact_impulses")
    def of_body(self: PhysxRigidBodyComponentStruct, original: Callable[..., Any]) -> torch.Tensor:
        rows = []
        for i, body in zip(_scenes(self), self._bodies, strict=True):
            mine = body.entity
            found = [(contact, a == mine) for contact, a, b in self.px.contacts(i) if a == mine or b == mine]
            rows.append(sapien_utils.compute_total_impulse(found))
        return common.to_tensor(rows)

    @_method(Articulation, "get_net_contact_impulses")
    def of_links(self: Articulation, original: Callable[..., Any], link_names: list[str]) -> torch.Tensor:
        impulses = torch.zeros(len(self._objs), len(link_names), 3)
        for k, i in enumerate(_scenes(self)):
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


def _patch_controllers() -> None:
    @_method(PDEEPosController, "set_action")
    def set_action(self: PDEEPosController, original: Callable[..., Any], action: torch.Tensor) -> None:
        with self.scene.as_on_a_cpu():  # towards a target pose, as a single scene does, not by the Jacobian
            original(self, action)

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


def _patch_cameras() -> None:
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

    @_getter(RenderCamera, "global_pose")
    def global_pose(self: RenderCamera) -> Pose:
        self.scene.px.flush()
        return Pose.create([camera.get_global_pose() for camera in self._render_cameras])


def _patch_builders() -> None:
    @_method(ActorBuilder, "build_physx_component")
    def with_every_plane(self: ActorBuilder, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # On a GPU one ground serves all scenes, so the builder skips it after the first; here every scene needs its own.
        self._plane_collision_poses.clear()
        return original(self, *args, **kwargs)
