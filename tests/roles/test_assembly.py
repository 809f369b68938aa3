"""Placements that cannot be had are refused before anything is started, with the reason and the nearest that can be had."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from embodied_rl.config import TrainConfig
from embodied_rl.config.compose import load_train_config
from embodied_rl.errors import UserError
from embodied_rl.roles.assembly import check_roles, playing_gpu

CARTPOLE = ("sim=cartpole", "hybrid.device=cpu")
APART = "hybrid=disaggregated"
SPEAKING = ("policy=language", "algorithm=grpo", "generation=tokens_torch")


def configured(*overrides: str) -> TrainConfig:
    # What is composed later replaces the simulator.
    chosen = any(word.startswith(("sim=", "experiment=")) for word in overrides)
    return load_train_config([*(CARTPOLE[1:] if chosen else CARTPOLE), *overrides])


@pytest.mark.parametrize(
    ("overrides", "reason", "nearest"),
    [
        (("hybrid.placement=multiplexed",), "have all slots end together", "hybrid.placement=disaggregated"),
        (("algorithm.max_staleness=1",), "take turns", "hybrid=disaggregated"),
        ((APART, "algorithm=sac", "algorithm.max_staleness=1"), "keeps what it learns from", "set it to 0"),
        (("hybrid.placement={kind: hybrid, num_pipeline_stages: 4}",), "is what sim.pipeline_groups says", "sim.pipeline_groups=4"),
        (("hybrid.placement={env: [1/cpu], generation: [0/cpu], train: [0/cpu]}",), "Device '1/cpu' does not exist", "0/cpu"),
        ((APART, "algorithm=bc"), "learns from recorded", "hybrid=collocated"),
        ((APART, "algorithm=sac"), "learns from recorded", "hybrid=collocated"),
        ((APART, "record.share=0.5"), "record.share", "hybrid=collocated"),
        ((APART, "hybrid.offload=[simulators]"), "hybrid.offload", "hybrid=collocated"),
        (("hybrid=ray", "hybrid.sharding={num_shards: 2}", "hybrid.ray.gpus.train=1"), "ranks need a GPU each", "hybrid.ray.gpus.train=2"),
        ((*SPEAKING, "sim=agent_program", "hybrid.reward_worker={target: a.b:c}"), "rewards of their own", "reward_worker=null"),
        (("hybrid=ray", "algorithm=grpo", "algorithm.warm_start={episodes: 1}"), "algorithm.warm_start", "hybrid=collocated"),
        (("hybrid.reward_worker={target: a.b:c}",), "scores whole episodes", "algorithm=grpo"),
    ],
)
def test_refused(overrides: tuple[str, ...], reason: str, nearest: str) -> None:
    with pytest.raises(UserError) as refused:
        check_roles(configured(*overrides))
    assert reason in str(refused.value)
    assert nearest in str(refused.value)


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
    check_roles(configured(*overrides))


def test_offloading_to_the_host_where_there_is_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("hybrid=fsdp2", "hybrid.sharding.cpu_offload=true", "hybrid.device=auto")
    on_ray = ("hybrid=ray", "hybrid.sharding={num_shards: 2, cpu_offload: true}", "hybrid.device=auto")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.warns(UserWarning, match=r"cpu_offload has no effect: .*device=auto finds no GPU") as told:
        check_roles(configured(*words))
    assert len(told) == 1
    with pytest.warns(UserWarning, match=r"cpu_offload has no effect: .*hybrid\.ray\.gpus\.train=0"):
        check_roles(configured(*on_ray))
    with pytest.raises(UserError, match=r"cpu_offload must be false with hybrid\.device=cpu"):
        configured(*words[:2])
    # Where there is one, there is nothing to say.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_roles(configured(*on_ray, "hybrid.ray.gpus.train=2"))
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        check_roles(configured(*words))


def test_the_player_has_the_last_gpu() -> None:
    assert playing_gpu(None, 4) == "3"
    assert playing_gpu("2,5, 7", 3) == "7"


@pytest.mark.parametrize(
    ("count", "overrides", "reason"),
    [
        (1, (), "needs at least 2 GPUs, and 'this machine' has 1"),
        (2, ("hybrid=fsdp2", "hybrid.placement=disaggregated"), "beside those of 2 training ranks"),
    ],
)
def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch, count: int, overrides: tuple[str, ...], reason: str) -> None:
    """The counts alone are made up: machines with so many GPUs are what this is about."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    with pytest.raises(UserError, match=reason):
        check_roles(load_train_config(["sim=cartpole", APART, *overrides, "hybrid.device=cuda"]))


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
