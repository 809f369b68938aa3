"""Tensors of a checkpoint: their files, and how these are written and read.

A policy's tensors are in ``policy.safetensors``, except those in a model folder with another tool's layout (`Exported`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from embodied_rl.errors import IncompatibleCheckpointError, brief
from embodied_rl.files import reset_mode, sha256_of

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


def by_file(names: Iterable[str], exported: Exported) -> dict[str, dict[str, str]]:
    """{file in the checkpoint: {name in it: tensor of the state}} for a policy's tensors."""
    files: dict[str, dict[str, str]] = {}
    for name in names:
        file, stored = exported.get(name, ("", name))
        files.setdefault(f"{MODEL_FOLDER}/{file}" if file else POLICY_FILE, {}).setdefault(stored, name)
    return files or {POLICY_FILE: {}}


def write_policy(folder: Path, tensors: Mapping[str, Tensor], exported: Exported) -> None:
    """Write each tensor once, into the file that `exported` names or into ``policy.safetensors``. Raises OSError."""
    for file, names in by_file(tensors, exported).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / file, {stored: tensors[name] for stored, name in names.items()})


def read_policy(folder: Path, exported: Exported, way_out: str) -> dict[str, Tensor]:
    """The inverse of `write_policy`; without an `exported`, reads all of ``policy.safetensors``.
    Raises IncompatibleCheckpointError: a file is missing or damaged, or lacks a tensor."""
    tensors = {} if exported and not (folder / POLICY_FILE).is_file() else read_tensors(folder / POLICY_FILE, way_out)
    files = {file: read_tensors(folder / MODEL_FOLDER / file, way_out) for file in sorted({file for file, _ in exported.values()})}
    for name, (file, stored) in exported.items():
        if stored not in files[file]:
            raise IncompatibleCheckpointError(f"Checkpoint file '{folder / MODEL_FOLDER / file}' lacks the tensor '{stored}'. {way_out}")
        tensors[name] = files[file][stored]
    return tensors


def read_exported(document: object, path: Path) -> dict[str, tuple[str, str]]:
    """Check an `Exported` from a file. Raises IncompatibleCheckpointError."""
    exported: dict[str, tuple[str, str]] = {}
    for name, place in document.items() if isinstance(document, dict) else [("", None)]:
        if not (isinstance(place, list) and len(place) == 2 and _is_model_file(place[0]) and isinstance(place[1], str)):
            raise IncompatibleCheckpointError(f"Checkpoint file '{path}' is damaged: a tensor of 'exported' has no valid model file.")
        exported[name] = (place[0], place[1])
    return exported


def _is_model_file(found: object) -> bool:
    *own, file = found.split("/") if isinstance(found, str) else [""]
    depth = len(own) - (own[-1:] == ["value_head"])
    return file in MODEL_FILES and depth <= 1 and all(part.isidentifier() for part in own)


def weights_sha256(folder: Path, exported: Exported) -> str:
    """Digest that identifies the weights: that of their file; for several files, of their names and digests."""
    files = {POLICY_FILE} if not exported else {f"{MODEL_FOLDER}/{file}" for file, _ in exported.values()}
    if exported and (folder / POLICY_FILE).is_file():
        files.add(POLICY_FILE)
    sums = {file: sha256_of(folder / file) for file in sorted(files)}
    return next(iter(sums.values())) if len(sums) == 1 else hashlib.sha256(json.dumps(sums).encode()).hexdigest()


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


def read_tensors(path: Path, way_out: str) -> dict[str, Tensor]:
    """Read a file. Raises IncompatibleCheckpointError, with the advice `way_out`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise IncompatibleCheckpointError(f"Checkpoint '{path.parent}' is incomplete: {path.name} is missing. Use another checkpoint.")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise IncompatibleCheckpointError(f"Checkpoint file '{path}' is truncated or damaged ({brief(error)}). {way_out}") from error
