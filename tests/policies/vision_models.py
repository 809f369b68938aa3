"""Small random vision-language models of both families as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from embodied_rl.policies.tiny_language import train_tokenizer
from tests.policies.language_models import TEXTS

IMAGE = "<|image|>"
KINDS = ("qwen2_vl", "llava")
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_vision_model(kind: str, folder: Path, *, hidden_size: int = 32) -> Path:
    """A folder with a model, an image processor and a tokenizer that has one image token; heads have half of `hidden_size` numbers."""
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.add_tokens([AddedToken(IMAGE, special=True)])
    image_token = tokenizer.convert_tokens_to_ids(IMAGE)
    text = {**_TEXT, "hidden_size": hidden_size, "vocab_size": len(tokenizer)}
    processor: Any
    if kind == "qwen2_vl":
        config: Any = transformers.Qwen2VLConfig(
            # 16 numbers a head: pairs of time, height and width add up to half of it.
            text_config={**text, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3], "rope_type": "default"}},
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8},
            image_token_id=image_token,
            vision_start_token_id=1,
            vision_end_token_id=2,
        )
        processor = Qwen2VLImageProcessorPil(patch_size=8, min_pixels=256, max_pixels=2048)
        cls: Any = transformers.Qwen2VLForConditionalGeneration
    else:
        config = transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**text),
            vision_config=transformers.CLIPVisionConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
            ),
            image_token_index=image_token,
            vision_feature_layer=-1,
        )
        processor = LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        cls = transformers.LlavaForConditionalGeneration
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(config)
        with torch.no_grad():
            # Pictures must matter as much as words, or no test would see them.
            for name, parameter in model.named_parameters():
                if ("visual" in name or "vision_tower" in name or "projector" in name) and parameter.dim() > 1:
                    parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    processor.save_pretrained(str(folder))
    return folder


def picture(seed: int, height: int = 24, width: int = 32) -> np.ndarray:
    """Random coloured squares [height, width, 3] uint8."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return np.ascontiguousarray(blocks.repeat(8, 0).repeat(8, 1))
