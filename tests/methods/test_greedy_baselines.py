"""ReMax in whole runs: each group has one episode by the policy's mode, whichever others finish first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embodied_rl.trainer import Trainer
from tests.roles.runs import GROUPS, TEXTS, TWO_POLES, configured, curve, groups_of

REDUNDANT = ["algorithm.advantage=remax", "algorithm.groups.redundancy=3", "algorithm.groups.group_size=2"]

LONGER = ["seed=5", "algorithm.learning_rate=1e-4"]
"""The mode of these weights keeps its pole up longer than what is drawn."""


@pytest.mark.parametrize(
    "task",
    [
        [*GROUPS, *LONGER, "total_steps=300"],
        [*TWO_POLES, *LONGER, "domains.near.algorithm.advantage=grpo", "domains.far.algorithm.advantage=remax", "total_steps=600"],
        [*TEXTS, "algorithm.warm_start=null", "total_steps=300"],
    ],
    ids=["robot", "one_domain_of_two", "language"],
)
def test_a_group_keeps_its_greedy_episode_beside_redundant_ones(tmp_path: Path, task: list[str]) -> None:
    """The greedy one and the first of four others are learned from. Without its place in the group the update would find no baseline."""
    (tmp_path / "run").mkdir()
    last = 0
    with Trainer(configured(tmp_path / "run", *task, *REDUNDANT), tmp_path / "run", command="test") as trainer:
        method: Any = trainer.method
        prepare = method.prepare

        def note(experience: Any) -> Any:
            nonlocal last
            sampled = [one for group in groups_of(experience) for one in group.episodes if not one.metadata["greedy"]]
            assert experience.finished == [(one.success, one.game_return, one.num_steps) for one in sampled], (
                "success is that of sampled ones"
            )
            for group in groups_of(experience):
                expected = [group.domain != "near", False]
                assert [episode.metadata["greedy"] for episode in group.episodes] == expected
                last += expected[0] and group.episodes[0].num_messages > group.episodes[1].num_messages
            return prepare(experience)

        method.prepare = note
        trainer.run()
        episodes = method.queue.episode_counts()
    assert episodes.abandoned > 0
    assert last > 0 or "seed=5" not in task, "no greedy episode was the later one"
    assert len(curve(tmp_path / "run")) > 1
