"""PPO in one plain script, in the structure that CleanRL published: the third side of the comparison of speed.

One process steps the environments (SyncVectorEnv), a rollout lies in preallocated tensors, the agent is asked for action,
log-probability and value at every step, advantages are a backward loop over tensors, and the update is eager torch over
shuffled minibatches. Written from the structure that Huang et al. describe ("CleanRL: High-quality Single-file
Implementations of Deep Reinforcement Learning Algorithms", 2022); no code is theirs.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import gymnasium
import numpy as np
import torch
from peers import MAKE_ARGUMENTS
from torch import Tensor, nn
from torch.distributions.normal import Normal

from embodied_rl.config import TrainConfig

if TYPE_CHECKING:
    from gate import Gate


class Agent(nn.Module):
    """Separate tanh networks for the mean of a Gaussian and for the value; a standard deviation that depends on nothing."""

    def __init__(self, observation_size: int, action_size: int, hidden_sizes: tuple[int, ...], init_log_std: float) -> None:
        super().__init__()
        self.critic = _network(observation_size, hidden_sizes, 1, 1.0)
        self.actor_mean = _network(observation_size, hidden_sizes, action_size, 0.01)
        self.actor_log_std = nn.Parameter(torch.full((1, action_size), init_log_std))

    def value(self, observation: Tensor) -> Tensor:
        """[B, D] → [B]"""
        return self.critic(observation).flatten()

    def action_and_value(self, observation: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Action [B, A] (sampled where none is given), its log-probability [B], the entropy [B] and the value [B]."""
        mean = self.actor_mean(observation)
        distribution = Normal(mean, self.actor_log_std.expand_as(mean).exp())
        if action is None:
            action = distribution.sample()
        return action, distribution.log_prob(action).sum(1), distribution.entropy().sum(1), self.value(observation)


class Storage:
    """One rollout, [T, N, ...] tensors."""

    def __init__(self, steps: int, num_envs: int, observation_size: int, action_size: int) -> None:
        self.observation = torch.zeros(steps, num_envs, observation_size)
        self.action = torch.zeros(steps, num_envs, action_size)
        self.log_prob = torch.zeros(steps, num_envs)
        self.reward = torch.zeros(steps, num_envs)
        self.done = torch.zeros(steps, num_envs)
        """Whether the observation of this step begins an episode."""
        self.value = torch.zeros(steps, num_envs)


def advantages(storage: Storage, next_value: Tensor, next_done: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """GAE (Schulman et al. 2016), and returns, both [T, N]; every end of an episode counts as terminal."""
    steps = storage.reward.shape[0]
    result = torch.zeros_like(storage.reward)
    running = torch.zeros_like(next_value)
    for t in reversed(range(steps)):
        done, value = (next_done, next_value) if t == steps - 1 else (storage.done[t + 1], storage.value[t + 1])
        delta = storage.reward[t] + gamma * value * (1.0 - done) - storage.value[t]
        running = delta + gamma * gae_lambda * (1.0 - done) * running
        result[t] = running
    return result, result + storage.value


def train(config: TrainConfig, gate: Gate) -> None:
    """Train until the gate says stop."""
    torch.manual_seed(config.seed)
    np.random.seed(config.seed)  # noqa: NPY002 - what such scripts do
    task, num_envs, steps = config.sim.task, config.sim.num_slots, config.algorithm.rollout_steps
    assert task is not None
    envs = gymnasium.vector.SyncVectorEnv([lambda: _make(task)] * num_envs, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
    observation_size, action_size = math.prod(envs.single_observation_space.shape or ()), math.prod(envs.single_action_space.shape or ())
    agent = Agent(observation_size, action_size, config.policy.hidden_sizes, config.policy.init_log_std)
    optimizer = torch.optim.Adam(agent.parameters(), lr=config.algorithm.learning_rate, eps=config.algorithm.adam_eps)
    storage = Storage(steps, num_envs, observation_size, action_size)
    next_observation = torch.as_tensor(envs.reset(seed=config.seed)[0], dtype=torch.float32)
    next_done = torch.zeros(num_envs)
    gate.tell(threads=torch.get_num_threads(), processes=1)
    try:
        while True:
            gate.begin()
            next_observation, next_done = _collect(envs, agent, storage, next_observation, next_done, gate)
            started = time.perf_counter()
            with torch.no_grad():
                last = agent.value(next_observation)
                advantage, returns = advantages(storage, last, next_done, config.algorithm.gamma, config.algorithm.gae_lambda)
            _update(agent, optimizer, storage, advantage, returns, config)
            gate.add("update", time.perf_counter() - started)
    finally:
        envs.close()


def _collect(
    envs: gymnasium.vector.SyncVectorEnv, agent: Agent, storage: Storage, next_observation: Tensor, next_done: Tensor, gate: Gate
) -> tuple[Tensor, Tensor]:
    for t in range(storage.reward.shape[0]):
        storage.observation[t], storage.done[t] = next_observation, next_done
        with torch.no_grad():
            action, log_prob, _, value = agent.action_and_value(next_observation)
        storage.action[t], storage.log_prob[t], storage.value[t] = action, log_prob, value
        started = time.perf_counter()
        observation, reward, terminated, truncated, _ = envs.step(action.numpy())
        gate.add("environment", time.perf_counter() - started)
        storage.reward[t] = torch.as_tensor(reward, dtype=torch.float32)
        next_observation = torch.as_tensor(observation, dtype=torch.float32)
        next_done = torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
    return next_observation, next_done


def _update(
    agent: Agent, optimizer: torch.optim.Optimizer, storage: Storage, advantage: Tensor, returns: Tensor, config: TrainConfig
) -> None:
    algorithm = config.algorithm
    observation, action = storage.observation.flatten(0, 1), storage.action.flatten(0, 1)
    old_log_prob, all_advantage, all_returns = storage.log_prob.flatten(), advantage.flatten(), returns.flatten()
    order = np.arange(len(all_returns))
    for _ in range(algorithm.num_epochs):
        np.random.shuffle(order)  # noqa: NPY002
        for start in range(0, len(order), algorithm.minibatch_size):
            rows = order[start : start + algorithm.minibatch_size]
            _, log_prob, entropy, value = agent.action_and_value(observation[rows], action[rows])
            ratio = (log_prob - old_log_prob[rows]).exp()
            chosen = all_advantage[rows]
            if algorithm.normalize_advantage == "minibatch":
                chosen = (chosen - chosen.mean()) / (chosen.std() + 1e-8)
            clipped = ratio.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
            policy_loss = torch.max(-chosen * ratio, -chosen * clipped).mean()
            value_loss = ((value - all_returns[rows]) ** 2).mean()
            loss = policy_loss + algorithm.value_coef * value_loss - algorithm.entropy_coef * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), algorithm.max_grad_norm)
            optimizer.step()


def _make(task: str) -> gymnasium.Env:
    env = gymnasium.make(task, **MAKE_ARGUMENTS)
    env = gymnasium.wrappers.RecordEpisodeStatistics(env)
    return gymnasium.wrappers.ClipAction(env)


def _network(size: int, hidden_sizes: tuple[int, ...], num_outputs: int, output_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden_sizes:
        layers += [_layer(size, width, math.sqrt(2.0)), nn.Tanh()]
        size = width
    return nn.Sequential(*layers, _layer(size, num_outputs, output_gain))


def _layer(size: int, width: int, gain: float) -> nn.Linear:
    layer = nn.Linear(size, width)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
