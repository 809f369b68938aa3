"""benchmarks/placements.py runs for real with few iterations, and its arithmetic by hand."""

from __future__ import annotations

import re

import pytest

from tests.test_benchmark_runs import run_script
from tests.test_benchmarks import scripts_can_be_imported  # noqa: F401  # a fixture


def test_the_table_and_the_figure_by_hand() -> None:
    from placements import medians, report

    parts = {"simulate": 0.004, "generate": 0.002, "train": 0.003, "publish": 0.0, "wait": 0.0, "other": 0.001}
    one = medians([{"whole": seconds, "steps": 20.0, **parts} for seconds in (0.010, 0.008, 0.5)])
    apart = {**one, "whole": 0.025, "wait": 0.015}
    results: dict[tuple[str, str], dict[str, float] | str] = {
        ("toy", "in one process"): one,
        ("toy", "player apart"): apart,
        ("toy", "Ray"): "too small a machine",
    }
    lines = report(results).splitlines()
    # 20 steps in 10 ms; 20 in 25 ms, which is 2.5 times as long.
    assert re.split(r" {2,}", lines[2]) == ["toy", "in one process", "10.0", "2000", "4.0", "2.0", "3.0", "0.0", "0.0", "1.0"]
    assert re.split(r" {2,}", lines[3]) == ["toy", "player apart", "25.0", "800", "4.0", "2.0", "3.0", "0.0", "15.0", "1.0"]
    assert re.split(r" {2,}", lines[4])[:3] == ["toy", "Ray", "-"]
    assert "toy, Ray: too small a machine" in lines
    assert lines[-1] == "figure: an iteration's time in multiples of one process. toy: player apart 2.50x"


@pytest.mark.slow
def test_it_runs() -> None:
    """Parts of an iteration in one process are parts of its time."""
    short = ["--iterations", "3", "--skipped", "1", "--overrides", "sim.num_slots=4", "sim.num_workers=2", "algorithm.rollout_steps=16"]
    chosen = ["--experiments", "pendulum", "--placements", "in one process", "player apart"]
    lines = run_script("placements.py", *chosen, *short, "algorithm.minibatch_size=32")
    rows = [re.split(r" {2,}", line.strip()) for line in lines if line.startswith("pendulum ")]
    assert [row[1] for row in rows] == ["in one process", "player apart"]
    for row in rows:
        assert float(row[2]) > 0
        assert all(float(cell) >= 0 for cell in row[4:])
    # In one process no part of any iteration is longer than the whole, so no median is: printed to 0.1 ms.
    assert max(float(cell) for cell in rows[0][4:]) <= float(rows[0][2]) + 0.1
    assert re.fullmatch(r"figure: .*pendulum: player apart \d+\.\d\dx", lines[-1])
