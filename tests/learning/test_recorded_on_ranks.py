"""Cloning and critics on two ranks are what they are in one process; what they leave is taken up again by either."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied_rl.config import AlgorithmConfig, CloningConfig, OffPolicyConfig, ShardingConfig
from embodied_rl.episodes.dataset import Transitions
from embodied_rl.learning.rank_hosts import LocalRanks
from embodied_rl.learning.ranks import RankExecutor
from tests.learning.samples import Cloner, Critics, make_policy, parameters

pytestmark = [pytest.mark.slow, pytest.mark.ci_sample, pytest.mark.usefixtures("forked")]

TWO = ShardingConfig(num_shards=2)
CLONING = AlgorithmConfig(cloning=CloningConfig(min_log_std=0.5, weight_decay=0.1), max_grad_norm=0.1)


def steps(rng: np.random.Generator, size: int) -> Transitions:
    """Of `SPEC`; the reward and the best action are functions of the state."""
    state = rng.standard_normal((size, 11)).astype(np.float32)
    after = rng.standard_normal((size, 11)).astype(np.float32)
    action = np.clip(state[:, :3] + 0.3 * rng.standard_normal((size, 3)), -1, 1).astype(np.float32)
    discount = np.where(rng.random(size) < 0.2, 0.0, 0.9).astype(np.float32)
    return Transitions({"state": state}, action, state[:, 0], discount, {"state": after})


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], atol: float = 2e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=atol, msg=name)


def test_cloning() -> None:
    alone, together = (make_policy(normalize_observation=True) for _ in range(2))
    for policy in (alone, together):
        policy.update_statistics({"state": torch.linspace(-2, 3, 110).reshape(10, 11)})
    plain, ranks = Cloner(alone, CLONING), Cloner(together, CLONING, TWO)
    executor = ranks.learner.executor
    assert isinstance(executor, RankExecutor)
    try:
        # 33 rows: the ranks' parts differ; 1 row: one of them has none.
        data = [steps(np.random.default_rng(number), size) for number, size in enumerate((64, 33, 1))]
        for _ in range(2):
            assert ranks.epoch(data, 1e-2) == pytest.approx(plain.epoch(data, 1e-2), rel=1e-5)
        executor.write_back()
        close(parameters(together), parameters(alone), atol=1e-5)
        assert together.head.log_std.tolist() == [0.5] * 3, "every rank keeps the bound"  # type: ignore[union-attr, operator]
        assert ranks.validate(data) == pytest.approx(plain.validate(data), rel=1e-5)
        close(ranks.learner.state_tensors(), plain.learner.state_tensors())
    finally:
        executor.close()


class AllElsewhere(LocalRanks):
    """The first rank too is a process of its own."""

    def start(self, num_ranks: int, device: torch.device) -> None:
        super().start(num_ranks + 1, device)
        self.first = self.links.pop(0)

    def close(self) -> None:
        self.links += [] if self.first is None else [self.first]
        super().close()


@pytest.mark.parametrize(
    ("update", "ranks"), [("sac", None), ("iql", None), ("awac", None), pytest.param("sac", AllElsewhere, id="sac elsewhere")]
)
def test_critics(update: str, ranks: type[LocalRanks] | None) -> None:
    options = {"update": update, "fresh": update == "sac", "hidden_sizes": (16,), "num_critics": 3, "target_rate": 0.25}
    config = AlgorithmConfig(off_policy=OffPolicyConfig(**options), max_grad_norm=1.0)  # type: ignore[arg-type]
    learners = []
    for sharding, host in ((None, None), (TWO, None if ranks is None else ranks())):
        policy = make_policy(distribution="squashed")
        torch.manual_seed(1)
        learners.append(Critics(policy, config, sharding, host))
    plain, ranks = learners
    executor = ranks.learner.executor
    assert isinstance(executor, RankExecutor)
    try:
        for number in range(4):
            batch = steps(np.random.default_rng(number), 33)
            wanted, found = (
                one.update(batch, np.random.default_rng(number), learning_rate=1e-3, with_policy=number % 2 == 0) for one in learners
            )
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        close(ranks.state_tensors(), plain.state_tensors(), atol=1e-5)
        close(parameters(ranks.policy), parameters(plain.policy), atol=1e-5)
        # Resumed: what one process wrote goes on on ranks.
        other = steps(np.random.default_rng(9), 33)
        state = plain.state_tensors()
        ranks.policy.load_state_dict(plain.policy.state_dict())
        ranks.load_state_tensors(state)
        assert all(torch.equal(tensor, state[name]) for name, tensor in ranks.state_tensors().items())
        figures = [one.update(other, np.random.default_rng(9), learning_rate=1e-3) for one in learners]
        assert figures[1] == pytest.approx(figures[0], rel=1e-4, abs=1e-6)
    finally:
        executor.close()
