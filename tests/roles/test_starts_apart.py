"""Groups that start inside earlier episodes, where rollout workers elsewhere play by copies of the libraries beside the trainer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.checkpoint import load_checkpoint
from tests.golden.runs import RUNS
from tests.roles.runs import GROUPS, QUICK, TWO_POLES, assert_same_run, curve, run_with_a_kill, trained

pytestmark = pytest.mark.usefixtures("forked")

APART = ("hybrid=disaggregated",)
TWO = (*APART, "hybrid.players=2")
EXPERT = [*RUNS["initialized_sampling"], "checkpoint.every_steps=600", "checkpoint.keep_last=9"]
OWN = [
    *(*TWO_POLES, "algorithm.initialized={share: 0.6, success_return: 15, sources: [success], chunk_steps: 4, min_episodes: 2}"),
    *("domains.near.algorithm.initialized.share=0.3", "total_steps=2500", "checkpoint.every_steps=900", "checkpoint.keep_last=9"),
]
OWN_OF_ONE = [
    *(*GROUPS, "algorithm.initialized={share: 0.6, success_return: 15, sources: [success, best], chunk_steps: 4, min_episodes: 2}"),
    *("total_steps=700", "checkpoint.every_steps=250", "checkpoint.keep_last=9"),
]
OF_ROLLOUTS = [
    *("sim=cartpole", *QUICK, "algorithm.rollout_steps=64", "algorithm.num_epochs=2", "algorithm.minibatch_size=64"),
    *("policy.hidden_sizes=[16]", "hybrid.device=cpu", "hybrid.num_threads=1", OWN_OF_ONE[-4]),
    *("total_steps=768", "checkpoint.every_steps=500", "checkpoint.keep_last=9"),
]
DOORS = [
    *("sim=key_door", *OF_ROLLOUTS[1:-4], "algorithm.initialized={share: 0.6, sources: [expert], expert_episodes: 2}"),
    "algorithm.initialized.expert='embodied_rl.sim.robots.key_door:KeyDoorExpert'",
    *("total_steps=768", "checkpoint.every_steps=500", "checkpoint.keep_last=9"),
]
"""Fixed rollouts."""
PLAYED_AGAIN = "initialized/replayed_messages"
"""Each worker brings the first episode of a start there by itself."""


def without_replays(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.endswith(PLAYED_AGAIN)} for row in curve(run)]


@pytest.mark.parametrize(
    ("task", "where"),
    [
        pytest.param(EXPERT, APART, id="expert", marks=pytest.mark.slow),
        pytest.param(
            EXPERT, ("hybrid=multiplexed",), id="multiplexed", marks=pytest.mark.filterwarnings("ignore:hybrid.placement=multiplexed")
        ),
        pytest.param(EXPERT, ("hybrid=ray",), id="ray", marks=pytest.mark.slow),
        pytest.param(OWN, APART, id="domains", marks=pytest.mark.slow),
        pytest.param(OWN_OF_ONE, TWO, id="workers"),
        pytest.param(OF_ROLLOUTS, TWO, id="rollouts of workers"),
        pytest.param(DOORS, TWO, id="rollouts inside an expert's"),
        pytest.param(OF_ROLLOUTS, APART, id="rollouts", marks=pytest.mark.slow),
        pytest.param(OF_ROLLOUTS, ("hybrid=ray",), id="rollouts on ray", marks=pytest.mark.slow),
        pytest.param([*EXPERT, "algorithm.groups.groups_per_step=4"], TWO, id="expert of workers", marks=pytest.mark.slow),
        pytest.param(OWN, TWO, id="domains of workers", marks=pytest.mark.slow),
    ],
)
def test_groups_start_where_they_start_in_one_process(tmp_path: Path, task: list[str], where: tuple[str, ...]) -> None:
    """From an expert's episodes or own ones, and when the run goes on from a checkpoint."""
    here = trained(tmp_path / "here", *task)
    apart = trained(tmp_path / "apart", *task, *where)
    for one, other in zip(without_replays(here), without_replays(apart), strict=True):
        # Fewer observations share a worker's forward pass: of continuous actions the last bits may differ.
        assert one == (pytest.approx(other, rel=1e-6, abs=1e-7) if where == TWO else other)
    assert any(name.endswith("initialized/sources") and value > 0 for name, value in curve(apart)[-1].items())
    middle = sorted((apart / "checkpoints").glob("step_*"))[0]
    told = [load_checkpoint(folder).state["algorithm"]["starts"] for folder in (middle, here / "checkpoints" / middle.name)]
    for starts in (one for found in told for one in ([found] if "sources" in found else found.values())):
        del starts["replay"]["num_messages"]
    assert told[0] == told[1]
    resumed = tmp_path / "resumed"
    shutil.copytree(middle, resumed / "checkpoints" / middle.name)
    shutil.copy(apart / "metrics.jsonl", resumed)
    assert_same_run(apart, trained(resumed, *task, *where, "resume=auto"))


@pytest.mark.slow
def test_another_worker_goes_on_from_what_was_learned(tmp_path: Path) -> None:
    run_with_a_kill(tmp_path / "run", [*EXPERT, *APART, "checkpoint.every_steps=200"], lambda player: player._handle.process.pid)
    assert [row["initialized/sources"] for row in curve(tmp_path / "run") if "initialized/sources" in row][-1] == 2.0
