"""Groups of episodes that agent programs play through the agent proxy, for the same queue and learner as all other episodes."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np

from embodied_rl.agents.agent import PromptTokenizer
from embodied_rl.agents.parsing import InvalidAction, ParsedAction, ValidAction
from embodied_rl.agents.turns import AgentEpisode, Turn, episode_of
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.rollout.members import Assignment
from embodied_rl.rollout.program_runner import Played, ProgramFault, ProgramRunner
from embodied_rl.rollout.queue_pump import TICK_EVERY_S, QueuePump
from embodied_rl.serving.agents.captured import CapturedSession, CapturedTurn
from embodied_rl.serving.agents.sessions import SessionSampling

_LOOK_S = 0.25
"""How often it is looked whether running programs are still needed."""
_SEEDS = 29
"""Stream of randomness: the seeds of sessions."""


class ProgramCollector(QueuePump):
    """Fills the queue's groups with the episodes of programs, `num_slots` of them at a time.

    Every session has its own seed, made of the run's seed, the group, the member and the attempt, and every request of it one more:
    what is sampled depends on these, the prompt and the weights.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        queue: GroupQueue,
        tokenizer: PromptTokenizer,
        *,
        num_slots: int,
        seed: int,
        sampling: SessionSampling,
        greedy_member: bool = False,
        faults_file: Path | None = None,
    ) -> None:
        """
        Args:
            sampling: of the answers; its seed does not count.
            faults_file: gets a line for every program that failed.
            greedy_member: member 0 of each group takes the likeliest tokens, and its episode says ``metadata["greedy"]``.
        """
        super().__init__(queue, seed=seed)
        self.runner = runner
        self.faults: list[ProgramFault] = []
        """All of the run so far."""
        self._faults_file = faults_file
        self._tokenizer, self._num_slots, self._sampling, self._greedy_member = tokenizer, num_slots, sampling, greedy_member
        self._turns: dict[Assignment, int] = {}
        self._counts: Counter[str] = Counter()

    def pump(self, patience_s: float = TICK_EVERY_S) -> bool:
        """Start the programs that the queue asks for, and hand in those that ended. False: none is running, and none is being scored."""
        # Model and programs work at the same time: their times are not separated, and no time counts as waited.
        scored = self._take_scores()
        self._start()
        if not self.runner.num_running:
            if self._awaited and self.scorer is not None:
                self.scorer.wait(patience_s)
                self._tick()
            return scored or bool(self._awaited)
        for played in self.runner.wait(min(patience_s, _LOOK_S)):
            self._finish(played)
        self._look()
        self._tick()
        return True

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        """End every running program and go on with another queue."""
        assert queue is not None, "groups are asked for by a queue"
        self.runner.stop_all()
        self._turns.clear()
        self._awaited.clear()
        self.queue = queue

    def figures(self) -> dict[str, float]:
        """Since the last call: programs that ended and those that failed by kind; of the others, seconds, turns and tokens each."""
        counts, self._counts = self._counts, Counter()
        good = max(counts["episodes"] - counts["failed"], 1)
        means = {f"{name}_per_program": counts[name] / good for name in ("turns", "conversations", "answer_tokens", "seconds")}
        failed = {name: float(value) for name, value in sorted(counts.items()) if name.startswith("failed")}
        return {"episodes": float(counts["episodes"]), "failed": 0.0, **failed, **means}

    def metrics(self) -> dict[str, float]:
        """`figures`, as they are logged, and those of the last batch (`batch_figures`) and of its scores."""
        return {**{f"agent/{name}": value for name, value in self.figures().items()}, **self._common_metrics()}

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        while self.runner.num_running < self._num_slots and (whose := self.queue.next_assignment(self.domain)) is not None:
            key = (self.seed, whose.group, whose.member, whose.attempt, _SEEDS)
            seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
            temperature = 0.0 if self._is_greedy(whose) else self._sampling.temperature
            self.runner.start(whose, whose.seed, dataclasses.replace(self._sampling, seed=seed, temperature=temperature))

    def _is_greedy(self, whose: Assignment) -> bool:
        return self._greedy_member and whose.member == 0

    def _finish(self, played: Played) -> None:
        whose = played.tag
        assert isinstance(whose, Assignment), "we named it so"
        self._turns.pop(whose, None)
        self._counts["episodes"] += 1
        if isinstance(played.outcome, ProgramFault):
            self._counts.update({"failed": 1, f"failed_{played.outcome.kind.value}": 1})
            self.faults.append(played.outcome)
            if self._faults_file is not None:
                with self._faults_file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"iteration": self.queue.version, **played.outcome.to_dict()}) + "\n")
            self.queue.failed(whose, str(played.outcome))
            return
        episode = episode_of_session(
            played.outcome,
            self._tokenizer,
            reward=played.reward,
            success=played.reward >= self.runner.options.success_reward,
            seed=played.seed,
            domain=whose.domain,
            greedy=self._is_greedy(whose),
            task=dict(played.task),
        )
        self._counts.update(
            {
                "turns": episode.num_messages,
                "conversations": len(played.outcome.trajectories()),
                "answer_tokens": sum(len(turn.token_ids) for turn in episode.turns),
            }
        )
        self._counts["seconds"] += played.seconds  # type: ignore[assignment]
        self._hand_in(whose, episode)

    def _look(self) -> None:
        """Stop programs that are not needed any more, and report to the queue those that have moved on."""
        for whose in self.runner.tags:
            assert isinstance(whose, Assignment), "we named it so"
            if self.queue.should_stop(whose):
                self.runner.stop(whose)
                self._turns.pop(whose, None)
            elif (turns := self.runner.num_turns(whose)) != self._turns.get(whose, 0):
                self._turns[whose] = turns
                self.queue.progressed(whose)


def episode_of_session(
    captured: CapturedSession,
    tokenizer: PromptTokenizer,
    *,
    reward: float,
    success: bool,
    seed: int,
    domain: str,
    greedy: bool = False,
    task: dict[str, object] | None = None,
) -> AgentEpisode:
    """A session as an episode: its turns conversation by conversation, so that its rows are `CapturedSession.trajectories`.

    Turns have the rewards that were given to them; what is left of `reward`, the sum of all, is the last turn's.
    """
    order = [number for path in captured.trajectories() for number in _counted(path.turn)]
    # Turns of no tokens (aborted at once) have nothing that could be learned.
    turns = [_turn(captured, captured.turns[number], tokenizer) for number in order if len(captured.turns[number].sampled_ids)]
    rest = reward - sum(turn.reward for turn in turns)
    turns[-1] = dataclasses.replace(turns[-1], reward=turns[-1].reward + rest, game_reward=turns[-1].reward + rest)
    episode = episode_of(
        turns, terminated=True, truncated=False, success=success, seed=seed, domain=domain, final_text=f"reward {reward:g}", greedy=greedy
    )
    return dataclasses.replace(episode, metadata={**episode.metadata, "task": task or {}, "session": captured.session})


def _counted(turn: np.ndarray) -> list[int]:
    """Turns whose tokens a trajectory's mask holds, in their order there."""
    return [int(number) for number in dict.fromkeys(turn[turn >= 0].tolist())]


def _turn(captured: CapturedSession, turn: CapturedTurn, tokenizer: PromptTokenizer) -> Turn:
    known = 0 if turn.parent is None else len(captured.turns[turn.parent].token_ids)
    answer = tokenizer.decode(turn.sampled_ids)
    parsed: ParsedAction = ValidAction(answer.strip()) if answer.strip() else InvalidAction("empty", answer)
    return Turn(
        observation=tokenizer.decode(turn.prompt_ids[known:]).strip(),
        prompt_ids=turn.prompt_ids,
        token_ids=turn.sampled_ids,
        log_prob=turn.log_prob,
        version=turn.version,
        answer=answer,
        parsed=parsed,
        reward=turn.reward,
        game_reward=turn.reward,
    )
