"""OpenVLA-OFT against what the original code computed, its variants, and its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodied_rl.errors import UserError
from embodied_rl.policies.openvla.model import PARTS, Embedded
from embodied_rl.policies.openvla.oft import OFTConfig, OpenVLAOFT
from embodied_rl.policies.openvla.processor import PixelNormaliser, range_of
from tests.policies.openvla.conftest import FIXTURES, VISION

CASES = {
    "discrete_1img": OFTConfig(),
    "discrete_2img_proprio": OFTConfig(num_images=2, proprio_dim=8),
    "l1_2img_proprio": OFTConfig(num_images=2, proprio_dim=8, head="l1"),
    "l1_film_2img_proprio": OFTConfig(num_images=2, proprio_dim=8, head="l1", film=True),
}


def load(directory: Path, oft: OFTConfig | None) -> OpenVLAOFT:
    return OpenVLAOFT.from_pretrained(directory, oft, dtype=torch.float32, vision=VISION)


def sequence_of(model: OpenVLAOFT, oft_io: dict[str, Tensor], padding: int = 0) -> Embedded:
    ids = oft_io["input_ids"]
    padded = torch.cat([ids[:, :1], ids.new_full((1, padding), 32000), ids[:, 1:]], dim=1)
    pixels = PixelNormaliser()(oft_io["images"][None, : model.oft.num_images])
    return model.sequence(pixels, padded, padded != 32000, padded=padding > 0, proprio=oft_io["proprio"][None])


def close_to_size(found: Tensor, expected: Tensor) -> None:
    """Equal to 1e-4 of their size: ours and the original's both lie up to 2e-4 from the float64 result, on logits up to 9, and how far
    depends on the processor's kernels."""
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_hidden_states_logits_and_actions_equal_the_original(checkpoint: Path, oft_io: dict[str, Tensor], case: str) -> None:
    model = load(checkpoint, CASES[case])
    sequence = sequence_of(model, oft_io)
    sizes = json.loads((FIXTURES / "oft_meta.json").read_text())[case]
    assert sequence.embeds.shape[1] == sizes["seq_len"]
    hidden = model.action_hidden(sequence)
    close_to_size(hidden, oft_io[f"{case}.actions_hidden"])
    close_to_size(model.decide_hidden(sequence), oft_io[f"{case}.actions_hidden"])
    close_to_size(model.action_logits(hidden), oft_io[f"{case}.action_logits"])
    if model.oft.head == "l1":
        normalised = model.regressed(hidden).numpy()
    else:
        tokens = model.language_model.lm_head(hidden).argmax(-1)
        assert torch.equal(tokens, oft_io[f"{case}.argmax_full_vocab"])
        normalised = model.tokens.decode(tokens.numpy())
    scale = range_of(model.config.norm_stats, "libero_spatial_no_noops", epsilon=1e-8)
    np.testing.assert_allclose(scale.unnormalise(normalised.reshape(8, 7)), oft_io[f"{case}.actions"].numpy(), atol=1e-4)


@torch.no_grad()
def test_a_training_pass_has_the_same_logits(checkpoint: Path, oft_io: dict[str, Tensor]) -> None:
    """The original's training pass carries the real tokens in the placeholders' places, and must zero them."""
    model = load(checkpoint, CASES["discrete_1img"])
    logits = model.action_logits(model.action_hidden(sequence_of(model, oft_io)))
    close_to_size(logits, oft_io["tf.action_logits"])


@pytest.mark.parametrize("variant", ["openvla-oft", "rlinf"])
@torch.no_grad()
def test_padding_changes_no_number_wherever_it_stands(checkpoint: Path, oft_io: dict[str, Tensor], variant: str) -> None:
    model = load(checkpoint, OFTConfig(num_images=2, proprio_dim=8, variant=variant))  # type: ignore[arg-type]
    plain = model.action_hidden(sequence_of(model, oft_io))
    sequence = sequence_of(model, oft_io, padding=6)
    torch.testing.assert_close(model.action_hidden(sequence), plain, atol=1e-4, rtol=0)
    torch.testing.assert_close(model.decide_hidden(sequence), plain, atol=1e-4, rtol=0)
    torch.testing.assert_close(model.decide_hidden(sequence_of(model, oft_io)), plain, atol=1e-4, rtol=0)
    # The original puts padding behind everything: move it there. BOS, 513 tokens of images and state, 6 of padding, the rest.
    order = [*range(514), *range(520, sequence.embeds.shape[1]), *range(514, 520)]
    moved = Embedded(sequence.embeds[:, order], sequence.mask[:, order], padded=True)
    start = 514 + 34 - 1
    torch.testing.assert_close(model.hidden(moved, causal=False)[:, start : start + 56], plain, atol=1e-4, rtol=0)


@torch.no_grad()
def test_film_averages_over_real_tokens_alone(checkpoint: Path, oft_io: dict[str, Tensor]) -> None:
    model = load(checkpoint, CASES["l1_film_2img_proprio"])
    plain = model.action_hidden(sequence_of(model, oft_io))
    # 5e-5 is the rounding of one run of this network (see above).
    torch.testing.assert_close(model.action_hidden(sequence_of(model, oft_io, padding=9)), plain, atol=2e-4, rtol=0)


@torch.no_grad()
def test_variants_are_not_interchangeable(checkpoint: Path, oft_io: dict[str, Tensor]) -> None:
    ours, rlinf = (load(checkpoint, OFTConfig(variant=variant)) for variant in ("openvla-oft", "rlinf"))  # type: ignore[arg-type]
    with_stop, without = sequence_of(ours, oft_io), sequence_of(rlinf, oft_io)
    assert with_stop.embeds.shape[1] == without.embeds.shape[1] + 1
    assert torch.equal(with_stop.embeds[:, :-1], without.embeds)
    assert (ours.action_hidden(with_stop) - rlinf.action_hidden(without)).abs().max() > 1e-2
    # Without </s> the last token that is seen is the last placeholder: dropping </s> by hand gives the other variant's numbers.
    by_hand = ours.hidden(Embedded(with_stop.embeds[:, :-1], with_stop.mask[:, :-1], padded=False), causal=False)
    torch.testing.assert_close(by_hand[:, 290:346], rlinf.action_hidden(without), atol=1e-4, rtol=0)


def test_every_token_sees_every_other(checkpoint: Path, oft_io: dict[str, Tensor]) -> None:
    model = load(checkpoint, CASES["discrete_1img"])
    sequence = sequence_of(model, oft_io)
    embeds = sequence.embeds.detach().requires_grad_()
    # The first placeholder's logits depend on the last placeholder and on </s>, which a causal model would hide from it.
    model.action_logits(model.action_hidden(Embedded(embeds, sequence.mask, padded=False))[:, 0]).sum().backward()
    assert embeds.grad is not None
    assert (embeds.grad[0].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("case", ["discrete_1img", "l1_film_2img_proprio"])
def test_checkpoints_round_trip(checkpoint: Path, tmp_path: Path, case: str) -> None:
    model = load(checkpoint, CASES[case])
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(checkpoint / "model.safetensors").keys()
    assert (tmp_path / PARTS).exists() == (case != "discrete_1img")
    again = OpenVLAOFT.from_pretrained(tmp_path)
    assert again.oft == CASES[case]
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    if case != "discrete_1img":
        published = load_file(checkpoint / PARTS)
        saved = load_file(tmp_path / PARTS)
        assert saved.keys() == published.keys()
        assert all(torch.equal(saved[name], published[name].float()) for name in saved)


def test_what_does_not_fit_is_one_line(copy: Path) -> None:
    with pytest.raises(UserError, match="does not describe the OpenVLA-OFT training"):
        load(copy, None)
    with pytest.raises(UserError, match="sizes must be at least 1, got chunk=0"):
        OFTConfig(chunk=0)
    with pytest.raises(UserError, match="FiLM"):
        OFTConfig(film=True, variant="rlinf")
    with pytest.raises(UserError, match=r"'action_head.model.layer_norm1.weight' is \[224\], but this model has \[64\]"):
        load(copy, OFTConfig(head="l1", action_dim=2))
    parts = load_file(copy / PARTS)
    save_file({name: tensor for name, tensor in parts.items() if not name.startswith("proprio")}, copy / PARTS)
    with pytest.raises(UserError, match=r"lacks 'proprio_projector.fc1.weight' and 3 more of the robot state's projector"):
        load(copy, OFTConfig(proprio_dim=8))
    (copy / PARTS).unlink()
    with pytest.raises(UserError, match=r"is missing: it holds the action head and FiLM"):
        load(copy, OFTConfig(head="l1", film=True))
    assert load(copy, OFTConfig()).oft.num_units == 56
