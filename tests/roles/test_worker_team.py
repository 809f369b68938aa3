"""Several processes that play side by side: together they play what one plays, and nothing is lost or played twice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.config import GroupsConfig
from embodied_rl.methods.base import Experience
from embodied_rl.roles.worker import Collected
from embodied_rl.roles.worker_team import divided, joined, part_of, united
from embodied_rl.rollout.collector import CollectorTimes
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.groups import GroupQueue, Share
from embodied_rl.trainer import Trainer
from embodied_rl.types import EpisodeGroup, Rollout
from tests.roles.runs import GROUPS, QUICK, ROLLOUTS, TEXTS, TWO_POLES, Naps, assert_same_run, configured, curve, run_with_a_kill, trained
from tests.rollout.samples import answer

pytestmark = pytest.mark.usefixtures("forked")

TWO = ["hybrid=disaggregated", "hybrid.players=2"]


def make_queue(groups_per_step: int, share: Share | None = None, *, staleness: int = 1) -> GroupQueue:
    config = GroupsConfig(group_size=1, groups_per_step=groups_per_step, max_staleness=staleness)
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
    whole = united([queue.state_dict(settled=True) for queue in (ahead, behind)], Share(0, 2))
    assert whole["next_number"] == 5
    assert whole["redo"] == [2, 3, 4]
    assert whole["counts"]["a"]["consumed"] == 2
    image = make_queue(2)
    image.mirror(whole)
    parts = divided(image.state_dict(), Share(0, 2))
    assert [part["redo"] for part in parts] == [[2, 4], [3]]
    again = [make_queue(1, Share(index, 2), staleness=3) for index in range(2)]
    for queue, part in zip(again, parts, strict=True):
        queue.mirror(part)
    assert [play(queue, 3, 0) for queue in again] == [[2, 4, 6], [3, 5, 7]]
    counted = united([queue.state_dict() for queue in again], Share(0, 2))["counts"]["a"]
    assert counted["consumed"] == 2, "what was counted before is counted once"


def test_a_player_without_a_part_of_the_recorded_episodes_records_none(tmp_path: Path) -> None:
    config = configured(tmp_path, *ROLLOUTS, *TWO, "record.share=0.5", "record.max_episodes=1")
    parts = [part_of(config, index).record for index in range(2)]
    assert [(part.share, part.max_episodes) for part in parts] == [(0.5, 1), (0.0, None)]


def test_shares_of_batches_that_players_do_not_divide() -> None:
    """Of three groups the first of two players has two: each batch is 3n, 3n + 1 and 3n + 2, as one player's."""
    shares = [Share(index, 2, batch=3) for index in range(2)]
    queues = [make_queue(size, share, staleness=3) for size, share in zip((2, 1), shares, strict=True)]
    assert [play(queue, count, 0) for queue, count in zip(queues, (5, 1), strict=True)] == [[0, 2, 3, 5, 6], [1]]
    taken = [queue.take(0) for queue in queues]
    assert sorted(group.number for batch in taken for group in batch or []) == [0, 1, 2]
    whole = united([queue.state_dict(settled=True) for queue in queues], shares[0])
    assert (whole["next_number"], whole["redo"]) == (7, [3, 4, 5, 6])
    image = make_queue(3)
    image.mirror(whole)
    assert [part["redo"] for part in divided(image.state_dict(), shares[0])] == [[3, 5, 6], [4]]


def test_means_of_players_count_as_often_as_what_they_are_means_of() -> None:
    """Three turns beside one, two programs that ended beside none, a batch of two groups beside one of one."""
    lake, code = "domains/lake/agent/", "domains/code/agent/"
    ages = {"groups/age_mean": 0.5, "groups/age_max": 1.0, "groups/age_0": 1.0, "groups/age_1": 1.0}
    one = {f"{lake}turns": 3.0, f"{lake}invalid": 1 / 3, f"{lake}tools/calculator/calls": 2.0, **ages}
    one |= {f"{code}episodes": 2.0, f"{code}failed": 0.0, f"{code}seconds_per_program": 4.0}
    two = {f"{lake}turns": 1.0, f"{lake}invalid": 1.0, f"{lake}invalid_cut": 1.0, f"{lake}tools/calculator/calls": 1.0}
    two |= {f"{code}episodes": 1.0, f"{code}failed": 1.0, f"{code}seconds_per_program": 0.0, "roles/score_s": 3.0}
    two |= {"groups/age_mean": 0.0, "groups/age_max": 0.0, "groups/age_0": 1.0, "groups/age_1": 0.0}
    found = joined([Collected([], CollectorTimes(), None, [], part) for part in (one, two)], Share(0, 2)).metrics
    assert found == {
        f"{lake}turns": 4.0,
        f"{lake}invalid": 0.5,
        f"{lake}invalid_cut": 0.25,
        f"{lake}tools/calculator/calls": 3.0,
        f"{code}episodes": 3.0,
        f"{code}failed": 1.0,
        f"{code}seconds_per_program": 4.0,
        "groups/age_mean": pytest.approx(1 / 3),
        "groups/age_max": 1.0,
        "groups/age_0": 2.0,
        "groups/age_1": 1.0,
        "roles/score_s": 3.0,
    }


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
    "task",
    [
        pytest.param(GROUPS, id="robot"),
        pytest.param([*GROUPS, "algorithm.groups.groups_per_step=3"], id="three groups"),
        pytest.param([*TEXTS, "algorithm.warm_start=null"], id="texts", marks=pytest.mark.slow),
    ],
)
def test_two_players_play_what_one_plays(tmp_path: Path, task: list[str]) -> None:
    """A tiny model knows the words that the slots of both show."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = (batches(tmp_path / name, *task, "sim.num_slots=8", *words) for name, words in (("one", ()), ("two", TWO)))
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
            held_out = [*trainer.evaluate(3, first_seed=0), *trainer.evaluate(1, first_seed=5)]  # one of them has nothing to play
            trainer.method.restart(0)
            groups = trainer.method.collector.next_groups(0)
        found[name] = [(e.final_info["task"], e.seed, e.length, e.episode_return) for e in held_out]
        found[name] += [(g.domain, g.number, e.seed, e.num_steps, e.action.tobytes()) for g in groups for e in g.episodes]
    assert found["one"] == found["two"]
    assert [row[0] for row in found["one"][:8]] == ["near"] * 3 + ["far"] * 3 + ["near", "far"]
    assert {row[0] for row in found["one"][8:]} == {"near", "far"}


@pytest.mark.parametrize(
    "task",
    [
        "sim=pendulum",
        *(pytest.param(task, marks=pytest.mark.slow) for task in ("sim=cartpole", "sim=pixel_tasks policy=tiny_vla hybrid.device=cpu")),
    ],
)
def test_two_players_fill_one_rollout(tmp_path: Path, task: str) -> None:
    """Each some of its slots, with their seeds and draws: episodes that are cut, their last looks and their order are there too."""
    own = [
        *task.split(),
        *QUICK,
        "sim.num_slots=5",
        "algorithm.rollout_steps=16",
        "algorithm.minibatch_size=16",
        "sim.max_episode_steps=11",
    ]
    found: dict[str, list[Rollout]] = {}
    for name, words in {"one": [TWO[0]], "two": TWO}.items():
        (tmp_path / name).mkdir()
        with Trainer(configured(tmp_path / name, *own, *words), tmp_path / name, command="test") as trainer:
            trainer.engine.publish(0)
            trainer.method.restart(0)
            found[name] = [trainer.method.collector.next_rollouts(0)[""] for _ in range(2)]
    for one, two in zip(found["one"], found["two"], strict=True):
        # A forward pass of some rows differs from one of all in its last bits.
        for name in ("action", "reward", "log_prob", "terminated", "truncated", "success", "policy_version", "executed"):
            if getattr(one, name) is not None:
                np.testing.assert_allclose(getattr(two, name), getattr(one, name), atol=1e-4, err_msg=name)
        for name in ("observation", "last_observation", "final_observation"):
            for key, seen in getattr(one, name).items():
                if seen.dtype != object:
                    np.testing.assert_allclose(getattr(two, name)[key], seen, atol=1e-4, err_msg=f"{name} {key}")
        assert [(e.slot, e.seed, e.length) for e in one.episodes] == [(e.slot, e.seed, e.length) for e in two.episodes]
    assert {episode.slot for rollout in found["two"] for episode in rollout.episodes} == set(range(5))


def nearly_the_same(one: Path, other: Path) -> None:
    """Up to which observations share a forward pass."""
    for mine, theirs in zip(curve(one), curve(other), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_run_of_two_players_is_that_of_one(tmp_path: Path) -> None:
    """Also one that began within the episodes of a checkpoint."""
    within = ["checkpoint.every_steps=256", "checkpoint.keep_last=9", "checkpoint.within_episodes=true", "total_steps=512"]
    one = trained(tmp_path / "one", *ROLLOUTS, *within, TWO[0])
    two = trained(tmp_path / "two", *ROLLOUTS, *within, *TWO)
    nearly_the_same(one, two)
    for name, whole in (("from one", one), ("from two", two)):
        middle = sorted((whole / "checkpoints").glob("step_*"))[0]
        shutil.copytree(middle, tmp_path / name / "checkpoints" / middle.name)
        shutil.copy(whole / "metrics.jsonl", tmp_path / name)
        resumed = trained(tmp_path / name, *ROLLOUTS, *within, *TWO, "resume=auto")
        (nearly_the_same if whole is one else assert_same_run)(whole, resumed)


@pytest.mark.slow
def test_rollouts_of_two_players_that_play_ahead_are_those_of_one(tmp_path: Path) -> None:
    ahead = [*ROLLOUTS, "algorithm.max_staleness=1", "total_steps=512"]
    nearly_the_same(trained(tmp_path / "ahead", *ahead, TWO[0]), trained(tmp_path / "ahead two", *ahead, *TWO))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2, 3])
def test_a_team_is_a_function_of_the_seed_whoever_is_killed(tmp_path: Path, groups: int) -> None:
    """With evaluations in between; both are replaced when one ends."""
    task = [*GROUPS, *TWO, "total_steps=250", "evaluation.every_steps=100", f"algorithm.groups.groups_per_step={groups}"]
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
        prepare = method.prepare

        def note(experience: Experience) -> dict[str, Any]:
            for group in experience.data[""][""].groups:
                numbers.append(group.number)
                ages.add((group.number % 2, group.age(trainer.iteration)))
            naps.take({(0, 1), (1, 1)} <= ages)
            return dict(prepare(experience))

        method.prepare = note
        trainer.run()
        counts, iterations = method.queue.counts(), trainer.iteration
    assert ages == {(0, 0), (0, 1), (1, 0), (1, 1)}, "1 is missing: nothing was played while training"
    assert len(numbers) == len(set(numbers)) == counts.consumed == 2 * iterations
    assert counts.add_up
