"""Vision-language models: pictures in sequences, against the models' own forwards of one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.errors import UserError
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.packing import TokenSequence
from tests.policies.language_models import alone, random_sequences, tiny
from tests.policies.vision_models import IMAGE, KINDS, make_vision_model, picture


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {kind: make_vision_model(kind, root / kind) for kind in KINDS}


def build(folder: Path, **options: Any) -> LanguagePolicy:
    return build_language_policy(LanguageConfig(str(folder), **options))


def sequences_of(policy: LanguagePolicy) -> list[TokenSequence]:
    """No picture, one, and two of different sizes."""
    image_id = policy.tokenizer.id_of(IMAGE)
    plain, one, two = random_sequences(0, ((4, 5), (3, 9), (2, 6)))
    before = policy.tokenizer.encode("go left")
    pictures = [(), (picture(1),), (picture(2, 16, 16), picture(3, 32, 16))]
    found = []
    for sequence, images in zip((plain, one, two), pictures, strict=True):
        prompt = np.concatenate([before, *[np.array([image_id, 7])] * len(images), sequence.token_ids[~sequence.mask]])
        found.append(TokenSequence.of(policy.expand_images(prompt, images), sequence.token_ids[sequence.mask], images))
    return found


def own_inputs(kind: str, folder: Path, sequence: TokenSequence, image_id: int) -> dict[str, Any]:
    """What the model's authors give it: pixels, and for Qwen2-VL the kinds of tokens; it works positions out itself."""
    if not sequence.images:
        return {}
    prepared = transformers.AutoImageProcessor.from_pretrained(folder)(images=list(sequence.images), return_tensors="pt")
    if kind == "llava":
        return {"pixel_values": prepared["pixel_values"]}
    kinds = torch.from_numpy((sequence.token_ids == image_id).astype(np.int32))[None]
    return {"pixel_values": prepared["pixel_values"], "image_grid_thw": prepared["image_grid_thw"], "mm_token_type_ids": kinds}


@pytest.mark.parametrize("layout", ["auto", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_models_own_forward(folders: dict[str, Path], kind: str, layout: str) -> None:
    policy = build(folders[kind], layout=layout)
    assert policy.layout == ("right" if layout == "auto" else "left")
    sequences = sequences_of(policy)
    with torch.no_grad():
        evaluation = policy.evaluate(sequences)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folders[kind], dtype=torch.float32).eval()
    for row, sequence in enumerate(sequences):
        image_id = policy.tokenizer.id_of(IMAGE)
        log_prob, entropy = alone(model, sequence, image_id, **own_inputs(kind, folders[kind], sequence, image_id))
        columns = np.flatnonzero(sequence.mask)
        np.testing.assert_allclose(evaluation.log_prob[row, columns].numpy(), log_prob[columns - 1], atol=1e-5)
        np.testing.assert_allclose(evaluation.entropy[row, columns].numpy(), entropy[columns - 1], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_matter_and_learn(folders: dict[str, Path], kind: str) -> None:
    policy = build(folders[kind], lora_rank=2, value_head="linear")
    sequence = sequences_of(policy)[1]
    other = TokenSequence(sequence.token_ids, sequence.mask, (picture(9),))
    with torch.no_grad():
        assert (policy.evaluate([sequence]).log_prob - policy.evaluate([other]).log_prob).abs().max() > 0.01
    policy.evaluate([sequence]).log_prob.sum().backward()
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in policy.parameters())


def test_pixels_are_processed_once_per_forward(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of tokens and positions follow from a picture's size, which is known from its first forward on."""
    policy = build(folders["qwen2_vl"])
    assert policy.vision is not None
    sequences, processed = sequences_of(policy), []

    def process(images: list[np.ndarray], **options: Any) -> Any:
        processed.extend(images)
        return processor(images=images, **options)

    processor = policy.vision._processor
    monkeypatch.setattr(policy.vision, "_processor", process)
    policy.evaluate(sequences)
    assert len(processed) == sum(len(sequence.images) for sequence in sequences) == 3


def test_number_of_tokens_by_hand(folders: dict[str, Path]) -> None:
    grids = build(folders["qwen2_vl"]).vision
    assert grids is not None
    # 32 x 48 pixels are 4 x 6 patches of 8; 2 x 2 of them are one token: 6. A 16 x 16 picture is 2 x 2 patches: 1.
    assert grids.num_tokens([picture(0, 32, 48), picture(0, 16, 16)]) == [6, 1]
    # 16 x 16 pixels in patches of 8, whatever the picture's size.
    fixed = build(folders["llava"]).vision
    assert fixed is not None
    assert fixed.num_tokens([picture(0, 32, 48)]) == [4]
    image_id = fixed.image_token_id
    assert fixed.expand(np.array([5, image_id, 6]), [picture(0)]).tolist() == [5, *[image_id] * 4, 6]


def test_positions_of_a_picture_by_hand(folders: dict[str, Path]) -> None:
    policy = build(folders["qwen2_vl"])
    assert policy.vision is not None
    image_id = policy.vision.image_token_id
    images = (picture(0, 32, 48),)
    tokens = policy.expand_images(np.array([5, image_id, 6, 7]), images)
    positions = policy.vision.position_ids(policy.base, tokens, images)
    # One word at 0; the picture's 2 x 3 tokens begin at 1 in each axis; words go on behind the largest of them, 1 + 2 = 3.
    assert positions[0].tolist() == [0, 1, 1, 1, 1, 1, 1, 4, 5]
    assert positions[1].tolist() == [0, 1, 1, 1, 2, 2, 2, 4, 5]
    assert positions[2].tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 5]


def test_what_does_not_fit_is_said(folders: dict[str, Path], tmp_path: Path) -> None:
    policy = build(folders["llava"])
    assert policy.vision is not None
    with pytest.raises(UserError, match=r"1 image placeholders .* for 2 images"):
        policy.expand_images(np.array([5, policy.vision.image_token_id]), [picture(0), picture(1)])
    with pytest.raises(UserError, match="has 1 image tokens, but its 1 images take 4"):
        policy.evaluate([TokenSequence.of(np.array([5, policy.vision.image_token_id]), np.array([6]), (picture(0),))])
    grids = build(folders["qwen2_vl"])
    assert grids.vision is not None
    both = grids.expand_images(np.array([5, *[grids.vision.image_token_id] * 2]), [picture(0), picture(1)])
    with pytest.raises(UserError, match="are adjacent"):
        grids.evaluate([TokenSequence.of(both, np.array([6]), (picture(0), picture(1)))])
    with pytest.raises(UserError, match=r"uint8 \[H, W, 3\], got float32 \[8, 8, 3\]"):
        policy.vision.tensors([np.zeros((8, 8, 3), np.float32)])
    with pytest.raises(UserError, match=r"packed: a llava model"):
        build(folders["llava"], layout="packed")
    blind = build(tiny(tmp_path / "blind"))
    with pytest.raises(UserError, match="takes no images"):
        blind.evaluate([TokenSequence.of(np.array([5]), np.array([6]), (picture(0),))])
    with pytest.raises(UserError, match="takes no images"):
        blind.expand_images(np.array([5]), [])
    (folders["llava"] / "preprocessor_config.json").rename(tmp_path / "kept.json")
    try:
        with pytest.raises(UserError, match=r"without preprocessor_config\.json"):
            build(folders["llava"])
    finally:
        (tmp_path / "kept.json").rename(folders["llava"] / "preprocessor_config.json")


@pytest.mark.parametrize("kind", KINDS)
def test_saved_with_its_image_processor(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    policy = build(folders[kind], lora_rank=2)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
    again = build(policy.save_model(tmp_path / "saved"))
    sequences = sequences_of(policy)
    with torch.no_grad():
        torch.testing.assert_close(policy.evaluate(sequences).log_prob, again.evaluate(sequences).log_prob, atol=2e-5, rtol=0)
