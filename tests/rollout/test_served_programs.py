"""Programs that stay: real processes and real HTTP; a crash costs its episode alone."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.rollout.programs import Played, ProgramFault, ProgramFaultKind, ProgramRunner
from embodied_rl.sandbox.box import Box
from embodied_rl.serving.agents.sessions import CapturedSession, SessionSampling
from embodied_rl.sim.faults import FaultPolicy
from embodied_rl.sim.text.program import TARGET, ProgramOptions
from embodied_rl.sim.text.program_worker import set_variables
from embodied_rl.sim.text.served_program import ProgramPool
from tests.rollout.programs import lasting, options, running, running_with, says, tokenizer


def play(runner: ProgramRunner, *seeds: int, at_a_time: int = 1, hangs: Path | None = None) -> list[Played]:
    """The time of all programs that run when there is a file `hangs` is over, and the file is taken away."""
    waiting, ended = list(seeds)[::-1], dict[Hashable, Played]()
    while len(ended) < len(seeds):
        while waiting and runner.num_running < at_a_time:
            seed = waiting.pop()
            runner.start(seed, seed, SessionSampling(seed))
        if hangs is not None and hangs.exists():
            hangs.unlink()
            for one in runner._running.values():
                one.process.deadline = 0.0
        ended |= {played.tag: played for played in runner.wait(60.0 if hangs is None else 0.05)}
    return [ended[seed] for seed in seeds]


def fault(played: Played) -> ProgramFault:
    assert isinstance(played.outcome, ProgramFault), played.outcome
    return played.outcome


def served(path: Path, **more: Any) -> ProgramOptions:
    return options(path, **{"mode": "serve", "reward": "return", **more})


def test_one_process_plays_many_tasks(tmp_path: Path) -> None:
    """Each with a session of its own; what it prints is no reply, and neither is a reply to an earlier episode."""
    words = tokenizer()
    (tmp_path / "tasks.jsonl").write_text('{"colour": "red"}\n{"colour": "blue"}\n')
    mark = f"{os.getpid()}.75"  # numbers of processes are those of a namespace: a child's command line is found from outside
    body = (
        "import secrets, subprocess\nME = secrets.token_hex(8)\nsubprocess.Popen(['sleep', 'MARK'])\n"
        "def play(episode):\n"
        "    print('thinking'); print('{\"n\": 1}'); print('{\"done\": true, \"episode\": -1}')\n"
        "    said = ask('say ' + episode['task']['colour'])\n"
        "    with open('PIDS', 'a') as file: print(ME, file=file)\n"
        "    return {'done': True, 'reward': 1.0 if episode['task']['colour'] in said else 0.25}\n"
        "serve(play)\n"
    ).replace("PIDS", str(tmp_path / "pids"))
    body = body.replace("MARK", mark)
    with running(says(words, "red"), words, served(lasting(tmp_path, body), tasks=str(tmp_path / "tasks.jsonl"))) as runner:
        found = play(runner, *range(8), at_a_time=2)
        assert runner.proxy._book.sessions == {}
    assert {played.task["colour"] for played in found} == {"red", "blue"}
    assert [played.reward for played in found] == [1.0 if played.task["colour"] == "red" else 0.25 for played in found]
    sessions = {played.outcome.session for played in found if isinstance(played.outcome, CapturedSession)}
    assert len(sessions) == 8
    pids = (tmp_path / "pids").read_text().split()
    assert (len(pids), len(set(pids)) <= 2) == (8, True)
    assert not running_with(mark), "they end with their runner"


def test_a_crash_costs_its_episode_alone(tmp_path: Path) -> None:
    """By a signal, by an end in good order, by an exception that is replied, by time; others go on, in the same process where one lives."""
    words = tokenizer()
    body = (
        "ME = 2.0 + time.monotonic_ns()\n"
        "def play(episode):\n"
        "    seed = episode['seed']\n"
        "    said = ask('say')\n"
        "    if seed == 2: print('so it ends', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)\n"
        "    if seed == 3: sys.exit(0)\n"
        "    if seed == 4: return {'error': 'KeyError: 4'}\n"
        "    if seed == 5: open('HANGS', 'w').close(); time.sleep(600)\n"
        "    if seed == 6: print('[' * 200_000); return {'done': True}\n"
        "    if seed == 8: import subprocess; subprocess.Popen(['sleep', '600']); os._exit(4)  # a child holds the output open\n"
        "    if seed == 7: return {'done': True, 'reward': 'much'}\n"
        "    if seed == 11: return {'done': True, 'reward': 10**400}\n"
        "    return {'done': True, 'reward': ME}\n"
        "serve(play)\n"
    )
    hangs = tmp_path / "hangs"
    with running(says(words, "red"), words, served(lasting(tmp_path, body.replace("HANGS", str(hangs))))) as runner:
        found = {played.seed: played for played in play(runner, *range(1, 12), hangs=hangs)}
        pool = runner._pool
        assert pool is not None
        assert pool.num_started == 5  # the first; and after seeds 2, 3, 5 and 8
    kinds = {seed: fault(found[seed]).kind for seed in range(2, 9)}
    crashed = ProgramFaultKind.CRASHED
    late, silent = ProgramFaultKind.TIMED_OUT, ProgramFaultKind.NO_REWARD
    assert kinds == {2: crashed, 3: crashed, 4: crashed, 5: late, 6: silent, 7: crashed, 8: crashed}
    assert [fault(found[seed]).exit_status for seed in (2, 3, 4, 8)] == [-9, 0, None, 4]
    assert "so it ends" in fault(found[2]).detail
    assert "KeyError: 4" in str(found[4].outcome)
    assert "not a finite number: 'much'" in str(found[7].outcome)
    assert "not a finite number: 1000" in str(found[11].outcome)
    assert found[1].reward > 1
    assert found[9].reward == found[10].reward != found[1].reward
    assert all(found[seed].reward == 0.0 for seed in range(2, 9))


def test_rewards_that_are_posted(tmp_path: Path) -> None:
    words = tokenizer()
    body = (
        "def play(episode):\n"
        "    ask('say'); reward(0.5)\n"
        "    return {'done': True, **({'reward': 1.0} if episode['seed'] == 2 else {})}\n"
        "serve(play)\n"
    )
    path = lasting(tmp_path, body)
    with running(says(words, "red"), words, served(path, reward="http")) as runner:
        first, second = play(runner, 1, 2)
        assert first.reward == 0.5
        assert "set sim.kwargs.reward=return" in str(second.outcome)
    with running(says(words, "red"), words, served(path)) as runner:
        assert play(runner, 2)[0].reward == 1.5


def test_starts_that_fail_wait_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ProgramPool(
        [sys.executable, "-c", "raise SystemError('no')"], os.environ, 60.0, Box("prlimit"), FaultPolicy(backoff_s=0.2, max_backoff_s=1.0)
    )
    episode = pool.begin({})
    while not episode.is_over():
        time.sleep(0.002)
    assert episode.end().status == 1
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    pauses = []
    for _ in range(5):
        pool.was_lost()
        pauses.append(round(pool._not_before_s - 100, 6))
    assert pauses == [0.2, 0.4, 0.8, 1.0, 1.0]  # the first failure in a row has none
    episode = pool.begin({})
    assert not episode.is_over()
    assert (episode.wake_s, episode.deadline) == (101.0, 161.0)
    assert pool.num_started == 1
    assert episode.end().status == -9


def test_a_task_larger_than_a_pipe_and_a_program_that_reads_nothing(tmp_path: Path) -> None:
    """Nobody waits for either."""
    words = tokenizer()
    (tmp_path / "tasks.jsonl").write_text('{"text": "%s"}\n' % ("x" * 300_000))
    body = "def play(episode):\n    ask('say')\n    return {'done': True, 'reward': len(episode['task']['text'])}\nserve(play)\n"
    tasks = str(tmp_path / "tasks.jsonl")
    with running(says(words, "red"), words, served(lasting(tmp_path, body), tasks=tasks)) as runner:
        assert [played.reward for played in play(runner, 1, 2)] == [300_000.0] * 2
    deaf = tmp_path / "deaf.py"
    deaf.write_text("import time; time.sleep(600)")
    with running(says(words, "red"), words, served(deaf, tasks=tasks, timeout_s=1.0)) as runner:
        (played,) = play(runner, 1)
    assert fault(played).kind is ProgramFaultKind.TIMED_OUT


def test_a_line_that_never_ends_holds_up_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that writes faster than we read: its output is never empty."""
    pool = ProgramPool([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, 60.0, Box("prlimit"))
    episode = pool.begin({})
    parts = iter([b"x" * 2**16] * 100)
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", lambda *_: next(parts))
        assert not episode.is_over()
    episode.end()
    assert len(list(parts)) > 50


def test_stopping_ends_the_process_of_the_episode(tmp_path: Path) -> None:
    words = tokenizer()
    body = (
        "def play(episode):\n    ask('say'); time.sleep(600 * (episode['seed'] == 1))\n    return {'done': True, 'reward': 1}\nserve(play)"
    )
    with running(says(words, "red"), words, served(lasting(tmp_path, body))) as runner:
        runner.start("slow", 1, SessionSampling(1))
        runner.stop("slow")
        assert runner.num_running == 0
        assert [played.reward for played in play(runner, 2, 3)] == [1.0, 1.0]
        assert runner._pool is not None
        assert runner._pool.num_started == 2


# ---- functions ------------------------------------------------------------------------------------------------------

FUNCTION = """
import time
ME = int(1000 * time.monotonic())
import os
import helper

def play(client, task):
    print("this is no reply")
    said = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": "say red"}])
    if task.get("raise"):
        raise KeyError("oops")
    if task.get("exit"):
        os._exit(7)
    return helper.judge(said.choices[0].message.content) + ME

async def waits(client, task): ...
def alone(task): ...
"""


def test_a_function_stays_in_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="openai is not installed")
    words = tokenizer()
    (tmp_path / "function.py").write_text(FUNCTION)
    (tmp_path / "helper.py").write_text("def judge(text): return 0.5 if 'red' in text else 0.25\n")
    (tmp_path / "held_out.jsonl").write_text('{}\n{"raise": 1}\n{}\n{"exit": 1}\n{}\n')
    held_out = 2**30
    wanted = ProgramOptions(function=f"{tmp_path / 'function.py'}:play", reward="return", held_out_tasks=str(tmp_path / "held_out.jsonl"))
    with running(says(words, "red"), words, wanted) as runner:
        found = play(runner, *range(held_out, held_out + 5))
    assert [played.reward % 1 for played in found] == [0.5, 0, 0.5, 0, 0.5]
    assert found[0].reward == found[2].reward != found[4].reward  # an exception is the episode's, an end the process's
    assert (fault(found[1]).kind, fault(found[1]).exit_status) == (ProgramFaultKind.CRASHED, None)
    assert "KeyError: 'oops'" in fault(found[1]).detail
    assert "in play" in fault(found[1]).detail
    assert "\0" not in fault(found[1]).detail  # where the output of earlier episodes stood
    assert fault(found[3]).exit_status == 7


def test_the_variables_of_past_episodes_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBODIED_RL_TASK", "none")
    find = ctypes.CDLL(None).getenv
    find.restype = ctypes.c_char_p
    before = psutil.Process().memory_info().rss
    for number in range(400):
        set_variables({"EMBODIED_RL_TASK": f"{number}" * 100_000})
    assert psutil.Process().memory_info().rss - before < 2**24
    assert os.environ["EMBODIED_RL_TASK"] == find(b"EMBODIED_RL_TASK").decode() == "399" * 100_000


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("missing", "has no function 'missing'. Its functions: play, waits, alone"),
        ("waits", "is a coroutine function"),
        ("alone", r"must take (client, task)"),
    ],
)
def test_a_function_that_cannot_be_called(tmp_path: Path, name: str, told: str) -> None:
    words = tokenizer()
    (tmp_path / "function.py").write_text(FUNCTION)
    (tmp_path / "helper.py").write_text("")
    with running(says(words), words, ProgramOptions(function=f"{tmp_path / 'function.py'}:{name}")) as runner:
        (played,) = play(runner, 1)
    assert told in fault(played).detail


def test_memory_is_limited(tmp_path: Path) -> None:
    words = tokenizer()
    body = (
        "def play(episode):\n    ask('say')\n    size = len(bytearray(2**29)) if episode['seed'] == 2 else 1\n"
        "    return {'done': True, 'reward': size}\nserve(play)\n"
    )
    with running(says(words, "red"), words, served(lasting(tmp_path, body), memory_mb=256)) as runner:
        found = play(runner, 1, 2, 3)
    assert [played.reward for played in found] == [1.0, 0.0, 1.0]
    assert "MemoryError" in fault(found[1]).detail


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"command": ["{python}"], "mode": "server"}, "Did you mean 'serve'"),
        ({"command": ["{python}"], "mode": "serve", "reward": "exit"}, "needs a program that ends with its episode"),
        ({"command": ["{python}"], "reward": "return"}, "reward=http or exit"),
        ({"command": ["{python}", "{task}"], "mode": "serve"}, "reads its tasks from its input"),
        ({"command": ["{python}"], "memory_mb": 0}, "memory_mb must be between 1 and"),
        ({"command": ["{python}"], "network": "none"}, "Known: open, proxy"),
        ({"command": ["{python}"], "function": "a:b"}, "set sim.kwargs.command=null"),
        ({"command": None, "function": "a.b"}, "must be 'module:function'"),
        ({"command": None, "function": "no.such.module:play"}, "module 'no.such.module' cannot be found"),
        ({"command": None, "function": "missing.py:play"}, "'missing.py' does not exist"),
        ({"command": None}, "command must be a list of words"),
    ],
)
def test_mistakes_are_told(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ProgramOptions.of(SimConfig(name="p", target=TARGET, kwargs=kwargs))
