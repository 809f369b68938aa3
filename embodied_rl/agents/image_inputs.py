"""How an agent that reads sees pictures: a placeholder in the text for each, which becomes as many tokens as the picture takes.

Conversations hold only text. A prompt shows the newest messages of an episode, so that its placeholders are those of the episode's newest
pictures, whatever the strategy keeps and drops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied_rl.agents.conversation import Prompt, PromptTooLong
from embodied_rl.errors import UserError


@dataclass(frozen=True)
class ImageInputs:
    """Of one model, on one simulator."""

    keys: tuple[str, ...]
    """Parts of an observation that are pictures [H, W, 3] uint8, in the order in which they stand before the text."""
    placeholder: str
    """What stands for one picture in a text."""
    image_token_id: int
    """The token of a placeholder that is expanded."""
    expand: Callable[[np.ndarray, Sequence[np.ndarray]], np.ndarray]
    """[P] int64 and pictures → [P'] int64 with as many tokens as they take."""

    def look(self, observation: Mapping[str, Any], row: int, seen: list[np.ndarray]) -> str:
        """The text of a row of observations, placeholders first; its pictures are appended to `seen`.

        Raises:
            UserError: the text itself holds a placeholder.
        """
        text = str(observation["text"][row])
        if self.placeholder.strip() in text:
            raise UserError(f"An observation's text holds '{self.placeholder.strip()}', which stands for a picture to this model.")
        seen.extend(np.array(observation[key][row], np.uint8) for key in self.keys)
        return self.placeholder * len(self.keys) + text

    def show(self, prompt: Prompt, seen: Sequence[np.ndarray], limit: int) -> Prompt | PromptTooLong:
        """The prompt with its pictures, whose tokens count against `limit` too."""
        count = int((prompt.token_ids == self.image_token_id).sum())
        images = tuple(seen[len(seen) - count :])
        token_ids = self.expand(prompt.token_ids, images)
        if len(token_ids) > limit:
            return PromptTooLong(len(token_ids), limit)
        return dataclasses.replace(prompt, token_ids=token_ids, images=images)
