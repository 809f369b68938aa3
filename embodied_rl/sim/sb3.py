"""An EnvManager seen as stable-baselines3's VecEnv (Raffin et al. 2021, "Stable-Baselines3", https://stable-baselines3.readthedocs.io)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.sim.robots.spaces import info_row
from embodied_rl.sim.vector import ManagerVectorEnv

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as missing:
    raise MissingExtraError("embodied_rl.sim.sb3", "dev", missing) from missing


class SB3VecEnv(VecEnv):
    """A view of worker processes on which `stable_baselines3` can train: ``PPO("MlpPolicy", SB3VecEnv(make_vec_env("cartpole", 8)))``.

    ``infos`` have what SB3 reads: ``terminal_observation`` and ``TimeLimit.truncated`` of an episode's last step, ``episode`` (its return
    ``r`` and length ``l``) and ``is_success``. Closing it closes the manager.
    """

    def __init__(self, view: ManagerVectorEnv) -> None:
        """Raises UserError for a view with another autoreset mode than SAME_STEP, and for spaces that SB3 lacks."""
        mode = view.metadata["autoreset_mode"]
        if mode is not AutoresetMode.SAME_STEP:
            raise UserError(f"stable-baselines3 needs a view with autoreset_mode SAME_STEP, got {mode.name}.")
        space: gymnasium.Space[Any] = view.single_observation_space
        inner = space.spaces.values() if isinstance(space, gymnasium.spaces.Dict) else [space]
        composed = (gymnasium.spaces.Dict, gymnasium.spaces.Tuple, gymnasium.spaces.Text)
        if any(isinstance(part, composed) for part in inner):
            raise UserError(f"stable-baselines3 supports neither texts nor nested spaces, got the observation space {space}.")
        self.view = view
        self._actions: np.ndarray | None = None
        super().__init__(view.num_envs, space, view.single_action_space)

    def reset(self) -> Any:
        """Begin new episodes: once with the seeds that `seed` chose, later with the next ones."""
        chosen = [None if seed is None else seed % 2**31 for seed in self._seeds]
        observation, _ = self.view.reset(seed=None if chosen[0] is None else chosen)
        self._reset_seeds()
        self.reset_infos = [{} for _ in range(self.num_envs)]
        return observation

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        observation, reward, terminated, truncated, step_info = self.view.step(self._actions)
        done = terminated | truncated
        infos = []
        for slot in range(self.num_envs):
            info = info_row(step_info, slot)
            if done[slot]:
                final = info.pop("final_info", {})
                info["terminal_observation"] = info.pop("final_obs")
                info["TimeLimit.truncated"] = bool(truncated[slot] and not terminated[slot])
                if "episode" in final:
                    info["episode"] = {"r": float(final["episode"]["r"]), "l": int(final["episode"]["l"])}
                    info["is_success"] = bool(final["is_success"])
            infos.append(info)
        return observation, reward.astype(np.float32), done, infos

    def close(self) -> None:
        self.view.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        return self.view.render()

    def get_attr(self, attr_name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        """``render_mode`` and ``spec``. Raises AttributeError for anything else, which is in other processes."""
        known = {"render_mode": self.view.render_mode, "spec": None}
        if attr_name not in known:
            raise AttributeError(f"The environments are in worker processes: only render_mode and spec can be read, not {attr_name!r}.")
        return [known[attr_name] for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: int | Iterable[int] | None = None) -> None:
        raise UserError(f"The environments are in worker processes: {attr_name!r} cannot be set. Pass it to make_vec_env.")

    def env_method(self, method_name: str, *args: Any, indices: int | Iterable[int] | None = None, **kwargs: Any) -> list[Any]:
        raise UserError(f"The environments are in worker processes: {method_name!r} cannot be called.")

    def env_is_wrapped(self, wrapper_class: type[gymnasium.Wrapper], indices: int | Iterable[int] | None = None) -> list[bool]:
        """Whether statistics exist, as `Monitor` provides them; no other wrapper is present."""
        from stable_baselines3.common.monitor import Monitor

        return [issubclass(wrapper_class, Monitor) for _ in self._get_indices(indices)]
