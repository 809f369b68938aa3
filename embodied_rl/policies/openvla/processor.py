"""Conversion of instructions and camera images to the model's inputs.

Shape legend: B rows, I images of a row, P prompt tokens, S pixels of a side.
"""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from embodied_rl.errors import MissingExtraError, UserError, did_you_mean, require_known
from embodied_rl.policies.model_folder import read_json
from embodied_rl.policies.openvla.config import OpenVLAConfig, ResizeStrategy
from embodied_rl.policies.openvla.model import BOS_TOKEN, EMPTY_TOKEN

# ---- statistics of a data set -----------------------------------------------------------------------------------------

# Shape legend: A action dimensions, D dimensions of the robot's state.


Bounds = Literal["quantiles", "extremes"]
"""quantiles: the 1st and 99th percentile are -1 and 1 (OpenVLA; OFT on LIBERO and Bridge). extremes: minimum and maximum (OFT on ALOHA)."""


@dataclass(frozen=True, eq=False)
class Range:
    """Linear scale between a robot's units and [-1, 1]."""

    low: np.ndarray
    """[A] float64 value that maps to -1."""
    high: np.ndarray
    """[A] float64 value that maps to 1."""
    mask: np.ndarray
    """[A] bool: False where values pass unscaled (usually the gripper)."""
    epsilon: float = 0.0
    """Addition to the width: 1e-8 in OpenVLA-OFT, none in OpenVLA."""

    @property
    def dim(self) -> int:
        return int(self.low.size)

    def unnormalise(self, normalised: np.ndarray) -> np.ndarray:
        """[..., A] in [-1, 1] → [..., A] float64 in the robot's units."""
        scaled = 0.5 * (normalised + 1.0) * (self.high - self.low + self.epsilon) + self.low
        return np.where(self.mask, scaled, normalised)

    def normalise(self, values: np.ndarray) -> np.ndarray:
        """[..., A] in the robot's units → [..., A] float64 clipped to [-1, 1]."""
        width = np.maximum(self.high - self.low + self.epsilon, 1e-8)
        return np.clip(np.where(self.mask, 2.0 * (values - self.low) / width - 1.0, values), -1.0, 1.0)


def range_of(
    norm_stats: Mapping[str, Any],
    key: str | None,
    part: Literal["action", "proprio"] = "action",
    *,
    bounds: Bounds = "quantiles",
    epsilon: float = 0.0,
) -> Range:
    """Read one data set's range from a checkpoint's statistics.
    `key`: the data set; None if the checkpoint has only one.
    Raises UserError: no such data set (the choices are listed), or its entry is incomplete."""
    if key is None and len(norm_stats) != 1:
        known = ", ".join(sorted(norm_stats)) or "(none)"
        raise UserError(f"policy.unnorm_key must name the data set whose action ranges are used. Known: {known}.")
    name = next(iter(norm_stats)) if key is None else key
    require_known(name, norm_stats, f"policy.unnorm_key='{key}' is not in the checkpoint's norm_stats.")
    entry = norm_stats[name]
    require_known(part, entry, f"norm_stats['{name}'] has no '{part}'.")
    statistics = entry[part]
    low_name, high_name = ("q01", "q99") if bounds == "quantiles" else ("min", "max")
    missing = [field for field in (low_name, high_name) if field not in statistics]
    if missing:
        raise UserError(f"norm_stats['{name}']['{part}'] has no '{missing[0]}'.{did_you_mean(missing[0], statistics)}")
    try:
        low, high = (np.asarray(statistics[field], np.float64) for field in (low_name, high_name))
        mask = np.asarray(statistics.get("mask", np.ones(low.shape, bool)), bool)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"norm_stats['{name}']['{part}'] is damaged: {error}.") from error
    if not low.shape == high.shape == mask.shape or low.ndim != 1:
        raise UserError(
            f"norm_stats['{name}']['{part}']: sizes differ: {low_name} {low.shape}, {high_name} {high.shape}, mask {mask.shape}."
        )
    return Range(low, high, mask, epsilon)


# ---- pictures ---------------------------------------------------------------------------------------------------------

# The original uses torchvision on PIL images, which is PIL's own resampling. Resizing happens once, on uint8: both vision transformers see
# the same picture and differ only in their normalisation, which runs on the device.
#
# Shape legend: B rows, I images of a row, H × W pixels of a camera, S pixels of a side.


CROP_AREA = 0.9
"""Share of the picture's area that OpenVLA's LIBERO checkpoints read: their training used random crops of that area."""
_JPEG_QUALITY = 95


@dataclass(frozen=True)
class Normalisation:
    """Per-channel mean and standard deviation of the six channels ``[DINOv2's three, SigLIP's three]``."""

    mean: tuple[float, ...] = (0.484375, 0.455078125, 0.40625, 0.5, 0.5, 0.5)
    """ImageNet's means, rounded to bfloat16: the model was trained with those."""
    std: tuple[float, ...] = (0.228515625, 0.2236328125, 0.224609375, 0.5, 0.5, 0.5)


class PixelNormaliser(nn.Module):
    """Normalises uint8 pictures on their own device. Its constants are not part of any checkpoint."""

    mean: Tensor
    """[6, 1, 1] float32"""
    std: Tensor
    """[6, 1, 1] float32"""

    def __init__(self, constants: Normalisation | None = None) -> None:
        super().__init__()
        constants = constants or Normalisation()
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(vars(constants)[name], dtype=torch.float32).view(6, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [B, I, S, S, 3] → float32 [B, I, 6, S, S]"""
        size = images.shape[2:4]
        # .float(): `module.to(bfloat16)` converts these buffers too; the constants survive it, the arithmetic would not.
        mean, std = self.mean.float().view(6, 1), self.std.float().view(6, 1)
        # (pixels / 255 - mean) / std of both halves, with channels before positions, as one product whose other terms are zeros.
        scale = torch.eye(3, device=images.device).repeat(2, 1).div_(255.0 * std)
        flat = images.flatten(0, 1).flatten(1, 2).float()
        with torch.autocast(images.device.type, enabled=False):
            pixels = torch.baddbmm(-mean / std, scale.expand(len(flat), -1, -1), flat.transpose(1, 2))
        return pixels.view(*images.shape[:2], 6, *size)


def check_images(images: np.ndarray, key: str) -> None:
    """Raise UserError unless these are uint8 images [B, H, W, 3]."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or 0 in images.shape[1:3]:
        raise UserError(
            f"Observation '{key}' must hold uint8 images [B, H, W, 3] with values 0 to 255, got {images.dtype} {list(images.shape)}."
        )


def resize_images(images: np.ndarray, size: int, strategy: ResizeStrategy, *, key: str = "rgb") -> np.ndarray:
    """uint8 [B, H, W, 3] → uint8 [B, size, size, 3], bicubic.

    - ``resize-naive``: stretch to the square.
    - ``resize-crop``: shorter side to `size`, then the middle.
    - ``letterbox``: grey bars make it square, then stretch.
    Raises UserError: wrong dtype or shape; the message names the observation `key`.
    """
    check_images(images, key)
    if images.shape[1:3] == (size, size):
        return images
    return np.stack([np.asarray(_resize(Image.fromarray(image), size, strategy)) for image in images])


def _resize(image: Image.Image, size: int, strategy: ResizeStrategy) -> Image.Image:
    if strategy == "resize-naive":
        return image.resize((size, size), Image.Resampling.BICUBIC)
    if strategy == "letterbox":
        # Equal bars on both sides, so one pixel short of a square if the difference is odd, as in the original. Their grey is the mean of
        # the second normalisation, 0.5, in 255ths.
        across, down = ((max(image.size) - side) // 2 for side in image.size)
        padded = Image.new("RGB", (image.width + 2 * across, image.height + 2 * down), (127, 127, 127))
        padded.paste(image, (across, down))
        image = padded
    width, height = image.size
    short, long = min(width, height), max(width, height)
    scaled = int(size * long / short)
    image = image.resize((size, scaled) if width <= height else (scaled, size), Image.Resampling.BICUBIC)
    left, top = round((image.width - size) / 2.0), round((image.height - size) / 2.0)
    return image.crop((left, top, left + size, top + size))


# ---- LIBERO -----------------------------------------------------------------------------------------------------------


def libero_images(images: np.ndarray, size: int = 224, *, crop_area: float | None = CROP_AREA, rotate: bool = True) -> np.ndarray:
    """Prepare LIBERO's camera images like its data set's images: uint8 [B, H, W, 3] → uint8 [B, size, size, 3].

    Steps: rotation by 180° (the data set's cameras are upside down), a JPEG round trip, Lanczos3 to `size`, and the central `crop_area`
    stretched back. The original runs TensorFlow's kernels; PIL's agree to about one grey level.
    """
    check_images(images, "rgb")
    turned = images[:, ::-1, ::-1] if rotate else images
    pictures = np.stack([_lanczos(_jpeg_round_trip(image), size) for image in turned])
    return pictures if crop_area is None else center_crop(pictures, crop_area)


def center_crop(images: np.ndarray, area: float = CROP_AREA) -> np.ndarray:
    """Crop the central `area` (0 to 1] of the *area* and stretch it bilinearly to the same size: uint8 [B, S, S, 3] → the same.

    Samples are on a grid from corner to corner of the crop, both corners included (TensorFlow's `crop_and_resize`).
    """
    check_images(images, "rgb")
    side = math.sqrt(min(max(area, 0.0), 1.0))
    height, width = images.shape[1:3]
    rows, columns = (np.linspace((1.0 - side) / 2.0, (1.0 + side) / 2.0, length) * (length - 1) for length in (height, width))
    pixels = images.astype(np.float32) / 255.0
    mixed = _between(_between(pixels, rows, axis=1), columns, axis=2)
    return np.minimum(np.clip(mixed, 0.0, 1.0) * 255.5, 255.0).astype(np.uint8)


def _between(values: np.ndarray, places: np.ndarray, axis: int) -> np.ndarray:
    """Linear interpolation along an axis at fractional positions."""
    below = np.floor(places).astype(np.int64)
    above = np.minimum(below + 1, values.shape[axis] - 1)
    share = (places - below).astype(np.float32).reshape([-1 if index == axis else 1 for index in range(values.ndim)])
    return values.take(below, axis) * (1.0 - share) + values.take(above, axis) * share


def _jpeg_round_trip(image: np.ndarray) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, "JPEG", quality=_JPEG_QUALITY, subsampling="4:2:0")
    return np.asarray(Image.open(buffer))


def _lanczos(image: np.ndarray, size: int) -> np.ndarray:
    """Lanczos resize in float, rounded once at the end."""
    channels: Sequence[np.ndarray] = [
        np.asarray(Image.fromarray(image[..., channel].astype(np.float32)).resize((size, size), Image.Resampling.LANCZOS))
        for channel in range(3)
    ]
    return np.clip(np.round(np.stack(channels, axis=-1)), 0, 255).astype(np.uint8)


def libero_gripper(actions: np.ndarray) -> np.ndarray:
    """Convert the last dimension from the data set's 0 (closed) … 1 (open) to LIBERO's 1 (close) or -1 (open): 2g - 1, sign, negated."""
    turned = np.array(actions, dtype=np.float64)
    turned[..., -1] = -np.sign(2.0 * turned[..., -1] - 1.0)
    return turned


Encode = Callable[[str], list[int]]
"""Function from a prompt to its tokens, BOS first."""

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
    """Preprocessing: prompt, tokenizer, resizing and the normalisation's constants."""

    config: OpenVLAConfig
    encode: Encode
    normalisation: Normalisation = field(default_factory=Normalisation)
    source: Path | None = None
    """Checkpoint folder of the tokenizer; `save` copies its files."""

    @staticmethod
    def from_pretrained(directory: str | Path, config: OpenVLAConfig | None = None) -> OpenVLAProcessor:
        """Read the tokenizer and, if present, `preprocessor_config.json`.
        Raises MissingExtraError; UserError: no tokenizer in the folder, or a preprocessor of another kind."""
        directory = Path(directory)
        config = config or OpenVLAConfig.read(directory)
        return OpenVLAProcessor(config, _tokenizer(directory), _normalisation(directory), directory)

    def token_ids(self, instruction: str) -> list[int]:
        """The prompt's tokens: BOS, text, and the lone space 29871 before the actions.
        Raises UserError: the instruction is empty, or the tokenizer is not Llama's."""
        ids = list(self.encode(prompt_of(instruction)))
        if not ids or ids[0] != BOS_TOKEN:
            raise UserError(f"The tokenizer must put BOS ({BOS_TOKEN}) first, got {ids[:3]}. Is it the checkpoint's own?")
        if max(ids) >= self.config.vocab_size:
            raise UserError(
                f"The tokenizer gave token {max(ids)}, but the model knows {self.config.vocab_size}. Is it the checkpoint's own?"
            )
        return ids if ids[-1] == EMPTY_TOKEN else [*ids, EMPTY_TOKEN]

    def prompts(self, instructions: Sequence[str], length: int | None = None) -> PromptBatch:
        """Batch prompts, padded between BOS and text.
        `length`: P; None: the longest prompt's. With a fixed length, batches of different instructions share one CUDA graph and can be
        stored together.
        Raises UserError: a prompt is longer than `length`."""
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
        """Resize camera images uint8 [B, H, W, 3] to pictures uint8 [B, S, S, 3], by the checkpoint's resize strategy.
        Raises UserError: wrong dtype or shape."""
        return resize_images(images, self.config.image_size, self.config.resize, key=key)

    def save(self, directory: str | Path) -> None:
        """Copy the tokenizer's and the preprocessor's files beside the weights; does nothing if they did not come from a folder."""
        if self.source is None or self.source.resolve() == Path(directory).resolve():
            return
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name in _COPIED:
            if (self.source / name).exists():
                shutil.copyfile(self.source / name, Path(directory) / name)


def _tokenizer(directory: Path) -> Encode:
    """`tokenizer.json` runs unchanged; transformers converts a lone `tokenizer.model`."""
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
    raise UserError(f"'{directory}' has no tokenizer.json and no tokenizer.model. Copy the checkpoint's tokenizer files there.")


def _normalisation(directory: Path) -> Normalisation:
    path = directory / "preprocessor_config.json"
    if not path.exists():
        return Normalisation()
    data = read_json(path)
    means, stds = data.get("means"), data.get("stds")
    if means is None or stds is None:
        return Normalisation()
    values: np.ndarray = np.empty(0)
    with suppress(TypeError, ValueError):
        values = np.array([means, stds], np.float64)
    if values.shape != (2, 2, 3):
        raise UserError(f"'{path}' must hold two means and two stds of three channels each, got {means} and {stds}.")
    return Normalisation(*(tuple(part.ravel().tolist()) for part in values))
