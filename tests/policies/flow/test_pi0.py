from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.compose import load_train_config
from embodied_rl.config import PI0PolicyConfig
from embodied_rl.errors import UserError
from embodied_rl.learning.fsdp import blocks_of
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.policies.build import build_policy
from embodied_rl.policies.flow.pi0 import Moments, PI0Options, PI0Policy, letterbox, load_pi0_policy
from embodied_rl.policies.flow.policy import FlowOptions
from embodied_rl.policies.tiny_language import train_tokenizer
from embodied_rl.train import train
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec
from tests.test_load_policy import batch_of, played, train_points

H, D, STEPS = 4, 5, 4
TEXTS = ["push the red cube", "pick up the bowl and put it on the plate"] * 4
SPEC = SimSpec(
    "Toy-v0",
    {"state": TensorSpec((3,)), "rgb": TensorSpec((24, 16, 3), "uint8"), "wrist": TensorSpec((16, 16, 3), "uint8")},
    ActionSpec.continuous([-1.0] * 3, [1.0] * 3),
    instruction="push the red cube",
)
TALKING = SimSpec(SPEC.task, {**SPEC.observation, "instruction": VariableSpec("text")}, SPEC.action)
OPTIONS = PI0Options(cameras=("rgb", "wrist"), chunk=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random pi0 with a tokenizer, as transformers writes it."""
    path = tmp_path_factory.mktemp("pi0")
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    config = transformers.PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": {"model_type": "gemma", "hidden_size": 32, "intermediate_size": 48, **heads},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "patch_size": 8,
                "image_size": 16,
                "vision_use_head": False,
            },
            "projection_dim": 32,
            "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        },
        dit_config={"model_type": "gemma", "hidden_size": 24, "intermediate_size": 32, **heads},
        chunk_size=H,
        max_state_dim=6,
        max_action_dim=D,
        num_inference_steps=STEPS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.PI0ForConditionalGeneration(config)
        with torch.no_grad():
            # Everything must matter, or no test would see it.
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.25)
    model.save_pretrained(path)
    tokenizer.save_pretrained(str(path))
    return path


def load(folder: Path, method: Any = "flow_sde", spec: SimSpec = SPEC, **changes: Any) -> PI0Policy:
    torch.manual_seed(0)
    return load_pi0_policy(folder, spec, OPTIONS, FlowOptions(method, num_steps=STEPS), **changes)


def observe(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "state": rng.normal(size=(rows, 3)).astype(np.float32),
        "rgb": rng.integers(0, 256, (rows, 24, 16, 3), np.uint8),
        "wrist": rng.integers(0, 256, (rows, 16, 16, 3), np.uint8),
    }


def test_actions_are_transformers_own(folder: Path) -> None:
    policy = load(folder)
    ready = policy.prepare(observe(3))
    with torch.no_grad():
        policy.initial_noise.copy_(torch.randn(1, H, D, generator=torch.Generator().manual_seed(1)))
        pixels = (ready["images"].permute(0, 1, 4, 2, 3).float() / 255.0 - 0.5) / 0.5
        expected = policy.model.pi0.sample_actions(
            state=ready["state"],
            input_ids=ready["input_ids"],
            pixel_values=pixels,
            noise=policy.initial_noise.expand(3, -1, -1),
            attention_mask=ready["attention_mask"],
            pixel_attention_mask=torch.ones(3, 2, dtype=torch.bool),
        )
    got = policy.simulator_action(policy.act(ready, None).action)
    assert got.shape == (3, 2, 3)
    np.testing.assert_allclose(got, expected[:, :2, :3].numpy(), atol=1e-5)
    assert np.abs(got[0] - got[1]).max() > 1e-2, "the observation must matter"


def test_the_prompt_is_images_then_text(folder: Path) -> None:
    policy = load(folder)
    ready = policy.prepare(observe(2))
    tokenizer = policy.tokenizer
    # Two cameras of 2x2 patches each.
    assert ready["input_ids"][0, :8].tolist() == [tokenizer.convert_tokens_to_ids("<image>")] * 8
    assert tokenizer.decode(ready["input_ids"][0, 8:], skip_special_tokens=True) == "push the red cube\n"
    assert ready["state"].shape == (2, 6)
    assert not ready["state"][:, 3:].any()


@pytest.mark.parametrize("method", ["flow_sde", "flow_noise", "dppo"])
def test_evaluate_reproduces_what_act_said(folder: Path, method: str) -> None:
    policy = load(folder, method)
    ready = policy.prepare(observe(4))
    noise = torch.randn(4, policy.noise_width, generator=torch.Generator().manual_seed(2))
    output = policy.act(ready, noise)
    evaluation = policy.evaluate(ready, output.action)
    assert evaluation.log_prob.shape == (4, policy.num_units)
    torch.testing.assert_close(evaluation.log_prob, output.log_prob, atol=2e-4, rtol=1e-5)
    torch.testing.assert_close(evaluation.value, output.value, atol=1e-5, rtol=0)
    (evaluation.log_prob.sum() + evaluation.value.sum()).backward()
    # Everything but what the last layer of the prefix makes beyond its keys and values: that is read by the value alone.
    without = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.any()]
    assert [name for name in without if "lm_head" not in name and "embed_tokens" not in name and "noise_net" not in name] == []


def test_layers_computed_again_have_the_gradients_of_kept_activations(folder: Path) -> None:
    """As with ``hybrid.sharding.checkpoint_activations``: the prefix's layers, and each denoising step's, which attend to the prefix."""
    gradients = []
    for again in (False, True):
        policy = load(folder, "dppo")
        for block in blocks_of(policy) if again else ():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        ready = policy.prepare(observe(2))
        action = policy.act(ready, torch.randn(2, policy.noise_width, generator=torch.Generator().manual_seed(2))).action
        evaluation = policy.evaluate(ready, action)
        (evaluation.log_prob.sum() + evaluation.value.sum()).backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert len(gradients[0]) > 40
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)


def test_prompts_of_different_length_do_not_disturb_each_other(folder: Path) -> None:
    policy = load(folder, spec=TALKING)
    both = {**observe(2), "instruction": np.array(TEXTS[:2], object)}
    assert "instruction" in policy.observation_keys
    noise = torch.randn(2, policy.noise_width, generator=torch.Generator().manual_seed(3))
    together = policy.act(policy.prepare(both), noise)
    for row in range(2):
        alone = policy.act(policy.prepare({key: part[row : row + 1] for key, part in both.items()}), noise[row : row + 1])
        torch.testing.assert_close(together.action[row : row + 1], alone.action, atol=1e-4, rtol=0)
        torch.testing.assert_close(together.log_prob[row : row + 1], alone.log_prob, atol=1e-3, rtol=0)


def test_the_cloning_loss_is_transformers_own(folder: Path) -> None:
    policy = load(folder)
    ready = policy.prepare(observe(3))
    generator = torch.Generator().manual_seed(4)
    action = torch.rand(3, H, 3, generator=generator) * 2.0 - 1.0
    noise, t = torch.randn(3, H, D, generator=generator), torch.tensor([0.1, 0.5, 0.9])
    with torch.no_grad():
        expected = policy.model.pi0(
            state=ready["state"],
            noise=noise,
            timestep=t,
            input_ids=ready["input_ids"],
            pixel_values=ready["images"].permute(0, 1, 4, 2, 3).float() / 127.5 - 1.0,
            pixel_attention_mask=torch.ones(3, 2, dtype=torch.bool),
            attention_mask=ready["attention_mask"],
            actions=torch.nn.functional.pad(action, (0, D - 3)),
        ).loss
        got = policy.cloning_loss(ready, action, noise=torch.cat([noise.flatten(1), t[:, None]], 1))
    torch.testing.assert_close(got.mean(), expected, atol=1e-5, rtol=1e-5)


def test_critics_and_imitation_have_the_simulators_units(folder: Path) -> None:
    """The data set's mean 0.5 and deviation 2, and bounds of -4 and 4: what the flow calls x is (2 x + 0.5) / 4 to a critic."""
    wide = dataclasses.replace(SPEC, action=ActionSpec.continuous([-4.0] * 3, [4.0] * 3))
    policy = load(folder, "flow_noise", spec=wide, action=Moments((0.5,) * 3, (2.0,) * 3))
    seen, noise = policy.prepare(observe(3)), torch.randn(3, policy.noise_width, generator=torch.Generator().manual_seed(1))
    acted = policy.act(seen, noise)
    flow_units = acted.action[:, : policy.layout.num_used].numpy()
    by_hand = np.clip((2.0 * flow_units + 0.5) / 4.0, -1.0, 1.0)
    np.testing.assert_allclose(policy.normalised_action(acted.action.numpy()).reshape(3, -1), by_hand, atol=1e-5)
    features = policy.features(seen)
    assert not features.requires_grad
    assert features.shape == (3, policy.num_features)
    drawn, cost = policy.drawn(seen, features, noise)
    np.testing.assert_allclose(drawn.detach().numpy(), by_hand, atol=1e-4)
    torch.testing.assert_close(cost.detach(), acted.log_prob, atol=1e-3, rtol=1e-3)
    drawn.sum().backward()
    assert policy.model.pi0.action_out_proj.weight.grad is not None
    # A chunk that is 0.5 of the bounds is 2 in the simulator's units, and (2 - 0.5) / 2 in the flow's.
    noise = policy.cloning_noise(3)
    plain = load(folder, "flow_noise")
    with torch.no_grad():
        one = policy.cloning_loss(seen, torch.full((3, H, 3), 0.5), noise=noise)
        other = plain.cloning_loss(seen, torch.full((3, H, 3), 0.75), noise=noise)
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def learned(folder: Path, run_dir: Path, method: str, *more: str) -> dict[str, torch.Tensor]:
    """Weights of a short run."""
    words = ["sim=custom", "sim.target=tests.vla.toys:PointSim", "sim.kwargs={dim: 3, words: spec}", "sim.num_slots=2"]
    words += ["sim.num_workers=1"]
    words += [
        "policy=pi0",
        f"policy.path={folder}",
        "policy.cameras=[rgb]",
        "policy.state_key=null",
        "policy.chunk=2",
        "policy.num_steps=2",
    ]
    words += [f"algorithm={method}", "algorithm.recorded.expert=tests.vla.toys:PointExpert", "algorithm.recorded.expert_episodes=2"]
    words += ["algorithm.minibatch_size=4", "evaluation.num_episodes=1", "evaluation.every_steps=null", "video.enabled=no", "logger=quiet"]
    words += ["stop_at_success=null", "hybrid.device=cpu", "hybrid.num_threads=1", f"run_dir={run_dir}", *more]
    return load_checkpoint(train(load_train_config(words))).policy


@pytest.mark.slow
@pytest.mark.ci_sample
def test_it_learns_off_policy(folder: Path, tmp_path: Path) -> None:
    few = ("algorithm.off_policy.hidden_sizes=[16]", "algorithm.off_policy.updates_per_iteration=2", "total_steps=4")
    before, after = load_pi0_policy(folder, SPEC, OPTIONS).state_dict(), learned(folder, tmp_path, "awac", *few)
    moved = [name for name, tensor in after.items() if name in before and not torch.equal(tensor, before[name])]
    assert any("action_out_proj" in name for name in moved)
    assert np.isfinite(read_metrics(tmp_path)[-1]["train/critic_loss"])


@pytest.mark.usefixtures("forked")
def test_two_ranks_clone_as_one_process_does(folder: Path, tmp_path: Path) -> None:
    """The same noise for every row; and no gradient reaches the last hidden states, only the keys and values of their layer."""
    few = ("algorithm.num_epochs=1", "algorithm.cloning.validation_share=0", "total_steps=2")
    alone = learned(folder, tmp_path / "alone", "bc", *few)
    together = learned(folder, tmp_path / "together", "bc", *few, "hybrid=fsdp2")
    for name, tensor in alone.items():
        if not name.endswith("k_proj.bias"):  # a softmax does not see it: its gradient is rounding
            torch.testing.assert_close(together[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_saved_and_loaded(folder: Path, tmp_path: Path) -> None:
    policy = load(folder, "flow_noise", state=Moments((1.0, 0.0, 0.0), (2.0, 1.0, 1.0)), action=Moments((0.5, 0.0, 0.0), (2.0, 1.0, 1.0)))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
    policy.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", "flow_noise")
    noise = torch.randn(2, policy.noise_width, generator=torch.Generator().manual_seed(5))
    one, two = policy.act(policy.prepare(observe(2)), noise), again.act(again.prepare(observe(2)), noise)
    assert torch.equal(one.action, two.action)
    assert torch.equal(one.log_prob, two.log_prob)
    assert one.value is not None
    assert two.value is not None
    # The order of its sums depends on where the weights lie in memory.
    torch.testing.assert_close(one.value, two.value, atol=1e-6, rtol=1e-6)
    # 2·x + 0.5 in the first dimension; the head of the row is normalised.
    head = one.action[:, :6].view(2, 2, 3).numpy()
    np.testing.assert_allclose(again.simulator_action(one.action)[..., 0], 2.0 * head[..., 0] + 0.5, rtol=1e-5)
    np.testing.assert_allclose(again.prepare(observe(2))["state"][:, 0], (observe(2)["state"][:, 0] - 1.0) / 2.0, rtol=1e-5)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir() if path.name.startswith(".")) == []
    assert type(transformers.PI0ForConditionalGeneration.from_pretrained(tmp_path / "saved")).__name__ == "PI0ForConditionalGeneration"


def test_letterbox() -> None:
    # 24 high, 16 wide, to 12: 12 high, 8 wide, two black columns on each side.
    picture = letterbox(np.full((24, 16, 3), 200, np.uint8), 12)
    assert picture.shape == (12, 12, 3)
    assert (picture[:, 2:10] == 200).all()
    assert not picture[:, :2].any()
    assert not picture[:, 10:].any()
    # openpi rounds down: 240 high, 424 wide, to 224: 240 / (424 / 224) = 126.8, so 126 high and 49 black rows on each side.
    rows = letterbox(np.full((240, 424, 3), 200, np.uint8), 224).any(axis=(1, 2))
    assert (rows[:49].any(), rows[49:175].all(), rows[175:].any()) == (False, True, False)


def test_bad_input_is_one_line(folder: Path, tmp_path: Path) -> None:
    silent = SimSpec("Toy-v0", SPEC.observation, SPEC.action)
    wide = SimSpec("Toy-v0", SPEC.observation, ActionSpec.continuous([-1.0] * 6, [1.0] * 6), instruction="go")
    cases: list[tuple[Any, str]] = [
        (lambda: load(tmp_path / "none"), "does not exist"),
        (lambda: load(folder, spec=silent).prepare(observe(1)), "gives no instruction"),
        (lambda: load(folder, spec=wide), "2 steps x 6 dimensions, but the flow model makes 4 x 5"),
        (lambda: load(folder, action=Moments((0.0,) * 7, (1.0,) * 7)), "takes 3 action dimensions, but this pi0 was trained with 7"),
        (lambda: load(folder, state=Moments((0.0,) * 7, (1.0,) * 7)), "has 3 numbers, but this pi0 was trained with 7"),
        (lambda: load_pi0_policy(folder, SPEC, PI0Options(cameras=("rbg",))), "Did you mean 'rgb'"),
        (lambda: load_pi0_policy(folder, SPEC, PI0Options(cameras=("state",))), "policy.cameras='state': .* shows no image 'state'"),
        (lambda: load(folder).prepare({**observe(1), "rgb": np.zeros((1, 24, 16, 3), np.float32)}), "must hold uint8 images"),
        (lambda: Moments((0.0,), ()), "1 means but 0 deviations"),
    ]
    for call, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(UserError, match="of type 'llama', not pi0"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "chunk_size": "many"}))
    with pytest.raises(UserError, match=r"Cannot load the pi0 model .*field 'chunk_size': TypeError: Field 'chunk_size' expected int"):
        load(tmp_path)


def test_a_folder_without_tokenizer_is_refused_before_its_weights_are_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    (tmp_path / "model.safetensors").write_bytes(b"not even read")
    with pytest.raises(UserError, match=r"has no tokenizer \(none of tokenizer.json"):
        load(tmp_path)


def test_a_loaded_policy_plays_as_the_run_was_evaluated(folder: Path, tmp_path: Path) -> None:
    run = train_points(
        tmp_path, "policy=pi0", f"policy.path={folder}", "policy.chunk=2", f"policy.num_steps={STEPS}", "policy.prompt_tokens=12",
        "sim.num_slots=2", "evaluation.num_episodes=2", "total_steps=4", "algorithm.advantage=gae_chunk", "algorithm.ratio=token",
        "algorithm.rollout_steps=2", "algorithm.minibatch_size=4",
    )  # fmt: skip
    policy, episode = run.load_policy(), run.results["episodes"][0]
    assert played(policy, episode["seed"]) == pytest.approx(episode["return"], abs=1e-5)
    rows, batch = batch_of(16, count=2)
    answers = policy.predict(batch)
    assert answers.shape == (2, 2, 2)
    np.testing.assert_allclose(answers, [policy.predict(row) for row in rows], atol=1e-5)


def test_a_run_is_configured_with_it_by_name(folder: Path) -> None:
    config = PI0PolicyConfig(path=str(folder), cameras=("rgb", "wrist"), chunk=2, num_steps=STEPS, method="flow_sde", prompt_tokens=12)
    torch.manual_seed(0)
    policy: Any = build_policy(config, TALKING)
    seen = observe(2) | {"instruction": np.array(TEXTS[:2], object)}
    lengths = {policy.prepare({key: part[row : row + 1] for key, part in seen.items()})["input_ids"].shape[1] for row in range(2)}
    assert len(lengths) == 1, "instructions of different lengths lie side by side"
    # Padding changes nothing: the same weights asked without it.
    noise = torch.randn(2, policy.noise_width, generator=torch.Generator().manual_seed(1))
    own = load(folder, spec=TALKING)
    own.load_state_dict(policy.state_dict())
    acted, expected = policy.act(policy.prepare(seen), noise), own.act(own.prepare(seen), noise)
    torch.testing.assert_close(acted.action, expected.action, atol=1e-5, rtol=0)
    torch.testing.assert_close(acted.log_prob, expected.log_prob, atol=1e-4, rtol=0)
    frozen = build_policy(dataclasses.replace(config, freeze_vlm=True), TALKING)
    names = {name for name, parameter in frozen.named_parameters() if parameter.requires_grad}
    assert any("dit" in name for name in names)
    assert not any(".vlm." in name for name in names)


@pytest.mark.parametrize(
    ("changes", "spec", "message"),
    [
        ({"path": "nowhere"}, TALKING, "policy.path='nowhere' is not a folder"),
        ({}, SimSpec(SPEC.task, SPEC.observation, SPEC.action), "gives no instruction"),
        ({"chunk": 9}, TALKING, "Choose a shorter chunk"),
    ],
)
def test_what_does_not_fit_a_run_is_one_line(folder: Path, changes: dict[str, Any], spec: SimSpec, message: str) -> None:
    config = PI0PolicyConfig(**{"path": str(folder), "cameras": ("rgb", "wrist"), **changes})
    with pytest.raises(UserError) as error:
        build_policy(config, spec)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_instruction_that_is_too_long_says_so(folder: Path) -> None:
    policy: Any = build_policy(PI0PolicyConfig(path=str(folder), cameras=("rgb", "wrist"), chunk=2, prompt_tokens=2), SPEC)
    with pytest.raises(UserError, match=r"The instruction 'push the red cube' has \d+ tokens; raise policy.prompt_tokens=2"):
        policy.prepare(observe(1))
