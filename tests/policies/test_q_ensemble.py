"""The ensemble of critics against separate torch networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from embodied_rl.policies.q_ensemble import QEnsemble
from embodied_rl.types import ActionSpec

CONTINUOUS = ActionSpec.continuous([-1.0] * 3, [1.0] * 3)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("action", [CONTINUOUS, ActionSpec.discrete(4)], ids=["continuous", "discrete"])
def test_each_member_is_an_mlp(layer_norm: bool, action: ActionSpec) -> None:
    torch.manual_seed(0)
    ensemble = QEnsemble(5, action, (16, 8), 3, layer_norm=layer_norm)
    features = torch.randn(7, 5)
    acted = torch.randint(0, 4, (7, 1)) if action.kind == "discrete" else torch.rand(7, 3)
    read = torch.nn.functional.one_hot(acted[:, 0], 4).float() if action.kind == "discrete" else acted
    together = ensemble(features, acted)
    assert together.shape == (3, 7)
    for member in range(3):
        layers: list[nn.Module] = []
        for index, (weight, bias) in enumerate(zip(ensemble.weights, ensemble.biases, strict=True)):
            linear = nn.Linear(weight.shape[1], weight.shape[2])
            linear.load_state_dict({"weight": weight[member].T, "bias": bias[member, 0]})
            layers.append(linear)
            if index < 2:
                if layer_norm:
                    norm = nn.LayerNorm(weight.shape[2])
                    # Not as they are at first, so that they count.
                    with torch.no_grad():
                        ensemble.scales[index][member] = 1.0 + 0.1 * member
                        ensemble.shifts[index][member] = 0.2
                    norm.load_state_dict({"weight": ensemble.scales[index][member, 0], "bias": ensemble.shifts[index][member, 0]})
                    layers.append(norm)
                layers.append(nn.ReLU())
        alone = nn.Sequential(*layers)(torch.cat([features, read], -1)).squeeze(-1)
        torch.testing.assert_close(ensemble(features, acted)[member], alone, rtol=1e-5, atol=1e-6)


def test_members_differ_and_each_learns_alone() -> None:
    torch.manual_seed(0)
    ensemble = QEnsemble(5, CONTINUOUS, (16,), 2)
    features, acted = torch.randn(6, 5), torch.rand(6, 3)
    values = ensemble(features, acted)
    assert not torch.allclose(values[0], values[1])
    gradients = torch.autograd.grad(values[0].sum(), list(ensemble.parameters()))
    assert all(gradient[1].abs().sum() == 0 for gradient in gradients)
    assert all(gradient[0].abs().sum() > 0 for gradient in gradients)


def test_layer_norm_bounds_values_far_away() -> None:
    """|Q| ≤ √n Σ|w| + |b| of the last layer whatever goes in: of n normalised numbers none is larger than √n (Ball et al. 2023, 4.2)."""
    torch.manual_seed(0)
    ensemble, plain = QEnsemble(5, CONTINUOUS, (16,), 1), QEnsemble(5, CONTINUOUS, (16,), 1, layer_norm=False)
    far = torch.randn(50, 5) * 1e6
    bound = ensemble.weights[1].abs().sum() * 16**0.5 + ensemble.biases[1].abs().sum()
    assert ensemble(far, torch.ones(50, 3)).abs().max() <= bound
    assert plain(far, torch.ones(50, 3)).abs().max() > 1e3 * bound
