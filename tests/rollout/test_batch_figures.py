"""Queue lengths and the histogram of ages, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodied_rl.config import GroupsConfig
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.rollout.queue_pump import age_figures, batch_figures
from embodied_rl.train import train
from tests.roles.runs import GROUPS, configured, curve
from tests.rollout.samples import answer

pytestmark = pytest.mark.usefixtures("forked")


def test_ages_by_hand() -> None:
    assert age_figures("groups", [0, 2, 2], 3) == {
        "groups/age_mean": pytest.approx(4 / 3),
        "groups/age_max": 2.0,
        "groups/age_0": 1.0,
        "groups/age_1": 0.0,
        "groups/age_2": 2.0,
        "groups/age_3": 0.0,
    }
    assert age_figures("rollout", [], 0) == {"rollout/age_mean": 0.0, "rollout/age_max": 0.0, "rollout/age_0": 0.0}


def test_a_batch_leaves_what_is_ready_behind() -> None:
    """Two batches may be held with S = 1: of four groups that are whole, two are taken, and two wait."""
    queue = GroupQueue(GroupsConfig(group_size=1, groups_per_step=2, max_staleness=1), seed=0, domains=DomainMixture.single("a"))
    for _ in range(4):
        assignment = queue.next_assignment()
        assert assignment is not None
        queue.finished(assignment, answer(assignment))
    first = queue.take(0)
    assert first is not None
    figures = batch_figures(queue, first, 0)
    assert (figures["groups/ready"], figures["groups/held"]) == (2.0, 4.0)
    assert (figures["groups/age_0"], figures["groups/age_1"]) == (2.0, 0.0)
    queue.published(1)
    second = queue.take(1)
    assert second is not None
    figures = batch_figures(queue, second, 1)
    assert (figures["groups/ready"], figures["groups/held"]) == (0.0, 2.0)
    assert (figures["groups/age_0"], figures["groups/age_1"], figures["groups/age_mean"]) == (0.0, 2.0, 1.0)


def test_a_run_says_how_old_its_batches_are_and_draws_them(tmp_path: Path) -> None:
    overrides = [*GROUPS, "hybrid=disaggregated", "algorithm.groups.max_staleness=1", "total_steps=250", "profile=true"]
    folder = train(configured(tmp_path / "run", *overrides))
    rows = [row for row in curve(folder) if "groups/consumed" in row]
    assert len(rows) > 1
    for row in rows:
        assert row["groups/age_0"] + row["groups/age_1"] == 2.0, "groups_per_step"
        assert row["groups/age_max"] <= 1.0
        assert row["groups/age_mean"] == row["groups/age_1"] / 2.0
        assert 2.0 <= row["groups/held"] <= 4.0, "(max_staleness + 1) batches"
    drawn = [event for event in json.loads((folder / "timeline.json").read_text())["traceEvents"] if event["ph"] == "C"]
    ages = [event["args"] for event in drawn if event["name"] == "groups by age"]
    assert ages == [{"0": row["groups/age_0"], "1": row["groups/age_1"]} for row in rows]
    assert [event["args"]["held"] for event in drawn if event["name"] == "groups"] == [row["groups/held"] for row in rows]
