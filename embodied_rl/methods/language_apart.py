"""A language model's description without its weights, for processes that speak through it or train it elsewhere."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from embodied_rl.config import LanguageConfig, TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import TokenBackend
from embodied_rl.methods.language_player import make_backend
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.model_folder import import_transformers, is_vision_language
from embodied_rl.policies.vision_inputs import VisionInputs

ModelFiles = Mapping[str, np.ndarray]
"""{path below the model's folder: its bytes, [n] uint8} of configuration, tokenizer and image processor."""


@dataclasses.dataclass(frozen=True)
class ModelReader:
    """A language policy without weights. Implements `Speaking`."""

    config: LanguageConfig
    tokenizer: ChatTokenizer
    hf_config: Any
    vision: VisionInputs | None


def model_files(policy: LanguagePolicy) -> dict[str, np.ndarray]:
    """Configuration, tokenizer and image processor, as they can be sent."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy.save_config(folder)
        policy.save_description(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): np.frombuffer(path.read_bytes(), np.uint8) for path in files}


def write_model_files(files: ModelFiles, folder: Path) -> None:
    """Raises ValueError for a path that leaves the folder."""
    for name, content in files.items():
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or parts[0] == "/":
            raise ValueError(f"a model's file cannot be named {name!r}")
        path = folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.tobytes())


def read_model(config: LanguageConfig, folder: Path) -> ModelReader:
    """From a folder of `write_model_files`. Raises UserError where it is not a model's."""
    transformers = import_transformers()
    try:
        hf_config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"Cannot read the model's configuration in '{folder}': {error}") from error
    vision = VisionInputs.read(folder, hf_config) if is_vision_language(hf_config) else None
    return ModelReader(config, ChatTokenizer.read(folder), hf_config, vision)


def blank_policy(config: LanguageConfig, folder: Path) -> LanguagePolicy:
    """The policy of a folder of `write_model_files`, with random weights: a state is loaded next. Raises UserError as its builder does."""
    return build_language_policy(dataclasses.replace(config, model=str(folder)), weights=False)


def blank_backend(config: TrainConfig, folder: Path, device: torch.device) -> TokenBackend:
    """The token backend of a configuration, with random weights; `load_weights` takes `LanguagePolicy.named_weights` of the whole policy.

    `folder`: of `write_model_files`; vLLM writes its model below it.
    Raises UserError: the backend cannot run this model, or is not installed.
    """
    # What is published has its adapter merged in.
    plain = dataclasses.replace(config.language, model=str(folder), adapter=None, lora_rank=0, value_head="none")
    policy = build_language_policy(plain, device, weights=False)
    return make_backend(config.generation, policy, folder, seed=config.seed)
