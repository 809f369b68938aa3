"""The benchmark of text rollouts: its waits by themselves, and the script with tiny sizes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.test_benchmark_runs import run_script
from tests.test_benchmarks import columns, scripts_can_be_imported  # noqa: F401  (a fixture)


def test_waits_are_the_same_for_the_same_member_and_have_the_mean_they_are_asked_for() -> None:
    from text_rollout import latency_s

    assert latency_s(5, ["a", "b"], 0.1, 0.8) == latency_s(5, ["a", "b"], 0.1, 0.8)
    assert len({latency_s(seed, words, 0.1, 0.8) for seed in (5, 6) for words in (["a"], ["b"], ["a", "a"])}) == 6
    waits = np.array([latency_s(seed, ["c"], 0.1, 0.8) for seed in range(4000)])
    # The standard error of the mean: 0.1 sqrt(exp(0.8^2) - 1) / sqrt(4000) = 0.0015.
    assert waits.mean() == pytest.approx(0.1, abs=0.006)
    assert np.log(waits).std() == pytest.approx(0.8, abs=0.04)


@pytest.mark.slow
@pytest.mark.ci_sample
def test_all_sides_run() -> None:
    lines = run_script("text_rollout.py", "--batches", "1", "--turns", "2", "--mean-ms", "5", "--sigma", "0.5")
    assert len(columns(lines, below="rollouts")) == 4
    assert re.match(r"figure: episode by episode / turn by turn: sigma 0.5 [\d.]+x, with redundancy [\d.]+x", lines[-1])
