"""Agent programs: how a program starts for an episode, which task it gets, and how its reward returns.

A program is any command that uses OpenAI's interface. It starts once per episode, with the agent proxy's address and key in the environment
variables that the ``openai`` package reads; it knows nothing of training. A program that can play many episodes keeps running
(`embodied_rl.sim.text.served_program`), and so does a Python function (`embodied_rl.sim.text.program_worker`).
`embodied_rl.rollout.programs` runs programs in parallel.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import embodied_rl
from embodied_rl.bounds import Bounds, Score, Seconds
from embodied_rl.config import SimConfig
from embodied_rl.config.building import Config
from embodied_rl.errors import UserError
from embodied_rl.reading import json_lines
from embodied_rl.sandbox.box import Box, is_below, protection
from embodied_rl.sim.seeding import chosen
from embodied_rl.sim.text.served_program import file_of, with_absolute_files
from embodied_rl.types import ActionSpec, SimSpec, VariableSpec

TARGET = "embodied_rl.sim.text.program:AgentProgram"
"""``sim.target`` of a run with agent programs."""

RewardSource = Literal["http", "exit", "return"]
"""http: the program, or a separate judge, posts the reward to its session. exit: status 0 is 1, `FAILURE_STATUS` is 0. return: a function's
return value, or the reply of a running program; posted rewards are added."""

ProgramMode = Literal["once", "serve"]
"""once: started for every episode. serve: started once, and given one line per episode."""

FAILURE_STATUS = 3
"""Exit status of a program that did its work without success (1 is Python's for an exception, 2 for wrong arguments)."""

WORKER = "embodied_rl.sim.text.program_worker"
"""Module that calls `ProgramOptions.function`."""

_INHERITED = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "SSL_CERT_FILE",
)
"""Environment variables that a program inherits; keys are not among them."""


@dataclass(frozen=True)
class ProgramOptions(Config, place="sim.kwargs"):
    """``sim.kwargs`` of an agent program. Raises UserError for an impossible value."""

    command: tuple[str, ...] = ()
    """Words of the command. ``{python}`` is this interpreter, ``{task}`` the task as JSON, ``{seed}`` the episode's seed, ``{model}`` the
    model's name; write literal braces twice."""
    tasks: str | None = None
    """File with one JSON object per line; an episode's seed chooses one. null: the task is only the seed."""
    held_out_tasks: str | None = None
    """The same for evaluation; null: `tasks`."""
    reward: RewardSource = "http"
    success_reward: Score = 1.0
    """Sum of rewards from which an episode counts as successful."""
    timeout_s: Seconds = 300.0
    """Seconds after which a program is ended and its episode fails."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables."""
    texts: tuple[str, ...] = ()
    """Words that the tokenizer of a tiny random model must know in addition to those of the tasks."""
    mode: ProgramMode = "once"
    """Mode of `command`. In mode serve the program reads task, seed and key from its input: ``{task}`` and ``{seed}`` are unknown."""
    function: str | None = None
    """Replaces the command: ``module:function`` or ``file.py:function``, called with a client and a task in processes that keep running."""
    memory_mb: Annotated[int, Bounds(1, 10**9)] | None = None
    """Memory (2**20 bytes) of all its processes together, and address space of each; null: 8192, and no limit on the address space."""
    sandbox: str = "landlock"
    """Weakest acceptable protection: namespaces, landlock or prlimit (docs/sandbox.md)."""
    network: Literal["proxy", "open"] = "proxy"
    """proxy: TCP connections to the proxy's port only. open: any."""
    readable: tuple[str, ...] = ()
    """Files and folders that it may read, in addition to those that its command names."""
    writable: tuple[str, ...] = ()
    """Files and folders that it may change, in addition to its scratch folder."""
    pass_env: tuple[str, ...] = ()
    """Names of environment variables that it inherits in addition to PATH, LANG and the like."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_mode()
        if not self.command or not all(self.command):
            raise UserError(f"sim.kwargs.command must be a list of words such as ['{{python}}', 'agent.py'], got {list(self.command)}.")
        self.words({}, 0, "model")

    def _check_mode(self) -> None:
        if self.function is not None:
            if self.command:
                raise UserError("sim.kwargs.function replaces the program: set sim.kwargs.command=null, or leave the function out.")
            if not all(self.function.rpartition(":")[::2]):
                raise UserError(f"sim.kwargs.function must be 'module:function' or 'file.py:function', got {self.function!r}.")
            # From here on it is a command like any other.
            object.__setattr__(self, "command", ("{python}", "-m", WORKER, self.function.replace("{", "{{").replace("}", "}}")))
            object.__setattr__(self, "mode", "serve")
        if self.stays and self.reward == "exit":
            raise UserError(
                "sim.kwargs.reward=exit needs a program that ends with its episode: set sim.kwargs.reward=http or return, or "
                "sim.kwargs.mode=once."
            )
        if self.reward == "return" and not self.stays:
            raise UserError(
                "sim.kwargs.reward=return needs a function, or a program with sim.kwargs.mode=serve: a program that ends has no reply. "
                "Set sim.kwargs.reward=http or exit."
            )

    @property
    def stays(self) -> bool:
        """Whether one process plays many episodes."""
        return self.mode == "serve"

    @staticmethod
    def of(config: SimConfig) -> ProgramOptions:
        """Options from ``sim.kwargs``, with defaults for nulls. Raises UserError for unknown keys, invalid values and a missing program."""
        options = ProgramOptions.from_dict({name: value for name, value in config.kwargs.items() if value is not None})
        options.check_command()
        return options

    def words(self, task: Mapping[str, Any], seed: int, model: str) -> list[str]:
        """The command of one episode. Raises UserError for an unknown placeholder."""
        own = {} if self.stays else {"task": json.dumps(task), "seed": str(seed)}
        filled = {"python": sys.executable, **own, "model": model}
        try:
            return [argument.format_map(filled) for argument in self.command]
        except (KeyError, ValueError, IndexError) as error:
            raise UserError(
                f"sim.kwargs.command={list(self.command)} cannot be filled in ({error!r}). Placeholders: "
                f"{', '.join('{' + name + '}' for name in filled)}; double the braces that are meant as such."
                f"{' A program that stays reads its tasks from its input.' if self.stays else ''}"
            ) from error

    def check_command(self) -> None:
        """Raise UserError if the program, the script that Python is to run, or the function's module is missing."""
        arguments, key = self.words({}, 0, "model"), "command" if self.function is None else "function"
        if shutil.which(arguments[0]) is None:
            raise UserError(f"sim.kwargs.command, a list of words: '{arguments[0]}' is not a program that can be run here.")
        script = next((path for path, _ in map(file_of, arguments[1:]) if path.endswith(".py")), None)
        if script is not None and not Path(script).is_file():
            raise UserError(f"sim.kwargs.{key}: '{script}' does not exist in {Path.cwd()}. Give an absolute path, or start in its folder.")
        if self.function is None or script is not None:
            return
        module = self.function.rpartition(":")[0]
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise UserError(f"sim.kwargs.function: module '{module}' cannot be found in this environment.")


class AgentProgram:
    """Target of ``sim=agent_program`` in configurations."""

    def __init__(self, num_envs: int, **kwargs: object) -> None:
        """Raises UserError: a program cannot be stepped as a simulator."""
        raise UserError(
            "An agent program is not stepped by the environment manager: it is played through the agent proxy, by "
            "`python -m embodied_rl.train experiment=agent_program` and `python -m embodied_rl.evaluate`."
        )


def tasks() -> list[str]:
    """Names of the package's own tasks; a program's tasks are in its file."""
    return ["AgentProgram"]


def is_program(config: SimConfig) -> bool:
    """Whether the episodes of a configuration are agent programs."""
    return config.target == TARGET


def program_spec(config: SimConfig) -> SimSpec:
    """Spec that checkpoints keep: texts in and out."""
    return SimSpec(
        task=config.task or config.name,
        observation={"text": VariableSpec("text")},
        action=ActionSpec.text(),
        reports_success=True,
        snapshots="none",
    )


class TaskBook:
    """Tasks of a program's episodes as functions of seeds."""

    def __init__(self, options: ProgramOptions) -> None:
        """Raises UserError for a file that cannot be read or contains no tasks."""
        self._training = read_tasks(Path(options.tasks)) if options.tasks else []
        self._held_out = read_tasks(Path(options.held_out_tasks)) if options.held_out_tasks else self._training

    def task(self, seed: int) -> dict[str, Any]:
        """Task of an episode; consecutive held-out seeds (2**30 and above) go through the held-out tasks in order."""
        return chosen(seed, self._training or [{}], self._held_out or [{}])

    @property
    def texts(self) -> list[str]:
        """All texts of the training tasks."""
        return [str(value) for task in self._training for value in task.values()]


def read_tasks(path: Path) -> list[dict[str, Any]]:
    """JSON objects, one per line; empty lines are skipped. Raises UserError naming an invalid line."""
    found = json_lines(path, "sim.kwargs.tasks:")
    for where, task in found:
        if not isinstance(task, dict):
            raise UserError(f"{where}: a task must be a JSON object, got {task!r:.60}.")
    if not found:
        raise UserError(f"'{path}' has no tasks: write one JSON object per line.")
    return [task for _, task in found]


def episode_line(*, base_url: str, key: str, session: str, model: str, task: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Line that announces an episode to a program in mode serve."""
    return {
        "task": dict(task),
        "seed": seed,
        "model": model,
        "base_url": base_url,
        "api_key": key,
        "session_url": f"{base_url}/sessions/{session}",
    }


def lasting_environment(options: ProgramOptions, base_url: str, model: str) -> dict[str, str]:
    """Environment of a program in mode serve: a few of this process's variables, the options', and the model's address."""
    own = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        # The proxy is on this machine, whatever proxies the network needs.
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    inherited = {name: os.environ[name] for name in (*_INHERITED, *options.pass_env) if name in os.environ}
    return {**inherited, **options.env, **own}


# ---- the sandbox: a program's own files, the proxy's port, and what the configuration opens ---------------------------


_MEMORY_MB, _SCRATCH_MB, _PROCESSES, _OPEN_FILES = 8192, 1024, 256, 1024


def program_box(options: ProgramOptions, base_url: str) -> Box:
    """Sandbox of a program that uses `base_url`. Raises UserError: this machine's protection is weaker than `options.sandbox`."""
    address = urlsplit(base_url)
    return Box(
        protection(options.sandbox, "sim.kwargs.sandbox"),
        "open" if options.network == "open" else "ports",
        ports=(address.port or (443 if address.scheme == "https" else 80),),
        readable=tuple(dict.fromkeys([*own_files(options), *map(_absolute, options.readable)])),
        writable=tuple(map(_absolute, options.writable)),
        memory_mb=options.memory_mb or _MEMORY_MB,
        address_mb=options.memory_mb or 0,
        processes=_PROCESSES,
        open_files=_OPEN_FILES,
        scratch_mb=_SCRATCH_MB,
    )


def own_files(options: ProgramOptions) -> list[str]:
    """Files that a command must be able to read: the folder of each file that it names, or only the file if that folder contains the user's
    home; a Python environment; the package of a function."""
    arguments = with_absolute_files(options.words({}, 0, "model"))
    found: list[str] = [str(Path(embodied_rl.__file__).parent)]
    program = shutil.which(arguments[0])
    if program is not None and arguments[0] != sys.executable:
        found += _of_program(os.path.abspath(program))
    for argument in arguments[1:]:
        path, _ = file_of(argument)
        if os.path.isabs(path) and os.path.exists(path):
            found += _folder_of(path)
    if options.function is not None and not file_of(options.function)[1]:
        spec = importlib.util.find_spec(options.function.rpartition(":")[0].partition(".")[0])
        if spec is not None:
            found += spec.submodule_search_locations or [spec.origin or ""]
    return [path for path in found if path]


def _of_program(path: str) -> list[str]:
    """The file; for a virtual environment, the environment and the Python that it is based on."""
    found = []
    for place in dict.fromkeys((path, os.path.realpath(path))):
        folder = os.path.dirname(os.path.dirname(place))
        is_python = os.path.basename(place).startswith("python") and not _holds_home(folder)
        found.append(folder if os.path.exists(f"{folder}/pyvenv.cfg") or is_python else place)
    return found


def _folder_of(path: str) -> list[str]:
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    found = [path if _holds_home(folder) and path != folder else folder]
    real = os.path.realpath(found[0])
    return [place for place in dict.fromkeys((found[0], real)) if not _holds_home(place)]


def _holds_home(folder: str) -> bool:
    home = os.path.expanduser("~")
    return is_below(home, folder) or is_below(os.path.realpath(home), folder)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
