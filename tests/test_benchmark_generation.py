"""benchmarks/generation.py run for real with few tokens: it measures, and its figure is that of its table."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.test_benchmark_runs import run_script
from tests.test_benchmarks import columns

pytest.importorskip("transformers", reason="the extra 'language' is not installed")


@pytest.mark.slow
def test_generation_runs() -> None:
    size = ("--requests", "8", "--mean-tokens", "6", "--max-tokens", "12", "--rounds", "3", "--hidden-size", "64", "--layers", "2")
    lines = run_script("generation.py", "--batches", "4", *size)
    table = columns(lines, below="side")
    sides = {"transformers, 4 at a time", "torch, 4 at a time"}
    if importlib.util.find_spec("vllm") is not None:
        sides.add("vllm, 4 at a time")
    assert table.keys() == sides
    assert all(float(cells[0].replace(",", "")) > 0 for cells in table.values())
    assert table["transformers, 4 at a time"][1] == "1.0x"
    figure = re.fullmatch(
        r"figure: tokens a (?:cpu|wall) second as a multiple of transformers' generate, 4 at a time: torch ([\d.]+)x.*", lines[-1]
    )
    assert figure is not None
    assert f"{figure[1]}x" == table["torch, 4 at a time"][1]
