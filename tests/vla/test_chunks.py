"""Action chunks on the way from the simulators to the advantages, against step-by-step arithmetic."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.advantages import whiten
from embodied_rl.algorithms.episode_method import EpisodeBatch
from embodied_rl.algorithms.ppo import PPO, RolloutValues
from embodied_rl.config import AlgorithmConfig, GroupsConfig, TinyVLAConfig
from embodied_rl.generation.torch_backend import TorchGenerator
from embodied_rl.policies.base import given_action, prepare_observation
from embodied_rl.policies.build import build_policy
from embodied_rl.policies.tiny_vla import TinyVLAPolicy
from embodied_rl.rollout.collector import RolloutCollector
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.rollout.group_collector import GroupCollector
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import Rollout, SimSpec

K = 3
CONFIG = TinyVLAConfig(chunk=K, width=16, num_heads=2, num_layers=1, conv_channels=(4,), num_keypoints=4, num_bins=9)
ALGORITHM = AlgorithmConfig(advantage="gae_chunk", gamma=0.9, gae_lambda=0.8, normalize_advantage="none")


def make_manager(*, autoreset: bool = True, chunk_size: int = K, success_ends_episode: bool = True) -> EnvManager:
    return EnvManager(
        SimFactory("tests.vla.toys:PointSim"),
        4,
        num_workers=1,
        seeds=EpisodeSeeds.training(3),
        autoreset=autoreset,
        chunk_size=chunk_size,
        success_ends_episode=success_ends_episode,
    )


def make_policy(spec: SimSpec, **changes: object) -> TinyVLAPolicy:
    torch.manual_seed(0)
    policy = build_policy(dataclasses.replace(CONFIG, **changes), spec)
    assert isinstance(policy, TinyVLAPolicy)
    return policy


@pytest.fixture(scope="module")
def collected() -> tuple[TinyVLAPolicy, Rollout]:
    with make_manager() as manager:
        policy = make_policy(manager.spec)
        generator = TorchGenerator(policy)
        collector = RolloutCollector(manager, generator, rollout_steps=8, num_groups=2, seed=3, layout=policy.action_layout)
        collector.restart(seed_round=0)
        rollout = collector.next_rollout(0)
        return policy, dataclasses.replace(rollout, observation={key: part.copy() for key, part in rollout.observation.items()})


def test_a_rollout_holds_tokens_chunks_and_what_was_executed(collected: tuple[TinyVLAPolicy, Rollout]) -> None:
    policy, rollout = collected
    assert rollout.action.shape == rollout.log_prob.shape == (8, 4, 2 * K)
    assert rollout.action.dtype == np.int64
    assert rollout.executed.shape == rollout.chunk_reward.shape == (8, 4, K)
    np.testing.assert_allclose(rollout.reward, rollout.chunk_reward.sum(-1), atol=1e-6)
    assert (rollout.chunk_reward[~rollout.executed] == 0).all()
    # An episode has ten steps: three chunks and one step, unless it succeeds before.
    assert rollout.num_steps == int(rollout.executed.sum()) < 8 * 4 * K
    whole = ~(rollout.terminated | rollout.truncated)
    assert rollout.executed[whole].all(), "a chunk is cut at an episode's end alone"
    # What the simulators were given is what the tokens mean: the reward of each step is the way that the first dimension made.
    given = given_action(policy, rollout.action.reshape(32, -1)).reshape(8, 4, K, 2)
    side = np.where(rollout.observation["instruction"] == "go right", 1.0, -1.0)
    way = 0.2 * side[..., None] * np.clip(given[..., 0], -1, 1)
    np.testing.assert_allclose(rollout.chunk_reward[rollout.executed], way[rollout.executed], atol=1e-5)


def test_log_probabilities_are_those_of_evaluate(collected: tuple[TinyVLAPolicy, Rollout]) -> None:
    policy, rollout = collected
    seen = {key: rollout.observation[key].reshape(32, *rollout.observation[key].shape[2:]) for key in policy.observation_keys}
    with torch.no_grad():
        again = policy.evaluate(prepare_observation(policy, seen), torch.from_numpy(rollout.action.reshape(32, -1)))
    np.testing.assert_allclose(again.log_prob.numpy(), rollout.log_prob.reshape(32, -1), atol=1e-5)


def by_steps(rollout: Rollout, values: RolloutValues, gamma: float, lam: float, *, semi_markov: bool) -> np.ndarray:
    """Chunk-level GAE, one slot after the other, with the discount of what each chunk did."""
    steps, slots, _ = rollout.executed.shape
    finals = iter(values.final_value)
    after = {tuple(place): next(finals) for place in np.argwhere(rollout.truncated & ~rollout.terminated)}
    advantage = np.zeros((steps, slots))
    for slot in range(slots):
        carried, following = 0.0, float(values.last_value[slot])
        for step in reversed(range(steps)):
            taken = [float(r) for r, on in zip(rollout.chunk_reward[step, slot], rollout.executed[step, slot], strict=True) if on]
            discount = gamma ** len(taken) if semi_markov else gamma
            total = sum(gamma**k * r for k, r in enumerate(taken)) if semi_markov else sum(taken)
            done = rollout.terminated[step, slot] or rollout.truncated[step, slot]
            if done:
                carried, following = 0.0, float(after.get((step, slot), 0.0))
            delta = total + discount * following - values.value[step, slot]
            carried = delta + discount * lam * carried
            advantage[step, slot], following = carried, float(values.value[step, slot])
    return advantage


@pytest.mark.parametrize("advantage", ["gae_chunk", "gae"])
def test_advantages_discount_by_the_steps_that_a_chunk_took(collected: tuple[TinyVLAPolicy, Rollout], advantage: str) -> None:
    _, rollout = collected
    rng = np.random.default_rng(0)
    cut = int((rollout.truncated & ~rollout.terminated).sum())
    assert cut > 2
    values = RolloutValues(*(rng.normal(size=shape).astype(np.float32) for shape in ((8, 4), (4,), (cut,))))
    config = dataclasses.replace(ALGORITHM, advantage=advantage)
    batch = PPO(config).prepare(rollout, values, {"x": torch.zeros(32)}, action_dim=2)
    expected = by_steps(rollout, values, 0.9, 0.8, semi_markov=advantage == "gae_chunk")
    np.testing.assert_allclose(batch.advantage.numpy(), expected.reshape(-1), atol=1e-5)
    np.testing.assert_allclose(batch.returns.numpy(), (expected + values.value).reshape(-1), atol=1e-5)
    # Of A = 2 dimensions, units 2k and 2k + 1 belong to step k.
    executed = rollout.executed.reshape(32, K)
    assert (batch.unit_mask.numpy() == np.stack([executed[:, unit // 2] for unit in range(2 * K)], axis=1)).all()


def test_each_action_of_a_chunk_may_have_its_own_advantage(collected: tuple[TinyVLAPolicy, Rollout]) -> None:
    _, rollout = collected
    cut = int((rollout.truncated & ~rollout.terminated).sum())
    values = RolloutValues(np.zeros((8, 4, K), np.float32), np.zeros(4, np.float32), np.zeros(cut, np.float32))
    config = dataclasses.replace(ALGORITHM, advantage="gae_action", gae_lambda=1.0, ratio="action")
    batch = PPO(config).prepare(rollout, values, {"x": torch.zeros(32)}, action_dim=2)
    # Without values and with λ = 1 it is the discounted sum of all later rewards of the episode.
    expected = np.zeros((8, 4, K))
    for slot in range(4):
        carried = 0.0
        for step in reversed(range(8)):
            if rollout.terminated[step, slot] or rollout.truncated[step, slot]:
                carried = 0.0
            for k in reversed(range(K)):
                if rollout.executed[step, slot, k]:
                    carried = float(rollout.chunk_reward[step, slot, k]) + 0.9 * carried
                    expected[step, slot, k] = carried
    np.testing.assert_allclose(batch.advantage.numpy().reshape(8, 4, K), expected, atol=1e-5)
    assert (batch.value_mask.numpy().reshape(8, 4, K) == rollout.executed).all()
    whitened = PPO(dataclasses.replace(config, normalize_advantage="batch")).prepare(rollout, values, {"x": torch.zeros(32)}, action_dim=2)
    np.testing.assert_allclose(
        whitened.advantage.numpy().reshape(8, 4, K),
        whiten(torch.from_numpy(expected).float(), torch.from_numpy(rollout.executed)),
        atol=1e-4,
    )


def test_evaluation_plays_chunks_as_single_steps_would() -> None:
    """The same policy asked every K steps by hand, in a manager that knows no chunks."""
    with make_manager() as manager:
        policy = make_policy(manager.spec)
        generator = TorchGenerator(policy)
        by_chunks = evaluate(manager, generator, 6)
    with make_manager(chunk_size=1, autoreset=False) as manager:
        for episode in by_chunks:
            manager.begin([0], [episode.seed])
            batch, total, length, over = manager.recv([0]), 0.0, 0, False
            while not over:
                seen = {key: part.copy() for key, part in batch.observation.items()}
                generator.send(np.array([0]), seen, None)
                for action in generator.recv().given[0]:
                    manager.send([0], action[None])
                    batch = manager.recv([0])
                    total, length, over = total + float(batch.reward[0]), length + 1, bool(batch.done[0])
                    if over:
                        break
            assert (length, total) == (episode.length, pytest.approx(episode.episode_return, abs=1e-6))


def test_groups_of_episodes_hold_chunks_too() -> None:
    with make_manager(autoreset=False) as manager:
        policy = make_policy(manager.spec)
        queue = GroupQueue(GroupsConfig(group_size=2, groups_per_step=2), seed=5, domains=DomainMixture.single("point"))
        collector = GroupCollector(manager, TorchGenerator(policy), queue, seed=5, layout=policy.action_layout)
        groups = collector.next_groups(0)
    batch = EpisodeBatch.of(groups, lambda seen: prepare_observation(policy, seen))
    assert batch.action.shape == batch.unit_log_prob.shape == batch.unit_mask.shape == (len(batch.row), 2 * K)
    assert set(batch.observation) == {"image", "words"}
    for row, episode in enumerate(episode for group in batch.groups for episode in group.episodes):
        assert episode.executed.shape == (episode.num_messages, K)
        assert episode.num_steps == int(episode.executed.sum()) <= 10
        units = episode.executed[:, [0, 0, 1, 1, 2, 2]]
        np.testing.assert_array_equal(episode.mask, units)
        expected = np.where(units, episode.log_prob, 0).sum(1)
        np.testing.assert_allclose(batch.behaviour_log_prob[row, : episode.num_messages].numpy(), expected, atol=1e-5)
    with torch.no_grad():
        again = policy.evaluate(batch.observation, batch.action).log_prob
    np.testing.assert_allclose(again.numpy(), batch.unit_log_prob.numpy(), atol=1e-5)
