"""Advantages by comparison within groups: by hand, against plain Python, and what must not matter."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied_rl.algorithms.grouped import (
    gpg,
    group_statistics,
    grpo,
    opo,
    outcome_score,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from embodied_rl.errors import NonFiniteError

DTYPES = [torch.float32, torch.float64]

# Two groups whose rows alternate: 7 holds 1, 3, 5 and -2 holds 0, 4.
SCORE = torch.tensor([1.0, 0.0, 3.0, 4.0, 5.0], dtype=torch.float64)
GROUP = torch.tensor([7, -2, 7, -2, 7])
MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1], [1, 1]], dtype=torch.bool)


def dr_grpo(**given: Any) -> Tensor:
    return grpo(**given, std=False)


def pass_at_k_std(**given: Any) -> Tensor:
    return pass_at_k(**given, std=True)


BY_GROUP: list[Callable[..., Tensor]] = [grpo, dr_grpo, rloo, opo, gpg, pass_at_k, pass_at_k_std]


def close(found: Tensor, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), atol=tolerance, rtol=tolerance)


# ---- by hand --------------------------------------------------------------------------------------------------------


def test_grpo_by_hand() -> None:
    # Group 7: mean 3, unbiased variance (4 + 0 + 4) / 2 = 4, std 2. Group -2: mean 2, variance (4 + 4) / 1 = 8, std sqrt(8).
    a, b = 2 / (2 + 1e-6), 2 / (8**0.5 + 1e-6)
    close(grpo(score=SCORE, group=GROUP), [-a, -b, 0.0, b, a])
    close(dr_grpo(score=SCORE, group=GROUP), [-2.0, -2.0, 0.0, 2.0, 2.0])


def test_rows_share_their_number_over_the_mask() -> None:
    expected = [[-2.0, -2.0], [-2.0, 0.0], [0.0, 0.0], [0.0, 2.0], [2.0, 2.0]]
    close(dr_grpo(score=SCORE, group=GROUP, mask=MASK), expected)


def test_rloo_by_hand() -> None:
    # 1 - (3 + 5)/2 = -3; 3 - (1 + 5)/2 = 0; 5 - (1 + 3)/2 = 3. The pair: 0 - 4 and 4 - 0.
    close(rloo(score=SCORE, group=GROUP), [-3.0, -4.0, 0.0, 4.0, 3.0])


def test_opo_by_hand() -> None:
    # Lengths 2, 1, 2, 1, 2: group 7 (2 + 6 + 10)/6 = 3; group -2 (0 + 4)/2 = 2. Then with lengths 4, 3, 1, 1, 1 of their own:
    # group 7 (4 + 3 + 5)/6 = 2; group -2 (0 + 4)/4 = 1.
    close(opo(score=SCORE, group=GROUP, mask=MASK)[:, 1], [-2.0, 0.0, 0.0, 2.0, 2.0])
    close(opo(score=SCORE, group=GROUP, length=torch.tensor([4, 3, 1, 1, 1])), [-1.0, -1.0, 1.0, 3.0, 3.0])


def test_gpg_by_hand() -> None:
    # The third row lies on its group's mean: 4 of 5 rows give a gradient, so the factor is 5/4.
    close(gpg(score=SCORE, group=GROUP), [-2.5, -2.5, 0.0, 2.5, 2.5])
    # A group that solved everything (1, 1) next to one that did not (0, 1): its rows give no gradient, 4/2 = 2.
    solved, group = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    close(gpg(score=solved, group=group), [0.0, 0.0, -1.0, 1.0])
    # Counting scores that are not 0, there are three: 4/3 · 1/2.
    close(gpg(score=solved, group=group, nonzero="score"), [0.0, 0.0, -2 / 3, 2 / 3], 1e-7)


def test_pass_at_k_by_hand() -> None:
    # Best minus second best: 5 - 3 and 4 - 0.
    close(pass_at_k(score=SCORE, group=GROUP), [0.0, 0.0, 0.0, 4.0, 2.0])
    close(pass_at_k_std(score=SCORE, group=GROUP), [0.0, 0.0, 0.0, 4 / (8**0.5 + 1e-6), 2 / (2 + 1e-6)])
    # Two are best: none of them made the difference.
    close(pass_at_k(score=torch.tensor([1.0, 0.0, 1.0]), group=torch.zeros(3, dtype=torch.long)), [0.0, 0.0, 0.0])


def test_remax_by_hand() -> None:
    close(remax(score=SCORE, greedy_score=torch.tensor([1.0, 1, 2, 2, 3])), [0.0, -1.0, 1.0, 2.0, 2.0])
    close(remax(score=SCORE[:2], greedy_score=torch.tensor([3.0, 1.0]), mask=MASK[:2]), [[-2.0, -2.0], [-1.0, 0.0]])
    returns = torch.tensor([[3.0, 1.0], [2.0, torch.nan]])
    close(remax(score=returns, greedy_score=torch.tensor([1.0, 5.0]), mask=MASK[:2]), [[2.0, 0.0], [-3.0, 0.0]])


def test_reinforce_plus_plus_by_hand() -> None:
    # gamma .5. Row 0: 2 and 1 + .5*2 = 2; row 1: its second entry is masked, 5. Numbers 2, 2, 5: mean 3, variance (1 + 1 + 4)/2 = 3.
    reward = torch.tensor([[1.0, 2.0], [5.0, torch.nan]], dtype=torch.float64)
    scale = (3 + 1e-8) ** 0.5
    close(reinforce_plus_plus(reward=reward, gamma=0.5, mask=MASK[:2]), [[-1 / scale, -1 / scale], [2 / scale, 0.0]])


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # One group of 1 and 4, minus 2.5: -1.5 at two units, 1.5 at one. Mean -.5, variance (1 + 1 + 4)/2 = 3.
    found = reinforce_plus_plus_baseline(score=torch.tensor([1.0, 4.0], dtype=torch.float64), group=torch.tensor([3, 3]), mask=MASK[:2])
    scale = (3 + 1e-8) ** 0.5
    close(found, [[-1 / scale, -1 / scale], [2 / scale, 0.0]])


def test_outcome_score_by_hand() -> None:
    reward = torch.tensor([[1.0, 2.0], [4.0, torch.nan], [torch.inf, torch.nan]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.bool)
    assert outcome_score(reward=reward, mask=mask).tolist() == [3.0, 4.0, 0.0]
    assert outcome_score(reward=torch.tensor([[1.0, 2.0]])).tolist() == [3.0]


# ---- against plain Python -------------------------------------------------------------------------------------------


def in_python(name: str, scores: list[float], lengths: list[int]) -> list[float]:
    """One group of two or more that differ, with the standard library."""
    mean, deviation = statistics.fmean(scores), statistics.stdev(scores)
    if name == "grpo":
        return [(s - mean) / (deviation + 1e-6) for s in scores]
    if name == "dr_grpo":
        return [s - mean for s in scores]
    if name == "rloo":
        return [s - statistics.fmean(scores[:i] + scores[i + 1 :]) for i, s in enumerate(scores)]
    if name == "opo":
        return [s - statistics.fmean(scores, weights=lengths) for s in scores]
    best, second = sorted(scores, reverse=True)[:2]
    scale = deviation + 1e-6 if name == "pass_at_k_std" else 1.0
    return [(best - second) / scale if s == best else 0.0 for s in scores]


def random_rows(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """23 rows of 5 groups, mixed, with masks that have holes; rows 4 and 11 are padding with NaN."""
    rng = np.random.default_rng(2)
    group = np.concatenate([np.arange(5), np.arange(5), rng.integers(0, 5, 13)])
    score, mask = rng.normal(size=23), rng.random((23, 6)) < 0.6
    mask[:, 0] = True
    mask[[4, 11]] = False
    score[[4, 11]] = np.nan
    ids = np.array([40, -7, 2**40, 3, 0])
    return {"score": torch.tensor(score, dtype=dtype), "group": torch.from_numpy(ids[group]), "mask": torch.from_numpy(mask)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [method for method in BY_GROUP if method is not gpg])
def test_equals_the_standard_library(method: Callable[..., Tensor], dtype: torch.dtype) -> None:
    rows = random_rows(dtype)
    found = method(**rows)
    assert found.dtype == dtype
    assert found.shape == (23, 6)
    assert (found[~rows["mask"]] == 0).all()
    for owner in set(rows["group"].tolist()):
        members = [row for row in range(23) if rows["group"][row] == owner and rows["mask"][row].any()]
        assert len(members) > 1
        scores, lengths = rows["score"][members].tolist(), rows["mask"][members].sum(1).tolist()
        for row, expected in zip(members, in_python(method.__name__, scores, lengths), strict=True):
            close(found[row][rows["mask"][row]], [expected] * int(rows["mask"][row].sum()), 1e-6 if dtype == torch.float32 else 1e-12)


# ---- what must be exact ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BY_GROUP)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_scores_give_exactly_zero(method: Callable[..., Tensor], dtype: torch.dtype) -> None:
    for value in (0.0, 0.1, -3.3e5, 1e-9):
        score, group = torch.full((7,), value, dtype=dtype), torch.zeros(7, dtype=torch.long)
        assert method(score=score, group=group, mask=torch.ones((7, 3), dtype=torch.bool)).abs().max() == 0.0


@pytest.mark.parametrize("method", BY_GROUP)
def test_rounding_is_no_signal(method: Callable[..., Tensor]) -> None:
    """The same eight rewards in another order: the float32 sums differ in their last bit, and are the same score."""
    rewards = np.random.default_rng(0).normal(size=8).astype(np.float32)
    orders = [np.random.default_rng(seed).permutation(8) for seed in range(6)]
    score = torch.tensor([np.add.accumulate(rewards[order], dtype=np.float32)[-1] for order in orders])
    assert score.unique().numel() > 1, "the trap is there"
    mask = torch.ones((6, 2), dtype=torch.bool)
    assert method(score=score, group=torch.ones(6, dtype=torch.long), mask=mask).abs().max() == 0.0
    # The naive formula makes something of it.
    naive = (score.double() - score.double().mean()) / (score.double().std() + 1e-6)
    assert naive.abs().max() > 1e-3


def test_small_differences_that_are_real_still_count() -> None:
    score = torch.tensor([1.0, 1.0 + 1e-5])
    assert grpo(score=score, group=torch.zeros(2, dtype=torch.long))[1] > 0.5
    close(dr_grpo(score=score.double(), group=torch.zeros(2, dtype=torch.long)), [-5e-6, 5e-6], 1e-7)


@pytest.mark.parametrize("method", [grpo, dr_grpo, rloo, opo])
def test_a_group_of_one_keeps_its_score_or_gets_nothing(method: Callable[..., Tensor]) -> None:
    score, group = torch.tensor([0.3, 1.0, 0.0], dtype=torch.float64), torch.tensor([5, 9, 9])
    mask = torch.ones((3, 2), dtype=torch.bool)
    assert method(score=score, group=group, mask=mask)[0].tolist() == [0.3, 0.3]
    assert method(score=score, group=group, mask=mask, alone="zero")[0].tolist() == [0.0, 0.0]


def test_pass_at_k_refuses_a_group_of_one() -> None:
    score, group = torch.tensor([0.3, 1.0, 0.0]), torch.tensor([5, 9, 9])
    with pytest.raises(ValueError, match="group 5 has one row"):
        pass_at_k(score=score, group=group)
    # A row of which nothing counts is no row.
    mask = torch.tensor([[False], [True], [True]])
    close(pass_at_k(score=score, group=group, mask=mask)[:, 0], [0.0, 1.0, 0.0])


def test_gpg_of_a_group_of_one() -> None:
    score, group = torch.tensor([0.5, 1.0, 0.0]), torch.tensor([5, 9, 9])
    close(gpg(score=score, group=group), [0.5, 0.5, -0.5])
    # Only two of three rows are left with a gradient: factor 3/2.
    close(gpg(score=score, group=group, alone="zero"), [0.0, 0.75, -0.75])


# ---- what must not matter -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BY_GROUP)
def test_order_of_rows_does_not_matter(method: Callable[..., Tensor]) -> None:
    rows = random_rows()
    order = torch.from_numpy(np.random.default_rng(1).permutation(23))
    close(method(**{name: part[order] for name, part in rows.items()}), method(**rows)[order])


@pytest.mark.parametrize("method", BY_GROUP)
def test_padding_rows_and_units_do_not_matter(method: Callable[..., Tensor]) -> None:
    rows = random_rows()
    padded = {
        "score": torch.cat([rows["score"], torch.full((4,), torch.nan, dtype=torch.float64)]),
        "group": torch.cat([rows["group"], rows["group"][:4]]),
        "mask": torch.nn.functional.pad(rows["mask"], (2, 3, 0, 4)),
    }
    close(method(**padded)[:23, 2:8], method(**rows))


@pytest.mark.parametrize("method", [method for method in BY_GROUP if method is not gpg])
def test_groups_can_be_handed_over_in_parts(method: Callable[..., Tensor]) -> None:
    """Whole groups in one micro-batch or another: GPG alone looks at the batch as a whole."""
    rows = random_rows()
    whole = method(**rows)
    for part in (rows["group"] < 3, rows["group"] >= 3):
        close(method(**{name: array[part] for name, array in rows.items()}), whole[part])


@pytest.mark.parametrize("method", BY_GROUP)
def test_scale_of_scores(method: Callable[..., Tensor]) -> None:
    rows = random_rows()
    scaled = method(**{**rows, "score": 1000 * rows["score"]})
    factor = 1.0 if method in (grpo, pass_at_k_std) else 1000.0
    close(scaled, factor * method(**rows), 3e-5)


@pytest.mark.parametrize("method", BY_GROUP)
def test_advantages_are_constants(method: Callable[..., Tensor]) -> None:
    rows = random_rows()
    rows["score"].requires_grad_(True)
    assert not method(**rows).requires_grad


def test_integer_scores() -> None:
    found = dr_grpo(score=torch.tensor([0, 1]), group=torch.tensor([1, 1], dtype=torch.int32))
    assert found.dtype == torch.float32
    assert found.tolist() == [-0.5, 0.5]


def test_nothing_gives_nothing() -> None:
    none = {"score": torch.zeros(0), "group": torch.zeros(0, dtype=torch.long), "mask": torch.zeros((0, 4), dtype=torch.bool)}
    for method in BY_GROUP:
        assert method(**none).shape == (0, 4)


def test_statistics_by_hand() -> None:
    found = group_statistics(score=SCORE, group=GROUP, rows=torch.tensor([True, True, True, True, False]))
    # Ascending by id: -2 with 0 and 4; 7 with 1 and 3, mean 2, variance 2.
    assert found.index.tolist() == [1, 0, 1, 0, 1]
    assert found.count.tolist() == [2.0, 2.0]
    assert found.mean.tolist() == [2.0, 2.0]
    close(found.std, [8**0.5, 2**0.5])
    assert found.largest.tolist() == [4.0, 3.0]
    assert found.centered.tolist() == [-1.0, -2.0, 1.0, 2.0, 0.0]
    assert not found.equal.any()
    assert not found.single.any()


# ---- mistakes -------------------------------------------------------------------------------------------------------


def test_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match=r"must be \[B\]"):
        grpo(score=SCORE[:, None], group=GROUP)
    with pytest.raises(ValueError, match=r"integer ids, got torch\.float32"):
        grpo(score=SCORE, group=GROUP.float())
    with pytest.raises(ValueError, match=r"mask must be bool \[B, L\]"):
        grpo(score=SCORE, group=GROUP, mask=MASK.long())
    with pytest.raises(NonFiniteError, match=r"score is NaN or infinite in 1 rows \(row 2\)"):
        grpo(score=torch.where(torch.arange(5) == 2, torch.nan, SCORE), group=GROUP, mask=MASK)
    with pytest.raises(ValueError, match="give mask"):
        opo(score=SCORE, group=GROUP)
    with pytest.raises(ValueError, match="must not be negative"):
        opo(score=SCORE, group=GROUP, length=-GROUP)
    with pytest.raises(ValueError, match=r"alone='none' is not a choice\. Known: raw, zero"):
        rloo(score=SCORE, group=GROUP, alone="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nonzero='rows' is not a choice\. Known: advantage, score"):
        gpg(score=SCORE, group=GROUP, nonzero="rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="greedy_score"):
        remax(score=SCORE, greedy_score=SCORE[1:])
