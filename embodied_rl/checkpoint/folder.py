"""Checkpoints: a folder of safetensors and JSON that is either whole or absent, with `last` and `best` links beside it.

    <run_dir>/checkpoints/step_000111616/
            policy.safetensors    the policy's parameters and buffers, except those in model/: all that evaluation needs
            learner.safetensors   optimizer moments, normalisation statistics, random states: what a resume needs
            state.json            format version, step, the trainer's counters, the simulator's spec, metrics, SHA-256 of every file
            config.yaml           the whole resolved configuration
            MODEL_CARD.md         what this is, how it was made, how to use it
            model/                for a language policy: a Hugging Face folder with its weights, or a peft adapter and the name of its base
            model/NAME/           the same for a domain's own language policy
            sharded/              for a run on several ranks: the optimizer's state, each rank's part in its own file

Nothing is unpickled: safetensors holds plain arrays, and JSON plain values. Files are checked against their SHA-256 before use.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl import __version__
from embodied_rl.checkpoint.card import CARD_FILE, model_card
from embodied_rl.config import TrainConfig
from embodied_rl.config.run import model_place
from embodied_rl.errors import IncompatibleCheckpointError, UserError, brief, require_known
from embodied_rl.files import (
    FileSums,
    cannot_write,
    check_sums,
    copy_files,
    fault_of,
    fsync,
    replace_folder,
    reset_mode,
    sha256_of,
    sum_of_document,
    sums_of,
)
from embodied_rl.reading import parse_json, parse_yaml, read_regular, yaml_text
from embodied_rl.specs import spec_differences
from embodied_rl.trust import CHECKPOINT, require_trusted, sign
from embodied_rl.types import SimSpec

if TYPE_CHECKING:
    from torch import Tensor


POLICY_FILE = "policy.safetensors"
MODEL_FOLDER = "model"
"""Folder of a checkpoint with what the policy is built from, if the configuration does not fully say it."""
MODEL_FILES = ("model.safetensors", "adapter_model.safetensors", "value_head.safetensors")
"""Files of a model's folder that may hold tensors: of `MODEL_FOLDER`, or of its subfolder with a domain's own model; a value head may have
a subfolder of either."""
Exported = Mapping[str, tuple[str, str]]
"""{tensor of the policy's state: (file in the model folder, name in that file)}; tied tensors share a name."""
FORMAT_VERSION = 4
_READ_VERSIONS = (1, 2, 3, 4)
"""1: every tensor of the policy is in `POLICY_FILE`, as for policies without a model folder. 2: the policy has a model folder. 3: domains
have their own models, with subfolders there, or the model's value head has one. 4: so has the value head of a domain's own model. A
checkpoint is written in the first version that can hold it."""
SHARDED_FOLDER = "sharded"
"""Subfolder of a checkpoint of a run on several ranks (`embodied_rl.learning.sharded_checkpoint`)."""
PARTS = ".parts-"
"""Prefix of the name of a folder that ranks write into; it becomes `SHARDED_FOLDER`."""
LEARNER_FILE, STATE_FILE, CONFIG_FILE = "learner.safetensors", "state.json", "config.yaml"
_SIGNATURE = "signature"
"""Entry of the state with the signature of the configuration's file, by the user who ran it (`embodied_rl.trust`)."""
_ASIDE = ".tmp-old-"
"""Prefix of a checkpoint that is replaced; `find_last` sees it."""
_OTHER = "Use another checkpoint."
_NO_ROOM = 2**16
"""Free bytes below which a disk counts as full."""
_FOLDER = re.compile(rf"({re.escape(_ASIDE)})?step_\d+")


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint that `load_checkpoint` read; tensors are on the CPU."""

    path: Path
    """The checkpoint's own folder, links resolved."""
    step: int
    """Environment steps trained so far."""
    policy: dict[str, Tensor]
    """All of the policy's tensors, or those trained beside `base`."""
    learner: dict[str, Tensor]
    """State for a resume; empty if it was not requested."""
    state: dict[str, Any]
    """State of the trainer: iteration, algorithm state, counters."""
    config: TrainConfig
    spec: SimSpec
    """Spec of the simulator that the policy was trained in."""
    metrics: dict[str, float]
    command: str
    package_version: str
    """Version of embodied_rl that wrote it."""
    base: dict[str, Any] | None = None
    """The model that `policy` is an adapter of (`base_of`); None: the policy is whole."""
    exported: Exported = field(default_factory=dict)
    """Tensors of `policy` that are in the model folder."""
    place: str = ""
    """For one domain's part: subfolder of ``model`` with its model (`model_place`)."""

    @property
    def model_folder(self) -> Path:
        """The Hugging Face folder of a language policy."""
        return self.path / MODEL_FOLDER / self.place

    def weights_sha256(self) -> str:
        """Digest that identifies the weights (reads their files): that of their file; for several, of their names and digests."""
        files = {f"{MODEL_FOLDER}/{file}" for file, _ in self.exported.values()}
        if not files or (self.path / POLICY_FILE).is_file():
            files.add(POLICY_FILE)
        sums = {file: sha256_of(self.path / file) for file in sorted(files)}
        return next(iter(sums.values())) if len(sums) == 1 else hashlib.sha256(json.dumps(sums).encode()).hexdigest()

    @property
    def sharded(self) -> Path | None:
        """The folder with the parts of several ranks, if there is one."""
        return folder if (folder := self.path / SHARDED_FOLDER).is_dir() else None

    @property
    def run_dir(self) -> Path:
        """The run's present folder, even if it was moved after training."""
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
    base: Mapping[str, Any] | None = None,
    parts: Callable[[], Path] | None = None,
    exported: Exported | None = None,
) -> Path:
    """Write a checkpoint, point `last` (and `best`) at it, and remove what `config.checkpoint` does not keep.

    The files are written in a temporary folder, flushed and renamed, so that a crash or a full disk at any moment leaves the earlier
    checkpoints and links unchanged. `state` takes JSON values and numpy scalars; arrays belong in `learner`. `describe` writes what
    the policy is built from into the folder ``model``, if the configuration does not fully say it. `base` is stored unchanged. `parts`
    waits until the ranks have written their folder, which becomes ``sharded``. `exported` names the tensors in ``model``.

    Returns the checkpoint's folder.

    Raises UserError: the folder cannot be written; TypeError: `state` contains a value that is not JSON.
    """
    root = Path(run_dir) / "checkpoints"
    final = root / checkpoint_name(step)
    in_model = {name: place for name, place in (exported or {}).items() if name in policy}
    content = {"step": int(step), "command": command, "metrics": {name: float(value) for name, value in metrics.items()}}
    content |= {"spec": spec.to_dict(), "base": None if base is None else dict(base), "exported": in_model, "state": state}
    written = yaml_text(config.to_dict())
    document = _document(content, written)
    temporary: Path | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary = _fresh_temporary(root)
        if describe is not None:
            (temporary / MODEL_FOLDER).mkdir()
            write_description(describe, temporary / MODEL_FOLDER)
        write_policy(temporary, policy, in_model)
        write_tensors(temporary / LEARNER_FILE, learner)
        (temporary / CONFIG_FILE).write_text(written, encoding="utf-8")
        (temporary / CARD_FILE).write_text(model_card(final, document, config, written, spec), encoding="utf-8")
        if parts is not None:
            os.rename(parts(), temporary / SHARDED_FOLDER)
        _write_state(temporary, document)
        _publish(temporary, final, ("last", "best") if is_best and config.checkpoint.keep_best else ("last",))
        _prune(root, config.checkpoint.keep_last)
    except (OSError, UserError) as error:
        _give_up(temporary, parts)
        raise (cannot_write(final, error) if isinstance(error, OSError) else error) from error
    return final


def _document(content: dict[str, Any], written: str) -> dict[str, Any]:
    """Everything except tensors, as JSON reads it back; `written`: text of the configuration's file, which is signed."""
    document = {
        "format_version": max((2 + file.count("/") for file, _ in content["exported"].values()), default=1),
        "package_version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **content,
    }
    plain: dict[str, Any] = json.loads(json.dumps(document, default=_plain))
    return {**plain, _SIGNATURE: sign(CHECKPOINT, written.encode())}


def _publish(temporary: Path, final: Path, links: Sequence[str]) -> None:
    """Rename a complete folder to its final name, and point the links at it."""
    replace_folder(temporary, final, _ASIDE)
    for link in links:
        _link(final.parent / link, final.name)
    fsync(final.parent)


def _give_up(temporary: Path | None, parts: Callable[[], Path] | None) -> None:
    """Remove what was begun, which would only fill the disk further; earlier checkpoints and their links stay unchanged."""
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    if parts is not None:
        with contextlib.suppress(UserError):
            shutil.rmtree(parts(), ignore_errors=True)


def _write_state(folder: Path, document: dict[str, Any]) -> None:
    """Write the last file, with its own digest and those of all others except the card, to which results are added later; then flush
    everything."""
    written = [path for path in folder.rglob("*") if path.is_file() and path.name != CARD_FILE]
    document |= {"files": sums_of(folder, written)}
    document |= {"sha256": sum_of_document(document)}
    (state := folder / STATE_FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")
    newest = max((other.stat().st_mtime_ns for other in folder.parent.glob(f"step_*/{STATE_FILE}")), default=0)
    if state.stat().st_mtime_ns <= newest:  # the clock was set back; `_by_age` orders by these times
        os.utime(state, ns=(newest + 1, newest + 1))
    for file in folder.rglob("*"):
        fsync(file)
    fsync(folder)


def write_description(describe: Callable[[Path], None], folder: Path) -> None:
    """Call `describe`. Raises OSError even if a library reports a full disk by another error."""
    try:
        describe(folder)
    except (OSError, UserError):
        raise
    except Exception as error:
        if shutil.disk_usage(folder).free > _NO_ROOM:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def find_last(run_dir: Path | str) -> Path | None:
    """The newest whole checkpoint of a run: the target of `last`, or the one saved last if the link is broken; None without any."""
    root = Path(run_dir) / "checkpoints"
    last = root / "last"
    if (last / STATE_FILE).is_file():
        return last.resolve()
    folders = _by_age(root)
    return folders[-1].resolve() if folders else None


def load_checkpoint(path: Path | str, *, with_learner: bool = True, trust: Sequence[str] = (), replaced: Sequence[str] = ()) -> Checkpoint:
    """Read a checkpoint folder, a run's folder (its `last`), or a link such as ``…/checkpoints/best``.

    Args:
        with_learner: also read the state that only a resume needs.
        trust: code that its configuration may name beside registered code, ``package.module:Attribute``. A checkpoint that this
            user wrote on this machine may name anything.
        replaced: keys whose values the caller replaces before anything is built from the configuration.

    Raises:
        IncompatibleCheckpointError: it is missing, incomplete, damaged or of another format version; one line says which.
        UntrustedCode: its configuration names other code. None of it was imported.
    """
    folder = resolve_checkpoint(path)
    document = _read_state(folder)
    _verify(folder, document, with_learner)
    exported = read_exported(document.get("exported", {}), folder / STATE_FILE)
    policy = read_policy(folder, exported)
    learner = read_tensors(folder / LEARNER_FILE) if with_learner else {}
    try:
        parts: dict[str, Any] = {
            "step": int(document["step"]),
            "state": dict(document["state"]),
            "spec": SimSpec.from_dict(document["spec"]),
            "metrics": dict(document["metrics"]),
            "command": str(document["command"]),
            "package_version": str(document["package_version"]),
            "base": document.get("base"),
            "exported": exported,
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _damaged(folder / STATE_FILE, f"it has a missing or wrong entry, {error!r}") from error
    file = folder / CONFIG_FILE
    trusted = partial(require_trusted, file=file, what=CHECKPOINT, signature=document.get(_SIGNATURE), trust=trust, replaced=replaced)
    config = _read_config(file, trusted)
    return Checkpoint(path=folder, policy=policy, learner=learner, config=config, **parts)


def adopt_checkpoint(checkpoint: Checkpoint, run_dir: Path | str) -> Checkpoint:
    """Copy a checkpoint, and its base model if that is inside its run, to become the first of a run in another folder.
    Raises UserError: it cannot be written there; IncompatibleCheckpointError: it names a base model outside its run."""
    run, root = Path(run_dir), Path(run_dir) / "checkpoints"
    final = root / checkpoint_name(checkpoint.step)
    try:
        if checkpoint.base is not None and checkpoint.base["within_run"]:
            place = run / str(checkpoint.base["path"])
            if not place.resolve().is_relative_to(run.resolve()):
                raise IncompatibleCheckpointError(
                    f"Checkpoint '{checkpoint.path}' has a base model outside of its run, which is not allowed."
                )
            copy_files(checkpoint.run_dir / str(checkpoint.base["path"]), place)
        root.mkdir(parents=True, exist_ok=True)
        temporary = _fresh_temporary(root)
        copy_files(checkpoint.path, temporary)
        _publish(temporary, final, ("last",))
    except OSError as error:
        raise cannot_write(final, error) from error
    return replace(checkpoint, path=final.resolve())


def resolve_checkpoint(path: Path | str) -> Path:
    """The folder of a checkpoint, from its path, its run's or a link's. Raises IncompatibleCheckpointError if there is none."""
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
        choices = f" Checkpoints beside it: {', '.join(folder.name for folder in siblings)}." if siblings else ""
        raise IncompatibleCheckpointError(f"Checkpoint '{path}' does not exist.{choices} Give a run's folder or one of its checkpoints.")
    fix = "Give a run's folder or one of its checkpoints/step_… folders."
    if runs := [run_dir for run_dir in given.glob("*/") if find_last(run_dir) is not None]:
        newest = max(runs, key=lambda run_dir: (run_dir / "checkpoints").stat().st_mtime_ns)
        fix = f"The folder contains several runs ({newest} saved last): give one of them."
    raise IncompatibleCheckpointError(f"'{path}' is not a checkpoint ({STATE_FILE} is missing). {fix}")


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a checkpoint's state takes JSON values only, got {type(value).__name__}: put arrays and tensors into `learner`")


def _fresh_temporary(root: Path) -> Path:
    for aside in root.glob(f"{_ASIDE}*"):
        # After a crash while a checkpoint was replaced by another of the same step, the old one is restored.
        if not (whole := root / aside.name.removeprefix(_ASIDE)).exists():
            os.rename(aside, whole)
    for leftover in root.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = root / f".tmp-{os.getpid()}"
    temporary.mkdir()
    return temporary


def _verify(folder: Path, document: dict[str, Any], with_learner: bool) -> None:
    """Check the files that will be read against their digests. Checkpoints older than digests pass, as do parts of ranks: their index,
    which is checked here, has its own digests."""
    sums: FileSums = document.get("files", {})
    for name, expected in sums.items():
        read_elsewhere = name.startswith(f"{SHARDED_FOLDER}/rank_") or (name == LEARNER_FILE and not with_learner)
        path = folder / name
        # Their readers report them if they are missing.
        if read_elsewhere or (name in (POLICY_FILE, LEARNER_FILE, CONFIG_FILE) and not path.is_file()):
            continue
        if (fault := fault_of(path, expected)) is None:
            continue
        if name == CONFIG_FILE:
            _read_config(path)  # an edited configuration may raise a clearer error
        raise _damaged(path, fault)


def _damaged(path: Path, why: object) -> IncompatibleCheckpointError:
    """The error of a checkpoint's file that is not what was written, with a way out."""
    return IncompatibleCheckpointError(f"Checkpoint file '{path}' is truncated or damaged: {brief(why)}. {_way_out(path)}")


def _way_out(path: Path) -> str:
    folder = next((parent for parent in path.parents if (parent / STATE_FILE).exists()), path.parent)
    others = [other for other in _by_age(folder.parent) if other.resolve() != folder.resolve()]
    if not others:
        return "The run has no other checkpoint: train again, or put the file back."
    return f"Use the checkpoint before it: resume={others[-1]} (for an evaluation: checkpoint=)."


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    try:
        document = parse_json(read_regular(path))
    except (ValueError, OSError) as error:
        raise _damaged(path, error) from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version not in _READ_VERSIONS:
        writer = document.get("package_version", "unknown") if isinstance(document, dict) else "unknown"
        raise IncompatibleCheckpointError(
            f"Checkpoint '{folder}' has format version {brief(version, 20)} (written by embodied_rl {brief(writer, 20)}); "
            f"embodied_rl {__version__} reads versions 1 to {FORMAT_VERSION}. Install the version that wrote it, or train again."
        )
    try:
        check_sums(document)
    except ValueError as error:
        raise _damaged(path, error) from error
    return dict(document)


def _read_config(path: Path, check: Callable[..., None] | None = None) -> TrainConfig:
    """`check` gets what was read, and the bytes that it was read from, before anything is built from it: what is signed, checked and used
    are the same bytes."""
    with _reading(path):
        content = read_regular(path)
        plain = parse_yaml(content)
    if check is not None:
        check(plain, content=content)
    with _reading(path):
        return TrainConfig.from_dict(plain)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise IncompatibleCheckpointError(f"Checkpoint '{path.parent}' is incomplete: {path.name} is missing. {_OTHER}") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:  # UserError is a ValueError
        raise IncompatibleCheckpointError(f"Checkpoint file '{path}' cannot be read as a configuration: {brief(error, 260)}") from error


def _link(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def _by_age(root: Path) -> list[Path]:
    """Whole checkpoints, oldest save first; by time and not by step, because a run may resume from an earlier step."""
    if not root.is_dir():
        return []
    whole = [folder for folder in root.iterdir() if _FOLDER.fullmatch(folder.name) and (folder / STATE_FILE).is_file()]
    return sorted(whole, key=lambda folder: ((folder / STATE_FILE).stat().st_mtime_ns, folder.name))


def _prune(root: Path, keep_last: int) -> None:
    kept = {os.readlink(root / name) for name in ("last", "best") if (root / name).is_symlink()}
    for folder in _by_age(root)[:-keep_last]:
        if folder.name not in kept:
            # Renamed first, so that a crash during the removal leaves no half checkpoint under its name.
            doomed = root / f".tmp-pruned-{folder.name}"
            os.rename(folder, doomed)
            shutil.rmtree(doomed)


_WEIGHTS = ("*.safetensors", "config.json")
"""Files of a model's folder that identify the model."""


def note_base(folder: Path | str, run_dir: Path | str) -> dict[str, Any]:
    """Entry of a checkpoint about its adapter's base model: the folder's path, relative to the run if it is inside, and the SHA-256 of its
    weights (about a second for two gigabytes)."""
    place, run = Path(folder).resolve(), Path(run_dir).resolve()
    files = [path for pattern in _WEIGHTS for path in place.glob(pattern)]
    within = place.is_relative_to(run)
    return {"path": str(place.relative_to(run) if within else place), "within_run": within, "files": sums_of(place, files)}


def base_of(checkpoint: Checkpoint, given: str | None = None, *, verify: bool = True) -> Path | None:
    """The folder of the model that a checkpoint's adapter belongs to; None if the checkpoint is whole.

    Args:
        given: the folder that the configuration names; None: the noted one.
        verify: read the files, and compare them with those that were trained on.

    Raises IncompatibleCheckpointError: the model is missing, or is not the one that was trained on.
    """
    if checkpoint.base is None:
        return None
    base: Mapping[str, Any] = checkpoint.base
    noted = checkpoint.run_dir / base["path"] if base["within_run"] else Path(base["path"])
    folder = noted if given is None or not Path(given).is_dir() else Path(given)
    who = f"Checkpoint '{checkpoint.path}' holds only an adapter"
    if not folder.is_dir():
        raise IncompatibleCheckpointError(
            f"{who}, and its base model is missing: '{folder}'. Restore that folder (or a link to it), or set policy.model (policy.path "
            "of a vision-language-action model) to its new location."
        )
    for name, expected in base["files"].items() if verify else ():
        if (fault := fault_of(folder / name, expected)) is not None:
            raise IncompatibleCheckpointError(
                f"{who}, and '{folder}' is not the base model that it was trained on: of '{name}', {fault}. Give the folder of that model."
            )
    return folder


class CheckpointWriter:
    """Saves the checkpoints of one run, one at a time, in order; with `asynchronous` in a separate thread.

    ```
      training:  save(1) ─ copies ─▶ continues ……… save(2) ─ waits for 1, copies ─▶ continues ……… wait()
     thread:              └─ files, SHA-256, flush, rename, `last` ─┘   └─ … ─┘
    ```
    """

    def __init__(self, run_dir: Path, *, asynchronous: bool = False) -> None:
        self.run_dir, self.asynchronous = run_dir, asynchronous
        self._thread: threading.Thread | None = None
        self._failure: list[BaseException] = []
        for leftover in (run_dir / "checkpoints").glob(f"{PARTS}*"):  # of a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)

    def parts_folder(self, step: int) -> Path:
        """Folder for the ranks' parts of the next checkpoint. Waits as `save` does."""
        self.wait()
        return self.run_dir / "checkpoints" / f"{PARTS}{checkpoint_name(step)}"

    def save(
        self,
        step: int,
        *,
        policy: Mapping[str, Tensor],
        learner: Mapping[str, Tensor],
        describe: Callable[[Path], None] | None = None,
        **content: Any,
    ) -> None:
        """Write a checkpoint (`save_checkpoint`); with `asynchronous`, copy the tensors, describe the policy and return.
        Raises UserError: it, or the checkpoint before, could not be written."""
        self.wait()
        if not self.asynchronous:
            save_checkpoint(self.run_dir, step, policy=policy, learner=learner, describe=describe, **content)
            return
        described = None if describe is None else self._described(describe)
        copied = [{name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()} for tensors in (policy, learner)]

        def write() -> None:
            try:
                move = None if described is None else partial(os.rename, described)  # onto the empty folder
                save_checkpoint(self.run_dir, step, policy=copied[0], learner=copied[1], describe=move, **content)
            except BaseException as error:  # `wait` raises it, in the thread that asked
                self._failure.append(error)
            finally:
                if described is not None:
                    shutil.rmtree(described, ignore_errors=True)

        # Not a daemon thread, so that a program that ends waits for it.
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=False)
        self._thread.start()

    def _described(self, describe: Callable[[Path], None]) -> Path:
        """Write the policy's description at once, because tokenizers cannot be read while others use them."""
        folder = self.run_dir / "checkpoints" / f"{PARTS}model"
        try:
            folder.mkdir(parents=True)
            write_description(describe, folder)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise cannot_write(folder.parent, error) from error
            raise
        return folder

    def wait(self) -> None:
        """Wait until everything is written. Raises a failure, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure:
            raise self._failure.pop()


# ---- whether a checkpoint, or one domain's part of it, fits a simulator and a policy ----------------------------------


def domain_part(checkpoint: Checkpoint, domain: str | None) -> Checkpoint:
    """The checkpoint of a run with one domain unchanged; for a run with several, the part of one domain.

    Raises:
        UserError: the run has several domains and none is named, or an unknown one.
        IncompatibleCheckpointError: the checkpoint has no entry for the domain.
    """
    domains = checkpoint.config.domains
    if not domains:
        if domain is not None:
            raise UserError(f"domain={domain}: checkpoint '{checkpoint.path}' is of a run with one domain: leave domain= out.")
        return checkpoint
    if domain is None:
        raise UserError(f"Checkpoint '{checkpoint.path}' is of a run with several domains: choose domain={' or domain='.join(domains)}.")
    require_known(domain, domains, f"domain={domain} is not known.")
    role = checkpoint.config.policy_of(domain)
    prefix = f"roles.{role}."
    try:
        spec = SimSpec.from_dict(checkpoint.state["algorithm"]["specs"][domain])
    except (KeyError, TypeError, ValueError) as error:
        raise IncompatibleCheckpointError(f"Checkpoint '{checkpoint.path}' has no entry for domain '{domain}' ({error!r}).") from error
    tensors = {name.removeprefix(prefix): tensor for name, tensor in checkpoint.policy.items() if name.startswith(prefix)}
    config, place = checkpoint.config.for_domain(domain), model_place(role)
    return replace(checkpoint, config=config, policy=tensors, learner={}, spec=spec, place=place)


def check_compatible(checkpoint: Checkpoint, spec: SimSpec, *, same_task: bool = True) -> None:
    """Check that the checkpoint's policy fits a simulator.

    `same_task`: also require the task's name; False for a deliberate transfer to a task with equal spaces.

    Raises IncompatibleCheckpointError naming every part that differs.
    """
    if differences := spec_differences(checkpoint.spec, spec, same_task=same_task):
        raise IncompatibleCheckpointError(
            f"Checkpoint '{checkpoint.path}' was made for another simulator: {'; '.join(differences)} (checkpoint ≠ simulator). "
            f"Its own is sim={checkpoint.config.sim.name}."
        )


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, Tensor]) -> None:
    """Check that the checkpoint's policy tensors have the names and shapes of `expected` (a policy's state_dict).
    Raises IncompatibleCheckpointError naming the tensors that are missing, unknown or of another shape."""
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
            f"Checkpoint '{checkpoint.path}' does not fit the policy: it {'; it '.join(parts)}. Use the policy of the checkpoint's own "
            f"{CONFIG_FILE}, or another checkpoint."
        )


def _first(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


# ---- tensors: the policy's are in ``policy.safetensors``, except those in a model folder with another tool's layout (`Exported`) --------


def write_policy(folder: Path, tensors: Mapping[str, Tensor], exported: Exported) -> None:
    """Write each tensor once, into the file that `exported` names or into ``policy.safetensors``. Raises OSError."""
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        file, stored = exported.get(name, ("", name))
        files.setdefault(f"{MODEL_FOLDER}/{file}" if file else POLICY_FILE, {}).setdefault(stored, tensor)
    for file, named in (files or {POLICY_FILE: {}}).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / file, named)


def read_policy(folder: Path, exported: Exported) -> dict[str, Tensor]:
    """The inverse of `write_policy`; without an `exported`, reads all of ``policy.safetensors``.
    Raises IncompatibleCheckpointError: a file is missing or damaged, or lacks a tensor."""
    tensors = {} if exported and not (folder / POLICY_FILE).is_file() else read_tensors(folder / POLICY_FILE)
    files = {file: read_tensors(folder / MODEL_FOLDER / file) for file in sorted({file for file, _ in exported.values()})}
    for name, (file, stored) in exported.items():
        if stored not in files[file]:
            raise _damaged(folder / MODEL_FOLDER / file, f"it lacks the tensor '{stored}'")
        tensors[name] = files[file][stored]
    return tensors


def read_exported(document: object, path: Path) -> dict[str, tuple[str, str]]:
    """Check an `Exported` from a file. Raises IncompatibleCheckpointError."""
    exported: dict[str, tuple[str, str]] = {}
    for name, place in document.items() if isinstance(document, dict) else [("", None)]:
        if not (isinstance(place, list) and len(place) == 2 and _is_model_file(place[0]) and isinstance(place[1], str)):
            raise _damaged(path, "a tensor of 'exported' has no valid model file")
        exported[name] = (place[0], place[1])
    return exported


def _is_model_file(found: object) -> bool:
    *own, file = found.split("/") if isinstance(found, str) else [""]
    depth = len(own) - (own[-1:] == ["value_head"])
    return file in MODEL_FILES and depth <= 1 and all(part.isidentifier() for part in own)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file that transformers can read too (``format: pt``). Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # safetensors refuses tensors that share memory (tied weights); all but the first are copied.
    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        address = value.untyped_storage().data_ptr()
        plain[name] = value.clone() if address in seen else value
        seen.add(address)
    try:
        save_file(plain, path, metadata={"format": "pt"})
        reset_mode(path)
    except SafetensorError as error:
        raise OSError(f"{error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file. Raises IncompatibleCheckpointError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise IncompatibleCheckpointError(f"Checkpoint '{path.parent}' is incomplete: {path.name} is missing. {_OTHER}")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise _damaged(path, error) from error
