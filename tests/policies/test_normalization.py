from __future__ import annotations

import numpy as np
import torch

from embodied_rl.policies.actor_critic import RunningNorm


def test_statistics_are_those_of_all_rows_together() -> None:
    rng = np.random.default_rng(0)
    # A large offset: summing squares naively would lose the variance in float32.
    parts = [rng.normal(1e4, 0.5, (size, 3)).astype(np.float32) for size in (1, 7, 500, 2)]
    norm = RunningNorm(3)
    for part in parts:
        norm.update(torch.from_numpy(part))
    norm.update(torch.empty(0, 3))
    together = np.concatenate(parts).astype(np.float64)
    np.testing.assert_allclose(norm.mean.numpy(), together.mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.var.numpy(), together.var(0), rtol=1e-9)
    assert norm.count.item() == 510


def test_normalises_and_clips_by_hand() -> None:
    norm = RunningNorm(2, clip=2.0, eps=0.0)
    norm.update(torch.tensor([[0.0, 10.0], [2.0, 30.0]]))  # mean (1, 20), deviation (1, 10)
    out = norm(torch.tensor([[2.5, 15.0], [9.0, -90.0]]))
    torch.testing.assert_close(out, torch.tensor([[1.5, -0.5], [2.0, -2.0]]))


def test_does_not_change_before_the_first_update() -> None:
    x = torch.tensor([[0.25, -3.0]])
    torch.testing.assert_close(RunningNorm(2)(x), x, atol=1e-6, rtol=0)


def test_state_dict_round_trip_is_exact() -> None:
    first, second = RunningNorm(4), RunningNorm(4)
    first.update(torch.randn(100, 4, dtype=torch.float64))
    second.load_state_dict(first.state_dict())
    for norm in (first, second):
        norm.update(torch.ones(3, 4))
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(first.var, second.var)
