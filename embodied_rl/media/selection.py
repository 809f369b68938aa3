"""Which of the episodes that were played are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.types import EpisodeSummary

Kind = Literal["first", "best", "worst", "random"]
KINDS: tuple[Kind, ...] = ("first", "best", "worst", "random")
PLAYED_FOR_EACH = 4
"""Episodes that are played for each one shown, where some are to be selected."""


@dataclass(frozen=True)
class Selection:
    """Raises UserError for an impossible one."""

    kind: Kind
    num_shown: int
    among: int
    """Episodes that are played, or recorded."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_shown <= self.among:
            raise UserError(f"select={self.kind}:{self.num_shown}: between 1 and among={self.among} episodes can be shown.")

    @staticmethod
    def parse(text: str, num_shown: int, among: int | None) -> Selection:
        """``best`` or ``best:4``. Raises UserError for anything else.

        Args:
            text: a kind, with the number of episodes shown behind a colon.
            num_shown: where the text names none.
            among: episodes to choose from; None: four times as many as are shown, and no more than are shown for ``first``.
        """
        kind, colon, count = text.partition(":")
        if kind not in KINDS:
            raise UserError(f"select={text}: '{kind}' is not a choice.{did_you_mean(kind, KINDS)}")
        if colon and not (count.isascii() and count.isdigit()):
            raise UserError(f"select={text}: '{count}' is not a number of episodes; write select={kind}:4, say.")
        shown = int(count) if colon else num_shown
        wanted = shown if kind == "first" else PLAYED_FOR_EACH * shown
        return Selection(next(known for known in KINDS if known == kind), shown, wanted if among is None else among)

    @property
    def is_known_before(self) -> bool:
        """Whether the choice does not depend on how the episodes go."""
        return self.kind in ("first", "random")

    def positions(self, seed: int) -> list[int]:
        """Which of 0 … among - 1 are shown, ascending, where `is_known_before`; those at random follow from `seed`."""
        assert self.is_known_before, f"select={self.kind} is known after playing"
        if self.kind == "first":
            return list(range(self.num_shown))
        chosen = np.random.default_rng(seed).choice(self.among, self.num_shown, replace=False)
        return sorted(int(position) for position in chosen)

    @property
    def rank(self) -> Callable[[EpisodeSummary], tuple[float, ...]]:
        """What episodes are sorted by, those to be shown first: success, then return; the smaller seed where both are equal."""
        sign = -1.0 if self.kind == "best" else 1.0
        return lambda episode: (sign * episode.success_once, sign * episode.episode_return, episode.seed)

    def ranked(self, episodes: Sequence[EpisodeSummary]) -> list[int]:
        """Positions of the `num_shown` best (worst) of finished episodes, that one first."""
        order = sorted(range(len(episodes)), key=lambda position: self.rank(episodes[position]))
        return order[: self.num_shown]
