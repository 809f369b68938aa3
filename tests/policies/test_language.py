"""Teacher forcing against plain forwards of one sequence at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.errors import UserError
from embodied_rl.policies.language import LanguagePolicy, TokenEvaluation, build_language_policy, token_statistics
from embodied_rl.policies.packing import Layout, TokenSequence, packed_inputs
from tests.generation.constrained import ANSWERS, STRUCTURE, masked_log_prob
from tests.policies.language_models import WINDOW, alone, load, make_model, random_sequences, tiny

KINDS = ("llama", "llama_tied", "qwen3", "qwen2_sliding", "mistral_sliding", "qwen2_moe_sliding", "gpt2")
LENGTHS = ((4, 9), (1, 3), (12, 1), (2, 14), (7, 7))
"""(prompt, sampled): rows of very different lengths, one of a single prompt token, most longer than a sliding window."""
TOLERANCE = 5e-5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Products this small are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(kind, root / kind) for kind in KINDS}


def build(folder: Path, **options: Any) -> LanguagePolicy:
    return build_language_policy(LanguageConfig(str(folder), **options))


def check(evaluation: TokenEvaluation, sequences: list[TokenSequence], model: Any) -> None:
    for row, sequence in enumerate(sequences):
        log_prob, entropy = alone(model, sequence)
        columns = np.flatnonzero(sequence.mask)
        np.testing.assert_allclose(evaluation.log_prob[row, columns].detach().numpy(), log_prob[columns - 1], atol=TOLERANCE)
        np.testing.assert_allclose(evaluation.entropy[row, columns].detach().numpy(), entropy[columns - 1], atol=TOLERANCE)
        rest = np.ones(evaluation.mask.shape[1], bool)
        rest[columns] = False
        assert not evaluation.mask[row, rest].any()
        assert (evaluation.log_prob[row, rest] == 0).all()
        assert (evaluation.entropy[row, rest] == 0).all()


@pytest.mark.parametrize("layout", ["packed", "right", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_each_sequence_alone(folders: dict[str, Path], kind: str, layout: Layout) -> None:
    policy, sequences = build(folders[kind], layout=layout), random_sequences(1, LENGTHS)
    assert max(len(sequence) for sequence in sequences) > 2 * WINDOW
    check(policy.evaluate(sequences), sequences, load(folders[kind]))


@pytest.mark.parametrize("layout", ["packed", "right", "left"])
def test_eager_attention(folders: dict[str, Path], layout: Layout) -> None:
    sequences = random_sequences(2, LENGTHS)
    check(build(folders["qwen2_sliding"], layout=layout, attention="eager").evaluate(sequences), sequences, load(folders["qwen2_sliding"]))


class Masks(TorchDispatchMode):
    """Counts how often logits are masked."""

    def __init__(self, num_rows: int, vocabulary: int) -> None:
        super().__init__()
        self.shape, self.count = (num_rows, vocabulary), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.masked_fill.Scalar and tuple(args[0].shape) == self.shape
        return func(*args, **(kwargs or {}))


def test_answers_with_structures_are_scored_among_their_allowed_tokens_by_one_mask(folders: dict[str, Path]) -> None:
    """The logits of a real vocabulary are too large to be copied for every answer."""
    policy, stop, prompt = build(folders["llama"]), 2, np.array([5, 9, 30])
    answers = [np.array([*policy.tokenizer.encode(json.dumps(answer)), stop]) for answer in ANSWERS]
    sequences = [TokenSequence.of(prompt, answer, structure=STRUCTURE, stop_ids=(stop,)) for answer in answers]
    sequences.append(TokenSequence.of(prompt, answers[0]))
    with Masks(sum(map(len, answers)) + len(answers[0]), policy.hf_config.vocab_size) as masks:
        found = policy.evaluate(sequences)
    assert masks.count == 1
    check(TokenEvaluation(found.log_prob[3:], found.entropy[3:], None, found.mask[3:]), sequences[3:], load(folders["llama"]))
    for row, answer in enumerate(answers):
        with torch.no_grad():
            logits = load(folders["llama"])(input_ids=torch.from_numpy(sequences[row].token_ids)[None]).logits[0, len(prompt) - 1 : -1]
        expected, _ = masked_log_prob(logits, answer.tolist(), policy.tokenizer, stop=stop)
        np.testing.assert_allclose(found.log_prob[row][found.mask[row]].detach().numpy(), expected, atol=TOLERANCE)


def test_sdpa_is_refused_where_it_would_leave_out_the_cap_of_attention(tmp_path: Path) -> None:
    folder, sequences = make_model("gemma2_capped", tmp_path / "model"), random_sequences(2, LENGTHS)
    with pytest.raises(UserError, match=r"attn_logit_softcapping.*policy\.attention=eager"):
        build(folder)
    check(build(folder, attention="eager").evaluate(sequences), sequences, load(folder, attn_implementation="eager"))
    without = alone(load(folder, attn_implementation="sdpa"), sequences[0])[0]
    assert np.abs(without - alone(load(folder, attn_implementation="eager"), sequences[0])[0]).max() > 100 * TOLERANCE


def test_micro_batches_change_nothing(folders: dict[str, Path]) -> None:
    sequences = random_sequences(3, LENGTHS * 2)
    whole, parts = build(folders["llama"]), build(folders["llama"], max_tokens_per_micro_batch=20)
    assert whole.layout == "packed"
    assert len(whole.micro_batches(sequences)) == 1
    assert len(parts.micro_batches(sequences)) > 3
    torch.testing.assert_close(whole.evaluate(sequences).log_prob, parts.evaluate(sequences).log_prob, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("layout", ["packed", "right", "left"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_single_forwards(folders: dict[str, Path], layout: Layout, checkpointing: bool) -> None:
    sequences = random_sequences(4, LENGTHS)
    policy = build(folders["llama"], layout=layout, gradient_checkpointing=checkpointing)
    evaluation = policy.evaluate(sequences)
    (evaluation.log_prob.sum() + 0.5 * evaluation.entropy.sum()).backward()
    model = load(folders["llama"])
    for sequence in sequences:
        log_probs = torch.log_softmax(model(input_ids=torch.from_numpy(sequence.token_ids)[None]).logits[0, :-1], -1)
        wanted = torch.from_numpy(sequence.mask[1:])
        chosen = log_probs.gather(-1, torch.from_numpy(sequence.token_ids[1:, None])).squeeze(-1)
        (chosen[wanted].sum() - 0.5 * (log_probs.exp() * log_probs).sum(-1)[wanted].sum()).backward()
    own = dict(policy.model.named_parameters())
    for name, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(own[name].grad, parameter.grad, atol=2e-5 * scale, rtol=1e-3)


def test_checkpointing_runs_layers_again_in_the_backward(folders: dict[str, Path]) -> None:
    sequences = random_sequences(5, LENGTHS)
    calls = {}
    for checkpointing in (False, True):
        policy = build(folders["llama"], gradient_checkpointing=checkpointing)
        count = 0

        def counted(*_: Any) -> None:
            nonlocal count
            count += 1

        policy.model.model.layers[0].mlp.register_forward_pre_hook(counted)
        policy.evaluate(sequences).log_prob.sum().backward()
        calls[checkpointing] = count
    assert calls == {False: 1, True: 2}


def test_value_is_the_head_of_the_hidden_state_before_the_token(folders: dict[str, Path]) -> None:
    sequences = random_sequences(6, LENGTHS)
    policy = build(folders["llama"], value_head="linear")
    assert policy.value_head is not None
    before = policy.evaluate(sequences)
    assert before.value is not None
    assert (before.value == 0).all(), "a new head says 0"
    weight = torch.linspace(-1, 1, 32)
    with torch.no_grad():
        policy.value_head.weight.copy_(weight[None])
        policy.value_head.bias.fill_(0.25)
    value = policy.evaluate(sequences).value
    assert value is not None
    model = load(folders["llama"])
    for row, sequence in enumerate(sequences):
        with torch.no_grad():
            hidden = model.model(input_ids=torch.from_numpy(sequence.token_ids)[None]).last_hidden_state[0]
        columns = np.flatnonzero(sequence.mask)
        torch.testing.assert_close(value[row, columns].detach(), hidden[columns - 1] @ weight + 0.25, atol=TOLERANCE, rtol=0)
    (value.sum()).backward()
    assert policy.model.model.embed_tokens.weight.grad.abs().sum() > 0, "the backbone learns from values"


def test_mlp_value_head_has_gradients(folders: dict[str, Path]) -> None:
    policy = build(folders["llama"], value_head="mlp")
    value = policy.evaluate(random_sequences(7, LENGTHS)).value
    assert value is not None
    value.sum().backward()
    assert policy.value_head is not None
    last = policy.value_head[-1]
    # Every evaluated token adds 1 to the gradient of the last bias.
    assert float(last.bias.grad) == sum(n for _, n in LENGTHS)


def test_dropout_is_off_in_training_mode_too(folders: dict[str, Path]) -> None:
    policy, sequences = build(folders["gpt2"]), random_sequences(8, LENGTHS)
    policy.train()
    first, second = policy.evaluate(sequences).log_prob, policy.evaluate(sequences).log_prob
    assert torch.equal(first, second)
    policy.model.train()
    with torch.no_grad():
        ids = torch.from_numpy(sequences[0].token_ids)[None]
        assert torch.equal(policy.model(input_ids=ids).logits, policy.model(input_ids=ids).logits)


@pytest.mark.parametrize("tempered", [False, True])
def test_statistics_in_chunks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, tempered: bool) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(10, 7, dtype=torch.float64), torch.randint(0, 7, (10,))
    logits[3, 2] = -torch.inf
    target[3] = 1
    monkeypatch.setattr("embodied_rl.policies.language._CHUNK", 3)
    given = logits.clone().requires_grad_()
    temperature = torch.linspace(0.5, 2.0, 10) if tempered else torch.ones(10)
    log_prob, entropy = token_statistics(given, target, temperature if tempered else None)
    logits = logits / temperature[:, None]
    expected = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(log_prob.double(), expected.log_prob(target), atol=1e-6, rtol=0)
    finite = torch.distributions.Categorical(logits=torch.where(torch.isinf(logits), -1e9, logits))
    torch.testing.assert_close(entropy.double(), finite.entropy(), atol=1e-6, rtol=0)
    log_prob.sum().backward()
    # d log p(target) / d logits = (onehot − p) / temperature.
    hot = torch.nn.functional.one_hot(target, 7)
    assert given.grad is not None
    torch.testing.assert_close(given.grad, (hot - torch.softmax(logits, -1)) / temperature[:, None], atol=1e-6, rtol=0)


def test_nothing_to_evaluate_is_zeros(folders: dict[str, Path]) -> None:
    sequence = TokenSequence(np.array([5, 6, 7]), np.zeros(3, bool))
    evaluation = build(folders["llama"]).evaluate([sequence])
    assert evaluation.log_prob.tolist() == [[0.0, 0.0, 0.0]]
    assert not evaluation.mask.any()


def test_ids_beyond_the_vocabulary_are_refused(folders: dict[str, Path]) -> None:
    policy = build(folders["llama"])
    with pytest.raises(ValueError, match=r"Token ids must be in \[0, \d+\), got 300"):
        policy.evaluate([TokenSequence.of(np.array([5]), np.array([300]))])
    with pytest.raises(ValueError, match="129 tokens does not fit the model's context of 128"):
        policy.evaluate([TokenSequence.of(np.full(100, 5), np.full(29, 6))])
    with pytest.raises(ValueError, match="at least one sequence"):
        policy.evaluate([])


def test_models_that_mix_packed_sequences_are_padded(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    # A recurrent layer carries its state over the border; here the border is taken away, which is the same to who looks.
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    monkeypatch.setattr("embodied_rl.policies.language.packed_inputs", lambda lengths, device: {})
    policy = build(folders["llama"])
    assert policy.layout == "right"
    with pytest.raises(UserError, match="does not keep packed sequences apart"):
        build(folders["llama"], layout="packed")


@pytest.mark.parametrize("lost", ["lengths", "all"])
def test_a_model_that_hands_no_lengths_down_keeps_sequences_apart_by_a_mask(
    folders: dict[str, Path], lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their positions, from which transformers makes it."""
    kept = ["attention_mask"] if lost == "lengths" else []

    def some(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
        return {name: value for name, value in packed_inputs(lengths, device).items() if name in kept}

    monkeypatch.setattr("embodied_rl.policies.language.packed_inputs", some)
    sequences, policy = random_sequences(1, LENGTHS), build(folders["llama"], layout="packed")
    assert policy.base.config._attn_implementation == ("sdpa" if lost == "lengths" else "sdpa_by_sequence")
    check(policy.evaluate(sequences), sequences, load(folders["llama"]))


def test_recurrent_model_is_padded(tmp_path: Path) -> None:
    import transformers

    from embodied_rl.policies.tiny_language import train_tokenizer

    tokenizer = train_tokenizer(["go left"], 260)
    config = transformers.MambaConfig(vocab_size=len(tokenizer), hidden_size=16, state_size=4, num_hidden_layers=1)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(str(tmp_path))
    policy = build(tmp_path, attention="eager")
    assert policy.layout == "right"
    sequences = random_sequences(9, LENGTHS)
    check(policy.evaluate(sequences), sequences, load(tmp_path))


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model")
    sequences = random_sequences(10, LENGTHS)
    exact, rough = build(folder, dtype="float32").evaluate(sequences), build(folder, dtype="bfloat16").evaluate(sequences)
    assert rough.log_prob.dtype == torch.float32
    difference = (exact.log_prob - rough.log_prob).abs().max()
    assert 0 < difference < 0.05


def test_learning_makes_sampled_tokens_likelier(tmp_path: Path) -> None:
    policy = build(tiny(tmp_path / "model"), max_tokens_per_micro_batch=24)
    sequences = random_sequences(11, LENGTHS)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    with torch.no_grad():
        before = policy.evaluate(sequences).log_prob.sum()
    for _ in range(5):
        optimizer.zero_grad()
        for indices in policy.micro_batches(sequences):
            (-policy.evaluate([sequences[index] for index in indices]).log_prob.sum()).backward()
        optimizer.step()
    with torch.no_grad():
        after = policy.evaluate(sequences).log_prob.sum()
    assert after > 0.7 * before
