"""SAPIEN's pictures in tests."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from embodied_rl.sim.rendering import configure_rendering, vulkan_available


@cache
def sapien_draws() -> object | None:
    """Something of SAPIEN's where it can draw, else None. What it computes for the first picture, in 6.5 s, it keeps as long as this."""
    configure_rendering()
    if find_spec("sapien") is None or not vulkan_available():
        return None
    import sapien

    return sapien.render.RenderSystem(sapien.Device("cpu"))
