"""The pump between text environments and a token backend: it plays what the group queue requests and hands in whole episodes.

```
   EnvManager.recv ──▶ prompt ──▶ TokenBackend.submit        a slot waits in one of four places: its simulator's step,
          ▲               ▲              │                   its answer's tokens, its tools, or idle for the queue's next
          │             tools            │                   episode; whatever is ready moves on
          │               ▲              │
          └── send ◀── parse ◀── poll ◀──┘
```
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

import numpy as np

from embodied_rl.agents.agent import Agent, Answer, Conversation, Prompt
from embodied_rl.agents.parsing import InvalidAction, Reason, ToolRequest
from embodied_rl.agents.tools.base import ToolBudget
from embodied_rl.agents.turns import AgentEpisode, Turn, episode_of
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion, Failure, TokenBackend, as_trained
from embodied_rl.rollout.groups import Assignment, GroupQueue
from embodied_rl.rollout.initialized import Start, StartLibrary
from embodied_rl.rollout.observations import copied, stacked
from embodied_rl.rollout.queue_pump import SlotPump
from embodied_rl.sim.simulators import Simulators
from embodied_rl.stopping import waiting
from embodied_rl.types import EpisodeSummary, Observation, StepBatch

MANY = 8
"""Failures in a row (after retries) that count as systematic."""
_OF_THE_PROMPT = ("prompt_too_long",)


class ServerHealth:
    """Counts a backend's failures in a row, so that a run stops when its server is down instead of replaying the same groups for ever."""

    def __init__(self) -> None:
        self._ever_answered = False
        self._in_a_row = 0

    def answered(self) -> None:
        """Note an answer."""
        self._ever_answered, self._in_a_row = True, 0

    def failed(self, failure: Failure | None) -> None:
        """Note a failed request; None: its log-probabilities are missing.
        Raises UserError: many requests failed, and none was ever answered."""
        if failure is None or failure.kind in _OF_THE_PROMPT:
            return
        self._in_a_row += 1
        if self._in_a_row % MANY:
            return
        if not self._ever_answered:
            raise UserError(f"The token server answered none of the first {self._in_a_row} requests ({failure}). Is this its address?")
        warnings.warn(
            f"The token server did not answer the last {self._in_a_row} requests ({failure}); the run waits for it.", stacklevel=2
        )


_FEW_TURNS, _ALMOST_ALL = 32, 0.9
"""Number of turns, and share of answers without an action among them, that count as systematic."""
_GLANCE_S = 0.002
"""Seconds to wait for one side while the other may be ready first."""
_SEEDS = 23
"""Stream of randomness for the seeds of requests."""


@dataclass
class _Playing:
    """Running episode of a slot."""

    assignment: Assignment
    conversation: Conversation
    budget: ToolBudget
    turns: list[Turn] = field(default_factory=list)
    observation: str = ""
    images: list[np.ndarray] = field(default_factory=list)
    """All images shown so far."""
    prompt: Prompt | None = None
    temperature: float = 1.0
    """Of the answer to `prompt`."""
    answered: tuple[Completion, Answer] | None = None
    """Answer to `prompt`, whose action is at the simulator, or whose calls are at the tools."""
    seen: list[dict[str, Any]] | None = None
    """{key: observation} before each step of the simulator, and after the last one if the agent no longer answered it; None: the episode is
    not recorded."""
    stepped: dict[int, bool] = field(default_factory=dict)
    """{number of a turn: success of its step}; a turn that calls tools is no step of the simulator."""
    start: Start | None = None
    """Start inside another episode; None: an ordinary start."""
    success_at: int | None = None
    """Turns up to the first success; None: no success yet."""


class AgentCollector(SlotPump[_Playing]):
    """Fills the queue's groups with `AgentEpisode`s, from a manager made with ``autoreset=False`` and a token backend; idle slots stand
    still.

    With ``min_ready=None`` all slots move in lockstep, and samples depend only on the seeds: each request has its own seed, made of the
    run's seed, the group, the member, the attempt and the turn. With a number, the collector moves whatever is ready.
    """

    def __init__(
        self,
        manager: Simulators,
        agent: Agent,
        backend: TokenBackend,
        queue: GroupQueue,
        *,
        seed: int,
        min_ready: int | None = None,
        trained: bool = True,
        has_critic: bool = False,
        temperature: float | None = None,
        starts: StartLibrary | None = None,
    ) -> None:
        """
        Args:
            trained: False: no learner uses the episodes, so answers without tokens are accepted and log-probabilities are 0.
            has_critic: whether a critic values the prompt that follows a truncated episode (`AgentEpisode.next_prompt`).
            temperature: sampling temperature in place of the agent's.
            starts: see `SlotPump`.
        """
        super().__init__(manager, queue, seed=seed, min_ready=min_ready, starts=starts)
        self.agent, self.backend = agent, backend
        self._trained, self._has_critic, self._temperature = trained, has_critic, temperature
        self._requests: dict[int, int] = {}  # {request: slot}
        self._tools: dict[int, Future[str]] = {}  # {slot: result of its tool calls}
        self._next_id = 0
        self._counts: Counter[str] = Counter()
        self._server_health = ServerHealth()
        self._warned_of_invalid = False

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        super().restart(queue)
        self.backend.abort(list(self._requests))
        self.backend.forget()
        self._requests.clear()
        for future in self._tools.values():
            future.cancel()
        self._tools.clear()

    def figures(self) -> dict[str, float]:
        """Figures since the last call: turns, prompt and answer tokens per turn, shares of invalid answers by reason and of tool calls, and
        the use of each tool (`Toolbox.figures`)."""
        counts, self._counts = self._counts, Counter()
        turns = max(counts["turns"], 1)
        if not self._warned_of_invalid and turns >= _FEW_TURNS and counts["invalid"] >= _ALMOST_ALL * turns:
            self._warned_of_invalid = True
            warnings.warn(self._about_invalid(counts), stacklevel=2)
        shares = {name: value / turns for name, value in counts.items() if name != "turns"}
        used = {} if self.agent.tools is None else {"tool_turns": 0.0, **self.agent.tools.figures()}
        return {"turns": float(counts["turns"]), "invalid": 0.0, "dropped": 0.0, **used, **shares}

    def _about_invalid(self, counts: Counter[str]) -> str:
        config, share = self.agent.config, counts["invalid"] / counts["turns"]
        why = {
            "no_tag": f"they have no <{config.tag}>…</{config.tag}>: ask for it in agent.system, or set agent.answer=word",
            "unknown_action": (
                "they are not in agent.actions: list the actions in agent.system, or set agent.answer=tag, which lets the model think first"
            ),
            "cut": f"agent.max_new_tokens={config.max_new_tokens} cut them off",
        }
        most = max(get_args(Reason), key=lambda reason: counts[f"invalid_{reason}"])
        return f"{share:.0%} of the answers contain no action, mostly because {why.get(most, f'of this: {most}')} (docs/agents.md)."

    # ---- episodes ---------------------------------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return bool(self._requests or self._tools)

    def _new(self, assignment: Assignment, start: Start | None) -> _Playing:
        seen: list[dict[str, Any]] | None = None if self.recorder is None or start is not None else []
        return _Playing(assignment, self.agent.begin(), self.agent.budget(), seen=seen, start=start)

    def _took_up(self, seen: Mapping[int, dict[str, Any]]) -> None:
        for slot, shown in seen.items():
            playing = self._playing[slot]
            self._repeat(playing)
            self._look(playing, {key: stacked([value]) for key, value in shown.items()}, 0)
        self._ask({slot: self._playing[slot].conversation.prompt(self._playing[slot].observation) for slot in sorted(seen)})

    def _repeat(self, playing: _Playing) -> None:
        """Replay the conversation of the source episode up to the start."""
        start, conversation = playing.start, playing.conversation
        assert self._starts is not None, "it gave the start"
        assert start is not None, "it was taken up"
        source = self._starts.source_of(start)
        playing.images.extend(itertools.chain.from_iterable(source.pictures[: start.step]))
        for (shown, sampled), action in zip(source.said[: start.step], source.actions, strict=False):
            token_ids = np.asarray(self.agent.answer_ids(action) if sampled is None else sampled, np.int64)
            conversation.prompt(self.agent.image_inputs.placeholders + shown)
            conversation.answered(token_ids, self.agent.tokenizer.decode(token_ids), action)

    def _look(self, playing: _Playing, observation: Observation, row: int) -> None:
        """Show the agent a row of observations."""
        playing.observation = self.agent.image_inputs.look(observation, row, playing.images)
        if playing.seen is not None:
            playing.seen.append({key: copied(part[row]) for key, part in observation.items()})
        playing.budget.begin_turn()

    def _prompt_after(self, playing: _Playing, observation: Observation, row: int) -> Prompt | None:
        """The prompt that would follow if an episode were not over: a critic values it."""
        text = self.agent.image_inputs.look(observation, row, playing.images)
        return self.agent.show(playing.conversation.prompt(text), playing.images)

    def _finish(
        self,
        slot: int,
        *,
        terminated: bool,
        truncated: bool,
        final_seen: dict[str, Any] | None = None,
        summary: EpisodeSummary | None = None,
        next_prompt: Prompt | None = None,
    ) -> None:
        """End an episode. `final_seen`: the simulator's last observation, None if the agent saw it; `summary`: None if the simulator goes
        on; `next_prompt`: that of a truncated episode, for a critic."""
        playing = self._playing[slot]
        self._stop(slot)
        if not playing.turns:
            limit = f"more than {self.agent.prompts.limit} tokens (see agent.max_prompt_tokens)"
            self.queue.failed(playing.assignment, f"its first prompt was too long: {limit}")
            return
        episode: AgentEpisode = episode_of(
            playing.turns,
            terminated=terminated,
            truncated=truncated,
            success=playing.success_at is not None,
            seed=playing.assignment.seed,
            domain=playing.assignment.domain,
            final_text=playing.observation if final_seen is None else str(final_seen["text"]),
            greedy=playing.assignment.greedy,
        )
        if playing.seen is not None and self.recorder is not None and playing.stepped:
            seen = playing.seen if final_seen is None else [*playing.seen, final_seen]
            turns, success = [playing.turns[number] for number in playing.stepped], list(playing.stepped.values())
            self.recorder.finished_turns(playing.assignment, turns, seen, success, terminated=terminated, truncated=truncated)
        after = (next_prompt.token_ids, next_prompt.images) if next_prompt is not None else None
        episode = replace(episode, metadata={**episode.metadata, **self._start_metadata(playing.start)}, next_prompt=after)
        self._hand_in(playing.assignment, episode, partial(self._taken, playing, summary))

    def _taken(self, playing: _Playing, summary: EpisodeSummary | None) -> None:
        """Tell the library of starts about an episode that the queue accepted."""
        if self._starts is not None:
            turns = playing.turns[: playing.success_at]
            given, marks = [turn.parsed.text for turn in turns], self.agent.image_inputs.placeholders
            said = [(turn.observation.removeprefix(marks), turn.token_ids) for turn in turns]
            seen = {at: {"text": text} for at, (text, _) in enumerate(said)}
            count, before = len(self.agent.image_inputs.keys), 0 if playing.start is None else playing.start.step
            places = [count * (before + turn) for turn in range(len(turns))]
            pictures = [tuple(playing.images[place : place + count]) for place in places]
            self._starts.played(playing.assignment, playing.start, summary, given=given, seen=seen, said=said, pictures=pictures)

    # ---- the simulators' side ---------------------------------------------------------------------------------------

    def _take_steps(self, batch: StepBatch) -> None:
        asking: list[int] = []
        for row, slot, playing, summary in self._outcomes(batch):
            if playing.answered is not None:
                self._note_turn(playing, float(batch.reward[row]), success=bool(batch.success[row]))
                playing.stepped[len(playing.turns) - 1] = bool(batch.success[row])
            if summary is not None and (why := summary.final_info.get("failure")):
                # An episode without a score has failed; its reward is not 0.
                self._counts["unscored"] += 1
                self._fail(slot, playing.assignment, str(why))
            elif summary is not None:
                ends = {"terminated": bool(batch.terminated[row]), "truncated": bool(batch.truncated[row])}
                seen = {key: copied(part[row]) for key, part in batch.final_observation.items()}
                cut = self._has_critic and ends["truncated"] and not ends["terminated"]
                after = self._prompt_after(playing, batch.final_observation, row) if cut else None
                self._finish(slot, **ends, final_seen=seen, summary=summary, next_prompt=after)
            elif self.queue.should_stop(playing.assignment):
                self._stop(slot)
            else:
                self._look(playing, batch.observation, row)
                asking.append(slot)
        self._ask({slot: self._playing[slot].conversation.prompt(self._playing[slot].observation) for slot in asking})

    def _note_turn(self, playing: _Playing, reward: float, *, success: bool) -> None:
        assert playing.answered is not None, "an action was sent"
        assert playing.prompt is not None, "it was answered"
        (completion, answer), playing.answered = playing.answered, None
        if success and playing.success_at is None:
            playing.success_at = len(playing.turns) + 1
        drawn = completion.log_prob, completion.sampling_log_prob
        log_prob, temperature = as_trained(*drawn, playing.temperature, self.agent.config.top_p, self.agent.config.top_k)
        playing.turns.append(
            Turn(
                observation=playing.observation,
                prompt_ids=playing.prompt.token_ids,
                token_ids=completion.token_ids,
                log_prob=log_prob,
                version=completion.version,
                answer=answer.text,
                parsed=answer.parsed,
                reward=reward - (self.agent.config.invalid_penalty if isinstance(answer.parsed, InvalidAction) else 0.0),
                game_reward=reward,
                dropped=playing.prompt.dropped,
                images=playing.prompt.images,
                temperature=temperature,
            )
        )
        self.queue.progressed(playing.assignment)

    # ---- the model's side -------------------------------------------------------------------------------------------

    def _ask(self, prompts: Mapping[int, Prompt | None]) -> None:
        """Request the answers to {slot: prompt}."""
        requests = []
        for slot, without_images in prompts.items():
            playing = self._playing[slot]
            prompt = self.agent.show(without_images, playing.images)
            if prompt is None:
                self._counts["too_long"] += 1
                self._finish(slot, terminated=False, truncated=True)
                continue
            playing.prompt = prompt
            seed = self._sampling_seed(playing.assignment, len(playing.turns), _SEEDS)
            temperature = 0.0 if playing.assignment.greedy else self._temperature
            requests.append(self.agent.request(self._next_id, prompt, playing.observation, seed=seed, temperature=temperature))
            playing.temperature = requests[-1].temperature
            self._requests[self._next_id] = slot
            self._next_id += 1
        self.backend.submit(requests)

    def _answer(self, patience_s: float) -> None:
        """Read the sampled answers; send the actions and start the tools."""
        if not self._requests:
            return
        self._give_up_superfluous()
        wanted = len(self._requests) if self.min_ready is None else 1
        wait_s = None
        if self.min_ready is not None:
            wait_s = 0.0 if self._in_step else _GLANCE_S if self._tools else patience_s
        actions: dict[int, str] = {}
        for completion in self.backend.poll(min_ready=wanted, timeout_s=wait_s):
            slot = self._requests.pop(completion.request_id, None)
            if slot is None:
                continue  # requested before a restart
            playing = self._playing[slot]
            if completion.finish_reason == "aborted" or self.queue.should_stop(playing.assignment):
                self._stop(slot)
            elif completion.finish_reason == "failed" or (self._trained and not completion.trainable):
                why = "no tokens with log-probabilities" if completion.failure is None else completion.failure.message
                self._fail(slot, playing.assignment, f"its answer failed: {why}")
                self._server_health.failed(completion.failure)
            else:
                self._server_health.answered()
                completion = completion if self._trained else _for_show(completion, playing.assignment.version, self.agent.stop_ids)
                answer = self._read(playing, completion)
                if isinstance(answer.parsed, ToolRequest):
                    assert self.agent.tools is not None, "without tools no answer calls any"
                    self._tools[slot] = self.agent.tools.start(answer.parsed.calls, playing.budget)
                else:
                    playing.conversation.answered(completion.token_ids, answer.text, answer.parsed.text)
                    actions[slot] = answer.parsed.text
        if actions:
            slots = sorted(actions)
            self.manager.send(slots, [actions[slot] for slot in slots])
            self._in_step += len(slots)

    def _read(self, playing: _Playing, completion: Completion) -> Answer:
        assert playing.prompt is not None, "an answer was asked for"
        answer = self.agent.read(completion, playing.budget)
        playing.answered = completion, answer
        counts = {"turns": 1, "prompt_tokens": len(playing.prompt.token_ids), "answer_tokens": completion.num_tokens}
        counts |= {"dropped": int(playing.prompt.dropped > 0)}
        if isinstance(answer.parsed, InvalidAction):
            counts |= {"invalid": 1, f"invalid_{answer.parsed.reason}": 1}
        counts |= {"tool_turns": int(isinstance(answer.parsed, ToolRequest))} if self.agent.tools is not None else {}
        self._counts.update(counts)
        return answer

    def _move_on(self, patience_s: float) -> bool:
        """Add the tools' results as turns without a reward, and request the next answers; in lockstep, wait for all tools, so that no
        request is in flight between two rounds: further ones would join it when the clock lets them. False: there are no results."""
        if not self._tools:
            return False
        with waiting:
            if self.min_ready is not None:
                wait(self._tools.values(), 0.0 if self._in_step or self._requests else patience_s, FIRST_COMPLETED)
            else:
                wait(self._tools.values())
        ready = {slot: self._tools.pop(slot).result() for slot in sorted(self._tools) if self._tools[slot].done()}
        prompts: dict[int, Prompt | None] = {}
        for slot, response in ready.items():
            playing = self._playing[slot]
            if self.queue.should_stop(playing.assignment):
                self._stop(slot)
                continue
            assert playing.answered is not None, "its answer called tools"
            prompts[slot] = playing.conversation.tools_answered(playing.answered[0].token_ids, response)
            self._note_turn(playing, 0.0, success=False)
            playing.observation = response
        self._ask(prompts)
        return bool(ready)

    def _give_up_superfluous(self) -> None:
        """Abort the answers of episodes that the queue no longer needs; `poll` then returns them as aborted."""
        superfluous = [number for number, slot in self._requests.items() if self.queue.should_stop(self._playing[slot].assignment)]
        if superfluous:
            self.backend.abort(superfluous)


def _for_show(completion: Completion, version: int, stop_ids: tuple[int, ...]) -> Completion:
    """Turn a completion that no learner uses into a valid one: at least one token, log-probabilities 0, the current version."""
    token_ids = completion.token_ids if completion.num_tokens else np.array(stop_ids[:1] or (0,), np.int64)
    zeros = np.zeros(len(token_ids), np.float32)
    text = completion.text if completion.num_tokens or completion.text is not None else ""
    versions = np.full(len(token_ids), version, np.int64)
    return replace(completion, token_ids=token_ids, log_prob=zeros, sampling_log_prob=zeros, version=versions, text=text)
