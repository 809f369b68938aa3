from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from embodied_rl.policies.heads import MAX_SQUASHED, Categorical, DiagonalGaussian, Head, SquashedGaussian


def _outputs(size: int, rows: int = 50) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(3))


def test_gaussian_matches_torch() -> None:
    head, outputs = DiagonalGaussian(3, -0.5), _outputs(3)
    head.log_std.data = torch.tensor([-2.0, 0.0, 0.7])
    action = _outputs(3) * 2 + 1
    normal = Normal(outputs, head.log_std.exp())
    torch.testing.assert_close(head.log_prob(outputs, action), normal.log_prob(action))
    torch.testing.assert_close(head.entropy(outputs), normal.entropy())


def test_gaussian_by_hand() -> None:
    head = DiagonalGaussian(1, math.log(2.0))
    action, log_prob = head.sample(torch.tensor([[1.0]]), torch.tensor([[0.5]]))
    assert action.item() == pytest.approx(1.0 + 0.5 * 2.0)
    # -z^2/2 - log std - log sqrt(2 pi) with z = 0.5
    assert log_prob.item() == pytest.approx(-0.125 - 0.693147 - 0.918939, abs=1e-5)
    # 1/2 log(2 pi e std^2)
    assert head.entropy(torch.zeros(1, 1)).item() == pytest.approx(0.5 * math.log(2 * math.pi * math.e * 4), abs=1e-6)


def test_squashed_matches_torch_where_torch_is_exact() -> None:
    head, outputs = SquashedGaussian(3, -0.5), _outputs(3) * 0.5
    action = torch.tanh(_outputs(3) * 0.7)
    reference = TransformedDistribution(Normal(outputs.double(), math.exp(-0.5)), [TanhTransform()]).log_prob(action.double())
    torch.testing.assert_close(head.log_prob(outputs, action).double(), reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, -0.5), (1.2, -1.0), (-2.0, 0.3)])
def test_squashed_density_integrates_to_one_and_gives_the_entropy(mean: float, log_std: float) -> None:
    head = SquashedGaussian(1, log_std).double()
    # Integrate over u (a = tanh u): the density has integrable peaks at a = ±1 that an even grid in a would miss.
    u = torch.linspace(-7.0, 7.0, 200_001, dtype=torch.float64)
    action = torch.tanh(u)[:, None]
    log_prob = head.log_prob(torch.full_like(action, mean), action)[:, 0]
    area = log_prob.exp() * (1 - torch.tanh(u) ** 2)
    assert torch.trapezoid(area, u).item() == pytest.approx(1.0, abs=2e-4)
    entropy = -torch.trapezoid(area * log_prob, u).item()
    assert head.entropy(torch.full((1, 1), mean, dtype=torch.float64)).item() == pytest.approx(entropy, abs=5e-3)


def test_squashed_actions_stay_inside_and_agree_when_saturated() -> None:
    head = SquashedGaussian(1, -0.5)
    outputs = torch.tensor([[12.0], [-12.0], [5.0], [0.0]])
    action, log_prob = head.sample(outputs, torch.ones(4, 1))
    assert action.abs().max() <= MAX_SQUASHED
    assert torch.isfinite(log_prob).all()
    torch.testing.assert_close(head.log_prob(outputs, action), log_prob, atol=1e-5, rtol=0)


def test_categorical_matches_torch() -> None:
    head, logits = Categorical(5), _outputs(5) * 2
    action = torch.randint(0, 5, (50, 1), generator=torch.Generator().manual_seed(1))
    reference = TorchCategorical(logits=logits)
    torch.testing.assert_close(head.log_prob(logits, action)[:, 0], reference.log_prob(action[:, 0]))
    torch.testing.assert_close(head.entropy(logits)[:, 0], reference.entropy())


def test_categorical_samples_by_the_cumulative_distribution() -> None:
    head = Categorical(3)
    logits = torch.tensor([[0.2, 0.3, 0.5]]).log().expand(5, 3)
    noise = torch.tensor([[0.0], [0.19], [0.21], [0.51], [0.9999999]])
    action, _ = head.sample(logits, noise)
    assert action[:, 0].tolist() == [0, 0, 1, 2, 2]
    assert head.sample(logits, None)[0][:, 0].tolist() == [2] * 5


def test_categorical_frequencies() -> None:
    head, rows = Categorical(3), 20_000
    probabilities = torch.tensor([0.2, 0.3, 0.5])
    noise = torch.rand(rows, 1, generator=torch.Generator().manual_seed(0))
    action, _ = head.sample(probabilities.log().expand(rows, 3), noise)
    counts = np.bincount(action[:, 0].numpy(), minlength=3) / rows
    # Standard error at most sqrt(.25 / 20000) = 0.0035
    np.testing.assert_allclose(counts, probabilities.numpy(), atol=0.015)


@pytest.mark.parametrize("head", [DiagonalGaussian(4, -0.5), SquashedGaussian(4, -0.5), Categorical(4)])
def test_sample_and_log_prob_agree(head: Head) -> None:
    outputs = _outputs(head.num_outputs)
    columns = 1 if isinstance(head, Categorical) else 4
    generator = torch.Generator().manual_seed(2)
    noise = torch.rand(50, 1, generator=generator) if columns == 1 else torch.randn(50, 4, generator=generator)
    action, log_prob = head.sample(outputs, noise)
    assert log_prob.shape == (50, columns)
    assert head.entropy(outputs).shape == (50, columns)
    torch.testing.assert_close(head.log_prob(outputs, action), log_prob, atol=1e-5, rtol=0)
