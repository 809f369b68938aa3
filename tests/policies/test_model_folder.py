"""What may be wrong with a model folder or a chat template: one line each."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.errors import UserError
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.language import build_language_policy
from embodied_rl.policies.model_folder import load_model, max_context
from embodied_rl.policies.tiny_language import END, TinyShape, make_tiny_model, train_tokenizer
from tests.policies.language_models import TEXTS, tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny(tmp_path / "model")


def test_missing_folder_and_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_model(tmp_path / "nothing")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(empty)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model\*\.safetensors"):
        load_model(folder)


@pytest.mark.parametrize("make", [load_model, partial(load_model, weights=False)])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "many"}, "error for field 'hidden_size': TypeError: Field 'hidden_size' expected int, got str"),
        ({"num_attention_heads": 3}, "is not a multiple of the number of attention heads"),
        ({"num_attention_heads": 0}, "modulo by zero"),
        ({"dtype": "floatx"}, "no attribute 'floatx'"),
    ],
)
def test_wrong_values_of_a_config_are_one_line(folder: Path, make: Any, changes: dict[str, object], message: str) -> None:
    """transformers raises errors of many kinds for them."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=f"llama model .*{message}") as caught:
        make(folder)
    assert "\n" not in str(caught.value)


def test_damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load_model(folder)
    (folder / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(UserError, match="nested too deeply"):
        load_model(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="names no model_type"):
        load_model(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_without_being_read(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"not even a pickle")
    with pytest.raises(UserError, match=f"'{name}', a pickle, which can run code"):
        load_model(folder)


def test_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    (folder / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"lacks 1 of 2 shards .* 'model-2\.safetensors'"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="is damaged"):
        load_model(folder)


def test_missing_tensor_is_not_made_up(folder: Path) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    del state["model.norm.weight"]
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 tensors .* 'model\.norm\.weight'"):
        load_model(folder)


def test_truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match="Cannot load the llama model"):
        load_model(folder)


def test_models_that_are_no_language_models(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "t5"}))
    with pytest.raises(UserError, match="neither a causal language model"):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "of_my_own", "auto_map": {"AutoConfig": "evil.Config"}}))
    (folder / "evil.py").write_text("raise SystemExit('run')")
    with pytest.raises(UserError, match="Cannot load the of_my_own model"):
        load_model(folder)


def test_tokenizer_is_missing_or_damaged(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="Cannot read the tokenizer"):
        build_language_policy(LanguageConfig(str(folder)))
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").write_bytes(b"not even read")
    with pytest.raises(UserError, match=r"has no tokenizer \(none of tokenizer.json, .* hf download OWNER/MODEL"):
        build_language_policy(LanguageConfig(str(folder)))
    with pytest.raises(UserError, match="does not exist"):
        ChatTokenizer.read(folder / "nowhere")


def test_context_is_the_models_own(folder: Path) -> None:
    model = load_model(folder)
    assert max_context(model.config) == 512


# --- the tokenizer and its template ----------------------------------------------------------------------------------


def test_text_comes_back_as_it_was(folder: Path) -> None:
    tokenizer = ChatTokenizer.read(folder)
    for text in ("go left", "  two  spaces ,and\nlines ", "Grüße, 世界 🤖", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("half a pair: \ud83d")) == "half a pair: ?"
    # A frequent word is one token; any other is its bytes.
    assert len(tokenizer.encode(" left")) == 1
    assert len(tokenizer.encode("世")) == 3
    # Ids of an embedding's padding have no text.
    assert tokenizer.decode([*tokenizer.encode("go"), 10**6, -1]) == "go"


def test_chat_by_hand(folder: Path) -> None:
    tokenizer = ChatTokenizer.read(folder)
    messages = [{"role": "system", "content": "go up"}, {"role": "user", "content": "go left"}]
    text = "<|im_start|>system\ngo up<|im_end|>\n<|im_start|>user\ngo left<|im_end|>\n"
    assert tokenizer.chat_text(messages, add_generation_prompt=False) == text
    token_ids = tokenizer.chat(messages)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text + "<|im_start|>assistant\n"
    # START is id 1 and END id 2, whatever is in the vocabulary.
    assert token_ids[0] == 1
    assert np.count_nonzero(token_ids == 1) == 3
    assert np.count_nonzero(token_ids == 2) == 2
    assert tokenizer.stop_ids() == (2,)
    assert tokenizer.stop_ids(END, "<|im_start|>") == (2, 1)


def test_template_errors_name_the_folder(folder: Path) -> None:
    with pytest.raises(UserError, match=r"has no token '<\|nope\|>'"):
        ChatTokenizer.read(folder).stop_ids("<|nope|>")
    template = folder / "chat_template.jinja"
    assert template.is_file()
    template.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"fails on messages with roles user, user: TemplateError: roles must alternate"):
        ChatTokenizer.read(folder).chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    template.write_text("{% for message in messages %}{{ message['nothing']['there'] }}{% endfor %}")
    with pytest.raises(UserError, match="fails on messages with roles user: UndefinedError"):
        ChatTokenizer.read(folder).chat([{"role": "user", "content": "a"}])
    template.write_text("{% if %}")
    with pytest.raises(UserError, match="TemplateSyntaxError"):
        ChatTokenizer.read(folder).chat([{"role": "user", "content": "a"}])
    template.write_text("")
    with pytest.raises(UserError, match=r"has no chat template|makes an empty prompt"):
        ChatTokenizer.read(folder).chat([{"role": "user", "content": "a"}])
    template.unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has no chat template"):
        ChatTokenizer.read(folder).chat([{"role": "user", "content": "a"}])


# --- the tiny model --------------------------------------------------------------------------------------------------


def test_tiny_model_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    folders = [make_tiny_model(tmp_path / str(number), TEXTS, seed=seed) for number, seed in enumerate((1, 1, 2))]
    files = [load_file(folder / "model.safetensors") for folder in folders]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    assert any(not torch.equal(files[0][name], files[2][name]) for name in files[0])
    assert (folders[0] / "tokenizer.json").read_bytes() == (folders[1] / "tokenizer.json").read_bytes()


def test_tiny_model_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    make_tiny_model(tmp_path / "model", TEXTS)
    assert torch.equal(torch.rand(3), wanted)


def test_tied_tiny_model_has_one_matrix(tmp_path: Path) -> None:
    stored = load_file(make_tiny_model(tmp_path / "tied", TEXTS, shape=TinyShape(tied=True)) / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert stored["model.embed_tokens.weight"].shape[1] == 64


def test_sizes_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be >= 259"):
        train_tokenizer(TEXTS, 100)
    with pytest.raises(UserError, match="multiple of twice num_heads"):
        TinyShape(hidden_size=10, num_heads=4)
    shutil.rmtree(tmp_path)
