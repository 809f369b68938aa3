"""MuJoCo (Todorov et al. 2012): gymnasium's locomotion tasks such as HalfCheetah-v5, with cheap rendering."""

from __future__ import annotations

from typing import Any

import gymnasium

from embodied_rl.errors import UserError
from embodied_rl.sim.robots.gymnasium import GymnasiumSim, make_one, newest, saved_whole
from embodied_rl.sim.robots.locomotion import LocomotionSim, is_known

MAX_SHADOW_MAP = 1024
"""Pixels a side. Models ask for up to 8192; on a CPU the shadow map is then most of a frame."""


def tasks() -> list[str]:
    """Newest version of each of gymnasium's MuJoCo tasks."""
    return newest(task for task, spec in gymnasium.registry.items() if str(spec.entry_point).startswith("gymnasium.envs.mujoco"))


def make(task: str, num_envs: int, render_size: int = 256, **kwargs: Any) -> GymnasiumSim:
    """`num_envs` environments of a MuJoCo task.

    Args:
        task: id such as "HalfCheetah-v5".
        num_envs: environments in this process.
        render_size: pixels a side of `render`'s picture.
        **kwargs: passed to the task: ``camera_name``, ``frame_skip``, reward weights, …

    Raises:
        UserError: unknown task or argument.
        MissingExtraError: MuJoCo is not installed.
    """
    envs = [make_one(task, "mujoco", width=render_size, height=render_size, **kwargs) for _ in range(num_envs)]
    for env in envs:
        cheapen_rendering(env)
    kind = LocomotionSim if all(map(is_known, envs)) else GymnasiumSim
    return kind(envs, task=task, exact_snapshots=saved_whole(task))


def cheapen_rendering(env: gymnasium.Env) -> None:
    """Limit the shadow map and turn multisampling off: 3–4 times as many frames a second on a CPU, nearly the same picture.

    Must be called before the first frame, because MuJoCo reads these when the rendering context is made.
    """
    model = getattr(env.unwrapped, "model", None)
    if model is None:
        raise UserError(f"'{env}' is not a MuJoCo environment.")
    model.vis.quality.shadowsize = min(int(model.vis.quality.shadowsize), MAX_SHADOW_MAP)
    model.vis.quality.offsamples = 0
