"""Policies that act in chunks on two ranks against one process: rollouts and episodes, rates of their parts, and OpenVLA with LoRA."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.composition import compose
from embodied_rl.algorithms.episode_method import EpisodeMethod
from embodied_rl.algorithms.episodes import EpisodeBatch
from embodied_rl.compose import load_train_config
from embodied_rl.config import AlgorithmConfig, HybridConfig, ShardingConfig
from embodied_rl.hybrid.episode_learner import EpisodeLearner
from embodied_rl.hybrid.learner import Learner
from embodied_rl.hybrid.policy_episode_learner import PolicyEpisodeLearner
from embodied_rl.hybrid.sharded_episodes import ShardedEpisodeLearner
from embodied_rl.hybrid.sharded_updater import ShardedUpdater
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.policies.base import prepare_observation
from embodied_rl.train import train
from tests.policies.openvla.conftest import checkpoint as checkpoint
from tests.policies.openvla.test_training import build, observe
from tests.policies.openvla.test_training import folder as folder
from tests.vla.test_learning import CONFIG, CPU, GROUPED, chunk_batch, groups_of, tiny
from tests.vla.test_runs import EXPERT, GRPO, PPO, WARM
from tests.vla.toys import QUIET, SIM, TINY


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def two_ranks(**options: Any) -> HybridConfig:
    return HybridConfig(device="cpu", num_threads=1, sharding=ShardingConfig(num_shards=2, **options))


def check_rollouts(policies: list[Any], config: AlgorithmConfig, batch: Batch, hybrid: HybridConfig) -> None:
    """Two updates by each learner; figures, values and weights are the same."""
    plain = Learner(policies[0], config, num_threads=1)
    updater = ShardedUpdater(policies[1], config, hybrid, CPU)
    learner = Learner(policies[1], config, num_threads=1, updater=updater)
    try:
        for iteration in range(2):
            wanted = plain.update(batch, iteration=iteration, num_iterations=9, seed=0)
            found = learner.update(batch, iteration=iteration, num_iterations=9, seed=0)
            assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)
        updater.write_back(policies[1])
        same_weights(policies)
        with torch.no_grad():
            torch.testing.assert_close(
                torch.from_numpy(updater.prepared_values(batch.observation)), policies[0].value(batch.observation), atol=1e-4, rtol=0
            )
    finally:
        updater.close()


def same_weights(policies: list[Any]) -> None:
    found = dict(policies[1].named_parameters())
    for name, parameter in policies[0].named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-5, msg=name)


def test_rollouts_of_chunks_with_rates_of_their_own() -> None:
    config = dataclasses.replace(
        CONFIG, ratio="token", num_epochs=2, minibatch_size=11, value_learning_rate=1e-3, head_learning_rate=2e-4, max_grad_norm=0.5
    )
    config = dataclasses.replace(config, normalize_advantage="minibatch", value_clip=0.2)
    policies = [tiny(), tiny()]
    # 24 rows in minibatches of 8: of 3 micro-batches on one rank, the other fills up.
    check_rollouts(policies, config, chunk_batch(policies[0]), two_ranks(micro_batch_size=3))


@pytest.mark.slow
def test_rollouts_with_a_value_for_each_action() -> None:
    config = dataclasses.replace(CONFIG, ratio="action", num_epochs=2, minibatch_size=7, normalize_advantage="minibatch")
    policies = [tiny(value="action"), tiny(value="action")]
    check_rollouts(policies, config, chunk_batch(policies[0], of_actions=True), two_ranks(micro_batch_size=2))


def learn(learner: EpisodeLearner, config: AlgorithmConfig, batch: EpisodeBatch) -> dict[str, float]:
    if learner.reference is not None:
        with torch.no_grad():
            for parameter in learner.reference.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    log_prob, reference = learner.log_probs(batch)
    credit = EpisodeMethod(config).prepare(batch, learner.values(batch), log_prob, reference)
    return learner.update(batch, credit, log_prob, reference, progress=0.0, seed=[1], kl_coef=config.kl.coef)


@pytest.mark.parametrize(
    "changes",
    [
        {"ratio": "token", "aggregation": "seq-mean-token-mean", "head_learning_rate": 3e-3},
        pytest.param({"advantage": "gae", "ratio": "action"}, marks=pytest.mark.slow),
    ],
)
def test_episodes_of_chunks(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(GROUPED, **changes)
    policies = [tiny(), tiny()]
    batch = EpisodeBatch.of(groups_of(policies[0], chunks=True), policies[0].prepare)
    wanted = learn(PolicyEpisodeLearner(policies[0], config, compose(config), "cpu", 1), config, batch)
    learner = ShardedEpisodeLearner(policies[1], config, compose(config), two_ranks(micro_batch_size=1))
    try:
        found = learn(learner, config, batch)
        learner.sharded.write_back(policies[1])
    finally:
        learner.sharded.close()
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    same_weights(policies)


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.parametrize("oft", [False, True], ids=["openvla", "oft"])
def test_openvla_with_lora(folder: Path, oft: bool) -> None:
    policies = [build(folder, oft=oft, lora_rank=4, dtype="float32") for _ in range(2)]
    policies[1].load_state_dict(policies[0].state_dict())
    ready = prepare_observation(policies[0], observe(4))
    units = policies[0].num_units
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        acted = policies[0].act(ready, torch.rand(4, units, generator=generator))
    numbers = [torch.randn(4, generator=generator) for _ in range(3)]
    batch = Batch(ready, acted.action, acted.log_prob + 0.1 * torch.randn(4, units, generator=generator), *numbers)
    config = dataclasses.replace(CONFIG, ratio="token", minibatch_size=3, learning_rate=1e-3, micro_batch_size=1)
    check_rollouts(policies, config, batch, two_ranks())


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pytest.param((*PPO, "policy=flow", "policy.chunk=3", "policy.hidden_sizes=[16]", "policy.num_steps=2"), id="flow"),
        pytest.param((*GRPO, EXPERT, WARM, "algorithm.ratio=token", "algorithm.value_learning_rate=0.01"), id="groups after a warm start"),
    ],
)
def test_a_run_on_two_ranks_has_the_curve_of_one(method: tuple[str, ...], tmp_path: Path) -> None:
    words = [word for word in (*SIM, *TINY, *QUIET) if not ("policy=flow" in method and word.startswith("policy"))]
    curves = []
    for name, hybrid in (("one", "hybrid=local"), ("two", "hybrid=fsdp2")):
        folder = tmp_path / name
        train(load_train_config([*words, *method, hybrid, "hybrid.device=cpu", "hybrid.num_threads=1", f"run_dir={folder}"]))
        rows = [row for row in read_metrics(folder) if "train/policy_loss" in row]
        curves.append([{key: value for key, value in row.items() if key.startswith(("train/", "episode/"))} for row in rows])
    one, two = curves
    assert len(one) == len(two) > 1
    for wanted, found in zip(one, two, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)
