"""Cloning two modes, then reinforcement of one of them: each way of log-probabilities must get there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from embodied_rl.policies.flow.policy import ode_step
from tests.policies.flow.reach import RADIUS, clone, distances, make, objects, reinforce, sample

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cloned() -> Iterator[dict[str, Tensor]]:
    """Weights of the velocity's network after cloning; the ways to sample share them. Matrices are too small for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    policy = make("flow_sde")
    clone(policy)
    yield policy.model.state_dict()
    torch.set_num_threads(threads)


@pytest.mark.ci_sample
def test_cloning_keeps_both_modes(cloned: dict[str, Tensor]) -> None:
    policy = make("flow_sde")
    policy.model.load_state_dict(cloned)
    generator = torch.Generator().manual_seed(9)
    place = objects(2000, generator)
    context, x = policy.model.context({"state": place}), torch.randn(2000, 1, 2, generator=generator)
    with torch.no_grad():
        for step in range(20):
            x = ode_step(x, policy.model.velocity(context, x, torch.full((2000,), 1 - step / 20)), 1 / 20)
    left, right = (part < 0.3 for part in distances(place, x[:, 0]))
    # A regression would end between the two, 0.39 from either: 0.6·sin 40°, where hardly anything ends here.
    assert left.float().mean() > 0.3
    assert right.float().mean() > 0.3
    assert (left | right).float().mean() > 0.7


@pytest.mark.parametrize("method", ["flow_sde", pytest.param("flow_noise", marks=pytest.mark.ci_sample), "dppo"])
def test_reinforcement_chooses_the_rewarded_mode(cloned: dict[str, Tensor], method: str) -> None:
    policy = make(method)  # type: ignore[arg-type]
    policy.model.load_state_dict(cloned)
    rewards = reinforce(policy, iterations=14)
    # Half at the wrong end, 2·0.6·sin 40° = 0.77 away, and half near: about -0.45.
    assert -0.55 < rewards[0] < -0.3
    assert rewards[-1] > -0.2
    place, _, _, reached = sample(policy, 1000, torch.Generator().manual_seed(7))
    left, right = distances(place, reached)
    assert (left < right).float().mean() > 0.95
    assert reached.norm(dim=1).mean().item() == pytest.approx(RADIUS, abs=0.15)
