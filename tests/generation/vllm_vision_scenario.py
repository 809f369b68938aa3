"""A vision-language model behind vLLM, held against the policy: ``python -m tests.generation.vllm_vision_scenario in_process``.

In a process of its own, because an engine leaves its mark on the process it runs in. Prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion, GenerationRequest
from embodied_rl.generation.vllm_tokens import VLLMOptions, VLLMTokens
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.packing import TokenSequence
from tests.policies.vision_models import make_vision_model, picture

NEWS = 12


def requests(policy: LanguagePolicy, first: int, **options: Any) -> list[GenerationRequest]:
    """Prompts with no picture, one and two; the pictures are the same each time, so that stale features would show."""
    assert policy.vision is not None
    rng, made = np.random.default_rng(3), []
    for number in range(6):
        images = tuple(picture(number + place) for place in range(number % 3))
        ids = [5, 6]
        for _ in images:
            ids += [*policy.vision.placeholder_ids(), 7]
        ids += rng.integers(3, 250, int(rng.integers(1, 9))).tolist()
        expanded = policy.vision.expand(np.array(ids), images)
        seed = first + number
        made.append(
            GenerationRequest(
                **{"request_id": seed, "prompt_ids": expanded, "max_new_tokens": NEWS, "seed": seed, "images": images, **options}
            )
        )
    return made


def ask(backend: Any, asked: list[GenerationRequest]) -> dict[int, Completion]:
    backend.submit(asked)
    found: dict[int, Completion] = {}
    while len(found) < len(asked):
        found |= {completion.request_id: completion for completion in backend.poll(min_ready=len(asked) - len(found), timeout_s=60)}
    return found


def error(policy: LanguagePolicy, asked: list[GenerationRequest], got: dict[int, Completion], *, blind: bool = False) -> float:
    """Largest difference to the policy's log-probabilities; blind: with black pictures in place of what was seen."""
    shown = [tuple(np.zeros_like(image) for image in one.images) if blind else one.images for one in asked]
    sequences = [TokenSequence.of(one.prompt_ids, got[one.request_id].token_ids, images) for one, images in zip(asked, shown, strict=True)]
    with torch.no_grad():
        wanted = policy.evaluate(sequences).log_prob
    rows = zip(asked, sequences, strict=True)
    return max(
        float(np.abs(wanted[row, np.flatnonzero(sequence.mask)].numpy() - got[one.request_id].log_prob).max())
        for row, (one, sequence) in enumerate(rows)
    )


def updates(policy: LanguagePolicy, backend: Any) -> dict[str, Any]:
    errors: list[float] = []
    moved: list[float] = []
    versions: list[list[int]] = []
    earlier: Any = None
    for version in range(4):
        if version:
            with torch.no_grad():
                for parameter in policy.parameters():  # the vision tower's too
                    parameter.add_(0.05 * torch.randn_like(parameter))
            backend.load_weights(version, policy.named_weights())
            moved.append(error(policy, *earlier))
        asked = requests(policy, 100 * version + 1)
        got = ask(backend, asked)
        errors.append(error(policy, asked, got))
        versions.append(sorted({int(number) for completion in got.values() for number in completion.version}))
        earlier = asked, got
    return {"errors": errors, "moved": moved, "versions": versions, "blind": error(policy, *earlier, blind=True)}


def image_share(policy: LanguagePolicy, backend: Any) -> float:
    """The share of the image token among what is sampled, hot enough for it to come up."""
    assert policy.vision is not None
    got = ask(backend, requests(policy, 1001, temperature=2.0, max_new_tokens=100))
    sampled = np.concatenate([completion.token_ids for completion in got.values()])
    return float((sampled == policy.vision.image_token_id).mean())


def refused(policy: LanguagePolicy, backend: Any) -> list[str]:
    """Pictures without their tokens, and a temperature that vLLM does not take."""
    (one, *_) = requests(policy, 2001)
    found = []
    for more in ({"images": (picture(1),)}, {"temperature": 50.0}):
        try:
            backend.submit([GenerationRequest(request_id=2001, prompt_ids=one.prompt_ids, max_new_tokens=1, **more)])  # type: ignore[arg-type]
        except UserError as problem:
            found.append(str(problem))
    return found


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        # vLLM's attention on processors takes heads of 32 numbers at least.
        folder = make_vision_model("llava", Path(place) / "model", hidden_size=64)
        policy = build_language_policy(LanguageConfig(str(folder), dtype="float32"))
        options = VLLMOptions(str(policy.save_model(Path(place) / "served")), max_batch=8, seed=5)
        backend = VLLMTokens(options)
        try:
            found = {"updates": updates(policy, backend), "images": image_share(policy, backend), "refused": refused(policy, backend)}
        finally:
            backend.close()
    sys.stdout.write("\nFOUND " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
