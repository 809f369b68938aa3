"""PhysX's CPU engine with the interface of its GPU engine: N systems with one set of buffers.

Reads are lazy: one `pack_poses` and one `pack` per scene return all poses, velocities and joint positions, and only for scenes that moved
since the last read. Writes reach the bodies at once, as in ManiSkill's CPU path, so ``gpu_apply_…`` and ``gpu_fetch_…`` do nothing. Steps
are deferred until something is read or written: one scene's substeps then run in sequence, with its memory in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import sapien
import torch
from mani_skill.envs.scene import ManiSkillScene
from mani_skill.utils import common, sapien_utils
from sapien import physx

from embodied_rl.sim.robots.maniskill_batch import UnsupportedTask
from embodied_rl.specs import Rows

if TYPE_CHECKING:
    from mani_skill.utils.structs import Actor, Link

Contact = tuple[physx.PhysxContact, sapien.Entity, sapien.Entity]


class SceneLayout:
    """Positions of one scene's values in its packed bytes; equal for scenes with the same contents.

    `scene`: a complete `sapien.Scene`. Raises UnsupportedTask: the bytes are not laid out as expected.
    """

    def __init__(self, scene: sapien.Scene) -> None:
        system = scene.physx_system
        entities = list(scene.entities)
        rows = {entity: row for row, entity in enumerate(entities)}
        dynamic = list(system.rigid_dynamic_components)
        self.articulations = [link.articulation for link in system.articulation_link_components if link.is_root]
        self.rows_of_dynamic = np.array([rows[body.entity] for body in dynamic], np.int64)
        self.dofs = tuple(articulation.dof for articulation in self.articulations)
        self.num_entities = len(entities)
        self.rows = rows
        links = {link.entity: (number, link.index) for number, a in enumerate(self.articulations) for link in a.links}
        self.signature = (
            tuple(links.get(entity) for entity in entities),
            tuple(self.rows_of_dynamic.tolist()),
            tuple(bool(body.kinematic) for body in dynamic),
            self.dofs,
        )
        self._check(scene, entities, dynamic)

    def _check(self, scene: sapien.Scene, entities: list[sapien.Entity], dynamic: list[physx.PhysxRigidDynamicComponent]) -> None:
        """Compare the packed bytes with the objects themselves."""
        poses, packed = np.frombuffer(scene.pack_poses(), np.float32), np.frombuffer(scene.physx_system.pack(), np.float32)
        num_floats = 13 * len(dynamic) + sum(13 + 4 * dof for dof in self.dofs)
        if poses.size != 7 * self.num_entities or packed.size != num_floats:
            raise UnsupportedTask(f"a scene packs {poses.size} and {packed.size} numbers, not {7 * self.num_entities} and {num_floats}")
        expected = np.array([[*entity.pose.q, *entity.pose.p] for entity in entities], np.float32).reshape(-1)
        bodies = [np.concatenate([b.linear_velocity, b.angular_velocity]) for b in dynamic]
        joints = [np.concatenate([a.qpos, a.qvel]) for a in self.articulations]
        got = [packed[13 * k + 7 : 13 * k + 13] for k in range(len(dynamic))]
        start, found = 13 * len(dynamic), []
        for dof in self.dofs:
            found.append(packed[start + 13 : start + 13 + 2 * dof])
            start += 13 + 4 * dof
        pairs = [(expected, poses), *zip(bodies, got, strict=True), *zip(joints, found, strict=True)]
        if not all(np.array_equal(one, other) for one, other in pairs):
            raise UnsupportedTask("a scene packs its numbers in another order")


class BatchSystem:
    """Replaces `PhysxGpuSystem`, also in `isinstance`.

    `scenes`: `sapien.Scene`s, each with its own `PhysxCpuSystem`.
    """

    def __init__(self, scenes: Sequence[sapien.Scene]) -> None:
        self.scenes = list(scenes)
        self.systems = [scene.physx_system for scene in scenes]
        self.ready = False
        """Whether the layout is known, so that buffers can be read; False while the scenes are being built."""
        self.rows: tuple[int, ...] = tuple(range(len(self.scenes)))
        """Environments that act now: they are stepped and written to; the others stay unchanged."""
        self._pending = 0
        self._stale = set(self.rows)
        self._stale_bodies = set(self.rows)
        self._contacts: dict[int, list[Contact]] = {}
        # ManiSkill uses one method of its CUDA arrays, `torch`.
        self.cuda_rigid_body_data = SimpleNamespace(torch=self.bodies)
        self.cuda_articulation_qpos, self.cuda_articulation_qvel, self.cuda_articulation_target_qpos, self.cuda_articulation_target_qvel = (
            SimpleNamespace(torch=partial(self._joint, kind)) for kind in range(4)
        )

    __class__ = property(lambda self: physx.PhysxGpuSystem)

    @property
    def timestep(self) -> float:
        return self.systems[0].timestep

    @timestep.setter
    def timestep(self, seconds: float) -> None:
        for system in self.systems:
            system.timestep = seconds

    # ---- stepping ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule one step of the scenes in `rows`; it runs when something is read or written."""
        self._pending += 1

    def flush(self) -> None:
        """Run the scheduled steps."""
        if self._pending:
            count, self._pending = self._pending, 0
            for i in self.rows:
                step = self.systems[i].step
                for _ in range(count):
                    step()
            self.moved(self.rows)

    def moved(self, rows: Iterable[int]) -> None:
        """Mark cached reads of these scenes as stale."""
        self._stale.update(rows)
        self._stale_bodies.update(rows)
        for i in rows:
            self._contacts.pop(i, None)

    def act(self, rows: tuple[int, ...]) -> None:
        """Let only these environments act from now on."""
        self.flush()
        self.rows = rows

    # ---- reading ----------------------------------------------------------------------------------------------------

    def lay_out(self) -> None:
        """Find the layout; call it once the scenes are complete.

        Raises UnsupportedTask: the scenes differ in their contents.
        """
        self.layouts = [SceneLayout(scene) for scene in self.scenes]
        first = self.layouts[0]
        for layout in self.layouts:
            if layout.signature != first.signature:
                raise UnsupportedTask("its scenes hold different things")
        num, self._dofs = len(self.scenes), first.dofs
        most = max(first.dofs, default=0)
        self._data = np.zeros((num, first.num_entities, 13), np.float32)
        self._flat_data = torch.from_numpy(self._data.reshape(-1, 13))
        self._joints = np.zeros((4, num, len(first.dofs), most), np.float32)
        self._flat_joints = torch.from_numpy(self._joints.reshape(4, -1, most))
        self._find_rows()
        self.ready = True
        self.moved(range(num))

    def replace(self, i: int, scene: sapien.Scene) -> None:
        """Replace scene `i` by another `sapien.Scene` with the same contents. Raises UnsupportedTask if they differ."""
        layout = SceneLayout(scene)
        if layout.signature != self.layouts[0].signature:
            raise UnsupportedTask("a scene that was built anew holds other things")
        self.flush()
        self.scenes[i], self.systems[i], self.layouts[i] = scene, scene.physx_system, layout
        self._find_rows()
        self.moved((i,))

    def _find_rows(self) -> None:
        size, count = self.layouts[0].num_entities, len(self._dofs)
        self._row_of: dict[sapien.Entity | physx.PhysxArticulation, int] = {}
        for i, layout in enumerate(self.layouts):
            self._row_of |= {entity: i * size + row for entity, row in layout.rows.items()}
            self._row_of |= {articulation: i * count + k for k, articulation in enumerate(layout.articulations)}

    def rows_of(self, things: Iterable[sapien.Entity | physx.PhysxArticulation]) -> torch.Tensor:
        """[n]: rows of entities in `cuda_rigid_body_data`, or of articulations in the buffers of joints."""
        return torch.tensor([self._row_of[thing] for thing in things], dtype=torch.int64)

    def poses(self) -> torch.Tensor:
        """[scenes · entities, 13]: position, quaternion (w first), and velocities that are valid only after `bodies`."""
        self.flush()
        if self._stale:
            rows = sorted(self._stale)
            self._stale.clear()
            packed = b"".join([self.scenes[i].pack_poses() for i in rows])
            raw = np.frombuffer(packed, np.float32).reshape(len(rows), -1, 7)
            place: Rows = slice(None) if len(rows) == len(self.scenes) else np.asarray(rows)
            self._data[place, :, :3], self._data[place, :, 3:7] = raw[:, :, 4:], raw[:, :, :4]
        return self._flat_data

    def bodies(self) -> torch.Tensor:
        """[scenes · entities, 13]: position, quaternion (w first), and linear and angular velocity of dynamic actors."""
        self._read_bodies()
        return self.poses()

    def _joint(self, kind: int) -> torch.Tensor:
        """[scenes · articulations, joints]: positions, velocities, drive targets or velocity targets, by `kind`."""
        self._read_bodies()
        return self._flat_joints[kind]

    def _read_bodies(self) -> None:
        self.flush()
        if not self._stale_bodies:
            return
        rows = sorted(self._stale_bodies)
        self._stale_bodies.clear()
        raw = np.frombuffer(b"".join([self.systems[i].pack() for i in rows]), np.float32).reshape(len(rows), -1)
        dynamic = self.layouts[0].rows_of_dynamic
        place: Rows = slice(None) if len(rows) == len(self.scenes) else np.asarray(rows)
        start = 13 * len(dynamic)
        velocities = raw[:, :start].reshape(len(rows), -1, 13)[:, :, 7:]
        self._data[place if isinstance(place, slice) else place[:, None], dynamic, 7:] = velocities
        for k, dof in enumerate(self._dofs):
            at = start + 13
            self._joints[0, place, k, :dof] = raw[:, at : at + dof]
            self._joints[1, place, k, :dof] = raw[:, at + dof : at + 2 * dof]
            targets = raw[:, at + 2 * dof : at + 4 * dof]
            self._joints[2, place, k, :dof], self._joints[3, place, k, :dof] = targets[:, ::2], targets[:, 1::2]
            start += 13 + 4 * dof

    def contacts(self, i: int) -> list[Contact]:
        """(contact, first entity, second entity) of scene `i`."""
        self.flush()
        found = self._contacts.get(i)
        if found is None:
            found = self._contacts[i] = [
                (contact, contact.bodies[0].entity, contact.bodies[1].entity) for contact in self.systems[i].get_contacts()
            ]
        return found

    # ---- the rest of PhysxSystem, over all scenes -------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in ("rigid_dynamic_components", "rigid_static_components", "articulation_link_components"):
            return [body for system in self.systems for body in getattr(system, name)]
        if name.startswith(("gpu_init", "gpu_apply_", "gpu_fetch_", "gpu_update_", "sync_poses_")):  # writes reach the bodies at once
            return lambda: None
        raise AttributeError(name)


def make_scenes(count: int, render_device: sapien.Device | None) -> list[sapien.Scene]:
    """Scenes with a CPU system each, and a render system if there is a device."""
    extra = (lambda: [sapien.render.RenderSystem(render_device)]) if render_device is not None else list
    return [sapien.Scene([physx.PhysxCpuSystem(), *extra()]) for _ in range(count)]


# ---- ManiSkill's scene over N separate scenes of the CPU engine -------------------------------------------------------


STRUCTS = "_embodied_rl_structs"
"""Attribute of a scene: ManiSkill's structs in the order of their creation (kept by `structs`)."""


class BatchScene(ManiSkillScene):
    """Scene over a `BatchSystem`. Once it is complete, `gpu_sim_enabled` is True, so that ManiSkill's structs read the batched buffers."""

    def __init__(self, sub_scenes: list[sapien.Scene], **kwargs: Any) -> None:
        super().__init__(sub_scenes, **kwargs)
        self.px = BatchSystem(sub_scenes)
        self.gpu_sim_enabled = False
        self.drawn: Sequence[int] | None = None
        """Environments that `RenderCamera.get_picture` returns; None: all rows, of which only acting environments are drawn."""

    def complete(self) -> None:
        """Find the layout; nothing is added from now on. Raises UnsupportedTask: the scenes differ in their contents."""
        self.px.lay_out()
        self.gpu_sim_enabled = True
        for struct in vars(self)[STRUCTS]:  # ManiSkill has read them before the last camera came
            for name in ("_body_data_index", "_data_index"):
                vars(struct).pop(name, None)

    @contextmanager
    def only(self, rows: tuple[int, ...]) -> Iterator[None]:
        """Let only these environments be stepped and written to in the block."""
        before = self.px.rows
        if rows == before:
            yield
            return
        self._act(rows)
        try:
            yield
        finally:
            self._act(before)

    def _act(self, rows: tuple[int, ...]) -> None:
        self.px.act(rows)
        mask = torch.zeros(len(self.sub_scenes), dtype=torch.bool)
        mask[list(rows)] = True
        self._reset_mask = mask

    def only_indexed(self, env_idx: torch.Tensor | None) -> AbstractContextManager[None]:
        """`only` for ManiSkill's index of environments; None: the environments that act already."""
        return nullcontext() if env_idx is None else self.only(tuple(int(i) for i in env_idx))

    def drawing(self, row: int) -> AbstractContextManager[None]:
        """Draw only this environment in the block; pictures have one row."""
        return self._having("drawn", (row,))

    def as_on_a_cpu(self) -> AbstractContextManager[None]:
        """Let ManiSkill use its path for a single scene where this package has no replacement."""
        return self._having("gpu_sim_enabled", False)

    @contextmanager
    def _having(self, name: str, value: object) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    # ---- simulation -------------------------------------------------------------------------------------------------

    def _gpu_apply_all(self) -> None:
        pass

    def _gpu_fetch_all(self) -> None:
        pass

    def set_sim_state(self, state: torch.Tensor, env_idx: torch.Tensor | None = None) -> None:
        with self.only_indexed(env_idx):
            super().set_sim_state(state)

    def get_contacts(self) -> list[Any]:
        return [contact for i in range(len(self.sub_scenes)) for contact, _, _ in self.px.contacts(i)]

    def get_pairwise_contact_impulses(self, obj1: Actor | Link, obj2: Actor | Link) -> torch.Tensor:
        """[n, 3], summed in the order of ManiSkill's CPU path."""
        rows = []
        for i, one, other in zip(obj1._scene_idxs.tolist(), obj1._bodies, obj2._bodies, strict=True):
            first, second = one.entity, other.entity
            found = []
            for contact, a, b in self.px.contacts(i):
                if a == first and b == second:
                    found.append((contact, True))
                elif a == second and b == first:
                    found.append((contact, False))
            rows.append(sapien_utils.compute_total_impulse(found))
        return common.to_tensor(rows)

    # ---- pictures ---------------------------------------------------------------------------------------------------

    def shown(self) -> Sequence[int]:
        """Environments that are drawn now."""
        return self.px.rows if self.drawn is None else self.drawn

    def update_render(self, update_sensors: bool = True, update_human_render_cameras: bool = True) -> None:
        self.px.flush()
        for i in self.shown():
            self.sub_scenes[i].update_render()

    def get_human_render_camera_images(self, camera_name: str | None = None) -> dict[str, Any]:
        with self.as_on_a_cpu():
            return super().get_human_render_camera_images(camera_name)
