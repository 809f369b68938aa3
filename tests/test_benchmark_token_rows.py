"""benchmarks/token_rows.py run for real with a small size: its sides agree, and its figure is that of its table."""

from __future__ import annotations

import re

from tests.test_benchmark_runs import run_script


def test_token_rows_runs() -> None:
    lines = run_script("token_rows.py", "--tokens", "1024", "--max-tokens", "1024", "--rounds", "1")
    rows = [re.split(r"  +", line.strip()) for line in lines if ", by sequence" in line or ", under a mask" in line or "  padded " in line]
    seconds = {(mix, side): float(own) for mix, _, side, own, _ in rows}
    assert len(seconds) == 9
    (difference,) = re.findall(r"largest difference of a log-probability ([\d.e+-]+)", "\n".join(lines))
    assert float(difference) < 1e-4
    figures = re.findall(r"([\d.]+)x \(([a-z ]+)\)", lines[-1])
    assert [mix for _, mix in figures] == ["conversations", "turns", "short answers"]
    for figure, mix in figures:
        assert abs(float(figure) - seconds[mix, "packed, under a mask"] / seconds[mix, "packed, by sequence"]) < 0.1
    # Of 1024 tokens under a mask a million pairs are computed, of 12 to 24 tokens each some ten thousand.
    assert seconds["short answers", "packed, under a mask"] > seconds["short answers", "packed, by sequence"]
