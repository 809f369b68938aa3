"""Episodes that rollout workers elsewhere write down are those that are written where all is in one process."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.episodes.folder import RECORDING_FILE
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode
from tests.golden.runs import RUNS
from tests.roles.runs import GROUPS, ROLLOUTS, TEXTS, assert_same_run, run_with_a_kill, trained
from tests.roles.test_within_episodes import GRPO, PPO, WITHIN

pytestmark = pytest.mark.usefixtures("forked")

APART = "hybrid=disaggregated"
HALF = ["record.share=0.5", "total_steps=1000", "evaluation.every_steps=null", "sim.max_episode_steps=20"]


def episodes(run_dir: Path) -> dict[tuple[object, ...], RecordedEpisode]:
    """{(seed, whose it is in its group): episode} of all folders."""
    found = {}
    for file in sorted((run_dir / "episodes").rglob(RECORDING_FILE)):
        for episode in open_recording(file.parent):
            found[(episode.seed, *sorted(episode.metadata["policy"].items()))] = episode
    return found


def check(here: Path, apart: Path, *, exact: bool = True) -> None:
    one, other = episodes(here), episodes(apart)
    assert len(one) > 5
    assert one.keys() == other.keys()
    compare = np.testing.assert_array_equal if exact else lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4)
    for key, episode in one.items():
        assert_same_episode(episode, other[key], compare)


def assert_same_episode(episode: RecordedEpisode, other: RecordedEpisode, compare: Callable[[Any, Any], None]) -> None:
    for name in ("action", "reward", "success", "policy_version"):
        compare(getattr(episode, name), getattr(other, name))
    for name, seen in episode.observation.items():
        if seen.dtype == object:
            assert seen.tolist() == other.observation[name].tolist()
        else:
            compare(seen, other.observation[name])


@pytest.mark.parametrize(
    ("task", "where"),
    [
        pytest.param(ROLLOUTS, APART, id="rollouts"),
        pytest.param(ROLLOUTS, "hybrid=multiplexed", id="multiplexed", marks=pytest.mark.slow),
        pytest.param(ROLLOUTS, "hybrid=ray", id="ray", marks=pytest.mark.slow),
        pytest.param(GROUPS, APART, id="groups"),
        pytest.param([*TEXTS, "algorithm.warm_start=null"], APART, id="agents", marks=pytest.mark.slow),
    ],
)
def test_the_same_episodes_are_written(tmp_path: Path, task: list[str], where: str) -> None:
    here = trained(tmp_path / "here", *task, *HALF, "sim.pipeline_groups=1")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*take turns.*")
        apart = trained(tmp_path / "apart", *task, *HALF, "sim.pipeline_groups=1", where)
    assert_same_run(here, apart)
    check(here, apart)


@pytest.mark.slow
@pytest.mark.parametrize("task", [GROUPS, ROLLOUTS], ids=["groups", "rollouts"])
def test_each_of_two_workers_has_a_folder(tmp_path: Path, task: list[str]) -> None:
    here = trained(tmp_path / "here", *task, *HALF)
    apart = trained(tmp_path / "apart", *task, *HALF, APART, "hybrid.players=2")
    assert sorted(folder.name for folder in (apart / "episodes").iterdir()) == ["worker_0", "worker_1"]
    check(here, apart, exact=False)


@pytest.mark.parametrize(
    ("task", "kept"),
    [
        pytest.param(PPO, False, id="rollouts"),
        pytest.param([*PPO, APART, "algorithm.max_staleness=1"], False, id="ahead in another process"),
        pytest.param([*PPO, APART, "hybrid.players=2", "sim.num_workers=2"], False, id="two players", marks=pytest.mark.slow),
        pytest.param(PPO, True, id="what is there already", marks=pytest.mark.slow),
        pytest.param(
            [*RUNS["ppo_cnn"], *WITHIN[:3], "total_steps=192", "checkpoint.every_steps=64"], False, id="pictures", marks=pytest.mark.slow
        ),
        pytest.param(
            [*RUNS["tiny_vla_chunks"], *WITHIN[:3], "algorithm.rollout_steps=3", "algorithm.minibatch_size=6", "checkpoint.every_steps=30"],
            False,
            id="chunks",
            marks=pytest.mark.slow,
        ),
        pytest.param(GRPO, False, id="groups", marks=pytest.mark.slow),
    ],
)
def test_episodes_that_ran_at_a_checkpoint_are_written_whole(tmp_path: Path, task: list[str], kept: bool) -> None:
    """A run that goes on within them writes what it would have written, and nothing twice that the interrupted one finished after it."""
    task = [*task, "record.share=0.7"]
    whole, resumed = trained(tmp_path / "whole", *task), tmp_path / "resumed"
    middle = sorted((whole / "checkpoints").glob("step_*"))[1]
    shutil.copytree(middle, resumed / "checkpoints" / middle.name)
    shutil.copy(whole / "metrics.jsonl", resumed)
    if kept:
        shutil.copytree(whole / "episodes", resumed / "episodes")
    assert_same_run(whole, trained(resumed, *task, "resume=auto"))
    one, other = episodes(whole), episodes(resumed)
    # A worker elsewhere may have played the next rollout already when the checkpoint was made.
    since = load_checkpoint(middle).state["iteration"] + (APART in task)
    late = {key for key, episode in one.items() if kept or episode.policy_version[-1] >= since}
    assert late <= other.keys() <= one.keys()
    assert task[:-1] == GRPO or any(one[key].policy_version[0] < since for key in late)
    for key, episode in other.items():
        assert_same_episode(one[key], episode, np.testing.assert_array_equal)


@pytest.mark.slow
def test_a_worker_that_was_replaced_goes_on_with_the_recording(tmp_path: Path) -> None:
    here = trained(tmp_path / "here", *GROUPS, *HALF)
    run_with_a_kill(tmp_path / "apart", [*GROUPS, *HALF, APART], lambda player: player._handle.process.pid)
    check(here, tmp_path / "apart")
