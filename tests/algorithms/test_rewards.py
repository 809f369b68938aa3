from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import Literal

import gymnasium
import numpy as np
import pytest
import torch

from embodied_rl.algorithms.rewards import Moments, ReturnNormalizer, group_ids, normalize_reward
from embodied_rl.errors import NonFiniteError, UserError


def test_equals_a_loop_over_all_rollouts() -> None:
    rng = np.random.default_rng(0)
    normalizer = ReturnNormalizer(gamma=0.9, clip=2.0)
    running, seen = np.zeros(3), []
    for _ in range(4):
        reward = (rng.normal(size=(11, 3)) * 3 + 1).astype(np.float32)
        done = rng.random((11, 3)) < 0.2
        normalised = normalizer(reward, done)
        for t in range(11):
            running = running * 0.9 + reward[t]
            seen.extend(running.tolist())
            running[done[t]] = 0.0
        assert normalizer.moments.var == pytest.approx(np.var(seen), rel=1e-10)
        expected = np.clip(reward / np.sqrt(np.var(seen) + 1e-8), -2.0, 2.0)
        np.testing.assert_allclose(normalised, expected, rtol=1e-5)
        assert normalised.dtype == np.float32


class _Scripted(gymnasium.Env[np.ndarray, np.int64]):
    """Rewards 1, 2, 3, … without end."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.total = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return np.zeros(1, np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.total += 1
        return np.zeros(1, np.float32), float(self.total), False, False, {}


def test_statistics_are_those_of_gymnasium() -> None:
    # Without episode ends: gymnasium 1.4 forgets the past one step early, at the terminal reward itself.
    wrapped = gymnasium.wrappers.NormalizeReward(_Scripted(), gamma=0.95)
    wrapped.reset(seed=0)
    for _ in range(50):
        wrapped.step(np.int64(0))
    normalizer = ReturnNormalizer(gamma=0.95)
    normalizer(np.arange(1.0, 51.0)[:, None], np.zeros((50, 1), bool))
    # gymnasium starts from a pseudo-count of 1e-4, hence the tolerance.
    assert normalizer.moments.var == pytest.approx(float(wrapped.return_rms.var), rel=1e-3)


def test_state_survives_json_exactly() -> None:
    rng = np.random.default_rng(1)
    reward, done = rng.normal(size=(2, 8, 4)), np.zeros((8, 4), bool)
    first, second = ReturnNormalizer(0.99), ReturnNormalizer(0.99)
    first(reward[0], done)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert np.array_equal(first(reward[1], done), second(reward[1], done))
    assert first.state_dict() == second.state_dict()


def test_restart_forgets_running_returns_alone() -> None:
    normalizer = ReturnNormalizer(gamma=1.0)
    normalizer(np.full((5, 1), 2.0), np.zeros((5, 1), bool))
    count = normalizer.moments.count
    normalizer.restart_episodes()
    normalizer(np.full((1, 1), 2.0), np.zeros((1, 1), bool))
    assert normalizer.carried is not None
    assert normalizer.carried.tolist() == [2.0]
    assert normalizer.moments.count == count + 1


# --- statistics of batches and groups --------------------------------------------------------------------------------


def by_loop(reward: list[float], group: list[int], mean: str, std: str, shown: list[bool]) -> list[float]:
    """The definition row by row, with the standard library alone."""
    result = []
    for i, r in enumerate(reward):
        if not shown[i]:
            result.append(0.0)
            continue
        rows = {
            "batch": [reward[k] for k in range(len(reward)) if shown[k]],
            "group": [reward[k] for k in range(len(reward)) if shown[k] and group[k] == group[i]],
        }
        centred = r - (statistics.fmean(rows[mean]) if mean != "none" else 0.0)
        if std != "none":
            sigma = statistics.stdev(rows[std]) if len(rows[std]) > 1 else 0.0
            centred = centred / (sigma + 1e-6) if sigma > 1e-6 else 0.0
        result.append(centred)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std", ["none", "batch", "group"])
@pytest.mark.parametrize("mean", ["none", "batch", "group"])
def test_normalize_equals_a_loop(mean: str, std: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    reward = torch.from_numpy(rng.normal(size=40) * 3 + 5).to(dtype)
    group = torch.from_numpy(rng.integers(-4, 9, 40) * 10**9)
    shown = torch.from_numpy(rng.random(40) < 0.8)
    expected = by_loop(reward.tolist(), group.tolist(), mean, std, shown.tolist())
    poisoned = torch.where(shown, reward, float("nan"))
    result = normalize_reward(reward=poisoned, mean=mean, std=std, group=group, mask=shown)  # type: ignore[arg-type]
    assert result.dtype == dtype
    np.testing.assert_allclose(result, expected, rtol=1e-6 if dtype == torch.float32 else 1e-12, atol=1e-12)
    order = torch.from_numpy(rng.permutation(40))
    shuffled = normalize_reward(reward=reward[order], mean=mean, std=std, group=group[order], mask=shown[order])  # type: ignore[arg-type]
    torch.testing.assert_close(shuffled, result[order])


def test_normalize_by_hand() -> None:
    reward, group = torch.tensor([1.0, 5.0, 3.0, 10.0], dtype=torch.float64), torch.tensor([7, -2, 7, -2])
    # Group 7: mean 2, deviations -1 and 1, unbiased std sqrt(2). Group -2: 7.5, ±2.5, std sqrt(12.5).
    result = normalize_reward(reward=reward, mean="group", std="group", group=group)
    half = 1 / math.sqrt(2)
    assert result.tolist() == pytest.approx([-half, -half, half, half], rel=1e-5)
    # Batch: mean 4.75; std sqrt((3.75² + 0.25² + 1.75² + 5.25²) / 3) = sqrt(44.75 / 3)
    result = normalize_reward(reward=reward, mean="group", std="batch", group=group)
    assert result.tolist() == pytest.approx([x / (math.sqrt(44.75 / 3) + 1e-6) for x in (-1, -2.5, 1, 2.5)])


@pytest.mark.parametrize("value", [0.1, 1e9 / 3, -7.3e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_are_exactly_zero(value: float, dtype: torch.dtype) -> None:
    # The mean of seven times 0.1 is not 0.1 in floating point; what is left, over 1e-6, must not become a reward.
    reward = torch.full((7,), value, dtype=dtype)
    group = torch.zeros(7, dtype=torch.int64)
    for source in ("batch", "group"):
        for std in ("none", source):
            assert normalize_reward(reward=reward, mean=source, std=std, group=group).tolist() == [0.0] * 7  # type: ignore[arg-type]
        assert normalize_reward(reward=reward, std=source, group=group).tolist() == [0.0] * 7  # type: ignore[arg-type]


def test_one_of_a_kind_has_no_spread() -> None:
    reward, group = torch.tensor([4.0, 1.0, 3.0]), torch.tensor([0, 1, 1])
    assert normalize_reward(reward=reward, std="group", group=group)[0].item() == 0.0
    # Without a sigma there is nothing to divide by: the reward minus itself, or as it is.
    assert normalize_reward(reward=reward, mean="group", group=group).tolist() == [0.0, -1.0, 1.0]
    assert normalize_reward(reward=reward).tolist() == [4.0, 1.0, 3.0]
    assert normalize_reward(reward=reward[:1], std="batch").tolist() == [0.0]


def test_normalized_rewards_do_not_see_scale_or_offset() -> None:
    rng = np.random.default_rng(2)
    reward, group = torch.from_numpy(rng.normal(size=30)), torch.from_numpy(rng.integers(0, 5, 30))
    first = normalize_reward(reward=reward, mean="group", std="batch", group=group)
    second = normalize_reward(reward=1000 * reward - 77, mean="group", std="batch", group=group)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_running_statistics() -> None:
    running = Moments()
    for part in ([1.0, 2.0], [3.0, 6.0]):
        running = running.merge(Moments.of(torch.tensor(part)))
    # 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, unbiased 14 / 3.
    assert running.mean == pytest.approx(3.0)
    assert running.std == pytest.approx(math.sqrt(14 / 3))
    result = normalize_reward(reward=torch.tensor([6.0, 3.0]), mean="running", std="running", running=running)
    assert result.tolist() == pytest.approx([3 / math.sqrt(14 / 3), 0.0], rel=1e-5)
    assert Moments.from_dict(json.loads(json.dumps(running.to_dict()))) == running


def test_moments_merge_in_any_grouping() -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=100) * 5 - 3
    mask = rng.random(100) < 0.5
    parts = [Moments.of(part) for part in np.split(x, [1, 1, 30, 77])]
    left, right = Moments(), Moments()
    for part in parts:
        left = left.merge(part)
    for part in reversed(parts):
        right = part.merge(right)
    for merged in (left, right):
        assert (merged.mean, merged.var, merged.count) == pytest.approx((x.mean(), x.var(), 100), rel=1e-12)
    assert Moments.of(torch.from_numpy(x), torch.from_numpy(mask)).mean == pytest.approx(x[mask].mean())
    assert Moments.of(x[:0]) == Moments()


def test_normalize_refuses_what_it_cannot_do() -> None:
    reward = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match="Did you mean 'group'"):
        normalize_reward(reward=reward, mean="grup")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs group"):
        normalize_reward(reward=reward, std="group")
    with pytest.raises(ValueError, match="needs running"):
        normalize_reward(reward=reward, mean="running")
    with pytest.raises(ValueError, match="group must be integers"):
        normalize_reward(reward=reward, mean="group", group=torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"shape \[B\]"):
        normalize_reward(reward=reward[:, None])
    with pytest.raises(NonFiniteError, match="row 1 is nan"):
        normalize_reward(reward=torch.tensor([1.0, float("nan")]), mean="batch")


# --- grouping by metadata --------------------------------------------------------------------------------------------


@dataclass
class _Row:
    seed: int
    task: dict


ROWS = [
    {"task": {"name": "push", "tags": ["a", "b"]}, "seed": np.int64(3), "group.number": 0},
    {"task": {"name": "pick", "tags": ["a"]}, "seed": 3, "group.number": 1},
    {"task": {"name": "push", "tags": ["a", "b"]}, "seed": "3", "group.number": 0},
]


def test_groups_by_dotted_keys() -> None:
    assert group_ids(ROWS, "task.name").tolist() == [0, 1, 0]
    assert group_ids(ROWS, "task.tags").tolist() == [0, 1, 0]
    assert group_ids(ROWS, "group.number").tolist() == [0, 1, 0], "a key that has a dot of its own"
    assert group_ids(ROWS, "seed").tolist() == [0, 0, 1], "3 of numpy is 3, '3' is not"
    assert group_ids(ROWS, ["task.name", "seed"]).tolist() == [0, 1, 2]
    assert group_ids([_Row(1, {"name": "x"}), _Row(1, {"name": "y"})], "task.name").tolist() == [0, 1]
    assert group_ids([], "seed").shape == (0,)


def test_a_key_that_is_missing_is_named() -> None:
    with pytest.raises(UserError, match=r"'task.nam' does not exist: 'nam' is missing. Did you mean 'name'\? Known: name, tags."):
        group_ids(ROWS, "task.nam")
    with pytest.raises(UserError, match="'seed' does not exist: 'seed' is missing"):
        group_ids([{"seed": 1}, {}], "seed")


@pytest.mark.parametrize("source", ["batch", "group"])
def test_returns_that_differ_by_rounding_are_equal(source: Literal["batch", "group"]) -> None:
    """One unit in the last place of 100 is 7.6e-6, more than the 1e-6 below which a standard deviation is none."""
    reward = torch.tensor([100.0, 100.0 + 2**-17, 100.0])
    assert reward.std() > 1e-6
    assert normalize_reward(reward=reward, mean=source, std=source, group=torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]
