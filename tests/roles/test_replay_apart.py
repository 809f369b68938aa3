"""Methods that keep what they learn from, where a rollout worker elsewhere plays: the run of one process, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.errors import UserError
from tests.golden.runs import RUNS
from tests.methods.test_stored_domains import COMMON, DOMAINS, METHODS
from tests.roles.runs import assert_same_run, configured, curve, trained
from tests.roles.test_within_episodes import SAC, check

pytestmark = pytest.mark.usefixtures("forked")

APART = "hybrid=disaggregated"
BRIEF = "sim.max_episode_steps=70"
"""An expert of the door needs 60; what has not learned is evaluated for no longer."""
DUE = [BRIEF, "evaluation.every_steps=64", "checkpoint.every_steps=64", "checkpoint.keep_last=9"]
VLA = [*RUNS["bc_chunks"], "algorithm=dagger", "algorithm.rollout_steps=4", "total_steps=60", "evaluation.every_steps=40"]


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(SAC, id="sac_within_episodes"),
        pytest.param([*RUNS["rlpd"], *DUE], id="rlpd", marks=pytest.mark.slow),
        pytest.param([*RUNS["dagger"], *DUE], id="dagger"),
        pytest.param([*VLA, "checkpoint.every_steps=20", "checkpoint.keep_last=9"], id="dagger_chunks", marks=pytest.mark.slow),
    ],
)
def test_steps_are_kept_as_in_one_process(tmp_path: Path, task: list[str]) -> None:
    """Warm-ups at random, an expert that plays first, evaluations and a resumed run among it."""
    check(tmp_path, task, [APART], like=[])


@pytest.mark.parametrize(
    "task",
    [
        pytest.param([*SAC, "algorithm.max_staleness=1"], id="sac_within_episodes"),
        pytest.param([*RUNS["rlpd"], *DUE, "algorithm.max_staleness=2"], id="rlpd", marks=pytest.mark.slow),
        pytest.param([*RUNS["dagger"], *DUE, "algorithm.max_staleness=1"], id="dagger", marks=pytest.mark.slow),
    ],
)
def test_steps_are_kept_that_were_played_ahead(tmp_path: Path, task: list[str]) -> None:
    """By weights that are as old as is allowed and no older, here as in another process; the warm-up ends in the same rollout."""
    check(tmp_path, task, [APART], like=[])
    ages = [row["rollout/age_max"] for row in curve(tmp_path / "whole") if "rollout/age_max" in row]
    assert max(ages) == configured(tmp_path, *task).algorithm.max_staleness


SAC_OF_DOMAINS = [*METHODS["sac"], *COMMON, *DOMAINS, "checkpoint.every_steps=48", "checkpoint.keep_last=9", "evaluation.every_steps=48"]
OFFLINE = [*RUNS["iql"], BRIEF, "evaluation.every_steps=10", "checkpoint.every_steps=10", "checkpoint.keep_last=9"]
CLONED = [*RUNS["bc"], BRIEF, "evaluation.every_steps=20", "checkpoint.every_steps=20", "checkpoint.keep_last=9"]


@pytest.mark.parametrize("task", [pytest.param(OFFLINE, id="iql"), pytest.param(CLONED, id="bc", marks=pytest.mark.slow)])
def test_what_plays_nothing_is_evaluated_elsewhere(tmp_path: Path, task: list[str]) -> None:
    check(tmp_path, task, [APART], like=[])
    assert any("eval/return" in row for row in curve(tmp_path / "whole"))
    with pytest.raises(UserError, match=r"record.share=1: algorithm=\w+ plays no episodes"):
        trained(tmp_path / "recorded", *task, APART, "record.share=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "ranks"),
    [
        pytest.param(SAC, [], id="sac_within_episodes"),
        pytest.param([*RUNS["dagger"], *DUE], [], id="dagger"),
        pytest.param(SAC, ["hybrid.sharding={num_shards: 2}"], id="sac on two ranks"),
        pytest.param([*RUNS["dagger"], *DUE], ["hybrid.sharding={num_shards: 2}"], id="dagger on two ranks"),
        pytest.param(OFFLINE, ["hybrid.sharding={num_shards: 2}"], id="iql on two ranks"),
        pytest.param(SAC_OF_DOMAINS, [], id="sac of domains"),
        pytest.param(SAC_OF_DOMAINS, ["hybrid.sharding={num_shards: 2}"], id="sac of domains on two ranks"),
    ],
)
def test_the_driver_keeps_what_actors_play(tmp_path: Path, session: object, task: list[str], ranks: list[str]) -> None:
    """And trains on it, or has ranks do it that are actors too: as ranks of one machine do, to the bit."""
    here = ["hybrid.num_threads=1", "hybrid.device=cpu", *ranks]
    check(tmp_path, task, ["hybrid=ray", *here], like=here)


@pytest.mark.slow
def test_two_workers_and_lent_hosts_fill_the_same_buffer(tmp_path: Path) -> None:
    """To the last digits: which slots share a forward pass differs."""
    task = [*RUNS["rlpd"], "sim.pipeline_groups=1", "total_steps=192"]
    here = trained(tmp_path / "here", *task)
    two = trained(tmp_path / "two", *task, APART, "hybrid.players=2")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*take turns.*")
        hosts = trained(tmp_path / "hosts", *task, "hybrid=multiplexed", "sim.num_workers=2")
    assert_same_run(here, hosts)
    one, other = (load_checkpoint(folder).learner for folder in (here, two))
    assert one["replay.reward"].shape == other["replay.reward"].shape
    np.testing.assert_allclose(one["replay.observation.state"], other["replay.observation.state"], atol=1e-3)
