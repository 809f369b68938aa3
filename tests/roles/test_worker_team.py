"""Several processes that play side by side: together they play what one plays, and nothing is lost or played twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.roles.components import playing_gpu
from embodied_rl.roles.worker_team import divided, united
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.groups import GroupQueue, GroupQueueConfig, Share
from embodied_rl.trainer import Trainer
from embodied_rl.types import EpisodeGroup
from tests.roles.runs import GROUPS, TEXTS, TWO_POLES, Naps, assert_same_run, configured, run_with_a_kill, trained
from tests.rollout.samples import answer

TWO = ["hybrid=disaggregated", "hybrid.players=2"]


def make_queue(groups_per_step: int, share: Share | None = None, *, staleness: int = 1) -> GroupQueue:
    config = GroupQueueConfig(group_size=1, groups_per_step=groups_per_step, max_staleness=staleness)
    return GroupQueue(config, seed=0, domains=DomainMixture.single("a"), share=share or Share())


def play(queue: GroupQueue, count: int, version: int) -> list[int]:
    """Numbers of the groups that it plays."""
    found = []
    for _ in range(count):
        assignment = queue.next_assignment()
        assert assignment is not None
        queue.finished(assignment, answer(assignment, versions=[version]))
        found.append(assignment.group)
    return found


def test_shares_of_a_queue_and_their_states() -> None:
    """One share is ahead of the other; what that has not admitted yet is to be done again by whoever takes up the whole."""
    ahead, behind = make_queue(1, Share(0, 2), staleness=3), make_queue(1, Share(1, 2), staleness=3)
    assert play(ahead, 3, 0) == [0, 2, 4]
    assert play(behind, 1, 0) == [1]
    for queue in (ahead, behind):
        assert queue.take(0) is not None
    whole = united([queue.state_dict(settled=True) for queue in (ahead, behind)])
    assert whole["next_number"] == 5
    assert whole["redo"] == [2, 3, 4]
    assert whole["counts"]["a"]["consumed"] == 2
    image = make_queue(2)
    image.mirror(whole)
    parts = divided(image.state_dict(), 2)
    assert [part["redo"] for part in parts] == [[2, 4], [3]]
    again = [make_queue(1, Share(index, 2), staleness=3) for index in range(2)]
    for queue, part in zip(again, parts, strict=True):
        queue.mirror(part)
    assert [play(queue, 3, 0) for queue in again] == [[2, 4, 6], [3, 5, 7]]
    counted = united([queue.state_dict() for queue in again])["counts"]["a"]
    assert counted["consumed"] == 2, "what was counted before is counted once"


def batches(tmp_path: Path, *overrides: str, num_batches: int = 3) -> list[list[EpisodeGroup]]:
    """Of a run whose weights stay as they are."""
    with Trainer(configured(tmp_path, *overrides), tmp_path, command="test") as trainer:
        trainer.engine.publish(0)
        method: Any = trainer.method
        method.restart(0)
        found = []
        for version in range(num_batches):
            found.append(method.collector.next_groups(version))
            trainer.engine.publish(version + 1)
            method.published(version + 1)
    return found


@pytest.mark.parametrize(
    "task", [pytest.param(GROUPS, id="robot"), pytest.param([*TEXTS, "algorithm.warm_start=null"], id="texts", marks=pytest.mark.slow)]
)
def test_two_players_play_what_one_plays(tmp_path: Path, task: list[str]) -> None:
    """Each of the two has as many slots as the one: a tiny model's words are those that the first player's slots show."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = batches(tmp_path / "one", *task, "sim.num_slots=4"), batches(tmp_path / "two", *task, *TWO, "sim.num_slots=8")
    for mine, theirs in zip(one, two, strict=True):
        assert [group.number for group in mine] == [group.number for group in theirs]
        for first, second in zip(mine, theirs, strict=True):
            assert [episode.seed for episode in first.episodes] == [episode.seed for episode in second.episodes]
            for a, b in zip(first.episodes, second.episodes, strict=True):
                np.testing.assert_array_equal(a.action, b.action)
                np.testing.assert_array_equal(a.reward, b.reward)
                np.testing.assert_allclose(a.log_prob, b.log_prob, atol=1e-5)


def test_two_players_play_every_domain_and_evaluate_in_its_order(tmp_path: Path) -> None:
    """The groups of one player, and held-out episodes in the order of domains and seeds, each worker some of them."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for name, words in {"one": [], "two": [*TWO, "domains.near.sim.num_slots=6", "domains.far.sim.num_slots=5"]}.items():
        (tmp_path / name).mkdir()
        with Trainer(configured(tmp_path / name, *TWO_POLES, *words), tmp_path / name, command="test") as trainer:
            trainer.engine.publish(0)
            held_out = trainer.evaluate(3, first_seed=0)
            trainer.method.restart(0)
            groups = trainer.method.collector.next_groups(0)
        found[name] = [(e.final_info["task"], e.seed, e.length, e.episode_return) for e in held_out]
        found[name] += [(g.domain, g.number, e.seed, e.num_steps, e.action.tobytes()) for g in groups for e in g.episodes]
    assert found["one"] == found["two"]
    assert [row[0] for row in found["one"][:6]] == ["near"] * 3 + ["far"] * 3
    assert {row[0] for row in found["one"][6:]} == {"near", "far"}


@pytest.mark.slow
def test_a_team_is_a_function_of_the_seed_whoever_is_killed(tmp_path: Path) -> None:
    """With evaluations in between; both are replaced when one ends."""
    task = [*GROUPS, *TWO, "total_steps=250", "evaluation.every_steps=100"]
    whole = trained(tmp_path / "whole", *task)
    run_with_a_kill(tmp_path / "killed", task, lambda player: player._handle._workers[1].process.pid)
    assert_same_run(whole, tmp_path / "killed")


def test_a_team_plays_while_training_and_nothing_is_older_than_allowed(tmp_path: Path) -> None:
    config = configured(tmp_path, *GROUPS, *TWO, "algorithm.groups.max_staleness=1", "total_steps=500")
    ages: set[tuple[int, int]] = set()
    numbers: list[int] = []
    naps = Naps(0.3)
    with Trainer(config, tmp_path, command="test") as trainer:
        method: Any = trainer.method
        update = method.update

        def note(prepared: Any, *, iteration: int, steps: int) -> dict[str, float]:
            for group in prepared[""].batch.groups:
                numbers.append(group.number)
                ages.add((group.number % 2, group.age(iteration)))
            naps.take({(0, 1), (1, 1)} <= ages)
            return dict(update(prepared, iteration=iteration, steps=steps))

        method.update = note
        trainer.run()
        counts, iterations = method.queue.counts(), trainer.iteration
    assert ages == {(0, 0), (0, 1), (1, 0), (1, 1)}, "1 is missing: nothing was played while training"
    assert len(numbers) == len(set(numbers)) == counts.consumed == 2 * iterations
    assert counts.add_up


def test_each_player_has_a_gpu() -> None:
    assert [playing_gpu(None, 4, player) for player in range(2)] == ["3", "2"]
    assert [playing_gpu("4,6,7", 3, player) for player in range(2)] == ["7", "6"]
