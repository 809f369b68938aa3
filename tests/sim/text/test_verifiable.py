"""Tasks whose rewards can be checked: arithmetic and questions, programs against tests, and answers before a judge's real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.errors import UserError
from embodied_rl.sandbox.box import PythonLimits, run_program, strongest
from embodied_rl.sim.check import check_sim
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.text import code_tasks, judged, questions, tasks
from embodied_rl.sim.text.code_tasks import CodeProblem, CodeTask, CodeTest, program_of, run_tests
from embodied_rl.sim.text.judged import Judge, JudgeError, JudgeOptions
from embodied_rl.sim.text.tasks import TaskSim
from embodied_rl.types import StepBuffers
from tests.generation.token_servers import Exchange, TokenServer
from tests.service.servers import pauses_take_no_time

LEVEL = strongest() or "prlimit"
BOX = PythonLimits(timeout_s=120.0).box(LEVEL)


def play(sim: TaskSim, seed: int, *answers: str) -> list[tuple[str, float, bool, bool, bool, dict[str, Any]]]:
    """(text, reward, terminated, truncated, success, info) of each answer in environment 0."""
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [seed], out)
    told = []
    for answer in answers:
        sim.step([0], [answer], out)
        flags = bool(out.terminated[0]), bool(out.truncated[0]), bool(out.success[0])
        told.append((str(out.observation["text"][0]), float(out.reward[0]), *flags, dict(out.info[0] or {})))
    return told


def first_text(sim: TaskSim, seed: int) -> str:
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [seed], out)
    return str(out.observation["text"][0])


# ---- arithmetic and questions ---------------------------------------------------------------------------------------


def test_arithmetic_is_what_python_computes() -> None:
    from fractions import Fraction

    source = questions.Arithmetic(("+", "-", "*", "/"), (2, 5), (1, 3))
    seen = set()
    for seed in range(200):
        question = source.question(seed)
        expression = question.text.removesuffix(" = ?")
        words = [f"Fraction({word})" if word.isdigit() else word for word in expression.split()]
        assert eval(" ".join(words), {"Fraction": Fraction}) == Fraction(question.answer), expression
        seen.add(expression)
    assert len(seen) > 150
    assert source.question(3) == source.question(3)


def test_attempts_are_turns_and_the_right_answer_ends_them() -> None:
    sim = questions.make_arithmetic(1, attempts=3, wrong_reward=-0.25)
    question = first_text(sim, 5)
    answer = eval(question.removesuffix(" = ?"))
    wrong, none, right = play(sim, 5, f"It is {answer + 1}.", "hm", f"So \\boxed{{{answer}}}")
    assert wrong[:5] == (f"Wrong. Try again.\n{question}", -0.25, False, False, False)
    assert none[0].startswith("There is no answer. Try again.")
    assert right[:5] == ("Right.", 1.0, True, False, True)
    assert sim.spec.max_episode_steps == 3
    assert play(sim, 5, "x", "x", "x")[-1][:5] == ("There is no answer.", -0.25, True, False, False)


@pytest.mark.parametrize(
    "target",
    [
        "embodied_rl.sim.text.questions:make_arithmetic",
        "embodied_rl.sim.text.questions:make_questions",
        "tests.sim.text.test_verifiable:Counter",
    ],
)
def test_they_are_well_behaved_simulators(target: str) -> None:
    if target.endswith("Counter"):
        factory = SimFactory("embodied_rl.sim.text.tasks:make", kwargs={"environment": target, "upto": 4})
    else:
        factory = SimFactory(target, kwargs={"attempts": 2})
    report = check_sim(factory, steps=30, continuation_steps=20)
    assert report.ok, report


class Counter:
    """Somebody's own environment: count upwards, so many numbers."""

    def __init__(self, upto: int) -> None:
        self.upto, self.at, self.end = upto, 0, 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.at = seed % 1009
        self.end = self.at + self.upto
        return str(self.at), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.at += action.strip() == str(self.at + 1)
        over = self.at >= self.end
        return str(self.at), float(over), over, False, {}

    def sample_random_action(self) -> str:
        return str(self.at + 1)

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at, "end": self.end}

    def set_state(self, state: dict[str, Any]) -> None:
        self.at, self.end = state["at"], state["end"]


def test_an_environment_with_five_methods_is_a_simulator() -> None:
    sim = tasks.make(1, "tests.sim.text.test_verifiable:Counter", upto=2)
    steps = play(sim, 2, "3", "7", "4")
    assert [step[0] for step in steps] == ["3", "3", "4"]
    assert [step[1:5] for step in steps] == [(0.0, False, False, False), (0.0, False, False, False), (1.0, True, False, True)]
    with pytest.raises(UserError, match="has no method 'get_state'"):
        TaskSim("x", 1, lambda: object.__new__(type("Half", (), {"reset": print, "step": print, "sample_random_action": print})))
    with pytest.raises(UserError, match=r"cannot be made with .*unexpected keyword argument 'up'"):
        SimFactory("embodied_rl.sim.text.tasks:make", kwargs={"environment": "tests.sim.text.test_verifiable:Counter", "up": 4}).make(1)


def test_our_examples_are_answered_by_their_own_answers() -> None:
    for question in questions.read_questions(questions.example("questions.jsonl")):
        task = questions.QuestionTask(lambda seed, question=question: question)  # type: ignore[misc]
        task.reset(0)
        assert task.step(f"I think \\boxed{{{question.answer}}}")[1] == 1.0, question
        task.reset(0)
        assert task.step("\\boxed{none of these}")[1] == 0.0, question


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("{", "line 1 is not JSON"),
        ('{"question": "x"}', "line 1 must be an object with question and answer"),
        ('{"question": "x", "answer": "1", "anser": 2}', "'anser' is not known. Did you mean 'answer'"),
        ('{"question": "x", "answer": "1"}\n\n{"question": " ", "answer": 2}', "line 3: question must be a text"),
        ('{"question": "x", "answer": ""}', "the answer is empty"),
        ('{"question": "x", "answer": true}', "answer a text or a number"),
        ('{"question": "x", "answer": "1", "kind": "nmber"}', "kind='nmber' is not a kind of answers. Did you mean 'number'"),
        ('{"question": "x", "answer": "E", "choices": ["a", "b"]}', "one of the letters A to B"),
        ('{"question": "x", "answer": "A", "choices": ["a"]}', "choices must be 2 to 26 texts"),
    ],
)
def test_a_bad_data_set_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=told):
        questions.make_questions(1, str(path))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"operations": ["x"]}, "operations='x' is not a choice"),
        ({"terms": [3, 2]}, r"terms must be \[least, most\]"),
        ({"digits": 3}, "digits must be"),
        ({"attempts": 0}, "attempts must be >= 1"),
        ({"atempts": 2}, "Did you mean 'attempts'"),
        ({"template": "no"}, "template must name"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        SimFactory("embodied_rl.sim.text.questions:make_arithmetic", kwargs=options).make(1)


# ---- programs -------------------------------------------------------------------------------------------------------


def test_the_program_is_the_last_block() -> None:
    assert program_of("first\n```python\na = 1\n```\nthen\n```\nb = 2\n```\n") == "b = 2\n"
    assert program_of("a = 1") == "a = 1"


@pytest.mark.parametrize(
    ("code", "passed"),
    [
        ("def add(a, b):\n    return a + b", (True, True, True)),
        ("def add(a, b):\n    return abs(a) + b", (True, False, True)),
        ("def add(a, b):\n    print('0123 3')\n    return a + b", (True, True, True)),
        ("def add(a, b):\n    raise ValueError('no')", (False, False, False)),
        ("import sys\nsys.exit(0)", (False, False, False)),
        ("def add(a, b):\n    import os\n    os._exit(0)", (False, False, False)),
        ("from __future__ import annotations\ndef add(a, b):\n    return sum([a, b])", (True, True, True)),
        ("def add(a, b): return 3 if __name__ == '__main__' else True", (False, False, False)),
        ("def add(a, b", (False, False, False)),
        ("class X:\n    def __eq__(self, other): return True\ndef add(a, b): return X()", (False, False, False)),
        (
            # It finds out how answers are written, and writes what is none.
            "import os, sys\nmark = [one for one in sys._getframe(1).f_code.co_consts if str(one).startswith('\\n') and '%d' in one][0]\n"
            "print(mark.split()[0], 'x y'); print(mark.split()[0], '0 3', flush=True); os._exit(0)",
            (True, False, False),
        ),
    ],
)
def test_calls_are_compared_outside_of_the_program(code: str, passed: tuple[bool, ...]) -> None:
    tests = [CodeTest(call="add(1, 2)", result=3), CodeTest(call="add(-5, 5)", result=0), CodeTest(call="add(.1, .2)", result=0.3)]
    assert run_tests(code, tests, BOX).passed == passed


def test_values_are_compared_as_json_knows_them() -> None:
    tests = [CodeTest(call="f(1)", result=[1, [2.5]]), CodeTest(call="f(2)", result={"1": True}), CodeTest(call="f(3)", result=1)]
    code = "def f(n): return {1: (1, (2.5,)), 2: {1: True}, 3: True}[n]"
    assert run_tests(code, tests, BOX).passed == (True, True, False), "true is not 1"
    report = run_tests("def f(n): return 10**400", [CodeTest(call="f(1)", result=0.5)], BOX)
    assert report.passed == (False,), "beyond every float"


def test_what_programs_print_is_compared_word_by_word() -> None:
    tests = [CodeTest(stdin="1\n2\n", stdout="3"), CodeTest(stdin="", stdout="0\n")]
    assert run_tests("import sys\nprint(sum(map(int, sys.stdin)))", tests, BOX).passed == (True, True)
    assert run_tests("print(sum(int(l) for l in open(0)))", tests, BOX).passed == (True, True)
    report = run_tests("print(int(input()) + int(input()))", tests, BOX)
    assert report.passed == (True, False)
    assert "EOFError" in report.first_failure
    assert run_tests("import sys\nprint(3, file=sys.stderr)", tests[:1], BOX).passed == (False,)


def test_a_program_that_does_not_end_is_stopped_and_reads_nothing_it_need_not() -> None:
    report = run_tests("while True: pass", [CodeTest(stdin="x" * 300_000, stdout="")], PythonLimits(timeout_s=0.5).box(LEVEL))
    assert report.passed == (False,)
    assert "did not end within 0.5 s" in report.first_failure


def test_output_and_errors_can_be_kept_apart() -> None:
    code = "import sys\nprint(input())\nprint('bad', file=sys.stderr)\nsys.exit(3)"
    ended = run_program(code, BOX, stdin="hä\n", separate=True)
    assert (ended.status, ended.output, ended.errors, ended.timed_out) == (3, "hä\n", "bad\n", False)


def test_a_problem_with_several_attempts_pays_its_best_score_once() -> None:
    problem = CodeProblem("Write f.", (CodeTest(call="f(1)", result=1), CodeTest(call="f(2)", result=4)))
    task = CodeTask([problem], attempts=4, score="share", timeout_s=120.0, sandbox="prlimit")
    assert task.reset(3)[0] == "Write f."
    text, reward, over, _, _ = task.step("def f(n): return n")
    assert (reward, over) == (0.5, False)
    assert text == "1 of 2 tests passed. The first that failed: f(2) must give 4; it gave 2. Try again.\nWrite f."
    state = task.get_state()
    assert task.step("nonsense(")[1] == 0.0
    assert task.step("def f(n): return n * n")[1:4] == (0.5, True, False)
    task.set_state(state)
    assert task.step("def f(n): return n * n")[1] == 0.5


def test_our_examples_can_be_solved() -> None:
    sim = code_tasks.make(1, timeout_s=120.0, sandbox="prlimit")
    solution = (
        "def add(a, b): return a + b\ndef evens(numbers): return [n for n in numbers if n % 2 == 0]\n"
        "def count_words(text):\n    from collections import Counter\n    return dict(Counter(text.split()))\n"
        "if __name__ == '__main__':\n    import sys\n    print(sum(map(int, sys.stdin)))\n"
    )
    asked = set()
    for seed in range(12):
        ((_, reward, terminated, _, success, info),) = play(sim, seed, f"```python\n{solution}```")
        assert (reward, terminated, success) == (1.0, True, True), info
        asked.add(first_text(sim, seed))
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"question": "x", "tests": []}, "tests a list of at least one"),
        ({"question": "x", "tests": [{"call": "f("}]}, "test 1 must be"),
        ({"question": "x", "tests": [{"call": "f(", "result": 1}]}, "call must be a Python expression"),
        ({"question": "x", "tests": [{"stdin": 1, "stdout": "1"}]}, "test 1 must be"),
    ],
)
def test_a_bad_problem_is_one_line(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    path = tmp_path / "code.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(UserError, match=told):
        code_tasks.make(1, str(path), sandbox="prlimit")
    with pytest.raises(UserError, match=r"score='al' is not a choice\. Did you mean 'all'"):
        code_tasks.make(1, score="al", sandbox="prlimit")
    with pytest.raises(UserError, match="Did you mean 'timeout_s'"):
        SimFactory("embodied_rl.sim.text.code_tasks:make", kwargs={"timeout": 3, "sandbox": "prlimit"}).make(1)


# ---- a judge --------------------------------------------------------------------------------------------------------


def says(text: str) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.json({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]})


@pytest.fixture
def serve() -> Any:
    servers: list[TokenServer] = []

    def start(*plans: Callable[[Exchange], None]) -> TokenServer:
        """Each request is answered by its plan, those beyond by the last."""
        server = TokenServer(lambda exchange: plans[min(exchange.number, len(plans) - 1)](exchange))
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def judge_of(server: TokenServer, **options: Any) -> Judge:
    return Judge(JudgeOptions(server.base_url, "judge", **{"deadline_s": 60.0, **options}))


def test_a_judge_is_asked_and_its_score_read(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server = serve(says("Nearly. <score>2</score> no: <score> 7.5 </score>"))
    judge = judge_of(server, max_score=10.0, api_key_env="JUDGE_KEY", answer_chars=5)
    assert judge.score("Why?", "Because.", "longer than that {x}")[0] == 0.75
    judge.close()
    (exchange,) = server.exchanges
    assert exchange.path == "/v1/chat/completions"
    assert exchange.headers["Authorization"] == "Bearer secret"
    (message,) = exchange.body["messages"]
    assert "Question:\nWhy?\n" in message["content"]
    assert "judged:\nlonge…\n" in message["content"]
    assert exchange.body["temperature"] == 0.0


def test_a_judge_without_a_score_is_asked_again_otherwise(serve: Any) -> None:
    server = serve(says("I like it."), says("<score>7</score>"), says("<score>1</score>"))
    with closing(judge_of(server)) as judge:
        assert judge.score("q", "", "a")[0] == 1.0
    assert [exchange.body["temperature"] for exchange in server.exchanges] == [0.0, 0.7, 0.7]


def test_a_busy_judge_is_waited_for(serve: Any) -> None:
    server = serve(lambda e: e.json({"error": "later"}, 429, {"Retry-After": "0"}), lambda e: e.drop(), says("<score>0.5</score>"))
    with closing(judge_of(server)) as judge:
        assert judge.score("q", "", "a")[0] == 0.5
    assert len(server.exchanges) == 3


def test_failures_of_a_judge_have_kinds(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()
    pauses_take_no_time(monkeypatch)
    cases: list[tuple[str, Callable[[Exchange], object], dict[str, Any], int]] = [
        ("rejected", lambda e: e.json({"error": "no such model"}, 404), {}, 1),
        ("server_error", lambda e: e.json({"error": "oops"}, 500), {}, 3),
        ("bad_response", lambda e: e.json({"choices": []}), {}, 3),
        ("no_score", says("<score>3</score>"), {"max_attempts": 2}, 2),
        ("bad_response", lambda e: e.answer(200, "<html>"), {"max_attempts": 1}, 1),
        ("timeout", lambda e: given_up.wait(60), {"max_attempts": 1, "timeout_s": 1.5, "deadline_s": 2.0}, 1),
    ]
    for kind, plan, options, least in cases:
        server = serve(plan)
        with closing(judge_of(server, **options)) as judge, pytest.raises(JudgeError) as caught:
            judge.score("q", "", "a")
        assert caught.value.kind == kind, caught.value
        assert len(server.exchanges) >= least
    given_up.set()
    closed = serve(says("x"))
    closed.close()
    with pytest.raises(JudgeError) as caught:
        judge_of(closed, deadline_s=0.5).score("q", "", "a")
    assert caught.value.kind == "connection"


def test_a_judged_episode_and_one_whose_judge_fails(serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "judged.jsonl"
    path.write_text('{"question": "Why?", "reference": "Because."}\n', encoding="utf-8")
    server = serve(says("<score>0.75</score>"), lambda e: e.json({"error": "bad"}, 400))
    sim = judged.make(1, str(path), server.base_url, "judge", success_score=0.7)
    ((text, reward, terminated, _, success, info),) = play(sim, 0, "So.")
    assert (text, reward, terminated, success, info["score"]) == ("Score: 0.75", 0.75, True, True, 0.75)
    ((_, reward, terminated, truncated, success, info),) = play(sim, 0, "So.")
    assert (reward, terminated, truncated, success) == (0.0, False, True, False)
    assert info["failure_kind"] == "rejected"
    assert info["failure"].startswith("judge rejected: HTTP 400")
    sim.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"base_url": "nowhere"}, "url must be like"),
        ({"template": "{question}"}, "must name {answer}"),
        ({"template": "{answer} {x}"}, "nothing but"),
        ({"template": "{answer"}, "malformed"),
        ({"max_score": 0.0}, "max_score must be > 0"),
        ({"api_key_env": "NO_SUCH_KEY_HERE"}, "NO_SUCH_KEY_HERE"),
        ({"modle": 1}, "options are wrong"),
    ],
)
def test_a_judge_that_is_described_wrongly_is_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    path = tmp_path / "judged.jsonl"
    path.write_text('{"question": "Why?"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=told):
        judged.make(1, str(path), **{"base_url": "http://127.0.0.1:1/v1", "model": "m", **options})
