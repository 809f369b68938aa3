"""LoRA, references, what is handed to generators, and what is written to disk."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.errors import UserError
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.language_weights import as_in_files, load_named_weights
from tests.policies.language_models import alone, load, make_model, random_sequences

LENGTHS = ((4, 9), (1, 3), (2, 6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("lora") / "model")


def build(folder: Path, **options: Any) -> LanguagePolicy:
    return build_language_policy(LanguageConfig(str(folder), **options))


def disturb(policy: LanguagePolicy, seed: int = 0) -> None:
    """Move every trained weight, as a step of learning would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def log_prob(policy: LanguagePolicy) -> torch.Tensor:
    with torch.no_grad():
        return policy.evaluate(random_sequences(0, LENGTHS)).log_prob


def test_lora_starts_as_the_model_and_trains_itself_alone(folder: Path) -> None:
    plain, lora = build(folder), build(folder, lora_rank=4)
    assert torch.equal(log_prob(plain), log_prob(lora))
    lora.evaluate(random_sequences(0, LENGTHS)).log_prob.sum().backward()
    trained = {name for name, parameter in lora.named_parameters() if parameter.grad is not None}
    # Seven linear layers in each of two blocks, an A and a B in each.
    assert len(trained) == 2 * 7 * 2
    assert all(".lora_" in name for name in trained)


def test_lora_product_by_hand(folder: Path) -> None:
    policy = build(folder, lora_rank=2, lora_alpha=6.0, lora_targets=("q_proj",))
    disturb(policy)
    state, before = policy.model.state_dict(), load(folder).state_dict()
    merged = dict(policy.named_weights())
    assert merged.keys() == before.keys()
    name = "model.layers.0.self_attn.q_proj"
    a, b = (state[f"base_model.model.{name}.lora_{letter}.default.weight"] for letter in "AB")
    torch.testing.assert_close(merged[f"{name}.weight"], before[f"{name}.weight"] + 6.0 / 2 * b @ a)
    untouched = [key for key in before if not key.endswith("q_proj.weight")]
    assert all(torch.equal(merged[key], before[key]) for key in untouched)


def test_merged_weights_are_what_peft_merges(folder: Path) -> None:
    policy = build(folder, lora_rank=3)
    disturb(policy)
    merged = {name: tensor.clone() for name, tensor in policy.named_weights()}
    for name, tensor in policy.model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[name], tensor)


def test_reference_with_lora_is_the_model_without_it(folder: Path) -> None:
    policy, plain = build(folder, lora_rank=4), build(folder)
    disturb(policy)
    sequences = random_sequences(0, LENGTHS)
    reference = policy.reference_log_prob(sequences)
    torch.testing.assert_close(reference, log_prob(plain), atol=1e-5, rtol=0)
    assert not reference.requires_grad
    assert (log_prob(policy) - reference).abs().max() > 0.1


def test_reference_without_lora_is_a_copy_that_stays(folder: Path) -> None:
    policy = build(folder)
    with pytest.raises(UserError, match="No reference policy"):
        policy.reference_log_prob(random_sequences(0, LENGTHS))
    policy.keep_reference()
    before = log_prob(policy)
    names = set(policy.state_dict())
    disturb(policy)
    assert torch.equal(policy.reference_log_prob(random_sequences(0, LENGTHS)), before)
    assert (log_prob(policy) - before).abs().max() > 0.1
    assert set(policy.state_dict()) == names == {f"model.{name}" for name in load(folder).state_dict()}


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gpt2"])
def test_generation_model_has_the_present_weights_and_memory_of_its_own(tmp_path: Path, kind: str) -> None:
    policy = build(make_model(kind, tmp_path / kind), lora_rank=0 if kind == "gpt2" else 2)
    disturb(policy)
    model = policy.generation_model()
    sequences = random_sequences(0, LENGTHS)
    own = log_prob(policy)
    for row, sequence in enumerate(sequences):
        columns = np.flatnonzero(sequence.mask)
        np.testing.assert_allclose(own[row, columns].numpy(), alone(model, sequence)[0][columns - 1], atol=2e-5)
    disturb(policy, 1)
    moved = log_prob(policy)
    assert (moved - own).abs().max() > 0.05
    load_named_weights(model, policy.named_weights())
    columns = np.flatnonzero(sequences[0].mask)
    np.testing.assert_allclose(moved[0, columns].numpy(), alone(model, sequences[0])[0][columns - 1], atol=2e-5)


def test_tied_weights_are_given_once(tmp_path: Path) -> None:
    names = [name for name, _ in build(make_model("llama_tied", tmp_path / "tied")).named_weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))


def test_wrong_tensors_are_refused(folder: Path) -> None:
    model = build(folder).generation_model()
    with pytest.raises(UserError, match="no weight 'head'"):
        load_named_weights(model, [("head", torch.zeros(1))])
    with pytest.raises(UserError, match=r"is \[1\], but the model that generates has \[32\]"):
        load_named_weights(model, [("model.norm.weight", torch.zeros(1))])


def test_saved_model_is_an_ordinary_folder(folder: Path, tmp_path: Path) -> None:
    policy = build(folder, lora_rank=4, value_head="linear")
    disturb(policy)
    saved = policy.save_model(tmp_path / "out")
    sequences = random_sequences(0, LENGTHS)
    columns = np.flatnonzero(sequences[0].mask)
    np.testing.assert_allclose(log_prob(policy)[0, columns].numpy(), alone(load(saved), sequences[0])[0][columns - 1], atol=2e-5)
    again = build(saved, value_head="linear")
    with torch.no_grad():
        first, second = policy.evaluate(sequences), again.evaluate(sequences)
    torch.testing.assert_close(first.log_prob, second.log_prob, atol=2e-5, rtol=0)
    torch.testing.assert_close(first.value, second.value, atol=2e-5, rtol=0)
    # vLLM loads every safetensors file beside the model's.
    assert [path.name for path in saved.glob("*.safetensors")] == ["model.safetensors"]
    # Where earlier versions wrote it.
    (saved / "value_head" / "value_head.safetensors").rename(saved / "value_head.safetensors")
    assert torch.equal(build(saved, value_head="linear").value_head.weight, again.value_head.weight)
    assert again.tokenizer.encode("go left").tolist() == policy.tokenizer.encode("go left").tolist()
    assert again.tokenizer.has_chat_template
    # Saving again over what is there replaces it whole.
    (saved / "old.txt").write_text("x")
    policy.save_model(saved)
    assert not (saved / "old.txt").exists()
    assert not list(tmp_path.glob(".*"))


def test_adapter_goes_on_where_it_was_saved(folder: Path, tmp_path: Path) -> None:
    policy = build(folder, lora_rank=4, value_head="mlp")
    disturb(policy)
    saved = policy.save_adapter(tmp_path / "adapter")
    stored = load_file(saved / "adapter_model.safetensors")
    assert len(stored) == 28
    assert json.loads((saved / "adapter_config.json").read_text())["r"] == 4
    again = build(folder, adapter=str(saved), value_head="mlp")
    sequences = random_sequences(0, LENGTHS)
    with torch.no_grad():
        first, second = policy.evaluate(sequences), again.evaluate(sequences)
    assert torch.equal(first.log_prob, second.log_prob)
    assert first.value is not None
    assert torch.equal(first.value, second.value)
    again.evaluate(sequences).log_prob.sum().backward()
    assert sum(parameter.grad is not None for parameter in again.model.parameters()) == 28, "it trains on"


def test_adapters_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No LoRA adapter to save"):
        build(folder).save_adapter(tmp_path / "none")
    with pytest.raises(UserError, match=r"no adapter_config\.json"):
        build(folder, adapter=str(folder))
    saved = build(folder, lora_rank=2).save_adapter(tmp_path / "adapter")
    other = make_model("gpt2", tmp_path / "other")
    with pytest.raises(UserError, match="does not fit this model"):
        build(other, adapter=str(saved))
    weights = saved / "adapter_model.safetensors"
    stored = load_file(weights)
    first = min(stored)
    save_file({name: tensor for name, tensor in stored.items() if name != first}, weights)
    with pytest.raises(UserError, match=rf"it lacks 1 tensors, '{re.escape(first)}' first"):
        build(folder, adapter=str(saved))
    save_file(stored | {first.replace("layers.0", "layers.9"): stored[first].clone()}, weights)
    with pytest.raises(UserError, match=r"it has too much: 1 tensors, '.*layers\.9"):
        build(folder, adapter=str(saved))
    weights.rename(saved / "adapter_model.bin")
    with pytest.raises(UserError, match=r"'adapter_model\.bin', a pickle"):
        build(folder, adapter=str(saved))


def test_an_adapter_that_names_a_module_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Old peft imports it: importlib.import_module(config.megatron_core).
    saved = build(folder, lora_rank=2).save_adapter(tmp_path / "adapter")
    settings = json.loads((saved / "adapter_config.json").read_text())
    (tmp_path / "evil_of_an_adapter.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'mark')!r}).touch()")
    monkeypatch.syspath_prepend(tmp_path)
    evil = {**settings, "megatron_core": "evil_of_an_adapter", "megatron_config": {"hidden_size": 4}}
    (saved / "adapter_config.json").write_text(json.dumps(evil))
    with pytest.raises(UserError, match="megatron_core"):
        build(folder, adapter=str(saved))
    assert not (tmp_path / "mark").exists()


def test_unknown_lora_targets_name_the_layers_there_are(folder: Path) -> None:
    with pytest.raises(UserError, match=r"lora_targets=\['query'\].*down_proj, gate_proj, k_proj"):
        build(folder, lora_rank=2, lora_targets=("query",))


def test_damaged_value_head(folder: Path, tmp_path: Path) -> None:
    saved = build(folder, value_head="linear").save_model(tmp_path / "out")
    with pytest.raises(UserError, match=r"value head in .* does not fit"):
        build(saved, value_head="mlp")


@pytest.mark.parametrize(("kind", "as_saved"), [("mixtral", True), ("qwen2_moe_sliding", False), ("llama", True)])
def test_weights_as_in_files(tmp_path: Path, kind: str, as_saved: bool) -> None:
    """Against transformers' own file; joined experts that vLLM knows stay joined."""
    policy = build_language_policy(LanguageConfig(str(make_model(kind, tmp_path))))
    config, named = policy.base.config, dict(policy.named_weights())
    stored, found = load_file(tmp_path / "model.safetensors"), dict(as_in_files(config, named.items()))
    assert found.keys() == (stored if as_saved else named).keys()
    assert all(torch.equal(found[name], (stored if as_saved else named)[name]) for name in found)
