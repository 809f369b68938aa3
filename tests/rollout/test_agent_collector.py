"""Groups of text episodes, played by real simulator processes and real token backends."""

from __future__ import annotations

import dataclasses
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from embodied_rl.agents.agent import Agent
from embodied_rl.agents.parsing import InvalidAction
from embodied_rl.agents.turns import AgentEpisode, rows_of
from embodied_rl.config import AgentConfig
from embodied_rl.generation.tokens import Completion, Failure, GenerationRequest, RandomTokens, ScriptedTokens
from embodied_rl.generation.torch_tokens import TorchTokens
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.rollout.agent_generator import AgentGenerator
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.rollout.groups import BatchNeverFullError, group_seed
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.text import frozenlake
from embodied_rl.types import StepBuffers
from tests.agents.samples import LAKE, PLAIN, collect, make_collector, random_backend, tiny_policy, tokenizer, told


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Agent:
    config = dataclasses.replace(PLAIN, invalid_penalty=0.25)
    return Agent(config, tokenizer(tmp_path_factory.mktemp("tokenizer")), instruction=None, max_context=512)


@pytest.fixture(scope="module")
def lake() -> Iterator[EnvManager]:
    """Four lakes in a process of their own."""
    with EnvManager(LAKE, 4, num_workers=1, autoreset=False) as manager:
        yield manager


def test_an_episode_is_what_the_game_makes_of_its_actions(agent: Agent, lake: EnvManager) -> None:
    groups = collect(make_collector(lake, agent, random_backend(agent)))
    assert [group.number for group in groups] == [0, 1, 2]
    sim, invalid = frozenlake.make(1), 0
    for group in groups:
        assert group.seed == group_seed(7, "lake", group.number)
        for episode in group.episodes:
            assert isinstance(episode, AgentEpisode)
            out = StepBuffers.allocate(sim.spec, 1)
            sim.reset([0], [group.seed], out)
            for turn, action, reward in zip(episode.turns, episode.action, episode.reward, strict=True):
                assert turn.observation == out.observation["text"][0]
                assert agent.tokenizer.decode(turn.prompt_ids) == turn.observation + "\n"
                sim.step([0], [action], out)
                wrong = isinstance(turn.parsed, InvalidAction)
                assert action == ("" if wrong else turn.answer)
                assert reward == turn.reward == out.reward[0] - 0.25 * wrong
                # One of five answers, then its end for certain.
                np.testing.assert_allclose(turn.log_prob, [np.log(1 / 5), 0.0], rtol=1e-6)
                invalid += wrong
            assert str(episode.final_observation["text"]) == out.observation["text"][0]
            assert episode.next_prompt is None
            assert (episode.terminated, episode.truncated, episode.success) == (out.terminated[0], out.truncated[0], out.success[0])
            assert episode.game_return == pytest.approx(episode.episode_return + 0.25 * sum(episode.action == ""))
    assert invalid > 0


@pytest.mark.parametrize("strategy", ["memory", "full"])
def test_a_step_limit_leaves_the_prompt_that_would_follow(agent: Agent, lake: EnvManager, strategy: Literal["memory", "full"]) -> None:
    """Nothing moves after an invalid answer, so that the limit ends every episode; a critic values the state after the last answer."""
    speaking = Agent(dataclasses.replace(PLAIN, strategy=strategy), agent.tokenizer, instruction=None, max_context=2048)
    backend = RandomTokens(choices=[speaking.answer_ids("x")])
    (group,) = collect(make_collector(lake, speaking, backend, groups_per_step=1, has_critic=True))
    (unread,) = collect(make_collector(lake, speaking, backend, groups_per_step=1))
    for episode, without in zip(group.episodes, unread.episodes, strict=True):
        assert isinstance(episode, AgentEpisode)
        assert isinstance(without, AgentEpisode)
        assert episode.truncated
        assert without.truncated
        assert without.next_prompt is None, "no critic reads it"
        assert episode.next_prompt is not None
        (token_ids, images), last = episode.next_prompt, episode.turns[-1]
        known = np.concatenate([last.prompt_ids, last.token_ids]) if strategy == "full" else last.prompt_ids[:0]
        assert token_ids[: len(known)].tolist() == known.tolist()
        assert agent.tokenizer.decode(token_ids[len(known) :]).strip() == str(episode.final_observation["text"]).strip()
        assert images == ()


def test_episodes_depend_on_the_seeds_alone(agent: Agent, lake: EnvManager) -> None:
    base = told(collect(make_collector(lake, agent, random_backend(agent)), 2))
    with EnvManager(LAKE, 3, num_workers=2, autoreset=False) as other:
        assert told(collect(make_collector(other, agent, random_backend(agent)), 2)) == base
        # Whatever is ready moves on: the same episodes, since every request has its own seed.
        assert told(collect(make_collector(other, agent, random_backend(agent), min_ready=1), 2)) == base


def test_sampled_log_probs_are_those_of_the_policy_in_every_strategy(tmp_path: Path, lake: EnvManager) -> None:
    policy = tiny_policy(tmp_path / "model", spread=0.3)
    strategies: list[tuple[AgentConfig, bool]] = [
        (PLAIN, False),
        (dataclasses.replace(PLAIN, strategy="full"), True),
        (dataclasses.replace(PLAIN, strategy="full", chat=True), True),
        (dataclasses.replace(PLAIN, strategy="last_k", last_turns=1), False),
        (dataclasses.replace(PLAIN, strategy="summarised", template="{summary}{observation}"), False),
        (dataclasses.replace(PLAIN, strategy="full", temperature=0.6), True),
        (dataclasses.replace(PLAIN, strategy="full", temperature=0.6, top_p=0.9), True),
    ]
    for config, one_row in strategies:
        speaking = Agent(config, policy.tokenizer, instruction=None, max_context=2048)
        groups = collect(make_collector(lake, speaking, TorchTokens(policy.generation_model(), max_batch=4), groups_per_step=2))
        for episode in (episode for group in groups for episode in group.episodes):
            assert isinstance(episode, AgentEpisode)
            rows = rows_of(episode.turns)
            assert (len(rows) == 1) == (one_row or len(episode.turns) == 1 or (config.strategy == "last_k" and len(episode.turns) == 2))
            with torch.no_grad():
                evaluated = policy.evaluate([TokenSequence(row.token_ids, row.mask, temperature=row.temperature) for row in rows])
            # Top-p cuts tokens off, so the model's own distribution is trained.
            assert {row.temperature for row in rows} == {config.temperature if config.top_p == 1.0 else 1.0}
            for number, row in enumerate(rows):
                found = evaluated.log_prob[number, : len(row.mask)].numpy()
                np.testing.assert_allclose(found[row.mask], row.log_prob[row.mask], atol=1e-4)


def test_lockstep_with_a_model_is_repeatable_to_the_bit(tmp_path: Path, lake: EnvManager) -> None:
    policy = tiny_policy(tmp_path / "model", spread=0.3)
    speaking = Agent(PLAIN, policy.tokenizer, instruction=None, max_context=512)

    def once() -> list[list[float]]:
        groups = collect(make_collector(lake, speaking, TorchTokens(policy.generation_model(), max_batch=4)))
        return [turn.log_prob.tolist() for group in groups for e in group.episodes if isinstance(e, AgentEpisode) for turn in e.turns]

    assert once() == once()


def test_a_restart_leaves_nothing_that_prompts_could_share(tmp_path: Path, lake: EnvManager) -> None:
    # As after an evaluation: a resumed run, whose backend is new, must run the same forwards.
    policy = tiny_policy(tmp_path / "model", spread=0.3)
    speaking = Agent(dataclasses.replace(PLAIN, strategy="full"), policy.tokenizer, instruction=None, max_context=2048)

    def sizes(*, disturbed: bool) -> list[torch.Size]:
        model, seen = policy.generation_model(), list[torch.Size]()
        backend = TorchTokens(model, max_batch=4, least_shared=8)
        collector = make_collector(lake, speaking, backend, groups_per_step=2)
        if disturbed:
            collector.next_groups(0)
            collector.restart(make_collector(lake, speaking, backend, groups_per_step=2).queue)
        model.get_input_embeddings().register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape))
        collect(collector)
        return seen

    untouched = sizes(disturbed=False)
    assert sizes(disturbed=True) == untouched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchTokens, "forget", lambda self: None)
        assert sizes(disturbed=True) != untouched


def test_members_that_are_not_needed_are_stopped_and_their_answers_aborted(agent: Agent, lake: EnvManager) -> None:
    collector = make_collector(lake, agent, random_backend(agent), redundancy=2, groups_per_step=2, min_ready=1)
    groups = collect(collector, 2)
    assert [group.num_episodes for group in groups] == [2] * 4
    counts = collector.queue.episode_counts()
    assert counts.accepted == 8
    assert counts.abandoned > 0


def test_a_first_prompt_that_is_too_long_fails_the_episode_and_is_told(agent: Agent, lake: EnvManager) -> None:
    short = Agent(dataclasses.replace(PLAIN, max_prompt_tokens=5), agent.tokenizer, instruction=None, max_context=512)
    with pytest.raises(BatchNeverFullError, match="episode failed: its first prompt was too long"):
        collect(make_collector(lake, short, random_backend(short), max_retries=0, max_rejected_per_step=3))


def test_answers_that_are_almost_never_an_action_are_told_once(agent: Agent, lake: EnvManager) -> None:
    speaking = Agent(dataclasses.replace(PLAIN, answer="tag", actions=()), agent.tokenizer, instruction=None, max_context=512)
    collector = make_collector(lake, speaking, ScriptedTokens(lambda _: agent.tokenizer.encode("up")), groups_per_step=2)
    said: list[warnings.WarningMessage] = []
    for version in range(2):
        collector.next_groups(version)
        with warnings.catch_warnings(record=True) as said_now:
            warnings.simplefilter("always")
            figures = collector.figures()
        assert figures["turns"] >= 32
        assert figures["invalid"] == 1.0
        said += said_now
        collector.backend.load_weights(version + 1, ())
        collector.queue.published(version + 1)
    assert len(said) == 1
    assert "100% of the answers contain no action, mostly because they have no <action>…</action>" in str(said[0].message)


def test_a_conversation_that_grows_too_long_ends_its_episode_as_cut(agent: Agent, lake: EnvManager) -> None:
    config = dataclasses.replace(PLAIN, strategy="full", overflow="end_episode", max_prompt_tokens=70)  # three boards of 20 and two answers
    growing = Agent(config, agent.tokenizer, instruction=None, max_context=512)
    groups = collect(make_collector(lake, growing, random_backend(growing), groups_per_step=6))
    cut = [episode for group in groups for episode in group.episodes if episode.num_messages == 3 and not episode.terminated]
    assert cut
    assert all(episode.truncated for episode in cut)
    assert max(episode.num_messages for group in groups for episode in group.episodes) == 3


class FailingTokens:
    """A backend whose every third answer fails."""

    def __init__(self, inner: object) -> None:
        self._inner, self._count = inner, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        answers = []
        for completion in self._inner.poll(min_ready, timeout_s):  # type: ignore[attr-defined]
            self._count += 1
            failed = self._count % 3 == 0
            answers.append(Completion.failed(completion.request_id, Failure("timeout", "too slow")) if failed else completion)
        return answers


def test_answers_that_fail_are_tried_again_as_another_attempt(agent: Agent, lake: EnvManager) -> None:
    collector = make_collector(lake, agent, FailingTokens(random_backend(agent)), max_retries=200)  # type: ignore[arg-type]
    groups = collect(collector)
    assert len(groups) == 3
    assert collector.queue.episode_counts().failed > 0


def test_a_killed_simulator_is_survived(agent: Agent, lake: EnvManager) -> None:
    collector = make_collector(lake, agent, random_backend(agent), groups_per_step=6)
    submitted = collector.backend.submit
    calls = []

    def submit(requests: Sequence[GenerationRequest]) -> None:
        calls.append(len(requests))
        if len(calls) == 3:
            os.kill(collector.manager.worker_pids()[0], signal.SIGKILL)
        submitted(requests)

    collector.backend.submit = submit  # type: ignore[method-assign]
    assert len(collect(collector)) == 6
    assert len(calls) > 3


# ---- evaluation -----------------------------------------------------------------------------------------------------


def test_evaluation_plays_every_seed_once_with_a_conversation_of_its_own(agent: Agent, lake: EnvManager) -> None:
    growing = Agent(dataclasses.replace(PLAIN, strategy="full"), agent.tokenizer, instruction=None, max_context=2048)
    openings: list[str] = []

    class Listening(AgentGenerator):
        def begin(self, slots) -> None:  # type: ignore[no-untyped-def]
            super().begin(slots)
            openings.extend(str(slot) for slot in slots)

    found = [evaluate(lake, Listening(growing, random_backend(growing, seed=3)), 8, first_seed=11)]
    with EnvManager(LAKE, 4, num_workers=1) as autoreset:
        found.append(evaluate(autoreset, Listening(growing, random_backend(growing, seed=3)), 8, first_seed=11))
    for episodes in found:
        assert [episode.seed for episode in episodes] == [2**30 + 11 + number for number in range(8)]
    assert [(e.length, e.episode_return) for e in found[0]] == [(e.length, e.episode_return) for e in found[1]]
    assert len(openings) == 8 + (4 + 8), "a manager that begins episodes by itself begins those beyond the last seed too"


def test_a_greedy_player_of_a_known_word_walks_as_the_game_says(tmp_path: Path, lake: EnvManager) -> None:
    speaking = Agent(PLAIN, tokenizer(tmp_path), instruction=None, max_context=512)

    def script(request: GenerationRequest) -> list[int]:
        assert request.messages is not None
        assert request.temperature == 0.0
        return speaking.answer_ids(frozenlake.player(request.messages[-1]["content"]))

    generator = AgentGenerator(speaking, ScriptedTokens(script))
    assert all(episode.success_once for episode in evaluate(lake, generator, 12))
    assert generator.figures() == {"invalid": 0.0, "dropped": 0.0, "too_long": 0.0}
