"""OpenVLA: actions per second and memory, against transformers' `generate` and against the hardware's limit.

``python benchmarks/vla.py``. Weights are random: only shapes matter here.

- On a CPU, a tiny model of the same layout (`--shape medium`: one ten times as large), batch 1: images to seven sampled tokens with
  log-probabilities and the hidden state that the value head reads. *generate* is transformers' own loop on the stock Llama with the same
  weights, restricted to the action tokens; both sides run the same vision part. Sides take turns in each round, on one thread; times are
  processor time, which other programs on the machine disturb least.
- On a CUDA device, the 7B shape in bfloat16: OpenVLA and OpenVLA-OFT at batch 1, 8, 32 and 256 with and without CUDA graphs, beside
  the roofline (`roofline_s`), and transformers' `generate` at batch 1 and 32.

Training steps: `vla_training.py`.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tables import provenance, text_table
from torch import Tensor

from embodied_rl.policies.accelerated import Accelerated
from embodied_rl.policies.heads import TokenDistribution
from embodied_rl.policies.openvla.config import OpenVLAConfig, ViTShape
from embodied_rl.policies.openvla.model import Generated, OpenVLA, VisionLanguageModel
from embodied_rl.policies.openvla.oft import OFTConfig, OpenVLAOFT
from embodied_rl.policies.openvla.processor import PixelNormaliser

PROMPT_TOKENS, NUM_TOKENS = 35, 7
WANTED_RATIO, WANTED_SHARE = 3.0, 0.6
PEAKS = {"H200": (790e12, 4.3e12), "H100": (790e12, 3.0e12), "A100": (280e12, 1.9e12), "4090": (160e12, 0.95e12)}
"""{part of the device's name: (bfloat16 FLOP/s, bytes/s)}, what large products and copies really reach."""


# ---- models and inputs ------------------------------------------------------------------------------------------------


def tiny_config() -> OpenVLAConfig:
    """A few million parameters, nearly all of them in the vocabulary."""
    text = {**OpenVLAConfig.openvla_7b().text, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = (ViTShape(32, 3, 2, 128, num_registers=4, layer_scale=True), ViTShape(48, 4, 3, 179, attention_pool=True))
    return OpenVLAConfig(text=text, vision=vision)


def medium_config() -> OpenVLAConfig:
    """25 million parameters, of which 16 are the vocabulary's."""
    text = {
        **OpenVLAConfig.openvla_7b().text,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }
    vision = (ViTShape(96, 5, 3, 384, num_registers=4, layer_scale=True), ViTShape(144, 5, 3, 576, attention_pool=True))
    return OpenVLAConfig(text=text, vision=vision)


SHAPES = {"tiny": tiny_config, "medium": medium_config, "7b": OpenVLAConfig.openvla_7b}


def random_model(make: Callable[[], VisionLanguageModel], device: str, dtype: torch.dtype) -> Any:
    """Weights are drawn on the device itself: 7B of them take minutes elsewhere."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = make()
    model = model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    llama = model.language_model.model
    llama.rotary_emb = type(llama.rotary_emb)(llama.config).to(device)
    return model.eval()


def random_inputs(rows: int, device: str, num_units: int) -> dict[str, Tensor]:
    """Unpadded prompts of PROMPT_TOKENS tokens, uint8 pictures and uniform noise."""
    generator = torch.Generator().manual_seed(1)
    given = {
        "images": torch.randint(0, 256, (rows, 1, 224, 224, 3), dtype=torch.uint8, generator=generator),
        "input_ids": torch.randint(3, 30000, (rows, PROMPT_TOKENS), generator=generator),
        "mask": torch.ones(rows, PROMPT_TOKENS, dtype=torch.bool),
        "noise": torch.rand(rows, num_units, generator=generator),
    }
    return {name: tensor.to(device) for name, tensor in given.items()}


def decide(model: VisionLanguageModel, normaliser: PixelNormaliser) -> Callable[..., Generated]:
    """Pictures to sampled tokens, of one step or of a chunk, as the policy does it."""

    def run(*, images: Tensor, input_ids: Tensor, mask: Tensor, noise: Tensor) -> Generated:
        return model.decide(model.sequence(normaliser(images), input_ids, mask, padded=False), noise, noise.shape[1])

    return run


def decide_with_transformers(model: OpenVLA, normaliser: PixelNormaliser) -> Callable[..., Generated]:
    """The same results from `LlamaForCausalLM.generate` on a stock Llama that shares the weights."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        stock = LlamaForCausalLM(model.config.llama())
    stock.load_state_dict(model.language_model.state_dict(), assign=True)
    stock.model.rotary_emb = model.language_model.model.rotary_emb
    stock.eval()
    first, end = model.tokens.first_token, model.tokens.vocab_size

    def restrict(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, :first] = -math.inf
        scores[:, end:] = -math.inf
        return scores

    def run(*, images: Tensor, input_ids: Tensor, mask: Tensor, noise: Tensor) -> Generated:
        prefix = model.sequence(normaliser(images), input_ids, mask, padded=False)
        output = stock.generate(
            inputs_embeds=prefix.embeds,
            attention_mask=prefix.mask.long(),
            max_new_tokens=NUM_TOKENS,
            do_sample=True,
            top_k=0,
            logits_processor=[restrict],
            output_logits=True,
            output_hidden_states=True,
            return_dict_in_generate=True,
            eos_token_id=None,
        )
        choices = output.sequences - first
        distribution = TokenDistribution.from_logits(torch.stack(output.logits, dim=1)[..., first:end])
        return Generated(choices, distribution.log_prob(choices), output.hidden_states[0][-1][:, -1])

    return run


def agreement(model: OpenVLA, normaliser: PixelNormaliser, given: dict[str, Tensor]) -> float:
    """Largest difference of transformers' log-probabilities from the training pass on the tokens that it sampled."""
    theirs = decide_with_transformers(model, normaliser)(**given)
    prefix = model.sequence(normaliser(given["images"]), given["input_ids"], given["mask"], padded=False)
    logits, hidden = model.scores(prefix, theirs.choices + model.tokens.first_token)
    difference = (TokenDistribution.from_logits(logits).log_prob(theirs.choices) - theirs.log_prob).abs().max()
    return max(float(difference), float((hidden - theirs.hidden).abs().max()))


# ---- the hardware's limit ---------------------------------------------------------------------------------------------


def flop_of(config: OpenVLAConfig, num_images: int, num_tokens: int, *, steps: int) -> float:
    """Floating-point operations of one decision: 2 for each weight and token, 4·T²·d for each attention.

    `num_tokens` are read at once, then `steps` one by one. Half of a causal attention is not computed; that is 1% here, and not taken off.
    """
    total = 0.0
    for shape in config.vision:
        tokens = shape.num_patches + (1 + shape.num_registers if shape.num_registers else 0)
        linear = 4 * shape.width**2 + 2 * shape.width * shape.mlp_width
        total += num_images * (shape.depth - 1) * (2.0 * tokens * linear + 4.0 * tokens**2 * shape.width)
        total += num_images * 2.0 * shape.num_patches * 3 * shape.patch_size**2 * shape.width
    wide, width = config.vision_width, config.hidden_size
    total += num_images * config.num_patches * 2.0 * (4 * wide**2 + 4 * wide * width + width**2)
    layers, inner = int(config.text["num_hidden_layers"]), int(config.text["intermediate_size"])
    per_layer = 4 * width**2 + 3 * width * inner
    total += layers * (2.0 * (num_tokens + steps) * per_layer + 4.0 * width * num_tokens * (num_tokens + steps))
    return total


def language_bytes(config: OpenVLAConfig) -> float:
    """Weights that each step reads, in bfloat16: the layers, and the output rows of the action tokens."""
    width, inner = config.hidden_size, int(config.text["intermediate_size"])
    per_layer = 4 * width**2 + 3 * width * inner
    return 2.0 * (int(config.text["num_hidden_layers"]) * per_layer + config.num_action_bins * width)


def roofline_s(config: OpenVLAConfig, rows: int, num_images: int, num_tokens: int, steps: int, peaks: tuple[float, float]) -> float:
    """Seconds that a batch of decisions needs at least: arithmetic of all rows, and the weights once for each step."""
    flop_per_s, bytes_per_s = peaks
    return rows * flop_of(config, num_images, num_tokens, steps=steps) / flop_per_s + steps * language_bytes(config) / bytes_per_s


def peaks_of(device_name: str) -> tuple[float, float] | None:
    """What `PEAKS` says of this device."""
    return next((peaks for part, peaks in PEAKS.items() if part in device_name), None)


# ---- measuring --------------------------------------------------------------------------------------------------------


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def measure(sides: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of each side in each round (processor time on a CPU); one unmeasured round first."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(rounds + 1):
        for name, run in sides.items():
            synchronise(device)
            start = clock()
            run()
            synchronise(device)
            if round_number:
                seconds[name].append(clock() - start)
    return seconds


# ---- the two machines -------------------------------------------------------------------------------------------------


def on_a_cpu(shape: str, rounds: int) -> str:
    """Print the table; return the figure."""
    torch.set_num_threads(1)
    model, normaliser = random_model(lambda: OpenVLA(SHAPES[shape]()), "cpu", torch.float32), PixelNormaliser()
    given = random_inputs(1, "cpu", NUM_TOKENS)
    with torch.inference_mode():
        difference = agreement(model, normaliser, given)
        prefix = model.sequence(normaliser(given["images"]), given["input_ids"], given["mask"], padded=False)
    if not difference < 1e-3:
        raise SystemExit(f"transformers' generate and ours do not agree: log-probabilities differ by {difference:.2g}.")
    ours, theirs = decide(model, normaliser), decide_with_transformers(model, normaliser)
    sides: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours(**given),
        "transformers' generate": lambda: theirs(**given),
        "images and prompt alone": lambda: model.sequence(normaliser(given["images"]), given["input_ids"], given["mask"], padded=False),
        "ours, without them": lambda: model.decide(prefix, given["noise"], NUM_TOKENS),
    }
    seconds = measure(sides, rounds, "cpu")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    fastest = {name: min(times) for name, times in seconds.items()}
    rows = [[name, f"{1e3 * medians[name]:.2f}", f"{1e3 * fastest[name]:.2f}", f"{1 / medians[name]:.0f}"] for name in sides]
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{shape} model, {count:,} parameters, float32, batch 1, one thread, {rounds} rounds; results differ by {difference:.1g} at most\n"
    )
    print(text_table(["a decision", "median ms", "fastest", "actions/s"], rows))
    ratio = medians["transformers' generate"] / medians["ours"]
    best = fastest["transformers' generate"] / fastest["ours"]
    kept = "kept" if min(ratio, best) >= WANTED_RATIO else "missed"
    reached = f"fastest rounds {best:.1f}x" + (f" (reach: {WANTED_RATIO:.0f}x, {kept})" if shape == "tiny" else "")
    language = medians["transformers' generate"] - medians["images and prompt alone"]
    without = language / medians["ours, without them"]
    return f"figure: transformers' generate / ours = {ratio:.1f}x per action, {reached}; without images and prompt {without:.1f}x"


def on_a_gpu(batches: list[int], rounds: int, peaks: tuple[float, float] | None) -> str:
    """Print the tables; return the figure."""
    config, normaliser = OpenVLAConfig.openvla_7b(), PixelNormaliser().cuda()
    shares: dict[str, float] = {}
    rows: list[list[str]] = []
    for kind in ("OpenVLA", "OpenVLA-OFT"):
        chunk = OFTConfig()
        model = random_model(lambda k=kind, c=chunk: OpenVLA(config) if k == "OpenVLA" else OpenVLAOFT(config, c), "cuda", torch.bfloat16)
        units = NUM_TOKENS if kind == "OpenVLA" else chunk.num_units
        program = decide(model, normaliser)
        num_tokens, steps = 256 + PROMPT_TOKENS + (0 if kind == "OpenVLA" else units + 1), NUM_TOKENS - 1 if kind == "OpenVLA" else 0
        for batch in batches:
            captured: Accelerated[Generated] = Accelerated(program, "cuda_graph")
            given = random_inputs(batch, "cuda", units)
            sides: dict[str, Callable[[], Any]] = {f"{kind}, CUDA graph": lambda c=captured, g=given: c(g)}
            sides[f"{kind}, eager"] = lambda p=program, g=given: p(**g)
            if kind == "OpenVLA" and batch in (1, 32):
                theirs = decide_with_transformers(model, normaliser)
                sides["transformers' generate"] = lambda t=theirs, g=given: t(**g)
            limit = None if peaks is None else roofline_s(config, batch, 1, num_tokens, steps, peaks)
            rows += gpu_rows(sides, batch, rounds, limit, shares, 1 if kind == "OpenVLA" else chunk.chunk)
            del captured
            release()
        del model, program
        release()
    print(text_table(["side", "batch", "decisions/s", "actions/s", "peak GiB", "roofline/s", "share"], rows))
    share = shares.get("OpenVLA, CUDA graph, 32", math.nan)
    kept = "kept" if share >= WANTED_SHARE else "missed"
    return f"figure: OpenVLA 7B at batch 32 reaches {100 * share:.0f}% of the roofline (reach: {100 * WANTED_SHARE:.0f}%, {kept})"


def gpu_rows(
    sides: dict[str, Callable[[], Any]], batch: int, rounds: int, limit: float | None, shares: dict[str, float], actions: int
) -> list[list[str]]:
    """A line for each side; one that does not fit into memory says so."""
    table = []
    for name, run in sides.items():
        torch.cuda.reset_peak_memory_stats()
        try:
            seconds = statistics.median(measure({name: run}, rounds, "cuda")[name])
        except torch.OutOfMemoryError:
            table.append([name, str(batch), "out of memory", "", "", "", ""])
            release()
            continue
        share = math.nan if limit is None else limit / seconds
        shares[f"{name}, {batch}"] = share
        peak = torch.cuda.max_memory_allocated() / 2**30
        beside = ["", ""] if limit is None else [f"{batch / limit:.0f}", f"{100 * share:.0f}%"]
        table.append([name, str(batch), f"{batch / seconds:.1f}", f"{actions * batch / seconds:.1f}", f"{peak:.1f}", *beside])
    return table


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--shape", choices=("tiny", "medium"), default="tiny", help="on a CPU; the reach is the tiny one's")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 256], help="of the 7B shape, on a CUDA device")
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU, even where there is a CUDA device")
    parser.add_argument("--peak-tflops", type=float, help="bfloat16 TFLOP/s of a device that the script does not know")
    parser.add_argument("--bandwidth-tb", type=float, help="its memory's TB/s")
    options = parser.parse_args()
    print(provenance("transformers", "peft"))
    if options.cpu or not torch.cuda.is_available():
        figure = on_a_cpu(options.shape, options.rounds)
    else:
        name = torch.cuda.get_device_name()
        given = (options.peak_tflops, options.bandwidth_tb)
        peaks = peaks_of(name) if None in given else (given[0] * 1e12, given[1] * 1e12)
        print(f"{name}; roofline from {peaks}" if peaks else f"{name} is not known: no roofline (give --peak-tflops and --bandwidth-tb)")
        figure = on_a_gpu(options.batches, min(options.rounds, 10), peaks)
    print()
    print(figure)


if __name__ == "__main__":
    main()
