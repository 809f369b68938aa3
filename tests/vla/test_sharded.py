"""Policies that act in chunks on two ranks against one process: rollouts and episodes, rates of their parts, and OpenVLA with LoRA."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.episode_method import EpisodeBatch
from embodied_rl.compose import load_train_config
from embodied_rl.config import AlgorithmConfig, HybridConfig, ShardingConfig
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.policies.base import prepare_observation
from embodied_rl.train import train
from tests.learning.samples import rollout_learner, update
from tests.policies.openvla.conftest import checkpoint as checkpoint
from tests.policies.openvla.test_training import build, observe
from tests.policies.openvla.test_training import folder as folder
from tests.vla.test_learning import CONFIG, GROUPED, chunk_batch, episode_learner, groups_of, learn, tiny
from tests.vla.test_runs import EXPERT, GRPO, PPO, WARM
from tests.vla.toys import QUIET, SIM, TINY

pytestmark = pytest.mark.usefixtures("forked")


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
    plain = rollout_learner(policies[0], config)
    learner = rollout_learner(policies[1], config, sharding=hybrid.sharding)
    try:
        for iteration in range(2):
            wanted, found = (update(each, batch, iteration, 9) for each in (plain, learner))
            assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)
        learner.executor.write_back()
        same_weights(policies)
        with torch.no_grad():
            torch.testing.assert_close(
                torch.from_numpy(learner.values(batch.observation)), policies[0].value(batch.observation), atol=1e-4, rtol=0
            )
    finally:
        learner.executor.close()


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


@pytest.mark.parametrize(
    "changes",
    [
        {"ratio": "token", "aggregation": "seq-mean-token-mean", "head_learning_rate": 3e-3},
        pytest.param({"advantage": "gae", "ratio": "action"}, marks=pytest.mark.slow),
        pytest.param({"advantage": "gae_action", "ratio": "token"}, marks=pytest.mark.slow),
    ],
)
def test_episodes_of_chunks(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(GROUPED, **changes)
    of_steps = {"value": "action"} if config.advantage == "gae_action" else {}
    policies = [tiny(**of_steps), tiny(**of_steps)]
    batch = EpisodeBatch.of(groups_of(policies[0], chunks=True), policies[0].prepare)
    wanted = learn(episode_learner(policies[0], config), batch)
    learner = episode_learner(policies[1], config, two_ranks(micro_batch_size=1))
    try:
        found = learn(learner, batch)
        learner.executor.write_back()
    finally:
        learner.executor.close()
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    same_weights(policies)


@pytest.mark.slow
@pytest.mark.parametrize("oft", [pytest.param(False, marks=pytest.mark.ci_sample), True], ids=["openvla", "oft"])
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
