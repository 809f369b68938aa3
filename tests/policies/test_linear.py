"""The linear layer whose large products oneDNN computes: its numbers and gradients are those of float64, and small ones torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from embodied_rl.policies import tiny_vla as linear
from embodied_rl.policies.tiny_vla import WORTH_IT, Linear


def layers(inputs: int, outputs: int) -> tuple[Linear, nn.Linear]:
    """The layer, and torch's own with the same weights in float64."""
    torch.manual_seed(0)
    ours, exact = Linear(inputs, outputs), nn.Linear(inputs, outputs).double()
    exact.load_state_dict(ours.state_dict())
    return ours, exact


def agree(found: Tensor | None, exact: Tensor | None) -> None:
    """Within what float32 sums of that many numbers lose."""
    assert found is not None
    assert exact is not None
    torch.testing.assert_close(found.double(), exact, atol=1e-5 * float(exact.detach().abs().max()), rtol=0)


@pytest.mark.parametrize("strided", [False, True])
def test_large_products_and_their_gradients_are_those_of_float64(strided: bool) -> None:
    ours, exact = layers(112, 448)
    x = torch.randn(8, 40, 112).transpose(0, 1) if strided else torch.randn(40, 8, 112)
    assert x.is_contiguous() != strided
    assert x.numel() * 448 >= WORTH_IT
    x, same = x.requires_grad_(), x.detach().double().requires_grad_()
    along = torch.randn(40, 8, 448)
    with torch.no_grad():
        agree(ours(x), exact(same))
    found = ours(x)
    agree(found, exact(same))
    assert found.shape == (40, 8, 448)
    # A gradient that is one number spread over a whole tensor comes in without strides of its own.
    for gradient in (along, torch.ones(()).expand(40, 8, 448)):
        (ours(x) * gradient).sum().backward()
        (exact(same) * gradient.double()).sum().backward()
    agree(x.grad, same.grad)
    agree(ours.weight.grad, exact.weight.grad)
    agree(ours.bias.grad, exact.bias.grad)


def test_only_what_is_trained_gets_a_gradient() -> None:
    ours, exact = layers(128, 128)
    x = torch.randn(256, 128)
    for part in (ours, exact):
        part.weight.requires_grad_(False)
    ours(x).sum().backward()
    exact(x.double()).sum().backward()
    assert ours.weight.grad is None
    agree(ours.bias.grad, exact.bias.grad)


def test_small_products_are_torchs_own_bit_by_bit() -> None:
    ours, _ = layers(112, 112)
    plain = nn.Linear(112, 112)
    plain.load_state_dict(ours.state_dict())
    rows = WORTH_IT // (112 * 112)
    x = torch.randn(rows, 112)
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours(x.bfloat16().float()), plain(x.bfloat16().float()))


@pytest.mark.skipif(not linear._is_there(), reason="this processor has no AVX-512, or torch was built without oneDNN")
def test_large_products_go_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = layers(128, 128)
    x = torch.randn(256, 128)
    with torch.profiler.profile() as profiled:
        ours(x).sum().backward()
    names = {event.key for event in profiled.key_averages()}
    assert "mkldnn::_linear_pointwise" in names
    assert "aten::addmm" not in names
    monkeypatch.setattr(linear, "_is_there", lambda: False)
    plain = nn.Linear(128, 128)
    plain.load_state_dict(ours.state_dict())
    assert torch.equal(ours(x), plain(x)), "elsewhere it is torch's layer"


def test_other_kinds_of_numbers_are_torchs() -> None:
    ours, exact = layers(128, 128)
    x = torch.randn(256, 128)
    half = copy.deepcopy(ours).bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(copy.deepcopy(ours).double()(x.double()), exact(x.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
