"""An EnvManager seen as a gymnasium.vector.VectorEnv, for libraries that know that interface."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from embodied_rl.errors import UserError
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import ActionSpec, Observation, TensorSpec, VariableSpec


class ManagerVectorEnv(VectorEnv):
    """Lockstep view of a manager: autoreset in the same step, final observations in ``infos["final_obs"]``.

    Observations are copies. A simulator whose only observation is ``state`` gives plain arrays [N, D]; others give dictionaries.
    Closing it closes the manager.
    """

    def __init__(self, manager: EnvManager) -> None:
        self.manager = manager
        self.num_envs = manager.num_slots
        spec = manager.spec
        parts: dict[str, gymnasium.Space[Any]] = {key: _space(part) for key, part in spec.observation.items()}
        self._plain = list(parts) == ["state"]
        self.single_observation_space = parts["state"] if self._plain else gymnasium.spaces.Dict(parts)
        self.single_action_space = _action_space(spec.action)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": ["rgb_array"]}
        self.render_mode = "rgb_array" if spec.can_render else None
        self._seed_round = 0

    def reset(self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes; with a seed, every later episode's seed follows from it. A list of seeds is refused: slots have their own."""
        if isinstance(seed, (list, tuple)):
            raise ValueError("Give one seed: each slot's seeds are derived from it.")
        seeds = None if seed is None else EpisodeSeeds.training(seed)
        self._seed_round = 0 if seed is not None else self._seed_round + 1
        batch = self.manager.reset(seeds, seed_round=self._seed_round)
        return self._copy(batch.observation), {}

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One step of every slot with actions in the simulator's units."""
        batch = self.manager.step(np.asarray(actions).reshape(self.num_envs, -1))
        infos: dict[str, Any] = {"success": batch.success.copy()} if self.manager.spec.reports_success else {}
        if batch.episodes:
            done = batch.done
            final = np.full(self.num_envs, None, dtype=object)
            for slot in np.flatnonzero(done):
                row = {key: part[slot].copy() for key, part in batch.final_observation.items()}
                final[slot] = row["state"] if self._plain else row
            infos |= {"final_obs": final, "_final_obs": done, "final_info": self._final_info(batch.episodes), "_final_info": done}
        return self._copy(batch.observation), batch.reward.astype(np.float64), batch.terminated.copy(), batch.truncated.copy(), infos

    def render(self) -> tuple[np.ndarray, ...]:
        return tuple(self.manager.render(range(self.num_envs)))

    def close_extras(self, **kwargs: Any) -> None:
        self.manager.close()

    def _final_info(self, episodes: tuple[Any, ...]) -> dict[str, Any]:
        returns, lengths, success = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, bool)
        for episode in episodes:
            returns[episode.slot], lengths[episode.slot], success[episode.slot] = (
                episode.episode_return,
                episode.length,
                episode.success_once,
            )
        return {"episode": {"r": returns, "l": lengths}, "is_success": success}

    def _copy(self, observation: Observation) -> Any:
        return observation["state"].copy() if self._plain else {key: part.copy() for key, part in observation.items()}


def _space(part: TensorSpec | VariableSpec) -> gymnasium.spaces.Box:
    if isinstance(part, VariableSpec):
        raise UserError(
            f"Observations of kind '{part.kind}' have no fixed space, so that this simulator cannot be a gymnasium.vector.VectorEnv."
        )
    kind = np.dtype(part.dtype)
    if kind.kind == "f":
        return gymnasium.spaces.Box(-np.inf, np.inf, part.shape, kind.type)
    limits = np.iinfo(kind) if kind.kind in "iu" else None
    return gymnasium.spaces.Box(limits.min if limits else 0, limits.max if limits else 1, part.shape, kind.type)


def _action_space(action: ActionSpec) -> gymnasium.Space[Any]:
    if action.kind == "discrete":
        return gymnasium.spaces.Discrete(action.num_actions)
    return gymnasium.spaces.Box(np.asarray(action.low, np.float32), np.asarray(action.high, np.float32), dtype=np.float32)
