"""A language agent: a conversation strategy, how its answers are sampled, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied_rl.agents.conversation import Conversation, Prompt, Prompts, PromptTokenizer, PromptTooLong
from embodied_rl.agents.image_inputs import ImageInputs
from embodied_rl.agents.parsing import ActionParser, InvalidAction, ParsedAction, ToolRequest
from embodied_rl.agents.tool_calls import tool_calls, tools_text
from embodied_rl.agents.tools.runner import ToolBudget, ToolRunner
from embodied_rl.config.agent import AgentConfig
from embodied_rl.generation.tokens import Completion, GenerationRequest


@dataclass(frozen=True)
class Answer:
    """What a completion says."""

    text: str
    parsed: ParsedAction


class Agent:
    """What is the same in all episodes; `begin` makes what belongs to one."""

    def __init__(self, config: AgentConfig, tokenizer: PromptTokenizer, *, instruction: str | None, max_context: int) -> None:
        """See `Prompts`. Starts the tools of `AgentConfig.tools`.

        Raises UserError as `Prompts` and `make_tools` do, and for a stop token that the tokenizer does not have."""
        self.config, self.tokenizer = config, tokenizer
        self.image_inputs: ImageInputs | None = None
        """How it sees pictures; None: it reads only text."""
        self.writes_messages = False
        """Requests hold the whole conversation as messages; False: only the observation."""
        self.tools = ToolRunner.make(config.tools, config.tool_options) if config.tools else None
        """None: an answer is an action, whatever it says."""
        told = tools_text(self.tools.toolbox.schemas()) if self.tools is not None and config.tool_options.describe else ""
        try:
            self.prompts = Prompts(config, tokenizer, instruction=instruction, max_context=max_context, tools=told)
            beside = config.summary_tag if config.strategy == "summarised" else None
            self.parser = ActionParser(tag=config.tag if config.answer == "tag" else None, actions=config.actions, beside=beside)
            self.stop_ids = tokenizer.stop_ids(*config.stop)
        except BaseException:
            self.close()
            raise

    def look(self, observation: Mapping[str, Any], row: int, seen: list[np.ndarray]) -> str:
        """What a row of observations says; its pictures, where the agent sees any, are appended to those of the episode."""
        return str(observation["text"][row]) if self.image_inputs is None else self.image_inputs.look(observation, row, seen)

    def show(self, prompt: Prompt | PromptTooLong, seen: Sequence[np.ndarray]) -> Prompt | PromptTooLong:
        """A prompt with the pictures that it shows, of those of the episode."""
        if self.image_inputs is None or isinstance(prompt, PromptTooLong):
            return prompt
        return self.image_inputs.show(prompt, seen, self.prompts.limit)

    def begin(self) -> Conversation:
        """A new episode."""
        return self.prompts.begin()

    def _messages(self, prompt: Prompt, observation: str) -> tuple[dict[str, str], ...]:
        # Decoding earlier answers takes time, and only servers that apply a template of their own read them.
        return self.prompts.messages(prompt) if self.writes_messages else ({"role": "user", "content": observation},)

    def budget(self) -> ToolBudget:
        """The tool calls of a new episode."""
        return ToolBudget(0, 0) if self.tools is None else self.tools.budget()

    def close(self) -> None:
        """End the tools. May be called twice."""
        if self.tools is not None:
            self.tools.close()

    def request(
        self, request_id: int, prompt: Prompt, observation: str, *, seed: int | None, temperature: float | None = None
    ) -> GenerationRequest:
        """Ask for an answer. `messages` holds the observation, which scripted players read, or the whole prompt (`writes_messages`).

        Args:
            temperature: instead of the configured one; 0 takes the likeliest tokens.
        """
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
            messages=self._messages(prompt, observation),
            images=prompt.images,
        )

    def read(self, completion: Completion, budget: ToolBudget | None = None) -> Answer:
        """The answer's text and what it means. Where there are tools, an answer that calls any is no action, whatever else it says."""
        text = completion.text if completion.text is not None else self.tokenizer.decode(completion.token_ids)
        if self.tools is not None and (calls := tool_calls(text)):
            allowed = budget is None or budget.left > 0
            return Answer(text, ToolRequest(calls) if allowed else InvalidAction("tool_limit", text))
        return Answer(text, self.parser.parse(text, cut=completion.finish_reason == "length"))

    def answer_ids(self, action: str) -> list[int]:
        """An answer that means this action, as a model that ends its turns would give it: for scripted and random players."""
        config = self.config
        text = f"<{config.tag}>{action}</{config.tag}>" if config.answer == "tag" else action
        return [*(int(token) for token in self.tokenizer.encode(text)), *self.stop_ids[:1]]

    def penalty(self, parsed: ParsedAction) -> float:
        """What an answer costs."""
        return self.config.invalid_penalty if isinstance(parsed, InvalidAction) else 0.0
