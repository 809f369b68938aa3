"""`ManiSkillSim` with all environments of a process in one batch: the same numbers, at a fraction of the Python per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from embodied_rl.sim.robots.maniskill_batch.env import make_batched
from embodied_rl.sim.robots.maniskill_batch.graft import GraftedState, Grafts
from embodied_rl.sim.robots.maniskill_batch.views import EnvView
from embodied_rl.sim.robots.maniskill_observation import named_parts, observing
from embodied_rl.sim.robots.maniskill_patches import no_render_materials
from embodied_rl.sim.robots.maniskill_sim import ManiSkillSim
from embodied_rl.types import StepBuffers


class ManiSkillBatchSim(ManiSkillSim):
    """What `ManiSkillSim` does, with equal numbers; `envs` are views of the batch's rows.

    Raises:
        UnsupportedTask: the task cannot be stepped as a batch.
    """

    def _build(self, registered: Any, made: dict[str, Any], num_envs: int) -> None:
        self._first = registered.make(**made)  # an environment by itself, whose scenes are grafted into the batch
        self._batch = make_batched(registered, num_envs, made)
        self._grafts = Grafts(self._batch, self._first, self._render)
        self._views = [EnvView(self._batch, i) for i in range(num_envs)]
        self.envs = list(self._views)
        self._states = [GraftedState(self._grafts, i) for i in range(num_envs)]
        self._info: dict[str, Any] = {}
        """Of all environments, from the step that was not observed."""
        if not self._grafts.frequency:
            self._batch.begin((0,), (0,), {})  # as its first environment would be asked for its spec

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        asked = dict(options or {})
        anew = [bool(asked.get("reconfigure")) or self._grafts.rebuilds(i) for i in env_ids]
        with torch.inference_mode(), no_render_materials(active=any(anew) and not self._render):
            plain = [(i, int(seed)) for i, seed, builds in zip(env_ids, seeds, anew, strict=True) if not builds]
            for i, seed, builds in zip(env_ids, seeds, anew, strict=True):
                if builds:
                    observation = self._grafts.begin(i, int(seed), asked)
                    self._views[i].forget()
                    self._write_rows(out, [i], observation, [0])
            if plain:
                rows = [i for i, _ in plain]
                observation = self._batch.begin(rows, [seed for _, seed in plain], asked)
                for i in rows:
                    self._grafts.began(i)
                self._write_rows(out, rows, observation, rows)
        for i in env_ids:
            self._elapsed[i] = 0

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        """See `SimEnv`."""
        rows = list(env_ids)
        with torch.inference_mode():
            self._write_rows(out, rows, self._batch.look(rows, self._info), rows)

    def _step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers, observed: bool) -> None:
        """One control step of these environments; the others' simulations do not move. Raises ValueError for NaN in an action."""
        rows = list(env_ids)
        given = np.asarray(actions, np.float32)
        if np.isnan(given).any():
            wrong = [i for i, row in zip(rows, given, strict=True) if np.isnan(row).any()]
            raise ValueError(f"Actions cannot be NaN: those of environments {wrong} of '{self.spec.task}' are.")
        full = np.zeros((len(self.envs), given.shape[1]), np.float32)
        full[rows] = given
        with torch.inference_mode():
            batch: Any = torch.from_numpy(full)
            if self._robots:
                batch = {robot: batch[:, columns] for robot, columns in self._robots.items()}
            with observing(self._batch, observed):
                observation, reward, info = self._batch.advance(rows, batch)
            if observed:
                self._write_rows(out, rows, observation, rows)
            else:
                self._info = info
            out.reward[rows] = reward.reshape(-1).numpy()[rows]
            columns = _columns(info, len(self.envs))
        for flag, key in ((out.terminated, "fail"), (out.success, "success")):
            flag[rows] = np.asarray(columns[key], bool)[rows] if key in columns else False
        for i in rows:
            self._elapsed[i] += 1
            out.truncated[i] = self._limit is not None and self._elapsed[i] >= self._limit
            out.info[i] = {key: column[i] for key, column in columns.items()}

    def restore(self, env_id: int, data: bytes) -> None:
        super().restore(env_id, data)
        self._views[env_id].forget()

    def close(self) -> None:
        self._batch.close()
        self._first.close()

    def _write_rows(self, out: StepBuffers, rows: Sequence[int], observation: Any, source: Sequence[int]) -> None:
        everybody = len(source) == len(self.envs) and list(source) == list(range(len(source)))
        for key, part in named_parts(observation).items():
            array = part.numpy()
            out.observation[key][rows] = array if everybody else array[list(source)]


def _columns(info: Mapping[str, Any], num_envs: int) -> dict[str, list[Any]]:
    """The task's info, by environment. Leaves out single numbers (means over the batch), which describe no one environment."""
    return {key: value.reshape(-1).tolist() for key, value in info.items() if isinstance(value, torch.Tensor) and value.numel() == num_envs}
