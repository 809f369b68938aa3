"""A checkpoint folder of the tiny reference model, and what the original code computed from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, processors
from torch import Tensor

from embodied_rl.policies.openvla.config import OpenVLAConfig, ViTShape
from embodied_rl.policies.openvla.model import OpenVLA
from embodied_rl.policies.openvla.processor import OpenVLAProcessor, PixelNormaliser

FIXTURES = Path(__file__).parent / "fixtures"
VISION = (ViTShape(32, 3, 2, 128, num_registers=4, layer_scale=True), ViTShape(48, 4, 3, 179, attention_pool=True))
EMBED, HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
PIECES = {
    0: "<unk>", 1: "<s>", 2: "</s>", 13: "\n", 278: "▁the", 304: "▁to", 322: "▁and", 364: "▁r", 372: "▁it", 373: "▁on", 420: "ame",
    512: "▁In", 701: "▁up", 805: "▁sp", 881: "▁should", 1546: "▁between", 1724: "▁What", 1925: "▁put", 2058: "▁place", 2125: "▁take",
    3158: "▁action", 3744: "Out", 4628: "▁black", 5839: "▁pick", 6150: "oon", 9089: "kin", 12580: "▁bow", 15284: "▁plate",
    19964: "▁robot", 20466: "wel", 29871: "▁", 29880: "l", 29901: ":", 29973: "?",
}  # fmt: skip
"""The pieces of Llama's vocabulary that the two prompts consist of."""


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of 32000 pieces that cuts the two prompts as Llama's does."""
    vocabulary = [(PIECES.get(index, f"<{index}>"), -1.0 if index in PIECES else -100.0) for index in range(32000)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))


def whole_state() -> dict[str, Tensor]:
    """The reference weights with zeros in the rows that were left out."""
    state = load_file(FIXTURES / "model.safetensors")
    for name, part in ((EMBED, "embed"), (HEAD, "head")):
        rows, values = state.pop(f"{part}_rows").long(), state.pop(f"{part}_values")
        state[name] = values.new_zeros(32064, values.shape[1]).index_put((rows,), values)
    return state


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder as it is published. Copy it before changing anything."""
    directory = tmp_path_factory.mktemp("openvla")
    shutil.copy(FIXTURES / "config.json", directory)
    shutil.copy(FIXTURES / "oft_modules.safetensors", directory)
    save_file(whole_state(), directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    return directory


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint folder that a test may spoil."""
    shutil.copytree(checkpoint, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture(scope="session")
def meta() -> dict[str, Any]:
    """Prompts, their tokens, greedy tokens and actions of the original."""
    return json.loads((FIXTURES / "openvla_meta.json").read_text())


@pytest.fixture(scope="session")
def io() -> dict[str, Tensor]:
    return load_file(FIXTURES / "openvla_io.safetensors")


@pytest.fixture(scope="session")
def oft_io() -> dict[str, Tensor]:
    return load_file(FIXTURES / "oft_io.safetensors")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> OpenVLA:
    """The reference model in float32."""
    return OpenVLA.from_pretrained(checkpoint, dtype=torch.float32, vision=VISION)


@pytest.fixture(scope="session")
def processor(checkpoint: Path) -> OpenVLAProcessor:
    return OpenVLAProcessor.from_pretrained(checkpoint, OpenVLAConfig.read(checkpoint, VISION))


@pytest.fixture(scope="session")
def pixels(io: dict[str, Tensor], processor: OpenVLAProcessor) -> Tensor:
    """[2, 1, 6, 224, 224] of the two samples."""
    return PixelNormaliser()(torch.from_numpy(processor.images(io["images"].numpy()))[:, None])
