"""Plays a vLLM backend through everything it promises and prints what it found as JSON: ``python -m tests.generation.vllm_scenario``.

In a process of its own, because an engine leaves its mark on the process it runs in.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from embodied_rl.config import AlgorithmConfig, HybridConfig, ShardingConfig
from embodied_rl.config.policy import LanguageConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion, GenerationRequest
from embodied_rl.generation.vllm_tokens import VLLMOptions, VLLMTokens
from embodied_rl.learning.ranks import RankExecutor
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.policies.tiny_language import TinyShape, make_tiny_model
from tests.generation.constrained import STRUCTURE, masked_log_prob
from tests.policies.language_models import TEXTS, alone, make_model

CONTEXT = 256


def runs_the_second_runner(engine: Any) -> bool:
    """Whether vLLM would take the model runner whose sampler the worker extension does not know, if triton were here as on GPUs."""
    settings = importlib.import_module("vllm.config.vllm")
    before, settings.HAS_TRITON = settings.HAS_TRITON, True
    try:
        return bool(engine.use_v2_model_runner)
    finally:
        settings.HAS_TRITON = before


class Player:
    """A backend, the policy it samples from, and a record of what happened."""

    def __init__(self, folder: Path, *, tied: bool = False, mixture: bool = False) -> None:
        if mixture:
            make_model("mixtral", folder, max_position_embeddings=CONTEXT)
        else:
            make_tiny_model(folder, TEXTS, shape=TinyShape(tied=tied, spread=0.15, max_context=CONTEXT))
        rank = 0 if tied or mixture else 4
        self.policy = build_language_policy(LanguageConfig(str(folder), dtype="float32", lora_rank=rank, value_head="linear"))
        options = VLLMOptions(str(self.policy.save_model(folder / "saved")), max_batch=16, gpu_memory_share=0.25, seed=5)
        self.backend: Any = VLLMTokens(options)
        engine = self.backend._engine.vllm_config
        assert (engine.cache_config.gpu_memory_utilization, engine.model_config.enforce_eager) == (0.25, True)
        assert not runs_the_second_runner(engine)
        self.rng = np.random.default_rng(0)
        self.next_id = 0

    def requests(self, count: int, **options: Any) -> list[GenerationRequest]:
        made = []
        for _ in range(count):
            self.next_id += 1
            settings = {"max_new_tokens": 24, "seed": self.next_id, "prompt_ids": self.rng.integers(3, 250, int(self.rng.integers(1, 30)))}
            made.append(GenerationRequest(request_id=self.next_id, **{**settings, **options}))
        return made

    def ask(self, requests: list[GenerationRequest]) -> dict[int, Completion]:
        self.backend.submit(requests)
        return self.drain(len(requests))

    def drain(self, count: int) -> dict[int, Completion]:
        found: dict[int, Completion] = {}
        while len(found) < count:
            found |= {completion.request_id: completion for completion in self.backend.poll(min_ready=count - len(found), timeout_s=60)}
        return found

    def move(self) -> None:
        """A step of learning, as far as the backend can see."""
        with torch.no_grad():
            for parameter in self.policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn_like(parameter))

    def error(self, requests: list[GenerationRequest], got: dict[int, Completion], version: int | None = None) -> float:
        """Largest difference to the policy's log-probabilities, over tokens of a version."""
        return largest_difference(self.policy, requests, got, version)


def largest_difference(
    policy: LanguagePolicy, requests: list[GenerationRequest], got: dict[int, Completion], version: int | None = None
) -> float:
    sequences = [TokenSequence.of(one.prompt_ids, got[one.request_id].token_ids, (), one.structure, one.stop_ids) for one in requests]
    with torch.no_grad():
        wanted = policy.evaluate(sequences).log_prob
    worst = 0.0
    for row, (one, sequence) in enumerate(zip(requests, sequences, strict=True)):
        completion = got[one.request_id]
        chosen = np.full(completion.num_tokens, True) if version is None else completion.version == version
        difference = np.abs(wanted[row, np.flatnonzero(sequence.mask)].numpy() - completion.log_prob)[chosen]
        worst = max(worst, float(difference.max(initial=0.0)))
    return worst


def updates(player: Player) -> dict[str, Any]:
    """Three weight updates, and requests after each; one prompt is long and always the same, so that a stale prefix cache would show."""
    errors: list[float] = []
    versions: list[list[int]] = []
    moved: list[float] = []
    long = player.rng.integers(3, 250, 200)
    earlier: tuple[list[GenerationRequest], dict[int, Completion]] = ([], {})
    for version in range(4):
        if version:
            player.move()
            player.backend.load_weights(version, player.policy.named_weights())
            moved.append(player.error(*earlier))
        requests = [*player.requests(12), *player.requests(1, prompt_ids=long)]
        got = player.ask(requests)
        errors.append(player.error(requests, got))
        versions.append(sorted({int(number) for completion in got.values() for number in completion.version}))
        earlier = requests, got
    return {"errors": errors, "versions": versions, "moved": moved}


def settings(player: Player) -> dict[str, Any]:
    """Temperature, top-k and top-p: against the cut distribution worked out in numpy; and the likeliest tokens."""
    requests = player.requests(4, temperature=0.7, top_k=20, top_p=0.9)
    got = player.ask(requests)
    model = player.policy.generation_model()
    worst = 0.0
    for one in requests:
        completion = got[one.request_id]
        ids = np.concatenate([one.prompt_ids, completion.token_ids])
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0].double().numpy()
        for place, token in enumerate(completion.token_ids):
            scaled = np.exp((logits[len(one.prompt_ids) + place - 1]) / 0.7)
            order = np.argsort(-scaled)[:20]
            share = scaled[order] / scaled[order].sum()
            kept = order[: int(np.searchsorted(share.cumsum(), 0.9)) + 1]
            wanted = np.log(scaled[token] / scaled[kept].sum())
            worst = max(worst, abs(float(wanted - completion.sampling_log_prob[place])))
    greedy = player.requests(3, temperature=0.0)
    got_greedy = player.ask(greedy)
    likeliest = all(
        alone_argmax(model, one.prompt_ids, got_greedy[one.request_id].token_ids)
        and (got_greedy[one.request_id].sampling_log_prob == 0).all()
        for one in greedy
    )
    return {
        "sampling_error": worst,
        "own_error": player.error(requests, got),
        "likeliest": likeliest,
        "greedy_error": player.error(greedy, got_greedy),
    }


def alone_argmax(model: Any, prompt: np.ndarray, sampled: np.ndarray) -> bool:
    ids = np.concatenate([prompt, sampled])
    with torch.no_grad():
        best = model(input_ids=torch.from_numpy(ids)[None]).logits[0].argmax(-1).numpy()
    return bool((best[len(prompt) - 1 : -1] == sampled).all())


def ends(player: Player) -> dict[str, Any]:
    """Stop tokens, lengths, and seeds."""
    (free,) = player.requests(1)
    whole = player.ask([free])[free.request_id]
    stop = int(whole.token_ids[10])
    first = int(np.flatnonzero(whole.token_ids == stop)[0])
    again = GenerationRequest(**{**vars(free), "request_id": 9001, "stop_ids": (stop,)})
    company = player.requests(10)
    together = player.ask([again, *company])[9001]
    sizes = {9002: CONTEXT - 8, 9003: CONTEXT, 9004: CONTEXT + 50}
    cut = player.ask(
        [GenerationRequest(request_id=number, prompt_ids=np.full(size, 9), max_new_tokens=20) for number, size in sizes.items()]
    )
    return {
        "stopped_like_the_whole": together.token_ids.tolist() == whole.token_ids[: first + 1].tolist(),
        "reason": together.finish_reason,
        "context": [cut[9002].num_tokens, cut[9002].finish_reason, cut[9002].limit],
        "too_long": [cut[number].failure.kind for number in (9003, 9004)],  # type: ignore[union-attr]
    }


def in_flight(player: Player) -> dict[str, Any]:
    """Release of memory, new weights, abort, restoring, while requests are under way."""
    version = player.backend.version + 1
    requests = player.requests(5, max_new_tokens=200, prompt_ids=np.array([7, 8, 9]))
    player.backend.submit(requests)
    _let_some_tokens_come(player)
    player.backend.release_memory()
    early = {completion.request_id: completion for completion in player.backend.poll(timeout_s=0.2)}
    paused = player.backend.num_in_flight
    old_error_model = player.policy.generation_model()
    player.move()
    player.backend.load_weights(version, player.policy.named_weights())
    still_paused = player.backend.poll(timeout_s=0.2)
    player.backend.abort([requests[4].request_id])
    aborted = player.backend.poll(timeout_s=5)
    player.backend.restore_memory()
    got = early | {completion.request_id: completion for completion in aborted} | player.drain(4 - len(early))
    last = got[requests[4].request_id]
    old = 0.0
    for one in requests:
        completion = got[one.request_id]
        sequence = TokenSequence.of(one.prompt_ids, completion.token_ids)
        wanted = alone(old_error_model, sequence)[0][len(one.prompt_ids) - 1 :]
        chosen = completion.version < version
        old = max(old, float(np.abs(wanted - completion.log_prob)[chosen].max(initial=0.0)))
    return {
        "early": len(early),
        "paused": paused,
        "still_paused": len(still_paused),
        "aborted": [last.finish_reason, last.num_tokens, sorted({int(number) for number in last.version})],
        "others": sorted({(c.finish_reason, c.num_tokens) for n, c in got.items() if n != requests[4].request_id}),
        "versions": sorted({int(number) for completion in got.values() for number in completion.version}),
        "version": version,
        "old_error": old,
        "new_error": player.error(requests[:4], got, version),
    }


def asleep(player: Player) -> dict[str, Any]:
    """The same requests twice: undisturbed, and with a sleep in the midst of them; then new weights that come while it sleeps."""
    backend, old = player.backend, player.backend.version
    whole = player.requests(3, max_new_tokens=120, prompt_ids=np.array([7, 8, 9]))
    undisturbed = player.ask(whole)
    again = [GenerationRequest(**{**vars(one), "request_id": 7000 + one.request_id}) for one in whole]
    awake = backend.cache_bytes
    backend.submit(again)
    _let_some_tokens_come(player)
    freed = backend.release_memory()
    figures = {"freed": freed, "frees": backend.can_free_memory, "bytes": [awake, backend.cache_bytes], "again": backend.release_memory()}
    answered = len(backend.poll(timeout_s=0.2))
    backend.restore_memory()
    backend.restore_memory()
    got = player.drain(3 - answered) if answered < 3 else {}
    same = [
        got[7000 + one.request_id].token_ids.tolist() == undisturbed[one.request_id].token_ids.tolist()
        for one in whole
        if 7000 + one.request_id in got
    ]
    backend.release_memory()
    player.move()
    backend.load_weights(old + 1, player.policy.named_weights())
    backend.restore_memory()
    requests = player.requests(4)
    new = player.ask(requests)
    versions = sorted({int(number) for completion in new.values() for number in completion.version})
    return {**figures, "answered": answered, "same": same, "error": player.error(requests, new), "versions": versions, "version": old + 1}


def beside_ranks(player: Player) -> dict[str, Any]:
    """Two ranks train in this process and another while the engine is here, and leave before it."""
    before, requests = dist.is_initialized(), player.requests(3)
    first = player.ask(requests)
    hybrid = HybridConfig(sharding=ShardingConfig(num_shards=2))
    whole = {name: tensor.clone() for name, tensor in player.policy.state_dict().items()}
    ranks = RankExecutor(player.policy, AlgorithmConfig(), hybrid, torch.device("cpu"))
    try:
        meanwhile = dist.get_world_size()
        ranks.write_back()
    finally:
        ranks.close()
    again = [GenerationRequest(**{**vars(one), "request_id": 8000 + one.request_id}) for one in requests]
    got = player.ask(again)
    return {
        "sizes": [before, meanwhile, dist.is_initialized()],
        "written_back": all(torch.equal(tensor, whole[name]) for name, tensor in player.policy.state_dict().items()),
        "same": [got[8000 + one.request_id].token_ids.tolist() == first[one.request_id].token_ids.tolist() for one in requests],
    }


def structures(player: Player) -> dict[str, Any]:
    """Answers that keep to a structure beside answers that do not, in one batch; and the likeliest tokens of every place."""
    stop = 2
    bound = player.requests(4, structure=STRUCTURE, stop_ids=(stop,), top_logprobs=3)
    free = player.requests(3, top_logprobs=1)
    cut = player.requests(2, structure=STRUCTURE, stop_ids=(stop,), temperature=0.7, top_p=0.8)
    got = player.ask([*(request for pair in zip(bound, [*free, *player.requests(1)], strict=True) for request in pair), *cut])
    worst, top, forced = 0.0, 0.0, 0
    for one in bound:
        completion = got[one.request_id]
        ids = torch.from_numpy(np.concatenate([one.prompt_ids, completion.token_ids]))[None]
        with torch.no_grad():
            logits = player.policy.generation_model()(input_ids=ids).logits[0, len(one.prompt_ids) - 1 : -1]
        expected, only = masked_log_prob(logits, completion.token_ids.tolist(), player.policy.tokenizer, stop=stop)
        worst, forced = max(worst, float(np.abs(expected - completion.sampling_log_prob).max())), forced + only
        likeliest = logits.log_softmax(-1).topk(3)
        assert completion.top_ids is not None
        assert completion.top_ids.tolist() == likeliest.indices.tolist()
        top = max(top, float(np.abs(likeliest.values.numpy() - completion.top_log_prob).max()))
    try:
        player.backend.submit(player.requests(1, structure='{"type": "robot"}'))
        refused = ""
    except UserError as error:
        refused = str(error)
    return {
        "own_error": player.error([*bound, *cut, *free], got),
        "sampling_error": worst,
        "top_error": top,
        "forced": forced,
        "ends": sorted({got[one.request_id].finish_reason for one in bound}),
        "free": [bool(np.allclose(got[one.request_id].log_prob, got[one.request_id].sampling_log_prob, atol=1e-6)) for one in free],
        "refused": refused,
    }


def _let_some_tokens_come(player: Player) -> None:
    for _ in range(6):
        player.backend.poll(timeout_s=0)


def refusals(player: Player) -> dict[str, str]:
    found = {}
    (one,) = player.requests(1, images=(np.zeros((8, 8, 3), np.uint8),))
    for name, call in {
        "images": lambda: player.backend.submit([one]),
        "unknown": lambda: player.backend.load_weights(99, [("model.nothing.weight", torch.zeros(3))]),
        "shape": lambda: player.backend.load_weights(99, [("model.norm.weight", torch.zeros(3))]),
    }.items():
        try:
            call()
        except UserError as error:
            found[name] = str(error)
    found["version"] = str(player.backend.version)
    requests = player.requests(2)
    found["after"] = str(player.error(requests, player.ask(requests)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--mixture", action="store_true", help="updates of a mixture of experts only")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # As after a run's first update: vLLM looks into all modules when an engine starts, and numba's library is hard to look into.
    importlib.import_module("numba")
    with tempfile.TemporaryDirectory() as folder:
        player = Player(Path(folder), **vars(options))
        try:
            found = {"updates": updates(player)}
            if not options.mixture:
                found |= {
                    "settings": settings(player),
                    "ends": ends(player),
                    "in_flight": in_flight(player),
                    "asleep": asleep(player),
                    "beside_ranks": beside_ranks(player),
                    "structures": structures(player),
                    "refusals": refusals(player),
                }
        finally:
            player.backend.close()
            player.backend.close()
    sys.stdout.write("\nFOUND " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
