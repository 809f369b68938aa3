"""A language model that scores episodes, served by any OpenAI-compatible chat completions server."""

from __future__ import annotations

import json
import math
import re
import string

from embodied_rl.errors import UserError
from embodied_rl.sim.text.opponents import OpenAIPlayer
from embodied_rl.types import Episode

PROMPT = """Below is an episode of the task "{domain}". How well was the task solved, and how efficiently?
Answer with one number between 0 (not at all) and 10 (perfectly).

{episode}

It took {length} steps, the environment's own rewards add up to {return_}, and it says {outcome}."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_FIELDS = ("domain", "episode", "length", "return_", "outcome", "info")


class OpenAIJudge:
    """Callable from an episode to the model's score, for ``hybrid.reward_worker.target``.

    The last number in the model's answer is mapped from [lowest, highest] to [0, 1] and multiplied by `scale`.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        prompt: str = PROMPT,
        lowest: float = 0.0,
        highest: float = 10.0,
        scale: float = 1.0,
        temperature: float = 0.0,
        max_tokens: int = 64,
        timeout_s: float = 30.0,
        api_key_env: str = "OPENAI_API_KEY",
    ) -> None:
        """
        Args:
            base_url: such as ``http://127.0.0.1:8000/v1``.
            prompt: template that may use {domain}, {episode}, {length}, {return_}, {outcome}, {info}.
            api_key_env: environment variable with the key; if it is unset, no key is sent.

        Raises UserError: the address or the prompt is invalid, or the range is empty.
        """
        try:
            names = {name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None}
        except ValueError as error:
            raise UserError(f"The judge's prompt has a brace without a partner ({error}): double a brace that is no name's.") from error
        if wrong := sorted(names - set(_FIELDS)):
            raise UserError(f"The judge's prompt names {{{wrong[0]}}}. Known: {', '.join(_FIELDS)}; other braces are doubled.")
        if not (math.isfinite(lowest) and math.isfinite(highest) and lowest < highest):
            raise UserError(f"The judge's range must have lowest < highest, got {lowest:g} and {highest:g}.")
        self._prompt, self._lowest, self._highest, self._scale = prompt, lowest, highest, scale
        self._model = OpenAIPlayer(base_url, model, api_key_env, temperature, max_tokens, timeout_s)

    def __call__(self, episode: Episode) -> float:
        """Score an episode. Raises ConnectionError if the server does not answer, ValueError if the answer has no number in the range."""
        answer = self._model.act(self.question(episode))
        numbers = _NUMBER.findall(answer)
        if not numbers:
            raise ValueError(f"the judge's answer has no number: {answer[:80]!r}")
        value = float(numbers[-1])
        if not self._lowest <= value <= self._highest:
            raise ValueError(f"the judge's answer is {value:g}, outside of {self._lowest:g} to {self._highest:g}")
        return self._scale * (value - self._lowest) / (self._highest - self._lowest)

    def question(self, episode: Episode) -> str:
        """The model's prompt for an episode."""
        return self._prompt.format(
            domain=episode.domain,
            episode=transcript(episode),
            length=episode.num_steps,
            return_=f"{episode.episode_return:g}",
            outcome="that it succeeded" if episode.success else "that it did not succeed",
            info=json.dumps(episode.metadata.get("final_info", {}), default=repr),
        )


def transcript(episode: Episode) -> str:
    """An episode's texts, message by message; for a robot, whose observations are arrays, the reward of each message."""
    parts = [key for key, values in episode.observation.items() if values.dtype == object]
    lines = []
    for step in range(episode.num_messages):
        seen = " ".join(str(episode.observation[key][step]) for key in parts)
        did = str(episode.action[step]) if episode.action.dtype.kind in "OU" else ""
        said = "\n".join(f"{who}: {text}" for who, text in (("Environment", seen), ("Agent", did)) if text)
        lines.append(said or f"Step {step + 1}: reward {float(episode.reward[step]):g}")
    return "\n".join(lines)
