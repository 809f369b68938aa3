"""Evaluation of what no run of ours trained, and of action tokens that are drawn, held against episodes played by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.commands.evaluate import main, read_protocol
from embodied_rl.config import TinyVLAConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.torch_backend import TorchGenerator
from embodied_rl.policies.tiny_language import make_tiny_model
from embodied_rl.policies.tiny_vla import TinyVLAPolicy
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.text import frozenlake
from embodied_rl.types import StepBuffers
from tests.generation.token_servers import Exchange, TokenServer
from tests.short_run import one_line_error
from tests.vla.toys import PointSim

pytestmark = pytest.mark.usefixtures("forked")

HELD_OUT = 2**30
POINTS = SimFactory("tests.vla.toys:PointSim")
SMALL = TinyVLAConfig(width=16, num_heads=2, num_layers=1, conv_channels=(4,), num_keypoints=4, num_bins=9, chunk=2)
ACTIONS = ("agent.actions=[up,down,left,right]", "agent.answer=word", "agent.last_turns=0")


def episodes(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["episodes"]


# ---- servers, models, chance ----------------------------------------------------------------------------------------


@pytest.fixture
def guide() -> Iterator[TokenServer]:
    """A server whose model knows every lake; it reads the chat's last message."""

    def streamed(exchange: Exchange) -> None:
        exchange.begin_stream()
        word = frozenlake.player(exchange.body["messages"][-1]["content"])
        for piece, reason in ((word[:1], None), (word[1:], "stop")):
            exchange.event({"choices": [{"delta": {"content": piece}, "finish_reason": reason}]})
        exchange.event("[DONE]")

    server = TokenServer(streamed)
    yield server
    server.close()


def test_a_model_behind_a_server_plays_every_lake_to_its_goal(
    guide: TokenServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    main(
        ["sim=frozenlake", "policy=openai", f"openai.base_url={guide.base_url}", "openai.model=guide", *ACTIONS, "sim.num_slots=3",
         "num_episodes=6", "seed=40", f"output={output}"]
    )  # fmt: skip
    told = capsys.readouterr().out
    assert "openai (guide) policy, 6 held-out seeds 40 … 45" in told
    assert "invalid 0.0%" in told
    document = json.loads(output.read_text())
    assert document["success"] == 1.0
    assert document["server"]["model"] == "guide"
    played = {row["seed"]: row["length"] for row in episodes(output)}
    # As many moves as the scripted player makes by itself.
    sim = frozenlake.make(1)
    out = StepBuffers.allocate(sim.spec, 1)
    for seed in range(HELD_OUT + 40, HELD_OUT + 46):
        sim.reset([0], [seed], out)
        length = 0
        while not length or not out.terminated[0]:
            sim.step([0], np.array([frozenlake.player(out.observation["text"][0])], object), out)
            length += 1
        assert played[seed] == length
    assert len(guide.exchanges) == sum(played.values())


def test_a_folders_model_is_played_as_it_is(tmp_path: Path) -> None:
    texts = ["You are here. up down left right", *("P . . G H",) * 3]
    folder = make_tiny_model(tmp_path / "model", texts)
    for name in ("first", "second"):
        words = [f"policy.model={folder}", "sim.max_episode_steps=8", "num_episodes=3", f"output={tmp_path / name}.json"]
        main(["sim=frozenlake", "policy=language", *ACTIONS, *words])
    document = json.loads((tmp_path / "first.json").read_text())
    assert document["policy"] == f"language ({folder})"
    assert document["model"]["path"] == "model", "as seen from the file"
    assert "model.safetensors" in document["model"]["files"]
    assert 0.0 <= document["answers"]["invalid"] <= 1.0
    assert episodes(tmp_path / "first.json") == episodes(tmp_path / "second.json")


def test_chance_balances_as_long_as_chance_does(tmp_path: Path) -> None:
    main(["sim=cartpole", "policy=random", "num_episodes=60", f"output={tmp_path / 'out.json'}"])
    lengths = [row["length"] for row in episodes(tmp_path / "out.json")]
    assert 18 < np.mean(lengths) < 28, "random actions balance a pole for 22 steps on average"
    main(["sim=frozenlake", "policy=random", *ACTIONS, "num_episodes=5", f"output={tmp_path / 'words.json'}"])
    assert len(episodes(tmp_path / "words.json")) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sim=frozenlake"], "policy=… is missing"),
        (["sim=frozenlake", "policy=opnai"], "'opnai' is not known. Did you mean 'openai'?"),
        (["sim=frozenlake", "policy=openai", "openai.model=x"], "policy=openai needs openai.base_url=…"),
        (["sim=frozenlake", "policy=random", "openai.model=x"], "openai.model=… needs policy=openai."),
        (["sim=frozenlake", "policy=language", "temperature=0"], "A language agent uses agent.evaluation_temperature."),
        (["sim=frozenlake", "policy=openai", "openai.base_url=x", "openai.model=x", "openai.modl=y"], "Did you mean 'model'?"),
        (["sim=cartpole", "policy=language"], "reads and writes text, and task 'CartPole-v1' does not"),
        (["sim=cartpole", "policy=mlp", "temperature=0.5"], "evaluation.temperature=0.5 applies to action tokens"),
        (["sim=cartpole", "policy=mlp", "temperature=-1"], "temperature must be between 0 and 1,000"),
        (["sim=pixel_tasks", "policy=openvla", "policy.path=nowhere"], "policy.path='nowhere' is not a folder"),
        (["sim=pixel_tasks", "policy=openvla", "policy.pth=nowhere"], "Did you mean 'path'?"),
        (["sim=cartpole", "policy=random", "against=random"], "against=random needs checkpoint=…"),
        (["sim=cartpole", "policy=random", "protocol=liber"], "Protocol 'liber' is not known. Did you mean 'libero'?"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in one_line_error(main, arguments, capsys)


# ---- tokens that are drawn ------------------------------------------------------------------------------------------


def test_protocols_are_read() -> None:
    measured = read_protocol("maniskill_rl4vla")
    assert measured.sim == {"sim.max_episode_steps": 80, "sim.success_ends_episode": False}
    assert (measured.num_episodes, measured.temperature) == (3 * 64, 0.6)
    assert read_protocol("libero_published").sim == {"sim.kwargs.init_states": "all"}
    assert read_protocol("libero_published").num_episodes == 10 * 50
    with pytest.raises(UserError, match=r"Protocol 'liber' is not known\. Did you mean 'libero'"):
        read_protocol("liber")


def test_drawn_tokens_follow_an_episodes_seed_and_the_temperature() -> None:
    policies, found = [], []
    for num_slots in (1, 3):
        with EnvManager(POINTS, num_slots, num_workers=1, seeds=EpisodeSeeds.held_out(0), chunk_size=2) as manager:
            torch.manual_seed(0)
            policy = TinyVLAPolicy(
                TinyVLAConfig(width=16, num_heads=2, num_layers=1, conv_channels=(4,), num_bins=9, chunk=2), manager.spec
            )
            torch.nn.init.normal_(policy.action_head.weight, std=1.0)
            policies.append(policy)
            generator = TorchGenerator(policy)
            found.append([evaluate(manager, generator, 5, temperature=heat) for heat in (None, 1e-4, 1.0, 3.0)])
            assert policy.temperature == 1.0, "as it was"
    returns = [[[episode.episode_return for episode in some] for some in of_slots] for of_slots in found]
    for one, three in zip(*returns, strict=True):
        assert one == pytest.approx(three, abs=1e-5), "slots and neighbours do not matter"
    mode, cold, warm, hot = returns[0]
    assert cold == pytest.approx(mode, abs=1e-5)
    assert len({tuple(np.round(some, 4)) for some in (mode, warm, hot)}) == 3
    # By hand: uniform numbers through the softmax of the logits, divided by the temperature.
    sim, policy = PointSim(1), policies[0]
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [HELD_OUT + 3], out)
    total = 0.0
    for decision in range(5):
        seen = {key: part.copy() for key, part in out.observation.items()}
        with torch.no_grad():
            logits = policy.action_head(policy.decoder(policy._memory(seen)))[0].double().numpy()
        chances = np.exp(logits / 3.0) / np.exp(logits / 3.0).sum(-1, keepdims=True)
        noise = np.random.default_rng([0x6E6F6973, HELD_OUT + 3, decision]).random(4, np.float32)
        tokens = [int(np.searchsorted(np.cumsum(row), number, side="right")) for row, number in zip(chances, noise, strict=True)]
        for action in policy.simulator_action(np.array([tokens]))[0]:
            sim.step([0], action[None], out)
            total += float(out.reward[0])
    assert total == pytest.approx(hot[3], abs=1e-5)


def test_who_draws_no_tokens_has_no_temperature() -> None:
    from embodied_rl.config import PolicyConfig
    from embodied_rl.policies.actor_critic import build_policy

    with EnvManager(POINTS, 1, num_workers=1, seeds=EpisodeSeeds.held_out(0)) as manager:
        generator = TorchGenerator(build_policy(PolicyConfig(observation_key="state"), manager.spec))
        with pytest.raises(UserError, match="needs a policy of action tokens"):
            evaluate(manager, generator, 1, temperature=0.5)
