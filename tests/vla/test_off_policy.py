"""Critics of actions beside policies that act in chunks: a chunk is one decision."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied_rl.config import AlgorithmConfig, FlowPolicyConfig, HybridConfig, OffPolicyConfig, ShardingConfig, TinyVLAConfig
from embodied_rl.config.compose import load_train_config
from embodied_rl.episodes.dataset import DatasetOptions, Transitions, TransitionTable
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode, RecordingInfo
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.learning.learner import make_learner
from embodied_rl.learning.ranks import RankExecutor
from embodied_rl.learning.recorded import (
    CloningObjective,
    CriticsObjective,
    StateValueObjective,
    prepared,
    steps_of,
    transition_rows,
)
from embodied_rl.policies.base import Policy
from embodied_rl.policies.build import build_policy
from embodied_rl.policies.q_ensemble import ActorWithCritics
from embodied_rl.train import train
from tests.vla.toys import QUIET, SIM, TINY, PointSim

pytestmark = pytest.mark.usefixtures("forked")

SPEC = PointSim(1).spec
"""Two action dimensions."""
VLA = TinyVLAConfig(width=16, num_heads=2, num_layers=1, conv_channels=(4,), num_keypoints=4, num_bins=9, chunk=3)
FLOW = FlowPolicyConfig(chunk=3, hidden_sizes=(16,), num_steps=2, method="flow_noise")
EXPERT = ("algorithm.recorded.expert=tests.vla.toys:PointExpert", "algorithm.recorded.expert_episodes=60")
CRITICS = ("algorithm.off_policy.hidden_sizes=[64,64]", "algorithm.minibatch_size=64", "algorithm.learning_rate=3e-3")
CRITICS += ("algorithm.off_policy.target_rate=0.05", "algorithm.gamma=0.9")
SAMPLES = {("tiny_vla", "iql"), ("flow", "sac")}
"""Of the policies and updates on ranks, which run by default: the updates share their steps, and test_recorded_on_ranks.py has them all."""


def make_policy(config: TinyVLAConfig | FlowPolicyConfig) -> Policy:
    torch.manual_seed(0)
    return build_policy(config, SPEC)


def chunks(seed: int, rows: int = 8) -> Transitions:
    """Chunks of three steps; the last one was cut after two."""
    rng = np.random.default_rng(seed)

    def seen() -> dict[str, np.ndarray]:
        words = np.array(["go left", "go right"] * (rows // 2), object)
        pictures = rng.integers(0, 256, (rows, 16, 16, 3)).astype(np.uint8)
        return {"rgb": pictures, "state": rng.normal(size=(rows, 1)).astype(np.float32), "instruction": words}

    executed = np.ones((rows, 3), bool)
    executed[-1, 2] = False
    action = np.where(executed[..., None], rng.uniform(-1, 1, (rows, 3, 2)), 0).astype(np.float32)
    discount = np.where(executed.all(1), 0.9**3, 0).astype(np.float32)
    return Transitions(seen(), action, rng.normal(size=rows).astype(np.float32), discount, seen(), executed)


def test_recorded_chunks_are_one_decision_by_hand(tmp_path: Path) -> None:
    """Five steps with rewards 1, 2, 4, 8, 16 and γ = 1/2, chunks of 3: from step 0 on 1 + 2/2 + 4/4 = 3, then γ³ V(x₃); from step 3 on the
    episode ends after two: 8 + 16/2 = 16 and nothing after."""
    steps = np.arange(6, dtype=np.float32)
    episode = RecordedEpisode(
        seed=1,
        observation={"state": steps[:, None]},
        action=np.stack([steps[:5] / 10, -steps[:5] / 10], 1),
        reward=np.array([1, 2, 4, 8, 16], np.float32),
        terminated=np.arange(5) == 4,
        truncated=np.zeros(5, bool),
        success=np.zeros(5, bool),
    )
    with RecordingWriter(tmp_path / "one", RecordingInfo(PointSim(1, words="none", pixels=False).spec, sim={}, policy={})) as writer:
        writer.add(episode)
    with open_recording(tmp_path / "one") as recording:
        table = TransitionTable.read([(recording, 0)], SPEC.action, DatasetOptions(("state",), gamma=0.5, n_step=3, window=3))
    found = table.gather(np.array([0, 3]))
    np.testing.assert_allclose(found.reward, [3, 16])
    np.testing.assert_allclose(found.discount, [1 / 8, 0])
    np.testing.assert_array_equal(found.next_observation["state"][0], [3])
    np.testing.assert_allclose(found.action[1, :, 0], [0.3, 0.4, 0.0], rtol=1e-6)
    assert found.executed is not None
    np.testing.assert_array_equal(found.executed[1], [True, True, False])


@pytest.mark.parametrize("config", [VLA, FLOW], ids=["tiny_vla", "flow"])
@pytest.mark.parametrize("update", ["iql", "sac"])
def test_targets_are_the_sum_of_a_chunk_and_what_comes_after_by_hand(config: TinyVLAConfig | FlowPolicyConfig, update: str) -> None:
    policy = make_policy(config)
    options = OffPolicyConfig(update=update, fresh=update == "sac", hidden_sizes=(16,))  # type: ignore[arg-type]
    torch.manual_seed(1)
    networks = ActorWithCritics(policy, options)
    with torch.no_grad():  # critics start equal to their targets
        for parameter in networks.targets.parameters():
            parameter.add_(0.1)
    batch = chunks(2)
    rows = transition_rows(networks, prepared(policy, batch), np.random.default_rng(3), with_policy=True)
    objective = CriticsObjective(networks, AlgorithmConfig(off_policy=options))
    loss, _ = objective(networks, *objective.begin(rows, kl_coef=0.0))
    with torch.no_grad():
        ready, after = ({key: part.clone() for key, part in seen.items()} for seen in (rows.observation, rows.next_observation))
        following = policy.features(after)
        if update == "iql":
            value = policy.value(after)
        else:
            assert rows.next_noise is not None
            acted, entropies = policy.drawn(after, following, rows.next_noise)
            assert acted.shape == (8, 6)
            assert float(acted.abs().max()) <= 1.0
            value = networks.targets(following, acted).min(0).values - 0.1 * entropies.sum(1)
        target = torch.from_numpy(batch.reward) + torch.from_numpy(batch.discount) * value
        flat = torch.from_numpy(batch.action.reshape(8, 6))
        error = networks.critics(policy.features(ready), flat) - target
    assert float(loss.detach()) == pytest.approx(float(error.square().mean()), rel=1e-5)
    if update == "sac":
        assert networks.target_entropy == -6.0, "minus the dimensions of a chunk"


def test_tokens_carry_the_gradient_of_their_mean_and_their_entropy_is_an_actions() -> None:
    policy = make_policy(VLA)
    rows = prepared(policy, chunks(4))
    ready = {key: torch.from_numpy(part) for key, part in rows.observation.items()}
    noise = torch.from_numpy(policy.action_layout.noise(np.random.default_rng(5), (8,)))
    acted, cost = policy.drawn(ready, policy.features(ready), noise)
    tokens = policy.act(ready, noise).action
    np.testing.assert_allclose(acted.detach().numpy().reshape(8, 3, 2), policy.normalised_action(tokens.numpy()), atol=1e-6)
    entropy = policy.evaluate(ready, tokens).entropy
    # Eight intervals of 1/4 between -1 and 1 (the topmost of nine tokens shares the last): uniform over one of them is log 1/4 more.
    torch.testing.assert_close(-cost, entropy + math.log(1 / 4))
    own = policy.get_parameter("action_head.bias")
    (found,) = torch.autograd.grad(acted.sum(), own)
    bias = own.detach().clone().requires_grad_(True)
    hidden = policy.decoder(policy._memory(ready)) @ policy.action_head.weight.T  # type: ignore[operator, union-attr]
    centers = torch.linspace(-1, 1, 9)[:-1] + 1 / 8
    mean = torch.softmax(hidden.detach() + bias, -1) @ torch.cat([centers.flip(0)[:1], centers.flip(0)])
    torch.testing.assert_close(found, torch.autograd.grad(mean.sum(), bias)[0], rtol=1e-4, atol=1e-5)


def test_what_learns_from_which_loss() -> None:
    networks = ActorWithCritics(make_policy(VLA), OffPolicyConfig(update="iql", fresh=False, hidden_sizes=(16,)))
    groups = networks.parameter_groups()
    assert all(name.startswith(("critics.", "value_decoder.")) for name in groups["critics"])
    assert all(name.startswith("value_head.") for name in groups["value"])
    owned = [id(parameter) for group in groups.values() for parameter in group.values()]
    assert len(owned) == len(set(owned)) == sum(1 for name, _ in networks.named_parameters() if not name.startswith(("targets", "log_")))
    # The encoder learns with the policy: of the critics' loss nothing arrives there.
    objective = StateValueObjective(networks, AlgorithmConfig(off_policy=networks.options))
    rows = transition_rows(networks, prepared(networks.policy, chunks(6)), np.random.default_rng(0), with_policy=True)
    for kind in (objective, CriticsObjective(networks, objective.config)):
        loss, _ = kind(networks, *kind.begin(rows, kl_coef=0.0))
        loss.backward()
    assert all(parameter.grad is None for parameter in networks.policy.encoder.parameters())  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "update"),
    [
        pytest.param(config, update, id=f"{name}-{update}", marks=[pytest.mark.ci_sample] if (name, update) in SAMPLES else [])
        for name, config in (("tiny_vla", VLA), ("flow", FLOW))
        for update in ("sac", "iql", "awac")
    ],
)
def test_two_ranks_take_the_same_steps(config: TinyVLAConfig | FlowPolicyConfig, update: str) -> None:
    options = OffPolicyConfig(update=update, fresh=update == "sac", hidden_sizes=(16,), target_rate=0.25)  # type: ignore[arg-type]
    algorithm = AlgorithmConfig(off_policy=options, max_grad_norm=1.0)
    all_networks, learners = [], []
    for sharding in (None, ShardingConfig(num_shards=2)):
        torch.manual_seed(0)
        networks = ActorWithCritics(build_policy(config, SPEC), options)
        hybrid = HybridConfig(device="cpu", num_threads=1, sharding=sharding)
        all_networks.append(networks)
        learners.append(make_learner(CriticsObjective(networks, algorithm), networks, algorithm, hybrid))
    executor = learners[1].executor
    assert isinstance(executor, RankExecutor)
    try:
        for number in range(3):
            figures = []
            for networks, learner in zip(all_networks, learners, strict=True):
                torch.manual_seed(number)  # a flow's cloning loss draws its noise
                rows = transition_rows(
                    networks, prepared(networks.policy, chunks(number)), np.random.default_rng(number), with_policy=number != 1
                )
                steps = [kind(networks, algorithm) for kind in steps_of(options, with_policy=number != 1)]
                figures.append(learner.step(rows, 1e-3, steps))
            assert figures[1].keys() == figures[0].keys()
            assert figures[1] == pytest.approx(figures[0], rel=1e-3, abs=1e-5)
        executor.write_back()
        for (name, here), (_, there) in zip(all_networks[0].named_parameters(), all_networks[1].named_parameters(), strict=True):
            torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-4, msg=name)
    finally:
        executor.close()


def success_of(folder: Path, *overrides: str) -> float:
    given = [word for word in (*SIM, *TINY, *QUIET) if not ("policy=flow" in overrides and word.startswith("policy"))]
    last = ("evaluation.num_episodes=40", "hybrid.num_threads=1", "hybrid.device=cpu")
    run_dir = train(load_train_config([*given, *last, *overrides, f"run_dir={folder}"]))
    return float(json.loads((run_dir / "results.json").read_text())["success"])


@pytest.mark.slow
@pytest.mark.ci_sample
def test_critics_find_what_is_good_in_random_chunks(tmp_path: Path) -> None:
    """The recorded player moves at random: cloned, it goes nowhere. Rewards say which of its chunks went the way that the words ask for."""
    random = (*EXPERT, "algorithm.recorded.expert_randomness=[1.0]")
    cloned = success_of(tmp_path / "bc", *random, "algorithm=bc", *CRITICS[1:3], "total_steps=30")
    offline = ("algorithm.off_policy.temperature=0.05", "algorithm.off_policy.updates_per_iteration=100", "total_steps=160")
    learned = success_of(tmp_path / "iql", *CRITICS, *offline, "algorithm=iql", f"recording={tmp_path / 'bc' / 'demonstrations'}")
    assert learned >= cloned + 0.3
    assert learned >= 0.8


@pytest.mark.slow
def test_a_flow_follows_its_critics_through_its_denoising(tmp_path: Path) -> None:
    """Soft actor-critic on chunks of three steps: a point walks to the right end, where the only reward is."""
    words = ("sim=custom", "sim.target=tests.methods.line:Line", "sim.num_slots=4", "sim.num_workers=1", *QUIET, *CRITICS)
    words += ("policy=flow", "policy.chunk=3", "policy.hidden_sizes=[32]", "policy.num_steps=4", "policy.method=flow_noise")
    words += ("algorithm=sac", "algorithm.minibatch_size=128", "algorithm.off_policy.warmup_steps=60", "total_steps=2400")
    last = ("hybrid.num_threads=1", "hybrid.device=cpu", "evaluation.num_episodes=32", f"run_dir={tmp_path}")
    chosen = {word.partition("=")[0]: word for word in (*words, *last)}
    run_dir = train(load_train_config([*chosen.values()]))
    assert json.loads((run_dir / "results.json").read_text())["success"] >= 0.8


@pytest.mark.parametrize("config", [dataclasses.replace(VLA, cloning_shift=2), FLOW], ids=["moved pictures", "noise"])
def test_a_validation_loss_is_a_function_of_the_weights(config: TinyVLAConfig | FlowPolicyConfig) -> None:
    """Cloning draws shifts of pictures and a flow's noise; validation neither moves pictures nor changes what training draws next."""
    policy, objective = make_policy(config), CloningObjective(make_policy(config), load_train_config(["algorithm=bc", *SIM]).algorithm)
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    figures = [objective.validate(policy, [chunks(0)]) for _ in range(3)]
    assert figures[0] == figures[1] == figures[2]
    assert torch.equal(torch.rand(1), wanted)
    assert policy.training
