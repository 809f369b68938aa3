"""Fixed rollouts, and stored steps, of episodes that start inside earlier ones. Where others play: `tests/roles/test_starts_apart.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.episodes.reader import open_recording
from tests.methods.test_step_rewards import STORED
from tests.roles.runs import assert_same_run, curve, trained
from tests.roles.test_starts_apart import DOORS, OF_ROLLOUTS
from tests.rollout.test_training_recording import play_again
from tests.short_run import QUICK

INSIDE = "algorithm.initialized={share: 0.7, success_return: 12, sources: [best], chunk_steps: 3, min_episodes: 2}"
OFF_POLICY = [
    *(word for word in QUICK if not word.startswith(("algorithm.num_epochs", "total_steps"))),
    *(*STORED, INSIDE, "checkpoint.every_steps=200", "checkpoint.keep_last=9"),
]


@pytest.mark.parametrize(
    "task",
    [[*OF_ROLLOUTS, "checkpoint.within_episodes=true", "record.share=0.5"], OFF_POLICY, [*OFF_POLICY, "checkpoint.within_episodes=true"]],
    ids=["rollouts within episodes", "stored", "stored within episodes"],
)
def test_a_run_whose_episodes_start_inside_others_resumes_to_the_bit(tmp_path: Path, task: list[str]) -> None:
    whole = trained(tmp_path / "whole", *task)
    last = curve(whole)[-1]
    assert last["initialized/sources"] > 0
    assert last["initialized/replayed_messages"] > 0
    assert last["initialized/mismatched_starts"] == 0
    middle = sorted((whole / "checkpoints").glob("step_*"))[0]
    assert load_checkpoint(middle).state["algorithm"]["starts"]["sources"]
    resumed = tmp_path / "resumed"
    shutil.copytree(middle, resumed / "checkpoints" / middle.name)
    shutil.copy(whole / "metrics.jsonl", resumed)
    assert_same_run(whole, trained(resumed, *task, "resume=auto"))


def test_what_starts_inside_others_is_in_no_recording(tmp_path: Path) -> None:
    """Each recorded episode is played again from its seed: also one that follows, in its slot, one that started elsewhere."""
    run = trained(tmp_path / "run", *DOORS, "sim.max_episode_steps=60", "record.share=1.0")
    assert curve(run)[-1]["initialized/sources"] > 0
    with open_recording(run / "episodes") as recording:
        assert len({episode.seed for episode in recording}) == len(recording) > 4
        for again in play_again(recording):
            np.testing.assert_array_equal(again["seen"], again["recorded"])
