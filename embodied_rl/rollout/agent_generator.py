"""A language agent as a `Generator`, for evaluation and filming: slots act in batches and without noise."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodied_rl.agents.agent import Agent, Answer, Conversation, Prompt
from embodied_rl.agents.parsing import InvalidAction, ToolRequest
from embodied_rl.agents.tools.base import ToolBudget
from embodied_rl.agents.turns import texts
from embodied_rl.errors import UserError
from embodied_rl.generation.base import ActedBatch, QueuedGenerator
from embodied_rl.generation.tokens import Completion, TokenBackend, TokenCache
from embodied_rl.stopping import waiting
from embodied_rl.types import Observation

_FIRST_ID = 2**40
"""First request id; a collector that shares the backend uses smaller ones."""


@dataclass
class _Playing:
    """Running episode of a slot."""

    conversation: Conversation
    budget: ToolBudget
    opening: str | None = None
    """First observation of the episode."""
    images: list[np.ndarray] = field(default_factory=list)
    """All images shown so far."""
    num_turns: int = 0

    def next_seed(self, seed: int, text: str) -> int:
        """Seed of the next request, from the episode's opening and its progress: neither slot nor history matters."""
        self.opening = text if self.opening is None else self.opening
        self.num_turns += 1
        digest = hashlib.blake2b(f"{seed}/{self.num_turns}/{self.opening}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


class AgentGenerator(QueuedGenerator):
    """Generator made of an agent and a token backend.

    A turn whose prompt is too long is answered with the empty text. `figures` reports the counts.
    """

    remembers = True

    def __init__(
        self,
        agent: Agent,
        backend: TokenBackend,
        weights: Callable[[], Iterable[tuple[str, Any]]] | None = None,
        *,
        temperature: float | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            weights: tensors that `publish` loads into the backend; None: it loads only the version.
            temperature: sampling temperature of the answers; None: `AgentConfig.evaluation_temperature`.
        """
        super().__init__()
        self.agent, self.backend = agent, backend
        self.temperature = agent.config.evaluation_temperature if temperature is None else temperature
        self._seed = seed
        self.version = backend.version
        self._weights = weights
        self._conversations: dict[int, _Playing] = {}
        self._next_id = _FIRST_ID
        self.on_answer: Callable[[int, str, Prompt, Completion, Answer], object] | None = None
        """Callback for every answer, for films and dialogue pages: slot, observed text, prompt, completion, parsed answer."""
        self._counts: Counter[str] = Counter()

    @property
    def caches(self) -> tuple[TokenCache, ...]:
        return (self.backend,)

    def begin(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._conversations[int(slot)] = _Playing(self.agent.begin(), self.agent.budget())

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        """Request the actions of slots whose episodes have begun; `observation` contains ``text`` [n]."""
        looked = ((row, slot, self._conversations[slot].images) for row, slot in enumerate(slots.tolist()))
        seen = {slot: self.agent.image_inputs.look(observation, row, images) for row, slot, images in looked}
        prompts: dict[int, Prompt | None] = {}
        for slot, text in seen.items():
            playing = self._conversations[slot]
            playing.budget.begin_turn()
            prompts[slot] = playing.conversation.prompt(text)
        answers: dict[int, str] = {}
        while prompts:  # repeats while answers call tools
            prompts, seen = self._answer(prompts, seen, answers)
        chosen: Sequence[str] = [answers[slot] for slot in slots.tolist()]
        self._acted.append(ActedBatch(slots.copy(), texts(chosen), np.zeros((len(slots), 1), np.float32), self.version))

    def _answer(
        self, prompts: Mapping[int, Prompt | None], seen: Mapping[int, str], answers: dict[int, str]
    ) -> tuple[dict[int, Prompt | None], dict[int, str]]:
        """Sample answers to {slot: prompt}; put actions into `answers`; return {slot: prompt} and {slot: text} after tool calls."""
        requests, asked = [], {}
        prompts = {slot: self.agent.show(prompt, self._conversations[slot].images) for slot, prompt in prompts.items()}
        for slot, prompt in prompts.items():
            self._counts["turns"] += 1
            if prompt is None:
                self._counts["too_long"] += 1
                answers[slot] = ""
                continue
            self._counts["dropped"] += prompt.dropped > 0
            seed = self._conversations[slot].next_seed(self._seed, seen[slot])
            requests.append(self.agent.request(self._next_id, prompt, seen[slot], seed=seed, temperature=self.temperature))
            asked[self._next_id] = slot
            self._next_id += 1
        self.backend.submit(requests)
        with_tools: dict[int, tuple[Future[str], np.ndarray]] = {}
        while asked:
            for completion in self.backend.poll(min_ready=len(asked)):
                slot_of = asked.pop(completion.request_id, None)
                if slot_of is None:
                    continue  # left over from an earlier call that was given up
                if completion.finish_reason in ("failed", "aborted"):
                    raise UserError(f"The token backend gave no answer: {completion.failure or f'{completion.finish_reason}.'}")
                playing = self._conversations[slot_of]
                answer = self.agent.read(completion, playing.budget)
                if self.on_answer is not None:
                    asked_with = prompts[slot_of]
                    assert asked_with is not None, "what was too long was not asked"
                    self.on_answer(slot_of, seen[slot_of], asked_with, completion, answer)
                if isinstance(answer.parsed, ToolRequest):
                    assert self.agent.tools is not None, "without tools no answer calls any"
                    with_tools[slot_of] = self.agent.tools.start(answer.parsed.calls, playing.budget), completion.token_ids
                    continue
                self._counts["invalid"] += isinstance(answer.parsed, InvalidAction)
                playing.conversation.answered(completion.token_ids, answer.text, answer.parsed.text)
                answers[slot_of] = answer.parsed.text
        with waiting:
            responses = {slot: with_tools[slot][0].result() for slot in sorted(with_tools)}
        following = {
            slot: self._conversations[slot].conversation.tools_answered(with_tools[slot][1], response)
            for slot, response in responses.items()
        }
        return following, responses

    def publish(self, version: int) -> None:
        self.backend.load_weights(version, self._weights() if self._weights is not None else ())
        self.version = version

    def close(self) -> None:
        self.backend.close()
        self.agent.close()

    def figures(self) -> dict[str, float]:
        """Shares of the turns since the last call: invalid answers, truncated prompts, prompts that were too long."""
        counts, self._counts = self._counts, Counter()
        return {name: counts[name] / max(counts["turns"], 1) for name in ("invalid", "dropped", "too_long")}
