"""`embodied_rl.learn`, which trains from Python and returns the run, and `embodied_rl.load_policy`, a trained policy for a control loop."""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import json
import linecache
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.commands.cli import command_line
from embodied_rl.config import group_names
from embodied_rl.errors import UserError, brief, shown
from embodied_rl.files import next_free, write_atomic, writing_to
from embodied_rl.generation.base import Generator
from embodied_rl.run_folder import SOURCE_FOLDER
from embodied_rl.types import SimSpec, TensorSpec

if TYPE_CHECKING:
    from embodied_rl.loggers import Logger


_FIX = "Write it into a file beside the notebook and import it from there."


def importable(thing: Callable[..., Any], folder: Path) -> str:
    """``module:Name`` of a class or function; a definition in ``__main__`` is first written into a module in `folder`.

    The module also contains the imports, plain values, classes and functions of ``__main__`` that the source names. The folder is put first
    in ``sys.path``, which simulator processes inherit. Raises UserError: it was defined inside a function, its source is unknown, or it
    names something that cannot be written.
    """
    name, module = thing.__qualname__, thing.__module__
    if "<" in name:
        raise UserError(f"'{name}' is defined inside a function or as a lambda, where simulator processes cannot import it. {_FIX}")
    if module != "__main__":
        return f"{module}:{name}"
    source = _source_with_names(thing)
    stem = f"{name.lower()}_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    write_atomic(folder / f"{stem}.py", source)
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
    return f"{stem}:{name}"


def _source_with_names(thing: Callable[..., Any]) -> str:
    """Text of a module: the definition, preceded by what it names."""
    namespace = vars(sys.modules["__main__"])
    imports: dict[str, str] = {}
    values: dict[str, str] = {}
    definitions: dict[str, str] = {}

    def need(definition: Callable[..., Any]) -> None:
        if definition.__qualname__ in definitions:
            return
        source = _definition(definition)
        definitions[definition.__qualname__] = ""  # entered before its names are resolved, since they may refer back to it
        for name in sorted({node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}):
            if name in namespace and not hasattr(builtins, name):
                take(name, namespace[name])
        del definitions[definition.__qualname__]
        definitions[definition.__qualname__] = source

    def take(name: str, value: object) -> None:
        home, own = (getattr(value, part, None) for part in ("__module__", "__qualname__"))
        if isinstance(value, ModuleType):
            imports[name] = f"import {value.__name__} as {name}"
        elif home == "__main__" and own == name and isinstance(value, type | FunctionType):
            need(value)
        elif isinstance(home, str) and isinstance(own, str) and home != "__main__" and "." not in own and "<" not in own:
            imports[name] = f"from {home} import {own} as {name}"
        elif _is_plain(value):
            values[name] = f"{name} = {value!r}"
        else:
            raise UserError(f"'{thing.__name__}' uses {shown(name)}, a {type(value).__name__}, which no other process can get. {_FIX}")

    need(thing)
    parts = ["\n".join(["from __future__ import annotations", "", *imports.values()]), "\n".join(values.values()), *definitions.values()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _definition(thing: Callable[..., Any]) -> str:
    """Source of a class or function; for a notebook cell, from the lines that Python keeps for tracebacks."""
    code = thing.__code__ if inspect.isfunction(thing) else next(filter(None, map(_code_of, vars(thing).values())), None)
    for file in [code.co_filename] if code is not None else _scripts():
        lines = linecache.getlines(file)
        with suppress(SyntaxError):
            for node in ast.parse("".join(lines)).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == thing.__name__:
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    return "".join(lines[first - 1 : node.end_lineno]).rstrip()
    raise UserError(f"The source code of '{thing.__name__}' was not found. {_FIX}")


def _scripts() -> list[str]:
    """Where a class without methods may be defined: the running script, or a notebook's cells, the latest first."""
    script = vars(sys.modules["__main__"]).get("__file__")
    return [script] if script else [file for file in reversed(linecache.cache) if not Path(file).is_file()]


def _code_of(member: object) -> CodeType | None:
    found = inspect.unwrap(member) if inspect.isfunction(member) else member
    return found.__code__ if inspect.isfunction(found) else None


def _is_plain(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False


class LoadedPolicy:
    """A trained policy that returns its likeliest actions, in the units of the simulator of its training."""

    def __init__(self, generator: Generator, spec: SimSpec, keys: Sequence[str]) -> None:
        """Args:
        generator: generator with published weights.
        spec: spec of the simulator of its training.
        keys: parts of the observation that it reads.
        """
        self.spec, self.keys = spec, tuple(keys)
        self._generator, self._num_rows = generator, 0

    @property
    def expects(self) -> str:
        """Input of `predict`, in one line."""
        parts = [(key, self.spec.observation[key]) for key in self.keys]
        described = [f"{key!r}: {f'{list(p.shape)} {p.dtype}' if isinstance(p, TensorSpec) else p.kind}" for key, p in parts]
        return "{" + ", ".join(described) + "}, or a batch of them, [n, …] each"

    def reset(self) -> None:
        """Begin a new episode: a policy with memory forgets the last one. Not needed before the first `predict`."""
        self._num_rows = 0

    def predict(self, observation: object) -> Any:
        """Action for an observation, or the actions for a batch.

        Args:
            observation: {key: value} with the policy's keys, others are ignored; a single value for a policy with one key. Arrays have
                the shape of the simulator's observation, or a leading n for a batch of n environments.

        Returns:
            [A] float32, or [n, A] for a batch; [K, A] and [n, K, A] from a policy with chunks of K > 1 steps; an int, or [n] int64,
            for discrete actions, counted from 0 (add a gymnasium space's `start`); a str, or a list, from a language agent.

        Raises UserError: a key is missing, or a shape or dtype kind differs; with the policy's expectation.
        """
        parts, num_rows = self._batch(observation)
        slots = np.arange(1 if num_rows is None else num_rows)
        if self._generator.remembers and len(slots) != self._num_rows:
            self._generator.begin(slots.tolist())
        self._num_rows = len(slots)
        self._generator.send(slots, parts, None)
        actions = self._generator.recv().for_simulator(self.spec.action)
        if self.spec.action.kind == "text":
            texts = [str(text) for text in actions]
            return texts[0] if num_rows is None else texts
        if self.spec.action.kind == "discrete":
            actions = actions[..., 0]
            return int(actions[0]) if num_rows is None and actions.ndim == 1 else actions[0] if num_rows is None else actions
        return actions[0] if num_rows is None else actions

    def close(self) -> None:
        """End everything that was started to act."""
        self._generator.close()

    def _batch(self, observation: object) -> tuple[dict[str, np.ndarray], int | None]:
        """({key: [n, …]}, n); n is None for a single observation."""
        if not isinstance(observation, Mapping):
            if len(self.keys) != 1:
                raise UserError(f"An observation must name its parts. The policy expects {self.expects}.")
            observation = {self.keys[0]: observation}
        parts, sizes = {}, set[int | None]()
        for key in self.keys:
            if key not in observation:
                raise UserError(f"The observation lacks {shown(key)}; it has {', '.join(map(str, observation))}. Expected: {self.expects}.")
            parts[key], size = self._part(key, observation[key])
            sizes.add(size)
        if len(sizes) > 1:
            found = ", ".join("a single one" if size is None else f"{size} rows" for size in sorted(sizes, key=str))
            raise UserError(f"All parts of an observation must have the same batch size, got {found}. Expected: {self.expects}.")
        return parts, sizes.pop()

    def _part(self, key: str, value: object) -> tuple[np.ndarray, int | None]:
        part = self.spec.observation[key]
        if not isinstance(part, TensorSpec):
            rows = list(value) if isinstance(value, list | tuple | np.ndarray) else [value]
            if part.kind == "text" and (wrong := [row for row in rows if not isinstance(row, str)]):
                raise UserError(f"{shown(key)} must be text, got {type(wrong[0]).__name__}. Expected: {self.expects}.")
            return np.fromiter(rows, object), None if rows and rows[0] is value else len(rows)
        try:
            array = np.asarray(value)
        except ValueError:  # lists of unequal lengths
            raise UserError(f"{shown(key)} must be an array, got {shown(value)}. Expected: {self.expects}.") from None
        single = array.shape == part.shape
        if not single and array.shape[1:] != part.shape:
            raise UserError(f"{shown(key)} must be {list(part.shape)} or [n, …], got {list(array.shape)}. Expected: {self.expects}.")
        if not np.can_cast(array.dtype, part.dtype, "same_kind"):
            raise UserError(f"{shown(key)} must have dtype {part.dtype}, got {array.dtype}. Expected: {self.expects}.")
        array = np.ascontiguousarray(array, part.dtype)
        return (array[None], None) if single else (array, len(array))


def load_policy(path: Path | str, *, domain: str | None = None, trust: Sequence[str] = ()) -> LoadedPolicy:
    """Policy of a run's folder (its last checkpoint) or of a checkpoint's folder, of any kind: small networks, VLAs, language agents.

    Args:
        domain: domain of the policy, for a run with several.
        trust: code that the checkpoint may name in addition to registered code (docs/trust.md).

    Raises UserError: there is no checkpoint, or it cannot be read; IncompatibleCheckpointError: its tensors do not fit its configuration.
    """
    from embodied_rl.commands.evaluate import acting, load_to_play, make_generator, make_policy

    checkpoint = load_to_play(path, domain=domain, overrides=("sim",), trust=trust)
    if checkpoint.config.policy.name == "language":
        return LoadedPolicy(make_generator(checkpoint, checkpoint.spec), checkpoint.spec, list(checkpoint.spec.observation))
    policy = make_policy(checkpoint, checkpoint.spec)
    return LoadedPolicy(acting(policy), checkpoint.spec, policy.observation_keys)


@dataclass(frozen=True)
class Run:
    """A run's folder. Files are read anew on each access, so the run may still be going on elsewhere."""

    path: Path

    @property
    def results(self) -> dict[str, Any]:
        """Content of results.json. Raises UserError if the run has not ended with an evaluation."""
        file = self.path / "results.json"
        if not file.is_file():
            raise UserError(f"{brief(self.path)} has no results.json: the final evaluation did not finish. Continue with run.resume().")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """{name: [n] float64} over the n rows of metrics.jsonl, ``step`` among them; NaN in rows without the name."""
        from embodied_rl.loggers.jsonl import read_metrics

        rows = read_metrics(self.path)
        numbers = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
        names = ["step", *sorted(numbers - {"step"})]
        return {name: np.array([value if isinstance(value := row.get(name), int | float) else np.nan for row in rows]) for name in names}

    @property
    def report(self) -> Path:
        """Page about the run, written on first use. Raises UserError."""
        from embodied_rl.reports import write_report

        page = self.path / "report.html"
        return page if page.is_file() else write_report([self.path])

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoints" / "last"

    def resume(self, *, total_steps: int | None = None, overrides: Sequence[str] = ()) -> Run:
        """Continue the run, up to `total_steps` if given, and return it. Raises as `learn`."""
        more = [] if total_steps is None else [f"total_steps={total_steps}", "stop_at_success=null"]
        source = self.path / SOURCE_FOLDER
        if source.is_dir() and str(source.resolve()) not in sys.path:
            sys.path.insert(0, str(source.resolve()))
        return trained([*more, *overrides, f"resume={self.path}"], source)

    def load_policy(self, *, domain: str | None = None, trust: Sequence[str] = ()) -> LoadedPolicy:
        """Trained policy; see `embodied_rl.load_policy`."""
        return load_policy(self.path, domain=domain, trust=trust)


def learn(
    sim: str | Callable[..., Any],
    *,
    policy: str = "mlp",
    algorithm: str = "ppo",
    total_steps: int = 20_000,
    seed: int = 1,
    run_dir: Path | str | None = None,
    overrides: Sequence[str] = (),
) -> Run:
    """Train a policy in a simulator, evaluate it on held-out seeds, and return the run.

    Args:
        sim: a ``gymnasium.Env`` class (or VectorEnv, or SimEnv), a function that makes one, the id of a registered gymnasium task
            (``"Pendulum-v1"``), a name of the catalogue (``"fetch_reach"``), or ``"package.module:Name"``. For a class defined in
            a notebook or in the running script, simulator processes get its source.
        policy: a file of ``configs/policy``.
        algorithm: a file of ``configs/algorithm``.
        total_steps: most environment steps.
        seed: equal seeds give equal runs.
        run_dir: folder of the run; None: a new folder below ``runs/``.
        overrides: any other ``key=value`` of the command line.

    Raises UserError: and its kinds, for everything a user can mend; SimFault, NonFiniteError: see `embodied_rl.trainer.Trainer.run`.
    """
    if not isinstance(sim, str | type | FunctionType):
        raise UserError(f"sim must be a name, a class or a function, got {shown(sim)}: other processes can only make environments anew.")
    name = sim if isinstance(sim, str) else sim.__name__
    if isinstance(overrides, str) or not all(isinstance(word, str) and "=" in word for word in overrides):
        raise UserError(f"overrides must be a list of 'key=value', got {shown(overrides)}.")
    given = [word for word in overrides if not word.startswith("run_dir=")]
    chosen = None
    if run_dir is None:
        stem = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name.rpartition(":")[2])
        run_dir = chosen = _new_folder(Path("runs") / stem / f"{datetime.now():%Y%m%d-%H%M%S}-seed{seed}")
    try:
        settings = (f"policy={policy}", f"algorithm={algorithm}", f"total_steps={total_steps}", f"seed={seed}")
        return trained([*_sim_words(sim, Path(run_dir)), *settings, *given, f"run_dir={run_dir}"], Path(run_dir) / SOURCE_FOLDER)
    finally:
        if chosen is not None:
            with suppress(OSError):  # it holds a run
                os.removedirs(chosen)


def _new_folder(path: Path) -> Path:
    """Make the folder, or one with the next free name: of two runs that begin in the same second, each has its own."""
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = next_free(path)
            try:
                folder.mkdir()
            except FileExistsError:
                if folder.is_symlink():  # it leads nowhere
                    raise
            else:
                return folder


def _sim_words(sim: str | Callable[..., Any], run_dir: Path) -> list[str]:
    """Overrides that select a simulator."""
    if not isinstance(sim, str):
        return ["sim=custom", f"sim.target={importable(sim, run_dir / SOURCE_FOLDER)}"]
    if sim in group_names("sim"):
        return [f"sim={sim}"]
    import gymnasium

    if sim in gymnasium.registry or "-v" in sim:
        return ["sim=custom", "sim.target=embodied_rl.sim.robots.gymnasium:make", f"+sim.task={sim}"]
    return ["sim=custom", f"sim.target={sim}"] if ":" in sim else [f"sim={sim}"]


def trained(words: list[str], source: Path | None = None, loggers: Sequence[Logger] = ()) -> Run:
    """Train as the command line would with these words; `source`: folder of modules that the simulators need.

    `loggers`: see `Trainer`. Raises as `learn`.
    """
    from embodied_rl.commands.train import train
    from embodied_rl.config.compose import load_train_config

    variable = f"PYTHONPATH={shlex.quote(str(source))} " if source is not None and source.is_dir() else ""
    return Run(train(load_train_config(words), overrides=words, command=variable + command_line("train", words), loggers=loggers))
