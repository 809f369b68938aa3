"""The tools of language agents: what they compute, what they refuse, and what they hold back."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.agents.tools.base import Toolbox, ToolError
from embodied_rl.agents.tools.builtin import Calculator, PythonTool, Search, calculate
from embodied_rl.agents.tools.mcp import McpServer
from embodied_rl.config import ToolsConfig
from embodied_rl.errors import UserError
from embodied_rl.sandbox import box
from embodied_rl.sandbox.box import PythonLimits
from embodied_rl.sim.text.search_qa import Bm25, Document, read_corpus

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]

# ---- the calculator -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", 14),
        ("-(2 - 5) ** 3", 27),
        ("2 ^ 10", 1024),
        ("7 // 2 + 7 % 4 + 7 / 2", 9.5),
        ("sqrt(2) * max(1, 3, 2)", 3 * math.sqrt(2)),
        ("round(pi, 2)", 3.14),
        ("round(2.6)", 3),
        ("round(1250, -2)", 1200),
        ("2 ** 0.5", math.sqrt(2)),
        ("2 ** -2", 0.25),
        ("123456789 * 987654321", 121932631112635269),
    ],
)
def test_arithmetic(expression: str, value: float) -> None:
    assert calculate(expression) == value
    assert type(calculate(expression)) is type(value)


@pytest.mark.parametrize(
    ("expression", "part"),
    [
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("2 ** 5000", "too large"),
        ("lcm(9**999, 10**999, 7**999) * 11**999", "too large"),
        ("round(10, -10 ** 9)", "at most 400"),
        ("1e308 * 10", "not finite"),
        ("(-1) ** 0.5", "not real"),
        ("sqrt(-1)", "math domain"),
        ("__import__('os').system('true')", "not arithmetic"),
        ("(1).__class__", "not arithmetic"),
        ("[1, 2]", "not arithmetic"),
        ("True + 1", "not arithmetic"),
        ("'a' * 3", "not arithmetic"),
        ("sqrt(x=2)", "not arithmetic"),
        ("1 +", "not an arithmetic expression"),
        ("(" * 900, "not an arithmetic expression"),
        ("1" * 1001, "at most 1000"),
    ],
)
def test_what_is_not_arithmetic_is_refused(expression: str, part: str) -> None:
    with pytest.raises(ToolError, match=part):
        calculate(expression)


# ---- the box --------------------------------------------------------------------------------------------------------


def test_uses_are_counted_and_failures_are_text() -> None:
    box = Toolbox([Calculator()])
    assert box.call("calculator", {"expression": "6 * 7"}).text == "42"
    assert box.call("calculator", {"expression": "1 / 0"}).text == "error: division by zero"
    for wrong, part in (({}, "'expression' is missing"), ({"expression": 3}, "type str")):
        result = box.call("calculator", wrong)
        assert result.failed
        assert part in result.text
    assert box.call("calculater", {}).text.startswith("error: there is no tool 'calculater'. Did you mean 'calculator'?")
    metrics = box.figures()
    assert (metrics["tools/calculator/calls"], metrics["tools/calculator/failures"], metrics["tools/unknown"]) == (4.0, 3.0, 1.0)
    assert metrics["tools/calculator/seconds"] > 0
    (schema,) = box.schemas()
    assert schema["function"]["parameters"]["required"] == ["expression"]
    with pytest.raises(UserError, match="Two tools"):
        Toolbox([Calculator(), Calculator()])


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "agent_tools.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, str(page), "exec"), {})
    assert capsys.readouterr().out.startswith("42\n[1] cups\n")


def test_long_results_lose_their_middle() -> None:
    box = Toolbox([Calculator()], ToolsConfig(max_chars=100))
    digits = str(2**4000 - 1)
    text = box.call("calculator", {"expression": "2**4000 - 1"}).text
    assert text == f"{digits[:50]}\n… {len(digits) - 100} characters left out …\n{digits[-50:]}"


# ---- search ---------------------------------------------------------------------------------------------------------


def test_bm25_is_the_formula() -> None:
    texts = ["the cat sat on the mat", "the dog", "a cat and a cat and a dog barked"]
    index = Bm25([Document("", text) for text in texts], k1=1.5, b=0.6)
    # By hand: N = 3, lengths 6, 2, 9, mean 17 / 3; "cat" is in two documents (once, twice), "dog" in two (once, once).
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))

    def part(times: int, length: int) -> float:
        return idf * times * 2.5 / (times + 1.5 * (0.4 + 0.6 * length / (17 / 3)))

    expected = {texts[0]: part(1, 6), texts[1]: part(1, 2), texts[2]: part(2, 9) + part(1, 9)}
    found = index.best("Cat, dog!", 5)
    assert [document.text for _, document in found] == sorted(expected, key=lambda text: -expected[text])
    for score, document in found:
        assert score == pytest.approx(expected[document.text], rel=1e-12)
    assert index.best("unicorn", 3) == []


def test_search_and_its_corpora(tmp_path: Path) -> None:
    (tmp_path / "cats.md").write_text("Cats sleep.", encoding="utf-8")
    (tmp_path / "dogs.txt").write_text("Dogs bark.", encoding="utf-8")
    box = Toolbox([Search(Bm25(read_corpus(tmp_path)))])
    assert box.call("search", {"query": "who does bark?"}).text == "[1] dogs\nDogs bark."
    assert box.call("search", {"query": "unicorn"}).text == "nothing found"
    assert "between 1 and 10" in box.call("search", {"query": "cats", "count": 99}).text
    lines = tmp_path / "corpus.jsonl"
    lines.write_text('{"title": "A", "text": "x"}\n\n{"text": "y"}\n', encoding="utf-8")
    assert read_corpus(lines) == [Document("A", "x"), Document("", "y")]
    lines.write_text('{"title": "A"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="line 1 is not"):
        read_corpus(lines)
    with pytest.raises(UserError, match="neither a folder"):
        read_corpus(tmp_path / "nothing")


# ---- Python ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run() -> Any:
    if box.strongest() not in ("namespaces", "landlock"):
        pytest.skip("this kernel has limits only")
    return lambda code, timeout_s=60.0: Toolbox(
        [PythonTool(PythonLimits(timeout_s=timeout_s, memory_mb=256, scratch_mb=1, output_bytes=1000))]
    ).call("python", {"code": code})


def test_a_program_prints(run: Any) -> None:
    result = run("import sys\nprint(6 * 7)\nprint('on stderr', file=sys.stderr)\nprint('ä', __name__)")
    assert not result.failed
    assert sorted(result.text.split("\n")) == ["", "42", "on stderr", "ä __main__"]
    failed = run("def f():\n    raise KeyError('no such cup')\nf()")
    assert failed.failed
    assert "ended with status 1" in failed.text
    assert "KeyError: 'no such cup'" in failed.text
    assert "line 2" in failed.text
    for given, status in ((4, 4), (-1, 255), (168, 168)):  # no signal has the number 127 or 40
        assert run(f"import sys; sys.exit({given})").text == f"error: the program ended with status {status}"
    assert "was killed by SIGSEGV" in run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").text


def test_time_memory_and_files_are_limited(run: Any) -> None:
    result = run("import time\nprint('begun', flush=True)\ntime.sleep(600)", 6.0)
    assert "did not end within 6 s" in result.text
    assert "begun" in result.text
    assert "MemoryError" in run("x = bytearray(10**9)").text
    assert run("open('big', 'wb').write(bytes(2 * 2**20))").failed
    many = run("import os, time\nfor _ in range(99):\n    if not os.fork(): time.sleep(60)\ntime.sleep(60)").text
    assert "processes" in many or "BlockingIOError" in many
    flood = run("print('x' * 10**6)").text
    assert "bytes were thrown away" in flood
    assert len(flood) < 1100


def test_the_network_cannot_be_reached(run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint('reached')"
        with socket.create_connection(("127.0.0.1", port), 60):
            pass  # from here it can
        result = run(code)
        assert result.failed
        assert "reached" not in result.text.splitlines()
        assert "OSError" in result.text or "ConnectionRefusedError" in result.text or "PermissionError" in result.text


def test_programs_see_neither_our_variables_nor_each_other(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert run("import os; print(os.environ.get('OPENAI_API_KEY'), os.listdir()); open('note', 'w').write('x')").text == "None []\n"
    assert run("import os; print(os.listdir())").text == "[]\n"


def test_a_weaker_protection_is_refused_unless_it_is_said_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "failure", lambda level: "" if level == "prlimit" else "the kernel has none")
    with pytest.raises(
        UserError, match=r"has only the sandbox 'prlimit' \(the kernel has none\).*set agent.tool_options.python_sandbox=prlimit"
    ) as error:
        PythonTool()
    assert len(str(error.value)) <= 400
    with pytest.raises(UserError, match="has only the sandbox"):
        PythonTool(allow_network=True)
    assert PythonTool(sandbox="prlimit").run({"code": "print(1)"}) == "1\n"
    with pytest.raises(UserError, match=r"python_sandbox='landlok' is not a choice\. Did you mean 'landlock'"):
        PythonTool(sandbox="landlok")
    with pytest.raises(UserError, match="timeout_s must be a finite number above 0"):
        PythonLimits(timeout_s=0)
    with pytest.raises(UserError, match="memory_mb must be a finite number above 0, got null"):
        PythonLimits(memory_mb=None)  # type: ignore[arg-type]


# ---- MCP ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[McpServer]:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    running = McpServer(SERVER, env={"GIVEN": "yes"}, timeout_s=60.0)
    yield running
    running.close()


def test_tools_of_a_server(server: McpServer) -> None:
    box = Toolbox(server.tools)
    assert [tool.name for tool in server.tools] == ["add", "files_env", "sleep", "die", "deaf"]
    assert box.call("add", {"a": 2, "b": 3}).text == "5\n[image that is no text]"
    refused = box.call("add", {"a": "x"})
    assert (refused.failed, refused.text) == (True, "error: a and b must be numbers")
    assert box.call("files_env", {"name": "GIVEN"}).text == "yes"
    assert box.call("files_env", {"name": "OPENAI_API_KEY"}).text == "not set"
    with pytest.raises(ToolError, match="no method resources/list"):
        server.request("resources/list", {})


def test_a_server_that_is_slow_or_dies(server: McpServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    box = Toolbox(server.tools)
    with monkeypatch.context() as patch:  # of this call alone: starting took what it took
        patch.setattr(server, "_timeout_s", 0.5)
        assert "within 0.5 s" in box.call("sleep", {"until": str(tmp_path / "enough")}).text
    (tmp_path / "enough").touch()
    assert box.call("add", {"a": 1, "b": 1}).text.startswith("2"), "the late answer is nobody's"
    assert box.call("die", {}).text == "error: the tool server has ended"
    assert box.call("add", {"a": 1, "b": 1}).text == "error: the tool server has ended"
    assert box.figures()["tools/add/failures"] == 1.0


def test_a_server_that_reads_nothing_more(server: McpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Toolbox(server.tools)
    assert not box.call("deaf", {}).failed
    monkeypatch.setattr(server, "_timeout_s", 0.5)
    assert "did not read a message within 0.5 s" in box.call("add", {"a": "x" * 1_000_000}).text
    assert box.call("add", {"a": 1, "b": 1}).text == "error: the tool server has ended"


def test_a_message_goes_to_no_other_file_when_the_server_is_closed(server: McpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is opened then may get the number of its input."""
    write, closing, was_closed = os.write, threading.Thread(target=server.close), list[bool]()

    def late(descriptor: int, data: bytes) -> int:
        monkeypatch.undo()
        closing.start()
        closing.join(0.5)
        was_closed.append(server._stdin.closed)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", late)
    with contextlib.suppress(ToolError):  # it may be answered before the server ends
        server.request("ping", {})
    closing.join()
    assert was_closed == [False]


def test_servers_that_are_none() -> None:
    with pytest.raises(UserError, match="cannot be started"):
        McpServer(["/no/such/server"])
    with pytest.raises(UserError, match="violates the protocol: the tool server has ended"):
        McpServer([sys.executable, "-c", "print('hello')"])
    with pytest.raises(UserError, match="did not answer 'initialize' within"):
        McpServer([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.3)
