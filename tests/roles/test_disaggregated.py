"""Playing in a process of its own, training in this one: the same numbers as in one process, and what happens when the player ends."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.errors import UserError
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.rollout.groups import BatchNeverFullError
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from tests.roles.runs import GROUPS, ROLLOUTS, TEXTS, Naps, assert_same_run, configured, curve, groups_of, trained

pytestmark = pytest.mark.usefixtures("forked")

APART = "hybrid=disaggregated"


@pytest.mark.parametrize(
    "task",
    [
        pytest.param([*ROLLOUTS, "total_steps=384", "evaluation.every_steps=128"], id="rollouts"),
        pytest.param([*GROUPS, "total_steps=400", "evaluation.every_steps=200"], id="groups"),
    ],
)
def test_a_run_apart_is_the_run_in_one_process_bit_for_bit(tmp_path: Path, task: list[str]) -> None:
    assert_same_run(trained(tmp_path / "here", *task), trained(tmp_path / "apart", *task, APART))
    row = read_metrics(tmp_path / "apart")[0]
    # What the player does at the same time is no part of the loop's, or shares of time would count it twice.
    assert {name for name in row if name.startswith("time/")} == {"time/simulate_s", "time/act_s", "time/update_s"}
    assert row["time/simulate_s"] + row["time/act_s"] <= row["roles/wait_s"] + 1e-9


def run_and_kill(config: Any, run_dir: Path, *, before_update: int) -> int:
    """Train, and kill the player while it would be waiting for the update's end; how many were begun anew."""
    run_dir.mkdir(parents=True)
    with Trainer(config, run_dir, command="test") as trainer:
        method: Any = trainer.method
        update = method.update

        def kill_first(prepared: Any, *, iteration: int, steps: int) -> dict[str, float]:
            if iteration == before_update:
                os.kill(trainer.manager._handle.process.pid, signal.SIGKILL)
            return update(prepared, iteration=iteration, steps=steps)

        method.update = kill_first
        trainer.run()
        return int(trainer.manager.num_restarts)


def test_a_killed_player_is_replaced_and_nothing_is_consumed_twice(tmp_path: Path) -> None:
    """Its groups are asked for again by their seeds, so that the curve is that of a run in which nobody was killed."""
    task = [*GROUPS, "total_steps=300"]
    whole = trained(tmp_path / "whole", *task)
    config = configured(tmp_path / "killed", *task, APART)
    assert run_and_kill(config, tmp_path / "killed", before_update=2) == 1
    assert_same_run(whole, tmp_path / "killed")


@pytest.mark.slow
def test_rollouts_go_on_with_new_episodes_when_the_player_is_killed(tmp_path: Path) -> None:
    config = configured(tmp_path / "killed", *ROLLOUTS, APART, "total_steps=384")
    assert run_and_kill(config, tmp_path / "killed", before_update=1) == 1
    assert [row["step"] for row in curve(tmp_path / "killed")] == [128, 256, 384]


def test_a_player_that_keeps_ending_ends_the_run(tmp_path: Path) -> None:
    config = configured(tmp_path / "killed", *GROUPS, APART, "total_steps=300", "hybrid.max_restarts=0")
    with pytest.raises(UserError, match=r"signal 9.*max_restarts.*resume=auto"):
        run_and_kill(config, tmp_path / "killed", before_update=1)


def test_groups_are_played_ahead_by_the_key_of_rollouts(tmp_path: Path) -> None:
    rows = curve(trained(tmp_path / "run", *GROUPS, APART, "algorithm.max_staleness=1", "total_steps=400"))
    updates = [row for row in rows if "groups/consumed" in row]
    assert len(updates) > 2
    assert all({"groups/age_0", "groups/age_1"} <= row.keys() and row["groups/age_max"] <= 1 for row in updates)


def test_rollouts_go_on_while_training_and_no_group_is_older_than_allowed(tmp_path: Path) -> None:
    """With S = 1, what is trained on is of this version or the one before; and somebody did play during an update."""
    config = configured(tmp_path / "run", *GROUPS, APART, "algorithm.groups.max_staleness=1", "total_steps=500")
    (tmp_path / "run").mkdir()
    ages: list[list[int]] = []
    naps = Naps(0.5)
    with Trainer(config, tmp_path / "run", command="test") as trainer:
        method: Any = trainer.method
        prepare = method.prepare

        def note(experience: Any) -> Any:
            ages.append([group.age(trainer.iteration) for group in groups_of(experience)])
            numbers.extend(group.number for group in groups_of(experience))
            naps.take(any(1 in batch for batch in ages))
            return prepare(experience)

        numbers: list[int] = []
        method.prepare = note
        trainer.run()
        counts = method.queue.counts()
    assert all(age in (0, 1) for batch in ages for age in batch)
    assert any(age == 1 for batch in ages for age in batch), "nothing was played while training"
    assert len(numbers) == len(set(numbers)) == counts.consumed == 2 * len(ages)
    assert counts.add_up


@pytest.mark.parametrize(
    ("task", "where"),
    [
        pytest.param([*ROLLOUTS, "total_steps=384"], APART, id="rollouts"),
        pytest.param([*GROUPS, "total_steps=300"], "hybrid=ray", id="ray", marks=pytest.mark.slow),
        pytest.param([*TEXTS, "total_steps=200"], APART, id="agents", marks=pytest.mark.slow),
        pytest.param([*TEXTS, "total_steps=200"], "hybrid=ray", id="agents-ray", marks=pytest.mark.slow),
        pytest.param([*GROUPS, "total_steps=300"], "hybrid.placement=disaggregated hybrid.players=2", id="workers", marks=pytest.mark.slow),
    ],
)
def test_what_plays_elsewhere_is_put_aside_while_training(tmp_path: Path, task: list[str], where: str) -> None:
    """Its simulators, and its token backend's cache; with evaluations and checkpoints in between the run stays what it was."""
    kinds = ["simulators", *(["kv_cache"] if task[0] == TEXTS[0] else [])]
    own = [*task, *where.split(), "evaluation.every_steps=128", "checkpoint.every_steps=100"]
    plain = trained(tmp_path / "plain", *own)
    moved = trained(tmp_path / "moved", *own, f"hybrid.offload=[{','.join(kinds)}]")
    rows = [row for row in curve(moved) if "residency/moved_bytes" in row]
    assert rows
    assert all(row["residency/simulators_host_bytes"] > 0 for row in rows)
    assert {name.split("_")[0] for name in rows[-1] if name.startswith("residency/")} >= {
        f"residency/{kind.split('_')[0]}" for kind in kinds
    }
    assert [{k: v for k, v in row.items() if not k.startswith("residency/")} for row in curve(moved)] == curve(plain)
    first, second = (load_checkpoint(folder).policy for folder in (plain, moved))
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name])


def test_what_the_player_raises_is_raised_here_as_what_it_was(tmp_path: Path) -> None:
    filters = "algorithm.groups.filters=[{name: mean_score, minimum: 1000}]"
    config = configured(tmp_path / "run", *GROUPS, APART, filters, "algorithm.groups.max_rejected_per_step=3")
    (tmp_path / "run").mkdir()
    with Trainer(config, tmp_path / "run", command="test") as trainer, pytest.raises(BatchNeverFullError, match="max_rejected_per_step"):
        trainer.run()


def test_a_simulator_that_cannot_start_is_the_users_error(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", *ROLLOUTS, APART, "sim.task=NoSuchTask-v9")
    with pytest.raises(UserError, match="NoSuchTask-v9"):
        Trainer(config, tmp_path / "run", command="test")


def test_a_run_goes_on_in_another_placement(tmp_path: Path) -> None:
    """Where it is played is no part of a checkpoint."""
    task = [*GROUPS, "checkpoint.every_steps=100", "checkpoint.keep_last=9"]
    whole = trained(tmp_path / "whole", *task, "total_steps=300")
    middle = sorted((whole / "checkpoints").glob("step_*"))[0]
    moved = tmp_path / "moved"
    shutil.copytree(middle, moved / "checkpoints" / middle.name)
    shutil.copy(whole / "metrics.jsonl", moved)
    config = configured(moved, *task, APART, "total_steps=300", "resume=auto")
    assert_same_run(whole, train(config, overrides=[APART]))
    described = yaml.safe_load((moved / "checkpoints/last/config.yaml").read_text())
    assert described["hybrid"]["placement"]["kind"] == "disaggregated"


@pytest.mark.slow
@pytest.mark.parametrize("task", [pytest.param(ROLLOUTS, id="rollouts"), pytest.param(GROUPS, id="groups")])
def test_a_player_apart_from_two_training_ranks(tmp_path: Path, task: list[str]) -> None:
    ranks = [*task, "hybrid=fsdp2", "total_steps=256"]
    assert_same_run(trained(tmp_path / "here", *ranks), trained(tmp_path / "apart", *ranks, "hybrid.placement=disaggregated"))
