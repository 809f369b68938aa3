"""A reaching task of one step, and what learns on it.

The observation is an object on a circle of radius 0.6; demonstrations end 40 degrees to its left or to its right, as if going round it.
Only the left side is rewarded, by minus the distance.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.advantages import whiten
from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.losses import ppo_clip_loss, value_loss
from embodied_rl.config import AlgorithmConfig
from embodied_rl.config.policy import Method
from embodied_rl.policies.flow.policy import FlowPolicy, FlowPolicyConfig, build_flow
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec
from tests.learning.samples import rollout_learner, update


def step_log_prob(log_prob: Tensor, num_steps: int) -> Tensor:
    """[B, S·K·A] → [B, S]: log-probability of each denoising step's whole chunk (DPPO; Ren et al. 2024, arXiv:2409.00588)."""
    return log_prob.unflatten(-1, (num_steps, -1)).sum(-1)


def step_advantage(advantage: Tensor, num_steps: int, gamma: float) -> Tensor:
    """[B] → [B, S]: γ^(S - 1 - k)·A for step k: the noisiest step is furthest from the reward."""
    return advantage[:, None] * gamma ** torch.arange(num_steps - 1, -1, -1, dtype=advantage.dtype)


SPEC = SimSpec("Reach", {"state": TensorSpec((2,))}, ActionSpec.continuous([-1.0] * 2, [1.0] * 2))
RADIUS, ANGLE, SPREAD = 0.6, math.radians(40.0), 0.1


def objects(rows: int, generator: torch.Generator) -> Tensor:
    """[rows, 2]"""
    angle = 2.0 * math.pi * torch.rand(rows, generator=generator)
    return RADIUS * torch.stack([angle.cos(), angle.sin()], dim=1)


def side(place: Tensor, angle: float | Tensor) -> Tensor:
    """Points [B, 2] turned by an angle."""
    turn = torch.as_tensor(angle)
    x, y = place.unbind(1)
    return torch.stack([x * turn.cos() - y * turn.sin(), x * turn.sin() + y * turn.cos()], dim=1)


def distances(place: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """[B] to the left end and to the right end."""
    return (action - side(place, ANGLE)).norm(dim=1), (action - side(place, -ANGLE)).norm(dim=1)


def make(method: Method) -> FlowPolicy:
    torch.manual_seed(0)
    return build_flow(FlowPolicyConfig(method, noise_level=0.3, chunk=1, normalize_observation=False), SPEC)


def sample(policy: FlowPolicy, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Objects [rows, 2], recorded actions [rows, W], log-probabilities [rows, L] and reached points [rows, 2]."""
    place = objects(rows, generator)
    output = policy.act({"state": place}, torch.randn(rows, policy.noise_width, generator=generator))
    return place, output.action, output.log_prob, torch.from_numpy(policy.simulator_action(output.action)[:, 0])


def clone(policy: FlowPolicy, steps: int = 1200) -> float:
    """Flow matching of both sides. Returns the mean loss of the last hundred steps."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(policy.model.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1.0 - step / steps)
        place = objects(256, generator)
        sign = torch.randint(0, 2, (256,), generator=generator) * 2.0 - 1.0
        action = side(place, sign * ANGLE) + SPREAD * torch.randn(256, 2, generator=generator)
        noise = torch.cat([torch.randn(256, 2, generator=generator), torch.rand(256, 1, generator=generator)], 1)
        loss = policy.cloning_loss({"state": place}, action[:, None], noise=noise).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses[-100:]))


def reinforce(policy: FlowPolicy, iterations: int = 30, rows: int = 512) -> list[float]:
    """PPO on the recorded denoising, by the learner that trains everything else; dppo with a ratio for each step. Mean rewards."""
    config = AlgorithmConfig(num_epochs=4, minibatch_size=128, learning_rate=1e-3, target_kl=0.1, max_grad_norm=1.0)
    learner, generator, rewards = rollout_learner(policy, config, num_threads=1), torch.Generator().manual_seed(2), []
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
    for iteration in range(iterations):
        place, action, log_prob, reached = sample(policy, rows, generator)
        reward = -distances(place, reached)[0]
        rewards.append(reward.mean().item())
        with torch.no_grad():
            value = policy.value({"state": place})
        advantage = whiten(reward - value)
        batch = Batch({"state": place}, action, log_prob, advantage, reward, value)
        if policy.options.method == "dppo":
            _denoising_epochs(policy, batch, config, optimizer, generator)
        else:
            update(learner, batch, iteration, iterations, 0)
    return rewards


def _denoising_epochs(
    policy: FlowPolicy, batch: Batch, config: AlgorithmConfig, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> None:
    steps = policy.options.num_steps
    for _ in range(config.num_epochs):
        for rows in torch.randperm(batch.num_rows, generator=generator).split(config.minibatch_size):
            evaluation = policy.evaluate({"state": batch.observation["state"][rows]}, batch.action[rows])
            loss, _ = ppo_clip_loss(
                log_prob=step_log_prob(evaluation.log_prob, steps),
                old_log_prob=step_log_prob(batch.log_prob[rows], steps),
                advantage=step_advantage(batch.advantage[rows], steps, 0.9),
                clip_low=0.1,
                clip_high=0.1,
            )
            values, _ = value_loss(value=evaluation.value, returns=batch.returns[rows], old_value=batch.value[rows], clip=None)
            optimizer.zero_grad()
            (loss + 0.5 * values).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            optimizer.step()
