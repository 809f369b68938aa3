"""OpenVLA against what the original code computed: features, hidden states, logits, log-probabilities, actions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from embodied_rl.policies.heads import TokenDistribution
from embodied_rl.policies.openvla.config import OpenVLAConfig
from embodied_rl.policies.openvla.model import Embedded, OpenVLA, attention_mask
from embodied_rl.policies.openvla.processor import OpenVLAProcessor, range_of
from tests.policies.openvla.conftest import FIXTURES

CLOSE = {"atol": 5e-4, "rtol": 0.0}


def prefix_of(model: OpenVLA, processor: OpenVLAProcessor, meta: dict[str, Any], pixels: Tensor, sample: int) -> Embedded:
    prompt = processor.prompts([meta["instructions"][sample]])
    return model.sequence(pixels[sample : sample + 1], prompt.input_ids, prompt.mask, padded=False)


@pytest.mark.parametrize("sample", [0, 1])
@torch.no_grad()
def test_one_row_equals_the_original(
    model: OpenVLA, processor: OpenVLAProcessor, meta: dict[str, Any], io: dict[str, Tensor], pixels: Tensor, sample: int
) -> None:
    name = f"s{sample}."
    features = model.vision_backbone(pixels[sample : sample + 1])
    torch.testing.assert_close(features[:, ::4], io[name + "patch_features.every_4th"], **CLOSE)
    torch.testing.assert_close(model.projector(features)[:, ::4], io[name + "projector.every_4th"], **CLOSE)
    prefix = prefix_of(model, processor, meta, pixels, sample)
    hidden = model.hidden(prefix)
    torch.testing.assert_close(hidden[:, 2::3], io[name + "hidden_last.every_3rd"], **CLOSE)
    rows = load_file(FIXTURES / "model.safetensors")["head_rows"].long()
    logits = model.language_model.lm_head(hidden[:, -1])[:, rows]
    torch.testing.assert_close(logits, io[name + "prompt_logits_last.head_rows"], **CLOSE)


@pytest.mark.parametrize("sample", [0, 1])
@torch.no_grad()
def test_teacher_forced_logits_and_log_probs_equal_the_original(
    model: OpenVLA, processor: OpenVLAProcessor, meta: dict[str, Any], io: dict[str, Tensor], pixels: Tensor, sample: int
) -> None:
    name = f"s{sample}."
    tokens = io[name + "tf_action_tokens"]
    logits, at_prompt = model.scores(prefix_of(model, processor, meta, pixels, sample), tokens)
    torch.testing.assert_close(logits, io[name + "tf_logits_action_range"], **CLOSE)
    torch.testing.assert_close(at_prompt, io[name + "tf_hidden_last"][:, 0], **CLOSE)
    log_prob = TokenDistribution.from_logits(logits).log_prob(model.tokens.choices(tokens))
    torch.testing.assert_close(log_prob, io[name + "tf_logprobs_256"], **CLOSE)
    torch.testing.assert_close(log_prob[0], torch.tensor(meta["samples"][sample]["logprobs"]), **CLOSE)


@torch.no_grad()
def test_batched_and_padded_rows_equal_the_original(
    model: OpenVLA, processor: OpenVLAProcessor, meta: dict[str, Any], io: dict[str, Tensor], pixels: Tensor
) -> None:
    prompts = processor.prompts(meta["instructions"], length=40)
    assert int(prompts.mask[0].sum()) == 23
    assert int(prompts.mask[1].sum()) == 35
    prefix = model.sequence(pixels, prompts.input_ids, prompts.mask, padded=True)
    tokens = torch.cat([io["s0.tf_action_tokens"], io["s1.tf_action_tokens"]])
    logits, _ = model.scores(prefix, tokens)
    for sample in (0, 1):
        torch.testing.assert_close(logits[sample : sample + 1], io[f"s{sample}.tf_logits_action_range"], **CLOSE)
    hidden = model.hidden(prefix)
    # Only the real tokens' hidden states mean anything: BOS and 256 patches, then the text at the end.
    expected = io["s0.hidden_last.every_3rd"]
    whole = torch.cat([hidden[:1, :257], hidden[:1, -22:]], dim=1)
    torch.testing.assert_close(whole[:, 2::3], expected, **CLOSE)


@torch.no_grad()
def test_greedy_actions_equal_the_original(
    model: OpenVLA, processor: OpenVLAProcessor, meta: dict[str, Any], io: dict[str, Tensor], pixels: Tensor
) -> None:
    scale = range_of(model.config.norm_stats, meta["unnorm_key"])
    prompts = processor.prompts(meta["instructions"])
    both = model.decide(model.sequence(pixels, prompts.input_ids, prompts.mask, padded=True), None, 7)
    for sample in (0, 1):
        alone = model.decide(prefix_of(model, processor, meta, pixels, sample), None, 7)
        for choices in (alone.choices, both.choices[sample : sample + 1]):
            tokens = choices + model.tokens.first_token
            assert torch.equal(tokens, io[f"s{sample}.generated_ids"])
            actions = scale.unnormalise(model.tokens.decode(tokens.numpy()))[0]
            torch.testing.assert_close(torch.from_numpy(actions), io[f"s{sample}.actions_bridge_orig"], atol=1e-12, rtol=0)


@torch.no_grad()
def test_the_tolerance_notices_a_tanh_gelu(model: OpenVLA, io: dict[str, Tensor], pixels: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = F.gelu
    monkeypatch.setattr(F, "gelu", lambda x: exact(x, approximate="tanh"))
    features = model.vision_backbone(pixels[:1])
    assert (features[:, ::4] - io["s0.patch_features.every_4th"]).abs().max() > 5e-4


def test_the_published_model_has_its_keys_and_parameters() -> None:
    with torch.device("meta"):
        model = OpenVLA(OpenVLAConfig.openvla_7b())
    state = model.state_dict()
    assert sum(parameter.numel() for parameter in model.parameters()) == 7_541_237_184
    assert len(state) == 982
    assert state["projector.fc1.weight"].shape == (8704, 2176)
    assert state["vision_backbone.fused_featurizer.blocks.26.mlp.fc1.weight"].shape == (4304, 1152)
    assert state["vision_backbone.featurizer.reg_token"].shape == (1, 4, 1024)


def test_attention_masks_by_hand() -> None:
    mask = torch.tensor([[True, False, True]])
    assert attention_mask(mask, causal=True)[0, 0].tolist() == [[True, False, False], [True, False, False], [True, False, True]]
    assert attention_mask(mask, causal=False)[0, 0].tolist() == [[True, False, True]] * 3
    embedded = Embedded(torch.zeros(1, 3, 2), mask, padded=True)
    assert embedded.positions.tolist() == [[0, 0, 1]]
    assert embedded.followed_by(torch.zeros(1, 2, 2)).positions.tolist() == [[0, 0, 1, 2, 3]]
