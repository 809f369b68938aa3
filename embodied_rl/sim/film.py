"""A simulator that can be filmed: it keeps the last picture of an episode, which the automatic reset would lose."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.registry import load_target
from embodied_rl.sim.env import SimEnv, SimFactory
from embodied_rl.types import StepBuffers


def filmed(config: SimConfig, size: int) -> SimConfig:
    """The same simulator, made for pictures of about `size` pixels a side where it can choose.

    A fault ends the filming: a driver that kills the process does so every time, and trying again only takes longer to say so.
    """
    kwargs = {"target": config.target, "inner_task": config.task, "inner_kwargs": config.kwargs, "extra": config.extra, "size": size}
    return dataclasses.replace(config, target="embodied_rl.sim.film:FilmedSim", task=None, kwargs=kwargs, on_fault="stop")


class FilmedSim:
    """Passes everything on to the simulator named by `target`; implements `SimEnv`.

    The first `render` of an environment after it was reset at the end of an episode shows that episode's last moment;
    the next one shows the present again.
    """

    def __init__(
        self, num_envs: int, target: str, inner_task: str | None, inner_kwargs: Mapping[str, Any], extra: str | None, size: int
    ) -> None:
        parameters = inspect.signature(load_target(target, extra=extra)).parameters
        wanted = {"render": True, "render_size": size}
        # Simulators that must know beforehand that they will draw say so by taking these.
        drawing = {name: value for name, value in wanted.items() if name in parameters}
        self._sim: SimEnv = SimFactory(target, inner_task, {**drawing, **inner_kwargs}, extra).make(num_envs)
        self.spec = self._sim.spec
        self._stepped: set[int] = set()
        self._last: dict[int, np.ndarray] = {}

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for env_id in env_ids:
            if env_id in self._stepped:
                self._stepped.discard(env_id)
                self._last[env_id] = self._draw(env_id)
        self._sim.reset(env_ids, seeds, out, options)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        self._sim.step(env_ids, actions, out)
        self._stepped.update(env_ids)
        for env_id in env_ids:
            self._last.pop(env_id, None)

    def render(self, env_id: int) -> np.ndarray:
        """Picture [H, W, 3] uint8. Raises UserError where the task or this machine cannot draw."""
        kept = self._last.pop(env_id, None)
        return self._draw(env_id) if kept is None else kept

    def close(self) -> None:
        self._sim.close()

    def _draw(self, env_id: int) -> np.ndarray:
        try:
            # Some simulators hand out the buffer that they draw the next picture into.
            return np.array(self._sim.render(env_id), np.uint8)
        except UserError:
            raise
        except Exception as error:  # drivers fail in their own ways: OpenGL, Vulkan, GLFW and pygame share no base class
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"Task '{self.spec.task}' cannot be drawn on this machine ({reason}). "
                "`python -m embodied_rl.doctor` tries every way of drawing and names the packages to install."
            ) from error
