"""d3rlpy's fitted-Q evaluation beside ours, where the value is known; `benchmarks/fqe_d3rlpy.py` compares them on real tasks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.fitted_q import FittedQConfig, RecordedSteps, fit_q
from tests.neighbours.overlay import REPOSITORY, overlay, run_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GAMMA, NUM_EPISODES, LENGTH = 0.9, 60, 25
PEER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import d3rlpy, fqe_d3rlpy, numpy as np
fqe_d3rlpy.PEER_STEPS = 3_000
data = np.load(sys.argv[2])
given = [data[name] for name in ("observations", "actions", "rewards", "terminals", "timeouts")]
plain = d3rlpy.dataset.MDPDataset(*given, action_space=d3rlpy.ActionSpace.DISCRETE, action_size=2)
batches = []
for prepare in (lambda dataset: None, fqe_d3rlpy.quick_batches):
    prepare(plain)
    np.random.seed(5)
    batches.append([plain.sample_transition_batch(64) for _ in range(4)])
for one, other in zip(*batches):
    for name in ("observations", "actions", "rewards", "next_observations", "next_actions", "terminals", "intervals"):
        np.testing.assert_array_equal(vars(one)[name], vars(other)[name])
fqe_d3rlpy.peer(Path(sys.argv[2]))
"""


def test_both_find_the_value(tmp_path: Path) -> None:
    """States are uniform numbers that no action changes, choice 1 earns 1, and the target takes it at numbers above zero.

    Its value is 1 or 0 at the first state, and half of γ / (1 - γ) behind it: episodes go on where they were cut. The benchmark draws
    d3rlpy's batches from arrays: they are those that d3rlpy draws.
    """
    random = np.random.default_rng(0)
    states = random.uniform(-1, 1, (NUM_EPISODES, LENGTH + 1)).astype(np.float32)
    actions = random.integers(0, 2, (NUM_EPISODES, LENGTH))
    last = np.tile(np.arange(LENGTH) == LENGTH - 1, NUM_EPISODES)
    truth = float((states[:, 0] > 0).mean()) + 0.5 * GAMMA / (1 - GAMMA)

    zero, one, steps = np.zeros(1, np.float32), np.ones(1, np.float32), np.zeros(last.size, np.float32)
    arrays = {
        "discrete": True, "action_size": 2, "gamma": GAMMA, "layers": 1, "mean": zero, "inverse_std": one, "clip": 1e9, "centre": zero,
        "std": one, "observations": states[:, :-1].reshape(-1, 1), "actions": actions.reshape(-1, 1), "terminals": steps,
        "rewards": actions.reshape(-1, 1).astype(np.float32), "timeouts": last.astype(np.float32), "first": states[:, :1],
        "weight0": np.array([[0.0], [1.0]], np.float32), "bias0": np.zeros(2, np.float32),
    }  # fmt: skip
    np.savez(tmp_path / "steps.npz", **arrays)
    folder = overlay(
        "d3rlpy==2.8.1", "gymnasium==1.0.0", "gym==0.26.2", "gym-notices==0.1.0", "structlog==26.1.0", "dataclasses-json==0.6.7",
        "marshmallow==3.26.2", "typing-inspect==0.9.0", "mypy-extensions==1.1.0", "scikit-learn==1.9.1", "narwhals==2.29.0",
        "threadpoolctl==3.8.0", "joblib==1.6.0", "colorama==0.4.6",
    )  # fmt: skip
    printed = run_with(folder, PEER, str(REPOSITORY / "benchmarks"), str(tmp_path / "steps.npz"), timeout_s=600)
    theirs = json.loads(printed.splitlines()[-1])

    rows = np.arange(NUM_EPISODES)[:, None] * (LENGTH + 1) + np.arange(LENGTH)
    flat = torch.from_numpy(states.reshape(-1, 1))
    ours = fit_q(
        RecordedSteps(
            features=flat,
            state=torch.from_numpy(rows.reshape(-1)),
            next_state=torch.from_numpy(rows.reshape(-1) + 1),
            action=torch.from_numpy(actions.reshape(-1, 1)),
            reward=torch.from_numpy(actions.reshape(-1).astype(np.float32)),
            continues=torch.ones(last.size, dtype=torch.bool),
            episode=torch.arange(NUM_EPISODES).repeat_interleave(LENGTH),
            first_state=torch.arange(NUM_EPISODES) * (LENGTH + 1),
            probability=torch.cat([(flat <= 0).float(), (flat > 0).float()], dim=1),
        ),
        GAMMA,
        FittedQConfig(num_steps=2_000),
    ).values
    half = 2.365 * float(ours.std(ddof=1))  # Student's t of seven degrees of freedom
    assert abs(ours.mean() - truth) < 0.25
    assert abs(theirs["value"] - truth) < 0.25
    assert max(theirs["low"], ours.mean() - half) <= min(theirs["high"], ours.mean() + half)
