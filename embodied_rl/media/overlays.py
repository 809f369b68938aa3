"""What is written and drawn into a picture, and switched on and off by name."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.media.episodes import FilmedEpisode, Moment
from embodied_rl.sim.seeding import HELD_OUT_START
from embodied_rl.types import ActionSpec
from embodied_rl.video import BAND, GREEN, TextLook, cut_text, overlay

NAMES = ("task", "instruction", "step", "reward", "value", "actions", "answer", "success")
DEFAULT = ("task", "instruction", "step", "answer", "success")
_AXIS, _BAR, _OFF, _LETTERS = (140, 140, 140), (88, 166, 255), (80, 80, 80), (255, 255, 255)
_INSTRUCTION_LINES = 2
_NARROWEST = 2
"""Pixels of the narrowest bar."""


@dataclass(frozen=True)
class Overlays:
    """What pictures show beside the simulator's own."""

    names: frozenset[str]
    action: ActionSpec
    """For the bars."""
    cameras: tuple[str, ...] = ()
    """Written into their pictures where there are several."""

    def __contains__(self, name: str) -> bool:
        return name in self.names


def parse_overlays(text: str) -> frozenset[str]:
    """``task,value``, ``default,actions``, ``all`` or ``none``. Raises UserError for an unknown name."""
    chosen: set[str] = set()
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word not in (*NAMES, "default", "all", "none"):
            raise UserError(f"overlay={text}: '{word}' is not a choice.{did_you_mean(word, (*NAMES, 'default', 'all', 'none'))}")
        chosen |= set(DEFAULT if word == "default" else NAMES if word == "all" else () if word == "none" else (word,))
    return frozenset(chosen)


@dataclass(frozen=True)
class Bands:
    """How many lines of text there is room for above and below a picture: the same in all tiles of a film."""

    above: int
    below: int

    @staticmethod
    def of(episodes: Iterable[FilmedEpisode], overlays: Overlays) -> Bands:
        """What the fullest picture of `episodes` takes."""
        above = below = 0
        for episode in episodes:
            above = max(above, len(_words(episode, overlays, episode.frames[0])))
            below = max(below, *(len(_numbers(episode, moment, overlays)) for moment in episode.moments))
        return Bands(max(above, 1 if "success" in overlays else 0), below)


def annotate(frame: np.ndarray, episode: FilmedEpisode, moment: Moment, overlays: Overlays, bands: Bands | None = None) -> np.ndarray:
    """A picture [H, W, 3] uint8 with everything that `overlays` names, in bands above and below it.

    `bands` keeps lines free, so that all tiles of a film are of one size; None: what this picture takes.
    """
    above, below = _words(episode, overlays, frame), _numbers(episode, moment, overlays)
    if bands is not None:
        above, below = (lines + [""] * (room - len(lines)) for lines, room in ((above, bands.above), (below, bands.below)))
    badge = "success" if moment.success and "success" in overlays else ""
    shown = frame
    if "actions" in overlays and overlays.action.kind != "text":
        shown = add_action(shown, moment.action, overlays.action)
    if len(overlays.cameras) > 1:
        shown = _name_cameras(shown, overlays.cameras, TextLook.of(frame))
    return overlay(shown, above, below, badge, GREEN, TextLook.of(frame))


def _words(episode: FilmedEpisode, overlays: Overlays, frame: np.ndarray) -> list[str]:
    lines = [episode.task] if "task" in overlays else []
    if "instruction" in overlays and episode.instruction:
        lines += _wrapped(episode.instruction, frame)
    return lines


def seed_name(seed: int) -> str:
    """``held-out seed 3`` for the fourth seed of evaluation, as the commands count them; ``seed 7`` for one that was given."""
    return f"held-out seed {seed - HELD_OUT_START}" if seed >= HELD_OUT_START else f"seed {seed}"


def _numbers(episode: FilmedEpisode, moment: Moment, overlays: Overlays) -> list[str]:
    lines = [f"{seed_name(episode.seed)}   step {moment.step}   return {moment.episode_return:.2f}"] if "step" in overlays else []
    parts = []
    if "reward" in overlays:
        parts.append(f"reward {moment.reward:.3f}")
    if "value" in overlays:
        parts.append("value –" if moment.value is None else f"value {moment.value:.2f}")
    if parts:
        lines.append("   ".join(parts))
    if "answer" in overlays and moment.answer is not None:
        score = "" if moment.log_prob is None else f"log-prob {moment.log_prob:.2f}   "
        lines.append(f"{score}“{' '.join(moment.answer.split())}”")
    return lines


def _wrapped(text: str, frame: np.ndarray) -> list[str]:
    """At most two lines; what does not fit is cut when it is drawn."""
    look = TextLook.of(frame)
    letters = max(8, int((frame.shape[1] - 2 * look.left) / max(1.0, look.font.getlength("n"))))
    lines = textwrap.wrap(" ".join(text.split()), letters)
    kept = lines[:_INSTRUCTION_LINES]
    if len(lines) > _INSTRUCTION_LINES:
        kept[-1] = f"{kept[-1].rstrip(' .,;:')} …"
    return kept


def _name_cameras(frame: np.ndarray, cameras: Sequence[str], look: TextLook) -> np.ndarray:
    """Pictures of several cameras side by side below a band with their names."""
    named = np.concatenate([np.full((look.strip(1), frame.shape[1], 3), BAND, np.uint8), frame])
    from PIL import Image, ImageDraw

    image = Image.fromarray(named)
    draw = ImageDraw.Draw(image)
    width = frame.shape[1] // len(cameras)
    for index, camera in enumerate(cameras):
        text = cut_text(draw, camera, look.font, width - 2 * look.left)
        draw.text((index * width + look.left, look.edge), text, font=look.font, fill=_LETTERS)
    return np.asarray(image).copy()


def add_action(frame: np.ndarray, action: np.ndarray | None, spec: ActionSpec) -> np.ndarray:
    """A picture above a band with an action.

    A vector is a bar for each dimension, up and down from the middle of its range; a choice is one filled square of a row.

    Args:
        frame: [H, W, 3] uint8.
        action: [A] in the simulator's units; [1] the number of a choice; None: there is none, and the band is empty.
        spec: what the simulator takes: numbers.
    """
    from PIL import Image, ImageDraw

    look, size = TextLook.of(frame), min(frame.shape[:2])
    # What has no room is left out: the first dimensions are shown.
    room = frame.shape[1] - 2 * look.left
    count = max(1, min(spec.num_actions if spec.kind == "discrete" else spec.dim, room // _NARROWEST))
    step = max(_NARROWEST, min(size // 24, room // count))
    gap = 1 if step > 3 else 0
    height = (max(12, size // 8) if spec.kind == "continuous" else step) + 2 * look.pad
    top, bottom = frame.shape[0], frame.shape[0] + height
    image = Image.fromarray(np.concatenate([frame, np.full((height, frame.shape[1], 3), BAND, np.uint8)]))
    draw = ImageDraw.Draw(image)
    left = look.left
    if action is None:
        return np.asarray(image).copy()
    if spec.kind == "discrete":
        for index in range(count):
            x = left + index * step
            chosen = index == int(np.ravel(action)[0])
            draw.rectangle((x, top + look.pad, x + step - 1 - gap, bottom - look.pad), fill=_BAR if chosen else _OFF)
        return np.asarray(image).copy()
    middle, reach = (top + bottom) / 2, (height - 2 * look.pad) / 2
    draw.line((left, middle, left + count * step, middle), fill=_AXIS)
    for index, share in enumerate(normalised(action, spec)[:count]):
        x, end = left + index * step, middle - share * reach
        draw.rectangle((x, min(middle, end), x + step - 1 - gap, max(middle, end)), fill=_BAR)
    return np.asarray(image).copy()


def normalised(action: np.ndarray, spec: ActionSpec) -> np.ndarray:
    """[A] in [-1, 1]: where each dimension lies in its range; of an unbounded one, its size against 1."""
    values = np.asarray(action, np.float64).ravel()
    low, high = np.asarray(spec.low, np.float64), np.asarray(spec.high, np.float64)
    bounded = np.isfinite(low) & np.isfinite(high) & (high > low)
    with np.errstate(invalid="ignore", over="ignore"):
        shares = np.where(bounded, 2 * (values - low) / np.where(bounded, high - low, 1.0) - 1, values)
    return np.clip(np.nan_to_num(shares), -1.0, 1.0)
