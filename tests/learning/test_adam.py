"""Adam over named parameters against PyTorch's plain one, on a network whose gradients come in another memory layout."""

from __future__ import annotations

import copy

import torch
from torch import nn

from embodied_rl.learning.optimizer import Optimizer


def test_gradients_of_channels_last_images_reach_the_weights_they_belong_to() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 4, stride=2), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(6 * 5 * 5, 2))
    reference = copy.deepcopy(network)
    image, target = torch.rand(5, 16, 16, 3).permute(0, 3, 1, 2), torch.rand(5, 2)
    assert image.is_contiguous(memory_format=torch.channels_last)
    weight = network[0].weight
    (gradient,) = torch.autograd.grad((network(image) - target).square().sum(), [weight])
    assert gradient.stride() != weight.stride(), "the case that this test is about"

    adam = Optimizer(dict(network.named_parameters()), eps=1e-8, max_grad_norm=0.5)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-8, weight_decay=0.0, fused=False, foreach=False)
    for _ in range(3):
        adam.zero_grad()
        (network(image) - target).square().sum().backward()
        adam.clip()
        adam.step(1e-2)
        plain.zero_grad()
        (reference(image) - target).square().sum().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
    for (name, moved), expected in zip(network.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(moved, expected, atol=1e-6, rtol=1e-5, msg=name)
