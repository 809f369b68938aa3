"""Pictures against the original's torchvision pipeline, and the parts that it does not cover against second implementations."""

from __future__ import annotations

import io as bytes_io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from embodied_rl.errors import UserError
from embodied_rl.policies.openvla.config import ResizeStrategy
from embodied_rl.policies.openvla.processor import PixelNormaliser, center_crop, libero_gripper, libero_images, resize_images


@pytest.mark.parametrize("strategy", ["resize-naive", "resize-crop", "letterbox"])
def test_pixels_equal_the_originals(io: dict[str, Tensor], strategy: ResizeStrategy) -> None:
    expected = io[f"pixel_values.{strategy}.every_8th"]
    images = io["images"].numpy()[: len(expected)]
    pixels = PixelNormaliser()(torch.from_numpy(resize_images(images, 224, strategy))[:, None])[:, 0]
    # The two strategies that crop were stored in half precision: values to 2.6 in steps of up to 2e-3.
    torch.testing.assert_close(pixels[..., 4::8, 3::8], expected, atol=1e-6 if strategy == "resize-naive" else 1.1e-3, rtol=0)


def test_normalisation_by_hand() -> None:
    pixels = PixelNormaliser()(torch.full((1, 1, 2, 2, 3), 51, dtype=torch.uint8))  # 51/255 = 0.2
    expected = [(0.2 - 0.484375) / 0.228515625, (0.2 - 0.455078125) / 0.2236328125, (0.2 - 0.40625) / 0.224609375, -0.6, -0.6, -0.6]
    torch.testing.assert_close(pixels[0, 0, :, 1, 1], torch.tensor(expected))


def test_each_pixel_is_normalised_on_its_own() -> None:
    images = torch.randint(0, 256, (2, 3, 5, 4, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = PixelNormaliser()(images)
    assert found.shape == (2, 3, 6, 5, 4)
    assert found.is_contiguous()
    mean = np.array([0.484375, 0.455078125, 0.40625, 0.5, 0.5, 0.5])[:, None, None]
    std = np.array([0.228515625, 0.2236328125, 0.224609375, 0.5, 0.5, 0.5])[:, None, None]
    scaled = np.moveaxis(images.numpy() / 255.0, -1, 2)
    np.testing.assert_allclose(found.numpy(), (np.concatenate([scaled, scaled], axis=2) - mean) / std, atol=1e-6)


def test_normalisation_keeps_its_precision_in_a_bfloat16_model() -> None:
    image = torch.arange(12, dtype=torch.uint8).view(1, 1, 2, 2, 3) * 20
    exact = PixelNormaliser()(image)
    assert torch.equal(PixelNormaliser().to(torch.bfloat16)(image), exact)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(PixelNormaliser()(image), exact)


@pytest.mark.parametrize("strategy", ["resize-crop", "letterbox"])
def test_portrait_is_landscape_turned(strategy: ResizeStrategy) -> None:
    image = np.random.default_rng(0).integers(96, 160, (1, 60, 91, 3), np.uint8)
    turned = resize_images(image.transpose(0, 2, 1, 3), 32, strategy).transpose(0, 2, 1, 3)
    # PIL resamples one axis after the other and rounds between (and would clip, had the image blacks and whites).
    assert np.abs(turned.astype(int) - resize_images(image, 32, strategy)).max() <= 2


def test_strategies_keep_what_they_promise() -> None:
    image = np.zeros((1, 100, 200, 3), np.uint8)
    image[:, :, 50:150] = 255
    # The middle square is all white; the letterbox is grey above and below; the naive one keeps black sides.
    assert (resize_images(image, 50, "resize-crop")[:, :, 2:-2] == 255).all()
    boxed = resize_images(image, 50, "letterbox")[0]
    assert (boxed[0] == 127).all()
    assert (boxed[25, 25] == 255).all()
    assert (boxed[25, 0] == 0).all()
    naive = resize_images(image, 50, "resize-naive")[0]
    assert (naive[:, 0] == 0).all()
    assert (naive[:, 25] == 255).all()


def test_pictures_of_the_right_size_are_not_touched() -> None:
    image = np.random.default_rng(1).integers(0, 256, (2, 32, 32, 3), np.uint8)
    for strategy in ("resize-naive", "resize-crop", "letterbox"):
        assert np.array_equal(resize_images(image, 32, strategy), image)


@pytest.mark.parametrize(
    "images",
    [np.zeros((1, 8, 8, 3), np.float32), np.zeros((8, 8, 3), np.uint8), np.zeros((1, 3, 8, 8), np.uint8), np.zeros((1, 0, 8, 3), np.uint8)],
)
def test_wrong_images_are_one_line(images: np.ndarray) -> None:
    with pytest.raises(UserError, match=r"'wrist' must hold uint8 images \[B, H, W, 3\]") as error:
        resize_images(images, 224, "resize-naive", key="wrist")
    assert str(list(images.shape)) in str(error.value)


def test_center_crop_against_a_loop() -> None:
    image = np.random.default_rng(2).integers(0, 256, (1, 9, 9, 3), np.uint8)
    cropped = center_crop(image, 0.64)[0]
    # Side 0.8: the crop runs from 0.1 to 0.9 of the way between the first and last pixel's centers, 0.8 to 7.2, in 8 steps of 0.8.
    for row in range(9):
        for column in range(9):
            y, x = 0.8 + 0.8 * row, 0.8 + 0.8 * column
            y0, x0 = int(y), int(x)
            fy, fx = y - y0, x - x0
            corner = image[0, y0 : y0 + 2, x0 : x0 + 2].astype(float)
            mixed = (corner[0, 0] * (1 - fx) + corner[0, 1] * fx) * (1 - fy) + (corner[1, 0] * (1 - fx) + corner[1, 1] * fx) * fy
            assert np.abs(cropped[row, column] - mixed * 255.5 / 255).max() <= 1.0
    assert np.array_equal(center_crop(image, 1.0), image)


def test_libero_pictures() -> None:
    image = np.zeros((1, 64, 64, 3), np.uint8)
    image[:, :32, :32] = (200, 40, 40)
    picture = libero_images(image, 224)[0]
    assert picture.shape == (224, 224, 3)
    # The red quarter was at the top left; after half a turn it is at the bottom right.
    assert np.abs(picture[170, 170].astype(int) - (200, 40, 40)).max() <= 4
    assert picture[50, 50].max() <= 4
    # Without the crop, the border between the quarters stays in the middle, and with it too.
    assert 100 < picture[170, 112, 0] + picture[170, 111, 0] < 300
    plain = libero_images(image, 64, crop_area=None, rotate=False)[0]
    assert np.abs(plain[:24, :24].astype(int) - (200, 40, 40)).max() <= 2


def test_lanczos_agrees_with_the_integer_version() -> None:
    image = np.asarray(Image.effect_noise((48, 48), 60).convert("RGB"))[None]
    ours = libero_images(image, 20, crop_area=None, rotate=False)[0]
    buffer = bytes_io.BytesIO()
    Image.fromarray(image[0]).save(buffer, "JPEG", quality=95)
    integer = np.asarray(Image.open(buffer).resize((20, 20), Image.Resampling.LANCZOS))
    assert np.abs(ours.astype(int) - integer).max() <= 1


def test_gripper() -> None:
    actions = np.array([[0.3, 1.0], [0.3, 0.0], [0.3, 0.5], [0.3, 0.8]])
    turned = libero_gripper(actions)
    assert turned.tolist() == [[0.3, -1.0], [0.3, 1.0], [0.3, 0.0], [0.3, -1.0]]
    assert actions[0, 1] == 1.0, "the caller's array is left alone"
