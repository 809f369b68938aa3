"""From groups of episodes to advantages, by hand arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.episode_method import EpisodeBatch, EpisodeMethod, EpisodeValues
from embodied_rl.config import AlgorithmConfig, CorrectionConfig, GroupsConfig, KlConfig, RewardConfig
from embodied_rl.errors import UserError
from embodied_rl.types import Episode, EpisodeGroup

CONFIG = AlgorithmConfig(advantage="dr_grpo", groups=GroupsConfig(group_size=2), normalize_advantage="none", gamma=0.5)


def episode(rewards: list[float], seed: int, *, terminated: bool = True, states: list[int] | None = None, greedy: bool = False) -> Episode:
    steps = len(rewards)
    return Episode(
        observation={"state": np.array(states or range(steps), np.float32)[:, None]},
        action=np.zeros((steps, 2), np.float32),
        log_prob=np.full((steps, 2), -0.5, np.float32),
        reward=np.array(rewards, np.float32),
        terminated=terminated,
        truncated=not terminated,
        success=sum(rewards) > 0,
        seed=seed,
        domain="toy",
        policy_version=np.zeros(steps, np.int64),
        final_observation={"state": np.array([9.0], np.float32)},
        metadata={"greedy": greedy},
    )


def group(number: int, *episodes: Episode) -> EpisodeGroup:
    return EpisodeGroup(number, "toy", episodes[0].seed, 0, episodes)


def rows_of(groups: Sequence[EpisodeGroup]) -> EpisodeBatch:
    return EpisodeBatch.of(groups, lambda seen: {key: torch.from_numpy(part) for key, part in seen.items()})


def credit(config: AlgorithmConfig, *groups: EpisodeGroup, values: EpisodeValues | None = None):
    batch = rows_of(groups)
    method = EpisodeMethod(config)
    zeros = EpisodeValues(torch.zeros(batch.shape), torch.zeros(batch.shape[0]))
    return batch, method.prepare(batch, values or zeros), method


GROUPS = (group(4, episode([1, 2, 3], 40), episode([4], 40)), group(7, episode([0, 5], 70), episode([5, -1, 3], 70)))


def test_rows_are_episodes_and_entries_their_steps() -> None:
    batch, _, _ = credit(CONFIG, *GROUPS)
    assert batch.shape == (4, 3)
    assert batch.mask.sum(1).tolist() == [3, 1, 2, 3]
    assert batch.reward.tolist() == [[1, 2, 3], [4, 0, 0], [0, 5, 0], [5, -1, 3]]
    assert batch.behaviour_log_prob[0].tolist() == [-1, -1, -1]  # two action units of -0.5
    assert batch.behaviour_log_prob[1].tolist() == [-1, 0, 0]
    assert batch.group.tolist() == [4, 4, 7, 7]
    flat = torch.arange(9.0, requires_grad=True)
    assert batch.scatter(flat).tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0], [6, 7, 8]]


def test_group_advantages_are_shared_by_an_episodes_steps() -> None:
    _, found, _ = credit(CONFIG, *GROUPS)
    # Returns 6 and 4 (mean 5), 5 and 7 (mean 6).
    assert found.advantage.tolist() == [[1, 1, 1], [-1, 0, 0], [-1, -1, 0], [1, 1, 1]]
    assert found.returns is None


def test_a_run_that_learns_nothing_from_its_rewards_says_so() -> None:
    def even(number: int) -> EpisodeBatch:
        return rows_of([group(number, episode([1, 2], 0), episode([3], 0))])

    method, zeros = EpisodeMethod(CONFIG), EpisodeValues(torch.zeros(2, 2), torch.zeros(2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(2):
            method.prepare(even(number), zeros)
        method.prepare(rows_of([group(2, episode([1, 2], 0), episode([1], 0))]), zeros)  # 3 and 1
        for number in range(2):
            method.prepare(even(number), zeros)
        assert not said
        for number in range(4):
            method.prepare(even(number), zeros)
    assert len(said) == 1
    assert "algorithm.groups.filters=[{name: zero_variance}]" in str(said[0].message)


def test_returns_to_go_stop_at_each_episodes_own_end() -> None:
    _, found, _ = credit(replace(CONFIG, advantage="reinforce"), *GROUPS)
    # gamma 0.5: 1 + 0.5 (2 + 0.5·3) = 2.75, 3.5, 3; 4; 2.5, 5; 5 + 0.5 (-1 + 1.5) = 5.25, 0.5, 3.
    assert found.advantage.tolist() == [[2.75, 3.5, 3], [4, 0, 0], [2.5, 5, 0], [5.25, 0.5, 3]]


def test_a_truncated_episode_bootstraps_from_its_final_observation() -> None:
    groups = [group(0, episode([1, 1], 0, terminated=False), episode([2], 0))]
    values = EpisodeValues(torch.tensor([[0.5, 1.0], [3.0, 0.0]]), torch.tensor([8.0, 99.0]))
    config = replace(CONFIG, advantage="gae", gae_lambda=1.0)
    _, found, _ = credit(config, *groups, values=values)
    # Row 0: second step 1 + 0.5·8 - 1 = 4; first 1 + 0.5·1 - 0.5 + 0.5·4 = 3. Row 1 is terminated: 2 - 3 = -1.
    assert found.advantage.tolist() == [[3, 4], [-1, 0]]
    assert found.returns is not None
    assert found.returns[0].tolist() == [3.5, 5.0]
    assert found.returns[1, 0] == 2.0


def test_decisions_of_ipa_are_discounted_from_the_last() -> None:
    _, found, _ = credit(replace(CONFIG, advantage="ipa"), *GROUPS)
    # gamma^(steps to the last) · return: 6 · (0.25, 0.5, 1).
    assert found.advantage[0].tolist() == [1.5, 3, 6]
    assert found.advantage[1].tolist() == [4, 0, 0]
    assert found.positive.tolist() == [True] * 4


def test_gigpo_compares_steps_from_the_same_observation_of_the_group() -> None:
    first, second = episode([0, 1], 0, states=[1, 2]), episode([0, 0], 0, states=[1, 3])
    config = replace(CONFIG, advantage="gigpo", advantage_options={"normalize": "mean"})
    _, found, _ = credit(config, group(0, first, second))
    # Episodes: returns 1 and 0, ±0.5. Steps from state 1: discounted returns 0.5 and 0, ±0.25; the others are alone: 0.
    assert found.advantage.tolist() == [[0.75, 0.5], [-0.75, -0.5]]


def test_a_greedy_episode_is_a_baseline_and_is_not_learned_from() -> None:
    config = replace(CONFIG, advantage="remax")
    _, found, _ = credit(config, group(0, episode([2], 0, greedy=True), episode([5, 1], 0), episode([1], 0)))
    assert found.advantage.tolist() == [[0, 0], [4, 4], [-1, 0]]
    assert found.mask.tolist() == [[False, False], [True, True], [True, False]]


def test_what_is_measured_of_a_batch_leaves_out_greedy_episodes() -> None:
    """Of the divergences 10, 2, 4 and 3, the greedy episode has the first; the coefficient follows the mean of the others' 3 steps, 3.
    All are taken from rewards, half of each: those of the sampled episodes become 4, -1 and -0.5, and the greedy one returns 2 - 5."""
    kl = KlConfig(coef=0.5, kind="k1", place="reward", target=1.0, horizon=10)
    played = group(0, episode([2], 0, greedy=True), episode([5, 1], 0), episode([1], 0))
    batch, method = rows_of([played]), EpisodeMethod(replace(CONFIG, advantage="remax", kl=kl))
    zeros, divergence = EpisodeValues(torch.zeros(batch.shape), torch.zeros(3)), torch.tensor([[10.0, 0], [2, 4], [3, 0]])
    found = method.prepare(batch, zeros, divergence)
    assert found.metrics == pytest.approx({"kl": 3.0, "kl_penalty": 1.5})
    assert method.kl.coefficient == pytest.approx(0.5 * (1 + 0.2 * 3 / 10))
    assert found.advantage.tolist() == [[0, 0], [6, 6], [2.5, 0]]
    method = EpisodeMethod(replace(CONFIG, advantage="remax", kl=kl, normalize_reward=True))
    method.prepare(batch, zeros, divergence)
    assert method.reward_normalizer is not None
    assert method.reward_normalizer.moments.count == 3
    assert method.reward_normalizer.moments.var == pytest.approx(np.var([4.0, -1 + 0.5 * 4, -0.5]))


@pytest.mark.parametrize("kinds", [("none", "batch"), ("batch", "batch"), ("group", "batch"), ("group", "group"), ("running", "running")])
def test_a_greedy_baseline_is_normalised_as_the_rewards_that_it_is_compared_with(kinds: tuple[Any, Any]) -> None:
    """(s - μ) / σ - (s_greedy - μ) / σ = (s - s_greedy) / σ, σ of the sampled episodes."""
    config = replace(CONFIG, advantage="remax", reward=RewardConfig(mean=kinds[0], std=kinds[1]))
    _, found, _ = credit(config, group(0, episode([2], 0, greedy=True), episode([5, 1], 0), episode([1], 0)))
    np.testing.assert_allclose(found.advantage, np.array([[0, 0], [4, 4], [-1, 0]]) / np.sqrt(12.5), rtol=1e-5)


@pytest.mark.parametrize("kinds", [("none", "none"), ("group", "none"), ("group", "batch"), ("batch", "batch"), ("none", "group")])
@pytest.mark.parametrize("advantage", ["grpo", "gigpo"])
def test_what_rounding_leaves_of_equal_returns_is_no_advantage(advantage: str, kinds: tuple[Any, Any]) -> None:
    """Episodes of 2 to 39 dense rewards that all return 1.7: divided by a standard deviation of their own size, the last bits would be
    advantages of up to 1."""
    rng, other = np.random.default_rng(0), group(1, episode([1, 2], 1), episode([3.3], 1))
    config = replace(CONFIG, advantage=advantage, reward=RewardConfig(mean=kinds[0], std=kinds[1]))
    for _ in range(20):
        drawn = [rng.normal(size=rng.integers(1, 39)) for _ in range(4)]
        states = [[100 * number + step for step in range(len(part) + 1)] for number, part in enumerate(drawn)]  # no two are equal
        equal = [episode([*part, 1.7 - part.sum()], 0, states=own) for part, own in zip(drawn, states, strict=True)]
        _, found, _ = credit(config, group(0, *equal), other)
        assert not found.advantage[:4].any()
        assert found.advantage[4:].any()
        if kinds[1] == "group":  # one episode has no deviation: its return becomes 0
            assert not credit(config, group(0, equal[0]), other)[1].advantage[0].any()


def test_lengths_of_answers_are_tokens() -> None:
    batch = replace(rows_of([GROUPS[0]]), num_tokens=torch.tensor([[5, 3, 2], [30, 0, 0]]))
    method = EpisodeMethod(replace(CONFIG, advantage="opo"))
    found = method.prepare(batch, EpisodeValues(torch.zeros(2, 3), torch.zeros(2)))
    # Returns 6 of 10 tokens and 4 of 30: a baseline of (60 + 120) / 40 = 4.5.
    np.testing.assert_allclose(found.advantage, [[1.5, 1.5, 1.5], [-0.5, 0, 0]], rtol=1e-6)


def test_rewards_are_clipped_penalised_and_normalised_in_this_order() -> None:
    config = replace(CONFIG, advantage="reinforce", gamma=1.0, reward=RewardConfig(clip=3.0, length_penalty=1.0))
    _, found, _ = credit(config, *GROUPS)
    # Row 0: 1, 2, 3 minus one a step: 0, 1, 2, to go 3, 3, 2. Row 1: min(4, 3) - 1.
    np.testing.assert_allclose(found.advantage[:2], [[3, 3, 2], [2, 0, 0]], atol=1e-6)
    config = replace(CONFIG, advantage="reinforce", gamma=1.0, reward=RewardConfig(clip=3.0, scale=0.5, length_penalty=1.0))
    _, found, _ = credit(config, *GROUPS)
    # Row 0: half of 1, 2, 3, minus one a step: -0.5, 0, 0.5. Row 1: min(4, 3) / 2 - 1.
    np.testing.assert_allclose(found.advantage[:2], [[0, 0.5, 0.5], [0.5, 0, 0]], atol=1e-6)
    config = replace(CONFIG, advantage="reinforce", gamma=1.0, reward=RewardConfig(mean="group", group_by="seed"))
    _, found, _ = credit(config, *GROUPS)
    np.testing.assert_allclose(found.advantage[:, 0], [1, -1, -1, 1], atol=1e-6)  # whole returns minus their group's mean


def test_running_moments_and_the_coefficient_survive_a_resume() -> None:
    config = replace(CONFIG, advantage="reinforce", reward=RewardConfig(std="running"), kl=KlConfig(coef=0.1, target=0.01))
    _, _, method = credit(config, *GROUPS)
    method.kl.update(1.0, 100)
    other = EpisodeMethod(config)
    other.load_state_dict(method.state_dict())
    # Returns 6, 4, 5, 7: mean 5.5, biased variance 1.25. Coefficient: 0.1 · (1 + 0.2 · 100 / 10000).
    assert (other.moments.mean, other.moments.var, other.moments.count) == (5.5, 1.25, 4)
    assert other.kl.coefficient == pytest.approx(0.1002)


def test_a_divergence_in_the_reward_is_taken_from_each_step() -> None:
    config = replace(CONFIG, advantage="reinforce", gamma=1.0, kl=KlConfig(coef=0.5, kind="k1", place="reward"))
    batch = rows_of(GROUPS)
    values = EpisodeValues(torch.zeros(batch.shape), torch.zeros(4))
    present, reference = torch.zeros(batch.shape), torch.full(batch.shape, -2.0)
    method = EpisodeMethod(config)
    found = method.prepare(batch, values, method.kl.divergence(present, reference))
    # d = 0 - (-2) = 2, half of it a step: rewards 0, 1, 2.
    np.testing.assert_allclose(found.advantage[0], [3, 3, 2], atol=1e-6)
    assert found.metrics["kl"] == pytest.approx(2.0)


def test_rewards_are_divided_by_the_spread_of_discounted_returns() -> None:
    """Returns are summed forward within each episode, and are those of nothing else; a second batch is folded in."""
    config = replace(CONFIG, advantage="reinforce", gamma=0.5, normalize_reward=True, reward_clip=100.0)
    method, returns = EpisodeMethod(config), []
    for _ in range(2):
        for own in GROUPS:
            for played in own.episodes:
                total = 0.0
                for reward in played.reward:
                    total = reward + 0.5 * total
                    returns.append(total)
        batch = rows_of(GROUPS)
        found = method.prepare(batch, EpisodeValues(torch.zeros(batch.shape), torch.zeros(4)))
        expected = np.zeros(batch.shape)
        for row, played in enumerate(played for own in GROUPS for played in own.episodes):
            for step in reversed(range(played.num_messages)):
                later = expected[row, step + 1] if step + 1 < played.num_messages else 0.0
                expected[row, step] = played.reward[step] / np.sqrt(np.var(returns) + 1e-8) + 0.5 * later
        np.testing.assert_allclose(found.advantage, expected, atol=1e-5)
    other = EpisodeMethod(config)
    other.load_state_dict(method.state_dict())
    assert other.reward_normalizer is not None
    assert other.reward_normalizer.moments.count == len(returns)


def test_episodes_that_were_cut_off_may_earn_nothing_or_not_be_learned_from() -> None:
    cut, whole = episode([1, 2], 40, terminated=False), episode([4], 40)
    config = replace(CONFIG, advantage="reinforce", gamma=1.0)
    for truncated, expected in (("keep", [[3, 2], [4, 0]]), ("zero", [[0, 0], [4, 0]]), ("mask", [[0, 0], [4, 0]])):
        _, found, _ = credit(replace(config, reward=RewardConfig(truncated=truncated)), group(0, cut, whole))
        np.testing.assert_allclose(found.advantage, expected, atol=1e-6)
        assert found.mask.tolist() == [[truncated != "mask"] * 2, [True, False]]
    # What is not learned from is not compared with either: the mean of 4 and 6 is 5, whatever the third had.
    config = replace(CONFIG, advantage="dr_grpo", reward=RewardConfig(truncated="mask"))
    _, found, _ = credit(config, group(0, cut, whole, episode([6], 40)))
    np.testing.assert_allclose(found.advantage[:, 0], [0, -1, 1], atol=1e-6)


def test_long_answers_are_penalised_and_count_as_cut_off() -> None:
    batch = rows_of([group(0, episode([1, 1], 40), episode([1, 1], 40))])
    batch = replace(batch, num_tokens=torch.tensor([[6, 9], [10, 2]]))
    values = EpisodeValues(torch.zeros(batch.shape), torch.zeros(2))
    reward = RewardConfig(overlong_tokens=10, overlong_buffer=4, overlong_penalty=2.0)
    config = replace(CONFIG, advantage="reinforce", gamma=0.0, reward=reward)
    # From 6 tokens to 10 the penalty grows from 0 to 2: 9 tokens cost 1.5, 10 cost 2.
    np.testing.assert_allclose(EpisodeMethod(config).prepare(batch, values).advantage, [[1, -0.5], [-1, 1]], atol=1e-6)
    config = replace(config, reward=RewardConfig(overlong_tokens=10, truncated="zero"))
    np.testing.assert_allclose(EpisodeMethod(config).prepare(batch, values).advantage, [[1, 1], [0, 0]], atol=1e-6)


def test_advantages_are_clipped() -> None:
    _, found, _ = credit(replace(CONFIG, advantage="reinforce", gamma=1.0, advantage_clip=2.5), *GROUPS)
    np.testing.assert_allclose(found.advantage[0], [2.5, 2.5, 2.5], atol=1e-6)  # 6, 5 and 3


def test_texts_that_are_alike_are_one_anchor() -> None:
    config = replace(CONFIG, advantage="gigpo", gamma=1.0, advantage_options={"normalize": "mean", "step_weight": 1.0})
    texts = ("a room with a red door", "a room with a red doors", "nothing like it")
    batch = rows_of([group(0, *(episode([score], 40) for score in (1, 3, 5)))])
    batch = replace(batch, observation={"text": np.array(texts)})  # type: ignore[dict-item]
    values = EpisodeValues(torch.zeros(batch.shape), torch.zeros(3))
    plain = EpisodeMethod(config).prepare(batch, values).advantage[:, 0]
    alike = EpisodeMethod(replace(config, anchor_similarity=0.9)).prepare(batch, values).advantage[:, 0]
    # Episodes: -2, 0, 2. Steps: each alone; or the first two together, -1 and 1.
    np.testing.assert_allclose(plain, [-2, 0, 2], atol=1e-6)
    np.testing.assert_allclose(alike, [-3, 1, 2], atol=1e-6)
    numbers = replace(batch, observation={"state": torch.zeros(3, 1)})
    with pytest.raises(UserError, match="compares texts"):
        EpisodeMethod(replace(config, anchor_similarity=0.9)).prepare(numbers, values)


def test_corrections_multiply_the_advantages_that_were_normalised() -> None:
    correction = CorrectionConfig(mode="clamp", high=1.5, reject=3.0)
    config = replace(CONFIG, advantage="reinforce", gamma=1.0, correction=correction)
    batch = rows_of([group(0, episode([1, 1], 40), episode([1, 1], 40))])
    values = EpisodeValues(torch.zeros(batch.shape), torch.zeros(2))
    # Two action units of -0.5 each were sampled: -1 a decision. Ratios 0.5 and 2 (clamped to 1.5); 4 and 4, rejected: 4 > 3.
    present = torch.tensor([[0.5, 2.0], [4.0, 4.0]]).log() - 1.0
    method = EpisodeMethod(config)
    credit = method.prepare(batch, values)
    sampled = {"behaviour_log_prob": batch.behaviour_log_prob, "mask": credit.mask, "chunk_id": torch.arange(2).expand(2, 2)}
    advantage, metrics = method.corrected(credit.advantage, present, **sampled)
    np.testing.assert_allclose(advantage, [[2 * 0.5, 1 * 1.5], [0, 0]], rtol=1e-6)
    assert metrics["rejected_fraction"] == 0.5
    assert metrics["weight_bounded_fraction"] == 0.75
    assert credit.mask.all(), "what is rejected stays in the denominator"


def chunked(rewards: list[list[float]], executed: list[list[bool]], *, terminated: bool) -> Episode:
    plain = episode([sum(part) for part in rewards], 0, terminated=terminated)
    return replace(plain, chunk_reward=np.array(rewards, np.float32), executed=np.array(executed))


CHUNKS = (
    group(0, chunked([[1, 2], [4, 0]], [[True, True], [True, False]], terminated=True), chunked([[3, 5]], [[True] * 2], terminated=False)),
)


def test_chunks_are_discounted_by_the_steps_that_they_took() -> None:
    values = EpisodeValues(torch.tensor([[0.5, 1.0], [3.0, 0.0]]), torch.tensor([99.0, 8.0]))
    _, found, _ = credit(replace(CONFIG, advantage="gae_chunk", gae_lambda=1.0), *CHUNKS, values=values)
    # A_1 = 4 - 1; A_0 = (1 + 0.5·2) + 0.25·1 - 0.5 + 0.25·3. The other: (3 + 0.5·5) + 0.25·8 - 3.
    assert found.advantage.tolist() == [[2.5, 3], [4.5, 0]]
    assert found.returns is not None
    assert found.returns.tolist() == [[3, 4], [7.5, 0]]


def test_the_steps_of_chunks_have_advantages_of_their_own() -> None:
    values = EpisodeValues(torch.tensor([[[0.5, 1.0], [2.0, 9.0]], [[3.0, 1.0], [0.0, 0.0]]]), torch.tensor([99.0, 8.0]))
    config = replace(CONFIG, advantage="gae_action", gae_lambda=1.0)
    _, found, _ = credit(config, *CHUNKS, values=values)
    # 4 - 2; 2 + 0.5·2 - 1 + 0.5·2; 1 + 0.5·1 - 0.5 + 0.5·3. The other: 5 + 0.5·8 - 1; 3 + 0.5·1 - 3 + 0.5·8.
    assert found.advantage.tolist() == [[2.5, 3, 2, 0], [4.5, 8, 0, 0]]
    assert found.executed is not None
    assert found.executed.tolist() == [[True, True, True, False], [True, True, False, False]]
    assert found.mask.tolist() == [[True, True], [True, False]]
    priced = replace(config, reward=RewardConfig(length_penalty=1.0, scale=2.0))
    cheaper = [[[1.0, 3.0], [7.0, 0.0]], [[5.0, 9.0], [0.0, 0.0]]]  # twice each executed step's, less its price
    by_hand = CHUNKS[0].episodes[0], CHUNKS[0].episodes[1]
    again = group(
        0, *(replace(own, chunk_reward=np.array(part[: own.num_messages], np.float32)) for own, part in zip(by_hand, cheaper, strict=True))
    )
    assert torch.equal(credit(priced, *CHUNKS, values=values)[1].advantage, credit(config, again, values=values)[1].advantage)
    _, divided, method = credit(replace(config, normalize_reward=True), *CHUNKS, values=EpisodeValues(torch.zeros(2, 2, 2), torch.zeros(2)))
    # Returns of chunks: 4, and 3 + 0.5·4; 8. Their deviation divides every step.
    assert method.reward_normalizer is not None
    spread = float(np.std([3.0, 5.5, 8.0]))
    assert method.reward_normalizer.moments.var == pytest.approx(spread**2)
    expected = torch.tensor([[1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4, 0], [3 + 0.5 * 5, 5, 0, 0]]) / spread
    torch.testing.assert_close(divided.advantage, expected)
