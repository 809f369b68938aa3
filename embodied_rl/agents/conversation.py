"""Conversation strategies: which tokens a turn's prompt consists of.

``full`` and ``last_k`` put the sampled token ids themselves into later prompts, and tokenise only what is new: decoding an answer and
tokenising it again may give other tokens (merges across its border, templates that strip spaces or leave earlier thoughts out), and what
is trained would not be what was sampled. ``memory`` and ``summarised`` write a prompt of their own for each turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from embodied_rl.agents.parsing import tagged
from embodied_rl.agents.turns import Dropped
from embodied_rl.config.agent import AgentConfig
from embodied_rl.errors import UserError

_SENTINEL = "answer-of-the-assistant-0451"
"""Stands for an answer while a chat template is asked what it writes behind one."""


class PromptTokenizer(Protocol):
    """What a conversation needs of `embodied_rl.policies.chat_tokenizer.ChatTokenizer`."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> np.ndarray: ...

    def decode(self, token_ids: np.ndarray | Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str: ...

    def stop_ids(self, *tokens: str) -> tuple[int, ...]: ...


@dataclass(frozen=True, eq=False)
class Prompt:
    """What the model is asked."""

    token_ids: np.ndarray
    """[P] int64"""
    dropped: Dropped | None = None
    """None: nothing was left out."""


@dataclass(frozen=True)
class PromptTooLong:
    """No prompt: even the shortest that the strategy allows has more tokens than it may have."""

    num_tokens: int
    limit: int


class Conversation(Protocol):
    """One episode as the agent sees it: `prompt` and `answered` in turns."""

    def prompt(self, observation: str) -> Prompt | PromptTooLong:
        """The next turn's prompt."""
        ...

    def answered(self, token_ids: np.ndarray, answer: str, action: str) -> None:
        """What was sampled after it, as ids and as text, and what the simulator got."""
        ...


class Prompts:
    """Makes conversations, and the prompts' texts and tokens."""

    def __init__(self, config: AgentConfig, tokenizer: PromptTokenizer, *, instruction: str | None, max_context: int) -> None:
        """
        Args:
            instruction: the simulator's, for {instruction}.
            max_context: tokens of prompt and answer together.

        Raises:
            UserError: the context leaves no room for a prompt, or the model has no (usable) chat template.
        """
        self.config, self.tokenizer = config, tokenizer
        self.instruction = instruction or ""
        room = max_context - config.max_new_tokens
        if room < 1:
            raise UserError(
                f"agent.max_new_tokens={config.max_new_tokens} leaves no room for a prompt in the model's context of {max_context} tokens."
            )
        self.limit = room if config.max_prompt_tokens is None else min(config.max_prompt_tokens, room)
        """Most tokens of a prompt."""
        self._system = config.system.format(instruction=self.instruction)
        self.begin()  # a template that cannot be used is told now

    def begin(self) -> Conversation:
        """A new episode's conversation."""
        if self.config.strategy in ("full", "last_k"):
            return _Growing(self, None if self.config.strategy == "full" else self.config.last_turns)
        return _Rendered(self)

    def message(self, observation: str, step: int, *, memory: str = "", summary: str = "") -> str:
        """The text of one message."""
        return self.config.template.format(observation=observation, instruction=self.instruction, step=step, memory=memory, summary=summary)

    def opening(self, message: str) -> np.ndarray:
        """[n] int64: a conversation's first tokens, up to where the answer begins."""
        if not self.config.chat:
            return self._encoded(self._system + message)
        system = [{"role": "system", "content": self._system}] if self._system else []
        return self._encoded(self.tokenizer.chat_text([*system, {"role": "user", "content": message}]))

    def continuation(self, message: str, answer_ids: np.ndarray) -> np.ndarray:
        """[n] int64: what stands between an answer's sampled tokens and the next answer.

        Raises:
            UserError: the chat template does not show an answer's text as it is.
        """
        if not self.config.chat:
            return self.tokenizer.encode(message)
        shown = self.tokenizer.chat_text(
            [{"role": "user", "content": "-"}, {"role": "assistant", "content": _SENTINEL}, {"role": "user", "content": message}]
        )
        _, found, behind = shown.partition(_SENTINEL)
        if not found:
            raise UserError(
                "The model's chat template leaves earlier answers out, so a conversation cannot be continued token by token. "
                "Set agent.strategy=memory, or agent.chat=false."
            )
        token_ids = self.tokenizer.encode(behind)
        # The token that ends a turn was sampled, unless the answer was cut.
        ended = len(answer_ids) > 0 and len(token_ids) > 0 and int(answer_ids[-1]) == int(token_ids[0])
        return token_ids[1:] if ended else token_ids

    def _encoded(self, text: str) -> np.ndarray:
        token_ids = self.tokenizer.encode(text)
        if len(token_ids) == 0:
            raise UserError(
                "A prompt is empty: agent.template must name {observation} or hold some text, and observations must not be empty."
            )
        return token_ids


@dataclass
class _Exchange:
    """A past turn of a growing conversation."""

    message: str
    answer_ids: np.ndarray


class _Growing:
    """``full`` and ``last_k``: messages and sampled tokens behind one another."""

    def __init__(self, prompts: Prompts, last_turns: int | None) -> None:
        self._prompts, self._last_turns = prompts, last_turns
        self._past: list[_Exchange] = []
        self._message = ""
        self._step = 0

    def prompt(self, observation: str) -> Prompt | PromptTooLong:
        """See `Conversation.prompt`."""
        self._step += 1
        self._message = self._prompts.message(observation, self._step)
        wanted = len(self._past) if self._last_turns is None else min(self._last_turns, len(self._past))
        return _fitted(self._prompts, wanted, self._tokens)

    def answered(self, token_ids: np.ndarray, answer: str, action: str) -> None:
        """See `Conversation.answered`."""
        self._past.append(_Exchange(self._message, token_ids))

    def _tokens(self, num_turns: int) -> np.ndarray:
        shown = self._past[len(self._past) - num_turns :]
        first = shown[0].message if shown else self._message
        parts = [self._prompts.opening(first)]
        for index, exchange in enumerate(shown):
            following = shown[index + 1].message if index + 1 < len(shown) else self._message
            parts += [exchange.answer_ids, self._prompts.continuation(following, exchange.answer_ids)]
        return np.concatenate(parts).astype(np.int64)


class _Rendered:
    """``memory`` and ``summarised``: one message, written anew for each turn."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._past: list[tuple[str, str]] = []
        self._observation = ""
        self._summary = ""
        self._step = 0

    def prompt(self, observation: str) -> Prompt | PromptTooLong:
        """See `Conversation.prompt`."""
        self._step += 1
        self._observation = observation
        return _fitted(self._prompts, len(self._past), self._tokens)

    def answered(self, token_ids: np.ndarray, answer: str, action: str) -> None:
        """See `Conversation.answered`."""
        config = self._prompts.config
        if config.strategy == "summarised":
            found = tagged(answer, config.summary_tag)
            self._summary = self._summary if found is None else found[: config.summary_chars]
        elif config.last_turns:
            self._past = [*self._past, (self._observation, action)][-config.last_turns :]

    def _tokens(self, num_turns: int) -> np.ndarray:
        first = self._step - len(self._past)
        items = [
            self._prompts.config.memory_item.format(observation=observation, action=action, step=first + index)
            for index, (observation, action) in enumerate(self._past)
        ]
        memory = "".join(items[len(items) - num_turns :])
        return self._prompts.opening(self._prompts.message(self._observation, self._step, memory=memory, summary=self._summary))


def _fitted(prompts: Prompts, num_turns: int, tokens: Callable[[int], np.ndarray]) -> Prompt | PromptTooLong:
    """The prompt with as many of the past turns as fit, the newest ones; `tokens(n)` is the one with n of them."""
    whole = tokens(num_turns)
    if len(whole) <= prompts.limit:
        return Prompt(whole)
    if prompts.config.overflow == "drop_oldest":
        for kept in range(num_turns - 1, -1, -1):
            shorter = tokens(kept)
            if len(shorter) <= prompts.limit:
                return Prompt(shorter, Dropped(num_turns - kept, len(whole) - len(shorter)))
        whole = tokens(0)
    return PromptTooLong(len(whole), prompts.limit)
