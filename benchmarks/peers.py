"""stable-baselines3's PPO and SAC with the hyper-parameters of one of our configurations, and nothing that ours does not have."""

from __future__ import annotations

import functools
from typing import Any

from embodied_rl.config import PolicyConfig, TrainConfig
from embodied_rl.errors import UserError

MAKE_ARGUMENTS = {"disable_env_checker": True}
"""Of gymnasium.make on all sides: ours leaves the checker out, so the peers get the same environment."""


def ppo_arguments(config: TrainConfig) -> dict[str, Any]:
    """Arguments of ``stable_baselines3.PPO`` that mean what `config` means.

    What both do without being told: orthogonal weights (gain sqrt 2; 0.01 for the actor's last layer, 1 for the critic's), a
    mean squared error of the values, one Adam for all parameters, truncated episodes bootstrapped from their final value.

    Raises:
        UserError: `config` asks for something that stable-baselines3 does not have.
    """
    algorithm, policy, sim = config.algorithm, config.policy, config.sim
    differences = {
        "algorithm.clip_low != algorithm.clip_high": algorithm.clip_low != algorithm.clip_high,
        "algorithm.dual_clip": algorithm.dual_clip is not None,
        # Theirs clips the prediction; ours takes the larger of both errors.
        "algorithm.value_clip": algorithm.value_clip is not None,
        # Theirs looks at each minibatch against 1.5 times the target; ours at the mean of an epoch.
        "algorithm.target_kl": algorithm.target_kl is not None,
        "algorithm.lr_schedule": algorithm.lr_schedule != "constant",
        "algorithm.normalize_advantage != minibatch": algorithm.normalize_advantage != "minibatch",
        "policy.distribution": policy.distribution != "gaussian",
        "sim.max_episode_steps": sim.max_episode_steps is not None,
        # `vec_env` makes a registered task as it is; our own scene does as it is told.
        "sim.kwargs": sim.name != "pixel_reach" and bool(sim.kwargs),
        "sim.success_ends_episode": sim.name != "pixel_reach" and sim.success_ends_episode,
    }
    _refuse(differences)
    pixels = policy.encoder == "cnn"
    hidden = list(policy.hidden_sizes[1:] if pixels else policy.hidden_sizes)
    return {
        "policy": "CnnPolicy" if pixels else "MlpPolicy",
        "learning_rate": algorithm.learning_rate,
        "n_steps": algorithm.rollout_steps,
        "batch_size": algorithm.minibatch_size,
        "n_epochs": algorithm.num_epochs,
        "gamma": algorithm.gamma,
        "gae_lambda": algorithm.gae_lambda,
        "clip_range": algorithm.clip_high,
        "clip_range_vf": None,
        "normalize_advantage": True,
        "ent_coef": algorithm.entropy_coef,
        "vf_coef": algorithm.value_coef,
        "max_grad_norm": algorithm.max_grad_norm,
        "target_kl": None,
        "seed": config.seed,
        "device": "cpu",
        "policy_kwargs": {
            "net_arch": {"pi": hidden, "vf": hidden},
            "activation_fn": _activation(policy.activation),
            "log_std_init": policy.init_log_std,
            "ortho_init": True,
            "optimizer_kwargs": {"eps": algorithm.adam_eps},
            **({"features_extractor_class": _trunk(), "features_extractor_kwargs": {"config": policy}} if pixels else {}),
        },
    }


def sac_arguments(config: TrainConfig) -> dict[str, Any]:
    """Arguments of ``stable_baselines3.SAC`` that mean what `config` means.

    Ours also scales large gradients down, which costs it a little; theirs has a standard deviation for each state, which costs it a little.

    Raises:
        UserError: `config` asks for something that stable-baselines3 does not have.
    """
    algorithm, policy, options = config.algorithm, config.policy, config.algorithm.off_policy
    assert options is not None
    _refuse(
        {
            "algorithm.off_policy.update": options.update != "sac",
            "algorithm.off_policy.recorded_share": options.recorded_share != 0,
            "algorithm.off_policy.layer_norm": options.layer_norm,
            "algorithm.off_policy.target_critics": options.target_critics != options.num_critics,
            "algorithm.off_policy.policy_every": options.policy_every != 1,
            "algorithm.off_policy.entropy_in_target": not options.entropy_in_target,
            "algorithm.lr_schedule != constant": algorithm.lr_schedule != "constant",
            # One for all networks of theirs; our critics always have this one.
            "policy.activation != relu": policy.activation != "relu",
            "sim.kwargs": bool(config.sim.kwargs),
        }
    )
    return {
        "policy": "MlpPolicy",
        "learning_rate": algorithm.learning_rate,
        "buffer_size": options.replay_capacity,
        "learning_starts": options.warmup_steps,
        "batch_size": algorithm.minibatch_size,
        "tau": options.target_rate,
        "gamma": algorithm.gamma,
        "train_freq": algorithm.rollout_steps,
        "gradient_steps": round(config.steps_per_iteration * options.updates_per_step),
        "n_steps": options.n_step,
        "ent_coef": f"auto_{options.init_entropy_coef}",
        "target_entropy": "auto" if options.target_entropy is None else options.target_entropy,
        "seed": config.seed,
        "device": "cpu",
        "policy_kwargs": {
            "net_arch": {"pi": list(policy.hidden_sizes), "qf": list(options.hidden_sizes)},
            "n_critics": options.num_critics,
            "log_std_init": policy.init_log_std,
            "optimizer_kwargs": {"eps": algorithm.adam_eps},
        },
    }


def _refuse(differences: dict[str, bool]) -> None:
    if any(differences.values()):
        names = ", ".join(name for name, differs in differences.items() if differs)
        raise UserError(f"stable-baselines3 cannot do the same: {names}. Leave these at the values of the benchmark's tasks.")


def _trunk() -> Any:
    """stable-baselines3's NatureCNN with the layers of one of our configurations; ours has a LayerNorm more."""
    import torch
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from torch import nn

    class Trunk(BaseFeaturesExtractor):
        def __init__(self, observation_space: Any, config: PolicyConfig) -> None:
            super().__init__(observation_space, config.hidden_sizes[0])
            layers: list[nn.Module] = []
            channels = observation_space.shape[0]
            for width, kernel, stride in zip(config.cnn_channels, config.cnn_kernels, config.cnn_strides, strict=True):
                layers += [nn.Conv2d(channels, width, kernel, stride), nn.ReLU()]
                channels = width
            self.cnn = nn.Sequential(*layers, nn.Flatten())
            with torch.no_grad():
                size = self.cnn(torch.zeros(1, *observation_space.shape)).shape[1]
            self.linear = nn.Sequential(nn.Linear(size, config.hidden_sizes[0]), nn.ReLU())

        def forward(self, observations: torch.Tensor) -> torch.Tensor:
            return self.linear(self.cnn(observations))

    return Trunk


def vec_env(config: TrainConfig, processes: bool = False) -> Any:
    """The environments of `config` as stable-baselines3 makes them (with its Monitor, for ours counts episodes too).

    Args:
        processes: SubprocVecEnv with its default start method, else DummyVecEnv.
    """
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    assert config.sim.task is not None
    kind = SubprocVecEnv if processes else DummyVecEnv
    if config.sim.name == "pixel_reach":
        scene = functools.partial(_pixel_reach, config.sim.kwargs, config.sim.success_ends_episode)
        envs: Any = make_vec_env(scene, config.sim.num_slots, seed=config.seed, vec_env_cls=kind)
    else:
        envs = make_vec_env(config.sim.task, config.sim.num_slots, seed=config.seed, env_kwargs=MAKE_ARGUMENTS, vec_env_cls=kind)
    if config.policy.normalize_observation or config.algorithm.normalize_reward:
        envs = VecNormalize(
            envs,
            norm_obs=config.policy.normalize_observation,
            norm_reward=config.algorithm.normalize_reward,
            clip_obs=config.policy.observation_clip,
            clip_reward=config.algorithm.reward_clip,
            gamma=config.algorithm.gamma,
        )
    return envs


def _pixel_reach(arguments: dict[str, Any], success_ends_episode: bool) -> Any:
    """Our own scene as a gymnasium.Env: the same class, one environment and one drawing context each."""
    import gymnasium
    import numpy as np

    from embodied_rl.sim.robots.pixel_reach import PixelReach
    from embodied_rl.types import StepBuffers

    class PixelReachEnv(gymnasium.Env):
        metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium's own way

        def __init__(self) -> None:
            self._sim = PixelReach(1, **arguments)
            self._rows = StepBuffers.allocate(self._sim.spec, 1)
            size = self._sim.spec.tensors["rgb"].shape
            self.observation_space = gymnasium.spaces.Box(0, 255, size, np.uint8)
            self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            self._sim.reset([0], [int(self.np_random.integers(2**31))], self._rows)
            return self._rows.observation["rgb"][0].copy(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self._sim.step([0], np.asarray(action)[None], self._rows)
            ended = bool(self._rows.truncated[0]) or (success_ends_episode and bool(self._rows.success[0]))
            return self._rows.observation["rgb"][0].copy(), float(self._rows.reward[0]), False, ended, {}

        def close(self) -> None:
            self._sim.close()

    return PixelReachEnv()


def _activation(name: str) -> Any:
    from torch import nn

    return {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}[name]
