"""Camera images to the square pictures that OpenVLA sees, and to normalised pixels.

The original does this with torchvision on PIL images; what torchvision does there is PIL's own resampling. Resizing happens once,
on uint8: both vision transformers see the same picture and differ only in their normalisation, which is done on the device.

Shape legend: B rows, I images of a row, H × W pixels of a camera, S pixels of a side.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from embodied_rl.errors import UserError
from embodied_rl.policies.openvla.config import ResizeStrategy

CROP_AREA = 0.9
"""Share of the picture's area that OpenVLA's LIBERO checkpoints look at: they were trained with random crops of that area."""
_JPEG_QUALITY = 95


@dataclass(frozen=True)
class Normalisation:
    """Per-channel mean and standard deviation of the six channels ``[DINOv2's three, SigLIP's three]``."""

    mean: tuple[float, ...] = (0.484375, 0.455078125, 0.40625, 0.5, 0.5, 0.5)
    """ImageNet's means, rounded to bfloat16: the model was trained with those."""
    std: tuple[float, ...] = (0.228515625, 0.2236328125, 0.224609375, 0.5, 0.5, 0.5)


class PixelNormaliser(nn.Module):
    """uint8 pictures to normalised pixels on the pictures' own device. Its constants are no part of any checkpoint."""

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
        # .float(): `module.to(bfloat16)` reaches these buffers too; the constants survive it, the arithmetic would not.
        mean, std = self.mean.float().view(6, 1), self.std.float().view(6, 1)
        # (pixels / 255 - mean) / std of both halves, and channels before places, by one product whose other terms are zeros.
        scale = torch.eye(3, device=images.device).repeat(2, 1).div_(255.0 * std)
        flat = images.flatten(0, 1).flatten(1, 2).float()
        with torch.autocast(images.device.type, enabled=False):
            pixels = torch.baddbmm(-mean / std, scale.expand(len(flat), -1, -1), flat.transpose(1, 2))
        return pixels.view(*images.shape[:2], 6, *size)


def check_images(images: np.ndarray, key: str) -> None:
    """Raises UserError unless these are uint8 images [B, H, W, 3]."""
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
        image = _letterbox(image)
    width, height = image.size
    short, long = min(width, height), max(width, height)
    scaled = int(size * long / short)
    image = image.resize((size, scaled) if width <= height else (scaled, size), Image.Resampling.BICUBIC)
    left, top = round((image.width - size) / 2.0), round((image.height - size) / 2.0)
    return image.crop((left, top, left + size, top + size))


def _letterbox(image: Image.Image) -> Image.Image:
    """Equal bars on both sides, so one pixel short of a square where the difference is odd, as the original leaves it."""
    longest = max(image.size)
    horizontal, vertical = (longest - image.width) // 2, (longest - image.height) // 2
    # The mean of the second normalisation, 0.5, in 255ths.
    padded = Image.new("RGB", (image.width + 2 * horizontal, image.height + 2 * vertical), (127, 127, 127))
    padded.paste(image, (horizontal, vertical))
    return padded


# ---- LIBERO -----------------------------------------------------------------------------------------------------------


def libero_images(images: np.ndarray, size: int = 224, *, crop_area: float | None = CROP_AREA, rotate: bool = True) -> np.ndarray:
    """Prepare LIBERO's camera images as its data set's images were prepared: uint8 [B, H, W, 3] → uint8 [B, size, size, 3].

    Rotation by 180° (the data set's cameras hang upside down), a JPEG round trip, Lanczos3 to `size`, and the middle `crop_area` of
    the area stretched back. The original runs TensorFlow's kernels; PIL's agree to about one grey level.
    """
    check_images(images, "rgb")
    turned = images[:, ::-1, ::-1] if rotate else images
    pictures = np.stack([_lanczos(_jpeg_round_trip(image), size) for image in turned])
    return pictures if crop_area is None else center_crop(pictures, crop_area)


def center_crop(images: np.ndarray, area: float = CROP_AREA) -> np.ndarray:
    """The middle `area` (0 to 1] of the *area*, bilinearly stretched back to the same size: uint8 [B, S, S, 3] → the same.

    Samples lie on a grid from corner to corner of the crop, both corners included (TensorFlow's `crop_and_resize`).
    """
    check_images(images, "rgb")
    side = math.sqrt(min(max(area, 0.0), 1.0))
    height, width = images.shape[1:3]
    rows, columns = (np.linspace((1.0 - side) / 2.0, (1.0 + side) / 2.0, length) * (length - 1) for length in (height, width))
    pixels = images.astype(np.float32) / 255.0
    mixed = _between(_between(pixels, rows, axis=1), columns, axis=2)
    return np.minimum(np.clip(mixed, 0.0, 1.0) * 255.5, 255.0).astype(np.uint8)


def _between(values: np.ndarray, places: np.ndarray, axis: int) -> np.ndarray:
    """Linear interpolation along an axis at fractional places."""
    below = np.floor(places).astype(np.int64)
    above = np.minimum(below + 1, values.shape[axis] - 1)
    share = (places - below).astype(np.float32).reshape([-1 if index == axis else 1 for index in range(values.ndim)])
    return values.take(below, axis) * (1.0 - share) + values.take(above, axis) * share


def _jpeg_round_trip(image: np.ndarray) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, "JPEG", quality=_JPEG_QUALITY, subsampling="4:2:0")
    return np.asarray(Image.open(buffer))


def _lanczos(image: np.ndarray, size: int) -> np.ndarray:
    """In float, rounded once at the end."""
    channels: Sequence[np.ndarray] = [
        np.asarray(Image.fromarray(image[..., channel].astype(np.float32)).resize((size, size), Image.Resampling.LANCZOS))
        for channel in range(3)
    ]
    return np.clip(np.round(np.stack(channels, axis=-1)), 0, 255).astype(np.uint8)


def libero_gripper(actions: np.ndarray) -> np.ndarray:
    """The last dimension from the data set's 0 (closed) … 1 (open) to LIBERO's 1 (close) or -1 (open): 2g - 1, sign, negated."""
    turned = np.array(actions, dtype=np.float64)
    turned[..., -1] = -np.sign(2.0 * turned[..., -1] - 1.0)
    return turned
