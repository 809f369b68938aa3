"""An episode that was given up ends in a rollout as any truncated one does, though it is in no list of episodes."""

from __future__ import annotations

import numpy as np

from embodied_rl.generation.base import ActedBatch
from embodied_rl.rollout.collector import _PartialRollout
from embodied_rl.types import ActionLayout, ActionSpec, StepBatch, TensorSpec


def test_the_final_observation_of_an_aborted_episode_is_kept() -> None:
    layout = ActionLayout.of(ActionSpec.discrete(2))
    partial = _PartialRollout({"state": TensorSpec((2,))}, layout, np.zeros((1, 3, layout.noise_width), np.float32))
    no, one = np.zeros(3, bool), np.array([False, True, False])
    last = np.array([[0, 0], [5, 6], [0, 0]], np.float32)
    batch = StepBatch(np.arange(3), {"state": last * 0}, np.zeros(3, np.float32), no, one, no, {"state": last}, (), aborted=one)
    acted = ActedBatch(slots=np.arange(3), action=np.zeros((3, 1), np.int64), log_prob=np.zeros((3, 1), np.float32), version=0)
    partial.acted(range(3), batch.observation, acted)
    partial.num_decided = 1
    partial.received(range(3), batch)
    rollout = partial.finish([batch.observation])
    assert np.argwhere(rollout.truncated & ~rollout.terminated).tolist() == [[0, 1]]
    np.testing.assert_array_equal(rollout.final_observation["state"], [[5, 6]])
    assert rollout.episodes == ()
