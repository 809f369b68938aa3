"""Training episodes of language agents and of several domains, written down as they are played."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from embodied_rl.agents.agent import Agent
from embodied_rl.agents.parsing import ToolRequest
from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.config import RecordConfig, ToolsConfig
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import Recording, RecordingInfo
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.tiny_language import make_tiny_model
from embodied_rl.rollout.batch_sinks import TrainingRecorder
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.robots import gymnasium as gymnasium_sim
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.text import frozenlake, questions
from embodied_rl.types import StepBuffers
from tests.agents.samples import LAKE, PLAIN, collect, make_collector
from tests.methods.test_multi_domain import DOMAINS, run
from tests.rollout.test_agent_tools import call, scripted

MAKERS: dict[str, Callable[[], Any]] = {
    "lake": lambda: frozenlake.make(1, hints=True),
    "sums": lambda: questions.make_arithmetic(1, digits=[1, 1]),
    "pole": lambda: gymnasium_sim.make("CartPole-v1", 1),
}


def play_again(sim: Any, recording: Recording) -> None:
    """Every recorded episode in a simulator of its own: observations, rewards and ends are those that were recorded."""
    for episode in recording:
        out = StepBuffers.allocate(sim.spec, 1)
        sim.reset([0], [episode.seed], out)
        for step in range(episode.num_steps):
            for key, rows in episode.observation.items():
                np.testing.assert_array_equal(out.observation[key][0], rows[step])
            sim.step([0], [episode.action[step]] if episode.action.dtype == object else episode.action[step][None], out)
            assert out.reward[0] == episode.reward[step]
            assert (out.terminated[0], out.success[0]) == (episode.terminated[step], episode.success[step])
        for key, rows in episode.observation.items():
            np.testing.assert_array_equal(out.observation[key][0], rows[-1])


def test_domains_have_recordings_of_their_own_and_training_does_not_notice(tmp_path: Path) -> None:
    plain, recorded = (run(tmp_path / str(share), *DOMAINS, "total_steps=250", f"record.share={share}") for share in (0, 1))
    one, other = load_checkpoint(plain), load_checkpoint(recorded)
    assert one.step == other.step
    assert all(torch.equal(one.policy[name], other.policy[name]) for name in one.policy)
    assert not (plain / "episodes").exists()
    *_, last = read_metrics(recorded)
    for domain, make in MAKERS.items():
        recording = open_recording(recorded / "episodes" / domain)
        # Groups of two; those that were still being played at the end may have members that ended.
        assert len(recording) >= 2 * last[f"domains/{domain}/groups_consumed"] > 0
        assert recording.info.sim["name"] == {"lake": "frozenlake", "pole": "cartpole"}.get(domain, domain)
        play_again(make(), recording)
        for episode in recording:
            assert episode.log_prob is not None
            assert (episode.log_prob < 0).all()
            assert episode.policy_version is not None
            assert len(episode.policy_version) == episode.num_steps


@pytest.mark.parametrize("max_context", [8192, 220], ids=["to its end", "until its prompt is too long"])
def test_turns_that_call_tools_are_no_steps(tmp_path: Path, max_context: int) -> None:
    config = dataclasses.replace(
        PLAIN, strategy="full", tools=("calculator",), tool_options=ToolsConfig(describe=False), max_new_tokens=100
    )
    # Bytes: any text can be written.
    agent = Agent(config, ChatTokenizer.read(make_tiny_model(tmp_path / "model", [])), instruction=None, max_context=max_context)
    seen: list[str] = []

    def answer(text: str) -> str:
        if "<tool_response>" in text:
            return frozenlake.player(seen[-1])
        seen.append(text)
        if max_context == 220 and len(seen) % 2:  # the first step of an episode; what the second one's tool says has no room
            return frozenlake.player(text)
        return call("calculator", expression="6 * 7")

    recorded = RecordConfig(share=1.0)
    with EnvManager(LAKE, 1, num_workers=1, autoreset=False) as manager:
        info = RecordingInfo(manager.spec, {"name": "lake"}, {"kind": "training"})
        recorder = TrainingRecorder(tmp_path / "episodes", info, recorded, seeds=EpisodeSeeds.training(0), num_slots=1)
        collector = make_collector(manager, agent, scripted(agent, answer), group_size=1, groups_per_step=2)
        collector.recorder = recorder
        played = [episode for group in collect(collector) for episode in group.episodes]
        recorder.close()
    agent.close()
    recording = open_recording(tmp_path / "episodes")
    assert len(recording) == len(played) == 2
    play_again(LAKE.make(1), recording)
    for episode, written in zip(played, recording, strict=True):
        assert isinstance(episode, AgentEpisode)
        steps = [turn for turn in episode.turns if not isinstance(turn.parsed, ToolRequest)]
        assert len(steps) < len(episode.turns)
        assert written.action.tolist() == [turn.parsed.text for turn in steps]
        assert written.metadata["answers"] == [turn.answer for turn in steps]
        assert bool(written.truncated[-1]) == episode.truncated == (max_context == 220)
        assert written.log_prob is not None
        np.testing.assert_allclose(written.log_prob[:, 0], [turn.log_prob.sum() for turn in steps], rtol=1e-5, atol=1e-6)
