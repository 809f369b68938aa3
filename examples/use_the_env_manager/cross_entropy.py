"""CartPole by the cross-entropy method, without torch: the environment manager in another loop.

`improve` knows gymnasium's vector interface and nothing of this project; `count_episodes` uses the manager's own, which
does not wait for the slowest slot. Run it: python examples/use_the_env_manager/cross_entropy.py
"""

from __future__ import annotations

import sys
import time

import gymnasium
import numpy as np

from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.vector import ManagerVectorEnv

NUM_SLOTS = 32
NUM_ELITES = 6


def improve(envs: gymnasium.vector.VectorEnv, num_generations: int, seed: int) -> list[float]:
    """Search linear controllers: push right where weights · observation > 0 (Rubinstein 1999; Szita and Lőrincz 2006).

    Every generation plays one episode with each of `envs.num_envs` candidates, and draws the next ones around the best.

    Returns:
        Mean return of the elite of each generation.
    """
    rng = np.random.default_rng(seed)
    mean, std = np.zeros(4), np.ones(4)
    history = []
    for generation in range(num_generations):
        weights = mean + std * rng.standard_normal((envs.num_envs, 4))
        observation, _ = envs.reset(seed=seed + generation)
        returns, playing = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool)
        while playing.any():
            actions = (np.einsum("ij,ij->i", weights, observation) > 0).astype(np.int64)
            observation, reward, terminated, truncated, _ = envs.step(actions)
            returns += reward * playing
            playing &= ~(terminated | truncated)  # what a slot plays afterwards is its next episode
        elite = np.argsort(returns)[-NUM_ELITES:]
        mean, std = weights[elite].mean(axis=0), weights[elite].std(axis=0) + 0.1
        history.append(float(returns[elite].mean()))
    return history


def count_episodes(manager: EnvManager, num_steps: int, seed: int) -> int:
    """Play at random, answering whichever slots are ready first; return how many episodes ended in `num_steps` steps."""
    rng = np.random.default_rng(seed)
    batch = manager.reset()
    slots, done_steps, episodes = batch.slots, 0, 0
    while True:
        manager.send(slots, rng.integers(0, 2, (len(slots), 1)))
        batch = manager.recv(min_ready=NUM_SLOTS // 4)
        slots = batch.slots
        done_steps += len(slots)
        episodes += len(batch.episodes)
        if done_steps >= num_steps:
            return episodes


def main() -> None:
    """Both parts on one manager."""
    factory = SimFactory("embodied_rl.sim.robots.gymnasium:make", task="CartPole-v1")
    with EnvManager(factory, NUM_SLOTS) as manager:
        started = time.perf_counter()
        history = improve(ManagerVectorEnv(manager), num_generations=12, seed=1)
        print("elite's mean return by generation:", " ".join(f"{value:.0f}" for value in history))
        print(f"{time.perf_counter() - started:.1f} s with {manager.num_workers} worker processes")
        started = time.perf_counter()
        episodes = count_episodes(manager, num_steps=20_000, seed=1)
        print(f"at random: {episodes} episodes, {20_000 / (time.perf_counter() - started):,.0f} steps/s, each slot as soon as it is ready")
    assert "torch" not in sys.modules, "the environment manager needs no torch"


if __name__ == "__main__":
    main()
