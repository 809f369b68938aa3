"""Action units of chunks: sums by hand, masks, and what is refused."""

from __future__ import annotations

import pytest
import torch

from embodied_rl.algorithms.units import at_level, mask_at_level, spread, unit_steps

# K = 2 steps of A = 3 dimensions; of the second row only the first step was executed.
STEPS = unit_steps(6, 2, 3)
LOG_PROB = torch.tensor([[1.0, 2.0, 3.0, 10.0, 20.0, 30.0], [4.0, 5.0, 6.0, float("nan"), 7.0, 8.0]])
MASK = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])


def test_units_belong_to_the_steps_of_their_chunk() -> None:
    assert STEPS.tolist() == [0, 0, 0, 1, 1, 1]
    # Two denoising steps: each has its own K·A units.
    assert unit_steps(8, 2, 2).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="7 action units do not fit 2 steps of 3 dimensions"):
        unit_steps(7, 2, 3)


def test_sums_over_what_belongs_together_leave_out_what_was_not_executed() -> None:
    assert at_level(LOG_PROB, "chunk", MASK, STEPS).tolist() == [66.0, 15.0]
    assert at_level(LOG_PROB, "action", MASK, STEPS).tolist() == [[6.0, 60.0], [15.0, 0.0]]
    assert at_level(LOG_PROB, "token", MASK, STEPS) is LOG_PROB
    assert mask_at_level(MASK, "action", STEPS).tolist() == [[True, True], [True, False]]
    assert mask_at_level(MASK, "chunk", STEPS).tolist() == [True, True]
    assert mask_at_level(MASK, "token", STEPS) is MASK
    assert mask_at_level(None, "action", STEPS) is None


def test_denoising_steps_are_summed_with_their_action() -> None:
    x = torch.arange(8.0)[None]
    assert at_level(x, "action", None, unit_steps(8, 2, 2)).tolist() == [[0 + 1 + 4 + 5, 2 + 3 + 6 + 7]]


def test_advantages_are_spread_to_their_units() -> None:
    of_actions = torch.tensor([[1.0, 2.0]])
    assert spread(of_actions, "token", STEPS).tolist() == [[1, 1, 1, 2, 2, 2]]
    assert spread(of_actions, "action", STEPS) is of_actions
    whole = torch.tensor([3.0])
    assert spread(whole, "token", STEPS) is whole
    with pytest.raises(ValueError, match="not of whole chunks"):
        spread(of_actions, "chunk", STEPS)


def test_masked_units_get_no_gradient() -> None:
    x = LOG_PROB.clone().requires_grad_()
    at_level(x, "chunk", MASK, STEPS).sum().backward()
    assert x.grad.tolist() == MASK.float().tolist()
