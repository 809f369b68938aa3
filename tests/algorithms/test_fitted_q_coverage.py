"""How often intervals of fitted values and of doubly robust estimates hold a value that is known exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.fitted_q import FittedQConfig, RecordedSteps, fit_q
from embodied_rl.episodes.assessment import Assumptions, Estimate, assess, assess_model
from embodied_rl.episodes.estimators import OffPolicyEpisodes, stack
from tests.episodes.tiny_mdp import REWARD, TARGET, Path, exact_value, off_policy, sample_paths

GAMMA, STEPS, NUM_EPISODES = 0.9, 4, 150
LINEAR = FittedQConfig(hidden_sizes=(), num_steps=150, learning_rate=0.1, batch_size=64, target_rate=0.3)


def recorded_steps(paths: list[Path]) -> RecordedSteps:
    """One-hot pairs of state and time: what a linear Q says of them is a table, and the mean of what was recorded solves it. Episodes
    end where they are cut, so that whatever is seen last does not count."""
    seen = [np.array([*path.states, 0]) + 2 * np.arange(len(path.states) + 1) for path in paths]
    lengths = np.array([len(path.states) for path in paths])
    first = np.cumsum(lengths + 1) - lengths - 1
    state = np.concatenate([start + np.arange(length) for start, length in zip(first, lengths, strict=True)])
    states = np.concatenate(seen)
    actions = np.concatenate([path.actions for path in paths])
    ends = np.zeros(lengths.sum(), bool)
    ends[np.cumsum(lengths) - 1] = True
    return RecordedSteps(
        features=torch.from_numpy(np.eye(2 * (STEPS + 1), dtype=np.float32)[states]),
        state=torch.from_numpy(state),
        next_state=torch.from_numpy(state + 1),
        action=torch.from_numpy(actions)[:, None],
        reward=torch.from_numpy(REWARD[np.concatenate([path.states for path in paths]), actions].astype(np.float32)),
        continues=torch.from_numpy(~ends),
        episode=torch.from_numpy(np.repeat(np.arange(len(paths)), lengths)),
        first_state=torch.from_numpy(first),
        probability=torch.from_numpy(TARGET[states % 2].astype(np.float32)),
    )


def with_model(paths: list[Path], data: OffPolicyEpisodes, q: np.ndarray, v: np.ndarray) -> OffPolicyEpisodes:
    """The episodes with a model's values of their steps and states, 0 after the last step."""
    lengths = np.array([len(path.states) for path in paths])
    ends, last = np.cumsum(lengths), np.cumsum(lengths + 1)
    after = [np.append(v[stop - length - 1 : stop - 1], 0.0) for stop, length in zip(last, lengths, strict=True)]
    model = stack([np.zeros(length) for length in lengths], model_q=np.split(q, ends[:-1]), model_v=after)
    return OffPolicyEpisodes(data.length, data.reward, data.log_ratio, model.model_q, model.model_v)


def estimates(seed: int) -> dict[str, Estimate]:
    paths = sample_paths(NUM_EPISODES, STEPS, np.random.default_rng([seed, 1]))
    fitted = fit_q(recorded_steps(paths), GAMMA, LINEAR)
    plain = off_policy(paths, GAMMA)
    given = Assumptions(gamma=GAMMA, num_samples=300, seed=seed, min_ess=0.0)
    refits = [with_model(paths, plain, q, v) for q, v in zip(fitted.member_q, fitted.member_v, strict=True)]
    found = assess(with_model(paths, plain, fitted.q, fitted.v), ["dr", "wdr"], given, refits=refits)
    return {estimate.estimator: estimate for estimate in [*found, assess_model(fitted.values, given)]}


@pytest.mark.parametrize("runs", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_intervals_hold_the_true_value_as_often_as_they_say(runs: int) -> None:
    truth = exact_value(STEPS, GAMMA)
    drawn = [estimates(seed) for seed in range(runs)]
    for name in ("fqe", "dr", "wdr"):
        found = [each[name] for each in drawn]
        intervals = [estimate.bootstrap for estimate in found if estimate.bootstrap is not None]
        assert len(intervals) == runs
        held = sum(interval.covers(truth) for interval in intervals)
        values = np.array([estimate.value for estimate in found])
        half = np.mean([interval.high - interval.low for interval in intervals]) / 2
        # 95% aimed at, three standard errors of so many runs allowed for: 0.866 of 60, 0.917 of 400.
        assert held / runs >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / runs), (name, held)
        # Not by being wide: 1.96 standard errors are needed where the error is known, 2.5 where eight members tell it.
        assert 1.6 < half / values.std(ddof=1) < 3.2, name
        assert abs(values.mean() - truth) < 4 * values.std(ddof=1) / np.sqrt(runs), name
