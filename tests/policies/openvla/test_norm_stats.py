"""Action ranges by hand, and what is said when they are not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.policies.openvla.processor import range_of

STATS: dict[str, Any] = {
    "bridge_orig": {"action": {"q01": [-2.0, 0.0], "q99": [4.0, 1.0], "min": [-4, 0], "max": [8, 1], "mask": [True, False]}},
    "fractal": {"action": {"q01": [0.0], "q99": [1.0]}, "proprio": {"q01": [0.0, 1.0], "q99": [2.0, 1.0]}},
}


def test_unnormalise_by_hand() -> None:
    scale = range_of(STATS, "bridge_orig")
    # 0.5 (n + 1) (4 - -2) - 2: -1 → -2, 0 → 1, 1 → 4. The second dimension is not masked and passes.
    np.testing.assert_allclose(scale.unnormalise(np.array([[-1.0, 0.3], [0.0, 0.3], [1.0, 0.3]])), [[-2, 0.3], [1, 0.3], [4, 0.3]])
    assert scale.dim == 2


def test_extremes_and_epsilon() -> None:
    wide = range_of(STATS, "bridge_orig", bounds="extremes")
    np.testing.assert_allclose(wide.unnormalise(np.array([1.0, 1.0])), [8, 1])
    # OpenVLA-OFT adds 1e-8 to the width: 0.5 · 2 · (6 + 1e-8) - 2.
    assert range_of(STATS, "bridge_orig", epsilon=1e-8).unnormalise(np.array([1.0, 0.0]))[0] - 4.0 == pytest.approx(1e-8, rel=1e-3)


def test_normalise_is_the_inverse_inside_and_clips_outside() -> None:
    scale = range_of(STATS, "bridge_orig")
    values = np.array([[-2.0, 0.5], [1.0, -0.25], [4.0, 1.0]])
    np.testing.assert_allclose(scale.unnormalise(scale.normalise(values)), values, atol=1e-12)
    assert scale.normalise(np.array([10.0, 3.0])).tolist() == [1.0, 1.0]


def test_a_state_that_never_moved_is_finite() -> None:
    state = range_of(STATS, "fractal", "proprio", epsilon=1e-8)
    assert np.isfinite(state.normalise(np.array([[1.0, 1.0]]))).all()
    assert np.isfinite(range_of(STATS, "fractal", "proprio").normalise(np.array([[1.0, 1.0]]))).all()


def test_what_is_missing_is_named() -> None:
    with pytest.raises(UserError, match=r"'bridge' is not in .* norm_stats\. Did you mean 'bridge_orig'\? Known: bridge_orig, fractal"):
        range_of(STATS, "bridge")
    with pytest.raises(UserError, match=r"must name the data set.*Known: bridge_orig, fractal"):
        range_of(STATS, None)
    with pytest.raises(UserError, match=r"\['bridge_orig'\] has no 'proprio'"):
        range_of(STATS, "bridge_orig", "proprio")
    with pytest.raises(UserError, match=r"has no 'min'.*Known: q01, q99"):
        range_of(STATS, "fractal", bounds="extremes")
    with pytest.raises(UserError, match="sizes differ"):
        range_of({"a": {"action": {"q01": [0.0, 1.0], "q99": [1.0]}}}, None)
    with pytest.raises(UserError, match=r"norm_stats\['a'\]\['action'\] is damaged: could not convert string to float"):
        range_of({"a": {"action": {"q01": ["low"], "q99": [1.0]}}}, None)


def test_the_only_data_set_needs_no_name() -> None:
    assert range_of({"only": STATS["fractal"]}, None).dim == 1
