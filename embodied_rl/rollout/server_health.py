"""Servers that do not answer: one that never answered ends the run with its reason; one that stopped answering gets a warning."""

from __future__ import annotations

import warnings

from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Failure

MANY = 8
"""Failures in a row, after each one's own retries, that are no accident."""
_OF_THE_PROMPT = ("prompt_too_long",)


class ServerHealth:
    """Counts a backend's failures in a row. Without it a run whose server is down would play the same groups again and again."""

    def __init__(self) -> None:
        self._ever_answered = False
        self._in_a_row = 0

    def answered(self) -> None:
        """An answer came."""
        self._ever_answered, self._in_a_row = True, 0

    def failed(self, failure: Failure | None) -> None:
        """A request failed; None: it had no log-probabilities where they are needed.

        Raises:
            UserError: no request was ever answered, and many were not.
        """
        if failure is None or failure.kind in _OF_THE_PROMPT:
            return
        self._in_a_row += 1
        if self._in_a_row % MANY:
            return
        told = f"{failure.kind.replace('_', ' ')} after {failure.attempts} attempts each: {failure.message}"
        if not self._ever_answered:
            raise UserError(f"The token server answered none of the first {self._in_a_row} requests ({told}). Is this its address?")
        warnings.warn(f"The token server left {self._in_a_row} requests in a row unanswered ({told}); the run waits for it.", stacklevel=2)
