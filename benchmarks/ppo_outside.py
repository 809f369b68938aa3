"""Sides of ppo_cpu.py that live in environments of their own: skrl, rsl_rl and Sample Factory.

Run by the interpreter of the peer's environment, so that it needs no part of our package. Each side runs the peer's own training
loop, unmodified; it stops at the gate between two iterations, and what is timed is timed from outside.

    <peer's python> benchmarks/ppo_outside.py skrl '{"task": "HalfCheetah-v5", …}'
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gate import Gate, Stop, gate_of_this_process

NEVER = 10**9
"""Steps: the gate ends a contender, not its own limit."""


@dataclass(frozen=True)
class Workload:
    """What all sides do alike, in words that no library owns."""

    task: str
    num_envs: int
    rollout_steps: int
    """Of every environment in an iteration."""
    num_epochs: int
    num_minibatches: int
    """Of an epoch."""
    hidden_sizes: tuple[int, ...]
    """Of the actor, and of a critic beside it; tanh."""
    init_log_std: float
    learning_rate: float
    adam_eps: float
    gamma: float
    gae_lambda: float
    clip: float
    value_coef: float
    entropy_coef: float
    max_grad_norm: float
    seed: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Workload:
        fields = json.loads(text)
        return Workload(**{**fields, "hidden_sizes": tuple(fields["hidden_sizes"])})


def timed(function: Callable[..., Any], tell: Callable[[float], None]) -> Callable[..., Any]:
    """`function`, whose seconds are told after each call."""

    def call(*arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments, **named)
        tell(time.perf_counter() - started)
        return result

    return call


def _vector_env(work: Workload) -> Any:
    """The environments as gymnasium steps them in one process."""
    import gymnasium

    def make() -> Any:
        return gymnasium.make(work.task, disable_env_checker=True)

    return gymnasium.vector.SyncVectorEnv([make] * work.num_envs, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)


def skrl(work: Workload, gate: Gate) -> None:
    """skrl's PPO agent under its SequentialTrainer; it always normalises advantages over the whole batch."""
    import torch
    from skrl.agents.torch.ppo import PPO
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
    from skrl.trainers.torch import SequentialTrainer

    class Policy(GaussianMixin, Model):
        def __init__(self, space: Any, actions: Any) -> None:
            Model.__init__(self, observation_space=space, action_space=actions, device="cpu")
            GaussianMixin.__init__(self, clip_actions=True)
            self.net = _network(space.shape[0], work.hidden_sizes, actions.shape[0])
            self.log_std = torch.nn.Parameter(torch.full((actions.shape[0],), work.init_log_std))

        def compute(self, inputs: Any, role: str = "") -> Any:
            return self.net(inputs["observations"]), {"log_std": self.log_std}

    class Value(DeterministicMixin, Model):
        def __init__(self, space: Any, actions: Any) -> None:
            Model.__init__(self, observation_space=space, action_space=actions, device="cpu")
            DeterministicMixin.__init__(self)
            self.net = _network(space.shape[0], work.hidden_sizes, 1)

        def compute(self, inputs: Any, role: str = "") -> Any:
            return self.net(inputs["observations"]), {}

    torch.manual_seed(work.seed)
    env: Any = wrap_env(_vector_env(work), verbose=False)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    with tempfile.TemporaryDirectory() as folder:
        agent = PPO(
            models={"policy": Policy(*spaces.values()), "value": Value(*spaces.values())},
            memory=RandomMemory(memory_size=work.rollout_steps, num_envs=work.num_envs, device="cpu"),
            **spaces,
            device="cpu",
            cfg={
                "rollouts": work.rollout_steps,
                "learning_epochs": work.num_epochs,
                "mini_batches": work.num_minibatches,
                "discount_factor": work.gamma,
                "gae_lambda": work.gae_lambda,
                "learning_rate": work.learning_rate,
                "grad_norm_clip": work.max_grad_norm,
                "ratio_clip": work.clip,
                "value_clip": 0.0,
                "entropy_loss_scale": work.entropy_coef,
                "value_loss_scale": work.value_coef,
                "time_limit_bootstrap": True,
                "experiment": {"directory": folder, "write_interval": 0, "checkpoint_interval": 0},
            },
        )
        before = agent.pre_interaction

        def at_the_gate(*, timestep: int, timesteps: int) -> None:
            if timestep % work.rollout_steps == 0:
                gate.begin()
            before(timestep=timestep, timesteps=timesteps)

        agent.pre_interaction = at_the_gate
        agent.update = timed(agent.update, lambda seconds: gate.add("update", seconds))
        env.step = timed(env.step, lambda seconds: gate.add("environment", seconds))
        gate.tell(threads=torch.get_num_threads(), processes=1)
        trainer = SequentialTrainer(cfg={"timesteps": NEVER, "headless": True, "disable_progressbar": True}, env=env, agents=agent)
        trainer.train()


def rsl_rl(work: Workload, gate: Gate) -> None:
    """rsl_rl's OnPolicyRunner; its environments are vectors of tensors, here gymnasium's."""
    import numpy as np
    import torch
    from rsl_rl.env import VecEnv
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict

    class Environments(VecEnv):
        def __init__(self) -> None:
            self.envs = _vector_env(work)
            self.num_envs, self.num_actions = work.num_envs, self.envs.single_action_space.shape[0]
            self.device, self.cfg = "cpu", {}
            self.max_episode_length = 1000
            self.episode_length_buf = torch.zeros(work.num_envs, dtype=torch.long)
            self._seen = self._tensors(self.envs.reset(seed=work.seed)[0])

        def _tensors(self, observation: Any) -> TensorDict:
            return TensorDict({"policy": torch.as_tensor(observation, dtype=torch.float32)}, batch_size=[work.num_envs])

        def get_observations(self) -> TensorDict:
            return self._seen

        def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict]:
            observation, reward, terminated, truncated, _ = self.envs.step(actions.numpy())
            self._seen = self._tensors(observation)
            ended = torch.from_numpy(np.logical_or(terminated, truncated))
            extras = {"time_outs": torch.from_numpy(truncated)}
            return self._seen, torch.as_tensor(reward, dtype=torch.float32), ended, extras

    torch.manual_seed(work.seed)
    networks = {"class_name": "MLPModel", "hidden_dims": list(work.hidden_sizes), "activation": "tanh"}
    gaussian = {"class_name": "GaussianDistribution", "init_std": math.exp(work.init_log_std), "std_type": "log"}
    env = Environments()
    runner = OnPolicyRunner(
        env,
        {
            "num_steps_per_env": work.rollout_steps,
            "save_interval": NEVER,
            "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
            "actor": {**networks, "distribution_cfg": gaussian},
            "critic": dict(networks),
            "algorithm": {
                "class_name": "PPO",
                "num_learning_epochs": work.num_epochs,
                "num_mini_batches": work.num_minibatches,
                "clip_param": work.clip,
                "gamma": work.gamma,
                "lam": work.gae_lambda,
                "value_loss_coef": work.value_coef,
                "entropy_coef": work.entropy_coef,
                "learning_rate": work.learning_rate,
                "max_grad_norm": work.max_grad_norm,
                "use_clipped_value_loss": False,
                "schedule": "fixed",
                "normalize_advantage_per_mini_batch": True,
            },
        },
        device="cpu",
    )
    acted, act = 0, runner.alg.act

    def at_the_gate(observation: Any) -> Any:
        nonlocal acted
        if acted % work.rollout_steps == 0:
            gate.begin()
        acted += 1
        return act(observation)

    runner.alg.act = at_the_gate  # type: ignore[method-assign]
    runner.alg.update = timed(runner.alg.update, lambda seconds: gate.add("update", seconds))  # type: ignore[method-assign]
    env.step = timed(env.step, lambda seconds: gate.add("environment", seconds))  # type: ignore[method-assign]
    gate.tell(threads=torch.get_num_threads(), processes=1)
    runner.learn(NEVER)


def sample_factory(work: Workload, gate: Gate) -> None:
    """Sample Factory's APPO in its serial mode: synchronous, sampler and learner in one process, so that it can stop at the gate.

    Its environments give observations by name; actor and critic are networks of their own (`actor_critic_share_weights=False`).
    """
    import torch
    from sample_factory.algo.learning.learner import Learner
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import run_rl

    register_env(work.task, _sample_factory_env)
    _environment_seconds.append(lambda seconds: gate.add("environment", seconds))
    train = Learner.train

    def gated(self: Learner, batch: Any) -> Any:
        started = time.perf_counter()
        result = train(self, batch)
        gate.add("update", time.perf_counter() - started)
        gate.begin()
        return result

    Learner.train = gated
    rows = work.rollout_steps * work.num_envs
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "env": work.task, "train_dir": folder, "device": "cpu", "seed": work.seed, "serial_mode": True, "async_rl": False,
            "num_workers": 1, "num_envs_per_worker": work.num_envs, "worker_num_splits": 1, "batched_sampling": False,
            "rollout": work.rollout_steps, "batch_size": rows // work.num_minibatches, "num_batches_per_epoch": work.num_minibatches,
            "num_epochs": work.num_epochs, "shuffle_minibatches": True, "use_rnn": False, "gamma": work.gamma,
            "gae_lambda": work.gae_lambda, "ppo_clip_ratio": work.clip, "ppo_clip_value": 1e9, "learning_rate": work.learning_rate,
            "adam_eps": work.adam_eps, "max_grad_norm": work.max_grad_norm, "value_loss_coeff": work.value_coef,
            "exploration_loss_coeff": work.entropy_coef, "normalize_input": False, "normalize_returns": False, "nonlinearity": "tanh",
            "actor_critic_share_weights": False, "adaptive_stddev": False, "initial_stddev": math.exp(work.init_log_std),
            "with_wandb": False, "save_every_sec": NEVER, "save_best_every_sec": NEVER, "log_to_file": False,
        }  # fmt: skip
        arguments = [f"--{name}={value}" for name, value in options.items()]
        arguments += ["--encoder_mlp_layers", *map(str, work.hidden_sizes)]
        parser, _ = parse_sf_args(arguments)
        gate.tell(threads=torch.get_num_threads(), processes=1)
        gate.begin()
        run_rl(parse_full_cfg(parser, arguments))


_environment_seconds: list[Callable[[float], None]] = []
"""Who is told what a step of Sample Factory's environments took; empty in the process in which it looks at their spaces."""


def _sample_factory_env(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """At the top of the module, for it travels to another process by name."""
    import gymnasium

    env = gymnasium.make(name, disable_env_checker=True)
    for tell in _environment_seconds:
        env.step = timed(env.step, tell)  # type: ignore[method-assign]
    return env


def _network(size: int, hidden_sizes: tuple[int, ...], num_outputs: int) -> Any:
    from torch import nn

    layers: list[nn.Module] = []
    for width in hidden_sizes:
        layers += [nn.Linear(size, width), nn.Tanh()]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, num_outputs))


SIDES: dict[str, Callable[[Workload, Gate], None]] = {"skrl": skrl, "rsl_rl": rsl_rl, "sample_factory": sample_factory}


if __name__ == "__main__":
    with contextlib.suppress(Stop):
        SIDES[sys.argv[1]](Workload.from_json(sys.argv[2]), gate_of_this_process(rest="policy"))
