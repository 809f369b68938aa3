"""What a service offers, and what a request may say about it: the task and plain values, never code and never a path.

The arguments that a simulator takes are read from its source, so that the server imports no simulator.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.serving.http_server import HttpProblem
from embodied_rl.trust import named_code

OPERATORS_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "embodied_rl.sim.remote:make": frozenset({"url", "sim", "sim_kwargs", "protocol", "token_env"}),
    "embodied_rl.sim.robots.mjcf:make": frozenset({"task", "reward", "success", "terminated"}),
    "embodied_rl.sim.text.judged:make": frozenset({"path", "base_url", "model", "api_key_env"}),
    "embodied_rl.sim.text.program:AgentProgram": frozenset({"command", "function", "env", "tasks", "held_out_tasks"}),
    "embodied_rl.sim.text.tasks:make": frozenset({"environment"}),
    "embodied_rl.sim.text.textarena:make": frozenset({"opponent", "opponent_options"}),
}
"""{simulator: its arguments that name code, servers or files}: theirs are the operator's, and none of these is offered by default."""
_PATHS = re.compile(r"path|data|corpus|questions|held_out_questions|\w+_(path|file|folder|dir|root)|file|folder|directory|root")
"""Names of arguments that are files and folders."""
_PATH_FORM = re.compile(r"~.*|\.{1,2}|.*[\\\0].*|.+/.*|.*/.+|\S*\.[A-Za-z][A-Za-z0-9]{0,9}", re.DOTALL)
_NAMESPACED_TASK = re.compile(r"[A-Za-z_]\w*/[\w-]+-v\d+")
"""``ALE/Pong-v5``: how gymnasium writes the ids of a package that is imported already."""
MOST_ITEMS, LONGEST_TEXT, DEEPEST = 1000, 2000, 3


def offered_simulators(names: tuple[str, ...] | None = None) -> dict[str, SimConfig]:
    """The simulators that a service offers.

    Args:
        names: registered ones, or ``package.module:Attribute`` of the operator's own; None: all that are registered and take no argument
            that names code.

    Raises:
        UserError: a name that is not known.
    """
    from embodied_rl.config import group_names, load_sim_config

    known = [name for name in group_names("sim") if name != "custom"]
    if names is None:
        found = {name: load_sim_config(name) for name in known}
        return {name: config for name, config in found.items() if config.target not in OPERATORS_ARGUMENTS}
    offered = {}
    for name in names:
        if name not in known and ":" not in name:
            raise UserError(f"Simulator '{name}' cannot be offered.{did_you_mean(name, known)}")
        offered[name] = SimConfig(name=name, target=name) if ":" in name else load_sim_config(name)
    return offered


def as_requested(config: SimConfig, task: str | None, kwargs: Mapping[str, Any]) -> SimConfig:
    """What the operator offers, with a client's task and arguments.

    Raises:
        HttpProblem: 403 for an argument that is the operator's, names code or a path; 422 for one that the simulator does not take.
    """
    schema = _schema(config.target)
    for name, value in kwargs.items():
        if name in config.kwargs and config.kwargs[name] == value:
            continue
        if not schema.takes(name, config):
            known = sorted({*schema.names, *config.kwargs})
            raise HttpProblem(
                422, "user_error", f"Simulator '{config.name}' does not take '{name}'.{did_you_mean(name, known)}", choices=known
            )
        if name in OPERATORS_ARGUMENTS.get(config.target, ()) or _PATHS.fullmatch(name):
            raise _refused(config, name, "it names code, a server or a file, which only the operator of this service may")
        _require_plain(config, name, value, DEEPEST)
    if task is not None and task != config.task:
        if "task" in OPERATORS_ARGUMENTS.get(config.target, ()):
            raise _refused(config, "task", "it is a file, which only the operator of this service may name")
        _require_plain(config, "task", task, 0)
    return replace(config, task=config.task if task is None else task, kwargs={**config.kwargs, **kwargs})


def _require_plain(config: SimConfig, name: str, value: Any, depth: int) -> None:
    if isinstance(value, list):
        if depth == 0 or len(value) > MOST_ITEMS:
            raise _refused(config, name, f"lists hold at most {MOST_ITEMS} values and are at most {DEEPEST} deep")
        for item in value:
            _require_plain(config, name, item, depth - 1)
    elif isinstance(value, bool) and len(named_code({"target": config.target, name: value})) > 1:
        raise _refused(config, name, "it opens the sandbox, which only the operator of this service may")
    elif isinstance(value, str):
        path = _PATH_FORM.fullmatch(value) and not (name == "task" and _NAMESPACED_TASK.fullmatch(value))
        if path or len(named_code({"target": config.target, name: value})) > 1 or len(value) > LONGEST_TEXT:
            raise _refused(config, name, "a request may not name code, a server or a path, and texts are short")
    elif not (value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))):
        raise _refused(config, name, "values are numbers, texts, true and false, and lists of these")


def _refused(config: SimConfig, name: str, why: str) -> HttpProblem:
    return HttpProblem(403, "refused_argument", f"'{name[:80]}' of simulator '{config.name}' is not for a request: {why}.")


@dataclass(frozen=True)
class _Schema:
    names: frozenset[str]
    """Arguments that are written down."""
    further: bool
    """Whether it takes others too (``**kwargs``), or its source says nothing."""

    def takes(self, name: str, config: SimConfig) -> bool:
        return name in self.names or name in config.kwargs or (self.further and name.isidentifier() and not name.startswith("_"))


@functools.cache
def _schema(target: str) -> _Schema:
    """Arguments of a factory, read from its source without importing it."""
    module, _, attribute = target.partition(":")
    try:
        spec = importlib.util.find_spec(module)
        source = Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""
        body = ast.parse(source).body
    except (ImportError, ValueError, OSError, SyntaxError):
        return _Schema(frozenset(), True)
    found: ast.stmt | None = next((node for node in body if isinstance(node, _DEFINED) and node.name == attribute), None)
    if isinstance(found, ast.ClassDef):
        found = next((node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)
    if not isinstance(found, ast.FunctionDef):
        return _Schema(frozenset(), True)
    arguments = found.args
    names = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return _Schema(frozenset(names - {"self", "num_envs", "task"}), arguments.kwarg is not None)


_DEFINED = (ast.FunctionDef, ast.ClassDef)
