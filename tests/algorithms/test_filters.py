from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embodied_rl.algorithms.filters import build_filters, mean_score, path, zero_variance
from embodied_rl.errors import UserError
from embodied_rl.types import EpisodeGroup
from tests.rollout.samples import episode, group


def test_zero_variance() -> None:
    drop = zero_variance()
    assert drop(group([0.0, 0.0, 0.0])) == "zero_variance"
    assert drop(group([0.0, 0.0, 1.0])) is None
    assert drop(group([0.0, 1e-3])) is None


def test_rounding_noise_is_no_variance() -> None:
    # Ten rewards of 0.1 in float32 against one reward of 1: 1.0000000149 and 1. The trap: divided by 1e-6 this looks like a signal.
    tenths = episode(versions=(0,) * 10, reward=np.full(10, 0.1, np.float32))
    noisy = EpisodeGroup(0, "only", 0, 0, (tenths, episode(1.0)))
    assert noisy.scores[0] != noisy.scores[1]
    assert zero_variance()(noisy) == "zero_variance"
    assert zero_variance(tolerance=0.0)(noisy) is None
    # Relative to the magnitude: 1e4 and 1e4 + 0.001 differ by 1e-7 of it.
    assert zero_variance()(group([1e4, 1e4 + 0.001])) == "zero_variance"


def test_zero_variance_of_single_episodes_is_refused() -> None:
    with pytest.raises(UserError, match="at least two episodes"):
        zero_variance()(group([1.0]))


def test_mean_score_bounds_are_included_and_nan_is_outside() -> None:
    keep = mean_score(minimum=0.25, maximum=0.75)
    kept = [count for count in range(5) if keep(group([1.0] * count + [0.0] * (4 - count))) is None]
    assert kept == [1, 2, 3]
    assert keep(group([np.nan, 0.5])) == "mean_score"
    assert mean_score(minimum=-1.0)(group([100.0])) is None
    with pytest.raises(UserError, match="minimum <= maximum"):
        mean_score(minimum=1.0, maximum=0.0)


def with_metadata(*rows: dict[str, Any]) -> EpisodeGroup:
    return EpisodeGroup(0, "only", 0, 0, tuple(episode(metadata=row) for row in rows))


def test_paths() -> None:
    judged = with_metadata({"judge": {"score": 0.2, "split": "train"}}, {"judge": {"score": 0.6, "split": "test"}})
    score = "episode.metadata.judge.score"
    assert path(path=score, minimum=0.4)(judged) is None  # mean 0.4
    assert path(path=score, minimum=0.41)(judged) == f"path:{score}"
    assert path(path=score, minimum=0.3, over="all")(judged) is not None
    assert path(path=score, minimum=0.3, over="any")(judged) is None
    assert path(path="episode.metadata.judge.split", equals="train", over="all")(judged) is not None
    assert path(path="episode.metadata.judge.split", equals="train", over="any")(judged) is None
    assert path(path="success_rate", maximum=0.0)(judged) is None
    assert path(path="domain", equals="only")(judged) is None
    assert path(path="episode.num_steps", maximum=0.5)(judged) is not None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"path": "number"}, "either minimum and/or maximum, or equals"),
        ({"path": "number", "equals": 1, "minimum": 0}, "either minimum"),
        ({"path": "episode.seed", "equals": 1}, "over must be 'all' or 'any'"),
        ({"path": "episode.seed", "minimum": 1, "over": "al"}, "Did you mean 'all'"),
    ],
)
def test_path_settings_that_make_no_sense(settings: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        path(**settings)


def test_a_path_that_leads_nowhere_names_what_there_is() -> None:
    judged = with_metadata({"judge": {"score": 1.0}})
    with pytest.raises(UserError, match=r"'scores' is missing\. Did you mean 'score'\? Known: score"):
        path(path="episode.metadata.judge.scores", minimum=0)(judged)
    with pytest.raises(UserError, match=r"EpisodeGroup has no 'sucess_rate'\. Did you mean 'success_rate'"):
        path(path="sucess_rate", minimum=0)(judged)
    with pytest.raises(UserError, match="has no '__class__'"):
        path(path="episode.__class__", minimum=0)(judged)


def test_built_from_a_configuration() -> None:
    filters = build_filters([{"name": "zero_variance"}, {"name": "mean_score", "minimum": 0.1, "maximum": 0.9}])

    def rejection(found: EpisodeGroup) -> str | None:
        return next((reason for apply in filters if (reason := apply(found)) is not None), None)

    assert rejection(group([0.0, 0.0])) == "zero_variance"
    assert rejection(group([0.0] * 19 + [1.0])) == "mean_score"  # 1/20 < 0.1
    assert rejection(group([0.0, 1.0])) is None
    with pytest.raises(UserError, match="Did you mean 'zero_variance'"):
        build_filters([{"name": "zero_varience"}])
    with pytest.raises(UserError, match=r"filters\[0\]\.min is not an argument of 'mean_score'"):
        build_filters([{"name": "mean_score", "min": 0.1}])
    with pytest.raises(UserError, match=r"'path' needs algorithm\.groups\.filters\[0\]\.path"):
        build_filters([{"name": "path", "minimum": 1}])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"name": "mean_score", "minimum": float("nan")}, r"filters\[1\]\.minimum must be between -1,000,000,000,000 and .*, got nan"),
        ({"name": "mean_score", "maximum": 1e20}, r"filters\[1\]\.maximum must be between .*, got 1e\+20"),
        ({"name": "zero_variance", "tolerance": -1}, r"filters\[1\]\.tolerance must be between 0 and 1, got -1"),
        ({"name": "path", "path": 5, "equals": 1}, r"filters\[1\]\.path must be text, got 5"),
        ({"name": "path", "path": "a", "equals": float("inf")}, r"filters\[1\]\.equals must be a finite number"),
    ],
)
def test_an_option_that_does_not_fit_its_type_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^algorithm\.groups\.{message}"):
        build_filters([{"name": "zero_variance"}, setting])
