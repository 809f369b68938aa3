"""Drawing tokens: by hand, and by counting many."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from embodied_rl.generation.torch_tokens import SampledTokens, sample_tokens


def sample(logits: torch.Tensor, uniform: list[float], temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SampledTokens:
    count = len(logits)
    settings = (
        torch.full((count,), temperature, dtype=torch.float64),
        torch.full((count,), top_p, dtype=torch.float64),
        torch.full((count,), top_k),
    )
    return sample_tokens(logits, *settings, torch.tensor(uniform, dtype=torch.float64))


PROBABILITIES = [0.1, 0.4, 0.2, 0.3]
LOGITS = torch.tensor([PROBABILITIES]).log() + 5.0


def test_inverse_of_the_cumulative_distribution_by_hand() -> None:
    # Cumulative: 0.1, 0.5, 0.7, 1.0.
    uniform = [0.0, 0.09, 0.11, 0.49, 0.51, 0.69, 0.71, 0.999999]
    found = sample(LOGITS.expand(8, -1), uniform)
    assert found.token.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    wanted = [math.log(PROBABILITIES[token]) for token in found.token.tolist()]
    torch.testing.assert_close(found.log_prob, torch.tensor(wanted), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.sampling_log_prob, found.log_prob)


def test_temperature_by_hand() -> None:
    # At temperature 0.5 probabilities are squared: .01, .16, .04, .09 over .30.
    found = sample(LOGITS.expand(4, -1), [0.02, 0.3, 0.6, 0.9], temperature=0.5)
    assert found.token.tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(found.sampling_log_prob.exp(), torch.tensor([0.01, 0.16, 0.04, 0.09]) / 0.30, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.log_prob.exp(), torch.tensor(PROBABILITIES), atol=1e-6, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_what_is_not_allowed_is_never_drawn(temperature: float) -> None:
    # Left are .1 and .3: 1/4 and 3/4, at temperature 0.5 1/10 and 9/10.
    settings = (torch.full((3,), temperature, dtype=torch.float64), torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64))
    allowed = torch.tensor([[True, False, False, True]]).expand(3, -1)
    uniform = torch.tensor([0.0, 0.09, 0.26], dtype=torch.float64)
    found = sample_tokens(LOGITS.expand(3, -1), *settings, uniform, allowed)
    wanted = {1.0: [1 / 4, 1 / 4, 3 / 4], 0.5: [1 / 10, 1 / 10, 9 / 10], 0.0: [1.0, 1.0, 1.0]}[temperature]
    assert found.token.tolist() == ([3, 3, 3] if temperature == 0.0 else [0, 0, 3])
    torch.testing.assert_close(found.sampling_log_prob.exp(), torch.tensor(wanted), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.log_prob.exp(), torch.tensor([1 / 4, 0.0, 0.0, 3 / 4])[found.token], atol=1e-6, rtol=0)


def test_temperature_0_is_the_likeliest() -> None:
    found = sample(LOGITS.expand(2, -1), [0.0, 0.99], temperature=0.0)
    assert found.token.tolist() == [1, 1]
    assert found.sampling_log_prob.tolist() == [0.0, 0.0]
    torch.testing.assert_close(found.log_prob.exp(), torch.tensor([0.4, 0.4]))


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 2, {1: 4 / 7, 3: 3 / 7}),
        (1.0, 1, {1: 1.0}),
        (1.0, 9, dict(enumerate(PROBABILITIES))),
        # .4 + .3 reach .7 exactly: no third one. In doubles .4 + .3 of float32 logits is rounded, so a hair on each side.
        (0.699, 0, {1: 4 / 7, 3: 3 / 7}),
        (0.701, 0, {1: 4 / 9, 3: 3 / 9, 2: 2 / 9}),
        (0.01, 0, {1: 1.0}),
        # Among the three likeliest (.4, .3, .2 over .9), .4/.9 = .44 and .3/.9 reach .75: two stay.
        (0.75, 3, {1: 4 / 7, 3: 3 / 7}),
    ],
)
def test_cuts_by_hand(top_p: float, top_k: int, kept: dict[int, float]) -> None:
    uniform = np.linspace(0, 0.9999, 500).tolist()
    found = sample(LOGITS.expand(500, -1), uniform, top_p=top_p, top_k=top_k)
    assert set(found.token.tolist()) == set(kept)
    torch.testing.assert_close(
        found.sampling_log_prob.exp(), torch.tensor([kept[token] for token in found.token.tolist()]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        found.log_prob.exp(), torch.tensor([PROBABILITIES[token] for token in found.token.tolist()]), atol=1e-5, rtol=0
    )


def test_rows_have_settings_of_their_own() -> None:
    settings = (torch.tensor([0.0, 1.0, 1.0]).double(), torch.tensor([1.0, 0.01, 1.0]).double(), torch.tensor([0, 0, 0]))
    found = sample_tokens(LOGITS.expand(3, -1), *settings, torch.tensor([0.99, 0.99, 0.99], dtype=torch.float64))
    assert found.token.tolist() == [1, 1, 3]


def test_frequencies() -> None:
    torch.manual_seed(0)
    logits, count = torch.randn(1, 12) * 1.5, 20000
    found = sample(logits.expand(count, -1), np.random.default_rng(0).random(count).tolist(), temperature=1.3)
    expected = torch.softmax(logits[0].double() / 1.3, -1) * count
    statistic = float(((torch.bincount(found.token, minlength=12) - expected) ** 2 / expected).sum())
    # 99.9% quantile of chi-square with 11 degrees of freedom.
    assert statistic < 31.3


def test_excluded_tokens_are_never_drawn_not_even_at_the_ends() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, -1)
    assert sample(logits, [0.0, 0.5, 1.0 - 2**-53]).token.tolist() == [1, 3, 3]
