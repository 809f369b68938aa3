"""Continuous batching against the policy's own log-probabilities and transformers' own decoding."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.slab_cache import attention_by_group
from embodied_rl.generation.tokens import Completion, GenerationRequest
from embodied_rl.generation.torch_tokens import TorchTokens
from embodied_rl.policies.accelerated import Accelerated
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.packing import TokenSequence
from tests.policies.language_models import load, make_model
from tests.policies.vision_models import IMAGE, KINDS, make_vision_model, picture

FAMILIES = ("llama", "llama_tied", "qwen3", "qwen2_sliding", "mistral_sliding", "gpt2")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguagePolicy]:
    root = tmp_path_factory.mktemp("models")
    return {kind: build_language_policy(LanguageConfig(str(make_model(kind, root / kind)))) for kind in FAMILIES}


@pytest.fixture
def policy(tmp_path: Path) -> LanguagePolicy:
    return build_language_policy(LanguageConfig(str(make_model("llama", tmp_path / "model"))))


def requests(count: int, new: int = 20, first: int = 0, **options: Any) -> list[GenerationRequest]:
    rng = np.random.default_rng(first)
    return [
        GenerationRequest(
            request_id=first + number,
            prompt_ids=rng.integers(3, 259, int(rng.integers(1, 25))),
            max_new_tokens=int(rng.integers(1, new + 1)),
            seed=number,
            **options,
        )
        for number in range(count)
    ]


def finish(backend: TorchTokens, count: int) -> dict[int, Completion]:
    return {completion.request_id: completion for completion in backend.poll(min_ready=count)}


def log_probs(policy: LanguagePolicy, asked: list[GenerationRequest], got: dict[int, Completion]) -> list[np.ndarray]:
    """The policy's of each completion's tokens."""
    sequences = [TokenSequence.of(one.prompt_ids, got[one.request_id].token_ids, one.images) for one in asked]
    with torch.no_grad():
        found = policy.evaluate(sequences).log_prob
    return [found[row, np.flatnonzero(sequence.mask)].numpy() for row, sequence in enumerate(sequences)]


def move(policy: LanguagePolicy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("kind", FAMILIES)
def test_log_probs_are_the_policys(policies: dict[str, LanguagePolicy], kind: str) -> None:
    # Fewer rows than requests, so that rows change hands; lengths beyond the cache's first room and the sliding windows.
    policy = policies[kind]
    backend = TorchTokens(policy.generation_model(), max_batch=5)
    asked = requests(18, new=40) + requests(1, new=1, first=100)
    long = GenerationRequest(request_id=200, prompt_ids=np.arange(3, 103), max_new_tokens=27, seed=1)
    asked.append(long)
    backend.submit(asked)
    got = finish(backend, len(asked))
    assert got.keys() == {one.request_id for one in asked}
    for one, wanted in zip(asked, log_probs(policy, asked, got), strict=True):
        completion = got[one.request_id]
        assert completion.num_tokens == one.max_new_tokens
        assert (completion.finish_reason, completion.limit) == ("length", "max_new_tokens")
        np.testing.assert_allclose(completion.log_prob, wanted, atol=1e-4)
        np.testing.assert_allclose(completion.sampling_log_prob, completion.log_prob, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2_sliding"])
def test_eager_attention(policies: dict[str, LanguagePolicy], kind: str) -> None:
    policy = policies[kind]
    model = policy.generation_model()
    model.set_attn_implementation("eager")
    backend = TorchTokens(model, max_batch=3)
    asked = requests(6, new=15)
    backend.submit(asked)
    got = finish(backend, 6)
    for one, wanted in zip(asked, log_probs(policy, asked, got), strict=True):
        np.testing.assert_allclose(got[one.request_id].log_prob, wanted, atol=1e-4)


def test_attention_that_is_capped_stays_capped(tmp_path: Path) -> None:
    """flash_attention_2 caps too, and the backend takes another kernel in its place; sdpa stands for it here."""
    policy = build_language_policy(LanguageConfig(str(make_model("gemma2_capped", tmp_path / "model")), attention="eager"))
    model = policy.generation_model()
    model.set_attn_implementation("sdpa")
    backend, asked = TorchTokens(model, max_batch=3), requests(6, new=15)
    backend.submit(asked)
    got = finish(backend, 6)
    for one, wanted in zip(asked, log_probs(policy, asked, got), strict=True):
        np.testing.assert_allclose(got[one.request_id].log_prob, wanted, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2_sliding", "gpt2"])
@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_what_prompts_share_is_run_once(policies: dict[str, LanguagePolicy], kind: str, on_update: Any) -> None:
    # Groups of conversations that begin alike and grow; fewer rows than conversations, so that what is kept changes rows and gets lost.
    policy, rng, whole, run = copy.deepcopy(policies[kind]), np.random.default_rng(5), 0, 0

    def count(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        nonlocal run
        run += arguments[0].numel()

    model = policy.generation_model()
    model.get_input_embeddings().register_forward_pre_hook(count)
    backend = TorchTokens(model, max_batch=7, on_update=on_update, least_shared=64)
    beginnings = [rng.integers(3, 259, 70)] * 8 + [rng.integers(3, 259, 66)] * 2 + [rng.integers(3, 259, 5)]
    talks = [np.concatenate([beginning, rng.integers(3, 259, 4)]) for beginning in beginnings]
    talks[1] = talks[0]
    for turn in range(3):
        order = rng.permutation(len(talks))
        asked = [
            GenerationRequest(
                request_id=100 * turn + number, prompt_ids=talks[number], max_new_tokens=int(rng.integers(1, 6)), seed=20 * turn + number
            )
            for number in order.tolist()
        ]
        backend.submit(asked)
        got = finish(backend, len(asked))
        for one, wanted in zip(asked, log_probs(policy, asked, got), strict=True):
            np.testing.assert_allclose(got[one.request_id].log_prob, wanted, atol=1e-4)
        whole += sum(len(one.prompt_ids) for one in asked)
        for number in range(len(talks)):
            new = rng.integers(3, 259, int(rng.integers(1, 9)))
            talks[number] = np.concatenate([talks[number], got[100 * turn + number].token_ids, new])[:110]
        if turn == 1:
            # Other weights: nothing that was kept may be used.
            move(policy, 7)
            backend.load_weights(1, policy.named_weights())
            backend.submit([GenerationRequest(request_id=999, prompt_ids=talks[0], max_new_tokens=1)])
            before = run
            finish(backend, 1)
            assert run - before >= len(talks[0])
    assert run < 0.6 * whole


def test_a_backend_that_is_dropped_frees_its_model_at_once(policy: LanguagePolicy) -> None:
    model = policy.generation_model()
    backend, there = TorchTokens(model, max_batch=3), weakref.ref(model)
    backend.submit(requests(2))
    finish(backend, 2)
    backend.close()
    gc.disable()
    try:
        del backend, model
        assert there() is None
    finally:
        gc.enable()


def test_what_was_forgotten_is_run_again(policy: LanguagePolicy) -> None:
    model, seen = policy.generation_model(), list[int]()
    model.get_input_embeddings().register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].numel()))
    backend = TorchTokens(model, max_batch=2, least_shared=64)
    for number, forgotten in enumerate((False, False, True)):
        if forgotten:
            backend.forget()
        backend.submit([GenerationRequest(request_id=number, prompt_ids=np.arange(3, 103), max_new_tokens=1)])
        finish(backend, 1)
    assert seen == [100, 1, 100]


@pytest.mark.parametrize(("least", "forwards"), [(64, [(2, 90), (20, 20)]), (2000, [(22, 90)])])
def test_far_shorter_prompts_are_run_apart_where_it_saves_work(policy: LanguagePolicy, least: int, forwards: list[tuple[int, int]]) -> None:
    model, seen = policy.generation_model(), list[tuple[int, ...]]()
    model.get_input_embeddings().register_forward_pre_hook(lambda _, arguments: seen.append(tuple(arguments[0].shape)))
    backend, rng = TorchTokens(model, max_batch=32, least_shared=least), np.random.default_rng(0)
    lengths = [20] * 10 + [90, 80] + [20] * 10
    asked = [GenerationRequest(request_id=n, prompt_ids=rng.integers(3, 259, long), max_new_tokens=1) for n, long in enumerate(lengths)]
    backend.submit(asked)
    got = finish(backend, len(asked))
    assert seen == forwards
    for one, wanted in zip(asked, log_probs(policy, asked, got), strict=True):
        np.testing.assert_allclose(got[one.request_id].log_prob, wanted, atol=1e-4)


def growing(backend: TorchTokens) -> dict[int, Completion]:
    """Rows that grow past the cache's first columns, more of them than run at once, some with the same beginning."""
    same = np.arange(70) % 250 + 3
    prompts = [np.append(same, number + 3) if number % 3 == 0 else same[: number + 1] for number in range(9)]
    asked = [
        GenerationRequest(request_id=number, prompt_ids=prompt, max_new_tokens=64 + number, seed=number, top_k=number % 4)
        for number, prompt in enumerate(prompts)
    ]
    backend.submit(asked[:6])
    got = finish(backend, 2)
    backend.submit(asked[6:])
    return got | finish(backend, 9 - len(got))


@pytest.mark.parametrize("kind", ["llama", "qwen2_sliding", "gpt2"])
def test_spare_rows_and_columns_change_no_token(policies: dict[str, LanguagePolicy], kind: str) -> None:
    """The shapes of a GPU's graphs: rows to a power of two or the batch, columns to some multiple, together no more than is allowed."""
    found, seen = [], list[int]()
    for shapes in (False, True):
        model = policies[kind].generation_model()
        model.get_input_embeddings().register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].numel()))
        found.append(growing(TorchTokens(model, max_batch=5, max_prefill_tokens=128, least_shared=8, few_shapes=shapes)))
    exact, few = found
    assert max(seen) <= 128
    for number, own in exact.items():
        assert few[number].token_ids.tolist() == own.token_ids.tolist()
        np.testing.assert_allclose(few[number].log_prob, own.log_prob, atol=1e-5)


def test_a_model_that_cannot_be_captured_runs_without_graphs(policy: LanguagePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(self: Accelerated[Any], tensors: dict[str, Any], **key: Any) -> Any:
        if self.mode == "cuda_graph":
            raise RuntimeError("operation not permitted when stream is capturing\nSearch for it.")
        return self._function(**tensors, **key)

    expected = growing(TorchTokens(policy.generation_model(), max_batch=5))
    monkeypatch.setattr(Accelerated, "__call__", captured)
    with pytest.warns(UserWarning, match="without CUDA graphs, more slowly: operation not permitted when stream is capturing$"):
        got = growing(TorchTokens(policy.generation_model(), max_batch=5, few_shapes=True))
    assert [got[number].token_ids.tolist() for number in range(9)] == [expected[number].token_ids.tolist() for number in range(9)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen2_sliding"])
def test_graphs_sample_the_same_tokens(policies: dict[str, LanguagePolicy], kind: str) -> None:
    """Also after memory was given back and weights changed between two answers."""
    found = []
    for shapes in (False, True):
        backend = TorchTokens(policies[kind].generation_model().cuda(), max_batch=5, least_shared=8, few_shapes=shapes)
        found.append(growing(backend))
        assert (backend._decode.num_graphs > 0) is shapes
        backend.release_memory()
        assert backend._decode.num_graphs == 0
        backend.load_weights(1, ((name, 0.9 * tensor) for name, tensor in policies[kind].named_weights()))
        backend.restore_memory()
        backend.submit(requests(4, first=100))
        found[-1] |= finish(backend, 4)
    for number, own in found[0].items():
        assert found[1][number].token_ids.tolist() == own.token_ids.tolist()
        np.testing.assert_allclose(found[1][number].log_prob, own.log_prob, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_keys_and_values_of_a_group_of_heads_are_not_copied_for_each(groups: int) -> None:
    class Layer(torch.nn.Module):
        num_key_value_groups = 4 // groups

    modules: list[torch.nn.Module] = []

    def attention(module: torch.nn.Module, *given: Any, **options: Any) -> tuple[torch.Tensor, None]:
        modules.append(module)
        return sdpa_attention_forward(module, *given, **options)

    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 1, 8), torch.randn(3, groups, 10, 8), torch.randn(3, groups, 10, 8)
    mask = (torch.arange(10) <= torch.tensor([[9], [4], [0]]))[:, None, None]
    layer = Layer()
    found, _ = attention_by_group(attention, layer, query, key, value, mask, scaling=0.3)
    repeated = [part.repeat_interleave(4 // groups, dim=1) for part in (key, value)]
    weights = (0.3 * query @ repeated[0].transpose(2, 3)).masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(found, (weights @ repeated[1]).transpose(1, 2))
    assert (modules == [layer]) == (groups == 4)


def test_likeliest_tokens_are_those_of_transformers(policy: LanguagePolicy) -> None:
    backend = TorchTokens(policy.generation_model(), max_batch=4)
    asked = requests(8, temperature=0.0)
    backend.submit(asked)
    got = finish(backend, 8)
    model = load(Path(policy.config.model))
    for one in asked:
        prompt = torch.from_numpy(one.prompt_ids)[None]
        wanted = model.generate(prompt, max_new_tokens=one.max_new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert got[one.request_id].token_ids.tolist() == wanted[0, len(one.prompt_ids) :].tolist()
        assert (got[one.request_id].sampling_log_prob == 0).all()


def test_tokens_depend_on_the_seed_not_on_the_company(policy: LanguagePolicy) -> None:
    asked = requests(12, new=30, temperature=1.2, top_p=0.95)
    together = TorchTokens(policy.generation_model(), max_batch=6)
    together.submit(asked)
    got = finish(together, 12)
    alone = TorchTokens(policy.generation_model(), max_batch=1, seed=99)
    for one in reversed(asked):
        alone.submit([one])
        (single,) = alone.poll()
        assert single.token_ids.tolist() == got[one.request_id].token_ids.tolist()
    other = GenerationRequest(**{**vars(asked[0]), "seed": 1234, "max_new_tokens": 30})
    alone.submit([other])
    (different,) = alone.poll()
    assert different.token_ids.tolist()[: got[0].num_tokens] != got[0].token_ids.tolist()


def test_requests_without_a_seed_follow_the_backends(policy: LanguagePolicy) -> None:
    def tokens(seed: int) -> list[int]:
        backend = TorchTokens(policy.generation_model(), seed=seed)
        backend.submit([GenerationRequest(request_id=3, prompt_ids=np.array([5]), max_new_tokens=12)])
        return backend.poll()[0].token_ids.tolist()

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_first_token_is_drawn_from_the_softmax(policy: LanguagePolicy) -> None:
    count, prompt = 3000, np.array([7, 9])
    backend = TorchTokens(policy.generation_model(), max_batch=256)
    backend.submit([GenerationRequest(request_id=n, prompt_ids=prompt, max_new_tokens=1, seed=n, top_k=8) for n in range(count)])
    drawn = np.bincount([int(completion.token_ids[0]) for completion in backend.poll(min_ready=count)], minlength=300)
    with torch.no_grad():
        logits = load(Path(policy.config.model))(input_ids=torch.from_numpy(prompt)[None]).logits[0, -1].double()
    top = logits.topk(8)
    expected = torch.softmax(top.values, -1).numpy() * count
    assert drawn.sum() == drawn[top.indices.numpy()].sum()
    # 99.9% quantile of chi-square with 7 degrees of freedom.
    assert ((drawn[top.indices.numpy()] - expected) ** 2 / expected).sum() < 24.3


def test_stop_tokens_end_and_are_kept(policy: LanguagePolicy) -> None:
    backend = TorchTokens(policy.generation_model())
    free = GenerationRequest(request_id=1, prompt_ids=np.array([5]), max_new_tokens=30, seed=3)
    backend.submit([free])
    (whole,) = backend.poll()
    place = 7
    stop = int(whole.token_ids[place])
    first = int(np.flatnonzero(whole.token_ids == stop)[0])
    backend.submit([GenerationRequest(**{**vars(free), "stop_ids": (stop,)})])
    (stopped,) = backend.poll()
    assert stopped.token_ids.tolist() == whole.token_ids[: first + 1].tolist()
    assert (stopped.finish_reason, stopped.limit) == ("stop", None)


def test_context_ends_what_is_too_long(policy: LanguagePolicy) -> None:
    backend = TorchTokens(policy.generation_model())
    # The model has 128 positions.
    prompts = {1: 120, 2: 127, 3: 128, 4: 200}
    backend.submit([GenerationRequest(request_id=n, prompt_ids=np.full(size, 9), max_new_tokens=20, seed=0) for n, size in prompts.items()])
    got = finish(backend, 4)
    assert (got[1].num_tokens, got[1].finish_reason, got[1].limit) == (8, "length", "context")
    assert (got[2].num_tokens, got[2].limit) == (1, "context")
    for number in (3, 4):
        assert got[number].finish_reason == "failed"
        assert got[number].failure is not None
        assert got[number].failure.kind == "prompt_too_long"
        assert str(prompts[number]) in got[number].failure.message


def test_abort_keeps_what_was_sampled(policy: LanguagePolicy) -> None:
    asked = [GenerationRequest(request_id=n, prompt_ids=np.array([5 + n]), max_new_tokens=25, seed=n) for n in range(5)]
    undisturbed = TorchTokens(policy.generation_model(), max_batch=3)
    undisturbed.submit(asked)
    wanted = finish(undisturbed, 5)
    backend = TorchTokens(policy.generation_model(), max_batch=3)
    backend.submit(asked)
    for _ in range(4):
        assert backend.poll(timeout_s=0) == []
    backend.abort([1, 4, 99])
    aborted = {completion.request_id: completion for completion in backend.poll(timeout_s=0)}
    assert aborted.keys() == {1, 4}
    assert all(completion.finish_reason == "aborted" for completion in aborted.values())
    # Its first token comes with the prompt's forward, and one with each of four steps; request 4 had no row yet.
    assert aborted[1].token_ids.tolist() == wanted[1].token_ids[:5].tolist()
    assert aborted[4].num_tokens == 0
    rest = finish(backend, 3)
    assert {number: completion.token_ids.tolist() for number, completion in rest.items()} == {
        number: wanted[number].token_ids.tolist() for number in (0, 2, 3)
    }


def test_release_of_memory_changes_nothing(policy: LanguagePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(5, new=25)
    undisturbed = TorchTokens(policy.generation_model())
    undisturbed.submit(asked)
    wanted = finish(undisturbed, 5)
    backend = TorchTokens(policy.generation_model())
    backend.submit(asked)
    got = {completion.request_id: completion for completion in backend.poll(timeout_s=0)}
    assert backend.release_memory() > 0
    assert backend.poll(min_ready=5) == [], "nothing could end the wait"
    start = time.monotonic()
    assert backend.poll(min_ready=5, timeout_s=0.1) == []
    assert time.monotonic() - start >= 0.1
    assert backend.num_in_flight == 5 - len(got)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_run_prompts", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            backend.restore_memory()
    assert backend.poll(min_ready=5, timeout_s=0.0) == [], "nothing is sampled without its memory"
    backend.restore_memory()
    got |= finish(backend, 5 - len(got))
    assert all(got[number].token_ids.tolist() == wanted[number].token_ids.tolist() for number in wanted)


@pytest.mark.parametrize("kind", ["llama_tied", "qwen2_sliding"])
def test_weights_change_in_flight(policies: dict[str, LanguagePolicy], kind: str, tmp_path: Path) -> None:
    policy = build_language_policy(LanguageConfig(str(make_model(kind, tmp_path / kind))))
    backend = TorchTokens(policy.generation_model(), max_batch=3)
    asked = [GenerationRequest(request_id=n, prompt_ids=np.arange(5, 8 + n), max_new_tokens=20, seed=n) for n in range(4)]
    backend.submit(asked)
    before: list[LanguagePolicy] = []
    for version in range(1, 4):
        before.append(build_language_policy(LanguageConfig(str(policy.save_model(tmp_path / f"v{version - 1}")))))
        for _ in range(4):
            backend.poll(timeout_s=0)
        move(policy, version)
        backend.load_weights(version, policy.named_weights())
        assert backend.version == version
    got = finish(backend, 4)
    # Its first token comes with the prompt's forward, so five before the first change; then four with each version.
    assert got[0].version.tolist() == [0] * 5 + [1] * 4 + [2] * 4 + [3] * 7
    for number, model in enumerate([*before, policy]):
        for one, wanted in zip(asked, log_probs(model, asked, got), strict=True):
            chosen = got[one.request_id].version == number
            np.testing.assert_allclose(got[one.request_id].log_prob[chosen], wanted[chosen], atol=1e-4)
            if not chosen.all():
                assert np.abs(got[one.request_id].log_prob - wanted).max() > 0.1, "versions differ, or this shows nothing"


def test_keeping_the_cache_looks_at_older_keys_and_values(policy: LanguagePolicy) -> None:
    asked = [GenerationRequest(request_id=0, prompt_ids=np.arange(5, 15), max_new_tokens=20, seed=1)]
    errors = {}
    for on_update in ("recompute", "keep"):
        fresh = build_language_policy(policy.config)
        backend = TorchTokens(fresh.generation_model(), on_update=on_update)  # type: ignore[arg-type]
        backend.submit(asked)
        for _ in range(3):
            backend.poll(timeout_s=0)
        move(fresh, 1)
        backend.load_weights(1, fresh.named_weights())
        got = finish(backend, 1)
        (wanted,) = log_probs(fresh, asked, got)
        errors[on_update] = np.abs(got[0].log_prob - wanted)[got[0].version == 1].max()
    assert errors["recompute"] < 1e-4
    assert errors["keep"] > 1e-3


def test_wrong_weights_are_refused(policy: LanguagePolicy) -> None:
    backend = TorchTokens(policy.generation_model())
    with pytest.raises(UserError, match="no weight 'nothing'"):
        backend.load_weights(1, [("nothing", torch.zeros(1))])
    assert backend.version == 0


def test_other_threads_get_their_turn(policy: LanguagePolicy) -> None:
    model = policy.generation_model()
    backend = TorchTokens(model, max_batch=8)
    # Far more than are answered before all is aborted, also where the other thread begins late.
    asked = [GenerationRequest(request_id=n, prompt_ids=np.array([5]), max_new_tokens=120, seed=n) for n in range(2000)]
    backend.submit(asked)
    forwards: list[int] = []
    model.register_forward_hook(lambda *_: forwards.append(backend.version))

    def interfere() -> None:
        for version in range(1, 6):
            backend.load_weights(version, policy.named_weights())
            deadline = time.monotonic() + 60
            # A token or two with these weights: a forward for which they were computed anew, and one that samples.
            while forwards.count(version) < 3 and time.monotonic() < deadline:
                time.sleep(0.001)
        backend.abort(range(len(asked)))

    thread = threading.Thread(target=interfere)
    thread.start()
    got = finish(backend, len(asked))
    thread.join()
    assert len(got) == len(asked)
    versions = np.concatenate([completion.version for completion in got.values()])
    assert set(versions) >= {1, 2, 3, 4, 5}
    assert {completion.finish_reason for completion in got.values()} >= {"aborted"}


def test_ids_may_be_used_again_once_answered(policy: LanguagePolicy) -> None:
    backend = TorchTokens(policy.generation_model())
    one = requests(1)
    backend.submit(one)
    with pytest.raises(UserError, match="already in flight"):
        backend.submit(one)
    backend.poll()
    backend.submit(one)
    assert len(backend.poll()) == 1
    backend.submit(one)
    backend.close()
    backend.close()
    assert backend.poll() == []


def test_models_that_keep_a_state_are_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.MambaConfig(vocab_size=300, hidden_size=16, state_size=4, num_hidden_layers=1)
    with pytest.raises(UserError, match=r"model type 'mamba'.*linear_attention"):
        TorchTokens(transformers.MambaForCausalLM(config))
    rwkv = transformers.RwkvConfig(vocab_size=300, hidden_size=16, num_hidden_layers=2)
    with pytest.raises(UserError, match=r"model type 'rwkv'.*rescale_every"):
        TorchTokens(transformers.RwkvForCausalLM(rwkv))
    bloom = transformers.BloomConfig(vocab_size=300, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(UserError, match=r"model type 'bloom'.*ALiBi"):
        TorchTokens(transformers.BloomForCausalLM(bloom))
    local = transformers.GPTNeoConfig(
        vocab_size=300, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], window_size=4
    )
    with pytest.raises(UserError, match=r"model type 'gpt_neo'.*local layers"):
        TorchTokens(transformers.GPTNeoForCausalLM(local))


@pytest.mark.parametrize("kind", KINDS)
def test_pictures(tmp_path: Path, kind: str) -> None:
    policy = build_language_policy(LanguageConfig(str(make_vision_model(kind, tmp_path / kind))))
    image_id = policy.tokenizer.id_of(IMAGE)
    asked = []
    for number in range(5):
        images = tuple(picture(number + i, 16, 24) for i in range(number % 3))
        prompt = policy.expand_images(np.array([5, *[image_id, 7] * len(images), 6 + number]), images)
        asked.append(GenerationRequest(request_id=number, prompt_ids=prompt, max_new_tokens=12, seed=number, images=images))
    backend = TorchTokens(policy.generation_model(), max_batch=3, vision=policy.vision)
    backend.submit(asked)
    for _ in range(3):
        assert not backend.poll(timeout_s=0)
    move(policy, 1)
    backend.load_weights(1, policy.named_weights())
    got = finish(backend, 5)
    for one, wanted in zip(asked, log_probs(policy, asked, got), strict=True):
        chosen = got[one.request_id].version == 1
        assert chosen.any()
        np.testing.assert_allclose(got[one.request_id].log_prob[chosen], wanted[chosen], atol=5e-5)
    with pytest.raises(UserError, match="image tokens"):
        backend.submit(
            [GenerationRequest(request_id=9, prompt_ids=np.array([5, image_id]), max_new_tokens=2, images=(picture(0, 32, 32),) * 2)]
        )


def test_pictures_for_the_blind(policy: LanguagePolicy) -> None:
    with pytest.raises(UserError, match="takes none"):
        TorchTokens(policy.generation_model()).submit(requests(1, images=(picture(0),)))
