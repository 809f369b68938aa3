"""Letting contenders take turns: each trains in a process of its own and stops at a gate between two of its iterations.

The parent opens the gate for a number of iterations; the contender reports how long they took and waits again. It runs its
own unmodified training loop and calls `Gate.begin` at the beginning of each iteration. Requests and reports are JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal, TextIO

Phase = Literal["environment", "policy", "update"]
PHASES: tuple[Phase, ...] = ("environment", "policy", "update")


class Stop(BaseException):
    """The parent has had enough; not an Exception, so that no library swallows it."""


@dataclass(frozen=True)
class Segment:
    """What a contender reports after each opening of the gate."""

    iterations: int
    seconds: float
    """Wall-clock from the beginning of the first iteration to the beginning of the one that has to wait; 0 where there was none."""
    phases: dict[str, float]
    """Seconds of each phase; they add up to `seconds`."""
    processor_s: float = 0.0
    """Of the contender's own process, without its simulators'; 0 where it was not taken."""


class Gate:
    """The contender's side. It accounts for two of the three phases with `add`; the third is the rest."""

    def __init__(self, requests: TextIO, reports: TextIO, rest: Phase) -> None:
        self._requests, self._reports, self._rest = requests, reports, rest
        self._facts: dict[str, Any] = {}
        self._iterations = self._left = 0
        self._started = self._processor_s = 0.0
        self._phases: dict[str, float] = {}

    def tell(self, **facts: Any) -> None:
        """Say something about the contender; it goes with the next report."""
        self._facts |= facts

    def begin(self) -> None:
        """An iteration is about to begin. Raises Stop when there shall be no more."""
        if self._left == 0:
            self._report(time.perf_counter() - self._started if self._iterations else 0.0)
            self._iterations = self._left = self._wait()
            self._phases = dict.fromkeys(PHASES, 0.0)
            self._started, self._processor_s = time.perf_counter(), time.process_time()
        self._left -= 1

    def add(self, phase: Phase, seconds: float) -> None:
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds

    def _report(self, seconds: float) -> None:
        if self._iterations:
            self._phases[self._rest] = seconds - sum(self._phases[phase] for phase in PHASES if phase != self._rest)
        processor_s = time.process_time() - self._processor_s if self._iterations else 0.0
        segment = {"iterations": self._iterations, "seconds": seconds, "phases": self._phases, "processor_s": processor_s}
        print(json.dumps({**segment, "facts": self._facts}), file=self._reports, flush=True)

    def _wait(self) -> int:
        line = self._requests.readline()
        if not line or json.loads(line)["go"] == 0:
            raise Stop
        return int(json.loads(line)["go"])


def gate_of_this_process(rest: Phase) -> Gate:
    """The gate to the parent over this process's own stdin and stdout; what libraries print goes to stderr from now on."""
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return Gate(sys.stdin, reports, rest)


class GatedProcess:
    """The parent's side: a contender that has been started and waits at its gate."""

    def __init__(self, name: str, command: list[str], timeout_s: float = 180.0) -> None:
        self.name, self._timeout_s = name, timeout_s
        self.facts: dict[str, Any] = {}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Until the contender is about to begin its first iteration. Raises RuntimeError when it failed."""
        self._receive()

    def run(self, iterations: int) -> Segment:
        """Let it train for so many iterations. Raises RuntimeError when it failed or takes longer than the time-out."""
        self._send(iterations)
        return self._receive()

    def close(self) -> None:
        """Ask the contender to end and wait for it, or kill it."""
        with contextlib.suppress(OSError, ValueError):
            self._send(0)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _send(self, iterations: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"go": iterations}).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self) -> Segment:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            # One line per request, so nothing can lie in the pipe's own buffer.
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(self._timeout_s):
                raise RuntimeError(f"contender '{self.name}' did not answer within {self._timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"contender '{self.name}' ended with status {self._process.wait()}; its own message stands above")
        report = json.loads(line)
        self.facts = report.pop("facts")
        return Segment(**report)
