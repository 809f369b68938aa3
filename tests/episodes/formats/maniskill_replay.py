"""Runs ManiSkill's own ``replay_trajectory`` with the arguments it is given, on a machine that may have no Vulkan device.

A script of its own: ManiSkill's programs want a process to themselves. Nothing of how it reads or plays a file is changed.
"""

from __future__ import annotations

import functools
import os
import sys

os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")


def main(arguments: list[str]) -> None:
    from mani_skill.trajectory import replay_trajectory

    from embodied_rl.sim.rendering import vulkan_available
    from embodied_rl.sim.robots.maniskill_state import no_render_materials

    drawing = vulkan_available()
    if not drawing:
        replay_trajectory.gym.make = functools.partial(replay_trajectory.gym.make, render_backend="none")
    with no_render_materials(active=not drawing):
        replay_trajectory.main(replay_trajectory.parse_args(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
