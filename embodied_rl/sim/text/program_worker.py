"""A process that calls one function for episode after episode, started by ``sim.kwargs.function``. Standard library and `openai` only.

It is an ordinary program of ``mode=serve``: a JSON object per line on its input, and one on its output for each; see
`embodied_rl.sim.text.served_program`.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from openai import OpenAI

Function = Callable[["OpenAI", dict[str, Any]], float | None]
"""``function(client, task)``: an ``openai.OpenAI`` client and the task. Returns the reward if ``sim.kwargs.reward=return``."""


def load_function(target: str) -> Function:
    """``module:function`` or ``path/to/file.py:function``.

    Raises SystemExit: there is no such module, file or function, or it cannot be called with a client and a task.
    """
    where, _, name = target.rpartition(":")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ImportError as error:
        raise SystemExit(f"'{target}' cannot be imported: {error}") from error
    function = vars(module).get(name)
    if not callable(function):
        known = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
        raise SystemExit(f"'{where}' has no function '{name}'. Its functions: {', '.join(known) or 'none'}.")
    if inspect.iscoroutinefunction(function):
        raise SystemExit(f"'{target}' is a coroutine function; give one that calls asyncio.run itself.")
    try:
        inspect.signature(function).bind(None, {})
    except TypeError as error:
        raise SystemExit(f"'{target}' must take (client, task): {error}.") from error
    return function


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"'{path}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # its neighbours can be imported, as for a script
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError as error:
        raise ImportError(f"'{path}' does not exist") from error
    return module


def episode_variables(episode: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables of an episode's line, for packages that read them."""
    return {
        "OPENAI_BASE_URL": episode["base_url"],
        "OPENAI_API_KEY": episode["api_key"],
        "OPENAI_MODEL": episode["model"],
        "ANTHROPIC_BASE_URL": episode["base_url"].removesuffix("/v1"),
        "ANTHROPIC_API_KEY": episode["api_key"],
        "EMBODIED_RL_SESSION_URL": episode["session_url"],
        "EMBODIED_RL_TASK": json.dumps(episode["task"]),
        "EMBODIED_RL_SEED": str(episode["seed"]),
    }


_in_environment: dict[str, ctypes.Array[ctypes.c_char]] = {}
"""Memory of variables in the environment."""


def set_variables(variables: Mapping[str, str]) -> None:
    """Do what ``os.environ.update`` does, which keeps every value that a variable ever had: the C library's setenv frees none."""
    for name, value in variables.items():
        entry = ctypes.create_string_buffer(os.fsencode(f"{name}={value}"))
        ctypes.CDLL(None).putenv(entry)
        _in_environment[name] = entry  # frees the last one
        vars(os.environ)["_data"][os.fsencode(name)] = os.fsencode(value)


def play(function: Function, client: OpenAI, episode: Mapping[str, Any]) -> dict[str, Any]:
    """Play one episode; returns the reply line. An exception of the function fails the episode, not the process.

    `client`: its connections serve all episodes, because a new client costs more than an answer.
    """
    set_variables(episode_variables(episode))
    number = {"episode": episode["episode"]}
    try:
        own = client.with_options(base_url=episode["base_url"], api_key=episode["api_key"])
        reward = function(own, dict(episode["task"]))
        if reward is not None and not math.isfinite(reward := float(reward)):
            raise ValueError(f"the function returned {reward}, which is not a reward")
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return {**number, "error": f"{type(error).__name__}: {error}"}
    return {**number, "done": True, "reward": reward}


def serve(function: Function, lines: Iterable[str], replies: TextIO) -> None:
    """Answer every line until the input ends, because the parent closed it or ended. Raises SystemExit if ``openai`` is missing."""
    try:
        from openai import OpenAI
    except ImportError as error:
        raise SystemExit(f"sim.kwargs.function needs OpenAI's client ({error}): pip install openai") from error
    client = OpenAI(api_key="-")
    for line in lines:
        replies.write(json.dumps(play(function, client, json.loads(line))) + "\n")
        replies.flush()


def main() -> None:
    """``python -m embodied_rl.sim.text.program_worker module:function``"""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of the function must not count as a reply
    with replies:
        serve(load_function(sys.argv[1]), sys.stdin, replies)


if __name__ == "__main__":
    main()
