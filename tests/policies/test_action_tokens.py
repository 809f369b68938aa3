"""Action tokens against hand arithmetic, and the categorical distribution against counting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.errors import UserError
from embodied_rl.policies.heads import ActionTokenizer, Categorical, TokenDistribution

TOKENS = ActionTokenizer()


def test_edges_and_centers_by_hand() -> None:
    # Edges at -1 + 2i/255. -1 is the edge i = 0: one edge is not above it, token 32000 - 1. 0 lies between i = 127 and 128: 128 edges.
    # 1 is the last edge: all 256 are not above it.
    assert TOKENS.encode(np.array([-1.0, 0.0, 1.0])).tolist() == [31999, 31872, 31744]
    assert TOKENS.first_token == 31744
    # Center i = -1 + (2i + 1)/255; token 31872 is i = 127: -1 + 255/255 = 0.
    np.testing.assert_allclose(TOKENS.decode(np.array([31999, 31872, 31745, 31744])), [-254 / 255, 0.0, 254 / 255, 254 / 255], atol=1e-12)


def test_values_outside_are_clipped() -> None:
    assert TOKENS.encode(np.array([-7.0, 7.0])).tolist() == [31999, 31744]
    # A text token decodes to the nearest end, as the original's clip has it.
    np.testing.assert_allclose(TOKENS.decode(np.array([5, 32063])), [254 / 255, -254 / 255], atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20), st.integers(2, 300))
def test_round_trip_stays_within_half_a_bin(values: list[float], num_bins: int) -> None:
    tokens = ActionTokenizer(vocab_size=1000, num_bins=num_bins)
    action = np.array(values)
    encoded = tokens.encode(action)
    assert ((encoded >= tokens.first_token) & (encoded < 1000)).all()
    assert np.abs(tokens.decode(encoded) - action).max() <= 1 / (num_bins - 1) + 1e-12


def test_a_token_of_another_kind_is_one_line() -> None:
    assert TOKENS.choices(torch.tensor([31744, 31999])).tolist() == [0, 255]
    with pytest.raises(UserError, match=r"\[31744, 31999\], got 31743 to 31999"):
        TOKENS.choices(torch.tensor([31743, 31999]))


def test_sampling_inverts_the_cumulative_distribution() -> None:
    # Probabilities 0.1, 0.2, 0.3, 0.4 have the sums 0.1, 0.3, 0.6, 1.
    distribution = TokenDistribution.from_logits(torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(1, 6, 4))
    noise = torch.tensor([[0.0, 0.05, 0.15, 0.45, 0.61, 0.999999]])
    choice = distribution.sample(noise)
    assert choice.tolist() == [[0, 0, 1, 2, 3, 3]]
    expected = [math.log(p) for p in (0.1, 0.1, 0.2, 0.3, 0.4, 0.4)]
    torch.testing.assert_close(distribution.log_prob(choice), torch.tensor([expected]))
    assert distribution.sample(None).tolist() == [[3] * 6]


def test_evenly_spread_noise_gives_the_exact_counts() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    noise = ((torch.arange(64) + 0.5) / 64).view(64, 1)
    choices = TokenDistribution.from_logits(probabilities.log().expand(64, 1, 4)).sample(noise)
    assert torch.bincount(choices.flatten()).tolist() == [32, 16, 8, 8]


def test_temperature_and_entropy() -> None:
    logits = torch.tensor([[[0.0, math.log(9.0)]]])
    # At temperature 2, log 9 becomes log 3: probabilities 1/4 and 3/4.
    distribution = TokenDistribution.from_logits(logits, temperature=2.0)
    torch.testing.assert_close(distribution.log_probs, torch.tensor([[[math.log(0.25), math.log(0.75)]]]))
    torch.testing.assert_close(distribution.entropy, torch.tensor([[-0.25 * math.log(0.25) - 0.75 * math.log(0.75)]]))
    uniform = TokenDistribution.from_logits(torch.zeros(1, 1, 256, dtype=torch.bfloat16))
    assert uniform.entropy.item() == pytest.approx(math.log(256), rel=1e-6)


def test_noise_just_below_one_draws_no_impossible_choice() -> None:
    """Where the rounded sum of all probabilities stays below the noise, the last choice is not drawn for that: its probability is 0."""
    logits = torch.randn(64, 1, 256, generator=torch.Generator().manual_seed(0))
    logits[..., -1] = -200.0
    distribution, noise = TokenDistribution.from_logits(logits), torch.full((64, 1), 1 - 2**-24)
    assert (distribution.log_probs.exp().cumsum(-1)[..., -1] <= noise).any()
    choice = distribution.sample(noise)
    assert (choice < 255).all()
    assert (distribution.log_prob(choice) > -20).all()
    few = logits[..., -5:].squeeze(1)
    assert (torch.softmax(few, -1).cumsum(-1)[:, -1] < 1).any()
    assert (Categorical(5).sample(few, noise)[0] < 4).all()
