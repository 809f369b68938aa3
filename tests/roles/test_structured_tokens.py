"""Structures and the likeliest tokens from backends in other processes: the answers are those of the backend here, and refusals are too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.config import LanguageConfig, RayConfig, TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion, GenerationRequest, TokenBackend
from embodied_rl.methods.language_player import ModelFiles, blank_backend, model_files, write_model_files
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.tiny_language import TinyShape, make_tiny_model
from embodied_rl.roles.device_lease import DeviceLease, HostPlan
from embodied_rl.roles.multiplexed import MultiplexedTokens, start_token_hosts
from embodied_rl.roles.token_process import TokenProcess
from tests.generation.constrained import ANSWERS, STRUCTURE
from tests.roles.runs import TEXTS, configured

pytestmark = pytest.mark.usefixtures("forked")

WRONG = json.dumps({"type": "structural_tag", "format": {"type": "no such format"}})


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LanguagePolicy:
    """A random model, far from uniform."""
    torch.set_num_threads(1)
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), ["go left go right"], shape=TinyShape(spread=0.5))
    return build_language_policy(LanguageConfig(str(folder)))


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return configured(tmp_path, *TEXTS, "hybrid.device=cpu")


def bound(policy: LanguagePolicy, count: int) -> list[GenerationRequest]:
    prompt = np.asarray(policy.tokenizer.encode("go right go left"), np.int64)
    stop = policy.tokenizer.encode("<|im_end|>")[0]
    common = {"max_new_tokens": 24, "stop_ids": (int(stop),), "structure": STRUCTURE, "top_logprobs": 2}
    return [GenerationRequest(request_id=n, prompt_ids=prompt[: 1 + n % len(prompt)], seed=n, **common) for n in range(count)]


def lease() -> DeviceLease:
    """Of two hosts, the first of which is lent."""
    return DeviceLease(HostPlan(num_hosts=2, num_lent=1, num_cores=2))


def all_of(backend: TokenBackend, requests: Sequence[GenerationRequest]) -> dict[int, Completion]:
    backend.submit(requests)
    found: dict[int, Completion] = {}
    while len(found) < len(requests):
        found |= {completion.request_id: completion for completion in backend.poll(1, 30.0)}
    return found


@pytest.fixture
def here(policy: LanguagePolicy, config: TrainConfig, tmp_path: Path) -> TokenBackend:
    write_model_files(model_files(policy), tmp_path / "here")
    backend = blank_backend(config, tmp_path / "here", torch.device("cpu"))
    backend.load_weights(1, policy.named_weights())
    return backend


def one_process(config: TrainConfig, files: ModelFiles, weights: dict[str, torch.Tensor]) -> Iterator[TokenBackend]:
    process = TokenProcess(config, files)
    process.started()
    process.load_weights(1, weights.items())
    yield process
    process.close()


def two_hosts(config: TrainConfig, files: ModelFiles, weights: dict[str, torch.Tensor]) -> Iterator[TokenBackend]:
    hosts = start_token_hosts(config, files, lease())
    hosts.load_weights(1, weights.items())
    yield hosts
    hosts.close()


def an_actor(config: TrainConfig, files: ModelFiles, weights: dict[str, torch.Tensor]) -> Iterator[TokenBackend]:
    pytest.importorskip("ray")
    from embodied_rl.hybrid.weight_sync import RayPublisher
    from embodied_rl.roles.ray_cluster import prepare
    from embodied_rl.roles.ray_roles import GenerationWorker, RayActing

    ray = prepare(RayConfig())
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    worker = ray.remote(GenerationWorker).remote(config)
    acting = RayActing(config, [worker])
    acting.models = {"": files}
    backend = acting.tokens("", "", config)
    publisher = RayPublisher()
    acting.load(1, publisher.publish(weights.items())[0])
    yield backend
    ray.shutdown()


PLACES = [one_process, two_hosts, pytest.param(an_actor, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]


@pytest.mark.parametrize("place", PLACES)
def test_answers_elsewhere_keep_to_the_structure(
    place: Callable[..., Iterator[TokenBackend]], policy: LanguagePolicy, config: TrainConfig, here: TokenBackend
) -> None:
    requests = bound(policy, 6)
    expected = all_of(here, requests)
    everywhere = place(config, model_files(policy), dict(policy.named_weights()))
    backend = next(everywhere)
    try:
        assert backend.can_constrain
        found = all_of(backend, requests)
        for number, answer in expected.items():
            text = policy.tokenizer.decode(answer.token_ids[:-1].tolist())
            assert (answer.finish_reason, json.loads(text) in ANSWERS) == ("stop", True)
            np.testing.assert_array_equal(found[number].token_ids, answer.token_ids)
            np.testing.assert_array_equal(found[number].top_ids, answer.top_ids)
            # Rows of another number are multiplied in another order.
            np.testing.assert_allclose(found[number].top_log_prob, answer.top_log_prob, atol=1e-4)
        assert len({tuple(answer.token_ids.tolist()) for answer in expected.values()}) > 1
        wrong = replace(requests[0], request_id=99, structure=WRONG)
        try:
            refused = all_of(backend, [wrong])[99].failure
        except UserError as error:
            told = str(error)
        else:
            assert refused is not None
            assert refused.kind == "rejected"
            told = refused.message
        assert told.startswith("The structure of an answer cannot be compiled: ")
        again = all_of(backend, [requests[0]])[0]
        np.testing.assert_array_equal(again.token_ids, expected[0].token_ids)
    finally:
        next(everywhere, None)


def test_hosts_that_cannot_constrain_refuse(policy: LanguagePolicy) -> None:
    from embodied_rl.generation.torch_tokens import TorchTokens

    hosts = MultiplexedTokens([TorchTokens(policy.generation_model()) for _ in range(2)], lease(), 4, lambda version, tensors: None)
    assert not hosts.can_constrain
    with pytest.raises(UserError, match="asks for an answer that keeps to a structure, which this backend does not support"):
        hosts.submit(bound(policy, 1))
    assert hosts.poll(1, 0.0) == []


def test_a_structured_answer_that_moves_begins_anew_and_is_the_same(policy: LanguagePolicy, here: TokenBackend) -> None:
    """Both hosts draw from the request's seed: what was sampled before the move is sampled again, and the structure holds."""
    from embodied_rl.generation.torch_tokens import TorchTokens

    requests = bound(policy, 4)
    expected = all_of(here, requests)
    model, tokenizer = policy.generation_model(), policy.tokenizer
    backends: list[Any] = [TorchTokens(model, tokenizer=tokenizer, max_batch=4) for _ in range(2)]
    hosts = MultiplexedTokens(backends, lease(), 4, lambda version, tensors: None)
    hosts.submit(requests)
    for backend in backends:
        backend._step()
        backend._step()
    hosts.lease.multiplexers[0].shrink()
    found: dict[int, Completion] = {}
    while len(found) < len(requests):
        found |= {completion.request_id: completion for completion in hosts.poll(1)}
    assert hosts.lease.multiplexers[0].counts().moves > 0
    for number, answer in expected.items():
        np.testing.assert_array_equal(found[number].token_ids, answer.token_ids)
        np.testing.assert_array_equal(found[number].top_ids, answer.top_ids)
