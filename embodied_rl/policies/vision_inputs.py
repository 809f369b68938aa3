"""Images for vision-language models: pixels, number of tokens per image, and positions of its tokens.

It supports two families: image grids with three-dimensional rotary positions (Qwen2-VL and its successors), and a fixed number of patches
(LLaVA-1.5). Image processors run through PIL; torchvision is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from embodied_rl.errors import UserError
from embodied_rl.policies.model_folder import first_line, import_transformers, value_of

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedModel

_IMAGE = 1
"""transformers' mark of image tokens in ``mm_token_type_ids``; text is 0."""


class VisionInputs:
    """Image inputs of a vision-language model, beside token ids."""

    def __init__(self, processor: BaseImageProcessor, config: PretrainedConfig) -> None:
        self._processor = processor
        self._config = config
        tokens = [value_of(config, name) for name in ("image_token_id", "image_token_index")]
        if not any(isinstance(token, int) for token in tokens):
            raise UserError(f"The configuration of model type '{config.model_type}' has no image token.")
        self.image_token_id: int = next(token for token in tokens if isinstance(token, int))
        self.has_grids = hasattr(config.vision_config, "spatial_merge_size")
        """Whether the number of an image's tokens depends on its size."""
        self._grids: dict[tuple[int, ...], Tensor] = {}
        """{size of an image: its grid [3]}, so that only `tensors` processes pixels."""

    @staticmethod
    def read(folder: str | Path, config: PretrainedConfig) -> VisionInputs:
        """Read from a model folder and its transformers configuration.
        Raises UserError: there is no image processor, or the model is of neither family."""
        folder = Path(folder)
        if not (folder / "preprocessor_config.json").is_file() and not (folder / "processor_config.json").is_file():
            raise UserError(f"'{folder}' is a vision-language model without preprocessor_config.json, so images cannot be prepared for it.")
        vision = config.vision_config
        if not hasattr(vision, "spatial_merge_size") and config.model_type != "llava":
            raise UserError(
                f"Images for model type '{config.model_type}' are not supported. Supported: Qwen2-VL and its successors, LLaVA-1.5."
            )
        try:
            processor = import_transformers().AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (ValueError, OSError, KeyError, ImportError, TypeError) as error:
            raise UserError(f"Cannot read the image processor in '{folder}': {first_line(error)}") from error
        return VisionInputs(processor, config)

    def save(self, folder: str | Path) -> None:
        """Write the image processor's files into a model folder."""
        self._processor.save_pretrained(str(folder))

    def placeholder_ids(self) -> list[int]:
        """Tokens of one image in a text before `expand`, including begin and end tokens if the model has them."""
        first, last = (value_of(self._config, name) for name in ("vision_start_token_id", "vision_end_token_id"))
        if isinstance(first, int) and isinstance(last, int):
            return [first, self.image_token_id, last]
        return [self.image_token_id]

    def tensors(self, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Tensors {"pixel_values": …, "image_grid_thw": [I, 3]} of I images uint8 [H, W, 3]; grids only if the model has them.
        Raises UserError: an image is not uint8 [H, W, 3], or too small or narrow for the model."""
        for image in images:
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                raise UserError(f"Images must be uint8 [H, W, 3], got {image.dtype} {list(image.shape)}.")
        try:
            prepared = self._processor(images=list(images), return_tensors="pt")
        except ValueError as error:
            raise UserError(f"The model's image processor rejects an image: {error}") from error
        return {name: prepared[name] for name in ("pixel_values", "image_grid_thw") if name in prepared}

    def num_tokens(self, images: Sequence[np.ndarray]) -> list[int]:
        """Number of prompt tokens of each image."""
        if not images:
            return []
        if self.has_grids:
            return [int(grid.prod()) // self._config.vision_config.spatial_merge_size**2 for grid in self._grids_of(images)]
        vision = self._config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2
        return [patches + (1 if self._config.vision_feature_select_strategy == "full" else 0)] * len(images)

    def expand(self, prompt_ids: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
        """Replace each image's placeholder by as many tokens as the image takes: [P'] int64.
        Raises UserError: the numbers of placeholders and images differ."""
        places = np.flatnonzero(prompt_ids == self.image_token_id)
        if len(places) != len(images):
            raise UserError(f"The prompt has {len(places)} image placeholders (token {self.image_token_id}) for {len(images)} images.")
        repeats = np.ones(len(prompt_ids), np.int64)
        repeats[places] = self.num_tokens(images)
        return np.repeat(prompt_ids, repeats)

    def check(self, token_ids: np.ndarray, images: Sequence[np.ndarray]) -> None:
        """Raise UserError if the image tokens of an expanded prompt do not match its images."""
        wanted, is_image = self.num_tokens(images), token_ids == self.image_token_id
        if sum(wanted) != int(is_image.sum()):
            raise UserError(
                f"The sequence has {int(is_image.sum())} image tokens, but its {len(images)} images take {sum(wanted)}. "
                "Expand prompts with `expand`."
            )
        borders = np.flatnonzero(np.diff(is_image.astype(np.int8), prepend=0, append=0))
        if self.has_grids and (borders[1::2] - borders[::2]).tolist() != wanted:
            # Positions follow from runs of image tokens, so two adjacent images would count as one.
            raise UserError("Two images are adjacent in the prompt: put a token between them (this family has an end-of-image token).")

    def exclude(self, logits: Tensor) -> Tensor:
        """Set the image token's logits [..., V] to -inf: a sampled one would refer to a picture that the request does not have."""
        return logits.index_fill(-1, torch.tensor([self.image_token_id], device=logits.device), float("-inf"))

    def position_ids(self, model: PreTrainedModel, token_ids: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
        """Positions of one sequence [S]: [S] int64, or [3, S] (time, height, width) for three-dimensional rotary positions."""
        plain = np.arange(len(token_ids))
        if not hasattr(model.model, "get_rope_index"):
            return plain
        if not images:
            return np.broadcast_to(plain, (3, len(token_ids))).copy()
        ids = torch.from_numpy(np.asarray(token_ids, np.int64))[None]
        kinds = torch.where(ids == self.image_token_id, _IMAGE, 0).int()
        grids = self._grids_of(images)
        positions, _ = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids, attention_mask=torch.ones_like(ids))
        return positions[:, 0].numpy()

    def _grids_of(self, images: Sequence[np.ndarray]) -> Tensor:
        """[I, 3] patches of each image in time, height and width."""
        for image in images:
            if image.shape not in self._grids:
                self._grids[image.shape] = self.tensors([image])["image_grid_thw"][0]
        return torch.stack([self._grids[image.shape] for image in images])
