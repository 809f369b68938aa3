"""stable-baselines3's PPO with the hyper-parameters of one of our configurations, and nothing that ours does not have."""

from __future__ import annotations

from typing import Any

from embodied_rl.config import TrainConfig
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
        "policy.encoder": policy.encoder != "mlp",
        # `vec_env` makes the registered task as it is.
        "sim.kwargs": bool(sim.kwargs),
        "sim.max_episode_steps": sim.max_episode_steps is not None,
        "sim.success_ends_episode": sim.success_ends_episode,
    }
    if any(differences.values()):
        names = ", ".join(name for name, differs in differences.items() if differs)
        raise UserError(f"stable-baselines3 cannot do the same: {names}. Leave these at the values of experiment=halfcheetah.")
    return {
        "policy": "MlpPolicy",
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
            "net_arch": {"pi": list(policy.hidden_sizes), "vf": list(policy.hidden_sizes)},
            "activation_fn": _activation(policy.activation),
            "log_std_init": policy.init_log_std,
            "ortho_init": True,
            "optimizer_kwargs": {"eps": algorithm.adam_eps},
        },
    }


def vec_env(config: TrainConfig, processes: bool = False) -> Any:
    """The environments of `config` as stable-baselines3 makes them (with its Monitor, for ours counts episodes too).

    Args:
        processes: SubprocVecEnv with its default start method, else DummyVecEnv.
    """
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    assert config.sim.task is not None
    kind = SubprocVecEnv if processes else DummyVecEnv
    envs: Any = make_vec_env(config.sim.task, config.sim.num_slots, seed=config.seed, env_kwargs=MAKE_ARGUMENTS, vec_env_cls=kind)
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


def _activation(name: str) -> Any:
    from torch import nn

    return {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}[name]
