"""Policies that act in chunks, recorded step by step, scored on what was recorded, and cloned from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.commands import offline_eval, record
from embodied_rl.compose import load_train_config
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode
from embodied_rl.generation.torch_backend import TorchGenerator
from embodied_rl.policies.tiny_vla import TinyVLAPolicy
from embodied_rl.resuming import load_policy
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.train import train
from tests.short_run import one_line_error
from tests.vla.toys import QUIET, SIM, TINY

K, A = 3, 2
PPO = ("algorithm.rollout_steps=8", "algorithm.minibatch_size=16", "algorithm.num_epochs=2", "total_steps=100")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chunks") / "run"
    return train(load_train_config([*SIM, *TINY, *QUIET, *PPO, "sim.success_ends_episode=true", f"run_dir={folder}"]))


@pytest.fixture(scope="module")
def recording(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "sampled"
    record.main([f"checkpoint={run_dir}", "num_episodes=6", "sample=true", "held_out=true", f"output={folder}"])
    return folder


def policy_of(run_dir: Path) -> TinyVLAPolicy:
    checkpoint = load_checkpoint(run_dir, with_learner=False)
    assert checkpoint.config.policy.name == "tiny_vla"
    policy = TinyVLAPolicy(checkpoint.config.policy, checkpoint.spec)
    load_policy(policy, checkpoint)
    return policy.eval()


def asked(episode: RecordedEpisode) -> np.ndarray:
    """[Q] steps before which the policy was asked."""
    assert episode.chunk is not None
    return np.flatnonzero(np.append(True, np.diff(episode.chunk) != 0))


def test_every_step_has_its_row_and_every_token_its_log_probability(run_dir: Path, recording: Path) -> None:
    policy, episodes = policy_of(run_dir), list(open_recording(recording))
    assert len(episodes) == 6
    for episode in episodes:
        steps = episode.num_steps
        np.testing.assert_array_equal(episode.chunk, np.arange(steps) // K)
        assert episode.sampled_action is not None
        assert episode.log_prob is not None
        assert episode.sampled_action.shape == episode.log_prob.shape == (steps, A)
        np.testing.assert_allclose(policy.action_tokens.decode(episode.sampled_action), episode.action, atol=1e-6)
        # The point moves by 0.2 times the first number of each action: what was done in every step is what is recorded.
        moved = np.clip(episode.observation["state"][:-1, 0] + 0.2 * episode.action[:, 0], -1, 1)
        np.testing.assert_allclose(episode.observation["state"][1:, 0], moved, atol=1e-6)
        # The policy, asked again where its chunks began: the same log-probabilities of the same tokens.
        first = asked(episode)
        padded = np.zeros((len(first), K, A), np.int64)
        for row, start in enumerate(first):
            part = episode.sampled_action[start : start + K]
            padded[row, : len(part)] = part
        with torch.no_grad():
            seen = {key: part[first] for key, part in episode.observation.items()}
            again = policy.evaluate(policy.prepare(seen), torch.from_numpy(padded.reshape(len(first), K * A))).log_prob.numpy()
        np.testing.assert_allclose(again.reshape(-1, A)[:steps], episode.log_prob, atol=1e-4)


def test_the_mode_is_what_whole_chunks_do_in_the_simulator(run_dir: Path, tmp_path: Path) -> None:
    """Played step by step for the recorder, and in chunks by the workers: the same episodes."""
    record.main([f"checkpoint={run_dir}", "num_episodes=6", "held_out=true", f"output={tmp_path / 'mode'}"])
    recorded = {episode.seed: episode for episode in open_recording(tmp_path / "mode")}
    config = load_checkpoint(run_dir, with_learner=False).config
    with EnvManager.from_config(config.sim, EpisodeSeeds.given(0), autoreset=False, chunk_size=K) as manager:
        played = evaluate(manager, TorchGenerator(policy_of(run_dir)), 6)
    assert len(played) == 6
    for summary in played:
        episode = recorded[summary.seed]
        assert (summary.length, summary.success_once) == (episode.num_steps, episode.success_once)
        assert summary.episode_return == pytest.approx(episode.episode_return, abs=1e-5)
        assert episode.log_prob is None


def test_offline_figures_are_those_by_hand(run_dir: Path, recording: Path, tmp_path: Path) -> None:
    output = tmp_path / "report"
    offline_eval.main([f"recording={recording}", f"checkpoint={run_dir}", f"output={output}"])
    document = json.loads(next(output.rglob("*.json")).read_text())
    found = document["policies"][0]["open_loop"]
    policy, hits, errors, likelihood = policy_of(run_dir), [], [], []
    for episode in open_recording(recording):
        first = asked(episode)
        with torch.no_grad():
            ready = policy.prepare({key: part[first] for key, part in episode.observation.items()})
            mode = policy.act(ready, None).action
            said = policy.simulator_action(mode).reshape(-1, A)[: episode.num_steps]
        tokens = policy.action_tokens.encode(episode.action)
        hits.append((policy.action_tokens.encode(said) == tokens).mean())
        errors.append(((said - episode.action) ** 2).mean())
        assert episode.log_prob is not None
        likelihood.append(episode.log_prob.sum(1).mean())
    assert found["horizon"] == K
    assert found["num_bins"] == policy.action_tokens.num_bins - 1
    assert found["accuracy"]["mean"] == pytest.approx(np.mean(hits), abs=1e-6)
    assert found["mse"]["mean"] == pytest.approx(np.mean(errors), abs=1e-6)
    assert found["log_likelihood"]["mean"] == pytest.approx(np.mean(likelihood), abs=1e-4)


def test_a_recording_is_cloned_from_the_command_line(recording: Path, tmp_path: Path) -> None:
    words = ("algorithm=bc", f"recording=[{recording}]", "total_steps=40", "algorithm.minibatch_size=16", f"run_dir={tmp_path / 'bc'}")
    run = train(load_train_config([*SIM, *TINY, *QUIET, "sim.success_ends_episode=true", *words]))
    losses = [json.loads(line).get("train/imitation_loss") for line in (run / "metrics.jsonl").read_text().splitlines()]
    learned = [loss for loss in losses if loss is not None]
    assert learned[-1] < learned[0]


def test_a_flow_is_recorded_and_has_no_likelihood_to_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flow = ("policy=flow", "policy.chunk=3", "policy.hidden_sizes=[16]", "policy.num_steps=2")
    run = train(load_train_config([*SIM, *QUIET, *PPO, *flow, f"run_dir={tmp_path / 'run'}"]))
    record.main([f"checkpoint={run}", "num_episodes=2", "sample=true", f"output={tmp_path / 'r'}"])
    for episode in open_recording(tmp_path / "r"):
        assert episode.sampled_action is None
        assert episode.log_prob is not None
        assert episode.log_prob.shape[1] == A
        np.testing.assert_array_equal(episode.chunk, np.arange(episode.num_steps) // 3)
    capsys.readouterr()
    line = one_line_error(offline_eval.main, [f"recording={tmp_path / 'r'}", f"checkpoint={run}", f"output={tmp_path / 'o'}"], capsys)
    assert "cannot compute it" in line


EXPERT = "algorithm.recorded.expert=tests.vla.toys:PointExpert"
DAGGER = ("algorithm=dagger", EXPERT, "algorithm.recorded.expert_episodes=4", "algorithm.rollout_steps=6", "algorithm.num_epochs=3",
          "algorithm.minibatch_size=32", "algorithm.learning_rate=0.003", "sim.success_ends_episode=true")  # fmt: skip


def test_dagger_asks_the_expert_where_a_chunk_begins(tmp_path: Path) -> None:
    words = [*SIM, *TINY, *QUIET, *DAGGER, "total_steps=600", "evaluation.num_episodes=40", "checkpoint.every_steps=200"]
    whole = train(load_train_config([*words, "checkpoint.keep_last=9", f"run_dir={tmp_path / 'whole'}"]))
    curve = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    labels = [line["data/labels"] - line["data/recorded_steps"] for line in curve if "data/labels" in line]
    # Six decisions of four slots between two updates, whatever the steps that they played.
    assert labels == [24.0 * iteration for iteration in range(len(labels))]
    # Four demonstrations alone solve little of it; who does not understand the words solves half.
    assert json.loads((whole / "results.json").read_text())["success"] >= 0.8
    between = sorted((whole / "checkpoints").glob("step_*"))[-2]
    again = train(load_train_config([*words, "evaluation.num_episodes=1", f"run_dir={tmp_path / 'again'}", f"resume={between}"]))
    first, second = (load_file(run / "checkpoints" / "last" / "policy.safetensors") for run in (whole, again))
    for name, expected in first.items():
        np.testing.assert_array_equal(second[name], expected, err_msg=name)
