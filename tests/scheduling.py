"""In which order the workers of `make test` take the tests: files whole, the longest first, tests of many seconds by themselves.

A file that is begun last and takes a minute keeps one worker busy while the others have nothing left to do. `durations.json` has the
seconds of the last runs; `make test ARGS=--store-durations` writes those of the files that it runs.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
WORTH_A_LINE_S = 1.0
ALONE_S = 60.0
"""A test of so many seconds waits for no other of its file. What its file's fixtures take is spent once more."""
SHORT_S = 0.1
"""What a test takes that has no line."""
TOGETHER = {
    f"tests/{file}.py": "tests/sim/robots/test_configs.py"
    for file in (
        "episodes/formats/test_maniskill",
        "sim/robots/test_experts",
        "sim/robots/test_maniskill",
        "sim/robots/test_maniskill_batch",
        "sim/robots/test_maniskill_batch_faults",
        "sim/robots/test_maniskill_modes",
        "sim/robots/test_snapshots_maniskill",
        "sim/robots/test_unread",
        "sim/test_film",
        "sim/text/test_adapters",
        "sim/text/test_gem",
    )
}
"""Files that the worker of another file runs: of every process ManiSkill's imports take 2.5 s, SAPIEN's first picture 6.5 s, and the
imports of text games 4 s."""


@cache
def known_durations() -> dict[str, float]:
    """Seconds by a test's node id, and what fixtures of a file take by the file."""
    durations: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    return durations


def unit_of(nodeid: str) -> str:
    """What one worker runs in one piece: the test's file with those that go with it, or the test itself where it is long."""
    file = nodeid.split("::", 1)[0]
    return nodeid if known_durations().get(nodeid, 0.0) >= ALONE_S else TOGETHER.get(file, file)


def longest_first(nodeids: list[str]) -> dict[str, float]:
    """Seconds of each unit of these tests, the longest first."""
    durations, seconds = known_durations(), Counter[str]()
    for nodeid in nodeids:
        seconds[unit_of(nodeid)] += durations.get(nodeid, SHORT_S)
    for file in {nodeid.split("::", 1)[0] for nodeid in nodeids if "::" not in unit_of(nodeid)}:
        seconds[TOGETHER.get(file, file)] += durations.get(file, 0.0)  # its fixtures
    return dict(seconds.most_common())


class Scheduling:
    """Part of pytest where tests are distributed over workers; the workers themselves have it too."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._took: Counter[str] = Counter()
        # Whose order is by the number of tests of a file.
        config.option.loadscopereorder = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if "PYTEST_XDIST_WORKER" in os.environ:
            place = {unit: number for number, unit in enumerate(longest_first([item.nodeid for item in items]))}
            items.sort(key=lambda item: place[unit_of(item.nodeid)])

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: object) -> object:
        if config.getvalue("dist") != "loadfile":
            return None
        from xdist.scheduler import LoadFileScheduling

        class LongestFirst(LoadFileScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return unit_of(nodeid)

        return LongestFirst(config, log)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid if report.when == "call" else report.nodeid.split("::", 1)[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self._config.getoption("--store-durations") and "PYTEST_XDIST_WORKER" not in os.environ:
            ran = {name.split("::", 1)[0] for name in self._took}
            kept = {name: seconds for name, seconds in known_durations().items() if name.split("::", 1)[0] not in ran}
            kept |= {name: round(seconds, 1) for name, seconds in self._took.items() if seconds >= WORTH_A_LINE_S}
            DURATIONS.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n", encoding="utf-8")
