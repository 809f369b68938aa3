"""OpenVLA and OpenVLA-OFT in the training loop: what is trained, imitation by hand, one update from the command line's door, bad input."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file

import embodied_rl
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.commands import evaluate, offline_eval, record
from embodied_rl.compose import load_train_config
from embodied_rl.config import OpenVLAOFTPolicyConfig, OpenVLAPolicyConfig
from embodied_rl.config.rules import resolve
from embodied_rl.episodes.reader import open_recording
from embodied_rl.errors import UserError
from embodied_rl.learning.optimizer import Optimizer
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.policies.build import build_policy
from embodied_rl.policies.openvla.config import shapes_of
from embodied_rl.policies.openvla.model import PARTS, OpenVLA
from embodied_rl.policies.openvla.oft import OFTConfig, OpenVLAOFT
from embodied_rl.policies.openvla.policy import VLAPolicy, _add_lora
from embodied_rl.policies.openvla.processor import OpenVLAProcessor
from embodied_rl.train import train
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec
from tests.policies.openvla.conftest import FIXTURES, VISION
from tests.roles.runs import assert_same_run
from tests.test_load_policy import batch_of, played, train_points
from tests.vla.toys import QUIET, SIM, PointSim

SPOON = "put the spoon on the towel"
SPEC = SimSpec("Spoon-v1", {"rgb": TensorSpec((16, 16, 3), "uint8")}, ActionSpec.continuous([-1.0] * 7, [1.0] * 7), instruction=SPOON)


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random checkpoint with its shapes in config.json, so that a path is all that a run needs."""
    directory = tmp_path_factory.mktemp("tiny_openvla")
    model = OpenVLA.from_pretrained(checkpoint, vision=VISION)
    model.save_pretrained(directory)
    OpenVLAProcessor.from_pretrained(checkpoint, model.config).save(directory)
    return directory


def build(folder: Path, spec: SimSpec = SPEC, *, oft: bool = False, **changes: Any) -> VLAPolicy:
    kind = OpenVLAOFTPolicyConfig if oft else OpenVLAPolicyConfig
    torch.manual_seed(0)
    options = {"unnorm_key": "bridge_orig", "prompt_tokens": 24, **({"chunk": 2} if oft else {})}
    policy = build_policy(kind(path=str(folder), **{**options, **changes}), spec)
    assert isinstance(policy, VLAPolicy)
    return policy


def observe(rows: int = 2) -> dict[str, Any]:
    return {"rgb": np.random.default_rng(0).integers(0, 256, (rows, 16, 16, 3), dtype=np.uint8)}


def trained(policy: VLAPolicy) -> set[str]:
    return {name for name, parameter in policy.named_parameters() if parameter.requires_grad}


def test_what_is_trained(folder: Path) -> None:
    whole = build(folder)
    everything = trained(whole)
    assert any(name.startswith("model.vision_backbone.") for name in everything)
    frozen = trained(build(folder, freeze_vision=True))
    assert frozen == {name for name in everything if not name.startswith("model.vision_backbone.")}
    adapters = trained(build(folder, lora_rank=2))
    assert all("lora_" in name or name.startswith("value_head.") for name in adapters)
    assert any("vision_backbone" in name for name in adapters)
    language = trained(build(folder, lora_rank=2, lora_targets=("q_proj", "v_proj")))
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in language if "lora_" in name} == {"q_proj", "v_proj"}
    assert not any("vision_backbone" in name for name in trained(build(folder, lora_rank=2, freeze_vision=True)))
    roles = {whole.role_of(name) for name in everything}
    assert roles == {"backbone", "head", "value"}


def test_adapters_of_a_model_in_bfloat16_take_small_steps(folder: Path) -> None:
    """1e-6 beside 0.1 is nothing in bfloat16, whose next number is 0.0005 away."""
    policy = build(folder, lora_rank=2, dtype="bfloat16")
    adapters = {name: parameter for name, parameter in policy.named_parameters() if ".lora_" in name}
    assert {parameter.dtype for parameter in adapters.values()} == {torch.float32}
    optimizer = Optimizer(adapters, eps=1e-8, max_grad_norm=1.0)
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.fill_(0.1 if "lora_A" in name else 0.0)
    ready = policy.prepare(observe())
    acted = policy.act(ready, torch.rand(2, 7, generator=torch.Generator().manual_seed(0)))
    for _ in range(2):
        policy.evaluate(ready, acted.action).log_prob.sum().backward()
        optimizer.step(1e-6)
    moved = [(parameter - 0.1).abs().max().item() for name, parameter in adapters.items() if "lora_A" in name]
    assert max(moved) == pytest.approx(1e-6, rel=0.5), "of A, whose gradient is zero until B has moved"


def test_an_adapter_computes_in_its_inputs_precision() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False)).to(torch.bfloat16)
    _add_lora(model, OpenVLAPolicyConfig(path="none", lora_rank=2, lora_alpha=4.0), None)
    state = {name: torch.randn(part.shape, generator=torch.Generator().manual_seed(len(name))) for name, part in model.state_dict().items()}
    model.load_state_dict(state)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole, down, up = (state[f"0.{name}.weight"].to(torch.bfloat16).double() for name in ("base_layer", "lora_A.default", "lora_B.default"))
    found = model(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), x.double() @ (whole + 2.0 * up @ down).T, atol=0.2, rtol=0.02)


def test_layers_computed_again_have_the_same_gradients(folder: Path) -> None:
    found = []
    for again in (False, True):
        policy = build(folder, gradient_checkpointing=again, dtype="float32")
        policy.train()
        ready = policy.prepare(observe())
        acted = policy.act(ready, torch.rand(2, 7, generator=torch.Generator().manual_seed(0)))
        evaluation = policy.evaluate(ready, acted.action)
        torch.testing.assert_close(evaluation.log_prob.detach(), acted.log_prob, atol=1e-4, rtol=0)
        (evaluation.log_prob.sum() + evaluation.value.sum()).backward()
        found.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("oft", [False, True])
def test_imitation_is_the_cross_entropy_of_the_data_sets_tokens(folder: Path, oft: bool) -> None:
    policy = build(folder, oft=oft, dtype="float32")
    steps = policy.chunk_size
    assert policy.action_layout.chunk_size == policy.action_layout.num_units // 7 == steps
    ready = policy.prepare(observe())
    tokens = policy.act(ready, None).action
    # What the policy would do, as the simulator records it (within its bounds), is imitated with the probabilities of those tokens.
    action = torch.from_numpy(policy.simulator_action(tokens)).clamp(-1.0, 1.0)
    again = torch.from_numpy(policy.model.tokens.encode(policy.action_range.normalise(action.double().numpy()))).flatten(1)
    with torch.no_grad():
        expected = -policy.evaluate(ready, again).log_prob
        torch.testing.assert_close(policy.cloning_loss(ready, action), expected.mean(-1))
        if oft:
            mask = torch.tensor([[True, False], [True, True]])
            torch.testing.assert_close(policy.cloning_loss(ready, action, mask)[0], expected[0, :7].mean())


OPENVLA = ("policy=openvla", "policy.lora_rank=2", "algorithm.rollout_steps=3", "algorithm.minibatch_size=6", "algorithm.num_epochs=1")
OFT = (
    *("policy=openvla_oft", "policy.chunk=2", "policy.freeze_vision=true", "policy.value_head=false", "algorithm=grpo"),
    *("algorithm.groups.group_size=2", "algorithm.groups.groups_per_step=1", "algorithm.num_epochs=1", "algorithm.minibatch_size=64"),
    *("algorithm.aggregation=seq-mean-token-mean", "sim.max_episode_steps=4"),
)


@pytest.mark.slow
def test_openvla_plays_as_the_run_was_evaluated(checkpoint: Path, tmp_path: Path) -> None:
    """Of a folder as it is published, whose config.json names vision transformers and gives no shapes: they are given by key."""
    shapes = ", ".join(str(asdict(shape)).replace("'", "").lower() for shape in VISION)
    run = train_points(
        tmp_path, "policy=openvla", "policy.lora_rank=2", "sim.kwargs.dim=7", "sim.num_slots=2", "evaluation.num_episodes=2",
        "total_steps=2", f"policy.path={checkpoint}", "policy.unnorm_key=bridge_orig", "policy.prompt_tokens=24", "policy.dtype=float32",
        f"policy.vision=[{shapes}]", "algorithm.ratio=token", "algorithm.rollout_steps=3", "algorithm.minibatch_size=6",
    )  # fmt: skip
    policy = run.load_policy()
    episode = run.results["episodes"][0]
    assert played(policy, episode["seed"]) == pytest.approx(episode["return"], abs=1e-5)
    rows, batch = batch_of(16, count=2)
    answers = policy.predict(batch)
    assert answers.shape == (2, 7)
    np.testing.assert_allclose(answers, [policy.predict(row) for row in rows], atol=1e-5)
    with pytest.raises(UserError, match=r"The observation lacks 'rgb'"):
        policy.predict({"state": np.zeros(1), "instruction": "go left"})


@pytest.mark.parametrize("kind", [pytest.param(OPENVLA, id="openvla ppo"), pytest.param(OFT, id="oft grpo")])
def test_one_update_end_to_end_and_predict_of_its_policy(kind: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    overrides = [
        *SIM, *QUIET, *kind, "sim.kwargs.dim=7", "sim.num_slots=2", "evaluation.num_episodes=2", "total_steps=2", f"policy.path={folder}",
        f"policy.instruction={SPOON}", "policy.unnorm_key=bridge_orig", "policy.prompt_tokens=24", "policy.dtype=float32",
        "policy.gradient_checkpointing=true", "algorithm.ratio=token", "algorithm.micro_batch_size=2",
        "algorithm.value_learning_rate=0.003", "hybrid.precision=bfloat16", f"run_dir={tmp_path}",
    ]  # fmt: skip
    run_dir = train(load_train_config(overrides))
    results = json.loads((run_dir / "results.json").read_text())
    assert results["num_episodes"] == 2
    assert results["policy"] == kind[0].removeprefix("policy=")
    policy, episode = embodied_rl.load_policy(run_dir), results["episodes"][0]
    assert played(policy, episode["seed"], steps=episode["length"]) == pytest.approx(episode["return"], abs=1e-5)
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert np.isfinite(row["train/policy_loss"])
    assert row["train/grad_norm"] > 0
    saved = load_file(run_dir / "checkpoints" / "last" / "policy.safetensors")
    own: dict[str, Any] = {"lora_rank": 2} if kind is OPENVLA else {"freeze_vision": True, "value_head": False}
    fresh = {name: value.numpy() for name, value in build(folder, oft=kind is OFT, dtype="float32", **own).state_dict().items()}
    moved = {name for name in fresh.keys() & saved.keys() if not np.array_equal(saved[name], fresh[name])}
    if kind is OPENVLA:
        assert any("lora_B" in name for name in moved)
        assert not any(name.startswith("model.") and "lora_" not in name for name in saved), (
            "what LoRA stands beside is frozen, and not saved"
        )
    else:
        assert saved.keys() == fresh.keys()
        assert "model.language_model.lm_head.weight" in moved
        assert not any("vision_backbone" in name for name in moved)


@pytest.mark.slow
def test_only_what_is_trained_is_sent_where_it_is_played(folder: Path, tmp_path: Path) -> None:
    task = [
        *SIM, *QUIET, *OPENVLA, "sim.kwargs.dim=7", "sim.num_slots=2", "evaluation.num_episodes=2", "total_steps=6",
        f"policy.path={folder}", f"policy.instruction={SPOON}", "policy.unnorm_key=bridge_orig", "policy.prompt_tokens=24",
        "policy.dtype=float32", "algorithm.ratio=token", "hybrid=disaggregated",
    ]  # fmt: skip
    whole, adapter = (
        train(load_train_config([*task, f"hybrid.publish={how}", f"run_dir={tmp_path / how}"])) for how in ("full", "adapter")
    )
    assert_same_run(whole, adapter)
    sent = [[row["roles/published_bytes"] for row in read_metrics(run) if "roles/published_bytes" in row] for run in (whole, adapter)]
    assert len(sent[0]) == len(sent[1]) >= 1
    assert max(sent[1]) < 0.5 * min(sent[0])


def test_a_value_for_each_step_of_a_chunk(folder: Path, tmp_path: Path) -> None:
    policy = build(folder, oft=True, value="action", dtype="float32")
    head = policy.value_head
    assert head is not None
    ready = policy.prepare(observe())
    acted = policy.act(ready, None)
    found = policy.value(ready)
    with torch.no_grad():
        hidden = policy.model.action_hidden(policy._sequence(*policy._inputs(ready)))[:, 0]
        inner = F.gelu(hidden @ head.head_l1.weight.T + head.head_l1.bias)
        expected = F.gelu(inner @ head.head_l2.weight.T + head.head_l2.bias) @ head.head_l3.weight.T
    torch.testing.assert_close(found, expected)
    assert found.shape == (2, policy.chunk_size)
    torch.testing.assert_close(policy.evaluate(ready, acted.action).value, expected)
    torch.testing.assert_close(acted.value, expected)
    found[:, 1].sum().backward()
    assert head.head_l3.weight.grad is not None
    assert (head.head_l3.weight.grad[0] == 0).all(), "each step has weights of its own"
    assert (head.head_l3.weight.grad[1] != 0).any()
    overrides = [
        *SIM, *QUIET, "policy=openvla_oft", "policy.chunk=2", "policy.value=action", "algorithm.advantage=gae_action",
        "algorithm.ratio=token", "algorithm.rollout_steps=2", "algorithm.minibatch_size=4", "algorithm.num_epochs=1",
        "policy.lora_rank=2", "policy.freeze_vision=true",
        "sim.kwargs.dim=7", "sim.num_slots=2", "evaluation.num_episodes=2", "total_steps=2", f"policy.path={folder}",
        f"policy.instruction={SPOON}", "policy.unnorm_key=bridge_orig", "policy.prompt_tokens=24", "policy.dtype=float32",
        f"run_dir={tmp_path}",
    ]  # fmt: skip
    run_dir = train(load_train_config(overrides))
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert row["train/value_loss"] > 0
    saved = load_file(run_dir / "checkpoints" / "last" / "policy.safetensors")
    assert saved["value_head.head_l3.weight"].shape == (2, 128)


def test_the_regression_head_is_cloned_and_evaluated(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "l1"
    shutil.copytree(folder, own)
    shutil.copy(FIXTURES / PARTS, own)
    policy = build(own, oft=True, head="l1", chunk=8, dtype="float32")
    ready = policy.prepare(observe())
    acted = policy.act(ready, None)
    wanted = policy.action_range.normalise(np.full((2, 8, 7), 0.25))
    distance = np.abs(acted.action.numpy().reshape(2, 8, 7) - wanted)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, 3:] = False
    loss = policy.cloning_loss(ready, torch.full((2, 8, 7), 0.25), mask)
    np.testing.assert_allclose(loss.detach().numpy(), [distance[0, :3].mean(), distance[1].mean()], rtol=1e-4)
    loss.sum().backward()
    assert {policy.role_of(name) for name, p in policy.named_parameters() if p.grad is not None} == {"backbone", "head"}
    model = [
        "policy=openvla_oft", "policy.head=l1", "policy.chunk=8", f"policy.path={own}", f"policy.instruction={SPOON}",
        "policy.unnorm_key=bridge_orig", "policy.prompt_tokens=24", "policy.dtype=float32",
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"policy\.head=l1 gives actions without probabilities"):
        train(load_train_config([*SIM, *QUIET, *model, "sim.kwargs.dim=7", "algorithm.minibatch_size=64", f"run_dir={tmp_path / 'rl'}"]))
    sim = [*SIM[:3], "sim.kwargs.dim=7", "sim.num_slots=2"]
    evaluate.main([*sim, *model, "num_episodes=3", f"output={tmp_path / 'found.json'}"])
    assert "openvla_oft (" in capsys.readouterr().out
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["model"]["files"]["model.safetensors"]["sha256"] == hashlib.sha256((own / "model.safetensors").read_bytes()).hexdigest()
    # By hand, one episode at a time, in the simulator itself.
    sim_alone = PointSim(1, dim=7)
    out = StepBuffers.allocate(sim_alone.spec, 1)
    returns = []
    for episode in range(3):
        sim_alone.reset([0], [2**30 + episode], out)
        total = 0.0
        for step in range(10):
            if step % 8 == 0:
                chunk = policy.simulator_action(policy.act(policy.prepare({"rgb": out.observation["rgb"].copy()}), None).action)[0]
            sim_alone.step([0], chunk[step % 8][None], out)
            total += float(out.reward[0])
        returns.append(total)
    assert [row["return"] for row in document["episodes"]] == pytest.approx(returns, abs=1e-4)


def test_fine_tuning_on_recorded_episodes_then_recording_and_scoring(folder: Path, tmp_path: Path) -> None:
    """Demonstrations from the expert; supervised fine-tuning with LoRA; what it then does, recorded and asked about again."""
    common = [*SIM, *QUIET, "sim.kwargs.dim=7", "sim.num_slots=2", "evaluation.num_episodes=2"]
    model = [
        "policy=openvla", f"policy.path={folder}", f"policy.instruction={SPOON}", "policy.unnorm_key=bridge_orig",
        "policy.prompt_tokens=24", "policy.dtype=float32", "policy.lora_rank=2",
    ]  # fmt: skip
    demonstrations, recorded = tmp_path / "demonstrations", tmp_path / "recorded"
    record.main(
        ["sim=custom", "sim.name=points", "sim.target=tests.vla.toys:PointSim", "sim.kwargs.dim=7", "sim.num_slots=2", "num_episodes=1",
         "expert=tests.vla.toys:PointExpert", f"output={demonstrations}"]
    )  # fmt: skip
    run_dir = train(
        load_train_config(
            [*common, *model, "algorithm=bc", f"recording=[{demonstrations}]", "total_steps=6", "algorithm.minibatch_size=5",
             "algorithm.learning_rate=0.02", "algorithm.cloning.validation_share=0", "algorithm.cloning.patience=null",
             "algorithm.num_epochs=1", "policy.value_head=false", f"run_dir={tmp_path / 'run'}"]
        )
    )  # fmt: skip
    losses = [json.loads(line).get("train/imitation_loss") for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    learned = [loss for loss in losses if loss is not None]
    assert learned[-1] < 0.8 * learned[0]
    record.main([f"checkpoint={run_dir}", "num_episodes=1", "sample=true", f"output={recorded}"])
    (episode,) = open_recording(recorded)
    assert episode.log_prob is not None
    assert episode.log_prob.shape == (episode.num_steps, 7)
    offline_eval.main([f"recording={recorded}", f"checkpoint={run_dir}", "estimators=none", f"output={tmp_path / 'report'}"])
    figures = json.loads((tmp_path / "report" / "offline_eval.json").read_text())["policies"][0]["open_loop"]
    assert figures["horizon"] == 1
    assert figures["num_bins"] == 255
    # The tokens that were drawn are recorded: their log-probabilities come out again.
    assert figures["log_likelihood"]["mean"] == pytest.approx(float(episode.log_prob.sum(1).mean()), abs=1e-3)


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.parametrize("algorithm", ["iql", "sac"])
def test_openvla_learns_off_policy(folder: Path, tmp_path: Path, algorithm: str) -> None:
    """On recorded chunks of an expert, and while playing: critics, policy and, for iql, the value head move."""
    words = [*SIM, *QUIET, "sim.num_slots=2", "sim.kwargs={dim: 7, size: 24}", "policy=openvla", f"policy.path={folder}"]
    words += ["policy.lora_rank=2", "policy.dtype=float32", "policy.unnorm_key=bridge_orig", f"algorithm={algorithm}"]
    words += ["algorithm.minibatch_size=4", "algorithm.off_policy.hidden_sizes=[16]", "hybrid.device=cpu", "hybrid.num_threads=1"]
    if algorithm == "iql":
        words += ["algorithm.recorded.expert=tests.vla.toys:PointExpert", "algorithm.recorded.expert_episodes=2", "total_steps=2"]
        words += ["algorithm.off_policy.updates_per_iteration=2"]
    else:
        words += ["algorithm.rollout_steps=2", "algorithm.off_policy.warmup_steps=4", "algorithm.off_policy.updates_per_step=0.5"]
        words += ["total_steps=8", "algorithm.off_policy.replay_capacity=16"]
    chosen = {word.partition("=")[0]: word for word in words} | {"evaluation.num_episodes": "evaluation.num_episodes=1"}
    run_dir = train(load_train_config([*chosen.values(), f"run_dir={tmp_path}"]))
    after = load_checkpoint(run_dir).policy
    assert any(float(tensor.abs().max()) > 0 for name, tensor in after.items() if "lora_B" in name), "LoRA begins with zeros"
    assert np.isfinite(read_metrics(run_dir)[-1]["train/critic_loss"])


def test_the_recipes_are_complete_but_for_the_weights(folder: Path) -> None:
    for name, kind, chunk in (("maniskill_ppo_openvla", "openvla", 1), ("libero_grpo_openvla_oft", "openvla_oft", 8)):
        config = load_train_config([f"experiment={name}"])
        assert (config.policy.name, config.policy.chunk_size, config.algorithm.ratio) == (kind, chunk, "token")
        assert config.hybrid.precision == "bfloat16"
        with pytest.raises(UserError, match=r"policy\.path='checkpoints/.*' is not a folder"):
            resolve(config)  # before any simulator is started
        with pytest.raises(UserError, match=r"policy\.path='checkpoints/.*' is not a folder"):
            build_policy(config.policy, SPEC)
        ready = dataclasses.replace(config.policy, path=str(folder), dtype="float32", unnorm_key="bridge_orig")
        assert build_policy(ready, SPEC).chunk_size == chunk


@pytest.mark.parametrize(
    ("changes", "spec", "message"),
    [
        ({"path": "nowhere"}, SPEC, r"policy\.path='nowhere' is not a folder"),
        ({"unnorm_key": "bridge_orign"}, SPEC, r"unnorm_key='bridge_orign' is not in .*Did you mean 'bridge_orig'"),
        ({}, dataclasses.replace(SPEC, action=ActionSpec.continuous([-1.0] * 4, [1.0] * 4)), r"takes 4 action dimensions, but .* has 7"),
        ({}, dataclasses.replace(SPEC, observation={"state": TensorSpec((3,))}), r"policy\.cameras='rgb': .* shows no image at all"),
        ({}, dataclasses.replace(SPEC, instruction=None), r"gives no instruction\. .*set policy\.instruction"),
        ({"lora_rank": 2, "lora_targets": ("q_prj",)}, SPEC, r"lora_targets=\['q_prj'\] fits no layer.*q_proj"),
    ],
)
def test_what_does_not_fit_is_one_line(folder: Path, changes: dict[str, Any], spec: SimSpec, message: str) -> None:
    if "path" in changes:
        changes = {**changes}
        folder = Path(changes.pop("path"))
    with pytest.raises(UserError, match=message) as error:
        build(folder, spec, **changes)
    assert "\n" not in str(error.value)


def test_a_folder_of_oft_is_not_taken_for_openvla(folder: Path, tmp_path: Path) -> None:
    OpenVLAOFT.from_pretrained(folder, OFTConfig(chunk=2)).save_pretrained(tmp_path)
    OpenVLAProcessor.from_pretrained(folder).save(tmp_path)
    with pytest.raises(UserError, match=r"holds OpenVLA-OFT \(chunks of 2 steps\): set policy\.name=openvla_oft"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 32}, r"policy.vision\[0\].depth' is missing"),
        ({"width": 32, "depht": 3}, r"policy.vision\[0\].depht' is not known. Did you mean 'depth'\?"),
        ({"width": "32"}, r"policy.vision\[0\].width must be an integer, got '32'"),
    ],
)
def test_a_malformed_shape_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shapes_of([given, asdict(VISION[1])])
    assert shapes_of([asdict(shape) for shape in VISION]) == VISION
    assert shapes_of([]) is None
