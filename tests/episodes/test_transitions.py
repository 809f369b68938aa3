"""n-step windows, rollouts as transitions and normalised actions, by hand and against a plain loop."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.algorithms.rewards import ReturnNormalizer
from embodied_rl.episodes.dataset import SeenRewards, n_step_windows, rewards_of_steps, rollout_transitions
from embodied_rl.errors import UserError
from embodied_rl.types import ActionSpec, Rollout


def test_windows_by_hand() -> None:
    reward = np.array([1.0, 2.0, 4.0, 8.0, 16.0], np.float32)
    terminated = np.array([0, 0, 1, 0, 0], bool)
    truncated = np.array([0, 0, 0, 0, 1], bool)
    windows = n_step_windows(reward, 0.5, terminated, truncated, 2)
    # r_t + r_{t+1} / 2 within the episode; the third step ends one alone; so does the last.
    np.testing.assert_allclose(windows.reward, [2.0, 4.0, 4.0, 16.0, 16.0])
    np.testing.assert_array_equal(windows.end, [1, 2, 2, 4, 4])
    # γ² over two steps; 0 where the window ends in the terminated step; γ of the last, which was cut: it bootstraps.
    np.testing.assert_allclose(windows.discount, [0.25, 0.0, 0.0, 0.25, 0.5])


def test_a_window_ends_with_the_sequence() -> None:
    none = np.zeros(3, bool)
    windows = n_step_windows(np.array([1.0, 1.0, 1.0]), 0.5, none, none, 10)
    np.testing.assert_allclose(windows.reward, [1.75, 1.5, 1.0])
    np.testing.assert_array_equal(windows.end, [2, 2, 2])
    np.testing.assert_allclose(windows.discount, [0.125, 0.25, 0.5])


def test_units_have_discounts_of_their_own() -> None:
    """Messages of 2, 1 and 3 steps: r_0 + γ² r_1 + γ³ r_2, and γ⁶ after them."""
    none = np.zeros(3, bool)
    windows = n_step_windows(np.array([1.0, 10.0, 100.0]), np.array([0.9**2, 0.9, 0.9**3]), none, none, 3)
    assert windows.reward[0] == pytest.approx(1.0 + 0.81 * 10.0 + 0.9**3 * 100.0)
    assert windows.discount[0] == pytest.approx(0.9**6)


def plain_windows(
    reward: np.ndarray, gamma: float, terminated: np.ndarray, truncated: np.ndarray, n: int
) -> list[tuple[float, int, float]]:
    found = []
    for t in range(len(reward)):
        total, discount, k = 0.0, 1.0, t
        while True:
            total += discount * reward[k]
            discount *= gamma
            if terminated[k]:
                discount = 0.0
            if terminated[k] or truncated[k] or k == len(reward) - 1 or k == t + n - 1:
                break
            k += 1
        found.append((total, k, discount))
    return found


@given(st.integers(1, 12), st.integers(1, 6), st.floats(0.0, 1.0), st.integers(0, 2**32 - 1))
def test_windows_equal_a_plain_loop(length: int, n: int, gamma: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    reward = rng.normal(size=(length, 2))
    terminated, truncated = rng.random((length, 2)) < 0.2, rng.random((length, 2)) < 0.2
    windows = n_step_windows(reward, gamma, terminated, truncated, n)
    for slot in range(2):
        expected = plain_windows(reward[:, slot], gamma, terminated[:, slot], truncated[:, slot], n)
        for t, (total, end, discount) in enumerate(expected):
            assert windows.reward[t, slot] == pytest.approx(total, rel=1e-5, abs=1e-6)
            assert windows.end[t, slot] == end
            assert windows.discount[t, slot] == pytest.approx(discount, rel=1e-6, abs=1e-30)


def make_rollout(**changes: Any) -> Rollout:
    """Three steps of two slots; slot 0 is cut after the second step, slot 1 terminates after the first."""
    observation = np.arange(6, dtype=np.float32).reshape(3, 2, 1)  # step t, slot n: 2 t + n
    fields: dict[str, Any] = {
        "observation": {"state": observation},
        "action": np.full((3, 2, 1), 1.5, np.float32),
        "log_prob": np.zeros((3, 2, 1), np.float32),
        "reward": np.array([[1, 10], [2, 20], [4, 40]], np.float32),
        "terminated": np.array([[0, 1], [0, 0], [0, 0]], bool),
        "truncated": np.array([[0, 0], [1, 0], [0, 0]], bool),
        "last_observation": {"state": np.array([[100.0], [101.0]], np.float32)},
        "final_observation": {"state": np.array([[-7.0]], np.float32)},
        "policy_version": np.zeros((3, 2), np.int64),
        "episodes": (),
        "success": np.array([[0, 0], [0, 1], [0, 0]], bool),
    }
    return Rollout(**{**fields, **changes})


ACTED = np.ones((6, 1), np.float32)


def test_a_rollout_bootstraps_from_final_and_last_observations() -> None:
    found = rollout_transitions(make_rollout(), ("state",), ACTED, gamma=0.5)
    np.testing.assert_array_equal(found.observation["state"][:, 0], [0, 1, 2, 3, 4, 5])
    np.testing.assert_allclose(found.reward, [1, 10, 2, 20, 4, 40])
    np.testing.assert_allclose(found.discount, [0.5, 0.0, 0.5, 0.5, 0.5, 0.5])
    # Slot 0: next step, final observation of the cut episode, last one. Slot 1: (terminated), next, last.
    np.testing.assert_array_equal(found.next_observation["state"][[0, 2, 4], 0], [2, -7, 100])
    np.testing.assert_array_equal(found.next_observation["state"][[3, 5], 0], [5, 101])


def test_two_steps_of_a_rollout() -> None:
    found = rollout_transitions(make_rollout(), ("state",), ACTED, gamma=0.5, n_step=2)
    # Slot 0: 1 + 2/2 until the cut; 2 alone; 4 alone. Slot 1: 10 alone; 20 + 40/2; 40 alone.
    np.testing.assert_allclose(found.reward, [2, 10, 2, 40, 4, 40])
    np.testing.assert_allclose(found.discount, [0.25, 0.0, 0.5, 0.25, 0.5, 0.5])
    np.testing.assert_array_equal(found.next_observation["state"][[0, 2, 3, 4, 5], 0], [-7, -7, 101, 100, 101])


def test_success_as_reward_ends_the_episode() -> None:
    found = rollout_transitions(make_rollout(), ("state",), ACTED, gamma=0.5, rewards=SeenRewards("success"))
    np.testing.assert_allclose(found.reward, [0, 0, 0, 1, 0, 0])
    np.testing.assert_allclose(found.discount, [0.5, 0.0, 0.5, 0.0, 0.5, 0.5])
    with pytest.raises(ValueError, match="success of each step"):
        SeenRewards("success")(np.zeros(1), np.zeros(1, bool), None)


def chunks_of_two() -> Rollout:
    """Two decisions of two slots, chunks of two steps. Slot 0 plays both whole and is not cut; slot 1 succeeds at the first step of its
    first chunk, which goes on, and terminates after the first step of its second."""
    observation = np.arange(4, dtype=np.float32).reshape(2, 2, 1)  # decision t, slot n: 2 t + n
    return Rollout(
        observation={"state": observation},
        action=np.zeros((2, 2, 2), np.float32),
        log_prob=np.zeros((2, 2, 2), np.float32),
        reward=np.array([[3, 30], [12, 40]], np.float32),
        terminated=np.array([[0, 0], [0, 1]], bool),
        truncated=np.zeros((2, 2), bool),
        last_observation={"state": np.array([[100.0], [101.0]], np.float32)},
        final_observation={"state": np.zeros((0, 1), np.float32)},
        policy_version=np.zeros((2, 2), np.int64),
        episodes=(),
        success=np.array([[0, 1], [0, 0]], bool),
        chunk_reward=np.array([[[1, 2], [10, 20]], [[4, 8], [40, 0]]], np.float32),
        chunk_success=np.array([[[0, 0], [1, 0]], [[0, 0], [0, 0]]], bool),
        executed=np.array([[[1, 1], [1, 1]], [[1, 1], [1, 0]]], bool),
    )


def test_a_chunk_is_one_decision() -> None:
    """Rewards of a chunk are summed with their discounts; what follows counts γ to the power of the steps that were taken, γ = 1/2."""
    acted = np.arange(1, 9, dtype=np.float32).reshape(4, 2, 1)
    found = rollout_transitions(chunks_of_two(), ("state",), acted, gamma=0.5)
    np.testing.assert_allclose(found.reward, [1 + 2 / 2, 10 + 20 / 2, 4 + 8 / 2, 40])
    np.testing.assert_allclose(found.discount, [1 / 4, 1 / 4, 1 / 4, 0])
    np.testing.assert_array_equal(found.next_observation["state"][:3, 0], [2, 3, 100])
    np.testing.assert_array_equal(found.action[..., 0], [[1, 2], [3, 4], [5, 6], [7, 0]])  # the last step was not taken
    np.testing.assert_array_equal(found.executed, [[1, 1], [1, 1], [1, 1], [1, 0]])
    # Two decisions: the second is a chunk later. Slot 1 terminates there.
    two = rollout_transitions(chunks_of_two(), ("state",), acted, gamma=0.5, n_step=2)
    np.testing.assert_allclose(two.reward, [2 + 8 / 4, 20 + 40 / 4, 8, 40])
    np.testing.assert_allclose(two.discount, [1 / 16, 0, 1 / 4, 0])


def test_a_chunk_that_succeeds_in_its_middle_counts_up_to_there() -> None:
    found = rollout_transitions(chunks_of_two(), ("state",), np.zeros((4, 2, 1), np.float32), gamma=0.5, rewards=SeenRewards("success"))
    np.testing.assert_allclose(found.reward, [0, 1, 0, 0])
    np.testing.assert_allclose(found.discount, [1 / 4, 0, 1 / 4, 0])


def test_steps_of_chunks_are_counted_one_by_one_as_recorded_ones_are() -> None:
    """Slot 0 goes on, slot 1 ends with its third step and had no fourth; by success with its first, and the second is not counted."""
    normalizer = ReturnNormalizer(0.5)
    normalizer.fold(*rewards_of_steps(chunks_of_two(), SeenRewards()))
    returns = [1, 2.5, 5.25, 10.625, 10, 25, 52.5]
    assert vars(normalizer.moments) == pytest.approx({"count": 7, "mean": np.mean(returns), "var": np.var(returns)})
    assert normalizer.carried is not None
    assert normalizer.carried.tolist() == [10.625, 0]
    by_success = ReturnNormalizer(0.5)
    by_success.fold(*rewards_of_steps(chunks_of_two(), SeenRewards("success")))
    assert (by_success.moments.count, by_success.moments.mean) == pytest.approx((6, 1 / 6))
    reward, over, mask = rewards_of_steps(make_rollout(), SeenRewards())
    assert mask is None
    assert reward.tolist() == [[1, 10], [2, 20], [4, 40]]
    assert over.tolist() == [[False, True], [True, False], [False, False]]


def test_actions_are_normalised_as_denormalise_undoes() -> None:
    spec = ActionSpec.continuous([-2.0, 0.0, 3.0], [2.0, 10.0, 3.0])
    action = np.array([[-2.0, 0.0, 3.0], [1.0, 2.5, 3.0], [5.0, 10.0, 3.0]], np.float32)
    unit = spec.normalise(action)
    # (x - low) / half - 1; 5 lies beyond and is clipped; the last dimension has no extent.
    np.testing.assert_allclose(unit, [[-1.0, -1.0, 0.0], [0.5, -0.5, 0.0], [1.0, 1.0, 0.0]])
    np.testing.assert_allclose(spec.denormalise(unit), np.clip(action, [-2, 0, 3], [2, 10, 3]), rtol=1e-6)
    inside = spec.normalise(action, margin=0.01)
    np.testing.assert_allclose(inside[[0, 2], 0], [-0.99, 0.99], rtol=1e-6)
    assert inside[1, 0] == pytest.approx(0.5)


def test_a_saturated_action_is_within_the_bounds() -> None:
    """In float32, 0.1 + 2 · (0.35 - 0.1) / 2 is 0.35000002: an environment that checks its actions would refuse it."""
    space = gymnasium.spaces.Box(np.float32([0.1, -0.2]), np.float32([0.35, 0.9]))
    spec = ActionSpec.continuous(space.low, space.high)
    for unit, bound in ((1.0, space.high), (3.0, space.high), (-1.0, space.low)):
        action = spec.denormalise(np.full(2, unit, np.float32))
        np.testing.assert_array_equal(action, bound)
        assert space.contains(action)


@given(st.integers(0, 2**32 - 1))
def test_normalise_inverts_denormalise(seed: int) -> None:
    rng = np.random.default_rng(seed)
    low = rng.normal(size=4) * 10.0 ** rng.integers(-3, 3)
    spec = ActionSpec.continuous(low, low + 10.0 ** rng.uniform(-3, 3, 4))
    unit = rng.uniform(-1, 1, (5, 4)).astype(np.float32)
    # float32 of a bound that is large beside the range loses digits of the range itself.
    span = np.asarray(spec.high) - np.asarray(spec.low)
    tolerance = 1e-5 + 4e-7 * float((np.abs(low) / span).max())
    np.testing.assert_allclose(spec.normalise(spec.denormalise(unit)), unit, atol=tolerance)


def test_choices_pass_and_boundless_actions_are_refused() -> None:
    choices = ActionSpec.discrete(4).normalise(np.array([[0], [3]]))
    np.testing.assert_array_equal(choices, [[0], [3]])
    assert choices.dtype == np.int64
    with pytest.raises(UserError, match="bounds are not finite"):
        ActionSpec.continuous([-np.inf], [1.0]).normalise(np.zeros((1, 1)))
