"""Reading and writing OpenVLA's weights: `config.json` and safetensors in one file or several with an index.

Published checkpoints load unchanged, and the original's code loads the written ones. Nothing is unpickled: heads published as ``.pt`` files
must be converted first (docs/openvla.md shows how).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from embodied_rl.errors import UserError
from embodied_rl.files import write_atomic
from embodied_rl.policies.model_folder import check_names, names_of, read_safetensors, save_state, weight_files

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


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
        check_names(directory, wanted, state)
        found |= state.keys()
        model.load_state_dict(state, strict=False, assign=True)
    missing = [name for name in wanted if name not in found and name not in optional]
    if missing:
        raise UserError(f"The checkpoint in '{directory}' lacks {names_of(missing)}. Is it complete, and OpenVLA's?")


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
