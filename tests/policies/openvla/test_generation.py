"""Generation against the training pass, against transformers' `generate`, and compiled."""

from __future__ import annotations

import copy
import math
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from embodied_rl.policies.accelerated import Accelerated, _Graph
from embodied_rl.policies.heads import TokenDistribution
from embodied_rl.policies.openvla.config import OpenVLAConfig
from embodied_rl.policies.openvla.model import Embedded, Generated, OpenVLA
from embodied_rl.policies.openvla.processor import OpenVLAProcessor
from tests.policies.openvla.conftest import VISION


@pytest.fixture
def batch(model: OpenVLA, processor: OpenVLAProcessor, meta: dict[str, Any], pixels: Tensor) -> Embedded:
    """Two rows of different length."""
    prompts = processor.prompts(meta["instructions"])
    with torch.no_grad():
        return model.sequence(pixels, prompts.input_ids, prompts.mask, padded=True)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@torch.no_grad()
def test_log_probs_equal_the_training_pass(model: OpenVLA, batch: Embedded, temperature: float) -> None:
    noise = torch.rand(2, 7, generator=torch.Generator().manual_seed(0))
    sampled = model.decide(batch, noise, 7, temperature)
    logits, at_prompt = model.scores(batch, sampled.choices + model.tokens.first_token)
    recomputed = TokenDistribution.from_logits(logits, temperature)
    torch.testing.assert_close(recomputed.log_prob(sampled.choices), sampled.log_prob, atol=1e-4, rtol=0)
    torch.testing.assert_close(at_prompt, sampled.hidden, atol=1e-4, rtol=0)
    # The same noise picks the same tokens from the training pass's own distribution.
    assert torch.equal(recomputed.sample(noise), sampled.choices)


@torch.no_grad()
def test_a_row_does_not_depend_on_its_neighbours(model: OpenVLA, processor: OpenVLAProcessor, meta: dict[str, Any], pixels: Tensor) -> None:
    noise = torch.rand(2, 7, generator=torch.Generator().manual_seed(1))
    wide = processor.prompts(meta["instructions"], length=50)
    together = model.decide(model.sequence(pixels, wide.input_ids, wide.mask, padded=True), noise, 7)
    for row in (0, 1):
        own = processor.prompts([meta["instructions"][row]])
        prefix = model.sequence(pixels[row : row + 1], own.input_ids, own.mask, padded=False)
        alone = model.decide(prefix, noise[row : row + 1], 7)
        assert torch.equal(alone.choices, together.choices[row : row + 1])
        torch.testing.assert_close(alone.log_prob, together.log_prob[row : row + 1], atol=1e-4, rtol=0)


class ActionTokensOnly(LogitsProcessor):
    """The restriction, the way transformers wants it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = torch.full_like(scores, -math.inf)
        allowed[:, 31744:32000] = scores[:, 31744:32000]
        return allowed


@torch.no_grad()
def test_equals_transformers_generate(model: OpenVLA, batch: Embedded) -> None:
    output = model.language_model.generate(
        inputs_embeds=batch.embeds,
        attention_mask=batch.mask.long(),
        max_new_tokens=7,
        do_sample=False,
        logits_processor=[ActionTokensOnly()],
        output_scores=True,
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    ours = model.decide(batch, None, 7)
    assert torch.equal(output.sequences, ours.choices + 31744)
    theirs = torch.stack(output.scores, dim=1)[..., 31744:32000].log_softmax(-1)
    torch.testing.assert_close(theirs.gather(-1, ours.choices[..., None])[..., 0], ours.log_prob, atol=1e-4, rtol=0)


@torch.no_grad()
def test_samples_follow_the_distribution(model: OpenVLA, batch: Embedded) -> None:
    row = Embedded(batch.embeds[1:], batch.mask[1:], padded=False)
    many = Embedded(row.embeds.expand(64, -1, -1), row.mask.expand(64, -1), padded=False)
    probabilities = TokenDistribution.from_logits(model.action_logits(model.hidden(row)[:, -1:])).log_probs.exp()[0, 0]
    noise = ((torch.arange(64) + 0.5) / 64).view(64, 1)
    counts = Counter(model.decide(many, noise, 1).choices.flatten().tolist())
    assert max(counts.values()) >= 4, "a distribution this flat would prove nothing"
    # Noise spread evenly over 64 places: a count is the probability times 64, to one place at either end.
    for choice, probability in enumerate(probabilities.tolist()):
        assert abs(counts[choice] - 64 * probability) <= 1.0 + 1e-3


@torch.no_grad()
def test_one_token_needs_no_step(model: OpenVLA, batch: Embedded) -> None:
    one, seven = model.decide(batch, None, 1), model.decide(batch, None, 7)
    assert torch.equal(one.choices, seven.choices[:, :1])


@torch.no_grad()
def test_a_weight_update_is_seen_however_it_is_written(model: OpenVLA, batch: Embedded) -> None:
    """In place, as an optimizer and the weight sync write it, and by new parameters in the old ones' place."""
    own = copy.deepcopy(model)
    noise = torch.rand(2, 2, generator=torch.Generator().manual_seed(5))
    before = own.decide(batch, noise, 2)
    generator = torch.Generator().manual_seed(6)
    changed = {name: value + 0.05 * value.std() * torch.randn(value.shape, generator=generator) for name, value in own.state_dict().items()}
    for assign in (False, True):
        fresh = copy.deepcopy(model)
        fresh.decide(batch, noise, 2)
        fresh.load_state_dict(changed, assign=assign)
        found = fresh.decide(batch, noise, 2)
        logits, _ = fresh.scores(batch, found.choices + fresh.tokens.first_token)
        torch.testing.assert_close(TokenDistribution.from_logits(logits).log_prob(found.choices), found.log_prob, atol=1e-4, rtol=0)
        assert (found.hidden - before.hidden).abs().max() > 0.01


def decide(model: OpenVLA, num_tokens: int = 7) -> Any:
    def run(*, embeds: Tensor, mask: Tensor, noise: Tensor | None, padded: bool) -> Generated:
        return model.decide(Embedded(embeds, mask, padded), noise, num_tokens)

    return run


@torch.no_grad()
def test_the_whole_decision_is_one_traced_region(model: OpenVLA, batch: Embedded) -> None:
    """`fullgraph` refuses anything that would wait for the device; the eager backend leaves the kernels as they are."""
    compiled: Accelerated[Generated] = Accelerated(decide(model, 2), "compile", compile_backend="eager")
    noise = torch.rand(2, 2, generator=torch.Generator().manual_seed(2))
    tensors = {"embeds": batch.embeds, "mask": batch.mask, "noise": noise}
    expected = decide(model, 2)(**tensors, padded=True)
    for _ in range(2):
        found = compiled(tensors, padded=True)
        assert torch.equal(found.choices, expected.choices)
        torch.testing.assert_close(found.log_prob, expected.log_prob, atol=1e-5, rtol=0)


@torch.no_grad()
def test_graphs_are_for_gpus_only(model: OpenVLA, batch: Embedded) -> None:
    graphed: Accelerated[Generated] = Accelerated(decide(model), "cuda_graph")
    tensors: dict[str, Tensor | None] = {"embeds": batch.embeds, "mask": batch.mask, "noise": None}
    assert torch.equal(graphed(tensors, padded=True).choices, model.decide(batch, None, 7).choices)
    assert graphed.num_graphs == 0


def test_a_graph_is_captured_on_a_stream_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes its stream for captures once, on the GPU of the first: on another GPU, a capture there would hold nothing."""

    class Stream:
        def wait_stream(self, other: Stream) -> None:
            pass

    captured: list[object] = []

    def capture(graph: object, stream: object = None, **options: object) -> nullcontext[None]:
        captured.append(stream)
        return nullcontext()

    fakes = {"Stream": Stream, "current_stream": Stream, "stream": nullcontext, "CUDAGraph": object, "graph": capture}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for _ in range(2):
        _Graph(lambda embeds: Generated(embeds, embeds, embeds), {"embeds": torch.zeros(1)}, {})
    assert [type(stream) for stream in captured] == [Stream, Stream]
    assert captured[0] is not captured[1]


@pytest.mark.gpu
@torch.no_grad()
def test_a_cuda_graph_replays_with_new_inputs_and_new_weights(model: OpenVLA, batch: Embedded) -> None:
    device = torch.device("cuda")
    config = OpenVLAConfig(text=model.config.text, vision=VISION)
    on_gpu = OpenVLA(config).to(device)
    on_gpu.load_state_dict(model.state_dict())
    graphed: Accelerated[Generated] = Accelerated(decide(on_gpu), "cuda_graph")
    generator = torch.Generator().manual_seed(3)
    for shift in (0.0, 0.1):
        on_gpu.projector.fc3.bias += shift  # in place: the graph reads weights where they lay
        for _ in range(2):
            embeds = (batch.embeds + shift * torch.randn(batch.embeds.shape, generator=generator)).to(device)
            noise = torch.rand(2, 7, generator=generator).to(device)
            found = graphed({"embeds": embeds, "mask": batch.mask.to(device), "noise": noise}, padded=True)
            expected = on_gpu.decide(Embedded(embeds, batch.mask.to(device), padded=True), noise, 7)
            assert torch.equal(found.choices, expected.choices)
            torch.testing.assert_close(found.log_prob, expected.log_prob, atol=1e-4, rtol=0)
    assert graphed.num_graphs == 1
    half = {"embeds": embeds[:1], "mask": batch.mask[:1].to(device), "noise": noise[:1]}
    graphed(half, padded=True)
    assert graphed.num_graphs == 2


@pytest.mark.gpu
def test_a_rare_shape_is_not_captured() -> None:
    doubled: Accelerated[Generated] = Accelerated(lambda x: Generated(2 * x, x, x), "cuda_graph", direct_calls=2)
    for number in range(4):
        assert doubled({"x": torch.full((3,), float(number), device="cuda")}).choices.tolist() == [2.0 * number] * 3
        assert doubled.num_graphs == (number >= 2)
    doubled.clear()
    assert doubled.num_graphs == 0


@pytest.mark.gpu
@torch.no_grad()
def test_generation_in_bfloat16_on_a_gpu_agrees_with_its_training_pass(model: OpenVLA, batch: Embedded) -> None:
    device = torch.device("cuda")
    half = OpenVLA(OpenVLAConfig(text=model.config.text, vision=VISION)).to(device, torch.bfloat16)
    half.load_state_dict(model.state_dict())
    moved = Embedded(batch.embeds.to(device, torch.bfloat16), batch.mask.to(device), padded=True)
    sampled = half.decide(moved, torch.rand(2, 7, device=device), 7)
    logits, _ = half.scores(moved, sampled.choices + half.tokens.first_token)
    found = TokenDistribution.from_logits(logits).log_prob(sampled.choices)
    # Logits of up to 8 are rounded in steps of 1/32, after hidden states that were rounded in each layer.
    torch.testing.assert_close(found, sampled.log_prob, atol=0.25, rtol=0)
