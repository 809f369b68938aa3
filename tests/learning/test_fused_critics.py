"""Soft actor-critic's hand-derived gradients against autograd."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.config import AlgorithmConfig, HybridConfig, OffPolicyConfig
from embodied_rl.errors import NonFiniteError
from embodied_rl.learning.executors import Executor, Figures, LocalExecutor
from embodied_rl.learning.fused import FusedCritics
from embodied_rl.learning.learner import Learner, make_learner
from embodied_rl.learning.recorded import CriticsObjective, steps_of
from embodied_rl.learning.rows import TransitionRows
from embodied_rl.policies.q_ensemble import ActorWithCritics
from tests.learning.samples import SPEC, make_policy

ROWS = 64


def config_of(**options: Any) -> AlgorithmConfig:
    return AlgorithmConfig(
        off_policy=OffPolicyConfig(update="sac", hidden_sizes=(24, 16), **options), learning_rate=1e-3, max_grad_norm=1.0, adam_eps=1e-8
    )


def networks_of(config: AlgorithmConfig, dtype: torch.dtype = torch.float32, **policy: Any) -> ActorWithCritics:
    acting = make_policy(distribution="squashed", **policy)
    with torch.no_grad():
        acting.actor[-1].bias[0] = 7.0  # many of these actions are at the bound
    assert config.off_policy is not None
    torch.manual_seed(1)
    networks = ActorWithCritics(acting, config.off_policy).to(dtype)
    with torch.no_grad():
        for parameter in networks.critics.parameters():  # scales, shifts and targets that are told apart
            parameter += 0.1 * torch.randn_like(parameter)
    return networks


def rows_of(networks: ActorWithCritics, seed: int, dtype: torch.dtype = torch.float32) -> TransitionRows:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    width = SPEC.action.dim
    return TransitionRows(
        observation={"state": normal(ROWS, 11)},
        next_observation={"state": normal(ROWS, 11)},
        action=normal(ROWS, width).clamp(-1, 1),
        reward=normal(ROWS),
        discount=0.99 * (torch.rand(ROWS, generator=generator) > 0.2).to(dtype),
        members=torch.randperm(networks.options.num_critics, generator=generator)[: networks.options.target_critics],
        noise=normal(ROWS, width),
        next_noise=normal(ROWS, width),
    )


def updated(learner: Learner, networks: ActorWithCritics, rows: TransitionRows, *, with_policy: bool = True) -> Figures:
    steps = [kind(networks, learner.config) for kind in steps_of(networks.options, with_policy=with_policy)]
    return learner.step(rows, 1e-3, steps)


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"layer_norm": False}, {"activation": "relu"}),
        ({"layer_norm": True}, {"activation": "tanh"}),
        ({"layer_norm": True, "num_critics": 5, "entropy_in_target": False}, {"activation": "elu"}),
        ({"layer_norm": False, "num_critics": 1, "target_critics": 1, "target_entropy": 0.5}, {"hidden_sizes": (12,)}),
    ],
)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_by_hand_as_by_autograd(options: dict[str, Any], policy: dict[str, Any], side_by_side: bool) -> None:
    """In float64, over several updates: parameters, targets, Adam's state and every figure."""
    config = config_of(**options)
    whole = networks_of(config, torch.float64, **policy)
    sides: list[tuple[ActorWithCritics, Executor]] = []
    for fused in (True, False):
        networks = copy.deepcopy(whole)
        networks.policy.features = lambda observation: observation["state"]  # type: ignore[method-assign]  # in float64
        local = LocalExecutor(networks, config, torch.device("cpu"), "float32")
        sides.append((networks, FusedCritics(networks, config, side_by_side=side_by_side) if fused else local))
    for number in range(20 if side_by_side else 4):
        rows = rows_of(whole, number, torch.float64)
        figures = [
            updated(Learner(networks, config, CriticsObjective(networks, config), executor, 1), networks, rows, with_policy=number % 3 != 1)
            for networks, executor in sides
        ]
        assert figures[0] == pytest.approx(figures[1], rel=1e-8, abs=1e-12), number
    for (name, ours), theirs in zip(sides[0][0].state_dict().items(), sides[1][0].state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9, msg=name)
    ours, theirs = (executor.state_tensors() for _, executor in sides)
    assert ours.keys() == theirs.keys(), "either goes on from what the other kept"
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-7, atol=1e-12, msg=name, check_dtype=name.endswith("step"))


def test_which_networks_are_by_hand_and_that_they_go_on_exactly() -> None:
    def learner_of(networks: ActorWithCritics, config: AlgorithmConfig) -> Learner:
        return make_learner(CriticsObjective(networks, config), networks, config, HybridConfig(device="cpu", num_threads=1))

    iql = AlgorithmConfig(off_policy=OffPolicyConfig(update="iql"))
    assert isinstance(learner_of(networks_of(iql), iql).executor, LocalExecutor)
    config = config_of()
    networks = networks_of(config, normalize_observation=True)
    learner = learner_of(networks, config)
    assert isinstance(learner.executor, FusedCritics)
    rows = [rows_of(networks, number) for number in range(4)]
    for part in rows[:2]:
        updated(learner, networks, part)
    again = copy.deepcopy(networks)
    resumed = learner_of(again, config)
    resumed.load_state_tensors(learner.state_tensors())
    for part in rows[2:]:
        assert updated(learner, networks, part) == updated(resumed, again, part)
    for name, tensor in networks.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_nan_stops_before_the_parameters_are_touched() -> None:
    config = config_of()
    networks = networks_of(config)
    learner = make_learner(CriticsObjective(networks, config), networks, config, HybridConfig(device="cpu", num_threads=2))
    before = {name: tensor.clone() for name, tensor in networks.state_dict().items()}
    rows = rows_of(networks, 0)
    rows.reward[3] = np.nan
    with pytest.raises(NonFiniteError, match="critics"):
        updated(learner, networks, rows)
    assert all(torch.equal(tensor, before[name]) for name, tensor in networks.state_dict().items())
