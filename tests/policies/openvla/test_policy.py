"""OpenVLA and OpenVLA-OFT as policies: acting and evaluating agree, actions are the original's, and bad input has its line."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from copy import deepcopy as copy_of
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from embodied_rl.config import ShardingConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.torch_backend import HostActors, ModuleActor
from embodied_rl.learning import fsdp
from embodied_rl.policies.openvla.oft import OFTConfig
from embodied_rl.policies.openvla.policy import VALUE_HEAD, VLAOptions, VLAPolicy, load_vla_policy
from embodied_rl.policies.openvla.vision import ValueHead
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec
from tests.policies.openvla.conftest import VISION

SPOON = "put the spoon on the towel"
SPEC = SimSpec(
    task="Spoon-v1",
    observation={
        "rgb": TensorSpec((180, 240, 3), "uint8"),
        "wrist": TensorSpec((224, 224, 3), "uint8"),
        "state": TensorSpec((8,)),
        "instruction": VariableSpec("text"),
    },
    action=ActionSpec.continuous([-1.0] * 7, [1.0] * 7),
)
TWO_CAMERAS = OFTConfig(num_images=2, proprio_dim=8)


def openvla(directory: Path, spec: SimSpec = SPEC, **options: Any) -> VLAPolicy:
    chosen = VLAOptions(**({"unnorm_key": "bridge_orig"} | options))
    return load_vla_policy(directory, spec, chosen, dtype=torch.float32, vision=VISION)


def oft(directory: Path, config: OFTConfig = TWO_CAMERAS, spec: SimSpec = SPEC, **options: Any) -> VLAPolicy:
    cameras = ("rgb", "wrist")[: config.num_images]
    chosen = VLAOptions(**({"unnorm_key": "libero_spatial_no_noops", "cameras": cameras} | options))
    return load_vla_policy(directory, spec, chosen, oft=config, dtype=torch.float32, vision=VISION)


@pytest.fixture(scope="module")
def one(checkpoint: Path) -> VLAPolicy:
    torch.manual_seed(0)
    return openvla(checkpoint)


@pytest.fixture(scope="module")
def chunked(checkpoint: Path) -> VLAPolicy:
    torch.manual_seed(0)
    return oft(checkpoint)


@pytest.fixture
def observation(io: dict[str, Tensor], oft_io: dict[str, Tensor], meta: dict[str, Any]) -> dict[str, Any]:
    """Two rows with instructions of different length."""
    return {
        "rgb": io["images"].numpy(),
        "wrist": oft_io["images"].numpy(),
        "state": np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32),
        "instruction": np.array(meta["instructions"], dtype=object),
    }


def noise_of(policy: VLAPolicy, rows: int = 2, seed: int = 0) -> Tensor:
    return torch.rand(rows, policy.num_units, generator=torch.Generator().manual_seed(seed))


# ---- acting and evaluating ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one", "chunked"])
def test_evaluate_recomputes_what_act_said(kind: str, observation: dict[str, Any], request: pytest.FixtureRequest) -> None:
    policy: VLAPolicy = request.getfixturevalue(kind)
    acted = policy.act(observation, noise_of(policy))
    assert acted.action.shape == acted.log_prob.shape == (2, policy.num_units)
    again = policy.evaluate(observation, acted.action)
    torch.testing.assert_close(again.log_prob.detach(), acted.log_prob, atol=1e-4, rtol=0)
    assert acted.value is not None
    torch.testing.assert_close(again.value.detach(), acted.value, atol=1e-4, rtol=0)
    torch.testing.assert_close(policy.value(observation).detach(), acted.value, atol=1e-4, rtol=0)
    assert (again.entropy > 0).all()
    assert (again.entropy < np.log(256)).all()


@pytest.mark.parametrize("kind", ["one", "chunked"])
def test_temperature_belongs_to_the_policy(kind: str, checkpoint: Path, observation: dict[str, Any]) -> None:
    policy = (openvla if kind == "one" else oft)(checkpoint, temperature=1.6)
    acted = policy.act(observation, noise_of(policy))
    torch.testing.assert_close(policy.evaluate(observation, acted.action).log_prob.detach(), acted.log_prob, atol=1e-4, rtol=0)
    cold = (openvla if kind == "one" else oft)(checkpoint)
    assert (cold.evaluate(observation, acted.action).log_prob - acted.log_prob).abs().max() > 0.05


@pytest.mark.parametrize("kind", ["one", "chunked"])
def test_prepared_observations_give_the_same_numbers(kind: str, observation: dict[str, Any], request: pytest.FixtureRequest) -> None:
    policy: VLAPolicy = request.getfixturevalue(kind)
    prepared = policy.prepare(observation)
    assert prepared["images"].shape == (2, policy.num_images, 224, 224, 3)
    assert prepared["images"].dtype == torch.uint8
    raw, ready = policy.act(observation, noise_of(policy)), policy.act(prepared, noise_of(policy))
    assert torch.equal(raw.action, ready.action)
    assert torch.equal(raw.log_prob, ready.log_prob)


@pytest.mark.parametrize("kind", ["one", "chunked"])
def test_critics_read_the_last_prompt_token_and_actions_within_the_bounds(
    kind: str, observation: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    policy: VLAPolicy = request.getfixturevalue(kind)
    noise = noise_of(policy)
    acted, features = policy.act(observation, noise), policy.features(observation)
    assert not features.requires_grad
    assert acted.value is not None
    torch.testing.assert_close(policy.state_value(features).detach(), acted.value, atol=1e-4, rtol=0)
    # The bounds are -1 and 1, so that the simulator's units are normalised ones but for what lies beyond.
    within = np.clip(policy.simulator_action(acted.action), -1.0, 1.0)
    np.testing.assert_allclose(policy.normalised_action(acted.action.numpy()), within, atol=1e-6)
    drawn, cost = policy.drawn(observation, features, noise)
    np.testing.assert_allclose(drawn.detach().numpy(), within.reshape(2, -1), atol=1e-5)
    evaluated = policy.evaluate(observation, acted.action)
    torch.testing.assert_close(-cost, evaluated.entropy + np.log(2 / 255), atol=1e-4, rtol=0)
    head = policy.model.language_model.lm_head.weight
    (found,) = torch.autograd.grad(drawn.sum(), head, retain_graph=True)
    assert found.abs().sum() > 0


class _Networks(torch.nn.Module):
    def __init__(self, policy: VLAPolicy) -> None:
        super().__init__()
        self.policy = policy

    def gathered(self, compute: Callable[[], Any]) -> Any:
        """As `ActorWithCritics.gathered`."""
        return compute()


@pytest.mark.parametrize("kind", ["one", "chunked"])
def test_a_rank_draws_what_the_whole_policy_draws(kind: str, observation: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """Sampling reads the layers' weights past their modules, for which FSDP gathers them."""
    policy: VLAPolicy = request.getfixturevalue(kind)
    ready, noise = policy.prepare(observation), noise_of(policy)
    wanted = policy.drawn(ready, policy.features(ready), noise)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = ShardingConfig(num_shards=1)
        networks = fsdp.shard(_Networks(copy_of(policy)), fsdp.make_mesh(config, "cpu"), config)
        found = networks.gathered(lambda: networks.policy.drawn(ready, networks.policy.features(ready), noise))
        found[0].sum().backward()
        head = networks.policy.model.language_model.lm_head.weight.grad
        assert head is not None
        assert fsdp.whole(head).abs().sum() > 0
    finally:
        dist.destroy_process_group()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_greedy_actions_are_the_originals(checkpoint: Path, io: dict[str, Tensor], meta: dict[str, Any]) -> None:
    policy = openvla(checkpoint, dataclasses.replace(SPEC, observation={"rgb": SPEC.observation["rgb"]}, instruction=SPOON))
    acted = policy.act({"rgb": io["images"].numpy()[:1]}, None)
    assert acted.action.tolist() == [meta["samples"][0]["generated"]]
    chunk = policy.simulator_action(acted.action)
    assert chunk.shape == (1, 1, 7)
    np.testing.assert_allclose(chunk[0, 0], meta["samples"][0]["actions"], atol=1e-6)


def test_chunks_come_in_the_simulators_order_and_units(chunked: VLAPolicy) -> None:
    # Token 31872 is 0 and 31999 is -254/255, so a chunk of zeros but for the second step's first dimension.
    tokens = torch.full((1, 56), 31872)
    tokens[0, 7] = 31999
    chunk = chunked.simulator_action(tokens)
    low, high = chunked.action_range.low, chunked.action_range.high
    assert chunk.shape == (1, 8, 7)
    np.testing.assert_allclose(chunk[0, 0, :6], (low + high)[:6] / 2, atol=1e-6)
    assert chunk[0, 0, 6] == 0.0, "the gripper is not scaled"
    assert chunk[0, 1, 0] == pytest.approx(low[0] + (high - low)[0] / 510, abs=1e-6)
    np.testing.assert_allclose(chunk[0, 2:], np.broadcast_to(chunk[0, 0], (6, 7)), atol=1e-7)


def test_libero_options(checkpoint: Path, observation: dict[str, Any]) -> None:
    policy = oft(checkpoint, OFTConfig(), gripper="libero", image_recipe="libero")
    chunk = policy.simulator_action(torch.tensor([[31872] * 6 + [31744] + [31872] * 6 + [31999] + [31872] * 42]))
    assert chunk[0, 0, 6] == -1.0  # 254/255 → 2g - 1 > 0 → open is -1
    assert chunk[0, 1, 6] == 1.0
    turned = policy.prepare(observation)["images"]
    plain = oft(checkpoint, OFTConfig()).prepare(observation)["images"]
    assert (turned.float() - plain.float()).abs().mean() > 1.0


def test_regression_head_acts_but_has_no_probabilities(checkpoint: Path, observation: dict[str, Any]) -> None:
    policy = oft(checkpoint, OFTConfig(num_images=2, proprio_dim=8, head="l1"))
    acted = policy.act(observation, None)
    assert acted.action.dtype == torch.float32
    assert acted.value is None
    chunk = policy.simulator_action(acted.action)
    np.testing.assert_allclose(
        chunk.reshape(2, 56), policy.action_range.unnormalise(acted.action.view(2, 8, 7).numpy()).reshape(2, 56), 1e-5
    )
    with pytest.raises(UserError, match="RL needs head=discrete"):
        policy.act(observation, noise_of(policy))
    with pytest.raises(UserError, match="RL needs head=discrete"):
        policy.evaluate(observation, acted.action)


# ---- learning ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one", "chunked"])
def test_gradients_are_the_slopes_of_log_prob_and_value(kind: str, checkpoint: Path, observation: dict[str, Any]) -> None:
    policy = (openvla if kind == "one" else oft)(checkpoint)
    prepared = policy.prepare(observation)
    action = policy.act(prepared, noise_of(policy)).action

    def score() -> Tensor:
        evaluation = policy.evaluate(prepared, action)
        return evaluation.log_prob.sum() + evaluation.value.sum()

    before = score()
    before.backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert "model.vision_backbone.featurizer.blocks.0.attn.qkv.weight" in gradients
    assert "value_head.head_l1.weight" in gradients
    # A step of s along the gradient g changes the score by s |g|^2, for s -> 0.
    squared = sum(float(gradient.square().sum()) for gradient in gradients.values())
    step = 0.02 / squared
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name in gradients:
                parameter += step * gradients[name]
        assert float(score() - before) == pytest.approx(0.02, rel=0.2)


def test_adapters_work_in_generation_and_training(checkpoint: Path, observation: dict[str, Any]) -> None:
    policy = openvla(checkpoint)
    before = policy.act(observation, None).log_prob
    targets = ["qkv", "proj", "fc1", "fc2", "fc3", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    inject_adapter_in_model(LoraConfig(r=4, target_modules=targets, init_lora_weights=False), policy.model)
    acted = policy.act(observation, noise_of(policy))
    torch.testing.assert_close(policy.evaluate(observation, acted.action).log_prob.detach(), acted.log_prob, atol=1e-4, rtol=0)
    assert (policy.act(observation, None).log_prob - before).abs().max() > 1e-3
    policy.evaluate(observation, acted.action).log_prob.sum().backward()
    trained = {name.rsplit(".lora_", 1)[0].rsplit(".", 1)[1] for name, p in policy.model.named_parameters() if p.grad is not None}
    assert trained == set(targets), "every adapter got a gradient, and nothing else has one"


# ---- value head -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["rl4vla", "rlinf"])
def test_published_value_heads_load(one: VLAPolicy, tmp_path: Path, names: str) -> None:
    keys = {"head_l1": "mlp.0", "head_l2": "mlp.2", "head_l3": "mlp.4"} if names == "rlinf" else {}
    source = ValueHead(32).requires_grad_(False)
    state = dict(source.state_dict())
    for ours, theirs in keys.items():
        state = {name.replace(ours, theirs): tensor for name, tensor in state.items()}
    prefixed = {f"base_model.model.value_head.{name}": tensor for name, tensor in state.items()} | {"projector.fc1.bias": torch.zeros(3)}
    hidden = torch.randn(5, 32)
    x = F.gelu(hidden @ source.head_l1.weight.T + source.head_l1.bias)
    x = F.gelu(x @ source.head_l2.weight.T + source.head_l2.bias)
    by_hand = (x @ source.head_l3.weight.T)[:, 0]
    for index, content in enumerate((state, prefixed)):
        save_file(content, tmp_path / f"{index}.safetensors")
        one.load_value_head(tmp_path / f"{index}.safetensors")
        assert one.value_head is not None
        torch.testing.assert_close(one.value_head(hidden).detach(), by_hand)
    save_file({"head_l1.weight": torch.zeros(512, 64)}, tmp_path / "wide.safetensors")
    with pytest.raises(UserError, match=r"'head_l1.weight' is \[512, 64\], but this model has \[512, 32\]"):
        one.load_value_head(tmp_path / "wide.safetensors")


def test_without_a_value_head(checkpoint: Path, observation: dict[str, Any]) -> None:
    policy = load_vla_policy(checkpoint, SPEC, VLAOptions(unnorm_key="bridge_orig"), value_head=False, dtype=torch.float32, vision=VISION)
    acted = policy.act(observation, None)
    assert acted.value is None
    assert policy.evaluate(observation, acted.action).value.tolist() == [0.0, 0.0]
    with pytest.raises(UserError, match="without a value head"):
        policy.value(observation)


@pytest.mark.parametrize("kind", ["one", "chunked"])
def test_a_saved_policy_comes_back(kind: str, tmp_path: Path, observation: dict[str, Any], request: pytest.FixtureRequest) -> None:
    policy: VLAPolicy = request.getfixturevalue(kind)
    policy.save_pretrained(tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json", VALUE_HEAD} <= {file.name for file in tmp_path.iterdir()}
    again = load_vla_policy(tmp_path, SPEC, policy.options)
    assert again.chunk_size == policy.chunk_size
    expected, found = policy.act(observation, noise_of(policy)), again.act(observation, noise_of(again))
    assert torch.equal(expected.action, found.action)
    assert torch.equal(expected.log_prob, found.log_prob)
    assert expected.value is not None
    assert found.value is not None
    # The order of its sums depends on where the weights lie in memory.
    torch.testing.assert_close(expected.value, found.value, atol=1e-6, rtol=1e-6)


# ---- standing in the framework ------------------------------------------------------------------------------------------------


def test_acts_through_the_torch_generator(checkpoint: Path, observation: dict[str, Any]) -> None:
    spec = dataclasses.replace(SPEC, observation={"rgb": SPEC.observation["rgb"]}, instruction=SPOON)
    policy = openvla(checkpoint, spec)
    assert policy.observation_keys == ("rgb",)
    action, log_prob = ModuleActor(policy).act(observation, noise_of(policy).numpy())  # type: ignore[arg-type]
    assert action.dtype == np.int64
    own = policy.act({"rgb": observation["rgb"]}, noise_of(policy))
    assert np.array_equal(action, own.action.numpy())
    np.testing.assert_allclose(log_prob, own.log_prob.numpy(), atol=1e-6)


def test_a_compiled_policy_acts_in_a_run(checkpoint: Path, observation: dict[str, Any], one: VLAPolicy) -> None:
    """That is, in inference mode, where arrays become tensors of another kind. Copies made anew are not compiled anew."""
    compiled, noise = openvla(checkpoint, generation="compile"), noise_of(one).numpy()
    compiled._decide._compile_backend = "eager"
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        action, log_prob = ModuleActor(compiled).act(observation, noise)
        wanted = one.act(observation, noise_of(one))
        assert np.array_equal(action, wanted.action.numpy())
        np.testing.assert_allclose(log_prob, wanted.log_prob.numpy(), atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mode", ["eager", "cuda_graph"])
def test_a_copy_acts_with_its_own_weights(checkpoint: Path, observation: dict[str, Any], mode: str) -> None:
    policy = openvla(checkpoint, generation=mode)
    noise = noise_of(policy)
    before = policy.act(observation, noise)
    twin = copy_of(policy)
    with torch.no_grad():
        twin.model.projector.fc3.bias += 1.0
    assert torch.equal(policy.act(observation, noise).log_prob, before.log_prob)
    assert (twin.act(observation, noise).log_prob - before.log_prob).abs().max() > 1e-3


def test_a_lent_host_frees_its_copy_at_once(checkpoint: Path) -> None:
    actors = HostActors(openvla(checkpoint), ["cpu", "cpu"])
    copy, weight = weakref.ref(actors.modules[0]), weakref.ref(next(actors.modules[0].parameters()))
    gc.disable()  # what refers to itself stays until it is collected
    try:
        actors.lend([0])
        assert copy() is None
        assert weight() is None
    finally:
        gc.enable()


def test_instruction_of_the_options_wins(checkpoint: Path, observation: dict[str, Any]) -> None:
    policy = openvla(checkpoint, instruction=SPOON, prompt_tokens=30)
    ids = policy.prepare(observation)["input_ids"]
    assert ids.shape == (2, 30)
    assert torch.equal(ids[0], ids[1])
    assert "instruction" not in policy.observation_keys
    assert openvla(checkpoint).observation_keys == ("rgb", "instruction")


def test_a_decision_does_not_wait_for_compilation_on_a_cpu(checkpoint: Path, observation: dict[str, Any], one: VLAPolicy) -> None:
    graphed = openvla(checkpoint, generation="cuda_graph")
    assert torch.equal(graphed.act(observation, noise_of(one)).action, one.act(observation, noise_of(one)).action)


# ---- bad input ------------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_the_simulator(checkpoint: Path) -> None:
    def refuse(match: str, spec: SimSpec = SPEC, **options: Any) -> None:
        with pytest.raises(UserError, match=match):
            openvla(checkpoint, spec, **options)

    six = dataclasses.replace(SPEC, action=ActionSpec.continuous([-1.0] * 6, [1.0] * 6))
    refuse(r"'Spoon-v1' takes 6 action dimensions, but the checkpoint's data set has 7", six)
    refuse("takes discrete actions", dataclasses.replace(SPEC, action=ActionSpec.discrete(3)))
    refuse(r"policy\.unnorm_key='bridge' .* Did you mean 'bridge_orig'\? Known: bridge_orig, libero_spatial_no_noops", unnorm_key="bridge")
    refuse("must name the data set", unnorm_key=None)
    refuse(r"policy\.cameras='rbg': task 'Spoon-v1' shows no image 'rbg'.* Did you mean 'rgb'", cameras=("rbg",))
    refuse(r"policy\.cameras='state': task 'Spoon-v1' shows no image 'state', and the policy reads one \(uint8", cameras=("state",))
    refuse(r"sees 1 image\(s\), but policy\.cameras names 2", cameras=("rgb", "wrist"))
    refuse(r"policy\.temperature must be above 0", temperature=0.0)
    refuse("must be at least one image", cameras=())
    small = dataclasses.replace(SPEC, observation={**SPEC.observation, "state": TensorSpec((6,))})
    with pytest.raises(UserError, match=r"robot state of 8 numbers, but 'state' of task 'Spoon-v1' is \[6\]"):
        oft(checkpoint, OFTConfig(proprio_dim=8), small)
    with pytest.raises(UserError, match="gives 6 action dimensions, but the data set"):
        oft(checkpoint, OFTConfig(action_dim=6))


def test_bad_observations_and_noise(one: VLAPolicy, observation: dict[str, Any], checkpoint: Path) -> None:
    with pytest.raises(UserError, match="'rgb' must hold uint8 images"):
        one.act(observation | {"rgb": observation["rgb"].astype(np.float32) / 255}, None)
    with pytest.raises(UserError, match="instruction is empty"):
        one.act(observation | {"instruction": np.array(["", "push"], dtype=object)}, None)
    with pytest.raises(UserError, match=r"noise must be \[2, 7\], got \[2, 6\]"):
        one.act(observation, torch.rand(2, 6))
    with pytest.raises(UserError, match=r"uniform in \[0, 1\), not normal"):
        one.act(observation, torch.full((2, 7), -0.1))
    with pytest.raises(UserError, match="Action tokens must lie in"):
        one.evaluate(observation, torch.zeros(2, 7, dtype=torch.int64))
    silent = dataclasses.replace(SPEC, observation={"rgb": SPEC.observation["rgb"]})
    with pytest.raises(UserError, match="'Spoon-v1' gives no instruction"):
        openvla(checkpoint, silent).act({"rgb": observation["rgb"]}, None)


@pytest.mark.gpu
def test_a_captured_decision_equals_the_eager_one(checkpoint: Path, observation: dict[str, Any]) -> None:
    for make in (openvla, oft):
        eager = make(checkpoint, prompt_tokens=40).to("cuda")
        graphed = make(checkpoint, prompt_tokens=40, generation="cuda_graph").to("cuda")
        graphed.load_state_dict(eager.state_dict())
        for seed in (0, 1):
            expected = eager.act(observation, noise_of(eager, seed=seed).cuda())
            found = graphed.act(observation, noise_of(eager, seed=seed).cuda())
            assert torch.equal(found.action, expected.action)
            torch.testing.assert_close(found.log_prob, expected.log_prob, atol=1e-4, rtol=0)
