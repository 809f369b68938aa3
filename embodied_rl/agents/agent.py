"""A language agent: a conversation strategy, pictures in prompts, sampling of answers, and their parsing.

Conversation strategies decide the tokens of a turn's prompt. ``full`` and ``last_k`` put the sampled token ids themselves into later
prompts, and tokenise only what is new: decoding an answer and tokenising it again may give other tokens (merges across its border,
templates that strip spaces or drop earlier thoughts), and then training would see other tokens than were sampled. ``memory`` and
``summarised`` write a new prompt for each turn.

Pictures: the text has a placeholder for each, which becomes as many tokens as the picture takes. Conversations contain only text. A prompt
shows the newest messages of an episode, so its placeholders belong to the episode's newest pictures, whatever the strategy keeps and drops.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from embodied_rl.agents.parsing import ActionParser, InvalidAction, ParsedAction, ToolRequest, tool_calls, tools_text
from embodied_rl.agents.tools.base import ToolBudget
from embodied_rl.agents.tools.builtin import make_toolbox
from embodied_rl.config.agent import AgentConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion, GenerationRequest
from embodied_rl.sim.text.answers import tagged

_SENTINEL = "answer-of-the-assistant-0451"
"""Placeholder for an answer, to find what a chat template writes behind one."""
_OPENINGS, _MESSAGES = 512, 4096
"""Most openings and messages with remembered tokens: growing prompts are assembled anew in every turn."""


class PromptTokenizer(Protocol):
    """The part of `embodied_rl.policies.chat_tokenizer.ChatTokenizer` that a conversation needs."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> np.ndarray: ...

    def decode(self, token_ids: np.ndarray | Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str: ...

    def stop_ids(self, *tokens: str) -> tuple[int, ...]: ...


@dataclass(frozen=True, eq=False)
class Prompt:
    """Input of the model for one answer."""

    token_ids: np.ndarray
    """[P] int64"""
    dropped: int = 0
    """Number of earlier turns that were left out because of their length."""
    shown: tuple[Exchange, ...] = ()
    """Exchanges before the message that is to be answered."""
    message: str = ""
    images: tuple[np.ndarray, ...] = ()
    """uint8 [H, W, 3] each, for the placeholders in `token_ids` (`embodied_rl.agents.agent`)."""


@dataclass(frozen=True, eq=False)
class Exchange:
    """A message, and the answer sampled for it."""

    message: str
    answer_ids: np.ndarray


class Prompts:
    """Makes conversations, and the texts and tokens of prompts."""

    def __init__(
        self, config: AgentConfig, tokenizer: PromptTokenizer, *, instruction: str | None, max_context: int, tools: str = ""
    ) -> None:
        """Args:
        instruction: the simulator's, for {instruction}.
        max_context: most tokens of prompt and answer together.
        tools: description of the tools, placed before the system text.

        Raises:
        UserError: the context leaves no room for a prompt, or less than `max_prompt_tokens`; system text and templates already fill it;
            or the model has no (usable) chat template.
        """
        self.config, self.tokenizer = config, tokenizer
        self.instruction = instruction or ""
        room = max_context - config.max_new_tokens
        if room < 1:
            raise UserError(
                f"agent.max_new_tokens={config.max_new_tokens} leaves no room for a prompt in the model's context of {max_context} tokens."
            )
        if config.max_prompt_tokens is not None and config.max_prompt_tokens > room:
            raise UserError(
                f"agent.max_prompt_tokens={config.max_prompt_tokens} is more than the {room} tokens that "
                f"agent.max_new_tokens={config.max_new_tokens} leaves of the model's context of {max_context}: lower one of them, or set "
                "agent.max_prompt_tokens=null (all remaining tokens)."
            )
        self.limit = config.max_prompt_tokens or room
        """Most tokens of a prompt."""
        self._template = _template(config)
        self._system = tools + _about_summary(config) + config.system.format(instruction=self.instruction)
        self.opening = functools.lru_cache(_OPENINGS)(self._opening)
        self._following = functools.lru_cache(_MESSAGES)(self._behind)
        self._check_room(max_context)

    def _check_room(self, max_context: int) -> None:
        """Raise UserError if the text around an observation fills every prompt."""
        try:
            needed = len(self.opening(self.message(".", 1)))
        except UserError:  # of the chat template: raised with the first prompt, since a program may write prompts without it
            return
        if needed <= self.limit:
            return
        if self.config.max_prompt_tokens is not None:
            said = f"agent.max_prompt_tokens={self.limit} is"
        else:
            said = f"The {self.limit} tokens that agent.max_new_tokens={self.config.max_new_tokens} leaves of {max_context} of context are"
        raise UserError(
            f"{said} too few for a prompt: agent.system, agent.template, the tool descriptions and the model's chat template need "
            f"{needed} with an observation of one letter. Raise the limit, or shorten these texts."
        )

    def message(self, observation: str, step: int, *, memory: str = "", summary: str = "") -> str:
        return self._template.format(observation=observation, instruction=self.instruction, step=step, memory=memory, summary=summary)

    def _opening(self, message: str) -> np.ndarray:
        """[n] int64: a conversation's first tokens, up to the beginning of the answer. `opening` caches them."""
        if not self.config.chat:
            return self._encoded(self._system + message)
        system = [{"role": "system", "content": self._system}] if self._system else []
        return self._encoded(self.tokenizer.chat_text([*system, {"role": "user", "content": message}]))

    def continuation(self, message: str, answer_ids: np.ndarray) -> np.ndarray:
        """[n] int64: tokens between an answer's sampled tokens and the next answer. Raises UserError: the chat template changes answers."""
        token_ids = self._following(message)
        # The token that ends a turn was sampled, unless the answer was cut.
        ended = self.config.chat and len(answer_ids) > 0 and len(token_ids) > 0 and int(answer_ids[-1]) == int(token_ids[0])
        return token_ids[1:] if ended else token_ids

    def _behind(self, message: str) -> np.ndarray:
        """[n] int64: tokens that the template writes between an answer and the next."""
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
        return self.tokenizer.encode(behind)

    def joined(self, shown: Sequence[Exchange], message: str) -> Prompt:
        """Prompt of consecutive exchanges and a message to be answered, with each sampled token as it was sampled."""
        parts = [self.opening(shown[0].message if shown else message)]
        for index, exchange in enumerate(shown):
            following = shown[index + 1].message if index + 1 < len(shown) else message
            parts += [exchange.answer_ids, self.continuation(following, exchange.answer_ids)]
        return Prompt(np.concatenate(parts).astype(np.int64), shown=tuple(shown), message=message)

    def messages(self, prompt: Prompt) -> tuple[dict[str, str], ...]:
        """A prompt as chat messages, with decoded answers, for servers that apply their own template."""
        found = [{"role": "system", "content": self._system}] if self._system else []
        for exchange in prompt.shown:
            found.append({"role": "user", "content": exchange.message})
            found.append({"role": "assistant", "content": self.tokenizer.decode(exchange.answer_ids)})
        return (*found, {"role": "user", "content": prompt.message})

    def _encoded(self, text: str) -> np.ndarray:
        token_ids = self.tokenizer.encode(text)
        if len(token_ids) == 0:
            raise UserError(
                "A prompt is empty: agent.template must contain {observation} or other text, and observations must not be empty."
            )
        return token_ids


def _template(config: AgentConfig) -> str:
    """Template with the memory in front, unless it names the memory."""
    if config.strategy == "memory" and config.last_turns and "{memory" not in config.template:
        return "{memory}" + config.template
    if config.strategy == "summarised" and "{summary" not in config.template:
        return "{summary}\n" + config.template
    return config.template


def _about_summary(config: AgentConfig) -> str:
    """Instruction how to write a summary, unless the prompt's own texts mention it."""
    tag = f"<{config.summary_tag}>"
    if config.strategy != "summarised" or tag in config.system or tag in config.template:
        return ""
    return (
        f"You will see nothing of what came before but the summary that you give: write {tag}what you need to remember"
        f"</{config.summary_tag}> in every answer.\n"
    )


class Conversation:
    """One episode from the agent's view: `prompt` and `answered` alternate. Tools within a turn continue it token by token."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts, self._config = prompts, prompts.config
        self._grows = self._config.strategy in ("full", "last_k")
        """Whether a prompt is messages and sampled tokens in sequence; otherwise it is one message, rewritten in each turn."""
        self._most = {"full": None, "summarised": 0}.get(self._config.strategy, self._config.last_turns)
        """Most earlier turns in a prompt; None: all."""
        self._past: list[tuple[list[Exchange], str, str]] = []
        """(exchanges, observation, action) of those turns."""
        self._observation, self._summary = "", ""
        self._step = 0
        self._within: list[tuple[np.ndarray, str]] = []
        """(sampled call, results of its tools) of the present turn."""

    def prompt(self, observation: str) -> Prompt | None:
        """Prompt of the next turn. None: even the shortest one of the strategy has too many tokens."""
        self._step += 1
        self._observation, self._within = observation, []
        return self._fitted()

    def tools_answered(self, token_ids: np.ndarray, response: str) -> Prompt | None:
        """As `prompt`, one that continues the turn after a call of tools; `token_ids`: the sampled call, `response`: the tools' results."""
        self._within.append((token_ids, response))
        return self._fitted()

    def answered(self, token_ids: np.ndarray, answer: str, action: str) -> None:
        """Record what was sampled, as ids and as text, and the simulator's action."""
        if self._config.strategy == "summarised" and (found := tagged(answer, self._config.summary_tag)):
            self._summary = answer[found[-1]].strip()[: self._config.summary_chars]
        shown, message = self._turn()
        self._past.append(([*shown, Exchange(message, token_ids)], self._observation, action))
        self._within = []
        if self._most is not None:
            del self._past[: max(len(self._past) - self._most, 0)]

    def _turn(self, **texts: str) -> tuple[list[Exchange], str]:
        """(exchanges of the present turn, whose first message has these texts; the message to be answered)."""
        first = self._prompts.message(self._observation, self._step, **texts)
        messages = [first, *(response for _, response in self._within)]
        return [Exchange(one, token_ids) for one, (token_ids, _) in zip(messages, self._within, strict=False)], messages[-1]

    def _draft(self, num_turns: int) -> Prompt:
        """Prompt with the newest `num_turns` turns."""
        past = self._past[len(self._past) - num_turns :]
        if self._grows:
            shown, message = self._turn()
            return self._prompts.joined([*(exchange for turn, _, _ in past for exchange in turn), *shown], message)
        items = [
            self._config.memory_item.format(observation=observation, action=action, step=self._step - num_turns + index)
            for index, (_, observation, action) in enumerate(past)
        ]
        return self._prompts.joined(*self._turn(memory="".join(items), summary=self._summary))

    def _fitted(self) -> Prompt | None:
        """Prompt with as many of the newest turns as fit."""
        num_turns = len(self._past)
        fewest = 0 if self._config.overflow == "drop_oldest" else num_turns
        for kept in range(num_turns, fewest - 1, -1):
            prompt = self._draft(kept)
            if len(prompt.token_ids) <= self._prompts.limit:
                return dataclasses.replace(prompt, dropped=num_turns - kept)
        return None


@dataclass(frozen=True)
class ImageInputs:
    """Pictures of one simulator for one model."""

    keys: tuple[str, ...]
    """Parts of an observation that are pictures [H, W, 3] uint8, in their order before the text."""
    placeholder: str
    """Text that represents one picture."""
    image_token_id: int
    """The token of a placeholder that is expanded."""
    expand: Callable[[np.ndarray, Sequence[np.ndarray]], np.ndarray]
    """[P] int64 and pictures → [P'] int64 with as many tokens as they take."""

    def look(self, observation: Mapping[str, Any], row: int, seen: list[np.ndarray]) -> str:
        """Text of a row of observations after placeholders; appends its pictures to those of the episode. Raises UserError: the text has a
        placeholder."""
        text = str(observation["text"][row])
        if self.keys and self.placeholder.strip() in text:
            raise UserError(f"An observation's text contains '{self.placeholder.strip()}', which this model reads as a picture.")
        seen.extend(np.array(observation[key][row], np.uint8) for key in self.keys)
        return self.placeholders + text

    @property
    def placeholders(self) -> str:
        """Text that represents an observation's pictures, before its text."""
        return self.placeholder * len(self.keys)

    def show(self, prompt: Prompt | None, seen: Sequence[np.ndarray], limit: int) -> Prompt | None:
        """A prompt with those of the episode's pictures that it shows; None: with their tokens it has more than `limit`."""
        if not self.keys or prompt is None:
            return prompt
        count = int((prompt.token_ids == self.image_token_id).sum())
        images = tuple(seen[len(seen) - count :])
        token_ids = self.expand(prompt.token_ids, images)
        return dataclasses.replace(prompt, token_ids=token_ids, images=images) if len(token_ids) <= limit else None


TEXT_ONLY = ImageInputs((), "", -1, lambda token_ids, images: token_ids)
"""Inputs of an agent that sees no pictures."""


@dataclass(frozen=True)
class Answer:
    """Parsed completion."""

    text: str
    parsed: ParsedAction


class Agent:
    """Shared parts of all episodes; `begin` makes the state of one."""

    def __init__(
        self,
        config: AgentConfig,
        tokenizer: PromptTokenizer,
        *,
        instruction: str | None,
        max_context: int,
        action_bytes: int | None = None,
    ) -> None:
        """See `Prompts`; `action_bytes`: longest action of the simulator. Starts the tools of `AgentConfig.tools`.

        Raises UserError as `Prompts` and `make_toolbox` do, and for a stop token that the tokenizer lacks."""
        self.config, self.tokenizer = config, tokenizer
        self.image_inputs = TEXT_ONLY
        """How it sees pictures."""
        self.writes_messages = False
        """Whether requests contain the whole conversation as messages; False: only the observation."""
        self.tools = make_toolbox(config.tools, config.tool_options) if config.tools else None
        """Tools; None: every answer is an action."""
        described = tools_text(self.tools.schemas()) if self.tools is not None and config.tool_options.describe else ""
        try:
            self.prompts = Prompts(config, tokenizer, instruction=instruction, max_context=max_context, tools=described)
            beside = config.summary_tag if config.strategy == "summarised" else None
            tag = config.tag if config.answer == "tag" else None
            self.parser = ActionParser(tag=tag, actions=config.actions, beside=beside, most_bytes=action_bytes)
            self.stop_ids = tokenizer.stop_ids(*config.stop)
        except BaseException:
            self.close()
            raise

    def show(self, prompt: Prompt | None, seen: Sequence[np.ndarray]) -> Prompt | None:
        """A prompt with those of the episode's pictures that it shows."""
        return self.image_inputs.show(prompt, seen, self.prompts.limit)

    def begin(self) -> Conversation:
        return Conversation(self.prompts)

    def budget(self) -> ToolBudget:
        """Budget of tool calls for a new episode."""
        return ToolBudget(0, 0) if self.tools is None else self.tools.budget()

    def close(self) -> None:
        """End the tools. May be called twice."""
        if self.tools is not None:
            self.tools.close()

    def request(
        self, request_id: int, prompt: Prompt, observation: str, *, seed: int | None, temperature: float | None = None
    ) -> GenerationRequest:
        """Request for an answer. `messages` contains the observation, which scripted players read, or the whole prompt (`writes_messages`).
        `temperature`: overrides the configured one; 0 selects the likeliest tokens."""
        config = self.config
        wanted = config.temperature if temperature is None else temperature
        greedy = wanted == 0
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=prompt.token_ids,
            max_new_tokens=config.max_new_tokens,
            temperature=wanted,
            top_p=1.0 if greedy else config.top_p,
            top_k=0 if greedy else config.top_k,
            stop_ids=self.stop_ids,
            seed=seed,
            # Decoding earlier answers takes time, and only servers that apply their own template read them.
            messages=self.prompts.messages(prompt) if self.writes_messages else ({"role": "user", "content": observation},),
            images=prompt.images,
        )

    def read(self, completion: Completion, budget: ToolBudget | None = None) -> Answer:
        """Answer's text and meaning. With tools, an answer that calls any is not an action, whatever else it says."""
        text = completion.text if completion.text is not None else self.tokenizer.decode(completion.token_ids)
        if self.tools is not None and (calls := tool_calls(text)):
            allowed = budget is None or budget.left > 0
            return Answer(text, ToolRequest(calls) if allowed else InvalidAction("tool_limit", text))
        return Answer(text, self.parser.parse(text, cut=completion.finish_reason == "length"))

    def answer_ids(self, action: str) -> list[int]:
        """Tokens of an answer with this action, as a model that ends its turns would produce them: for scripted and random players."""
        config = self.config
        text = f"<{config.tag}>{action}</{config.tag}>" if config.answer == "tag" else action
        return [*(int(token) for token in self.tokenizer.encode(text)), *self.stop_ids[:1]]
