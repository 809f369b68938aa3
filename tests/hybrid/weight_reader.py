"""The other process of `test_weight_sync.py`.

Usage: weight_reader.py hold PATH | watch PATH | generate PATH MODEL_FOLDER OUTPUT_FILE
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from embodied_rl.generation.tokens import Completion, GenerationRequest
from embodied_rl.generation.torch_tokens import TorchTokens
from embodied_rl.hybrid.shared_weights import SharedWeightsReader
from embodied_rl.policies.model_folder import load_model

REQUESTS = 12
NEW_TOKENS = 60


def hold(path: str) -> None:
    with SharedWeightsReader(path).hold() as held:
        print(f"holding {held.version}", flush=True)
        time.sleep(300)


def watch(path: str) -> None:
    """Read until the publisher ends; every number of a version must be the version. Says a word when much was read of several versions."""
    reader = SharedWeightsReader(path)
    torn = reads = 0
    versions = set()
    enough = False
    print("watching", flush=True)
    while True:
        last = reader.closed
        with reader.hold() as held:
            torn += sum(bool((tensor != held.version).any()) for tensor in held.tensors.values())
            versions.add(held.version)
        reads += 1
        if not enough and reads > 50 and len(versions) > 5:
            enough = True
            print("enough", flush=True)
        if last:
            break
    print(json.dumps({"torn": torn, "reads": reads, "versions": len(versions), "last": max(versions)}))


def update(reader: SharedWeightsReader, backend: TorchTokens, present: int | None) -> int | None:
    """Load the newest version where it is another; the version that the backend has then."""
    if reader.version in (None, present):
        return present
    with reader.hold() as held:
        backend.load_weights(held.version, held.tensors.items())
        return held.version


def generate(path: str, folder: str, output: str) -> None:
    """Sample until every request is answered; take new weights between steps. Says a word when some tokens of each version are there."""
    reader = SharedWeightsReader(path)
    backend = TorchTokens(load_model(folder, dtype="float32", attention="sdpa", device="cpu"), max_batch=4, version=-1)
    version = update(reader, backend, None)
    rng = np.random.default_rng(0)
    prompts = {i: rng.integers(3, 250, 5 + i) for i in range(REQUESTS)}
    backend.submit([GenerationRequest(request_id=i, prompt_ids=prompts[i], max_new_tokens=NEW_TOKENS, seed=i) for i in prompts])
    found: list[Completion] = []
    steps = 0
    while len(found) < REQUESTS:
        found += backend.poll(timeout_s=0.0)
        steps += 1
        if steps % 30 == 0 and version is not None and version < 3:
            print("some", flush=True)
            while reader.version == version:
                time.sleep(0.001)
        version = update(reader, backend, version)
    arrays = {
        f"{number}/{name}": value
        for number, one in enumerate(found)
        for name, value in {
            "prompt": prompts[one.request_id],
            "token_ids": one.token_ids,
            "log_prob": one.log_prob,
            "version": one.version,
        }.items()
    }
    np.savez(output, **arrays)
    print(json.dumps({"completions": len(found)}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"hold": hold, "watch": watch, "generate": generate}[sys.argv[1]](*sys.argv[2:])
