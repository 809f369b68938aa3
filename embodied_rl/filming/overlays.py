"""What is written and drawn into a picture, and switched on and off by name."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.filming.episodes import FilmedEpisode, Moment
from embodied_rl.types import ActionSpec
from embodied_rl.video import GREEN, TextLook, cut_text, overlay

NAMES = ("task", "instruction", "step", "reward", "value", "actions", "answer", "success")
DEFAULT = ("task", "step", "answer", "success")
_PANEL, _AXIS, _BAR, _OFF, _LETTERS = (0, 0, 0, 150), (255, 255, 255, 130), (88, 166, 255, 255), (255, 255, 255, 70), (255, 255, 255)
_INSTRUCTION_LINES = 2
_BARS_WIDTH, _NARROWEST = 0.45, 2
"""Share of a picture's side that bars may take, and pixels of the narrowest one."""


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


def annotate(frame: np.ndarray, episode: FilmedEpisode, moment: Moment, overlays: Overlays) -> np.ndarray:
    """A copy of a picture [H, W, 3] uint8 with everything that `overlays` names."""
    above = [episode.task] if "task" in overlays else []
    if "instruction" in overlays and episode.instruction:
        above += _wrapped(episode.instruction, frame)
    below = _numbers(episode, moment, overlays)
    badge = "success" if moment.success and "success" in overlays else ""
    drawn = overlay(frame, above, below, badge, GREEN)
    if len(overlays.cameras) > 1:
        drawn = _name_cameras(drawn, overlays.cameras, TextLook.of(frame).strip(max(len(above), 1 if badge else 0)))
    if "actions" in overlays and moment.action is not None:
        drawn = draw_action(drawn, moment.action, overlays.action, TextLook.of(frame).strip(len(below)))
    return drawn


def _numbers(episode: FilmedEpisode, moment: Moment, overlays: Overlays) -> list[str]:
    lines = [f"seed {episode.seed}   step {moment.step}   return {moment.episode_return:.2f}"] if "step" in overlays else []
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
        kept[-1] = f"{kept[-1]}…"
    return kept


def _name_cameras(frame: np.ndarray, cameras: Sequence[str], y: int) -> np.ndarray:
    from PIL import Image, ImageDraw

    image = Image.fromarray(frame)
    draw: Any = ImageDraw.Draw(image, "RGBA")
    look = TextLook.of(frame)
    width = frame.shape[1] // len(cameras)
    for index, camera in enumerate(cameras):
        text = cut_text(draw, camera, look.font, width - 2 * look.left)
        left = index * width + look.left
        draw.rectangle(
            (left - look.pad, y + look.pad, left + draw.textlength(text, font=look.font) + look.pad, y + look.pad + look.line), _PANEL
        )
        draw.text((left, y + look.pad), text, font=look.font, fill=_LETTERS)
    return np.asarray(image).copy()


def draw_action(frame: np.ndarray, action: np.ndarray, spec: ActionSpec, above: int) -> np.ndarray:
    """A copy of a picture with the action in its lower right corner.

    A vector is a bar for each dimension, up and down from the middle of its range; a choice is one filled square of a row.

    Args:
        frame: [H, W, 3] uint8.
        action: [A] in the simulator's units; [1] the number of a choice.
        spec: what the simulator takes.
        above: pixels that are kept free below.
    """
    from PIL import Image, ImageDraw

    if spec.kind == "text":
        return frame.copy()
    image = Image.fromarray(frame)
    draw: Any = ImageDraw.Draw(image, "RGBA")
    look, size = TextLook.of(frame), min(frame.shape[:2])
    room = int(size * _BARS_WIDTH)
    # What has no room is left out: the first dimensions are shown.
    count = max(1, min(spec.num_actions if spec.kind == "discrete" else spec.dim, room // _NARROWEST))
    step = max(_NARROWEST, min(size // 24, room // count))
    gap = 1 if step > 3 else 0
    height = max(12, size // 5) if spec.kind == "continuous" else step + 2 * look.pad
    right, bottom = frame.shape[1] - look.left, frame.shape[0] - above - look.pad - (look.edge if not above else 0)
    left, top = right - count * step - 2 * look.pad, bottom - height
    draw.rectangle((left, top, right, bottom), fill=_PANEL)
    if spec.kind == "discrete":
        for index in range(count):
            x = left + look.pad + index * step
            chosen = index == int(np.ravel(action)[0])
            draw.rectangle((x, top + look.pad, x + step - 1 - gap, bottom - look.pad), fill=_BAR if chosen else _OFF)
        return np.asarray(image).copy()
    middle, reach = (top + bottom) / 2, (height - 2 * look.pad) / 2
    draw.line((left + look.pad, middle, right - look.pad, middle), fill=_AXIS)
    for index, share in enumerate(normalised(action, spec)[:count]):
        x, end = left + look.pad + index * step, middle - share * reach
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
