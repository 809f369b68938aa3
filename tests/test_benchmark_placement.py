"""The benchmarks of placements: their arithmetic by hand, and each script with tiny sizes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.test_benchmark_runs import run_script
from tests.test_benchmarks import agree, columns, over, printed, scripts_can_be_imported  # noqa: F401  (a fixture)


def test_predictions_by_hand() -> None:
    from pipelining import Side, Trace, best_split, predicted_s, sides, traces
    from sleepers import LineTime

    trace = Trace("by hand", LineTime(1.0, 0.5), LineTime(2.0, 0.25), 0.1, 3.0)
    # 16 slots, 5 rounds; 2 GPUs simulate, 3 act, 3 train: 5 × (1 + 4 + 2 + 4/3) + 0.1 × 80 / 3.
    apart = Side("", 2, 3, 3)
    assert predicted_s(trace, apart, 16, 5) == pytest.approx(5 * (5 + 10 / 3) + 8 / 3)
    # Two stages on halves: s = 1 + 0.5 × 8/4 = 2, g = 2 + 0.25 × 8/4 = 2.5; 2·5·2.5 + 2, then 1 s on all eight.
    assert predicted_s(trace, Side("", 4, 4, 8, stages=2), 16, 5) == pytest.approx(27 + 1)
    # Shared: 5 × (1 + 1 + 2 + 0.5), 1 s of training, out and in.
    assert predicted_s(trace, Side("", 8, 8, 8, shared=True), 16, 5) == pytest.approx(22.5 + 1 + 6)
    for made in traces(64):
        best = best_split(made, 64, 10)
        assert best.env + best.policy + best.train == 8
        assert predicted_s(made, best, 64, 10) <= min(predicted_s(made, side, 64, 10) for side in sides() if "disaggregated" in side.name)


def test_all_sides_play_the_same_episodes() -> None:
    from long_tails import LongTail

    from embodied_rl.rollout.groups import Assignment

    trace = LongTail(sigma=0.9)
    one = [Assignment(group, member, seed=1, domain="only", version=0) for group in range(300) for member in range(4)]
    lengths = np.asarray([trace.length(assignment) for assignment in one])
    again = Assignment(7, 2, seed=9, domain="only", version=3, attempt=1)
    assert trace.length(again) == lengths[7 * 4 + 2]
    assert np.median(lengths) == pytest.approx(16, abs=1.5)
    assert np.std(np.log(lengths[(lengths > 1) & (lengths < trace.most)])) == pytest.approx(0.85, abs=0.1)
    assert trace.round_s(20) == pytest.approx(0.004 + 0.001)
    assert trace.train_s(100, 4) == pytest.approx(100 * trace.train_per_message_s / 4)


@pytest.mark.slow
def test_pipelining_runs() -> None:
    lines = run_script("pipelining.py", "--slots", "8", "--rounds", "2", "--iterations", "1", "--traces", "between")
    rows = columns(lines, below="placement")
    assert len(rows) == 6
    # Sleeps are never shorter than what was simulated.
    assert all(float(cells[3]) >= 1.0 for cells in rows.values())
    figure = re.search(r"two stages: between ([\d.]+)x \(its best split ([\d.]+)x\)", lines[-1])
    assert figure is not None
    assert f"{figure[1]}x" == rows["disaggregated"][-1]
    assert f"{figure[2]}x" == rows["disaggregated, best split"][-1]


def test_asynchrony_runs() -> None:
    small = ["--steps", "2", "--warm-up", "1", "--sigma", "0.9", "--train-gpus", "4", "--staleness", "2", "--scale", "0.3"]
    lines = run_script("asynchrony.py", *small)
    rows = columns(lines, below="arrangement")
    assert set(rows) == {"synchronous", "asynchronous, 4 train, S=2"}
    assert rows["synchronous"][1:3] == ["1.00x", "0.00"]
    assert float(rows["asynchronous, 4 train, S=2"][2]) <= 2
    figure = re.fullmatch(r"figure: asynchronous at its best / synchronous: sigma 0\.9 ([\d.]+)x .*", lines[-1])
    assert figure is not None
    assert f"{figure[1]}x" == rows["asynchronous, 4 train, S=2"][1]


def test_multiplexing_runs() -> None:
    lines = run_script("multiplexing.py", "--steps", "3", "--warm-up", "1", "--train-gpus", "3", "5")
    text = "\n".join(lines)
    compute = columns(lines[lines.index(next(line for line in lines if "bound by compute" in line)) :], below="arrangement")
    assert set(compute) == {"split, 3 train", "split, 5 train", "multiplexed, 3 train", "multiplexed, 5 train"}
    speeds = {name: printed(cells[0]) for name, cells in compute.items()}
    best = max(value for name, value in speeds.items() if name.startswith("split"))
    ratio = over(max(value for name, value in speeds.items() if name.startswith("multiplexed")), best)
    figure = re.search(r"bound by compute, S=1 ([\d.]+)x$", lines[-1])
    assert figure is not None, text
    assert agree(printed(figure[1]), ratio)
    assert all(int(cells[-1]) > 0 for name, cells in compute.items() if name.startswith("multiplexed")), "episodes have moved"
    assert all(int(cells[-1]) == 0 for name, cells in compute.items() if name.startswith("split"))
