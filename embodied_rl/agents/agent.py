"""A language agent: a conversation strategy, how its answers are sampled, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass

from embodied_rl.agents.conversation import Conversation, Prompt, Prompts, PromptTokenizer
from embodied_rl.agents.parsing import ActionParser, InvalidAction, ParsedAction
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
        """See `Prompts`. Raises UserError as it does, and for a stop token that the tokenizer does not have."""
        self.config, self.tokenizer = config, tokenizer
        self.prompts = Prompts(config, tokenizer, instruction=instruction, max_context=max_context)
        self.parser = ActionParser(tag=config.tag if config.answer == "tag" else None, actions=config.actions)
        self.stop_ids = tokenizer.stop_ids(*config.stop)

    def begin(self) -> Conversation:
        """A new episode."""
        return self.prompts.begin()

    def request(
        self, request_id: int, prompt: Prompt, observation: str, *, seed: int | None, temperature: float | None = None
    ) -> GenerationRequest:
        """Ask for an answer. Scripted players read the observation in `messages`.

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
            messages=({"role": "user", "content": observation},),
        )

    def read(self, completion: Completion) -> Answer:
        """The answer's text and what it means."""
        text = completion.text if completion.text is not None else self.tokenizer.decode(completion.token_ids)
        return Answer(text, self.parser.parse(text, cut=completion.finish_reason == "length"))

    def answer_ids(self, action: str) -> list[int]:
        """An answer that means this action, as a model that ends its turns would give it: for scripted and random players."""
        config = self.config
        text = f"<{config.tag}>{action}</{config.tag}>" if config.answer == "tag" else action
        return [*(int(token) for token in self.tokenizer.encode(text)), *self.stop_ids[:1]]

    def penalty(self, parsed: ParsedAction) -> float:
        """What an answer costs."""
        return self.config.invalid_penalty if isinstance(parsed, InvalidAction) else 0.0
