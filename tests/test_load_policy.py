"""`predict` of every kind of policy plays the episodes that the run's own evaluation played, in a simulator of six lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embodied_rl.commands.learn import LoadedPolicy, Run
from embodied_rl.compose import load_train_config
from embodied_rl.errors import UserError
from embodied_rl.train import train
from tests.vla.toys import QUIET, SIM, TINY, WORDS

PPO = ("algorithm.rollout_steps=8", "algorithm.minibatch_size=16", "algorithm.num_epochs=1", "total_steps=64")
CHUNKS = ("algorithm.advantage=gae_chunk", "algorithm.ratio=token")
OWN = "tests.test_own_parts:SmallNetworks"
VECTORS = ("sim.kwargs.pixels=false", "sim.kwargs.words=neither")
KINDS = {
    "mlp": ("policy=mlp", "policy.hidden_sizes=[8]", *VECTORS),
    "cnn": ("policy=cnn", "policy.hidden_sizes=[8]", "policy.cnn_channels=[4,4,4]", "sim.kwargs.size=40", "sim.kwargs.words=neither"),
    "mixed": ("policy=mixed", "policy.hidden_sizes=[8]", "policy.cnn_channels=[4,4,4]", "sim.kwargs.size=40", "sim.kwargs.words=neither"),
    "custom": ("policy=custom", f"policy.target={OWN}", "policy.options.hidden_sizes=[8]", *VECTORS),
    "tiny_vla": (*TINY, "policy.state_key=state", *CHUNKS),
    "flow": ("policy=flow", "policy.chunk=3", "policy.hidden_sizes=[8]", "policy.num_steps=2", "sim.kwargs.pixels=false", *CHUNKS),
}


class Point:
    """`tests.vla.toys.PointSim` by hand, one environment: x moves by 0.2 times the action."""

    def __init__(self, seed: int, size: int) -> None:
        self.x, self.side, self.size = np.random.default_rng(seed).uniform(-0.4, 0.4), 1.0 if seed % 2 else -1.0, size

    def observe(self) -> dict[str, object]:
        picture = np.zeros((self.size, self.size, 3), np.uint8)
        picture[:, int((self.x + 1) * 0.4999 * self.size)] = 255
        return {"state": np.array([self.x], np.float32), "rgb": picture, "instruction": WORDS[int(self.side > 0)]}

    def step(self, action: np.ndarray) -> float:
        before = self.x
        self.x = np.clip(before + 0.2 * np.clip(action[0], -1.0, 1.0), -1.0, 1.0)
        return float(self.side * (self.x - before))


def played(policy: LoadedPolicy, seed: int, size: int = 16, steps: int = 10) -> float:
    """The return of an episode of so many steps; chunks are played to their end before the policy looks again."""
    point, total, left = Point(seed, size), 0.0, steps
    policy.reset()
    while left > 0:
        action = policy.predict(point.observe())
        for one in np.atleast_2d(action)[:left]:
            total, left = total + point.step(one), left - 1
    return total


def train_points(tmp_path: Path, *words: str) -> Run:
    return Run(train(load_train_config([*SIM, *QUIET, *PPO, *words, f"run_dir={tmp_path / 'run'}"])))


def batch_of(size: int, count: int = 3) -> tuple[list[dict[str, object]], dict[str, object]]:
    """(observations, the same as one batch)"""
    rows = [Point(seed, size).observe() for seed in range(count)]
    return rows, {key: [row[key] for row in rows] if key == "instruction" else np.stack([row[key] for row in rows]) for key in rows[0]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_policy_plays_as_the_run_was_evaluated(kind: str, tmp_path: Path) -> None:
    run, size = train_points(tmp_path, *KINDS[kind]), 40 if kind in ("cnn", "mixed") else 16
    policy = run.load_policy(trust=[OWN] if kind == "custom" else ())
    for episode in run.results["episodes"][:2]:
        assert played(policy, episode["seed"], size) == pytest.approx(episode["return"], abs=1e-5)
    rows, batch = batch_of(size)
    answers = policy.predict(batch)
    assert answers.shape == ((3, 3, 2) if kind in ("tiny_vla", "flow") else (3, 2))
    np.testing.assert_allclose(answers, [policy.predict(row) for row in rows], atol=1e-5)
    key = "rgb" if kind == "cnn" else "state"
    missing = {name: part for name, part in rows[0].items() if name != key}
    with pytest.raises(UserError, match=rf"The observation lacks '{key}'; it has .*Expected: \{{.*'{key}': \["):
        policy.predict(missing)
    wrong = np.zeros((size + 1, size, 3), np.uint8) if key == "rgb" else np.zeros(4, np.float32)
    with pytest.raises(UserError, match=rf"'{key}' must be \[.*\] or \[n, …\], got \[{', '.join(map(str, wrong.shape))}\]\. Expected: "):
        policy.predict({**rows[0], key: wrong})


def test_parts_of_different_batches_and_wrong_kinds_are_one_line(tmp_path: Path) -> None:
    policy = train_points(tmp_path, *KINDS["tiny_vla"]).load_policy()
    rows, batch = batch_of(16)
    with pytest.raises(UserError, match=r"must have the same batch size, got 3 rows, a single one\. Expected: .*'instruction': text"):
        policy.predict({**batch, "instruction": WORDS[0]})
    with pytest.raises(UserError, match=r"'rgb' must have dtype uint8, got float64"):
        policy.predict({**rows[0], "rgb": np.zeros((16, 16, 3))})
    with pytest.raises(UserError, match=r"'instruction' must be text, got int"):
        policy.predict({**rows[0], "instruction": 3})
    with pytest.raises(UserError, match=r"An observation must name its parts\. The policy expects \{'rgb': \[16, 16, 3\] uint8"):
        policy.predict(np.zeros(3))
