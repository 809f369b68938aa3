"""Programs as answers, run against tests in the sandbox: the tests check what a program prints, or what its functions return.

Expected values never enter the program's process; they are compared here.
"""

from __future__ import annotations

import ast
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from embodied_rl.errors import UserError, require_known
from embodied_rl.sandbox.box import Box, ProgramEnd, PythonLimits, protection, run_program
from embodied_rl.sim.text.questions import example, read_rows
from embodied_rl.sim.text.tasks import TaskSim, TextTask
from embodied_rl.specs import Json

Score = Literal["all", "share"]
"""all: 1 for a program that passes every test, else 0. share: the share of passed tests."""

_BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_TOLERANCE = 1e-6
_SHOWN = 300
"""Most characters of a value in feedback."""
_HARNESS = """
import sys
names = {{"__name__": "solution"}}
exec(compile({code!r}, "program.py", "exec"), names)
for number, call in enumerate({calls!r}):
    try:
        answer = repr(eval(call, names))
    except BaseException as error:
        answer = "!" + type(error).__name__ + ": " + str(error)
    sys.__stdout__.write("\\n{mark} %d %s\\n" % (number, answer.replace("\\n", " ")))
    sys.__stdout__.flush()
"""


@dataclass(frozen=True)
class CodeTest:
    """One test: a call and its value, or an input and the expected output."""

    call: str | None = None
    result: Json = None
    stdin: str = ""
    stdout: str = ""

    @property
    def wanted(self) -> str:
        """The expectation as a sentence for the agent."""
        if self.call is not None:
            return f"{self.call} must give {_short(repr(self.result))}"
        return f"the input {_short(repr(self.stdin))} must print {_short(repr(self.stdout))}"


@dataclass(frozen=True)
class CodeProblem:
    """A question, and the tests of its answers."""

    text: str
    tests: tuple[CodeTest, ...]


@dataclass(frozen=True)
class CodeReport:
    """Result of the tests."""

    passed: tuple[bool, ...]
    first_failure: str
    """Expected and actual value of the first failed test; empty: all passed."""

    @property
    def share(self) -> float:
        return sum(self.passed) / len(self.passed)


def program_of(answer: str) -> str:
    """Last block of Python between triple backticks, or the whole answer if there is none."""
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else answer


def run_tests(code: str, tests: Sequence[CodeTest], box: Box) -> CodeReport:
    """Run a program against tests: all calls in one process, each input in a separate one."""
    problems: list[str] = [""] * len(tests)  # why each failed
    calls = [index for index, test in enumerate(tests) if test.call is not None]
    if calls:
        found = _call(code, [str(tests[index].call) for index in calls], box)
        for index, (value, problem) in zip(calls, found, strict=True):
            right = not problem and _same(value, tests[index].result)
            problems[index] = "" if right else f"{tests[index].wanted}; it gave {_short(problem or value)}"
    for index, test in enumerate(tests):
        if test.call is None:
            problems[index] = _print(code, test, box)
    return CodeReport(tuple(not reason for reason in problems), next((reason for reason in problems if reason), ""))


def _call(code: str, calls: list[str], box: Box) -> list[tuple[str, str]]:
    """(value in Python's notation, reason why there is none) of each call."""
    mark = secrets.token_hex(16)  # distinguishes results from the program's own output
    ended = run_program(_HARNESS.format(code=code, calls=calls, mark=mark), box, separate=True)
    # A program may find the mark and write such lines itself.
    lines = (line.removeprefix(f"{mark} ").partition(" ") for line in ended.output.splitlines() if line.startswith(f"{mark} "))
    found = {number: value for number, _, value in lines}
    missing = _why(ended, box)
    results = [found.get(str(index)) for index in range(len(calls))]
    return [("", missing) if value is None else ("", value[1:]) if value.startswith("!") else (value, "") for value in results]


def _print(code: str, test: CodeTest, box: Box) -> str:
    """Reason why a test of printed output failed; empty: it passed."""
    ended = run_program(code, box, stdin=test.stdin, separate=True)
    if ended.timed_out or ended.status != 0:
        return f"{test.wanted}; {_short(_why(ended, box))}"
    given, wanted = ended.output.split(), test.stdout.split()
    if len(given) == len(wanted) and all(_same_word(one, other) for one, other in zip(given, wanted, strict=True)):
        return ""
    return f"{test.wanted}; it printed {_short(repr(ended.output))}"


def _why(ended: ProgramEnd, box: Box) -> str:
    if ended.timed_out:
        return f"it did not end within {box.timeout_s:g} s"
    if ended.stopped:
        return f"it was stopped: {ended.stopped}"
    last = (ended.errors.strip().splitlines() or [f"it ended with status {ended.status}"])[-1]
    return f"it failed: {last}" if ended.status else "it ended before the call"


def _same(written: str, wanted: Json) -> bool:
    try:
        return _equal(ast.literal_eval(written), wanted)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _equal(given: object, wanted: Json) -> bool:
    """Compare as JSON values: tuples are lists; numbers agree to a millionth; true is not 1."""
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, (int, float)) and isinstance(wanted, (int, float)):
        try:
            return given == wanted or abs(given - wanted) <= _TOLERANCE * max(abs(wanted), 1.0)
        except OverflowError:  # an integer beyond all floats, and a float
            return False
    if isinstance(given, (list, tuple)) and isinstance(wanted, (list, tuple)):
        return len(given) == len(wanted) and all(_equal(one, other) for one, other in zip(given, wanted, strict=True))
    if isinstance(given, dict) and isinstance(wanted, dict):
        own = {str(key): value for key, value in given.items()}
        return own.keys() == wanted.keys() and all(_equal(own[key], wanted[key]) for key in own)
    return type(given) is type(wanted) and given == wanted


def _same_word(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    try:
        one, other = float(given), float(wanted)
    except ValueError:
        return False
    return "." in wanted and abs(one - other) <= _TOLERANCE * max(abs(other), 1.0)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


@dataclass(eq=False)
class CodeTask(TextTask):
    """A problem, and up to `attempts` programs for it. Raises UserError: a number out of its range, or this machine's protection is weaker
    than `sandbox`."""

    problems: Sequence[CodeProblem]
    attempts: int = 1
    score: Score = "all"
    timeout_s: float = 5.0
    """Seconds for one run; all calls of a problem are one run."""
    memory_mb: int = 512
    allow_network: bool = False
    """Programs may use the network; all other limits stay."""
    sandbox: str = "landlock"
    """Weakest acceptable protection (`embodied_rl.sandbox.box`)."""
    show_tests: bool = True
    """Show the first failed test before the next attempt."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise UserError(f"attempts must be >= 1, got {self.attempts}.")
        require_known(self.score, get_args(Score), f"score='{self.score}' is not a choice.")
        limits = PythonLimits(timeout_s=self.timeout_s, memory_mb=self.memory_mb)
        self._box = limits.box(protection(self.sandbox, "sim.kwargs.sandbox"), network=self.allow_network)
        self.max_turns = self.attempts
        self.instruction = "Answer with one Python program between ```python and ```."
        self._number, self._turn, self._best = 0, 0, 0.0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._number, self._turn, self._best = int(np.random.default_rng(seed).integers(len(self.problems))), 0, 0.0
        return self.problems[self._number].text, {"problem": self._number}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `TextTask.step`. Rewards of several attempts add up to the best one's score."""
        self._turn += 1
        problem = self.problems[self._number]
        report = run_tests(program_of(action), problem.tests, self._box)
        right = all(report.passed)
        score = report.share if self.score == "share" else float(right)
        reward, self._best = max(score - self._best, 0.0), max(score, self._best)
        over = right or self._turn >= self.max_turns
        text = "All tests passed." if right else f"{sum(report.passed)} of {len(report.passed)} tests passed."
        if not over:
            shown = f" The first that failed: {report.first_failure}." if self.show_tests else ""
            text = f"{text}{shown} Try again.\n{problem.text}"
        return text, reward, over, False, {"success": right and over, "passed": sum(report.passed), "tests": len(report.passed)}

    def sample_random_action(self) -> str:
        """A program that does nothing."""
        return "```python\npass\n```"

    def get_state(self) -> dict[str, Any]:
        return {"number": self._number, "turn": self._turn, "best": self._best}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._number, self._turn, self._best = int(state["number"]), int(state["turn"]), float(state["best"])


def make(
    num_envs: int,
    path: str | None = None,
    task: str = "code",
    attempts: int = 1,
    score: Score = "all",
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    allow_network: bool = False,
    sandbox: str = "landlock",
    show_tests: bool = True,
) -> TaskSim:
    """`num_envs` environments over a data set of problems.

    Args:
        path: a .jsonl file of {"question": text, "tests": [test, …]}; a test is {"call": "add(1, 2)", "result": 3} or
            {"stdin": text, "stdout": text}. None: a few of our own examples.
        attempts, score, timeout_s, memory_mb, allow_network, sandbox, show_tests: see `CodeTask`.

    Raises UserError: the file cannot be read, a line is not a problem, or this machine's protection is weaker than `sandbox`.
    """
    problems = [_problem(row, where) for where, row in read_rows(path or example("code.jsonl"), ("question", "tests"))]
    rules = partial(CodeTask, problems, attempts, score, timeout_s, memory_mb, allow_network, sandbox, show_tests)
    return TaskSim(task, num_envs, rules)


def _problem(row: Mapping[str, Any], where: str) -> CodeProblem:
    text, tests = row["question"], row["tests"]
    if not isinstance(text, str) or not text.strip() or not isinstance(tests, list) or not tests:
        raise UserError(f"Data set {where}: question must be a text and tests a list of at least one.")
    return CodeProblem(text, tuple(_test(test, f"{where}, test {number}") for number, test in enumerate(tests, start=1)))


def _test(test: Json, where: str) -> CodeTest:
    if isinstance(test, dict) and test.keys() == {"call", "result"} and isinstance(test["call"], str):
        try:
            ast.parse(test["call"], mode="eval")
        except SyntaxError as error:
            raise UserError(f"Data set {where}: call must be a Python expression, got {test['call']!r:.60}.") from error
        return CodeTest(call=test["call"], result=test["result"])
    if isinstance(test, dict) and test.keys() in ({"stdin", "stdout"}, {"stdout"}) and all(isinstance(part, str) for part in test.values()):
        return CodeTest(stdin=test.get("stdin", ""), stdout=test["stdout"])
    raise UserError(
        f'Data set {where} must be {{"call": expression, "result": value}} or {{"stdin": text, "stdout": text}}, got {test!r:.80}.'
    )
