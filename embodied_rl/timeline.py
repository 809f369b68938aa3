"""Timelines: spans per role and device as a Chrome trace (chrome://tracing, ui.perfetto.dev), and shares computed from them.

```python
with timeline_to(run_dir / "timeline.json", devices={"generation": "gpu0", "training": "gpu0"}) as timeline:
    with span("generation", "act", rows=16): ...
    counter("queue", ready=3, held=7)
print(timeline.shares())
```
If no timeline is open, `span` and `counter` do nothing and cost less than a microsecond, so that they may stay in the code.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from embodied_rl.files import cannot_write, fsync, writing_to

_FLUSH_EVERY = 512
"""Events kept in memory before they are written to the file."""
MOST_EVENTS = 2_000_000
"""Most events of a file. Further ones are only counted (`Timeline.num_dropped`): viewers cannot open a file above 300 MB."""
_HEAD = '{"displayTimeUnit":"ms","traceEvents":[\n'


@dataclass(frozen=True)
class Shares:
    """Summary of a timeline; every share is of `elapsed_s`."""

    elapsed_s: float
    """Seconds from the begin of the first span to the end of the last."""
    roles: Mapping[str, float]
    """{role: share of the time in which at least one of its spans was open}"""
    devices: Mapping[str, float]
    """{device: the same share, over all roles that use it}"""

    @property
    def bubble(self) -> float:
        """Mean share of the time in which a device was idle; 0.0 if no device is known."""
        return 1.0 - sum(self.devices.values()) / len(self.devices) if self.devices else 0.0

    def metrics(self) -> dict[str, float]:
        """Flat figures: ``utilisation/<role>``, ``utilisation/device/<device>``, ``utilisation/bubble``."""
        figures = {f"utilisation/{role}": share for role, share in self.roles.items()}
        figures |= {f"utilisation/device/{device}": share for device, share in self.devices.items()}
        return {**figures, "utilisation/bubble": self.bubble}


class _Busy:
    """Time in which at least one span was open, in constant memory."""

    def __init__(self) -> None:
        self.num_open = 0
        self.since_ns = 0
        self.counted_ns = 0
        self.total_ns = 0

    def begin(self, now_ns: int) -> None:
        if self.num_open == 0:
            # A thread that read the clock and then waited comes late: other threads' time since then is already counted.
            self.since_ns = max(now_ns, self.counted_ns)
        self.num_open += 1

    def end(self, now_ns: int) -> None:
        self.num_open -= 1
        if self.num_open == 0:
            self.counted_ns = max(now_ns, self.since_ns)
            self.total_ns += self.counted_ns - self.since_ns

    def at(self, now_ns: int) -> int:
        return self.total_ns + (now_ns - self.since_ns if self.num_open else 0)


class Timeline(AbstractContextManager["Timeline"]):
    """Writes spans and counters as they end; safe to call from several threads. The file appears whole, under its name, on `close`."""

    def __init__(self, path: Path, *, devices: Mapping[str, str] | None = None) -> None:
        """
        Args:
            path: path of the JSON file, which is written under a temporary name until `close`.
            devices: {role: device it computes on}; the utilisation of a device joins the spans of its roles.

        Raises UserError: the file cannot be written.
        """
        self.path = path
        self._devices = dict(devices or {})
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._roles: dict[str, int] = {}
        self._busy: dict[str, _Busy] = {}
        self._device_busy: dict[str, _Busy] = {}
        self._first_ns: int | None = None
        self._last_ns = 0
        self._num_events = self.num_dropped = 0
        self._separator = ""
        self._temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}{path.suffix}")
        with writing_to(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO | None = self._temporary.open("w", encoding="utf-8")
            self._file.write(_HEAD)

    # ---- events -----------------------------------------------------------------------------------------------------

    def record(self, role: str, name: str, begin_ns: int, end_ns: int) -> None:
        """Write a finished bar, in nanoseconds of `time.perf_counter_ns`; bars of one role come in order and do not overlap."""
        self._begin(role, begin_ns)
        bar = _Span(self, role, name, {})
        bar.begin_ns = begin_ns
        self._end(bar, end_ns)

    def counter(self, name: str, **values: float) -> None:
        """Write a point of a curve (or of several, stacked): ``counter("queue", ready=3, held=7)``."""
        now = time.perf_counter_ns()
        with self._lock:
            event = {"ph": "C", "pid": os.getpid(), "tid": 0, "ts": now / 1000, "name": name, "args": values}
            self._write(event)

    def curves_of(self, metrics: Mapping[str, float]) -> None:
        """Write queue lengths and ages from a run's metrics (`rollout.queue_pump.batch_figures`) as curves."""
        lengths = {name: metrics[key] for name in ("ready", "held", "in_flight") if (key := f"groups/{name}") in metrics}
        if lengths:
            self.counter("groups", **lengths)
        for place in ("groups", "rollout"):
            found = {key.removeprefix(f"{place}/age_"): value for key, value in metrics.items() if key.startswith(f"{place}/age_")}
            if ages := {int(age): int(count) for age, count in found.items() if age.isdigit()}:
                self.counter(f"{place} by age", **{str(age): float(count) for age, count in sorted(ages.items())})

    def shares(self) -> Shares:
        """Shares of everything so far; open spans count up to now."""
        with self._lock:
            now = time.perf_counter_ns() if any(busy.num_open for busy in self._busy.values()) else self._last_ns
            elapsed = max(now - self._first_ns, 1) if self._first_ns is not None else 1
            of = {role: busy.at(now) / elapsed for role, busy in sorted(self._busy.items())}
            devices = {device: busy.at(now) / elapsed for device, busy in sorted(self._device_busy.items())}
            return Shares(elapsed / 1e9 if self._first_ns is not None else 0.0, of, devices)

    def close(self) -> None:
        """Complete the file and rename it to its path; may be called twice. Raises UserError if that fails."""
        with self._lock:
            if self._file is None:
                return
            file, self._file = self._file, None
            try:
                file.write(self._separator + ",\n".join(self._lines) + "\n]}\n" if self._lines else "\n]}\n")
                file.close()
                fsync(self._temporary)
                os.replace(self._temporary, self.path)
            except OSError as error:
                raise cannot_write(self.path, error) from error
            finally:
                self._temporary.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _begin(self, role: str, now_ns: int) -> None:
        with self._lock:
            if self._first_ns is None:
                self._first_ns = now_ns
            for busy in self._busy_of(role):
                busy.begin(now_ns)

    def _end(self, span: _Span, now_ns: int) -> None:
        with self._lock:
            self._last_ns = max(self._last_ns, now_ns)
            for busy in self._busy_of(span.role):
                busy.end(now_ns)
            event: dict[str, Any] = {"ph": "X", "pid": self._row(span.role), "tid": threading.get_native_id()}
            # Not relative to this timeline's begin: the monotonic clock is the machine's, so that files of several processes can be merged.
            event |= {"ts": span.begin_ns / 1000, "dur": (now_ns - span.begin_ns) / 1000, "name": span.name, "cat": span.role}
            self._write(event | ({"args": span.arguments} if span.arguments else {}))

    def _busy_of(self, role: str) -> list[_Busy]:
        found = [self._busy.setdefault(role, _Busy())]
        device = self._devices.get(role)
        return found if device is None else [*found, self._device_busy.setdefault(device, _Busy())]

    def _row(self, role: str) -> int:
        """Make each role a process of the viewer, so that its threads are together under its name."""
        if role not in self._roles:
            # Far apart for different processes, so that merged files keep their rows.
            self._roles[role] = os.getpid() * 100 + len(self._roles)
            named = f"{role} ({self._devices[role]})" if role in self._devices else role
            self._write({"ph": "M", "pid": self._roles[role], "name": "process_name", "args": {"name": named}})
        return self._roles[role]

    def _write(self, event: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        if self._num_events >= MOST_EVENTS:
            self.num_dropped += 1
            return
        self._num_events += 1
        self._lines.append(json.dumps(event, separators=(",", ":")))
        if len(self._lines) >= _FLUSH_EVERY:
            self._file.write(self._separator + ",\n".join(self._lines))
            self._separator, self._lines = ",\n", []


class _Span:
    __slots__ = ("_timeline", "arguments", "begin_ns", "name", "role")

    def __init__(self, timeline: Timeline, role: str, name: str, arguments: Mapping[str, float | str]) -> None:
        self._timeline, self.role, self.name, self.arguments = timeline, role, name, arguments
        self.begin_ns = 0

    def __enter__(self) -> _Span:
        self.begin_ns = time.perf_counter_ns()
        self._timeline._begin(self.role, self.begin_ns)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timeline._end(self, time.perf_counter_ns())


_NOTHING = nullcontext()
_current: Timeline | None = None


def span(role: str, name: str, **arguments: float | str) -> AbstractContextManager[Any]:
    """A bar in this process's open timeline; does nothing if none is open."""
    return _NOTHING if _current is None else _Span(_current, role, name, arguments)


def counter(name: str, **values: float) -> None:
    """Write a point of a curve to this process's open timeline; does nothing if none is open."""
    if _current is not None:
        _current.counter(name, **values)


def record(role: str, name: str, begin_ns: int, end_ns: int) -> None:
    """Write a bar of another process on this machine, in nanoseconds of `time.perf_counter_ns`; a role's bars come in order."""
    if _current is not None:
        _current.record(role, name, begin_ns, end_ns)


@contextmanager
def timeline_to(path: Path, *, devices: Mapping[str, str] | None = None) -> Iterator[Timeline]:
    """Record this process's `span`s and `counter`s until the block ends, also with an error.
    Raises UserError: the file cannot be written; RuntimeError: a timeline is already open."""
    global _current
    if _current is not None:
        raise RuntimeError(f"A timeline is being written to '{_current.path}' already.")
    with Timeline(path, devices=devices) as timeline:
        _current = timeline
        try:
            yield timeline
        finally:
            _current = None
