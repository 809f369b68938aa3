"""Placements that can be had, and who has which device (those that cannot: tests/test_rules.py)."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch

from embodied_rl.commands import evaluate
from embodied_rl.config import TrainConfig
from embodied_rl.config.compose import load_train_config
from embodied_rl.config.rules import resolve
from embodied_rl.errors import UserError
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.roles.components import hybrid_here, start_simulators
from embodied_rl.train import train
from tests.roles import runs
from tests.roles.runs import ROLLOUTS

CARTPOLE = ("sim=cartpole", "hybrid.device=cpu")
APART = "hybrid=disaggregated"
SPEAKING = ("policy=language", "algorithm=grpo", "generation=tokens_torch")


def configured(*overrides: str) -> TrainConfig:
    # What is composed later replaces the simulator.
    chosen = any(word.startswith(("sim=", "experiment=")) for word in overrides)
    return load_train_config([*(CARTPOLE[1:] if chosen else CARTPOLE), *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("hybrid=collocated",),
        (APART,),
        (APART, "algorithm.max_staleness=2"),
        ("hybrid.placement=multiplexed", "algorithm=grpo", "algorithm.groups.max_staleness=1"),
        (APART, *SPEAKING, "sim=frozenlake"),
        (*SPEAKING, "sim=frozenlake", "hybrid.reward_worker={target: a.b:c}"),
        ("hybrid=ray", "experiment=frozenlake_text"),
        ("hybrid=ray",),
        ("hybrid=ray", "hybrid.sharding={num_shards: 2}"),
        ("hybrid=ray", "hybrid.sharding={num_shards: 2}", "hybrid.ray.gpus.train=2"),
        ("experiment=multi_domain", APART),
        ("experiment=multi_domain", "hybrid=ray"),
        ("hybrid.placement={kind: hybrid, num_pipeline_stages: 2}",),
        ("hybrid.placement={env: [0/cpu], generation: [0/cpu], train: [0/cpu]}",),
        (APART, "algorithm=grpo", "hybrid.reward_worker={target: a.b:c}"),
        ("hybrid=fsdp2", "hybrid.placement=disaggregated"),
    ],
)
def test_allowed(overrides: tuple[str, ...]) -> None:
    resolve(configured(*overrides))


def test_a_run_is_stepped_in_the_stages_of_its_placement_and_resumes(tmp_path: Path) -> None:
    stages = [*ROLLOUTS, "hybrid.placement={kind: hybrid, num_pipeline_stages: 4}"]
    runs.trained(tmp_path / "stages", *stages, "total_steps=128")
    assert "pipeline_groups: 4" in (tmp_path / "stages" / "checkpoints" / "last" / "config.yaml").read_text(encoding="utf-8")
    train(runs.configured(tmp_path / "stages", *stages, "total_steps=256", "resume=auto"))
    groups = runs.trained(tmp_path / "groups", *ROLLOUTS, "sim.pipeline_groups=4", "total_steps=128")
    train(runs.configured(groups, *ROLLOUTS, "sim.pipeline_groups=4", "total_steps=256", "resume=auto"))
    runs.assert_same_run(tmp_path / "stages", groups)


def test_torch_samples_the_tokens_of_a_language_policy(tmp_path: Path) -> None:
    task = [*runs.TEXTS, "algorithm.warm_start=null", "total_steps=150"]
    plain = runs.trained(tmp_path / "plain", *task, "generation=torch")
    runs.assert_same_run(runs.trained(tmp_path / "tokens", *task, "generation=tokens_torch"), plain)
    evaluate.main([f"checkpoint={plain}", "num_episodes=2"])


def test_a_backend_samples_on_the_device_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied_rl.learning.devices.resolve_device", lambda _: torch.device("meta"))  # the only other one everywhere
    monkeypatch.setattr(LanguagePolicy, "generation_model", lambda policy: copy.deepcopy(policy.base))  # without numbers to copy
    started = start_simulators(runs.configured(tmp_path, *runs.TEXTS, "generation=tokens_torch"), print)
    try:
        components = started.build(started.simulators.spec, tmp_path, None, None)
        (cache,) = components.generator.caches
        assert str(cache.device) == str(next(components.policy.parameters()).device) == "meta"
    finally:
        started.simulators.close()


@pytest.mark.parametrize(
    ("words", "device"),
    [
        (("hybrid=ray",), "cpu"),
        (("hybrid=ray", "hybrid.sharding={num_shards: 2, cpu_offload: true}", "hybrid.ray.gpus.train=2", "hybrid.device=cuda"), "cpu"),
        (("hybrid=ray", "experiment=frozenlake_text"), "auto"),  # its warm start runs in the loop's process
        (("hybrid=ray", "algorithm=sac", "sim=pendulum"), "auto"),  # its learner, too
        ((APART,), "auto"),
    ],
)
def test_the_loop_of_a_run_on_ray_takes_no_gpu(words: tuple[str, ...], device: str) -> None:
    assert hybrid_here(load_train_config(["sim=cartpole", *words])).device == device


def test_offloading_to_the_host_where_there_is_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("hybrid=fsdp2", "hybrid.sharding.cpu_offload=true", "hybrid.device=auto")
    on_ray = ("hybrid=ray", "hybrid.sharding={num_shards: 2, cpu_offload: true}", "hybrid.device=auto")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.warns(UserWarning, match=r"cpu_offload has no effect: .*device=auto finds no GPU") as told:
        resolve(configured(*words))
    assert len(told) == 1
    with pytest.warns(UserWarning, match=r"cpu_offload has no effect: .*hybrid\.ray\.gpus\.train=0"):
        resolve(configured(*on_ray))
    with pytest.raises(UserError, match=r"cpu_offload must be false with hybrid\.device=cpu"):
        configured(*words[:2])
    # Where there is one, there is nothing to say.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(configured(*on_ray, "hybrid.ray.gpus.train=2"))
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        resolve(configured(*words))


def test_the_keys_are_checked() -> None:
    with pytest.raises(UserError, match=r"hybrid.placement.kind='colocated' is not a choice.*collocated"):
        configured("hybrid.placement=colocated")
    with pytest.raises(UserError, match=r"hybrid.ray.cpus.train must be between 0 and 65,536, got -1"):
        configured("hybrid.ray.cpus.train=-1")
    with pytest.raises(UserError, match=r"hybrid.reward_worker.target must be of the form"):
        configured("algorithm=grpo", "hybrid.reward_worker={target: nothing}")


def test_a_saved_configuration_is_read_again(tmp_path: Path) -> None:
    """Checkpoints keep the long form of a placement, and older ones its name alone."""
    config = configured(APART)
    assert TrainConfig.from_dict(config.to_dict()) == config
    old = config.to_dict()
    old["hybrid"]["placement"] = "disaggregated"
    assert TrainConfig.from_dict(old) == config
