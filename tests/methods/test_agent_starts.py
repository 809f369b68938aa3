"""`algorithm.initialized` of language agents: groups that start inside an earlier episode, with its conversation up to there."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.agents.agent import Agent, Prompt
from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.compose import load_train_config
from embodied_rl.config import GroupsConfig, InitializedConfig
from embodied_rl.rollout.agent_collector import AgentCollector
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.groups import BatchNeverFullError, GroupQueue
from embodied_rl.rollout.initialized import StartLibrary, record_expert
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.text import frozenlake
from embodied_rl.train import train
from embodied_rl.types import StepBuffers
from tests.agents.samples import LAKE, PLAIN, random_backend, tokenizer
from tests.golden.runs import TEXTS
from tests.methods.experts import LakeExpert
from tests.rollout.test_training_recording import curve
from tests.vla.test_runs import curve as lines


@pytest.fixture(scope="module")
def lake() -> Iterator[EnvManager]:
    with EnvManager(LAKE, 4, num_workers=1, autoreset=False) as manager:
        yield manager


STRATEGIES = [
    PLAIN,
    dataclasses.replace(PLAIN, strategy="full"),
    dataclasses.replace(PLAIN, strategy="full", chat=True),
    dataclasses.replace(PLAIN, strategy="last_k", last_turns=1),
    dataclasses.replace(PLAIN, strategy="memory", last_turns=2),
]


@pytest.mark.parametrize("config", STRATEGIES, ids=["board", "full", "chat", "last_k", "memory"])
@pytest.mark.parametrize("min_ready", [None, 1])
def test_a_conversation_goes_on_as_the_one_it_starts_in(config: Any, min_ready: int | None, lake: EnvManager, tmp_path: Path) -> None:
    agent = Agent(config, tokenizer(tmp_path), instruction=None, max_context=2048)
    options = InitializedConfig(share=1.0, mode="parallel", sources=("expert", "best"), expert="a.b:c", chunk_steps=1)
    starts = StartLibrary(options, seed=3)
    recorded, _ = record_expert(lake, LakeExpert, [11, 12, 13], every=1)
    starts.add([source for source in recorded if source.num_messages > 2])
    assert len(starts.sources) >= 2
    queue = GroupQueue(GroupsConfig(group_size=2, groups_per_step=4), seed=7, domains=DomainMixture.single("lake"))
    collector = AgentCollector(lake, agent, random_backend(agent), queue, seed=7, min_ready=min_ready, starts=starts)
    collector.restart(queue)
    sources = {key: tracked.source for key, tracked in starts.sources.items()}
    inside = 0
    for version in range(3):
        for episode in [episode for group in collector.next_groups(version) for episode in group.episodes]:
            assert isinstance(episode, AgentEpisode)
            start = episode.metadata["start"]
            if start["source"] is None:
                continue
            sources |= {key: tracked.source for key, tracked in starts.sources.items()}
            inside += 1
            source, step = sources[start["source"]], start["step"]
            # Played here, and told to a conversation of this test's.
            sim, conversation = frozenlake.make(1), agent.begin()
            out = StepBuffers.allocate(sim.spec, 1)
            sim.reset([0], [source.seed], out)
            for (_, sampled), action in zip(source.said[:step], source.actions[:step], strict=True):
                conversation.prompt(str(out.observation["text"][0]))
                token_ids = np.array(agent.answer_ids(action) if sampled is None else sampled)
                conversation.answered(token_ids, agent.tokenizer.decode(token_ids), action)
                sim.step([0], np.array([action], object), out)
            prompt = conversation.prompt(str(out.observation["text"][0]))
            assert isinstance(prompt, Prompt)
            np.testing.assert_array_equal(episode.turns[0].prompt_ids, prompt.token_ids)
        queue.published(version + 1)
        collector.backend.load_weights(version + 1, ())
        starts.commit([])
    assert inside >= 12
    assert starts.replay.num_mismatches == 0
    # Own episodes are started in too, and what they said survives a checkpoint.
    assert any(tracked.source.origin == "own" for tracked in starts.sources.values())
    again = StartLibrary(starts.config, seed=3)
    again.load_state_dict(starts.state_dict([]))
    for key, tracked in starts.sources.items():
        assert [shown for shown, _ in again.sources[key].source.said] == [shown for shown, _ in tracked.source.said]


def test_starts_whose_prompts_are_too_long_are_counted_as_failures(lake: EnvManager, tmp_path: Path) -> None:
    agent = Agent(dataclasses.replace(PLAIN, max_prompt_tokens=4), tokenizer(tmp_path), instruction=None, max_context=2048)
    starts = StartLibrary(InitializedConfig(share=1.0, mode="parallel", sources=("expert",), expert="a.b:c", chunk_steps=1), seed=3)
    starts.add([source for source in record_expert(lake, LakeExpert, [11, 12], every=1)[0] if source.num_messages > 2])
    queue = GroupQueue(GroupsConfig(group_size=1, groups_per_step=2), seed=7, domains=DomainMixture.single("lake"))
    collector = AgentCollector(lake, agent, random_backend(agent), queue, seed=7, starts=starts)
    collector.restart(queue)
    with pytest.raises(BatchNeverFullError, match="its first prompt was too long: more than 4 tokens"):
        collector.next_groups(0)


def test_a_run_starts_inside_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    options = ("share: 0.6", "sources: [expert, success]", "expert: tests.methods.experts:LakeExpert", "expert_episodes: 2")
    words = (*TEXTS, f"algorithm.initialized={{{', '.join(options)}, chunk_steps: 1, min_episodes: 2}}", "agent.strategy=full")
    words = (*words, "checkpoint.every_steps=1", "checkpoint.keep_last=99", "total_steps=250")
    whole = train(load_train_config([*words, f"run_dir={tmp_path / 'whole'}"]))
    last = lines(whole)[-1]
    assert last["initialized/expert_messages"] > 0
    assert last["initialized/mismatched_starts"] == 0
    assert any(key.startswith("initialized/success_from_") for key in last)
    first = sorted((whole / "checkpoints").glob("step_*"))[0]
    resumed = tmp_path / "resumed"
    shutil.copytree(first, resumed / "checkpoints" / first.name)
    train(load_train_config([*words, "resume=auto", f"run_dir={resumed}"]))
    assert len(curve(resumed)) > 1
    figures = ("initialized/sources", "train/loss", "episode/return")
    for one, other in zip(curve(resumed), curve(whole)[-len(curve(resumed)) :], strict=True):
        assert {key: one.get(key) for key in figures} == {key: other.get(key) for key in figures}
