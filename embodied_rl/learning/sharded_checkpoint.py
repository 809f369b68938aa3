"""Checkpoints of sharded tensors: every rank writes its own part, and any number of ranks reads them.

    <folder>/
        index.json              names, shapes and types; file and position of each tensor's rectangles; SHA-256 of every file
        rank_00000.safetensors  the parts of rank 0, and so on

A folder is whole or absent: ranks write into ``<folder>.partial-<number>``, and rank 0 renames it once every rank's part is there. Ranks
find one another only through these files, so that writing can continue in the background while training uses the network.
Nothing is unpickled (torch's own distributed checkpoints keep their metadata in a pickle).
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from embodied_rl.errors import IncompatibleCheckpointError, UserError, brief
from embodied_rl.files import (
    cannot_write,
    check_sums,
    fault_of,
    fsync,
    replace_folder,
    reset_mode,
    sha256_of,
    sum_of_document,
    write_atomic,
)
from embodied_rl.learning import fsdp
from embodied_rl.policies.model_folder import torch_dtype
from embodied_rl.reading import parse_json, read_regular

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

FORMAT_VERSION = 1
INDEX_FILE = "index.json"
_POLL_S = 0.01
_FAILED = ".failed"


@dataclass
class SavingCheckpoint:
    """A checkpoint that is being written; the tensors may change meanwhile."""

    folder: Path
    _thread: threading.Thread
    _failure: list[BaseException]

    def finish(self) -> None:
        """Wait until writing has ended, whatever the result."""
        self._thread.join()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait for the whole folder and return it.
        Raises UserError: it cannot be written, or a rank did not write its part in time; TimeoutError: it is not finished yet."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"checkpoint '{self.folder}' is still being written.")
        if self._failure:
            raise self._failure[0]
        return self.folder


def save_sharded(
    folder: Path | str,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    timeout_s: float = 600.0,
    lost: Callable[[], Exception | None] = lambda: None,
) -> SavingCheckpoint:
    """Write plain and sharded tensors; a collective call. Replaces what exists at `folder` once the new one is whole.

    Args:
        tensors: the same names on every rank, such as parameters and ``optimizer.exp_avg.<name>``. Rank 0 writes the plain ones.
        metadata: JSON values of rank 0 (the step, the number of ranks, …).
        asynchronous: return once the parts are copied to the host; `SavingCheckpoint.wait` raises later errors. False: wait here.
        timeout_s: longest wait for the slowest rank's part.
        lost: of rank 0, which asks while it waits: the error for a rank that has ended, whose part will never come.

    Raises UserError: the folder cannot be written.
    """
    final, rank, num_ranks = Path(folder), _rank(), _num_ranks()
    partial = final.with_name(f"{final.name}.partial-{_common_number():016x}")
    parts, entries = _own_parts(tensors, rank)
    description = {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")} for name, tensor in tensors.items()
    }
    failure: list[BaseException] = []

    def write() -> None:
        try:
            _write_part(partial, rank, parts, entries)
            if rank == 0:
                _finish(partial, final, description, dict(metadata or {}), num_ranks, timeout_s, lost)
            else:
                _await(lambda: not partial.exists(), timeout_s, f"rank 0 did not finish checkpoint '{final}'")
        except (OSError, SafetensorError) as error:
            failure.append(cannot_write(final, error if isinstance(error, OSError) else OSError(str(error))))
        except BaseException as error:  # `wait` raises it, in the thread that called it
            failure.append(error)
        if failure and rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # frees the space; the other ranks wait for its removal
        elif failure:
            _tell_failure(partial, rank, failure[0])

    saving = SavingCheckpoint(final, threading.Thread(target=write, name="checkpoint", daemon=False), failure)
    saving._thread.start()
    if not asynchronous:
        saving.wait()
    return saving


def load_sharded(folder: Path | str, tensors: Mapping[str, Tensor], *, verify: bool = True) -> dict[str, Any]:
    """Fill plain and sharded tensors in place, each rank its own part, from any number of writing ranks; return the metadata.
    `verify`: check the SHA-256 of the files that are read. Raises IncompatibleCheckpointError: missing, damaged, of another format version,
    or with other tensors."""
    folder = Path(folder)
    index = read_index(folder)
    for name, tensor in tensors.items():
        _check_entry(folder, name, tensor, index["tensors"].get(name))
    verified: set[str] = set()
    for name, tensor in tensors.items():
        local = tensor.detach()
        start = [0] * tensor.dim()
        if fsdp.is_cut(local):
            start = [part.start for part in fsdp.own_slice(local)]
            local = local.to_local()
        if local.numel():
            _fill(folder, index, name, local, start, verified if verify else None)
    return dict(index["metadata"])


def read_whole(folder: Path | str, *, verify: bool = True) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, assembled. Raises IncompatibleCheckpointError as `load_sharded` does."""
    described = read_index(folder)["tensors"]
    tensors = {name: torch.empty(entry["shape"], dtype=torch_dtype(entry["dtype"])) for name, entry in described.items()}
    load_sharded(folder, tensors, verify=verify)
    return tensors


def read_index(folder: Path | str) -> dict[str, Any]:
    """The index of a checkpoint. Raises IncompatibleCheckpointError if it is missing or damaged."""
    path = Path(folder) / INDEX_FILE
    try:
        index = parse_json(read_regular(path))
        version = index["format_version"]
    except FileNotFoundError as error:
        raise IncompatibleCheckpointError(f"'{folder}' is not a sharded checkpoint: {INDEX_FILE} is missing.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    if version != FORMAT_VERSION:
        what = f"Checkpoint '{folder}' has format version {brief(version, 20)}"
        raise IncompatibleCheckpointError(f"{what}; this program reads {FORMAT_VERSION}.")
    try:
        check_sums(index)
        for name, entry in index["tensors"].items():
            _check_parts(name, entry, index["files"])
        dict(index["metadata"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error if isinstance(error, ValueError) else f"it has a missing or wrong entry, {error!r}") from error
    return index


def _check_parts(name: str, entry: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Raise ValueError if a tensor's entry in the index is impossible, before memory is allocated for it."""
    shape, dtype = entry["shape"], vars(torch).get(str(entry["dtype"]))
    places = [(shape, shape), *((part["start"], part["size"]) for part in entry["parts"])]
    sides = [side for place in places for row in place for side in row]
    whole = all(isinstance(row, list) and len(row) == len(shape) for place in places for row in place)
    if not whole or any(type(side) is not int or not 0 <= side < 2**48 for side in sides) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"tensor {name!r:.60} has no shape, type and parts")
    if any(
        not isinstance(part["file"], str) or part["file"] not in files or Path(part["file"]).name != part["file"] for part in entry["parts"]
    ):
        raise ValueError(f"tensor {name!r:.60} lies in a file that is not listed")
    # Parts may occur twice, which hides a missing one; fewer bytes than the tensor has never suffice.
    if math.prod(shape) * dtype.itemsize > len(entry["parts"]) * max((files[part["file"]]["bytes"] for part in entry["parts"]), default=0):
        raise ValueError(f"tensor {name!r:.60} needs more bytes than its files have")


def _damaged(path: Path, why: object) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(f"Checkpoint file '{path}' is truncated or damaged: {brief(why)}. Use another checkpoint.")


# ---- inside -------------------------------------------------------------------------------------------------------------


def _own_parts(tensors: Mapping[str, Tensor], rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies of this rank's parts, and each part's position in its tensor. Of equal copies, only the first rank's is written."""
    parts: dict[str, Tensor] = {}
    entries: dict[str, Any] = {}
    for name, tensor in tensors.items():
        local, start = tensor.detach(), [0] * tensor.dim()
        if fsdp.is_cut(local):
            copies = [dim for dim, placement in enumerate(local.placements) if not _is_cut(placement)]
            coordinate: Sequence[int] = local.device_mesh.get_coordinate() or []
            if any(coordinate[dim] for dim in copies):
                continue
            start = [part.start for part in fsdp.own_slice(local)]
            local = local.to_local()
        elif rank != 0:
            continue
        if local.numel() == 0 and tensor.numel() > 0:
            continue
        parts[name] = local.cpu().contiguous().clone()
        entries[name] = {"start": start, "size": list(local.shape)}
    return parts, entries


def _is_cut(placement: Placement) -> bool:
    """Whether the placement is some kind of shard (FSDP over tensor parallelism has its own class)."""
    return "Shard" in type(placement).__name__


def _write_part(partial: Path, rank: int, parts: dict[str, Tensor], entries: dict[str, Any]) -> None:
    partial.mkdir(parents=True, exist_ok=True)
    path = partial / f"rank_{rank:05d}.safetensors"
    save_file(parts, path)
    reset_mode(path)
    fsync(path)
    # This file marks the part as whole.
    write_atomic(partial / f"rank_{rank:05d}.json", json.dumps({"parts": entries, "sha256": sha256_of(path), "bytes": path.stat().st_size}))


def _tell_failure(partial: Path, rank: int, error: BaseException) -> None:
    """Write the error into a file, so that rank 0 does not wait for the part. The file is empty if there is no space for the text."""
    path = partial / f"rank_{rank:05d}{_FAILED}"
    with contextlib.suppress(OSError, UserError):
        if not partial.is_dir():
            return
        try:
            # With the text in one write: rank 0 removes the folder as soon as it sees the file.
            write_atomic(path, str(error))
        except (OSError, UserError):
            path.touch()


def _all_there(partial: Path, notes: list[Path]) -> bool:
    """Whether all ranks' parts are there. Raises UserError if a rank reports a failure."""
    for note in notes:
        failed = note.with_suffix(_FAILED)
        if failed.is_file():
            raise UserError(failed.read_text(encoding="utf-8") or f"Rank {note.stem} cannot write its part: is the disk full?")
    return all(note.is_file() for note in notes)


def _finish(
    partial: Path,
    final: Path,
    description: dict[str, Any],
    metadata: dict[str, Any],
    num_ranks: int,
    timeout_s: float,
    lost: Callable[[], Exception | None],
) -> None:
    notes = [partial / f"rank_{rank:05d}.json" for rank in range(num_ranks)]
    _await(lambda: _all_there(partial, notes), timeout_s, f"not every rank wrote its part of checkpoint '{final}'", lost)
    files, places = {}, {name: [] for name in description}  # type: ignore[var-annotated]
    for note in notes:
        written = json.loads(note.read_text(encoding="utf-8"))
        file = f"{note.stem}.safetensors"
        files[file] = {"sha256": written["sha256"], "bytes": written["bytes"]}
        for name, place in written["parts"].items():
            # Ranks of one tensor-parallel group hold equal copies of everything that is not divided.
            if not any((other["start"], other["size"]) == (place["start"], place["size"]) for other in places[name]):
                places[name].append({"file": file, **place})
        note.unlink()
    index = {
        "format_version": FORMAT_VERSION,
        "metadata": metadata,
        "files": files,
        "tensors": {name: {**entry, "parts": places[name]} for name, entry in description.items()},
    }
    index = json.loads(json.dumps(index))
    write_atomic(partial / INDEX_FILE, json.dumps({**index, "sha256": sum_of_document(index)}, indent=1))
    replace_folder(partial, final)


def _fill(folder: Path, index: dict[str, Any], name: str, local: Tensor, start: list[int], verified: set[str] | None) -> None:
    """Copy the parts that overlap the rectangle at `start`."""
    missing = local.numel()
    for part in index["tensors"][name]["parts"]:
        overlap = [(max(a, b), min(a + n, b + m)) for a, n, b, m in zip(start, local.shape, part["start"], part["size"], strict=True)]
        if any(low >= high for low, high in overlap):
            continue
        path = folder / part["file"]
        if verified is not None and part["file"] not in verified:
            if (fault := fault_of(path, index["files"][part["file"]])) is not None:
                raise _damaged(path, fault)
            verified.add(part["file"])
        source = tuple(slice(low - b, high - b) for (low, high), b in zip(overlap, part["start"], strict=True))
        target = tuple(slice(low - a, high - a) for (low, high), a in zip(overlap, start, strict=True))
        try:
            with safe_open(path, framework="pt") as file:
                found = file.get_tensor(name) if not source else file.get_slice(name)[source]
            view = local[target] if target else local
            if found.shape != view.shape:
                raise ValueError(f"'{brief(name, 60)}' has the shape {brief(list(found.shape), 60)}")
        except (SafetensorError, OSError, RuntimeError, ValueError, IndexError) as error:
            raise _damaged(path, error) from error
        view.copy_(found)
        missing -= view.numel()
    if missing:
        raise IncompatibleCheckpointError(f"Checkpoint '{folder}' lacks {missing} entries of '{brief(name, 60)}'. Use another checkpoint.")


def _check_entry(folder: Path, name: str, tensor: Tensor, entry: dict[str, Any] | None) -> None:
    if entry is None:
        raise IncompatibleCheckpointError(
            f"Checkpoint '{folder}' has no tensor '{brief(name, 60)}': it belongs to another model, or has no optimizer state."
        )
    wanted = [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
    if [entry["shape"], entry["dtype"]] != wanted:
        raise IncompatibleCheckpointError(
            f"Tensor '{brief(name, 60)}' of checkpoint '{folder}' is {entry['dtype']} {brief(entry['shape'], 60)}, "
            f"but {wanted[1]} {wanted[0]} is needed."
        )


def _await(condition: Callable[[], bool], timeout_s: float, what: str, lost: Callable[[], Exception | None] = lambda: None) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if (ended := lost()) is not None and not condition():  # its part may be there
            raise ended
        if time.monotonic() > deadline:
            raise UserError(f"{what} within {timeout_s:g} s. Do all ranks see the same folder?")
        time.sleep(_POLL_S)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _common_number() -> int:
    """A random number common to all ranks: keeps saves to the same folder apart from each other, and from leftovers of a crash."""
    number = torch.tensor([secrets.randbits(62)], dtype=torch.int64)
    if dist.is_initialized():
        on_device = number.cuda() if dist.get_backend() == "nccl" else number
        dist.broadcast(on_device, 0)
        number = on_device.cpu()
    return int(number)
