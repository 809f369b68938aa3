"""Reading and writing checkpoints: what the original wrote comes in, what it would read goes out, and every fault has its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from embodied_rl.errors import UserError
from embodied_rl.policies.model_folder import read_safetensors
from embodied_rl.policies.openvla.config import VIT_KEY, OpenVLAConfig
from embodied_rl.policies.openvla.model import INDEX, SINGLE, OpenVLA
from embodied_rl.policies.openvla.oft import OpenVLAOFT
from tests.policies.openvla.conftest import HEAD, VISION, whole_state


def load(directory: Path) -> OpenVLA:
    return OpenVLA.from_pretrained(directory, vision=VISION)


def test_weights_are_read_as_stored_or_converted(checkpoint: Path) -> None:
    model, stored = load(checkpoint), whole_state()
    assert model.dtype == torch.bfloat16
    assert not model.training
    state = model.state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name]) for name in stored)
    wide = OpenVLA.from_pretrained(checkpoint, vision=VISION, dtype=torch.float32)
    assert all(parameter.dtype == torch.float32 and not parameter.is_meta for parameter in wide.parameters())
    assert all(not buffer.is_meta for buffer in wide.buffers())
    # theta^(-2i/d) for heads of width 8.
    expected = [10000 ** (-2 * i / 8) for i in range(4)]
    torch.testing.assert_close(wide.language_model.model.rotary_emb.inv_freq, torch.tensor(expected))


def test_what_is_saved_has_the_originals_keys_and_config(checkpoint: Path, tmp_path: Path) -> None:
    load(checkpoint).save_pretrained(tmp_path)
    before, after = whole_state(), load_file(tmp_path / SINGLE)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with safe_open(tmp_path / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers refuses a file without it"
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (checkpoint, tmp_path))
    assert {key: value for key, value in new.items() if old.get(key) != value} == {
        "torch_dtype": "bfloat16",
        VIT_KEY: new[VIT_KEY],
    }
    # Our own entry says what the test names of the vision transformers mean, so nobody needs to say it again.
    assert OpenVLA.from_pretrained(tmp_path).config.vision == VISION


def test_shards_come_back_and_replace_each_other(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint)
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, max_shard_bytes=2_100_000)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert len(files) == 3
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 2 for tensor in whole_state().values())
    assert all(torch.equal(a, b) for a, b in zip(load(tmp_path).state_dict().values(), model.state_dict().values(), strict=True))
    model.save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", SINGLE]


def test_a_missing_shard_is_named(checkpoint: Path, tmp_path: Path) -> None:
    load(checkpoint).save_pretrained(tmp_path, max_shard_bytes=2_100_000)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks 1 of 3 shards that its index names, 'model-00002-of-00003.safetensors' first"):
        load(tmp_path)


def test_wrong_keys_and_shapes_are_named(copy: Path) -> None:
    state = whole_state()

    def write(changed: dict[str, torch.Tensor]) -> None:
        save_file(changed, copy / SINGLE)

    write({name: tensor for name, tensor in state.items() if name != HEAD})
    with pytest.raises(UserError, match=f"lacks '{HEAD}'"):
        load(copy)
    write(state | {"value_head.head_l1.weight": torch.zeros(1)})
    with pytest.raises(UserError, match=r"holds 'value_head.head_l1.weight', which this model does not have"):
        load(copy)
    write(state | {"projector.fc3.bias": torch.zeros(31)})
    with pytest.raises(UserError, match=r"'projector.fc3.bias' is \[31\], but this model has \[32\]"):
        load(copy)
    write({name: tensor for name, tensor in state.items() if not name.startswith("vision")})
    with pytest.raises(UserError, match=r"lacks 'vision_backbone.featurizer.pos_embed', .* and \d+ more"):
        load(copy)


def test_a_damaged_or_missing_file(copy: Path, tmp_path: Path) -> None:
    whole = (copy / SINGLE).read_bytes()
    (copy / SINGLE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"Cannot read .*model.safetensors.*Is the file complete"):
        load(copy)
    (copy / SINGLE).unlink()
    with pytest.raises(UserError, match=r"has no model\*.safetensors. Is the download complete"):
        load(copy)
    (copy / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(UserError, match=r"lacks 'vision_backbone.featurizer.pos_embed', .* and \d+ more"):
        load(copy)
    with pytest.raises(UserError, match=r"Cannot read '.*config.json'"):
        load(tmp_path / "nowhere")


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "training_state.pt").write_bytes(b"anything")
    with pytest.raises(UserError, match=r"is a pickle.*Convert it to safetensors"):
        read_safetensors(tmp_path / "training_state.pt")


def test_configs_that_are_something_else(copy: Path) -> None:
    path = copy / "config.json"
    raw = json.loads(path.read_text())

    def read(**changes: object) -> OpenVLAConfig:
        path.write_text(json.dumps({key: value for key, value in (raw | changes).items() if value is not None}))
        return OpenVLAConfig.read(copy)

    with pytest.raises(UserError, match=r"'vit_tiny_patch14_reg4_dinov2_test' is not known"):
        read()
    with pytest.raises(UserError, match="model_type='llama'"):
        read(model_type="llama")
    with pytest.raises(UserError, match="single vision backbone"):
        read(use_fused_vision_backbone=False)
    published = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
    assert read(timm_model_ids=published).vision == OpenVLAConfig.openvla_7b().vision
    with pytest.raises(UserError, match=r"image_resize_strategy='resize-naiv' .* Did you mean 'resize-naive'"):
        read(timm_model_ids=published, image_resize_strategy="resize-naiv")
    with pytest.raises(UserError, match="no entry 'text_config'"):
        read(timm_model_ids=published, text_config=None)
    damages = {
        "timm_model_ids": 5,
        "n_action_bins": "many",
        "text_config": "llama",
        "norm_stats": [1],
        "embodied_rl_vision": [{"width": 1}, {}],
    }
    for name, value in damages.items():
        with pytest.raises(UserError, match=r"config.json' is damaged: .* Is it the config.json of an OpenVLA checkpoint\?"):
            read(**{"timm_model_ids": published, name: value})
    read(timm_model_ids=published, embodied_rl_oft={"chunks": 8})
    with pytest.raises(UserError, match=r"config.json: embodied_rl_oft.chunks' is not known"):
        OpenVLAOFT.from_pretrained(copy)
    path.write_text("[]")
    with pytest.raises(UserError, match="must hold a JSON object"):
        OpenVLAConfig.read(copy)
    path.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        OpenVLAConfig.read(copy)


def test_statistics_of_a_fine_tuned_checkpoint_win(copy: Path) -> None:
    (copy / "dataset_statistics.json").write_text('{"my_robot": {"action": {"q01": [0], "q99": [1]}}}')
    config = OpenVLAConfig.read(copy, VISION)
    assert set(config.norm_stats) == {"bridge_orig", "libero_spatial_no_noops", "my_robot"}
    assert "my_robot" in config.to_json()["norm_stats"]


def test_a_fresh_model_round_trips(tmp_path: Path) -> None:
    config = OpenVLAConfig.openvla_7b().to_json()
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = OpenVLAConfig.read(tmp_path)
    assert again.vision == OpenVLAConfig.openvla_7b().vision
    assert again.vocab_size == 32000
    assert again.hidden_size == 4096
