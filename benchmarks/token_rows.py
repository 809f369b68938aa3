"""Teacher forcing of a language policy: packed rows whose attention is computed for each sequence, against a mask of all tokens by all
tokens, and against padded rows.

``python benchmarks/token_rows.py``: forward and backward of the same sequences, in micro-batches of the policy's
``max_tokens_per_micro_batch``, on one thread. Sides take turns; times are processor time. Log-probabilities are compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import torch
from tables import provenance, text_table

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.policies.tiny_language import TinyShape, make_tiny_model

BY_SEQUENCE, MASKED, PADDED = "packed, by sequence", "packed, under a mask", "padded"
MIXES = {"conversations": (0.7, 1.0), "turns": (0.06, 0.12), "short answers": (0.01, 0.025)}
"""Shortest and longest of the sequences, in contexts."""
SHAPE = TinyShape(hidden_size=128, num_heads=4, num_key_value_heads=4, max_context=1024)


def build(folder: str, max_tokens: int) -> dict[str, LanguagePolicy]:
    """The same model on each side."""
    config = LanguageConfig(model=folder, max_tokens_per_micro_batch=max_tokens)
    sides = {name: build_language_policy(config) for name in (BY_SEQUENCE, MASKED, PADDED)}
    sides[MASKED].lay_out("packed", apart=False)
    sides[PADDED].lay_out("right", apart=False)
    return sides


def sequences_of(total: int, bounds: tuple[float, float], vocabulary: int) -> list[TokenSequence]:
    """Random ones, together about `total` tokens, half of each sampled."""
    random, found = np.random.default_rng(0), list[TokenSequence]()
    while sum(map(len, found)) < total:
        length = int(SHAPE.max_context * random.uniform(*bounds))
        ids = random.integers(4, vocabulary, length)
        found.append(TokenSequence.of(ids[: length // 2], ids[length // 2 :]))
    return found


def seconds(policy: LanguagePolicy, sequences: Sequence[TokenSequence]) -> float:
    """Of processor time, of forward and backward."""
    started = time.process_time()
    for indices in policy.micro_batches(sequences):
        policy.evaluate([sequences[index] for index in indices]).log_prob.sum().backward()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384, help="of each mix of sequences")
    parser.add_argument("--max-tokens", type=int, default=4096, help="policy.max_tokens_per_micro_batch")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, ratios, difference = list[list[str]](), dict[str, float](), 0.0
    with tempfile.TemporaryDirectory() as folder:
        sides = build(str(make_tiny_model(folder, ["go left or right"], shape=SHAPE)), options.max_tokens)
    for mix, bounds in MIXES.items():
        sequences = sequences_of(options.tokens, bounds, 200)
        with torch.no_grad():
            found = [policy.evaluate(sequences).log_prob for policy in sides.values()]
        difference = max(difference, *(float((own - found[0]).abs().max()) for own in found))
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(options.rounds + 1):
            for name in list(sides)[:: -1 if number % 2 else 1]:
                taken[name].append(seconds(sides[name], sequences))
        middle = {name: statistics.median(times[1:]) for name, times in taken.items()}
        ratios[mix] = middle[MASKED] / middle[BY_SEQUENCE]
        lengths = [len(sequence) for sequence in sequences]
        for name, own in middle.items():
            rows.append([mix, f"{len(lengths)} of {min(lengths)} to {max(lengths)}", name, f"{own:.3f}", f"{sum(lengths) / own:,.0f}"])
    print(provenance("transformers"))
    print(text_table(["mix", "tokens", "rows", "processor s", "tokens/s"], rows))
    print(f"largest difference of a log-probability {difference:.1e}")
    said = ", ".join(f"{ratio:.1f}x ({mix})" for mix, ratio in ratios.items())
    print(f"\nfigure: packed rows by sequence instead of under a mask: {said}")


if __name__ == "__main__":
    main()
