"""`algorithm.kl` with fixed rollouts: the divergence from the first policy, in the loss and in the reward."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.ppo import PPO
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.compose import load_train_config
from embodied_rl.config import AlgorithmConfig, KlConfig
from embodied_rl.errors import IncompatibleCheckpointError
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.loggers.meanings import meaning_of
from embodied_rl.policies.build import build_policy
from embodied_rl.resuming import load_policy
from embodied_rl.train import train
from embodied_rl.types import Rollout
from tests.rollout.test_training_recording import curve, weights
from tests.short_run import QUICK, last_of, train_shortly
from tests.vla.test_runs import GRPO, run
from tests.vla.test_runs import PPO as CHUNKS

CARTPOLE = ("sim=cartpole", "algorithm.rollout_steps=32", "algorithm.minibatch_size=128", "total_steps=1024", "algorithm.num_epochs=4")


def divergence(run_dir: Path) -> float:
    """KL(trained || first) by its definition, over both actions of many states."""
    checkpoint = load_checkpoint(run_dir, with_learner=False)
    torch.manual_seed(checkpoint.config.seed)
    first = build_policy(checkpoint.config.policy, checkpoint.spec)
    trained = build_policy(checkpoint.config.policy, checkpoint.spec)
    load_policy(trained, checkpoint)
    seen = {"state": torch.randn(500, 4, generator=torch.Generator().manual_seed(0)) * 0.05}
    both = [torch.stack([own.evaluate(seen, torch.full((500, 1), action)).log_prob[:, 0] for action in (0, 1)]) for own in (trained, first)]
    return float((both[0].exp() * (both[0] - both[1])).sum(0).mean().detach())


STILL = ("policy.normalize_observation=false", "algorithm.learning_rate=0.003")


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_shortly(tmp_path_factory.mktemp("free") / "run", *CARTPOLE, *STILL)


@pytest.mark.parametrize("where", ["kind: k3", "kind: k1, straight_through: true", "kind: k1, place: reward"])
def test_a_strong_term_keeps_the_policy_near_the_first(where: str, free: Path, tmp_path: Path) -> None:
    bound = train_shortly(tmp_path / "bound", *CARTPOLE, *STILL, f"algorithm.kl={{coef: 20, {where}}}")
    assert divergence(bound) < 0.2 * divergence(free)
    assert all("train/kl" in line for line in read_metrics(bound))
    assert not any("train/kl" in line for line in read_metrics(free))


def test_the_coefficient_follows_its_target_and_a_resumed_run_goes_on_with_it(tmp_path: Path) -> None:
    words = (*CARTPOLE, "algorithm.kl={coef: 0.1, target: 0.0001, horizon: 100}", "checkpoint.every_steps=512", "checkpoint.keep_last=9")
    whole = train_shortly(tmp_path / "whole", *words)
    factors = [line["train/kl_coef"] for line in read_metrics(whole)]
    assert len(set(factors)) == len(factors) > 4
    assert all(meaning_of(name).text for name in read_metrics(whole)[-1] if name.startswith("train/"))
    resumed = tmp_path / "resumed"
    shutil.copytree(whole / "checkpoints" / "step_000000512", resumed / "checkpoints" / "step_000000512")
    train_shortly(resumed, *words, "resume=auto")
    assert curve(resumed) == curve(whole)[-len(curve(resumed)) :]
    one, other = weights(whole), weights(resumed)
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name])


def test_rewards_of_the_steps_of_chunks_have_the_term_of_their_units() -> None:
    executed = np.array([[[True, True, False]]])
    rollout = Rollout(
        observation={},
        action=np.zeros((1, 1, 6), np.float32),
        log_prob=np.zeros((1, 1, 6), np.float32),
        reward=np.array([[3.0]], np.float32),
        terminated=np.zeros((1, 1), bool),
        truncated=np.zeros((1, 1), bool),
        last_observation={},
        final_observation={},
        policy_version=np.zeros((1, 1), np.int64),
        episodes=(),
        chunk_reward=np.array([[[1.0, 2.0, 0.0]]], np.float32),
        executed=executed,
    )
    method = PPO(AlgorithmConfig(kl=KlConfig(coef=0.5, kind="k1", place="reward")))
    kl = method.kl.divergence(torch.tensor([[0.0, 0.5, -1.0]]), torch.tensor([[-1.0, 0.0, -5.0]]))
    taken, figures = method.shaped(rollout, kl)
    # d = 1, 0.5 and one that was not executed; half of it is taken.
    assert taken.chunk_reward is not None
    np.testing.assert_allclose(taken.chunk_reward[0, 0], [0.5, 1.75, 0.0])
    np.testing.assert_allclose(taken.reward, [[2.25]])
    assert figures == pytest.approx({"kl": 0.75, "kl_penalty": 0.375})
    single = replace(rollout, chunk_reward=None, executed=None)
    np.testing.assert_allclose(method.shaped(single, torch.tensor([[4.0]]))[0].reward, [[1.0]])


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_policies_that_act_in_chunks_have_it_too(place: str, tmp_path: Path) -> None:
    once = ("algorithm.num_epochs=1", "algorithm.minibatch_size=32", "algorithm.advantage=gae_chunk", "algorithm.ratio=token")
    run_dir = run(
        tmp_path / "run", *CHUNKS, *once, f"algorithm.kl={{coef: 0.1, kind: k2, place: {place}}}", "algorithm.learning_rate=0.003"
    )
    found = [line["train/kl"] for line in read_metrics(run_dir)]
    assert found[0] == pytest.approx(0, abs=1e-9), "the first rollout is the first policy's"
    assert min(found[1:]) > 1e-9


def test_what_is_compared_with_is_what_a_warm_start_left(tmp_path: Path) -> None:
    """Before the first update, the policy of a group method is the reference too."""
    expert = "algorithm.recorded.expert=tests.vla.toys:PointExpert"
    warm = "+algorithm.warm_start={episodes: 8, num_epochs: 2, minibatch_rows: 32, learning_rate: 0.003, measured_episodes: 2}"
    once = ("algorithm.num_epochs=1", "algorithm.minibatch_size=1000", "algorithm.kl={coef: 0.1, kind: k2}", "total_steps=40")
    for method in (GRPO, CHUNKS):
        wide = ("algorithm.minibatch_size=32",) if method is CHUNKS else ()
        first = read_metrics(run(tmp_path / method[0], *method, expert, warm, *once, *wide))[1]
        assert first["train/kl"] == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_two_ranks_compare_with_the_same_reference(place: str, tmp_path: Path) -> None:
    words = (
        *CHUNKS,
        "hybrid.device=cpu",
        f"algorithm.kl={{coef: 0.5, kind: k2, place: {place}, target: 0.001}}",
        "algorithm.learning_rate=0.003",
    )
    one, two = (read_metrics(run(tmp_path / name, *words, *more)) for name, more in (("one", []), ("two", ["hybrid=fsdp2"])))
    for name in ("train/kl", "train/value_loss"):
        np.testing.assert_allclose([line[name] for line in two], [line[name] for line in one], rtol=1e-3, atol=1e-7)


def test_a_run_without_a_first_policy_is_not_resumed_with_a_divergence_from_it(tmp_path: Path) -> None:
    begun = train_shortly(tmp_path, "sim=cartpole")
    changed = ["algorithm.kl.coef=0.1", "total_steps=512"]
    config = load_train_config([*last_of([*QUICK, "sim=cartpole", *changed]), f"run_dir={begun}", f"resume={begun}"])
    with pytest.raises(IncompatibleCheckpointError, match=r"algorithm\.kl\.coef=0\.1 now, but 0 in the checkpoint"):
        train(config, overrides=changed)
