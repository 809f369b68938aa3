"""The arithmetic of the calibration study, by hand, and what the comparison with d3rlpy says where there is none."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def scripts_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [path.stem for path in BENCHMARKS.glob("*.py")]:
        sys.modules.pop(name, None)


def test_rank_correlation_by_hand_and_by_scipy() -> None:
    from offline_calibration import spearman

    # Ranks 1, 2, 3, 4 against 2, 1, 4, 3: 1 − 6 · 4 / (4 · 15).
    assert spearman([1.0, 5.0, 6.0, 100.0], [20.0, 10.0, 40.0, 30.0]) == pytest.approx(0.6)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 5, 30).astype(float), rng.integers(0, 5, 30).astype(float)
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)


def test_the_summary_by_hand() -> None:
    from offline_calibration import OPEN_LOOP, Row, figure_line, summary, table_rows

    def row(recording: int, policy: int, truth: float, value: float | None, wide: float = 1.0) -> Row:
        interval = None if value is None else (value - wide, value + wide)
        return Row("a task", recording, policy, "wis", truth, value, interval, (-100.0, 100.0))

    # First recording: all right but the last, off by 3 with its interval; second: one refused, the others in the wrong order.
    rows = [row(0, 1, 10.0, 10.5), row(0, 2, 20.0, 20.0), row(0, 3, 30.0, 33.0)]
    rows += [row(1, 1, 10.0, 12.0), row(1, 2, 20.0, 11.0, wide=9.0), row(1, 3, 30.0, None)]
    rows += [Row("a task", 0, policy, OPEN_LOOP, truth, -truth, None, None) for policy, truth in ((1, 10.0), (2, 20.0), (3, 30.0))]
    found = summary(rows, "a task", "wis")
    assert (found["asked"], found["given"]) == (6, 5)
    assert found["spearman"] == pytest.approx(1.0), "two policies are too few to rank: the second recording does not count"
    errors = np.array([0.5, 0.0, 3.0, 2.0, -9.0])
    assert found["bias"] == pytest.approx(errors.mean())
    assert found["rmse"] == pytest.approx(np.sqrt((errors**2).mean()))
    assert found["coverage"] == pytest.approx(3 / 5)
    assert found["width"] == pytest.approx((2 + 2 + 2 + 2 + 18) / 5)
    assert found["concentration_coverage"] == 1.0
    assert summary(rows, "a task", OPEN_LOOP)["spearman"] == pytest.approx(-1.0)
    lines = table_rows(rows, "a task")
    assert lines[0] == ("wis", "5 of 6", "1.00", "-0.7", "4.34", "60%", "5.2", "100%")
    assert lines[1][:3] == (OPEN_LOOP, "3 of 3", "-1.00")
    assert figure_line(rows) == "figure: rank correlation (coverage of the 95% bootstrap), a task: wis 1.00 (60%)"


def test_played_episodes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """CartPole in plain gymnasium, with a policy of random weights: recorded log-probabilities are those of `evaluate`."""
    import torch
    from offline_calibration import CARTPOLE, play

    from embodied_rl.checkpoint import load_checkpoint, save_checkpoint
    from embodied_rl.policies.actor_critic import build_policy
    from embodied_rl.types import ActionSpec, SimSpec, TensorSpec
    from tests.sample_run import make_config

    spec = SimSpec("CartPole-v1", {"state": TensorSpec((4,))}, ActionSpec.discrete(2))
    config = make_config(tmp_path)
    torch.manual_seed(0)
    policy = build_policy(config.policy, spec)
    save_checkpoint(tmp_path, 1, policy=policy.state_dict(), learner={}, state={}, config=config, spec=spec, metrics={}, command="")
    returns, episodes = play(load_checkpoint(tmp_path, with_learner=False), CARTPOLE, 6, 100, keep=True)
    assert [episode.seed for episode in episodes] == list(range(100, 106))
    for total, episode in zip(returns, episodes, strict=True):
        assert episode.episode_return == total == episode.num_steps, "CartPole pays 1 for each step"
        assert episode.complete
        state = torch.from_numpy(episode.observation["state"][:-1])
        with torch.no_grad():
            log_prob = policy.evaluate({"state": state}, torch.from_numpy(episode.action)).log_prob.numpy()
        np.testing.assert_allclose(episode.log_prob, log_prob, rtol=1e-5)
        # The pole moves as it is told to: the cart's velocity changes in the direction of the push.
        change = np.diff(episode.observation["state"][:, 1])
        np.testing.assert_array_equal(change > 0, episode.action[:, 0] == 1)


def test_without_d3rlpy_the_comparison_says_so() -> None:
    done = subprocess.run([sys.executable, str(BENCHMARKS / "fqe_d3rlpy.py"), "--python", sys.executable], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"skipped: {sys.executable} has no d3rlpy (ModuleNotFoundError: No module named 'd3rlpy')")
