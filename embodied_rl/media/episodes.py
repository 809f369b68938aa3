"""Pictures of an episode and what is known at each of them; nothing is written into the pictures yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from embodied_rl.agents.parsing import ParsedAction, ToolRequest
from embodied_rl.types import EpisodeSummary

MAX_STEPS_SHOWN = 250
"""Steps of an episode that have a picture; when one lasts longer, all are shown faster: every second step, every fourth, …"""
MAX_BYTES = 2**30
"""Of all pictures that are held at a time; beyond, steps are left out in the same way."""


@dataclass(frozen=True)
class Moment:
    """What is known when a picture is taken."""

    step: int
    """Steps taken so far."""
    reward: float
    """Of the last step; 0 before the first."""
    episode_return: float
    """Sum of the rewards so far."""
    success: bool
    """At any step so far."""
    value: float | None = None
    """The policy's estimate of what is still to come; None: not known."""
    action: np.ndarray | None = None
    """[A] that led here, in the simulator's units; None before the first step."""
    answer: str | None = None
    """What a language agent said that led here; None for others, and before the first step."""
    log_prob: float | None = None
    """Of that answer: its tokens' together."""


@dataclass
class Spoken:
    """One answer of a language agent, token by token."""

    observation: str
    prompt_ids: np.ndarray
    """[P] int64"""
    token_ids: np.ndarray
    """[n] int64"""
    log_prob: np.ndarray
    """[n] float32"""
    version: np.ndarray
    """[n] int64"""
    answer: str
    parsed: ParsedAction | ToolRequest
    reward: float = 0.0
    """Of the step that it led to; of several answers in one step (calls of tools) the last one's."""


@dataclass
class FilmedEpisode:
    """One episode's pictures."""

    seed: int
    task: str
    instruction: str | None = None
    frames: list[np.ndarray] = field(default_factory=list)
    """Each [size, cameras · size, 3] uint8, the cameras side by side; the last one is the episode's last moment."""
    moments: list[Moment] = field(default_factory=list)
    """One for each picture."""
    summary: EpisodeSummary | None = None
    """None while it is running."""
    spoken: list[Spoken] = field(default_factory=list)
    """A language agent's answers; none of others."""
    final_text: str = ""
    """The last observation of a text environment."""

    @property
    def finished(self) -> EpisodeSummary:
        """The summary of an episode that has ended."""
        assert self.summary is not None, "the episode has not ended"
        return self.summary

    @property
    def num_bytes(self) -> int:
        """Of its pictures."""
        return sum(frame.nbytes for frame in self.frames)

    def thin(self, stride: int) -> None:
        """Keep the pictures of every `stride`-th step, and the last one of an episode that has ended."""
        last = len(self.moments) - 1 if self.summary is not None else None
        kept = [index for index, moment in enumerate(self.moments) if moment.step % stride == 0 or index == last]
        self.frames, self.moments = [self.frames[index] for index in kept], [self.moments[index] for index in kept]


def thinned(episodes: Sequence[FilmedEpisode], stride: int) -> int:
    """Once there are too many pictures, drop every second one of all; returns the steps from one picture to the next."""
    longest = max((len(episode.frames) for episode in episodes), default=0)
    if longest > MAX_STEPS_SHOWN + 1 or sum(episode.num_bytes for episode in episodes) > MAX_BYTES:
        stride *= 2
        for episode in episodes:
            episode.thin(stride)
    return stride


def beside_each_other(views: Mapping[str, np.ndarray] | Sequence[np.ndarray], size: int) -> np.ndarray:
    """One picture [size, cameras · size, 3] of pictures [H, W, 3] uint8 of any size, each with its shape kept."""
    from embodied_rl.video import fit_square

    pictures = list(views.values()) if isinstance(views, Mapping) else views
    return np.concatenate([fit_square(np.ascontiguousarray(picture), size) for picture in pictures], axis=1)
