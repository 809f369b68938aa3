"""Reading and writing OpenVLA's weights: `config.json` and safetensors in one file or several with an index.

Published checkpoints load unchanged, and the original's code loads the written ones. Nothing is unpickled: heads published as ``.pt`` files
must be converted first (docs/openvla.md shows how).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from embodied_rl.errors import UserError
from embodied_rl.files import write_atomic, write_atomic_with
from embodied_rl.policies.model_folder import weight_files

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 4


def load_weights(
    model: nn.Module,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    optional: Collection[str] = (),
) -> None:
    """Fill a model on the meta device, shard by shard: memory contains at most the model and one tensor.
    `optional`: names that the main files need not contain (they have separate files).
    Raises UserError: a file or shard is missing or damaged, a key is missing, unknown or of the wrong shape."""
    wanted = model.state_dict()
    found: set[str] = set()
    for path in weight_files(directory, "model"):
        state = read_safetensors(path, dtype=dtype, device=device)
        _check(directory, wanted, state)
        found |= state.keys()
        model.load_state_dict(state, strict=False, assign=True)
    missing = [name for name in wanted if name not in found and name not in optional]
    if missing:
        raise UserError(f"The checkpoint in '{directory}' lacks {_list(missing)}. Is it complete, and OpenVLA's?")


def load_state(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """`load_state_dict`, strict, with a one-line error for mismatches. Raises UserError."""
    wanted = module.state_dict()
    _check(source, wanted, state)
    missing = [name for name in wanted if name not in state]
    if missing:
        raise UserError(f"'{source}' lacks {_list(missing)}.")
    module.load_state_dict(dict(state), assign=True)


def read_safetensors(path: Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read all tensors of a file. Raises UserError if it is missing, damaged, or a pickle."""
    if path.suffix in (".pt", ".pth", ".bin"):
        raise UserError(f"'{path}' is a pickle, which can run code when it is read. Convert it to safetensors (docs/openvla.md).")
    state = {}
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                state[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    except (OSError, SafetensorError) as error:
        raise UserError(f"Cannot read '{path}': {error}. Is the file complete?") from error
    return state


def save_weights(state: Mapping[str, Tensor], config: Mapping[str, object], directory: Path, max_shard_bytes: int) -> None:
    """Write `config.json` and the weights, in one file or in shards of at most `max_shard_bytes`.

    Files are written under temporary names and renamed, the index last. Weights left from an earlier save are removed.
    """
    from huggingface_hub import split_torch_state_dict_into_shards  # a dependency of transformers

    split = split_torch_state_dict_into_shards(dict(state), max_shard_size=max_shard_bytes)
    for name, keys in split.filename_to_tensors.items():
        save_state({key: state[key] for key in keys}, directory / name)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        write_atomic(directory / INDEX, json.dumps(index, indent=2))
    else:
        (directory / INDEX).unlink(missing_ok=True)
    for stale in {*directory.glob("model-?????-of-?????.safetensors"), directory / SINGLE} - {
        directory / name for name in split.filename_to_tensors
    }:
        stale.unlink(missing_ok=True)
    write_atomic(directory / "config.json", json.dumps(config, indent=2, sort_keys=True))


def save_state(state: Mapping[str, Tensor], path: Path) -> None:
    """Write one safetensors file, marked as PyTorch's so that transformers accepts it."""
    whole = {name: tensor.detach().contiguous() for name, tensor in state.items()}
    write_atomic_with(path, lambda temporary: save_file(whole, temporary, metadata={"format": "pt"}))


def _check(place: object, wanted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    unknown = [name for name in state if name not in wanted]
    if unknown:
        raise UserError(f"'{place}' holds {_list(unknown)}, which this model does not have.")
    wrong = [name for name, tensor in state.items() if tensor.shape != wanted[name].shape]
    if wrong:
        name = wrong[0]
        raise UserError(f"'{place}': '{name}' is {list(state[name].shape)}, but this model has {list(wanted[name].shape)}.")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:_SHOWN]) + more
