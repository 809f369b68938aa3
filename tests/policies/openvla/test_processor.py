"""Prompts and their tokens against the original's, padding, and what is said of bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.errors import UserError
from embodied_rl.policies.openvla.config import OpenVLAConfig
from embodied_rl.policies.openvla.processor import OpenVLAProcessor, prompt_of
from tests.policies.openvla.conftest import VISION


def test_prompts_and_tokens_equal_the_originals(processor: OpenVLAProcessor, meta: dict[str, Any]) -> None:
    for instruction, prompt, ids in zip(meta["instructions"], meta["prompts"], meta["input_ids"], strict=True):
        assert prompt_of(instruction) == prompt
        # The original's `predict_action` appends the lone space.
        assert processor.token_ids(instruction) == [*ids, 29871]


def test_padding_stands_between_bos_and_text(processor: OpenVLAProcessor, meta: dict[str, Any]) -> None:
    batch = processor.prompts(meta["instructions"], length=37)
    assert batch.input_ids.shape == (2, 37)
    for row, ids in enumerate(meta["input_ids"]):
        padding = 37 - len(ids) - 1
        assert batch.input_ids[row].tolist() == [1, *[32000] * padding, *ids[1:], 29871]
        assert batch.mask[row].tolist() == [True, *[False] * padding, *[True] * len(ids)]
    assert processor.prompts(meta["instructions"]).input_ids.shape == (2, 35)
    assert processor.prompts(meta["instructions"][:1]).mask.all()


def test_bad_instructions_are_one_line(processor: OpenVLAProcessor, meta: dict[str, Any]) -> None:
    for empty in ("", "  \n"):
        with pytest.raises(UserError, match=r"instruction is empty.*policy\.instruction"):
            processor.prompts([empty])
    with pytest.raises(UserError, match=r"'put the spoon on the towel' has 23 tokens; policy\.prompt_tokens=10"):
        processor.prompts(meta["instructions"][:1], length=10)


def test_another_tokenizer_is_noticed(processor: OpenVLAProcessor) -> None:
    with pytest.raises(UserError, match="must put BOS"):
        dataclasses.replace(processor, encode=lambda text: [5, 6]).token_ids("push")
    with pytest.raises(UserError, match="gave token 90000"):
        dataclasses.replace(processor, encode=lambda text: [1, 90000]).token_ids("push")


def test_images_of_a_wrong_kind_name_the_camera(processor: OpenVLAProcessor) -> None:
    with pytest.raises(UserError, match="'wrist' must hold uint8 images"):
        processor.images(np.zeros((1, 8, 8, 4), np.uint8), key="wrist")


def test_normalisation_comes_from_the_checkpoint(copy: Path) -> None:
    constants = {"means": [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], "stds": [[1, 1, 1], [2, 2, 2]]}
    (copy / "preprocessor_config.json").write_text(json.dumps(constants))
    config = OpenVLAConfig.read(copy, VISION)
    found = OpenVLAProcessor.from_pretrained(copy, config).normalisation
    assert found.mean == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    assert found.std == (1, 1, 1, 2, 2, 2)
    for wrong in ([[0.5]], 5, [[0.5, 0.5, "x"], [1, 1, 1]]):
        (copy / "preprocessor_config.json").write_text(json.dumps({"means": wrong, "stds": wrong}))
        with pytest.raises(UserError, match="two means and two stds"):
            OpenVLAProcessor.from_pretrained(copy, config)
    (copy / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "PrismaticImageProcessor"}))
    assert OpenVLAProcessor.from_pretrained(copy, config).normalisation.mean[0] == 0.484375


def test_a_folder_without_or_with_a_broken_tokenizer(copy: Path) -> None:
    config = OpenVLAConfig.read(copy, VISION)
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        OpenVLAProcessor.from_pretrained(copy, config)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        OpenVLAProcessor.from_pretrained(copy, config)


def test_saving_copies_the_tokenizer(processor: OpenVLAProcessor, checkpoint: Path, tmp_path: Path) -> None:
    processor.save(tmp_path / "new")
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["tokenizer.json"]
    assert (tmp_path / "new/tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    processor.save(checkpoint)  # onto itself: nothing happens
    assert torch.equal(processor.prompts(["put the plate on the towel"]).input_ids[0, :2], torch.tensor([1, 512]))
