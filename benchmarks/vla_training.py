"""Training steps of OpenVLA: time, tokens per second and peak memory, with all weights and with LoRA, with and without checkpointing.

``python benchmarks/vla_training.py``. Weights are random: only shapes matter here. A step is what PPO and cloning do with a micro-batch:
pictures and prompts with their action tokens through the whole model, the log-probabilities' gradient, clipped, and the learner's own step
of AdamW. `--shape` is `7b` (bfloat16) on a CUDA device and `medium` elsewhere: OpenVLA's layout with 8 layers, 256 wide.

Each way runs in a process of its own, so that its peak is its own: of the device's memory on a GPU, else of the process's, less what it
held before it made the model. Gradient checkpointing is of the language model's layers, as `policy.gradient_checkpointing` has it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tables import provenance, text_table
from torch import Tensor, nn
from torch import distributed as dist
from vla import NUM_TOKENS, PROMPT_TOKENS, SHAPES, flop_of, peaks_of, random_inputs, random_model, synchronise

from embodied_rl.config import ShardingConfig
from embodied_rl.learning.fsdp import make_mesh, shard
from embodied_rl.learning.optimizer import Optimizer
from embodied_rl.policies.heads import TokenDistribution
from embodied_rl.policies.openvla.model import OpenVLA
from embodied_rl.policies.openvla.processor import PixelNormaliser

LORA_TARGETS = ["qkv", "fc1", "fc2", "fc3", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
OFFLOAD = ", FSDP2 offload"
WAYS = ("all weights", "all weights, checkpointing", "LoRA", "LoRA, checkpointing", f"all weights{OFFLOAD}", f"LoRA{OFFLOAD}")


def trained_model(shape: str, way: str, rank: int, device: str) -> OpenVLA:
    """A random model in training mode, whose trained weights alone ask for gradients."""
    config = SHAPES[shape]()
    model = random_model(lambda: OpenVLA(config), device, torch.bfloat16 if device == "cuda" else torch.float32)
    if way.startswith("LoRA"):
        from peft import LoraConfig, inject_adapter_in_model

        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=LORA_TARGETS), model)
    if way.endswith("checkpointing"):
        model.language_model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


class Step(nn.Module):
    """The loss of a micro-batch, in the one method that FSDP gathers weights for."""

    def __init__(self, model: OpenVLA, device: str) -> None:
        super().__init__()
        self.model, self.normaliser = model, PixelNormaliser().to(device)

    def sharding_blocks(self) -> list[nn.Module]:
        return list(self.model.language_model.model.layers)

    def evaluate(self, images: Tensor, input_ids: Tensor, mask: Tensor, choices: Tensor) -> Tensor:
        prefix = self.model.sequence(self.normaliser(images), input_ids, mask, padded=False)
        logits, _ = self.model.scores(prefix, choices + self.model.tokens.first_token)
        return -TokenDistribution.from_logits(logits).log_prob(choices).mean()


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """A process group of this process, as FSDP wants one on a single GPU too."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def steps(step: Step, rows: int, rounds: int, device: str) -> list[float]:
    """Seconds of each step (processor time on a CPU), after one that is not measured."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    trained = {name: part for name, part in step.named_parameters() if part.requires_grad}
    optimizer = Optimizer(trained, eps=1e-8, max_grad_norm=1.0)
    given = random_inputs(rows, device, NUM_TOKENS)
    choices = (given["noise"] * step.model.tokens.num_bins).long()
    seconds = []
    for _ in range(rounds + 1):
        synchronise(device)
        start = clock()
        step.evaluate(given["images"], given["input_ids"], given["mask"], choices).backward()
        optimizer.clip()
        optimizer.step(1e-6)
        optimizer.zero_grad()
        synchronise(device)
        seconds.append(clock() - start)
    return seconds[1:]


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure_alone(shape: str, way: str, rank: int, rows: int, rounds: int, device: str) -> dict[str, Any]:
    """One way, in a process that has nothing else: {seconds, peak_bytes, trained}, or {error}."""
    if device == "cpu":
        torch.set_num_threads(1)
    import peft  # noqa: F401  (its memory is no part of any way)
    import transformers.models.llama.modeling_llama  # noqa: F401

    before = resident_bytes()
    try:
        step = Step(trained_model(shape, way, rank, device), device)
        trained = sum(part.numel() for part in step.parameters() if part.requires_grad)
        if way.endswith(OFFLOAD):
            with one_rank(device):
                config = ShardingConfig(cpu_offload=True)
                seconds = steps(shard(step, make_mesh(config, device), config), rows, rounds, device)
        else:
            seconds = steps(step, rows, rounds, device)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {"seconds": statistics.median(seconds), "peak_bytes": peak, "trained": trained}


def measure(options: argparse.Namespace, device: str) -> dict[str, dict[str, Any]]:
    """{way: what its own process says}"""
    results = {}
    for way in options.ways:
        own = ["--alone", way, "--shape", options.shape, "--device", device]
        own += [f"--{name}={getattr(options, name)}" for name in ("rank", "rows", "rounds")]
        done = subprocess.run([sys.executable, __file__, *own], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"'{way}' failed:\n{done.stderr}")
        results[way] = json.loads(done.stdout.splitlines()[-1])
        print(f"{way}: {results[way]}", flush=True)
    return results


def utilisation(shape: str, way: str, rows: int, seconds: float, peak_flop_s: float) -> float:
    """Model FLOP utilisation: forward and backward of all weights take three forwards; with LoRA, frozen weights get no gradient: two."""
    forward = rows * flop_of(SHAPES[shape](), 1, 256 + PROMPT_TOKENS + NUM_TOKENS - 1, steps=0)
    return (2 if way.startswith("LoRA") else 3) * forward / seconds / peak_flop_s


def report(results: dict[str, dict[str, Any]], rows: int, shape: str, peaks: tuple[float, float] | None) -> tuple[str, str]:
    """The table and the figure; `peaks` of the device, where they are known."""
    tokens = rows * (256 + PROMPT_TOKENS + NUM_TOKENS - 1)
    lines = []
    for way, found in results.items():
        if "error" in found:
            lines.append([way, found["error"], "", "", "", ""])
            continue
        speed, peak = f"{tokens / found['seconds']:,.0f}", f"{found['peak_bytes'] / 2**20:,.0f}"
        mfu = "" if peaks is None else f"{100 * utilisation(shape, way, rows, found['seconds'], peaks[0]):.0f}%"
        lines.append([way, f"{found['trained']:,}", f"{1e3 * found['seconds']:.1f}", speed, peak, mfu])
    table = text_table(["training step", "trained weights", "ms", "tokens/s", "peak MiB", "MFU"], lines)

    def ratio(over: str, under: str) -> str:
        if not {over, under} <= results.keys():
            return "not measured"
        if "error" in results[over] or "error" in results[under]:
            return "out of memory"
        time_ratio, peak_ratio = (results[over][key] / results[under][key] for key in ("seconds", "peak_bytes"))
        return f"{time_ratio:.2f}x the time, {peak_ratio:.2f}x the memory"

    figure = f"figure: LoRA against all weights {ratio('LoRA', 'all weights')}; checkpointing against none "
    return table, figure + f"{ratio('all weights, checkpointing', 'all weights')}, with LoRA {ratio('LoRA, checkpointing', 'LoRA')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: 7b on a CUDA device, else medium")
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each way")
    parser.add_argument("--rank", type=int, default=32, help="of LoRA")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--alone", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.shape = options.shape or ("7b" if device == "cuda" else "medium")
    if options.alone:
        print(json.dumps(measure_alone(options.shape, options.alone, options.rank, options.rows, options.rounds, device)))
        return
    print(provenance("transformers", "peft"))
    where = torch.cuda.get_device_name() if device == "cuda" else "one thread, processor time"
    print(f"{options.shape} shape, {options.rows} rows, {'bfloat16' if device == 'cuda' else 'float32'}, {where}\n")
    table, figure = report(measure(options, device), options.rows, options.shape, peaks_of(where))
    print(f"{table}\n\n{figure}")


if __name__ == "__main__":
    main()
