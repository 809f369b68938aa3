"""What reward workers are given in tests."""

from __future__ import annotations

import time

from embodied_rl.types import Episode


def short_is_good(episode: Episode) -> float:
    """A tenth of a point off for each message."""
    return -0.1 * episode.num_messages


def nothing(episode: Episode) -> float:
    """Neither better nor worse."""
    return 0.0


class Slow:
    """Takes `seconds`, and gives the episode's number of messages times `factor`."""

    def __init__(self, seconds: float, factor: float = 1.0) -> None:
        self.seconds, self.factor = seconds, factor

    def __call__(self, episode: Episode) -> float:
        time.sleep(self.seconds)
        return self.factor * episode.num_messages


def broken(episode: Episode) -> float:
    raise ArithmeticError("this judge has no opinion")


def not_a_number(episode: Episode) -> float:
    return float("nan")
