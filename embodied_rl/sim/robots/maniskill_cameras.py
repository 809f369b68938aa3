"""Pictures of a ManiSkill scene from a camera of the user's choice: one of those for people, or one of the task's or robot's sensors."""

from __future__ import annotations

from typing import Any

import numpy as np


def film_cameras(env: Any) -> list[str]:
    """Names of the cameras for people, then of those that are sensors."""
    scene = env.unwrapped.scene
    return list(dict.fromkeys([*scene.human_render_cameras, *scene.sensors]))


def film_from(env: Any, camera: str) -> np.ndarray:
    """One picture [H, W, 3] uint8 of the first scene; `camera` is one of `film_cameras`."""
    base = env.unwrapped
    if camera in base.scene.human_render_cameras:
        return base.render_rgb_array(camera).cpu().numpy()[0]
    # What ManiSkill hides from sensors (the marker of a goal, say) stays hidden: the picture is what the sensor sees.
    for hidden in base._hidden_objects:
        hidden.hide_visual()
    base.scene.update_render(update_sensors=True, update_human_render_cameras=False)
    sensor = base.scene.sensors[camera]
    sensor.capture()
    observed = sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)
    return observed["rgb"].cpu().numpy()[0]
