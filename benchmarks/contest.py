"""Sides of an environment benchmark taking turns: each in a process of its own, one at a time is let run.

`python contest.py SIDE` is such a process: it builds the side that the JSON describes and speaks the protocol of `gate.py`
over its stdin and stdout; an iteration is one step of all environments.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from gate import GatedProcess
from steppers import NEEDS, Side, side_from_dict, start

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Entry:
    """One row of the table."""

    name: str
    side: Side
    python: str = sys.executable
    """The interpreter that runs it."""


@dataclass
class Measured:
    """What was measured of one entry."""

    us: list[float] = field(default_factory=list)
    """Wall-clock microseconds per environment step, one per round."""
    cpu_us: float = 0.0
    """Processor time of all its processes per environment step, over all rounds; what they burn while waiting is in it."""

    @property
    def median(self) -> float:
        return statistics.median(self.us)


class Contender:
    """A started entry."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.steps_per_segment = 0
        self.measured = Measured()
        self._process = GatedProcess(entry.name, [entry.python, str(HERE / "contest.py"), json.dumps(dataclasses.asdict(entry.side))])
        self._total_steps = 0
        self._cpu_s = 0.0
        self._measured_steps = 0
        self._tree: list[psutil.Process] = []

    def wait_until_ready(self) -> None:
        self._process.wait_until_ready()
        root = psutil.Process(self._process.pid)
        self._tree = [root, *root.children(recursive=True)]

    def segment(self, num_steps: int) -> float:
        """Seconds for this many steps of all environments."""
        seconds = self._process.run(num_steps).seconds
        self._total_steps += num_steps
        return seconds

    def calibrate(self, segment_s: float) -> None:
        """Warm up, then choose how many steps make a segment of about `segment_s` seconds."""
        self.segment(20)
        self.steps_per_segment = max(10, round(segment_s / (self.segment(50) / 50)))

    def measure(self) -> None:
        """One round."""
        num_envs = self.entry.side.num_envs
        before = self._cpu_seconds()
        self.measured.us.append(1e6 * self.segment(self.steps_per_segment) / (self.steps_per_segment * num_envs))
        self._cpu_s += self._cpu_seconds() - before
        self._measured_steps += self.steps_per_segment * num_envs
        self.measured.cpu_us = 1e6 * self._cpu_s / self._measured_steps

    def check_counts(self, modulus: int) -> None:
        """Of environments that report their number of steps: every step must have arrived, exactly once, in every one of them.

        Raises:
            AssertionError: it did not.
        """
        counts = self._process.facts["counts"]
        if any(count != self._total_steps % modulus for count in counts):
            raise AssertionError(f"{self.entry.name}: after {self._total_steps} steps the environments report {counts} (modulo {modulus}).")

    def close(self) -> None:
        self._process.close()

    def _cpu_seconds(self) -> float:
        total = 0.0
        for process in self._tree:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
        return total


def contest(entries: Sequence[Entry], rounds: int, segment_s: float, count_modulus: int | None = None) -> dict[str, Measured]:
    """{name: what was measured}; all are alive, one after another is stepped in each round.

    Args:
        entries: the sides.
        rounds: how often each is measured.
        segment_s: about how long each time.
        count_modulus: the first entry of an observation is the number of steps, modulo this: look whether it is.
    """
    running: list[Contender] = []
    try:
        for entry in entries:
            running.append(Contender(entry))
            running[-1].wait_until_ready()
        for contender in running:
            contender.calibrate(segment_s)
        for _ in range(rounds):
            for contender in running:
                contender.measure()
        if count_modulus is not None:
            for contender in running:
                contender.check_counts(count_modulus)
    finally:
        for contender in running:
            contender.close()
    return {contender.entry.name: contender.measured for contender in running}


def add_arguments(parser: argparse.ArgumentParser, rounds: int, segment_s: float) -> None:
    """What the environment benchmarks are asked alike."""
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--segment-s", type=float, default=segment_s, help="seconds that each side is measured in each round")
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="SIDE=PATH",
        help=f"another interpreter for a side whose library this one does not have ({', '.join(NEEDS)})",
    )


def only_possible(entries: Sequence[Entry], pythons: Sequence[str]) -> tuple[list[Entry], list[str]]:
    """The entries that can run, each with its interpreter, and a line about every one that is left out.

    Args:
        entries: all.
        pythons: "SIDE=PATH" as given to ``--python``.
    """
    chosen = dict(text.split("=", 1) for text in pythons)
    possible, notes = [], []
    reasons: dict[str, str | None] = {}
    for entry in entries:
        kind = entry.side.kind
        if kind not in reasons:
            reasons[kind] = _missing(kind, chosen)
        if reasons[kind] is None:
            possible.append(dataclasses.replace(entry, python=chosen.get(kind, sys.executable)))
        else:
            notes.append(f"left out: {entry.name} ({reasons[kind]})")
    return possible, notes


def _missing(kind: str, pythons: Mapping[str, str]) -> str | None:
    """Why a side cannot run, or None."""
    module = NEEDS.get(kind)
    if module is None:
        return None
    if kind in pythons:
        done = subprocess.run([pythons[kind], "-c", f"import {module}, psutil"], capture_output=True, text=True, check=False)
        return None if done.returncode == 0 else f"{pythons[kind]}: {done.stderr.strip().splitlines()[-1]}"
    if importlib.util.find_spec(module) is not None:
        return None
    return f"'{module}' is not installed here; --python {kind}=PATH names an interpreter that has it"


def main() -> None:
    """The process of one side."""
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print
    if importlib.util.find_spec("embodied_rl") is None:  # another interpreter, for a library of its own, does not have us installed
        sys.path.append(str(HERE.parent))
    stepper = start(side_from_dict(json.loads(sys.argv[1])))

    def report(num_steps: int, seconds: float) -> None:
        observation = stepper.observations()
        counts = [int(count) for count in observation.reshape(len(observation), -1)[:, 0]]
        print(
            json.dumps({"iterations": num_steps, "seconds": seconds, "phases": {}, "facts": {"counts": counts}}), file=reports, flush=True
        )

    try:
        report(0, 0.0)
        while (line := sys.stdin.readline()) and (num_steps := json.loads(line)["go"]):
            started = time.perf_counter()
            stepper.run(num_steps)
            report(num_steps, time.perf_counter() - started)
    finally:
        stepper.close()


if __name__ == "__main__":
    main()
