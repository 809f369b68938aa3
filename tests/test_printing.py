"""Tables of the commands: tabs in a pipe, rows in words where a terminal is too narrow; title and caption in both."""

from __future__ import annotations

import pytest
from rich.table import Table

from embodied_rl.commands.cli import _as_rows, columns, print_tables
from embodied_rl.progress import number_text


def table() -> Table:
    made = Table(title="Against random", caption="p: adjusted")
    for heading in ("policy", "success", "return"):
        made.add_column(heading, no_wrap=True)
    made.add_row("step 1024", "[green]50.0%[/green]", "3.5")
    made.add_row("step 2048", "100.0%", "")
    return made


def test_a_pipe_gets_tabs_and_no_padding(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(table())
    assert capsys.readouterr().out.splitlines() == [
        "Against random",
        "policy\tsuccess\treturn",
        "step 1024\t50.0%\t3.5",
        "step 2048\t100.0%",
        "p: adjusted",
    ]


def test_a_narrow_terminal_gets_a_row_at_a_time() -> None:
    lines = _as_rows(table(), 30)
    assert lines == ["Against random", "  step 1024: success 50.0%,", "      return 3.5", "  step 2048: success 100.0%", "p: adjusted"]


def test_names_and_texts_stand_side_by_side() -> None:
    rows = [("seed=INT", "of everything that is drawn"), ("a_very_long_name=STR", "short")]
    assert columns(rows, 30) == [
        "  seed=INT    of everything",
        "              that is drawn",
        "  a_very_long_name=STR",
        "              short",
    ]


@pytest.mark.parametrize(("value", "text"), [(0.12346, "0.1235"), (9999.7, "10000"), (-12345.6, "-12346"), (3e9, "3e+09"), (2e-7, "2e-07")])
def test_figures_have_no_power_of_ten_up_to_a_billion(value: float, text: str) -> None:
    assert number_text(value) == text
