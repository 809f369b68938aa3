"""ManiSkill's scene over N separate scenes of the CPU engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from mani_skill.envs.scene import ManiSkillScene
from mani_skill.utils import common, sapien_utils

from embodied_rl.sim.robots.maniskill_batch.physics import BatchSystem

STRUCTS = "_embodied_rl_structs"
"""Attribute of a scene: ManiSkill's structs in the order of their making (`structs.install` keeps it)."""


class BatchScene(ManiSkillScene):
    """`gpu_sim_enabled` is True, so that ManiSkill's structs read the batched buffers; the system behind them is a `BatchSystem`."""

    def __init__(self, sub_scenes: list[Any], **kwargs: Any) -> None:
        super().__init__(sub_scenes, **kwargs)
        self.px = BatchSystem(sub_scenes)
        self.gpu_sim_enabled = True
        self.drawn: Sequence[int] | None = None
        """Environments of which `RenderCamera.get_picture` gives pictures; None: all rows, of which only those that act are drawn."""

    @contextmanager
    def only(self, rows: tuple[int, ...]) -> Iterator[None]:
        """Meanwhile these environments are stepped and written to, and no others."""
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
        """`only` for ManiSkill's index of environments; None: those that act already."""
        return nullcontext() if env_idx is None else self.only(tuple(int(i) for i in env_idx))

    @contextmanager
    def drawing(self, row: int) -> Iterator[None]:
        """Meanwhile only this environment is drawn, and pictures have one row."""
        self.drawn = (row,)
        try:
            yield
        finally:
            self.drawn = None

    # ---- simulation -------------------------------------------------------------------------------------------------

    def _gpu_apply_all(self) -> None:
        pass

    def _gpu_fetch_all(self) -> None:
        pass

    def set_sim_state(self, state: Any, env_idx: torch.Tensor | None = None) -> None:
        with self.only_indexed(env_idx):
            super().set_sim_state(state)

    def get_contacts(self) -> list[Any]:
        return [contact for i in range(len(self.sub_scenes)) for contact, _, _ in self.px.contacts(i)]

    def get_pairwise_contact_impulses(self, obj1: Any, obj2: Any) -> torch.Tensor:
        """[n, 3], summed as ManiSkill's CPU path does."""
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
        """Environments to be drawn now."""
        return self.px.rows if self.drawn is None else self.drawn

    @contextmanager
    def as_on_a_cpu(self) -> Iterator[None]:
        """Meanwhile ManiSkill takes its path for one scene where nothing of ours stands."""
        self.gpu_sim_enabled = False
        try:
            yield
        finally:
            self.gpu_sim_enabled = True

    def add_camera(self, *args: Any, **kwargs: Any) -> Any:
        with self.as_on_a_cpu():
            return super().add_camera(*args, **kwargs)

    def update_render(self, update_sensors: bool = True, update_human_render_cameras: bool = True) -> None:
        self.px.flush()
        for i in self.shown():
            self.sub_scenes[i].update_render()

    def get_human_render_camera_images(self, camera_name: str | None = None) -> dict[str, Any]:
        with self.as_on_a_cpu():
            return super().get_human_render_camera_images(camera_name)
