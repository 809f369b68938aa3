"""Groups that start inside earlier episodes, where rollout workers elsewhere play: the libraries are theirs, and a checkpoint has them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from embodied_rl.checkpoint import load_checkpoint
from tests.golden.runs import RUNS
from tests.roles.runs import TWO_POLES, assert_same_run, curve, run_with_a_kill, trained

pytestmark = pytest.mark.usefixtures("forked")

APART = "hybrid=disaggregated"
EXPERT = [*RUNS["initialized_sampling"], "checkpoint.every_steps=600", "checkpoint.keep_last=9"]
OWN = [
    *(*TWO_POLES, "algorithm.initialized={share: 0.6, success_return: 15, sources: [success], chunk_steps: 4, min_episodes: 2}"),
    *("domains.near.algorithm.initialized.share=0.3", "total_steps=2500", "checkpoint.every_steps=900", "checkpoint.keep_last=9"),
]


@pytest.mark.parametrize(
    ("task", "where"),
    [
        pytest.param(EXPERT, APART, id="expert", marks=pytest.mark.slow),
        pytest.param(
            EXPERT, "hybrid=multiplexed", id="multiplexed", marks=pytest.mark.filterwarnings("ignore:hybrid.placement=multiplexed")
        ),
        pytest.param(EXPERT, "hybrid=ray", id="ray", marks=pytest.mark.slow),
        pytest.param(OWN, APART, id="domains", marks=pytest.mark.slow),
    ],
)
def test_groups_start_where_they_start_in_one_process(tmp_path: Path, task: list[str], where: str) -> None:
    """From an expert's episodes or own ones, and when the run goes on from a checkpoint."""
    here = trained(tmp_path / "here", *task)
    apart = trained(tmp_path / "apart", *task, where)
    assert_same_run(here, apart)
    assert any(name.endswith("initialized/sources") and value > 0 for name, value in curve(apart)[-1].items())
    middle = sorted((apart / "checkpoints").glob("step_*"))[0]
    assert (
        load_checkpoint(middle).state["algorithm"]["starts"]
        == load_checkpoint(here / "checkpoints" / middle.name).state["algorithm"]["starts"]
    )
    resumed = tmp_path / "resumed"
    shutil.copytree(middle, resumed / "checkpoints" / middle.name)
    shutil.copy(apart / "metrics.jsonl", resumed)
    assert_same_run(apart, trained(resumed, *task, where, "resume=auto"))


@pytest.mark.slow
def test_another_worker_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    run_with_a_kill(tmp_path / "run", [*EXPERT, APART, "checkpoint.every_steps=200"], lambda player: player._handle.process.pid)
    assert [row["initialized/sources"] for row in curve(tmp_path / "run") if "initialized/sources" in row][-1] == 2.0
