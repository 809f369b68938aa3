"""Which tests a worker of `make test` takes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import scheduling


def test_the_longest_begin_first_and_long_tests_wait_for_no_other_of_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"a.py::learns": 70.0, "a.py::stops": 3.0, "b.py": 9.0, "b.py::one": 2.0, "gone.py::was": 400.0}
    monkeypatch.setattr(scheduling, "known_durations", lambda: known)
    collected = ["a.py::learns", "a.py::stops", "b.py::one", "b.py::two", "c.py::three[a::b]"]
    # b.py: what its fixtures take, 2 s, and 0.1 s for the test that has no line.
    expected = {"a.py::learns": 70.0, "b.py": 11.1, "a.py": 3.0, "c.py": 0.1}
    assert scheduling.longest_first(collected) == pytest.approx(expected)
    assert list(scheduling.longest_first(collected)) == list(expected)
    assert [scheduling.unit_of(nodeid) for nodeid in collected] == ["a.py::learns", "a.py", "b.py", "b.py", "c.py"]


def test_files_that_pay_for_the_same_beginning_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "known_durations", lambda: {"a.py": 1.0, "a.py::one": 2.0, "b.py": 4.0, "b.py::long": 80.0})
    monkeypatch.setattr(scheduling, "TOGETHER", {"b.py": "a.py"})
    collected = ["a.py::one", "c.py::other", "b.py::two", "b.py::long"]
    assert [scheduling.unit_of(nodeid) for nodeid in collected] == ["a.py", "c.py", "a.py", "b.py::long"]
    assert scheduling.longest_first(collected) == pytest.approx({"b.py::long": 80.0, "a.py": 1.0 + 2.0 + 4.0 + 0.1, "c.py": 0.1})


def test_files_that_go_together_are_there() -> None:
    assert [file for file in scheduling.TOGETHER if not (Path(__file__).parents[1] / file).is_file()] == []
