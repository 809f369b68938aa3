"""Rewards from outside the simulator: what is added where, what fails, and that playing goes on meanwhile."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import numpy as np
import pytest

from embodied_rl.config import GroupsConfig, SimConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.random_backend import RandomGenerator
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.group_collector import GroupCollector
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.rollout.judge import OpenAIJudge, transcript
from embodied_rl.rollout.scoring import Score, ThreadScorer, checked_score, load_score, rewarded
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import Episode

CARTPOLE = SimConfig(name="cartpole", target="embodied_rl.sim.robots.gymnasium:make", task="CartPole-v1", num_slots=4, num_workers=2)


def episode(rewards: list[float], *, chunks: bool = False) -> Episode:
    length = len(rewards)
    return Episode(
        observation={"state": np.zeros((length, 2), np.float32)},
        action=np.zeros((length, 1), np.float32),
        log_prob=np.zeros((length, 1), np.float32),
        reward=np.asarray(rewards, np.float32),
        terminated=True,
        truncated=False,
        success=False,
        seed=1,
        domain="toy",
        policy_version=np.zeros(length, np.int64),
        final_observation={"state": np.zeros(2, np.float32)},
        executed=np.array([[True, True]] * (length - 1) + [[True, False]]) if chunks else None,
        chunk_reward=np.array([[reward / 2, reward / 2] for reward in rewards[:-1]] + [[rewards[-1], 0.0]], np.float32) if chunks else None,
        metadata={"greedy": False},
    )


def test_a_score_is_added_to_the_last_message() -> None:
    given = episode([1.0, 2.0, 3.0])
    scored = rewarded(given, 0.5, "add")
    assert scored.reward.tolist() == [1.0, 2.0, 3.5]
    assert dict(scored.metadata) == {"greedy": False, "score": 0.5, "simulator_return": 6.0}
    assert given.reward.tolist() == [1.0, 2.0, 3.0], "what was given is as it was"


def test_a_score_replaces_the_simulators_rewards() -> None:
    assert rewarded(episode([1.0, 2.0, 3.0]), 0.5, "replace").reward.tolist() == [0.0, 0.0, 0.5]


@pytest.mark.parametrize(("combine", "expected"), [("add", [[1.0, 1.0], [3.5, 0.0]]), ("replace", [[0.0, 0.0], [0.5, 0.0]])])
def test_of_a_chunk_the_last_step_that_was_taken_gets_it(combine: str, expected: list[list[float]]) -> None:
    scored = rewarded(episode([2.0, 3.0], chunks=True), 0.5, combine)  # type: ignore[arg-type]
    assert scored.chunk_reward is not None
    assert scored.chunk_reward.tolist() == expected
    np.testing.assert_array_equal(scored.chunk_reward.sum(axis=1), scored.reward)


def wait_for(scorer: ThreadScorer, count: int) -> dict[int, Episode | str]:
    found: dict[int, Episode | str] = {}
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        scorer.wait(0.1)
        found |= dict(scorer.ready())
    return found


def make(score: Score, *, num_workers: int = 1, timeout_s: float = 60.0) -> ThreadScorer:
    return ThreadScorer(score, num_workers=num_workers, combine="add", timeout_s=timeout_s)


def test_what_a_function_raises_is_the_reason_why_there_is_no_score() -> None:
    def score(given: Episode) -> float:
        if given.num_messages == 2:
            raise ArithmeticError("no opinion")
        return float("nan") if given.num_messages == 3 else 1.0

    scorer = make(score)
    for rewards in ([1.0], [1.0, 1.0], [1.0, 1.0, 1.0]):
        scorer.submit(episode(rewards))
    found = wait_for(scorer, 3)
    assert isinstance(found[0], Episode)
    assert found[1] == "ArithmeticError: no opinion"
    assert "nan" in str(found[2])
    assert scorer.metrics()["reward_worker/failed"] == 2.0
    scorer.close()


def test_workers_score_side_by_side() -> None:
    """Three episodes meet at a barrier: with fewer than three threads none of them would ever pass."""
    barrier = threading.Barrier(3, timeout=60)

    def score(given: Episode) -> float:
        barrier.wait()
        return 1.0

    scorer = make(score, num_workers=3)
    for _ in range(3):
        scorer.submit(episode([1.0]))
    assert all(isinstance(part, Episode) for part in wait_for(scorer, 3).values())
    scorer.close()


def test_what_takes_too_long_is_given_up_and_its_late_score_ignored() -> None:
    release = threading.Event()

    def score(given: Episode) -> float:
        release.wait(60)
        return 1.0

    scorer = make(score, timeout_s=0.05)
    number = scorer.submit(episode([1.0]))
    assert "no score after 0.05 s" in str(wait_for(scorer, 1)[number])
    release.set()
    scorer.wait(60)
    assert scorer.ready() == []
    scorer.close()


def test_a_scorer_that_is_closed_scores_nothing_that_still_waits() -> None:
    begun, release, scored = threading.Event(), threading.Event(), list[Episode]()

    def score(given: Episode) -> float:
        scored.append(given)
        begun.set()
        release.wait(60)
        return 1.0

    scorer = make(score)
    for _ in range(3):
        scorer.submit(episode([1.0]))
    assert begun.wait(60)
    scorer.close()
    release.set()
    for thread in scorer._threads:
        thread.join(60)
    assert len(scored) == 1


def collector_with(score: Score, *, max_retries: int = 2) -> tuple[EnvManager, GroupCollector]:
    manager = EnvManager.from_config(CARTPOLE, EpisodeSeeds.training(1), autoreset=False)
    config = GroupsConfig(group_size=2, groups_per_step=4, max_retries=max_retries)
    queue = GroupQueue(config, seed=1, domains=DomainMixture.single(manager.spec.task))
    collector = GroupCollector(manager, RandomGenerator(manager.spec), queue, seed=1)
    collector.scorer = make(score)
    return manager, collector


def test_groups_hold_scored_episodes_and_playing_goes_on_meanwhile() -> None:
    """While the first episode is being scored, others are played to their ends: the scorer waits until it has seen that."""
    several = threading.Event()

    def score(given: Episode) -> float:
        assert several.wait(60), "nothing was played while an episode was scored"
        return 100.0

    manager, collector = collector_with(score)
    with manager:
        submit = collector.scorer.submit  # type: ignore[union-attr]
        submitted: list[int] = []

        def note(given: Episode) -> int:
            submitted.append(submit(given))
            if len(submitted) == 3:
                several.set()
            return submitted[-1]

        collector.scorer.submit = note  # type: ignore[method-assign, union-attr]
        groups = collector.next_groups(0)
    episodes = [part for group in groups for part in group.episodes]
    assert len(episodes) == 8
    for part in episodes:
        # CartPole gives one point a step.
        assert part.episode_return == part.num_messages + 100.0
        assert part.metadata["simulator_return"] == part.num_messages
    collector.scorer.close()  # type: ignore[union-attr]


def test_an_episode_without_a_score_is_played_again() -> None:
    failed: list[int] = []

    def score(given: Episode) -> float:
        if not failed:
            failed.append(1)
            raise ConnectionError("the judge is away")
        return 0.0

    manager, collector = collector_with(score, max_retries=1)
    with manager:
        groups = collector.next_groups(0)
    counts = collector.queue.episode_counts()
    assert (len(groups), counts.failed, counts.accepted, counts.started) == (4, 1, 8, 9)
    collector.scorer.close()  # type: ignore[union-attr]


def test_names_of_functions_and_of_what_makes_them() -> None:
    assert checked_score(load_score("tests.roles.scores:short_is_good", {}), episode([1.0, 1.0])) == -0.2
    slow: Callable[[Episode], float] = load_score("tests.roles.scores:Slow", {"seconds": 0, "factor": 3.0})
    assert slow(episode([1.0, 1.0])) == 6.0
    with pytest.raises(UserError, match=r"kwargs.*do not fit.*Slow"):
        load_score("tests.roles.scores:Slow", {"pace": 1})
    with pytest.raises(UserError, match="scores"):
        load_score("tests.roles.scores:does_not_exist", {})


class Judge(BaseHTTPRequestHandler):
    """A server that speaks chat completions; answers with the number of steps that the question names."""

    asked: ClassVar[list[dict[str, Any]]] = []
    answer: ClassVar[str] = "I think it is a {steps}."

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append({"path": self.path, **body})
        found = re.search(r"took (\d+) steps", body["messages"][0]["content"])
        assert found is not None
        text = type(self).answer.format(steps=found[1])
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def judge_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Judge.asked.clear()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_model_over_http_scores_episodes(judge_url: str) -> None:
    score = load_score("embodied_rl.rollout.judge:OpenAIJudge", {"base_url": judge_url, "model": "strict", "highest": 20.0, "scale": 2.0})
    assert checked_score(score, episode([1.0] * 5)) == 2.0 * 5 / 20
    asked = Judge.asked[0]
    assert (asked["path"], asked["model"], asked["temperature"]) == ("/v1/chat/completions", "strict", 0.0)
    question = asked["messages"][0]["content"]
    assert '"toy"' in question
    assert "Step 5: reward 1" in question
    assert "add up to 5, and it says that it did not succeed" in question
    with pytest.raises(ValueError, match="outside of 0 to 20"):
        score(episode([1.0] * 21))


def test_a_judge_sees_the_texts_of_a_dialogue() -> None:
    said = Episode(
        observation={"text": np.array(["Which way?", "A wall."], object)},
        action=np.array(["left", "right"], object),
        log_prob=np.zeros((2, 1), np.float32),
        reward=np.zeros(2, np.float32),
        terminated=True,
        truncated=False,
        success=True,
        seed=1,
        domain="maze",
        policy_version=np.zeros(2, np.int64),
        final_observation={"text": np.array("Out.", object)},
    )
    assert transcript(said) == "Environment: Which way?\nAgent: left\nEnvironment: A wall.\nAgent: right"


def test_a_judge_that_cannot_be_asked_is_refused() -> None:
    with pytest.raises(UserError, match="http://"):
        OpenAIJudge("localhost:1", "model")
    with pytest.raises(UserError, match=r"names \{score\}.*domain"):
        OpenAIJudge("http://127.0.0.1:1", "model", prompt="Give a {score}.")
    with pytest.raises(UserError, match="a brace without a partner"):
        OpenAIJudge("http://127.0.0.1:1", "model", prompt="Give a { for {episode}.")
    with pytest.raises(UserError, match="lowest < highest"):
        OpenAIJudge("http://127.0.0.1:1", "model", lowest=1.0, highest=1.0)
