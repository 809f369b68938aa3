from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.errors import UserError
from embodied_rl.learning.rows import Adjustment, adjust_rows
from tests.learning.samples import CONFIG, make_batch, make_policy, rollout_learner, update


def test_by_hand() -> None:
    # lcm(4, 6) = 12. 20 rows: rem 8, so copy adds 4 (24 rows), delete drops 8 (12 rows), auto takes the nearer: copy.
    assert len(adjust_rows(20, divisors=[4, 6], mode="copy", seed=0)[0]) == 24
    assert len(adjust_rows(20, divisors=[4, 6], mode="delete", seed=0)[0]) == 12
    assert len(adjust_rows(20, divisors=[4, 6], mode="auto", seed=0)[0]) == 24
    # 15 rows: rem 3; delete is nearer. 18 rows: both 6 away, and a copy loses nothing. 3 rows: deleting would leave none.
    assert len(adjust_rows(15, divisors=[4, 6], mode="auto", seed=0)[0]) == 12
    assert len(adjust_rows(18, divisors=[4, 6], mode="auto", seed=0)[0]) == 24
    assert len(adjust_rows(3, divisors=[4, 6], mode="auto", seed=0)[0]) == 12
    # 29 rows: the largest multiple is 24. 5 rows: all of them, and 7 copies.
    assert len(adjust_rows(29, divisors=[4, 6], mode="random_sample", seed=0)[0]) == 24
    filled, weight = adjust_rows(5, divisors=[4, 6], mode="random_sample", seed=0)
    assert set(filled.tolist()) == set(range(5))
    assert weight.tolist() == [1.0] * 5 + [0.0] * 7


@given(num_rows=st.integers(1, 60), divisors=st.lists(st.integers(1, 8), max_size=3), seed=st.integers(0, 2**31))
def test_copies_change_no_weighted_sum(num_rows: int, divisors: list[int], seed: int) -> None:
    multiple = int(np.lcm.reduce(divisors)) if divisors else 1
    gradient = np.random.default_rng(seed).normal(size=(num_rows, 3))
    adjusted, weight = adjust_rows(num_rows, divisors=divisors, mode="copy", seed=seed)
    assert len(adjusted) % multiple == 0
    assert len(adjusted) - num_rows < multiple
    np.testing.assert_allclose((gradient[adjusted] * weight[:, None]).sum(0), gradient.sum(0), atol=1e-12)
    times = np.bincount(adjusted, minlength=num_rows)
    assert times.max() - times.min() <= 1, "the copies are spread as evenly as can be"


@given(num_rows=st.integers(12, 60), seed=st.integers(0, 2**31))
def test_deleting_keeps_distinct_rows_in_order(num_rows: int, seed: int) -> None:
    adjusted, weight = adjust_rows(num_rows, divisors=[12], mode="delete", seed=seed)
    assert len(adjusted) == num_rows // 12 * 12
    assert (np.diff(adjusted) > 0).all()
    assert adjusted.min() >= 0
    assert adjusted.max() < num_rows
    assert (weight == 1).all()


@pytest.mark.parametrize(("mode", "expected"), [("delete", 4 / 6), ("random_sample", 4 / 6)])
def test_every_row_is_equally_likely(mode: str, expected: float) -> None:
    # 6 rows, D = 4: both leave 4 rows, so that each of the 6 is there in 4/6 of the draws; over 4000 draws the standard error of
    # that mean is sqrt(2/9 / 4000) = 0.0075.
    times = np.zeros(6)
    for seed in range(4000):
        drawn = np.bincount(adjust_rows(6, divisors=[4], mode=mode, seed=seed)[0], minlength=6)  # type: ignore[arg-type]
        assert drawn.max() == 1, "without replacement"
        times += drawn
    np.testing.assert_allclose(times / 4000, expected, atol=0.04)


def test_the_seed_decides() -> None:
    first, _ = adjust_rows(10, divisors=[8], mode="copy", seed=[3, 1])
    assert adjust_rows(10, divisors=[8], mode="copy", seed=[3, 1])[0].tolist() == first.tolist()
    assert any(adjust_rows(10, divisors=[8], mode="copy", seed=[3, i])[0].tolist() != first.tolist() for i in range(2, 5))
    for mode in ("copy", "delete", "auto", "random_sample"):
        whole, _ = adjust_rows(16, divisors=[8], mode=mode, seed=0)
        assert whole.tolist() == list(range(16)), "nothing to adjust"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"leaves none: set algorithm\.adjust_batch=copy"):
        adjust_rows(5, divisors=[8], mode="delete", seed=0)


@pytest.mark.parametrize(
    ("mode", "sizes", "num_distinct"),
    [
        # 10 rows in minibatches of 4, of micro-batches of 2: D = 4.
        (None, [3, 3, 4], 10),
        ("delete", [4, 4], 8),
        ("random_sample", [4, 4], 8),
        # 12 places in three minibatches of 4, of which the two copies count for nothing.
        ("copy", None, 10),
        # Two rows above a multiple and two below the next: copies, which lose nothing.
        ("auto", None, 10),
    ],
)
def test_the_minibatches_of_an_update(
    mode: Adjustment | None, sizes: list[int] | None, num_distinct: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy()
    config = replace(CONFIG, num_epochs=2, minibatch_size=4, micro_batch_size=2, adjust_batch=mode)
    learner = rollout_learner(policy, config)
    taken: list[np.ndarray] = []
    step = learner.executor.step

    def seen(chosen: np.ndarray, *rest: Any, **named: Any) -> dict[str, float]:
        taken.append(chosen)
        return step(chosen, *rest, **named)

    monkeypatch.setattr(learner.executor, "step", seen)
    update(learner, make_batch(policy, rows=10))
    for epoch in np.array_split(np.arange(len(taken)), 2):
        rows = [taken[number] for number in epoch]
        if sizes is None:
            assert len(rows) == 3
            assert max(map(len, rows)) <= 4
        else:
            assert sorted(map(len, rows)) == sizes
        every = np.concatenate(rows).tolist()
        assert len(set(every)) == len(every) == num_distinct, "no row counts twice"
    first, second = (
        set(np.concatenate([taken[number] for number in epoch]).tolist()) for epoch in np.array_split(np.arange(len(taken)), 2)
    )
    assert first == second, "the rows of an update are chosen once"
