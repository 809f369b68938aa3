"""SimEnv: the class that a simulator's author writes. `embodied_rl.sim.factory` builds it and adapts other kinds of environments to it."""

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

    A simulator writes `spec`, `reset`, and its control step: `step`, or its two parts `advance` and `observe` if an observation can be
    left out. Everything else is a method with a default: pictures (`render`, `film_cameras`, `film_from`), saved episodes (`snapshot`,
    `restore`), physical state (`physics`, `set_physics`).

    Parts of varying size (`VariableSpec`) are object arrays: assign a `str`, an array or a JSON value to a row. Text actions
    arrive as an object array [n] of `str`.

    Row ``i`` of `StepBuffers` belongs to environment ``i``. A simulator fills the rows of the named environments and touches no
    other. It never resets by itself: the worker does, and keeps the final observation.
    """

    spec: SimSpec
    many_tasks: bool = False
    """Whether an episode's task follows from its seed; then `task_at` names it."""

    @abstractmethod
    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        """Start new episodes; the same seed gives the same episode. Fills ``out.observation`` only. ``options={"reconfigure": True}`` asks
        for an episode that does not depend on earlier ones, for simulators whose plain reset keeps something (ManiSkill)."""

    # ---- a control step, whole or in two parts ----------------------------------------------------------------------

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        """Advance each named environment by one control step with its row of `actions` [len(env_ids), A], in the simulator's units."""
        self.advance(env_ids, actions, out)
        self.observe(env_ids, out)

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        """Step as `step` does, with reward, flags and info; the rows of ``out.observation`` may stay unchanged.

        The worker plays the inner steps of an action chunk with it, then calls `observe` for the environments whose chunk or episode is
        over. A wrapper that needs every observation (a recording, a film, an expert) calls `step`.
        """
        self.step(env_ids, actions, out)

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:  # noqa: B027  # a default
        """Write the observations of the present states, after `advance` and before the next `reset`; by default `step` has written them.

        It changes nothing that the episode depends on, random generators included: the episode continues the same with or without this
        call. `env_ids` may be a part of those that advanced last, even if all environments step together.
        """

    def episodes_ended(self, env_ids: Sequence[int]) -> None:  # noqa: B027  # a default
        """Called when the episodes of these environments have ended, by the simulator's own rule, a step limit or the first success. Their
        last observation is still in the buffers, and a `reset` follows."""

    def close(self) -> None:  # noqa: B027  # a default
        """Release the simulator's resources. May be called twice."""

    def task_at(self, env_id: int) -> str:
        """The task of the running episode of one environment."""
        return self.spec.task

    # ---- pictures ---------------------------------------------------------------------------------------------------

    def render(self, env_id: int) -> np.ndarray:
        """Return an image [H, W, 3] uint8 of one environment. Raises UserError if rendering is not possible."""
        if self.spec.action.kind == "text":
            raise UserError(f"Task '{self.spec.task}' is text: environment {env_id} has no picture.")
        raise UserError(f"Simulator '{self.spec.task}' draws no pictures: its class has no method `render`.")

    def film_cameras(self, env_id: int) -> list[str]:
        """Names of the cameras that `film_from` takes; they may depend on the running episode's task. Empty if only `render` draws."""
        return []

    def film_from(self, env_id: int, camera: str) -> np.ndarray:
        """Return an image [H, W, 3] uint8 from one of `film_cameras`."""
        raise UserError(f"Simulator '{self.spec.task}' has no camera '{camera}'; choose 'default'.")

    # ---- saved episodes: `spec.snapshots` says "exact" or "approximate" -----------------------------------------------

    def snapshot(self, env_id: int) -> bytes:
        """The episode of one environment as bytes (`embodied_rl.sim.snapshots.encode_state`), by default from `_saved`. May set the live
        environment's own state again, so that the original and the copy continue alike.

        The worker saves its own part beside these bytes (last observation, return, length, seeds). The bytes hold everything else that the
        episode depends on: physics state and warm start, controllers, random generators, elapsed steps, wrappers.
        """
        return encode_state({"task": self.spec.task, **self._saved(env_id)})

    def restore(self, env_id: int, data: bytes) -> None:
        """Continue an episode that a simulator with the same arguments saved, in any process and any environment; writes no observation.
        Raises SnapshotError for bytes of another task or version."""
        tree = decode_state(data)
        require_task(tree, self.spec.task)
        try:
            self._take_up(env_id, tree)
        except UserError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SnapshotError(f"Snapshot of task '{self.spec.task}' is of another simulator or version of it: {error!r}.") from error

    def _saved(self, env_id: int) -> dict[str, Any]:
        """Plain values and arrays that the rest of one environment's episode depends on."""
        raise SnapshotError(f"Task '{self.spec.task}' has no snapshots: an episode is restored from its seed and actions.")

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        """The inverse of `_saved`."""
        raise SnapshotError(f"Task '{self.spec.task}' has no snapshots: an episode is restored from its seed and actions.")

    # ---- the physical state by name: what recordings keep beside the observation --------------------------------------

    def physics(self, env_id: int) -> dict[str, np.ndarray]:
        """{name: [...]} copies: ``actors/cube`` [13] and ``articulations/panda`` [13 + 2 · joints] in ManiSkill, ``qpos`` [nq], ``qvel``
        [nv], … in MuJoCo. Raises UserError if the task does not expose its state.

        Unlike a snapshot it holds only the bodies and joints (and what drives them), in a form that other programs read. The rest of the
        episode's state follows from its seed. Names and shapes are the same in all episodes of a simulator.
        """
        raise UserError(f"Simulator '{self.spec.task}' does not expose its physical state.")

    def set_physics(self, env_id: int, state: Mapping[str, np.ndarray]) -> None:
        """Set a state that `physics` returned, in a running episode of the same seed. Raises UserError as `physics` does."""
        raise UserError(f"Simulator '{self.spec.task}' does not take a physical state.")
