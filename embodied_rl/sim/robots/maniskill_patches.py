"""Patches with which ManiSkill 3.0.1 runs headless and fast on a CPU. Each keeps every number of a fresh process bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from embodied_rl.errors import MissingAssetsError

if TYPE_CHECKING:
    import sapien
    import torch
    from mani_skill.envs.scene import ManiSkillScene
    from mani_skill.utils.building._mjcf_loader import MJCFLoader
    from mani_skill.utils.structs import Actor, Articulation, ArticulationJoint, Link, Pose
    from mani_skill.utils.structs.render_camera import RenderCamera


class _NullMaterial:
    """Replaces `sapien.render.RenderMaterial`, whose constructor fails without a rendering device."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.__dict__.update(kwargs)

    def __getattr__(self, name: str) -> None:
        return None

    def __getattribute__(self, name: str) -> Any:
        # Tasks call set_base_color(…) and the like on materials.
        return (lambda *args, **kwargs: None) if name.startswith("set_") else object.__getattribute__(self, name)


@contextmanager
def no_render_materials(active: bool) -> Iterator[None]:
    """While a scene without pictures is built, give tasks materials that need no rendering device.

    Even ``render_backend="none"`` makes materials, and their constructor requires a Vulkan device.
    """
    if not active:
        yield
        return
    import sapien.pysapien.render as original

    users = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("sapien", "mani_skill")]
    with ExitStack() as stack:
        for module in [original, *users]:
            if vars(module).get("RenderMaterial") is not None:
                stack.enter_context(mock.patch.object(module, "RenderMaterial", _NullMaterial))
        yield


@contextmanager
def no_asset_prompt(task: str) -> Iterator[None]:
    """Turn ManiSkill's question whether to download assets, which waits for the keyboard, into an error with the command."""
    from mani_skill.utils import download_asset

    def refuse(message: str) -> bool:
        owner = [*message.split(), task, task][1]  # "Environment PickSingleYCB-v1 requires …", "Robot widowxai has …"
        raise MissingAssetsError(
            f"ManiSkill task '{task}' needs assets of '{owner}' that are not on this machine. "
            f"Get them: python -m mani_skill.utils.download_asset {owner}"
        )

    try:
        with mock.patch.object(download_asset, "prompt_yes_no", refuse):
            yield
    except SystemExit as error:  # raised if there is nothing to download
        raise MissingAssetsError(f"ManiSkill task '{task}' needs a robot whose files are not on this machine.") from error


def contacts_of_their_own() -> None:
    """Make every robot and scene from an MJCF file follow this file's contact flags.

    ManiSkill writes a file's flags into its own defaults: after MS-CartpoleBalance-v1, whose file disables contacts, the parts of every
    humanoid and hopper pass through each other for the rest of the process.
    """
    from mani_skill.utils.building import _mjcf_loader as loader

    if "_embodied_rl_own_options" in vars(loader.MJCFLoader):
        return
    parse = loader.MJCFLoader._parse_mjcf

    def parse_alone(self: MJCFLoader, mjcf_string: str) -> object:
        loader.DEFAULT_MJCF_OPTIONS = {"contact": True}
        return parse(self, mjcf_string)

    loader.MJCFLoader._parse_mjcf = parse_alone
    loader.MJCFLoader._embodied_rl_own_options = True


def without_environment_light(camera: sapien.render.RenderCameraComponent) -> None:
    """Give the camera of a scene without an environment map a reflectance table with one entry instead of SAPIEN's.

    SAPIEN computes its table of 512 x 512 entries before a process draws its first picture: 3 to 7 s of a core without a GPU. Shaders
    multiply an entry by the light of the environment map, which is 0 without a map, so pictures stay equal bit for bit.
    """
    import sapien

    camera.set_texture("BRDFLUT", sapien.render.RenderTexture(np.zeros((1, 1, 2), np.float32), 2, "R32G32Sfloat"))


def quick_first_picture() -> None:
    """Apply `without_environment_light` to the cameras of all scenes made from now on that are drawn on the CPU."""
    from mani_skill.utils.structs.render_camera import RenderCamera

    if "_embodied_rl_quick" in vars(RenderCamera):
        return
    slow_create = RenderCamera.create.__func__

    def create(
        cls: type[RenderCamera],
        render_cameras: list[sapien.render.RenderCameraComponent],
        scene: ManiSkillScene,
        mount: Actor | Link | None = None,
    ) -> RenderCamera:
        if not scene.gpu_sim_enabled and all(one.render_system.cubemap is None for one in scene.sub_scenes):
            for camera in render_cameras:
                without_environment_light(camera)
        return slow_create(cls, render_cameras, scene, mount)

    RenderCamera.create = classmethod(create)
    RenderCamera._embodied_rl_quick = True


def fast_tensors() -> None:
    """Replace two hot spots that build small tensors number by number, for one scene on the CPU; other cases stay unchanged.

    A Panda step reads about eleven poses and sets eleven joint targets; together that is a fifth of the step.
    """
    import torch
    from mani_skill.utils.structs import articulation, pose

    if "_embodied_rl_fast" in vars(pose.Pose):
        return
    slow_create = pose.Pose.create.__func__
    slow_targets = articulation.Articulation.set_joint_drive_targets
    single_pose = pose.sapien.Pose

    def create(cls: type[Pose], value: object, device: torch.device | None = None) -> Pose:
        if type(value) is list and len(value) == 1 and type(value[0]) is single_pose and (device is None or device.type == "cpu"):
            row = np.empty((1, 7), np.float32)
            row[0, :3], row[0, 3:] = value[0].p, value[0].q
            return cls(raw_pose=torch.from_numpy(row))
        return slow_create(cls, value, device)

    def set_joint_drive_targets(
        self: Articulation,
        targets: object,
        joints: list[ArticulationJoint] | None = None,
        joint_indices: torch.Tensor | None = None,
    ) -> None:
        if self.scene.gpu_sim_enabled or joints is None or not isinstance(targets, torch.Tensor) or targets.dtype != torch.float32:
            return slow_targets(self, targets, joints, joint_indices)
        row = targets[0].numpy()
        for i, joint in enumerate(joints):
            assert joint.active_index is not None
            joint._objs[0].drive_target = row[i : i + 1]
        return None

    pose.Pose.create = classmethod(create)
    pose.Pose._embodied_rl_fast = True
    articulation.Articulation.set_joint_drive_targets = set_joint_drive_targets


def quick_torch() -> None:
    """Give ManiSkill's tasks a torch that seeds and names the device as fast as a machine without CUDA allows.

    `torch.manual_seed` takes 120 µs to seed absent devices too, and ``with torch.device("cpu")`` sends every operation in it through Python
    without effect: a third of StackCube's reset.
    """
    import torch

    if torch.cuda.is_available():
        return
    named, quick = torch.device, ModuleType("torch")
    vars(quick).update(vars(torch))

    def manual_seed(seed: int) -> torch.Generator:
        return torch.default_generator.manual_seed(int(seed))

    def device(name: str | torch.device) -> torch.device | AbstractContextManager[None]:
        found = named(name)
        return nullcontext() if found.type == "cpu" else found  # tasks use it only after `with`

    vars(quick).update(manual_seed=manual_seed, device=device)
    concerned = ("mani_skill.envs.sapien_env", "mani_skill.envs.tasks.", "mani_skill.utils.scene_builder.")
    for name, module in list(sys.modules.items()):
        if name.startswith(concerned) and vars(module).get("torch") is torch:
            vars(module)["torch"] = quick
