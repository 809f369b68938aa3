"""Whether observations that are left out change anything: the check returns a line, or raises `Failed`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied_rl.sim.checks.episodes import Player, Trajectory
from embodied_rl.sim.checks.session import Session, same
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimWrapper
from embodied_rl.types import StepBuffers

EVERY = 4
"""Steps of a chunk: after them, and at an episode's end, an observation is made."""


class _InChunks(SimWrapper):
    """A simulator that is observed after every `EVERY`-th step of an episode and at its end, twice each."""

    def __init__(self, sim: SimEnv, num_envs: int) -> None:
        super().__init__(sim)
        self._elapsed = np.zeros(num_envs, int)

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        self._sim.reset(env_ids, seeds, out, options)
        self._elapsed[list(env_ids)] = 0

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        self._sim.advance(env_ids, actions, out)
        self._elapsed[list(env_ids)] += 1
        due = [i for i in env_ids if self._elapsed[i] % EVERY == 0 or out.terminated[i] or out.truncated[i]]
        for _ in range(2):  # the second must write the same, and change nothing either
            if due:
                self._sim.observe(due, out)


def unread_observations_change_nothing(s: Session) -> str:
    with s.exact() as player:
        chunks = Player(_InChunks(player.sim, s.num_envs), s.num_envs)
        chunks.reset({i: s.parts[i] for i in range(s.num_envs)}, s.options)
        actual = chunks.run(s.steps)
    expected = {i: _read(s.reference[i]) for i in actual}
    same(expected, {i: _read(trajectory) for i, trajectory in actual.items()}, f"observed only after every {EVERY} steps")
    return f"observed after every {EVERY} steps and at their ends: {s.described(actual)}"


def _read(episode: Trajectory) -> Trajectory:
    """The episode, each of its observations the one that was made last."""
    made = [step - step % EVERY for step in range(episode.num_steps + 1)]
    if episode.ended:
        made[-1] = episode.num_steps
    return Trajectory(
        {key: [rows[step] for step in made] for key, rows in episode.observation.items()},
        {key: [rows[step] for step in made] for key, rows in episode.variables.items()},
        episode.scalars,
    )
