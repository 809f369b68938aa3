"""Charts, read back from their SVG: every point lies where arithmetic puts it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from embodied_rl.reports.charts import (
    Frame,
    Series,
    json_text,
    line_chart,
    nice_ticks,
    percent_text,
    range_chart,
    reduced,
    scatter_chart,
    short_number,
    stacked_chart,
)


def points_of(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+) ([-\d.]+)", path)]


def test_a_curve_goes_through_its_points() -> None:
    series = Series("training", [0.0, 50.0, 100.0], [1.0, 3.0, 2.0], colour=4)
    drawn = line_chart("Return", [series], y_range=(0.0, 4.0))
    (path,) = re.findall(r'<path class="line c4" d="([^"]+)"', drawn)
    # The plot is 420 - 50 - 12 wide from x = 50, and 220 - 12 - 36 high from y = 184 upwards.
    expected = [(50, 184 - 172 / 4), (50 + 358 / 2, 184 - 172 * 3 / 4), (50 + 358, 184 - 172 / 2)]
    np.testing.assert_allclose(points_of(path), expected, atol=0.06)
    holder = re.search(r'<script type="application/json">(.*?)</script>', drawn)
    assert holder is not None
    data = json.loads(holder.group(1))
    assert data["series"] == [{"l": "training", "c": 4, "x": [0, 50, 100], "y": [1, 3, 2]}]
    assert (data["x"], data["y"], data["w"], data["m"]) == ([0, 100], [0, 4], 420, [50, 12, 12, 36])
    assert "legend" not in drawn, "one curve needs no legend"


def test_several_curves_have_a_legend_and_thin_ones_are_behind_and_unnamed() -> None:
    mean = Series("PPO", [0, 1], [1, 2], 1, band=([0.5, 1.5], [1.5, 2.5]))
    drawn = line_chart("Return", [mean, Series("a run", [0, 1], [0.5, 2.5], 1, "thin"), Series("GRPO", [0, 1], [3, 4], 2, "dots")])
    assert re.findall(r"</i>([^<]+)</span>", drawn) == ["PPO", "GRPO"]
    assert re.findall(r'<path class="(\w+) c', drawn) == ["band", "thin", "line", "dots"]
    (band,) = re.findall(r'<path class="band c1" d="([^"]+)Z"', drawn)
    corners = points_of(band)
    assert len(corners) == 4
    assert corners[0][0] == corners[3][0] < corners[1][0] == corners[2][0]
    assert corners[0][1] < corners[3][1], "there along the upper edge, back along the lower"
    assert len(re.findall(r'<circle class="dot c2"', drawn)) == 2
    assert line_chart("Nothing", [Series("a", [], [])]) == ""
    with pytest.raises(ValueError, match="series 'a' has 1 x and 2 y"):
        Series("a", [1], [1, 2])


def test_a_single_point_and_a_flat_line_are_visible() -> None:
    drawn = line_chart("Return", [Series("a", [5.0], [2.0])])
    (place,) = re.findall(r'<circle class="dot c0" cx="([\d.]+)" cy="([\d.]+)"', drawn)
    assert 50 < float(place[0]) < 408
    assert 12 < float(place[1]) < 184
    flat = Frame.around([Series("a", [0, 1], [0.0, 0.0])], 100, 100)
    assert flat.y == (-0.5, 0.5)


def test_long_curves_keep_their_peaks() -> None:
    values = np.sin(np.arange(10_000) / 500)
    values[4321], values[7777] = 9.0, -9.0
    few = reduced(Series("a", np.arange(10_000).tolist(), values.tolist()))
    assert len(few.x) <= 402
    assert (max(few.y), min(few.y)) == (9.0, -9.0)
    assert few.x[list(few.y).index(9.0)] == 4321
    assert list(few.x) == sorted(few.x)
    assert (few.x[0], few.x[-1]) == (0, 9999)
    short = Series("a", [1.0, 2.0], [1.0, 2.0])
    assert reduced(short) is short


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0.0, 1.0, 4, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.0, 16_384.0, 4, [0.0, 5_000.0, 10_000.0, 15_000.0]),
        (-6.6, 0.3, 4, [-6.0, -4.0, -2.0, 0.0]),
        (0.0012, 0.0048, 4, [0.002, 0.003, 0.004]),
    ],
)
def test_ticks_are_round_numbers_within_the_range(low: float, high: float, count: int, expected: list[float]) -> None:
    assert nice_ticks(low, high, count) == pytest.approx(expected)


def test_ticks_of_any_range_are_few_and_inside() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        low = float(rng.normal() * 10.0 ** rng.integers(-8, 8))
        high = low + float(10.0 ** rng.uniform(-6, 6))
        ticks = nice_ticks(low, high)
        assert 2 <= len(ticks) <= 8, (low, high, ticks)
        slack = 1e-6 * (high - low)
        assert low - slack <= min(ticks) <= max(ticks) <= high + slack


def test_numbers_are_short() -> None:
    values = (0, 5, 12_500, 3e6, 2.5e9, -0.25, 0.00012, 0.0123)
    assert [short_number(value) for value in values] == ["0", "5", "12.5k", "3M", "2.5G", "-0.25", "0.00012", "0.0123"]
    assert [percent_text(value) for value in (0.0, 0.25, 1.0)] == ["0%", "25%", "100%"]


def test_shares_are_stacked_and_marked() -> None:
    shares = [(0, "simulate", [0.5, 0.25]), (3, "update", [0.5, 0.25])]
    drawn = stacked_chart("Time", [0.0, 1.0, 4.0], shares, [(2.0, "fault", "a fault")], note="")
    boxes = re.findall(r'<rect class="area c(\d)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', drawn)
    plot_width, plot_height, bottom = 1080 - 62, 230 - 48, 230 - 36
    expected = [
        # colour, x, y, width, height: a quarter of the width for the first minute of four, three quarters for the rest.
        (0, 50, bottom - plot_height / 2, plot_width / 4, plot_height / 2),
        (0, 50 + plot_width / 4, bottom - plot_height / 4, plot_width * 3 / 4, plot_height / 4),
        (3, 50, bottom - plot_height, plot_width / 4, plot_height / 2),
        (3, 50 + plot_width / 4, bottom - plot_height / 2, plot_width * 3 / 4, plot_height / 4),
    ]
    np.testing.assert_allclose([[float(number) for number in box] for box in boxes], expected, atol=0.06)
    (mark,) = re.findall(r'mark-fault" x1="([\d.]+)"', drawn)
    assert float(mark) == pytest.approx(50 + plot_width / 2, abs=0.06)
    marks = [(number / 30, "evaluation", "one of many") for number in range(120)]
    crowded = stacked_chart("Time", [0.0, 1.0, 4.0], shares, [*marks, (2.0, "fault", "a fault")], note="")
    ends = [(kind, float(end)) for kind, end in re.findall(r'mark-(\w+)" x1.* y2="([\d.]+)"', crowded.replace("<line", "\n<line"))]
    assert ends == [*[("evaluation", 12.0)] * 120, ("fault", bottom)], "many marks of a kind would cover the shares"


def test_what_a_file_says_stays_text() -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    drawn = line_chart(hostile, [Series(hostile, [0, 1], [0, 1]), Series("b", [0, 1], [0, 1])])
    drawn += scatter_chart(hostile, [(0.0, 1.0, 0, hostile)], legend=[(hostile, 0)], x_label=hostile)
    assert "<img" not in drawn
    assert drawn.count("</script>") == 1
    assert json.loads(json_text({"a": hostile})) == {"a": hostile}


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (499.6, 499.9, ["499.6", "499.7", "499.8", "499.9"]),
        (1.001, 1.004, ["1.001", "1.002", "1.003", "1.004"]),
        (1_000_000, 1_000_300, ["1,000,000", "1,000,100", "1,000,200", "1,000,300"]),
        (0, 3e6, ["0", "1M", "2M", "3M"]),
    ],
)
def test_ticks_that_differ_have_different_labels(low: float, high: float, labels: list[str]) -> None:
    drawn = line_chart("any", [Series("any", [1, 2], [low, high])])
    assert re.findall(r'text-anchor="end">([^<]+)</text><line class="grid"', drawn) == labels[:-1]
    assert f'text-anchor="end">{labels[-1]}</text>' in drawn


def test_values_with_two_ranges_one_or_none() -> None:
    wide, narrow = (-5.0, 9.0), (1.0, 2.0)
    rows = [("is a", 0, 1.5, [wide, narrow]), ("wis b", 1, 1.2, [narrow]), ("dr c: refused", 2, None, [])]
    drawn = range_chart("Values", rows, x_label="value", x_range=(0.0, 4.0), mark=3.0, note="")
    widths = [int(width) for width in re.findall(r"stroke-width: (\d)", drawn)]
    assert widths == [7, 2, 2], "the widest range is the broad one"
    assert drawn.count("<circle") == 2
    assert drawn.count('class="mark') == 1
    pale = re.search(r'stroke-width: 7[^"]*" d="M([\d.]+) [\d.]+L([\d.]+)', drawn)
    assert pale is not None
    assert [float(end) for end in pale.groups()] == [50.0, 828.0], "ranges are cut at the edges of the figure"
