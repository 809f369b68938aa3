"""Open-loop figures by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embodied_rl.episodes.assessment import chunks_of, compare, query_steps, steps_of, token_ids
from embodied_rl.types import ActionSpec

VECTORS = ActionSpec.continuous([-1, 0], [1, 10])
CHOICES = ActionSpec.discrete(3)


def test_queries_and_chunks() -> None:
    np.testing.assert_array_equal(query_steps(7, 3), [0, 3, 6])
    np.testing.assert_array_equal(query_steps(2, 5), [0])
    actions = np.arange(14).reshape(7, 2)
    chunks = chunks_of(actions, 3)
    assert chunks.shape == (3, 3, 2)
    np.testing.assert_array_equal(chunks[1], [[6, 7], [8, 9], [10, 11]])
    np.testing.assert_array_equal(chunks[2], [[12, 13]] * 3)
    np.testing.assert_array_equal(steps_of(chunks, 7), actions)
    np.testing.assert_array_equal(steps_of(chunks_of(actions, 1), 7), actions)
    with pytest.raises(ValueError, match=">= 1"):
        query_steps(3, 0)


def test_vectors_by_hand() -> None:
    # One episode of one step that is right, one of two steps that are off by 0.2 and 0.4, and by 1 and 3.
    recorded = [np.array([[0.5, 5.0]]), np.array([[0.0, 2.0], [1.0, 10.0]])]
    predicted = [np.array([[0.5, 5.0]]), np.array([[0.2, 3.0], [0.6, 7.0]])]
    log_prob = [np.array([[-1.0, -2.0]]), np.array([[-1.0, -1.0], [-3.0, -5.0]])]
    found = compare(predicted, recorded, log_prob, VECTORS, num_bins=10, horizon=2)
    # Steps first, then episodes: dimension 0: (0 + (0.04 + 0.16)/2) / 2, dimension 1: (0 + (1 + 9)/2) / 2.
    assert found.mse_by_dim == pytest.approx((0.05, 2.5))
    assert found.mae_by_dim == pytest.approx((0.15, 1.0))
    assert found.mse is not None
    assert found.mae is not None
    assert found.mse.mean == pytest.approx(1.275)
    assert found.mae.mean == pytest.approx(0.575)
    # (−3 + (−2 − 8)/2) / 2
    assert found.log_likelihood.mean == pytest.approx(-4.0)
    # Means of the recorded actions by episode: 0.5 and 0.5: 0.5; variance (0 + (0.25 + 0.25)/2) / 2.
    assert found.explained_by_dim[0] == pytest.approx(1 - 0.05 / 0.125)
    # Ten bins of 0.2 and of 1: recorded (7, 5), (5, 2), (9, 9); predicted (7, 5), (6, 3), (8, 7).
    assert found.accuracy_by_dim == pytest.approx((0.5, 0.5))
    assert found.accuracy.mean == pytest.approx(0.5)
    # Dimension 0: bin 7 is all of the first episode and nothing of the second: ½. So in dimension 1.
    assert found.majority == pytest.approx(0.5)
    # 1.0 and 10.0 lie at their bounds, of six entries.
    assert found.bound_share == pytest.approx(2 / 6)
    assert (found.horizon, found.num_episodes, found.num_steps) == (2, 2, 3)


def test_choices_by_hand() -> None:
    recorded = [np.array([[0], [1]]), np.array([[2], [2], [2], [1]])]
    predicted = [np.array([[0], [0]]), np.array([[2], [2], [0], [1]])]
    log_prob = [np.log([[0.5], [0.5]]), np.log([[0.25]] * 4)]
    found = compare(predicted, recorded, log_prob, CHOICES)
    assert found.accuracy.mean == pytest.approx((0.5 + 0.75) / 2)
    assert found.log_likelihood.mean == pytest.approx((math.log(0.5) + math.log(0.25)) / 2)
    # Always 2: nothing of the first episode, three quarters of the second.
    assert found.majority == pytest.approx(0.375)
    assert found.mse is None
    assert found.num_bins == 0


def test_what_never_changes_explains_nothing_and_what_is_impossible_has_no_likelihood() -> None:
    recorded, predicted = [np.full((3, 2), 0.5)] * 2, [np.zeros((3, 2))] * 2
    found = compare(predicted, recorded, [np.full((3, 1), -np.inf)] * 2, VECTORS)
    assert found.log_likelihood.mean == -math.inf
    assert np.isnan(found.explained_by_dim).all()


def test_the_interval_is_over_episodes() -> None:
    rng = np.random.default_rng(0)
    recorded = [np.zeros((5, 2)) for _ in range(200)]
    predicted = [np.repeat(rng.normal(0, 0.1, (1, 2)), 5, axis=0) for _ in range(200)]
    found = compare(predicted, recorded, [np.zeros((5, 1))] * 200, VECTORS)
    assert found.mse is not None
    episodes = np.array([(part**2).mean() for part in predicted])
    half = 1.96 * episodes.std() / math.sqrt(200)
    assert found.mse.interval.high - found.mse.interval.low == pytest.approx(2 * half, rel=0.15)


def test_tokens_and_scaling_are_the_inverse_of_the_simulators() -> None:
    edges = np.array([[-1.0, 0.0], [1.0, 10.0], [-0.001, 4.999], [0.0, 5.0]])
    np.testing.assert_array_equal(token_ids(edges, VECTORS, 256), [[0, 0], [255, 255], [127, 127], [128, 128]])
    scaled = np.random.default_rng(0).uniform(-1, 1, (50, 2)).astype(np.float32)
    np.testing.assert_allclose(VECTORS.normalise(VECTORS.denormalise(scaled)), scaled, atol=1e-6)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one episode"):
        compare([], [], [], VECTORS)
    with pytest.raises(ValueError, match="vectors or choices"):
        compare([np.zeros((1, 1))], [np.zeros((1, 1))], [np.zeros((1, 1))], ActionSpec.text())
    with pytest.raises(ValueError, match="as many steps"):
        compare([np.zeros((2, 2))], [np.zeros((1, 2))], [np.zeros((1, 1))], VECTORS)
