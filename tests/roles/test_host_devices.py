"""Policies that act on each host's device: copies with equal weights, each for its own host's slots, and none where training is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.compose import load_train_config
from embodied_rl.config import TrainConfig
from embodied_rl.config.rules import resolve
from embodied_rl.generation.torch_backend import HostActors, ModuleActor
from embodied_rl.roles import worker as workers
from embodied_rl.roles.device_lease import HostPlan, plan_here
from embodied_rl.roles.worker import RolloutWorker
from embodied_rl.rollout.groups import WHOLE
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from embodied_rl.types import Rollout
from tests.golden.runs import RUNS, make_openvla
from tests.roles.runs import configured, curve
from tests.roles.test_multiplexed import weights_of

SHARED = ("hybrid.placement=multiplexed", "sim.num_workers=2", "hybrid.num_threads=1")
AHEAD = "algorithm.max_staleness=1"
ON_TWO = HostPlan(2, 1, 2, devices=("cpu", "cpu"))
POLICIES = ("ppo_cnn", "tiny_vla_chunks", "flow", "openvla_lora")


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts whose devices are the processor twice, and one thread: the last bit of a product depends on their number."""
    monkeypatch.setattr(workers, "plan_here", lambda config: ON_TWO)
    torch.set_num_threads(1)


def task(name: str, folder: Path, *words: str) -> list[str]:
    found = [word.replace("{openvla}", str(make_openvla(folder / "openvla"))) if "{openvla}" in word else word for word in RUNS[name]]
    keys = {word.partition("=")[0] for word in words}
    return [*(word for word in found if word.partition("=")[0] not in keys), *words]


def actors_of(player: RolloutWorker) -> HostActors:
    acting: Any = player.acting
    (policy,) = acting.policies.values()
    own = policy._hosted
    assert own is not None, "one copy acts for all hosts"
    return own[1]


class Watched:
    """What was asked of a worker's copies, and what came of it."""

    def __init__(self, player: RolloutWorker) -> None:
        self.asked: list[np.ndarray] = []
        acting: Any = player.acting
        (own,) = acting.policies.values()
        actors, act, policy = actors_of(player), actors_of(player).act, own.policy

        def watch(observation: Any, noise: Any, hosts: np.ndarray | None = None) -> Any:
            action, log_prob = act(observation, noise, hosts)
            if hosts is None:  # held-out episodes
                assert len(actors.modules) == 2
                return action, log_prob
            self.asked.append(hosts)
            assert player.lease is not None
            assert len(actors.modules) == (1 if player.lease.is_lent else 2), "a lent host has no copy"
            assert not (player.lease.is_lent and (hosts == 0).any()), "host 0 is lent"
            for number in np.unique(hosts):
                rows = hosts == number
                alone = ModuleActor(policy).act({key: part[rows] for key, part in observation.items()}, noise[rows])
                np.testing.assert_array_equal(action[rows], alone[0])
                np.testing.assert_array_equal(log_prob[rows], alone[1])
            return action, log_prob

        actors.act = watch  # type: ignore[method-assign]


def rollouts_of(config: TrainConfig, num_rollouts: int, between: int, watch: bool) -> list[Rollout]:
    """Rollouts of other weights each; `between` rounds are played while training has its host."""
    player = RolloutWorker(config)
    found = []
    try:
        player.take_models({})
        first, watched = weights_of(player), Watched(player) if watch else None
        player.load(0, iter(first))
        player.restart(0)
        for version in range(num_rollouts):
            found.append(player.play(version).rollouts[""])
            for _ in range(between):
                player.pump()
            if watched is not None and between:
                assert player.lease is not None
                assert player.lease.is_lent
                assert len(actors_of(player).modules) == 1
            scale = 1.0 + 0.01 * (version + 1)
            player.load(version + 1, iter([(name, part * scale if part.is_floating_point() else part) for name, part in first]))
            if watched is not None:
                check_copies(player)
        if watched is not None:
            assert {0, 1} == set(np.concatenate(watched.asked).tolist())
            assert player.evaluate(2, 0)
    finally:
        player.close()
    return found


def check_copies(player: RolloutWorker) -> None:
    """All hosts are back, with the policy's weights, each in memory of its own."""
    acting: Any = player.acting
    (own,) = acting.policies.values()
    policy, copies = own.policy, actors_of(player).modules
    assert len(copies) == 2
    state = policy.state_dict()
    places = [part.data_ptr() for module in (policy, *copies) for part in module.state_dict().values() if part.numel()]
    assert len(places) == 3 * len({part.data_ptr() for part in state.values() if part.numel()})
    assert len(set(places)) == len(places)
    for copy in copies:
        assert copy.state_dict().keys() == state.keys()
        for name, part in copy.state_dict().items():
            assert torch.equal(part, state[name])
        assert [part.requires_grad for part in copy.parameters()] == [part.requires_grad for part in policy.parameters()]
        assert not copy.training


@pytest.mark.parametrize("name", POLICIES)
def test_each_host_acts_with_its_own_copy(tmp_path: Path, name: str) -> None:
    """Row by row what one copy does of the rows of one host, bit for bit, and the rollouts of a single policy, but for the last bits."""
    own = task(name, tmp_path, "sim.num_workers=2", "sim.max_episode_steps=11")
    one = rollouts_of(configured(tmp_path / "one", *own, "hybrid=disaggregated", "sim.pipeline_groups=1", AHEAD), 1, 0, watch=False)
    several = rollouts_of(configured(tmp_path / "several", *own, *SHARED, AHEAD), 2, 40, watch=True)
    for field in ("action", "log_prob", "reward"):
        np.testing.assert_allclose(getattr(several[0], field), getattr(one[0], field), atol=1e-4)


def test_domains_that_share_a_policy_share_its_copies(tmp_path: Path) -> None:
    """Groups of two domains, whose slots have the same numbers and other hosts."""
    points = "{name: points, target: 'tests.vla.toys:PointSim', num_slots: 4, num_workers: 2}"
    groups = [word for word in RUNS["tiny_vla_groups"] if not word.startswith("sim")]
    domains = [f"domains.{name}.sim={points}" for name in ("one", "two")]
    words = [*groups, *domains, "hybrid.placement=multiplexed", "algorithm.groups.max_staleness=1"]
    player = RolloutWorker(configured(tmp_path, *words))
    try:
        player.take_models({})
        weights, watched = weights_of(player), Watched(player)
        player.load(0, iter(weights))
        assert player.queue is not None
        player.restart(0, player.queue.state_dict())
        for version in range(4):
            assert len(player.play(version).groups) == 2
            for _ in range(20):
                player.pump()
            player.load(version + 1, iter(weights))
            check_copies(player)
    finally:
        player.close()
    assert {0, 1} == set(np.concatenate(watched.asked).tolist())
    assert player.lease is not None
    assert [sorted(multiplexer.train_on) for multiplexer in player.lease.multiplexers] == [[0], [0]]


# ---- runs ---------------------------------------------------------------------------------------------------------------


class Here:
    """A rollout worker in this process, which plays on for some rounds before it gets new weights, as while training."""

    def __init__(self, config: TrainConfig, between: int) -> None:
        self.worker, self._between = RolloutWorker(config), between

    def call(self, what: str, **arguments: object) -> Any:
        return self.worker.asked[what](**arguments)

    def put(self, version: int, tensors: Mapping[str, torch.Tensor]) -> tuple[list[tuple[str, torch.Tensor]], int]:
        for _ in range(self._between):
            self.worker.pump()
        return [(name, tensor.clone()) for name, tensor in tensors.items()], 0

    def close(self) -> None:
        self.worker.close()


def trained_here(monkeypatch: pytest.MonkeyPatch, run_dir: Path, *words: str, between: int = 0) -> tuple[RolloutWorker, list[set[int]]]:
    """The worker of a run, which has ended, and the ages of what each update learned from."""
    players: list[Here] = []
    ages: list[set[int]] = []

    def start(config: TrainConfig, share: object) -> Here:
        assert share is WHOLE
        players.append(Here(config, between))
        return players[-1]

    monkeypatch.setattr("embodied_rl.roles.components._start_one", start)
    run_dir.mkdir()
    with Trainer(configured(run_dir, *words), run_dir, command="test") as trainer:
        method: Any = trainer.method
        prepare = method.prepare

        def note(experience: Any) -> Any:
            rollouts = [rollout for own in experience.data.values() for rollout in own.values()]
            ages.append({int(age) for rollout in rollouts for age in (trainer.iteration - rollout.policy_version).ravel()})
            return prepare(experience)

        method.prepare = note
        trainer.run()
    (player,) = players
    return player.worker, ages


@pytest.mark.filterwarnings("ignore:hybrid.placement=multiplexed with")
@pytest.mark.parametrize("name", ["ppo_cnn", "flow"])
def test_a_run_in_turns_is_that_of_one_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """But for the last bits: two halves of a batch are two products."""
    words = task(name, tmp_path, *SHARED)
    player, ages = trained_here(monkeypatch, tmp_path / "several", *words)
    assert len(actors_of(player).modules) == 2
    assert set.union(*ages) == {0}
    monkeypatch.setattr(workers, "plan_here", lambda config: HostPlan(2, 1, 2))
    trained_here(monkeypatch, tmp_path / "one", *words)
    several, one = (load_checkpoint(tmp_path / name).policy for name in ("several", "one"))
    for key, weight in one.items():
        np.testing.assert_allclose(several[key], weight, atol=1e-4)
    for mine, theirs in zip(curve(tmp_path / "several"), curve(tmp_path / "one"), strict=True):
        assert mine.keys() == theirs.keys()
        assert mine.get("episode/return") == pytest.approx(theirs.get("episode/return"), abs=1e-3)


@pytest.mark.filterwarnings("ignore:hybrid.placement=multiplexed with")
def test_what_reads_vectors_acts_on_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One copy for all hosts: the run is that of one policy to the last bit."""
    words = task("ppo_fused_gaussian", tmp_path, *SHARED)
    trained_here(monkeypatch, tmp_path / "several", *words)
    monkeypatch.setattr(workers, "plan_here", lambda config: HostPlan(2, 1, 2))
    trained_here(monkeypatch, tmp_path / "one", *words)
    assert curve(tmp_path / "several") == curve(tmp_path / "one")


def test_a_run_acts_on_one_device_while_it_trains_on_the_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = task("tiny_vla_chunks", tmp_path, *SHARED, AHEAD, "total_steps=400", "evaluation.every_steps=300")
    player, ages = trained_here(monkeypatch, tmp_path / "run", *words, between=40)
    assert ages[0] == {0}
    assert set.union(*ages) == {0, 1}, "nothing was played while training"
    assert player.lease is not None
    assert player.lease.num_shrinks == len(ages) >= 4
    assert player.lease.multiplexers[0].counts().moves > 0
    assert any("eval/return" in row for row in curve(tmp_path / "run"))


def test_two_gpus_are_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = load_train_config(
        ["sim=cartpole", "algorithm=grpo", "hybrid=multiplexed", "algorithm.groups.max_staleness=1", "hybrid.device=cuda"]
    )
    assert plan_here(resolve(config)).devices == ("cuda:0", "cuda:1")


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("name", POLICIES)
def test_two_gpus_act_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Each copy is on its GPU and has the policy's weights; none is on the GPU that training has."""
    monkeypatch.setattr(workers, "plan_here", lambda config: HostPlan(2, 1, 2, devices=("cuda:0", "cuda:1")))
    player = RolloutWorker(configured(tmp_path / "run", *task(name, tmp_path, *SHARED, AHEAD, "hybrid.device=cuda")))
    try:
        player.take_models({})
        weights, actors = weights_of(player), actors_of(player)
        player.load(0, iter(weights))
        player.restart(0)
        used = torch.cuda.memory_allocated(0)
        for version in range(3):
            player.play(version)
            assert [next(copy.parameters()).device.index for copy in actors.modules] == [1]
            assert torch.cuda.memory_allocated(0) < used, "the lent GPU is training's"
            for _ in range(40):
                player.pump()
            player.load(version + 1, iter(weights))
            assert {next(copy.parameters()).device.index for copy in actors.modules} == {0, 1}
            for key, part in weights:
                assert all(torch.equal(copy.state_dict()[key].cpu(), part) for copy in actors.modules)
    finally:
        player.close()


@pytest.mark.gpu
@two_gpus
def test_a_run_on_two_gpus(tmp_path: Path) -> None:
    """As users start it: training here, and a process that plays on both."""
    folder = train(configured(tmp_path / "run", *task("ppo_cnn", tmp_path, *SHARED, AHEAD, "hybrid.device=cuda", "total_steps=640")))
    assert curve(folder)[-1]["step"] >= 640
