"""benchmarks/weight_sync.py and offload.py run for real with few bytes, and their arithmetic by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from tests.test_benchmark_runs import run_script
from tests.test_benchmarks import columns, scripts_can_be_imported  # noqa: F401  # a fixture


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_weight_sync_runs() -> None:
    lines = run_script("weight_sync.py", "--megabytes", "4", "--hidden-size", "128", "--rounds", "3")
    table = columns(lines, below=next(line for line in lines if re.match(r"\d+ MB ", line)).split("  ")[0])
    assert list(table) == ["memory copy", "publish", "publish + read", "only changed"]
    assert table["memory copy"][2] == "1.00x"
    assert float(table["publish + read"][0]) > float(table["publish"][0]) > 0
    figure = re.fullmatch(
        r"figure: weights published at [\d.]+ GB/s, ([\d.]+) of a memory copy; published and read by another process [\d.]+", lines[-1]
    )
    assert figure is not None
    assert f"{figure[1]}x" == table["publish"][2]


def test_weight_sync_ratios_are_of_the_same_round() -> None:
    from weight_sync import report

    # Copies at 4, 2 and 8 GB/s; publications at half, a quarter and a half of them.
    sides = ("memory copy", "publish", "publish + read", "only changed")
    seconds = [(0.25, 0.5, 1.0, 0.1), (0.5, 2.0, 4.0, 0.1), (0.125, 0.25, 0.5, 0.1)]
    lines = report([dict(zip(sides, row, strict=True)) for row in seconds], 10**9).splitlines()
    table = columns(lines, below="1000 MB")
    assert table["memory copy"] == ["250.00", "4.00", "1.00x"]
    assert table["publish"] == ["500.00", "2.00", "0.50x"]
    assert table["publish + read"] == ["1000.00", "1.00", "0.25x"]
    assert lines[-1] == "figure: weights published at 2.0 GB/s, 0.50 of a memory copy; published and read by another process 0.25"


def test_offload_runs_and_says_what_it_could_not_measure(one_thread: None) -> None:
    from offload import measure, report

    device = "cuda" if torch.cuda.is_available() else "cpu"
    seconds, size, freed = measure(24, 2, device)
    # Two layers of 1024 x 1024 float32 with two moments each, and a step count for each.
    assert size == 2 * (3 * 4 * 1024**2 + 4)
    assert all(len(values) == 2 for values in seconds.values())
    text = report(seconds, size, freed, device)
    if device == "cpu":
        assert freed == 0
        assert text.splitlines()[-1].startswith("figure: no GPU here, so no figure of the link;")
    by_hand = {"one copy out": [1.0], "offload": [2.0], "one copy in": [1.0], "onload": [4.0]}
    assert report(by_hand, 10**9, 5 * 10**8, "cuda").splitlines()[-1] == (
        "figure: offload at 0.5 GB/s, 0.50 of one pinned copy; onload at 0.2 GB/s, 0.25; 500 MB given back"
    )
