"""What a language agent's episode leaves for a recording: its simulator's side, step by step, with the words that were sampled.

A turn that calls tools is no step of the simulator, and stands in none of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodied_rl.agents.turns import Turn, texts
from embodied_rl.rollout.members import Assignment
from embodied_rl.rollout.observations import copied, stacked
from embodied_rl.rollout.training_recording import TrainingRecorder
from embodied_rl.types import Episode, Observation


@dataclass
class AgentRecord:
    """An episode that may be written down, while it is played."""

    seen: list[dict[str, Any]] = field(default_factory=list)
    """{key: what was seen} before each step, and after the last where nothing was answered to it any more."""
    turns: list[int] = field(default_factory=list)
    """Numbers of the turns that were steps."""
    success: list[bool] = field(default_factory=list)

    def looked(self, observation: Observation, row: int) -> None:
        """The agent is shown a row of a batch."""
        self.seen.append({key: copied(part[row]) for key, part in observation.items()})

    def stepped(self, turn: int, success: bool) -> None:
        """The simulator took the action of a turn."""
        self.turns.append(turn)
        self.success.append(success)

    def finish(
        self,
        recorder: TrainingRecorder,
        assignment: Assignment,
        turns: Sequence[Turn],
        *,
        terminated: bool,
        truncated: bool,
        success: bool,
        greedy: bool,
        final: dict[str, Any] | None,
    ) -> None:
        """Hand the episode to a recorder.

        Args:
            final: {key: what was seen} after the last step; None: the agent was shown it, and answered no more.
        """
        if not self.turns:
            return
        seen = self.seen if final is None else [*self.seen, final]
        assert len(seen) == len(self.turns) + 1, "a look before each step, and one after the last"
        played = [turns[number] for number in self.turns]
        actions = texts([turn.parsed.text for turn in played])
        episode = Episode(
            observation={key: stacked([part[key] for part in seen[:-1]]) for key in seen[0]},
            action=actions,
            log_prob=np.array([[turn.log_prob.sum(dtype=np.float64)] for turn in played], np.float32),
            reward=np.array([turn.game_reward for turn in played], np.float32),
            terminated=terminated,
            truncated=truncated,
            success=success,
            seed=assignment.seed,
            domain=assignment.domain,
            policy_version=np.array([turn.version.min() for turn in played], np.int64),
            final_observation=seen[-1],
            metadata={"greedy": greedy, "answers": [turn.answer for turn in played]},
        )
        recorder.finished(episode, actions, self.success, group=assignment.group, member=assignment.member)
