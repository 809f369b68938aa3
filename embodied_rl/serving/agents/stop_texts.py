"""Stop texts of any number of tokens: found in what the tokens say together, across their borders; the tokens are cut behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from embodied_rl.generation.tokens import Completion

_TAIL = 8
"""Tokens of an answer that grows are looked at again, for the half of a stop text that was there before."""


@dataclass(frozen=True)
class StopTexts:
    """What ends an answer. The first of the texts to be complete counts."""

    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]
    """Token ids to text."""

    def before(self, text: str) -> str:
        """A text without the first stop text in it and what follows."""
        places = [place for stop in self.texts if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def first(self, text: str) -> str | None:
        """The stop text that comes first in a text; None where there is none."""
        return min((stop for stop in self.texts if stop in text), key=text.find, default=None)

    def certain(self, text: str) -> str:
        """The beginning of a growing text that no stop text will take back."""
        text = self.before(text)
        half = max((n for stop in self.texts for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        return text[: len(text) - half]

    def reached(self, token_ids: Sequence[int], num_seen: int = 0) -> bool:
        """Whether tokens hold a stop text; the first `num_seen` are known to hold none."""
        # Every token but a special one has at least one byte of the text.
        longest = max((len(stop.encode()) for stop in self.texts), default=0)
        tail = self.decode(token_ids[max(num_seen - longest - _TAIL, 0) :])
        return self._inside(tail) and self._inside(self.decode(token_ids))

    def cut(self, completion: Completion) -> Completion:
        """The completion up to the token that completes a stop text, as stopped; as it is where there is none.

        What was sampled up to there does not depend on what was sampled after it, nor on when a backend noticed.
        """
        token_ids = completion.token_ids.tolist()
        if completion.failure is not None or not self.texts or not self._inside(self.decode(token_ids)):
            return completion
        low, high = 0, len(token_ids)  # the first `low` tokens hold none, the first `high` do
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._inside(self.decode(token_ids[:middle])) else (middle, high)
        return completion.first(high, "stop")

    def _inside(self, text: str) -> bool:
        return any(stop in text for stop in self.texts)
