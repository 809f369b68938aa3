"""Instructions and camera images to what the model reads.

Shape legend: B rows, I images of a row, P prompt tokens, S pixels of a side.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.policies.openvla.config import OpenVLAConfig, read_json
from embodied_rl.policies.openvla.images import Normalisation, resize_images
from embodied_rl.policies.openvla.model import BOS_TOKEN, EMPTY_TOKEN

Encode = Callable[[str], list[int]]
"""A prompt to its tokens, BOS first."""

_COPIED = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
)


def prompt_of(instruction: str) -> str:
    """OpenVLA's prompt. Raises UserError for an instruction without a word."""
    if not instruction.strip():
        raise UserError("The instruction is empty. OpenVLA acts on language: give the task's instruction (policy.instruction=...).")
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one length."""

    input_ids: Tensor
    """[B, P] int64 ``[BOS, padding…, text, 29871]``."""
    mask: Tensor
    """[B, P] bool, False at padding."""


@dataclass(frozen=True)
class OpenVLAProcessor:
    """What stands before the model: prompt, tokenizer, resizing and the normalisation's constants."""

    config: OpenVLAConfig
    encode: Encode
    normalisation: Normalisation = field(default_factory=Normalisation)
    source: Path | None = None
    """Folder of the checkpoint that the tokenizer came from; `save` copies its files."""

    @staticmethod
    def from_pretrained(directory: str | Path, config: OpenVLAConfig | None = None) -> OpenVLAProcessor:
        """Read the tokenizer and, where there is one, `preprocessor_config.json`.

        Raises:
            UserError: no tokenizer in the folder, or a preprocessor of another kind.
            MissingExtraError: transformers is not installed.
        """
        directory = Path(directory)
        config = config or OpenVLAConfig.read(directory)
        return OpenVLAProcessor(config, _tokenizer(directory), _normalisation(directory), directory)

    def token_ids(self, instruction: str) -> list[int]:
        """The prompt's tokens: BOS, text, and the lone space 29871 that stands before the actions.

        Raises UserError: the instruction is empty, or the tokenizer is not Llama's.
        """
        ids = list(self.encode(prompt_of(instruction)))
        if not ids or ids[0] != BOS_TOKEN:
            raise UserError(f"The tokenizer must put BOS ({BOS_TOKEN}) first, got {ids[:3]}. Is it the checkpoint's own?")
        if max(ids) >= self.config.vocab_size:
            raise UserError(
                f"The tokenizer gave token {max(ids)}, but the model knows {self.config.vocab_size}. Is it the checkpoint's own?"
            )
        return ids if ids[-1] == EMPTY_TOKEN else [*ids, EMPTY_TOKEN]

    def prompts(self, instructions: Sequence[str], length: int | None = None) -> PromptBatch:
        """Prompts side by side, padded between BOS and text.

        Args:
            length: P; None: the longest prompt's. A fixed length lets batches of different instructions share one CUDA graph and be
                stored side by side.

        Raises:
            UserError: a prompt is longer than `length`.
        """
        encoded = {text: self.token_ids(text) for text in dict.fromkeys(instructions)}
        longest = max(encoded, key=lambda text: len(encoded[text]))
        size = length or len(encoded[longest])
        if len(encoded[longest]) > size:
            raise UserError(f"The prompt of '{longest}' has {len(encoded[longest])} tokens; policy.prompt_tokens={size} is too small.")
        ids = torch.full((len(instructions), size), self.config.pad_token_id, dtype=torch.int64)
        for row, text in enumerate(instructions):
            tokens = encoded[text]
            ids[row, 0] = tokens[0]
            ids[row, size - len(tokens) + 1 :] = torch.tensor(tokens[1:])
        return PromptBatch(ids, ids != self.config.pad_token_id)

    def images(self, images: np.ndarray, *, key: str = "rgb") -> np.ndarray:
        """Camera images uint8 [B, H, W, 3] → pictures uint8 [B, S, S, 3], by the checkpoint's resize strategy.

        Raises UserError: wrong dtype or shape.
        """
        return resize_images(images, self.config.image_size, self.config.resize, key=key)

    def save(self, directory: str | Path) -> None:
        """Copy the tokenizer's and the preprocessor's files beside the weights; nothing where they did not come from a folder."""
        if self.source is None or self.source.resolve() == Path(directory).resolve():
            return
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name in _COPIED:
            if (self.source / name).exists():
                shutil.copyfile(self.source / name, Path(directory) / name)


def _tokenizer(directory: Path) -> Encode:
    """`tokenizer.json` says exactly what happens, so it is run as it is; transformers converts a lone `tokenizer.model`."""
    try:
        if (directory / "tokenizer.json").exists():
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            return lambda text: list(tokenizer.encode(text).ids)
        if (directory / "tokenizer.model").exists():
            from transformers import AutoTokenizer

            converted = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
            return lambda text: list(converted(text)["input_ids"])
    except ImportError as error:
        raise MissingExtraError("OpenVLA's tokenizer", "language", error) from error
    except Exception as error:
        # tokenizers raises bare Exceptions with the parser's message.
        raise UserError(f"The tokenizer in '{directory}' cannot be read: {error}") from error
    raise UserError(f"'{directory}' holds no tokenizer.json and no tokenizer.model. Copy the checkpoint's tokenizer files there.")


def _normalisation(directory: Path) -> Normalisation:
    path = directory / "preprocessor_config.json"
    if not path.exists():
        return Normalisation()
    data = read_json(path)
    means, stds = data.get("means"), data.get("stds")
    if means is None or stds is None:
        return Normalisation()
    if [len(part) for part in (*means, *stds)] != [3, 3, 3, 3]:
        raise UserError(f"'{path}' must hold two means and two stds of three channels each, got {means} and {stds}.")
    return Normalisation(tuple(float(x) for part in means for x in part), tuple(float(x) for part in stds for x in part))
