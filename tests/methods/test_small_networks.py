"""Small networks on groups: the critic's own learning rate, and minibatches in parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from embodied_rl.checkpoint import load_checkpoint
from tests.roles.runs import GROUPS, trained

CRITIC = [word for word in GROUPS if not word.startswith(("algorithm=", "algorithm.kl", "algorithm.reward"))]
CRITIC += ["algorithm=ppo_episodes", "algorithm.max_grad_norm=1e9", "total_steps=150", "evaluation.every_steps=null"]


def weights(folder: Path, *overrides: str) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in load_checkpoint(trained(folder, *CRITIC, *overrides)).policy.items()}


def test_a_critic_has_its_own_rate_and_minibatches_come_in_parts(tmp_path: Path) -> None:
    """With a rate of nearly nothing the critic stays as it was drawn; parts of a minibatch give the sums of the whole."""
    drawn = weights(tmp_path / "drawn", "algorithm.learning_rate=1e-12")
    still = weights(tmp_path / "still", "algorithm.value_learning_rate=1e-12")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts", "algorithm.micro_batch_size=1")
    critic = [name for name in drawn if name.startswith("critic")]
    actor = [name for name in drawn if name.startswith("actor")]
    assert critic
    assert actor
    for name in critic:
        np.testing.assert_allclose(still[name], drawn[name], atol=1e-9)
        assert np.abs(whole[name] - drawn[name]).max() > 1e-4
    assert any(np.abs(still[name] - drawn[name]).max() > 1e-4 for name in actor)
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-3, atol=1e-4)
