from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.errors import UserError
from embodied_rl.rollout.domains import DomainMixture


def test_by_hand() -> None:
    # Weights 2 : 1, k = 2: a domain may be dealt to when its deficit n·w - count is at least 1/2, and the one whose deficit reaches
    # 1/2 soonest goes first. n = 1: a 2/3, b 1/3 -> a. n = 2: a 1/3, b 2/3 -> b. n = 3: a 1, b 0 -> a. Then the same again.
    mixture = DomainMixture({"a": 2.0, "b": 1.0})
    assert [mixture.domain_of(n) for n in range(6)] == list("abaaba")


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefg"), st.floats(0.01, 100.0), min_size=2))
def test_shares_stay_within_tijdemans_bound(weights: dict[str, float]) -> None:
    mixture, total, k = DomainMixture(weights), sum(weights.values()), len(weights)
    counts = dict.fromkeys(weights, 0)
    for n in range(300):
        counts[mixture.domain_of(n)] += 1
        for domain, weight in weights.items():
            assert abs(counts[domain] - (n + 1) * weight / total) <= 1 - 1 / (2 * k - 2) + 1e-9


def test_a_function_of_number_and_weights_alone() -> None:
    weights = {"x": 0.3, "y": 0.5, "z": 0.2}
    forward = [DomainMixture(weights).domain_of(n) for n in range(50)]
    other_order = DomainMixture({"z": 2.0, "x": 3.0, "y": 5.0})
    assert [other_order.domain_of(n) for n in reversed(range(50))][::-1] == [other_order.domain_of(n) for n in range(50)]
    mixture = DomainMixture(weights)
    assert [mixture.domain_of(n) for n in (49, 3, 17)] == [forward[49], forward[3], forward[17]]


def test_zero_weight_and_single() -> None:
    assert {DomainMixture({"a": 1.0, "off": 0.0}).domain_of(n) for n in range(20)} == {"a"}
    assert DomainMixture.single("only").domain_of(1000) == "only"


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0, "b": 2.0}, {"a": float("nan")}, {"a": float("inf")}])
def test_senseless_weights_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(UserError, match="Domain weights"):
        DomainMixture(weights)
