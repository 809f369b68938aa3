"""Timelines: what is written can be read by viewers, and the shares are the intervals' own."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from embodied_rl import timeline as module
from embodied_rl.errors import UserError
from embodied_rl.timeline import Timeline, counter, span, timeline_to
from tests.short_run import train_shortly


class Clock:
    """perf_counter_ns by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(module.time, "perf_counter_ns", lambda: round(self.now_s * 1e9))

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


def test_shares_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    devices = {"generation": "gpu0", "training": "gpu0", "env": "cpu"}
    with timeline_to(tmp_path / "t.json", devices=devices) as timeline:
        with span("generation", "act"):
            clock.pass_s(2)
            with span("env", "step"), span("env", "inner"):  # nested: counted once
                clock.pass_s(1)
        clock.pass_s(3)
        with span("training", "update", samples=7):
            clock.pass_s(4)
    shares = timeline.shares()
    # 10 s in all: generation 0-3, env 2-3, training 6-10; gpu0 is busy 3 + 4 s.
    assert shares.elapsed_s == pytest.approx(10)
    assert shares.roles == pytest.approx({"generation": 0.3, "env": 0.1, "training": 0.4})
    assert shares.devices == pytest.approx({"gpu0": 0.7, "cpu": 0.1})
    assert shares.bubble == pytest.approx(1 - (0.7 + 0.1) / 2)
    assert shares.metrics()["utilisation/device/gpu0"] == pytest.approx(0.7)


def test_the_file_is_a_chrome_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    path = tmp_path / "deep" / "t.json"
    with timeline_to(path) as timeline:
        with span("env", 'a "name"', rows=3):
            clock.pass_s(0.5)
        counter("queue", ready=2, held=5)
        timeline.curves_of({"groups/age_1": 4.0, "groups/age_0": 9.0})
        assert not path.exists(), "a file that is not whole must not stand under its name"
    document = json.loads(path.read_text(encoding="utf-8"))
    name, bar, queue, ages = document["traceEvents"]
    assert (name["ph"], name["args"]) == ("M", {"name": "env"})
    assert (bar["ph"], bar["name"], bar["cat"], bar["args"]) == ("X", 'a "name"', "env", {"rows": 3})
    assert (bar["ts"], bar["dur"]) == (100e6, 0.5e6)
    assert bar["pid"] == name["pid"]
    assert (queue["ph"], queue["args"]) == ("C", {"ready": 2, "held": 5})
    assert list(ages["args"].items()) == [("0", 9.0), ("1", 4.0)]
    assert list(path.parent.iterdir()) == [path]


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def test_threads_and_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_threads, num_spans, limit = 4, 600, 1500
    monkeypatch.setattr(module, "MOST_EVENTS", limit)
    with timeline_to(tmp_path / "t.json", devices={"env": "cpu"}) as timeline:

        def work() -> None:
            for _ in range(num_spans):
                with span("env", "step"):
                    pass

        threads = [threading.Thread(target=work) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(timeline._lines) < module._FLUSH_EVERY, "what is held in memory stays bounded"
    events = events_of(tmp_path / "t.json")
    assert len(events) == limit
    # One event is the row's name.
    assert timeline.num_dropped == num_threads * num_spans + 1 - limit
    assert len({event["tid"] for event in events if event["ph"] == "X"}) <= num_threads
    assert 0 < timeline.shares().roles["env"] <= 1


def test_an_error_inside_closes_the_file_and_the_span(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), timeline_to(tmp_path / "t.json"), span("env", "step"):
        raise ZeroDivisionError
    assert [event["name"] for event in events_of(tmp_path / "t.json")] == ["process_name", "step"]
    with span("env", "after"):
        pass
    assert len(events_of(tmp_path / "t.json")) == 2


def test_off_costs_next_to_nothing() -> None:
    """Three calls of Python, which make nothing and look at no clock: less than a microsecond on any machine."""
    made, called = span("generation", "act", rows=16), []
    assert made is span("env", "step")

    def note(frame: FrameType, event: str, argument: object) -> None:
        called.append(frame.f_code.co_name if event == "call" else getattr(argument, "__name__", ""))

    sys.setprofile(lambda frame, event, argument: note(frame, event, argument) if event in ("call", "c_call") else None)
    try:
        with span("generation", "act", rows=16):
            pass
    finally:
        sys.setprofile(None)
    assert called == ["span", "__enter__", "__exit__", "setprofile"]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match="Cannot write"):
        Timeline(tmp_path / "file" / "t.json")
    with timeline_to(tmp_path / "t.json"), pytest.raises(RuntimeError, match="already"), timeline_to(tmp_path / "u.json"):
        pass


def test_a_run_writes_its_timeline(tmp_path: Path) -> None:
    run_dir = train_shortly(tmp_path / "run", "experiment=cartpole", "profile=true", "total_steps=512")
    events = json.loads((run_dir / "timeline.json").read_text(encoding="utf-8"))["traceEvents"]
    spans = [(event["cat"], event["name"]) for event in events if event["ph"] == "X"]
    assert [spans.count(one) for one in (("generation", "collect"), ("training", "update"), ("training", "publish"))] == [2, 2, 2]
    waits = [event for event in events if event.get("cat") == "env"]
    collects = [event for event in events if event.get("name") == "collect"]
    assert waits, "simulators were waited for"
    for wait in waits:  # and only inside of collecting
        assert any(one["ts"] <= wait["ts"] and wait["ts"] + wait["dur"] <= one["ts"] + one["dur"] + 1 for one in collects)
    last = json.loads((run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-2])
    assert 0 < last["utilisation/training"] < 1


def test_a_span_that_is_told_late_is_not_counted_twice() -> None:
    """Thread A reads the clock at 10 and then waits; thread B is busy from 20 to 50; A's span is told from 10, and ends at 60."""
    busy = module._Busy()
    busy.begin(20)
    busy.end(50)
    busy.begin(10)
    assert busy.at(60) == 40  # 20 to 60: what A did before 20 is lost, nothing is there twice
    busy.end(60)
    assert busy.at(99) == 40
