"""SimEnv: what a simulator's author writes. `embodied_rl.sim.factory` builds it, and adapts what else there is to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.snapshots import SnapshotError, decode_state, encode_state, require_task
from embodied_rl.types import SimSpec, StepBuffers


class SimEnv(ABC):
    """A batch of environments of one simulator in one process: the base class of every simulator.

    A simulator writes `spec`, `reset`, and its control step: `step`, or, where an observation can be left out, its two parts `advance`
    and `observe`. What else a simulator can do is a method with a default: draw (`render`, `film_cameras`, `film_from`), save episodes
    (`snapshot`, `restore`), show its physical state (`physics`, `set_physics`).

    Parts of varying size (`VariableSpec`) are object arrays: assign a `str`, an array or what JSON holds to a row. Text actions
    arrive as an object array [n] of `str`.

    Row ``i`` of `StepBuffers` belongs to environment ``i``. A simulator fills the rows of the environments it was asked
    about and touches no other; it never resets by itself (the worker does, and keeps the final observation).
    """

    spec: SimSpec
    many_tasks: bool = False
    """Whether an episode's task follows from its seed: then `task_at` names it."""

    @abstractmethod
    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        """Start new episodes; the same seed gives the same episode. Fills ``out.observation`` only.

        ``options={"reconfigure": True}`` asks for an episode that owes nothing to the ones before it, where a plain
        reset keeps something (ManiSkill).
        """

    # ---- a control step, whole or in two parts ----------------------------------------------------------------------

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        """Advance each named environment by one control step with its row of `actions` [len(env_ids), A], in the simulator's units."""
        self.advance(env_ids, actions, out)
        self.observe(env_ids, out)

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        """As `step`, reward, flags and info included, but the rows of ``out.observation`` may be left as they are.

        The worker plays the inner steps of an action chunk with it, and asks `observe` for those environments whose chunk or episode is
        over there. A wrapper that needs every observation (a recording, a film, an expert) calls `step`.
        """
        self.step(env_ids, actions, out)

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:  # noqa: B027  # a default
        """Write the observations of the present states, after `advance` and before the next `reset`; by default `step` has written them.

        It changes nothing that the episode depends on, random generators included: the same episode follows whether it is called after
        a step or not. The names may be some of those that were advanced last, also where all environments step together.
        """

    def episodes_ended(self, env_ids: Sequence[int]) -> None:  # noqa: B027  # a default
        """The episodes of these environments are over by whatever rule: the simulator's own, a limit of steps, or its first success. Their
        last observation is still in the buffers, and a `reset` follows."""

    def close(self) -> None:  # noqa: B027  # a default
        """Let go of what the simulator holds. May be called twice."""

    def task_at(self, env_id: int) -> str:
        """The task of the running episode of one environment."""
        return self.spec.task

    # ---- pictures ---------------------------------------------------------------------------------------------------

    def render(self, env_id: int) -> np.ndarray:
        """Return an image [H, W, 3] uint8 of one environment. Raises UserError where rendering is not possible."""
        if self.spec.action.kind == "text":
            raise UserError(f"Task '{self.spec.task}' is text: there is no picture of environment {env_id} to draw.")
        raise UserError(f"Simulator '{self.spec.task}' draws no pictures: its class has no method `render`.")

    def film_cameras(self, env_id: int) -> list[str]:
        """Names of the cameras that `film_from` takes; they may depend on the running episode's task. None where `render` is all."""
        return []

    def film_from(self, env_id: int, camera: str) -> np.ndarray:
        """Return an image [H, W, 3] uint8. Raises UserError for a camera that there is not."""
        raise UserError(f"Simulator '{self.spec.task}' has no camera '{camera}'; choose 'default'.")

    # ---- saved episodes: `spec.snapshots` says "exact" or "approximate" -----------------------------------------------

    def snapshot(self, env_id: int) -> bytes:
        """The episode of one environment (`embodied_rl.sim.snapshots.encode_state`), by default what `_saved` gives; may set the live
        environment's own state again, so that both continue alike.

        The worker keeps what is its own beside the simulator's bytes (the last observation, return, length, seeds). Whatever the episode
        still depends on is in the bytes: physics state and warm start, controllers, random generators, elapsed steps, wrappers.
        """
        return encode_state({"task": self.spec.task, **self._saved(env_id)})

    def restore(self, env_id: int, data: bytes) -> None:
        """Take up an episode saved by a simulator made with the same arguments, in this process or another, by this environment or
        another; writes no observation. Raises SnapshotError for bytes of another task or version."""
        tree = decode_state(data)
        require_task(tree, self.spec.task)
        self._take_up(env_id, tree)

    def _saved(self, env_id: int) -> dict[str, Any]:
        """What the rest of one environment's episode depends on, as plain values and arrays."""
        raise SnapshotError(f"Task '{self.spec.task}' has no snapshots: an episode is taken up by its seed and actions.")

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        """The inverse of `_saved`."""
        raise SnapshotError(f"Task '{self.spec.task}' has no snapshots: an episode is taken up by its seed and actions.")

    # ---- the physical state by name: what recordings keep beside the observation --------------------------------------

    def physics(self, env_id: int) -> dict[str, np.ndarray]:
        """{name: [...]} copies: ``actors/cube`` [13] and ``articulations/panda`` [13 + 2 · joints] in ManiSkill, ``qpos`` [nq], ``qvel``
        [nv], … in MuJoCo. Raises UserError for a task that keeps it where we do not look.

        Unlike a snapshot it is no more than the bodies and joints (and what drives them), in a form that other programs read; what else
        the episode depends on follows from its seed. Names and shapes are the same in all episodes of a simulator.
        """
        raise UserError(f"Simulator '{self.spec.task}' does not show its physical state.")

    def set_physics(self, env_id: int, state: Mapping[str, np.ndarray]) -> None:
        """Set what `physics` gave, in a running episode of the same seed. Raises UserError as `physics`."""
        raise UserError(f"Simulator '{self.spec.task}' does not take a physical state.")
