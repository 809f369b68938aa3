"""Checkpoints: a folder of safetensors and JSON that is either whole or absent, with `last` and `best` links beside it.

    <run_dir>/checkpoints/step_000111616/
        policy.safetensors    the policy's parameters and buffers: all that evaluation needs
        learner.safetensors   optimizer moments, normalisation statistics, random states: what resuming needs
        state.json            format version, step, the trainer's counters, the simulator's spec, metrics
        config.yaml           the whole resolved configuration
        MODEL_CARD.md         what this is, how it was made, how to use it

Nothing is unpickled: safetensors holds plain arrays, and JSON plain values.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl import __version__
from embodied_rl.config import TrainConfig
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.files import cannot_write, fsync, write_atomic
from embodied_rl.types import SimSpec, TensorSpec, VariableSpec

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 1
MODEL_FOLDER = "model"
"""In a checkpoint: what the policy is built from, where the configuration alone does not say it."""
POLICY_FILE, LEARNER_FILE, STATE_FILE, CONFIG_FILE, CARD_FILE = (
    "policy.safetensors",
    "learner.safetensors",
    "state.json",
    "config.yaml",
    "MODEL_CARD.md",
)
_RESULT_HEADING = "## Result\n| metric | value |\n|---|---|\n"
_ASIDE = ".tmp-old-"
_FOLDER = re.compile(rf"({re.escape(_ASIDE)})?step_\d+")


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` read; tensors lie on the CPU."""

    path: Path
    """The checkpoint's own folder, links resolved."""
    step: int
    """Environment steps trained so far."""
    policy: dict[str, Tensor]
    learner: dict[str, Tensor]
    """Empty where it was not asked for."""
    state: dict[str, Any]
    """What the trainer gave: iteration, algorithm state, counters."""
    config: TrainConfig
    spec: SimSpec
    """Of the simulator that the policy was trained in."""
    metrics: dict[str, float]
    command: str
    package_version: str
    """Version of embodied_rl that wrote it."""

    @property
    def run_dir(self) -> Path:
        """The run's folder as it lies now, also when it was moved after training."""
        return self.path.parent.parent if self.path.parent.name == "checkpoints" else self.path.parent


def checkpoint_name(step: int) -> str:
    return f"step_{step:09d}"


def save_checkpoint(
    run_dir: Path | str,
    step: int,
    *,
    policy: Mapping[str, Tensor],
    learner: Mapping[str, Tensor],
    state: dict[str, Any],
    config: TrainConfig,
    spec: SimSpec,
    metrics: Mapping[str, float],
    command: str,
    is_best: bool = False,
    describe: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint, point `last` (and `best`) at it, and remove what `config.checkpoint` does not keep.

    The files are written in a temporary folder, flushed and renamed, so that a crash at any moment leaves the earlier
    checkpoints and links as they were. `state` takes JSON values and numpy scalars; arrays belong into `learner`. `describe` writes what
    the policy is built from into the folder ``model``, where the configuration alone does not say it.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: the folder cannot be written.
        TypeError: `state` holds something that is not a JSON value.
    """
    root = Path(run_dir) / "checkpoints"
    final = root / checkpoint_name(step)
    document = {
        "format_version": FORMAT_VERSION,
        "package_version": __version__,
        "step": int(step),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "metrics": {name: float(value) for name, value in metrics.items()},
        "spec": spec.to_dict(),
        "state": state,
    }
    text = json.dumps(document, indent=1, default=_plain)
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary = _fresh_temporary(root)
        _write_tensors(temporary / POLICY_FILE, policy)
        _write_tensors(temporary / LEARNER_FILE, learner)
        (temporary / STATE_FILE).write_text(text, encoding="utf-8")
        (temporary / CONFIG_FILE).write_text(_config_yaml(config), encoding="utf-8")
        (temporary / CARD_FILE).write_text(_model_card(final, document, config, spec), encoding="utf-8")
        if describe is not None:
            (temporary / MODEL_FOLDER).mkdir()
            describe(temporary / MODEL_FOLDER)
        for file in temporary.rglob("*"):
            fsync(file)
        fsync(temporary)
        _move_into_place(temporary, final)
        _link(root / "last", final.name)
        if is_best and config.checkpoint.keep_best:
            _link(root / "best", final.name)
        fsync(root)
        _prune(root, config.checkpoint.keep_last)
    except OSError as error:
        raise cannot_write(final, error) from error
    return final


def find_last(run_dir: Path | str) -> Path | None:
    """The newest whole checkpoint of a run: where `last` points, or the one saved last where the link is broken; None without any."""
    root = Path(run_dir) / "checkpoints"
    last = root / "last"
    if (last / STATE_FILE).is_file():
        return last.resolve()
    folders = _by_age(root)
    return folders[-1].resolve() if folders else None


def load_checkpoint(path: Path | str, *, with_learner: bool = True) -> Checkpoint:
    """Read a checkpoint folder, a run's folder (its `last`), or a link such as ``…/checkpoints/best``.

    Args:
        path: where it lies.
        with_learner: also read what only resuming needs.

    Raises:
        IncompatibleCheckpointError: it is missing, incomplete, damaged or of another format version; one line says which.
    """
    folder = resolve_checkpoint(path)
    document = _read_state(folder)
    policy = _read_tensors(folder / POLICY_FILE)
    learner = _read_tensors(folder / LEARNER_FILE) if with_learner else {}
    config = _read_config(folder / CONFIG_FILE)
    try:
        return Checkpoint(
            path=folder,
            step=int(document["step"]),
            policy=policy,
            learner=learner,
            state=dict(document["state"]),
            config=config,
            spec=SimSpec.from_dict(document["spec"]),
            metrics=dict(document["metrics"]),
            command=str(document["command"]),
            package_version=str(document["package_version"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise IncompatibleCheckpointError(
            f"Checkpoint '{folder}': {STATE_FILE} lacks or misspells a part ({error!r}). Use another checkpoint."
        ) from error


def resolve_checkpoint(path: Path | str) -> Path:
    """The folder of a checkpoint, given it, its run or a link to it. Raises IncompatibleCheckpointError where there is none."""
    given = Path(path).expanduser()
    if (given / STATE_FILE).is_file():
        return given.resolve()
    if given.is_file() and given.parent.joinpath(STATE_FILE).is_file():
        return given.parent.resolve()
    for run_dir in (given, given.parent):
        if given in (run_dir, run_dir / "checkpoints") and (found := find_last(run_dir)) is not None:
            return found
    if not given.exists():
        siblings = _by_age(given.parent) or _by_age(given.parent / "checkpoints")
        choices = f" Beside it lie: {', '.join(folder.name for folder in siblings)}." if siblings else ""
        raise IncompatibleCheckpointError(f"Checkpoint '{path}' does not exist.{choices} Give a run's folder or one of its checkpoints.")
    raise IncompatibleCheckpointError(
        f"'{path}' holds no checkpoint ({STATE_FILE} is missing). Give a run's folder or one of its checkpoints/step_… folders."
    )


def check_compatible(checkpoint: Checkpoint, spec: SimSpec, *, same_task: bool = True) -> None:
    """Make sure that the checkpoint's policy fits a simulator.

    Args:
        checkpoint: what was loaded.
        spec: of the simulator at hand.
        same_task: also insist on the task's name; False for a deliberate transfer to a task with equal spaces.

    Raises:
        IncompatibleCheckpointError: naming every part that differs.
    """
    ours, theirs = checkpoint.spec, spec
    differences = []
    if same_task and ours.task != theirs.task:
        differences.append(f"task {ours.task} ≠ {theirs.task}")
    for key in sorted({*ours.observation, *theirs.observation}):
        mine, other = ours.observation.get(key), theirs.observation.get(key)
        if mine != other:
            differences.append(f"observation '{key}' {_show(mine)} ≠ {_show(other)}")
    if ours.action != theirs.action:
        shown = _show_action(ours), _show_action(theirs)
        differences.append(
            f"action {shown[0]} ≠ {shown[1]}" if shown[0] != shown[1] else f"bounds of single dimensions of the action {shown[0]}"
        )
    if differences:
        raise IncompatibleCheckpointError(
            f"Checkpoint '{checkpoint.path}' was made for another simulator: {'; '.join(differences)} (checkpoint ≠ simulator). "
            f"Its own is sim={checkpoint.config.sim.name}."
        )


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, Tensor]) -> None:
    """Make sure that the checkpoint's policy tensors have the names and shapes of `expected` (a policy's state_dict).

    Raises:
        IncompatibleCheckpointError: naming the tensors that are missing, unknown or of another shape.
    """
    found = checkpoint.policy
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    reshaped = [
        f"{name} {list(found[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    parts = [
        f"{label} {_first(names)}"
        for label, names in (("lacks", missing), ("has unknown", unknown), ("has another shape:", reshaped))
        if names
    ]
    if parts:
        raise IncompatibleCheckpointError(
            f"Checkpoint '{checkpoint.path}' does not fit the policy: it {'; it '.join(parts)}. "
            f"Build the policy from the checkpoint's own {CONFIG_FILE}, or use another checkpoint."
        )


def add_result_to_card(folder: Path, rows: Mapping[str, str]) -> None:
    """Put the held-out result, known only after the checkpoint was written, at the head of its model card's table of results."""
    path = folder / CARD_FILE
    head, heading, rest = path.read_text(encoding="utf-8").partition(_RESULT_HEADING)
    # Rows of an earlier evaluation of the same checkpoint are replaced.
    kept = [line for line in rest.splitlines(keepends=True) if not any(line.startswith(f"| {name} |") for name in rows)]
    added = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    write_atomic(path, head + heading + added + "".join(kept))


def resume_command(command: str, path: Path | str, **changes: object) -> str:
    """The command that continues a run: `command` with ``resume=path`` and other values for the keys of `changes`."""
    replaced = {"resume": path, **changes}
    words = [word for word in shlex.split(command) if word.split("=", 1)[0].lstrip("+") not in replaced]
    return shlex.join([*words, *(f"{key}={value}" for key, value in replaced.items())])


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a checkpoint's state takes JSON values only, got {type(value).__name__}: put arrays and tensors into `learner`")


def _fresh_temporary(root: Path) -> Path:
    for aside in root.glob(f"{_ASIDE}*"):
        # A crash while a checkpoint was being replaced by another of the same step: the old one comes back.
        if not (whole := root / aside.name.removeprefix(_ASIDE)).exists():
            os.rename(aside, whole)
    for leftover in root.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = root / f".tmp-{os.getpid()}"
    temporary.mkdir()
    return temporary


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # safetensors refuses tensors that share memory (tied weights); the second and later ones are copied.
    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        address = value.untyped_storage().data_ptr()
        plain[name] = value.clone() if address in seen else value
        seen.add(address)
    try:
        save_file(plain, path)
    except SafetensorError as error:
        raise OSError(f"{error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise IncompatibleCheckpointError(f"Checkpoint '{path.parent}' is incomplete: {path.name} is missing. Use another checkpoint.")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise IncompatibleCheckpointError(
            f"Checkpoint file '{path}' is truncated or damaged ({error}). Use another checkpoint of the run."
        ) from error


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise IncompatibleCheckpointError(
            f"Checkpoint file '{path}' is not valid JSON ({error}). Use another checkpoint of the run."
        ) from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        writer = document.get("package_version", "unknown") if isinstance(document, dict) else "unknown"
        raise IncompatibleCheckpointError(
            f"Checkpoint '{folder}' has format version {version} (written by embodied_rl {writer}); "
            f"embodied_rl {__version__} reads version {FORMAT_VERSION}. Install the version that wrote it, or train again."
        )
    return dict(document)


def _read_config(path: Path) -> TrainConfig:
    import yaml

    try:
        return TrainConfig.from_dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise IncompatibleCheckpointError(
            f"Checkpoint '{path.parent}' is incomplete: {path.name} is missing. Use another checkpoint."
        ) from error
    except (yaml.YAMLError, UserError, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise IncompatibleCheckpointError(f"Checkpoint file '{path}' cannot be read as a configuration: {reason}") from error


def _move_into_place(temporary: Path, final: Path) -> None:
    if not final.exists():
        os.rename(temporary, final)
        return
    # A folder cannot be renamed over another; the old one steps aside first, where `find_last` would still see it.
    aside = final.with_name(_ASIDE + final.name)
    os.rename(final, aside)
    os.rename(temporary, final)
    shutil.rmtree(aside)


def _link(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def _by_age(root: Path) -> list[Path]:
    """Whole checkpoints, the one saved first first; by time and not by step, since a run may be resumed from an earlier step."""
    if not root.is_dir():
        return []
    whole = [folder for folder in root.iterdir() if _FOLDER.fullmatch(folder.name) and (folder / STATE_FILE).is_file()]
    return sorted(whole, key=lambda folder: ((folder / STATE_FILE).stat().st_mtime_ns, folder.name))


def _prune(root: Path, keep_last: int) -> None:
    kept = {os.readlink(root / name) for name in ("last", "best") if (root / name).is_symlink()}
    for folder in _by_age(root)[:-keep_last]:
        if folder.name not in kept:
            # Renamed first: a crash in the middle of the removal must not leave half a checkpoint under its name.
            doomed = root / f".tmp-pruned-{folder.name}"
            os.rename(folder, doomed)
            shutil.rmtree(doomed)


def _config_yaml(config: TrainConfig) -> str:
    import yaml

    return str(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))


def _first(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _show(part: TensorSpec | VariableSpec | None) -> str:
    if part is None:
        return "absent"
    return f"{list(part.shape)} {part.dtype}" if isinstance(part, TensorSpec) else part.kind


def _show_action(spec: SimSpec) -> str:
    action = spec.action
    if action.kind == "discrete":
        return f"discrete({action.num_actions})"
    if action.kind == "text":
        return "text"
    low, high = np.asarray(action.low), np.asarray(action.high)
    bounds = f"[{low.min():g}, {high.max():g}]" if low.size else "[]"
    return f"continuous({action.dim}) within {bounds}"


def _model_card(final: Path, document: Mapping[str, Any], config: TrainConfig, spec: SimSpec) -> str:
    from embodied_rl.versions import machine, versions

    metrics = "\n".join(f"| {name} | {value:.6g} |" for name, value in sorted(document["metrics"].items())) or "| (none yet) | |"
    installed = "\n".join(f"- {name} {version}" for name, version in versions().items())
    action = _show_action(spec)
    observation = ", ".join(f"{key} {_show(part)}" for key, part in spec.observation.items())
    return f"""# {spec.task}: {config.policy.name} trained with {config.algorithm.name}

A policy of embodied_rl after {document["step"]:,} environment steps, saved {document["created"]}.

- Simulator: `sim={config.sim.name}`, task {spec.task}{f", instruction “{spec.instruction}”" if spec.instruction else ""}
- Observation: {observation}; the policy reads {", ".join(f"`{key}`" for key in config.policy.reads)}
- Action: {action}
- Seed: {config.seed}

## Made with
```
{document["command"]}
```

{_RESULT_HEADING}{metrics}

## Use
```
python -m embodied_rl.evaluate checkpoint={final} num_episodes=100
python -m embodied_rl.render checkpoint={final} num_episodes=4
{resume_command(document["command"], final)}
```

## Configuration
```yaml
{_config_yaml(config).rstrip()}
```

## Versions
{installed}
- machine: {machine()["cpu"]}, {machine()["cores"]} cores
"""
