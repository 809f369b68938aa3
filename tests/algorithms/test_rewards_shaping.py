from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.kl import AdaptiveKlCoefficient, kl_estimate
from embodied_rl.algorithms.reward_shaping import (
    clip_reward,
    difference_reward,
    kl_in_reward,
    penalize_invalid_actions,
    penalize_length,
    penalize_overlong,
    place_at_last,
    relative_reward,
    shape_with_potential,
)

NAN = float("nan")


def test_clip() -> None:
    reward, mask = torch.tensor([-3.0, 0.5, 9.0, NAN]), torch.tensor([True, True, True, False])
    assert clip_reward(reward=reward, low=-1.0, high=2.0, mask=mask).tolist() == [-1.0, 0.5, 2.0, 0.0]
    assert clip_reward(reward=reward, low=1.0, mask=mask).tolist() == [1.0, 1.0, 9.0, 0.0], "what is hidden is 0, not clipped to 1"
    with pytest.raises(ValueError, match="low <= high"):
        clip_reward(reward=reward, low=2.0, high=1.0)


def test_invalid_actions() -> None:
    reward = torch.tensor([[1.0, 0.0], [2.0, NAN]])
    invalid = torch.tensor([[False, True], [True, True]])
    mask = torch.tensor([[True, True], [True, False]])
    assert penalize_invalid_actions(reward=reward, invalid=invalid, penalty=0.25, mask=mask).tolist() == [[1.0, -0.25], [1.75, 0.0]]
    # Counts, for rewards of whole episodes.
    assert penalize_invalid_actions(reward=torch.tensor([1.0]), invalid=torch.tensor([3]), penalty=0.25).tolist() == [0.25]
    with pytest.raises(ValueError, match="penalty must be >= 0"):
        penalize_invalid_actions(reward=reward, invalid=invalid, penalty=-1.0)


def test_length() -> None:
    reward, length = torch.ones(3), torch.tensor([5, 10, 30])
    assert penalize_length(reward=reward, length=length, coefficient=0.1, free_length=10).tolist() == pytest.approx([1.0, 1.0, -1.0])
    assert penalize_length(reward=reward, length=length, coefficient=0.1).tolist() == pytest.approx([0.5, 0.0, -2.0])


def test_overlong_as_in_the_paper() -> None:
    # 16384 tokens with a buffer of 4096, scaled down by 1024: nothing up to 12, then linear to -1 at 16, -1 beyond.
    length = torch.tensor([3, 12, 13, 14, 16, 40])
    result = penalize_overlong(reward=torch.zeros(6), length=length, max_length=16, buffer=4)
    assert result.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    masked = penalize_overlong(
        reward=torch.tensor([NAN, 1.0]), length=torch.tensor([99, 99]), max_length=4, buffer=4, mask=torch.tensor([False, True])
    )
    assert masked.tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="0 < buffer <= max_length"):
        penalize_overlong(reward=torch.zeros(6), length=length, max_length=4, buffer=5)


def test_difference_is_what_the_action_brought() -> None:
    # Two arms over four states whose own worth (100 and more) drowns the arms' (1 and 0): the difference shows the arms alone.
    worth = torch.tensor([100.0, 250.0, 175.0, 130.0])
    reward = worth + torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert difference_reward(reward=reward, counterfactual=worth).tolist() == [1.0, 0.0, 1.0, 0.0]
    mask = torch.tensor([True, False, True, True])
    assert difference_reward(reward=reward, counterfactual=torch.tensor([100.0, NAN, 175.0, 130.0]), mask=mask).tolist() == [1, 0, 1, 0]
    with pytest.raises(ValueError, match="counterfactual must have shape"):
        difference_reward(reward=reward, counterfactual=worth[:, None])


def relative_by_loop(
    level: np.ndarray, done: np.ndarray, previous: np.ndarray, initial: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    reward, last = np.zeros_like(level), previous.copy()
    for n in range(level.shape[1]):
        for t in range(level.shape[0]):
            if mask[t, n]:
                reward[t, n] = level[t, n] - last[n]
                last[n] = initial[n] if done[t, n] else level[t, n]
    return reward, last


def test_relative_reward_by_hand() -> None:
    # Slot 0: levels 1, 3, then the end, and 2 in the next episode. Slot 1: 4, a hidden step, 5.
    level = torch.tensor([[1.0, 4.0], [3.0, NAN], [2.0, 5.0]])
    done = torch.tensor([[False, False], [True, True], [False, False]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    reward, last = relative_reward(level=level, done=done, previous_level=torch.tensor([0.5, 0.0]), mask=mask, initial_level=0.25)
    assert reward.tolist() == [[0.5, 4.0], [2.0, 0.0], [1.75, 1.0]]
    assert last.tolist() == [2.0, 5.0]


def test_relative_reward_equals_a_loop_and_goes_on_across_calls() -> None:
    rng = np.random.default_rng(0)
    level, done, mask = rng.normal(size=(30, 6)), rng.random((30, 6)) < 0.2, rng.random((30, 6)) < 0.7
    previous, initial = rng.normal(size=6), rng.normal(size=6)
    expected, expected_last = relative_by_loop(level, done, previous, initial, mask)
    arrays = [torch.from_numpy(x) for x in (level, done, mask)]
    last = torch.from_numpy(previous)
    parts = []
    for start, stop in ((0, 30), (0, 0)), ((0, 11), (11, 30)):
        last, parts = torch.from_numpy(previous), []
        for piece in (slice(*start), slice(*stop)):
            part, last = relative_reward(
                level=arrays[0][piece],
                done=arrays[1][piece],
                previous_level=last,
                initial_level=torch.from_numpy(initial),
                mask=arrays[2][piece],
            )
            parts.append(part)
        np.testing.assert_allclose(torch.cat(parts), expected, rtol=0, atol=1e-15)
        np.testing.assert_allclose(last, expected_last, rtol=0, atol=0)


def test_relative_rewards_of_an_episode_sum_to_its_progress() -> None:
    level = torch.tensor([[0.2], [0.9], [0.4], [0.8]], dtype=torch.float64)
    done = torch.tensor([[False], [False], [False], [True]])
    reward, last = relative_reward(level=level, done=done, previous_level=torch.tensor([0.1]), initial_level=0.1)
    assert reward.sum().item() == pytest.approx(0.8 - 0.1)
    assert last.item() == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"\[T, N\]"):
        relative_reward(level=level, done=done, previous_level=torch.zeros(4))


def test_potential_shaping_adds_a_constant_to_every_return_from_a_state() -> None:
    # Discounted over an episode that terminates, the shaping telescopes to -Phi(first state), whatever happens in between.
    rng = np.random.default_rng(1)
    gamma, num_steps = 0.9, 7
    potential = torch.from_numpy(rng.normal(size=(num_steps + 1, 1)))
    reward = torch.from_numpy(rng.normal(size=(num_steps, 1)))
    terminated = torch.zeros(num_steps, 1, dtype=torch.bool)
    terminated[-1] = True
    arguments = {"reward": reward, "potential": potential[:-1], "next_potential": potential[1:], "gamma": gamma}
    discount = gamma ** torch.arange(num_steps, dtype=torch.float64)[:, None]
    shaped = shape_with_potential(**arguments, terminated=terminated)  # type: ignore[arg-type]
    assert ((shaped - reward) * discount).sum().item() == pytest.approx(-potential[0].item())
    # Truncated: the state after the last step still has its potential.
    cut = shape_with_potential(**arguments, terminated=torch.zeros_like(terminated))  # type: ignore[arg-type]
    assert ((cut - reward) * discount).sum().item() == pytest.approx(gamma**num_steps * potential[-1].item() - potential[0].item())
    with pytest.raises(ValueError, match="terminated must be bool"):
        shape_with_potential(**arguments, terminated=terminated.float())  # type: ignore[arg-type]


def test_place_at_last() -> None:
    mask = torch.tensor([[True, True, False], [True, False, True], [False, False, False]])
    assert place_at_last(torch.tensor([5.0, 7.0, 9.0]), mask).tolist() == [[0.0, 5.0, 0.0], [0.0, 0.0, 7.0], [0.0, 0.0, 0.0]]


def test_kl_in_reward_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    log_prob = torch.tensor([[-1.0, -2.0, NAN], [-0.5, NAN, NAN]], dtype=torch.float64)
    reference = torch.tensor([[-1.5, -1.0, NAN], [-0.5, NAN, NAN]], dtype=torch.float64)
    reward = place_at_last(torch.tensor([1.0, -1.0], dtype=torch.float64), mask)
    # k1: 0.5, -1 and 0.
    kl = kl_estimate(log_prob=log_prob, reference_log_prob=reference, kind="k1")
    shaped, metrics = kl_in_reward(reward=reward, kl=kl, coefficient=0.1, mask=mask)
    np.testing.assert_allclose(shaped, [[-0.05, 1.1, 0.0], [-1.0, 0.0, 0.0]], atol=1e-15)
    assert metrics["kl"].item() == pytest.approx((0.5 - 1.0 + 0.0) / 3)
    assert metrics["kl_penalty"].item() == pytest.approx(0.1 * -0.5 / 3)
    kl = kl_estimate(log_prob=log_prob, reference_log_prob=reference, kind="k2")
    squared, _ = kl_in_reward(reward=reward, kl=kl, coefficient=0.1, mask=mask)
    np.testing.assert_allclose(squared, [[-0.0125, 0.95, 0.0], [-1.0, 0.0, 0.0]], atol=1e-15)


def test_kl_in_reward_keeps_a_bandit_near_its_reference() -> None:
    # The best policy under r - beta KL is reference · exp(r / beta) / Z. Follow the exact policy gradient with k1 in the reward.
    worth, reference = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    beta = 0.7
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=1.0)
    for _ in range(600):
        log_prob = logits.log_softmax(-1)
        kl = kl_estimate(log_prob=log_prob, reference_log_prob=reference.log(), kind="k1")
        reward, _ = kl_in_reward(reward=worth, kl=kl, coefficient=beta)
        assert not reward.requires_grad
        optimizer.zero_grad()
        (-(log_prob.exp().detach() * reward * log_prob).sum()).backward()
        optimizer.step()
    expected = reference * (worth / beta).exp()
    torch.testing.assert_close(logits.detach().softmax(-1), expected / expected.sum(), rtol=0, atol=1e-6)


def test_adaptive_coefficient_steers_the_penalty() -> None:
    coefficient = AdaptiveKlCoefficient(0.1, target=0.01, horizon=10)
    log_prob, reference = torch.full((4,), math.log(0.9)), torch.full((4,), math.log(0.5))
    kl = log_prob - reference
    before, metrics = kl_in_reward(reward=torch.zeros(4), kl=kl, coefficient=coefficient.value)
    # log 1.8 = 0.588 is far above the target: 1 + 0.2 · 4 / 10 = 1.08.
    coefficient.update(metrics["kl"].item(), 4)
    after, _ = kl_in_reward(reward=torch.zeros(4), kl=kl, coefficient=coefficient.value)
    torch.testing.assert_close(after, 1.08 * before)
    assert before[0].item() == pytest.approx(-0.1 * math.log(1.8), rel=1e-6)
