"""Rollouts as plain values, which a checkpoint holds."""

from __future__ import annotations

import numpy as np

from embodied_rl.rollout.observations import rollout_of, tree_of
from embodied_rl.sim.snapshots import decode_state, encode_state
from embodied_rl.types import EpisodeSummary, Rollout


def test_a_rollout_with_texts_comes_back_whole() -> None:
    words = np.empty((2, 3), object)
    words[:] = [["go", "stop", ""], ["häh?", "go", "left"]]
    shape = (2, 3)
    rollout = Rollout(
        observation={"state": np.arange(12, dtype=np.float32).reshape(2, 3, 2), "instruction": words},
        action=np.ones((2, 3, 1), np.float32),
        log_prob=np.full((2, 3, 1), -0.5, np.float32),
        reward=np.zeros(shape, np.float32),
        terminated=np.zeros(shape, bool),
        truncated=np.ones(shape, bool),
        last_observation={"state": np.zeros((3, 2), np.float32), "instruction": words[1]},
        final_observation={"state": np.zeros((0, 2), np.float32), "instruction": np.empty(0, object)},
        policy_version=np.full(shape, 4),
        episodes=(EpisodeSummary(0, 1, 7, 2.5, 9, True, False, True, {"why": ["a", 1]}),),
        executed=np.ones((2, 3, 2), bool),
    )
    again = rollout_of(decode_state(encode_state(tree_of(rollout))))
    assert again.episodes == rollout.episodes
    for name in ("observation", "last_observation", "final_observation"):
        one, other = vars(rollout)[name], vars(again)[name]
        assert one.keys() == other.keys()
        for key, part in one.items():
            assert (part.dtype, part.shape) == (other[key].dtype, other[key].shape)
            np.testing.assert_array_equal(part, other[key])
    for name in ("action", "log_prob", "reward", "terminated", "truncated", "policy_version", "executed"):
        np.testing.assert_array_equal(vars(rollout)[name], vars(again)[name])
    assert again.chunk_reward is None
