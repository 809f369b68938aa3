"""Small agent programs for tests: ordinary ones with the openai client, and ones in which something goes wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodied_rl.generation.tokens import GenerationRequest, ScriptedTokens, TokenBackend
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.tiny_language import word_tokenizer
from embodied_rl.rollout.programs import ProgramRunner
from embodied_rl.serving.agents.app import AgentProxy, ProxyOptions
from embodied_rl.serving.agents.sessions import SessionLimits
from embodied_rl.sim.text.program import ProgramOptions

END = 2
ASK = """
import json, os, sys, time, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60))

def ask(*messages):
    roles = ["user", "assistant"] * 9
    told = [{"role": role, "content": text} for role, text in zip(roles, messages)]
    body = {"model": os.environ["OPENAI_MODEL"], "messages": told}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]["content"]

def reward(value, **more):
    post(os.environ["EMBODIED_RL_SESSION_URL"] + "/reward", {"reward": value, **more})

task = json.loads(os.environ["EMBODIED_RL_TASK"])
"""
"""The standard library alone: starts in a twentieth of a second."""
SERVE = (
    ASK.replace('task = json.loads(os.environ["EMBODIED_RL_TASK"])', "")
    + """
def serve(play):
    for line in sys.stdin:
        episode = json.loads(line)
        os.environ["OPENAI_API_KEY"], os.environ["EMBODIED_RL_SESSION_URL"] = episode["api_key"], episode["session_url"]
        print(json.dumps(play(episode)), flush=True)
"""
)
"""The same, for programs that stay: ``play(episode)`` returns the reply."""


def program(folder: Path, body: str, name: str = "program.py") -> Path:
    path = folder / name
    path.write_text(ASK + body, encoding="utf-8")
    return path


def lasting(folder: Path, body: str) -> Path:
    """A program that stays."""
    path = folder / "lasting.py"
    path.write_text(SERVE + body, encoding="utf-8")
    return path


def options(path: Path, **more: Any) -> ProgramOptions:
    """May write where it stands, as tests look there; on any machine."""
    return ProgramOptions(**{"command": (sys.executable, str(path)), "sandbox": "prlimit", "writable": (str(path.parent),), **more})


def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(word_tokenizer(["say one colour red green blue", "red", "green", "blue"]), "words")


def says(words: ChatTokenizer, *answers: str) -> ScriptedTokens:
    """Answers with these in turn, for ever."""
    number = iter(range(10**9))

    def script(request: GenerationRequest) -> list[int]:
        return [*(int(token) for token in words.encode(answers[next(number) % len(answers)])), END]

    return ScriptedTokens(script, version=5)


@contextmanager
def running(backend: TokenBackend, words: ChatTokenizer, wanted: ProgramOptions) -> Iterator[ProgramRunner]:
    proxy = AgentProxy(
        backend, words, ProxyOptions(model="policy", stop_ids=(END,), max_new_tokens=8), token="secret", limits=SessionLimits(idle_s=1e9)
    )
    runner = ProgramRunner(wanted, proxy, "policy")
    try:
        yield runner
    finally:
        runner.close()
        proxy.close()


def running_with(mark: str) -> list[str]:
    """Processes with `mark` among the words of their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found
