"""How a film is made: what is drawn into its pictures, how episodes are arranged, and which files are written."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np

from embodied_rl.bounds import FilmRate, HeldOutSeed, PictureSize, PlayedEpisodes, ShownEpisodes
from embodied_rl.config.building import Config
from embodied_rl.errors import UserError, require_known
from embodied_rl.media.episodes import FilmedEpisode, Moment, Selection
from embodied_rl.sim.seeding import HELD_OUT_START
from embodied_rl.types import ActionSpec
from embodied_rl.video import BAND, GREEN, GREY, RED, TextLook, add_border, drawing, font_for, overlay, tile, write_line

NAMES = ("task", "instruction", "step", "reward", "value", "actions", "answer", "success")
DEFAULT = ("task", "instruction", "step", "answer", "success")
_AXIS, _BAR, _OFF = (140, 140, 140), (88, 166, 255), (80, 80, 80)
_INSTRUCTION_LINES = 2
_NARROWEST = 2
"""Width in pixels of the narrowest bar."""


@dataclass(frozen=True)
class Overlays:
    """What pictures show in addition to the simulator's own."""

    names: frozenset[str]
    action: ActionSpec
    """Action spec for the bars."""
    cameras: tuple[str, ...] = ()
    """Names of the cameras, drawn into their pictures if there are several."""

    def __contains__(self, name: str) -> bool:
        return name in self.names


def parse_overlays(text: str) -> frozenset[str]:
    """``task,value``, ``default,actions``, ``all`` or ``none``. Raises UserError for an unknown name."""
    chosen: set[str] = set()
    for word in filter(None, (part.strip() for part in text.split(","))):
        require_known(word, (*NAMES, "default", "all", "none"), f"overlay={text}: '{word}' is not a choice.")
        chosen |= set(DEFAULT if word == "default" else NAMES if word == "all" else () if word == "none" else (word,))
    return frozenset(chosen)


@dataclass(frozen=True)
class Bands:
    """Lines of text above and below a picture, equal for all tiles of a film."""

    above: int
    below: int

    @staticmethod
    def of(episodes: Iterable[FilmedEpisode], overlays: Overlays) -> Bands:
        """Lines of the fullest picture of `episodes`."""
        above = below = 0
        for episode in episodes:
            above = max(above, len(_words(episode, overlays, episode.frames[0])))
            below = max(below, *(len(_numbers(episode, moment, overlays)) for moment in episode.moments))
        return Bands(max(above, 1 if "success" in overlays else 0), below)


def annotate(frame: np.ndarray, episode: FilmedEpisode, moment: Moment, overlays: Overlays, bands: Bands | None = None) -> np.ndarray:
    """A picture [H, W, 3] uint8 with everything that `overlays` names, in bands above and below it.

    `bands` reserves lines, so that all tiles of a film have one size; None: as many as this picture needs.
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


def _numbers(episode: FilmedEpisode, moment: Moment, overlays: Overlays) -> list[str]:
    # Seeds of evaluation are shown as the commands count them.
    number = episode.seed - HELD_OUT_START
    seed = f"held-out seed {number}" if number >= 0 else f"seed {episode.seed}"
    lines = [f"{seed}   step {moment.step}   return {moment.episode_return:.2f}"] if "step" in overlays else []
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
    """At most two lines; the rest is cut when it is drawn."""
    look, text = TextLook.of(frame), " ".join(text.split())
    font = font_for(text, look.font)
    letters = max(8, int((frame.shape[1] - 2 * look.pad) / max(1.0, font.getlength("n"), font.getlength(text) / max(1, len(text)))))
    lines = textwrap.wrap(text, letters)
    kept = lines[:_INSTRUCTION_LINES]
    if len(lines) > _INSTRUCTION_LINES:
        kept[-1] = f"{kept[-1].rstrip(' .,;:')} …"
    return kept


def _name_cameras(frame: np.ndarray, cameras: Sequence[str], look: TextLook) -> np.ndarray:
    """Pictures of several cameras side by side below a band with their names."""
    named = np.concatenate([np.full((look.strip(1), frame.shape[1], 3), BAND, np.uint8), frame])
    width = frame.shape[1] // len(cameras)
    with drawing(named) as draw:
        for index, camera in enumerate(cameras):
            write_line(draw, (index * width + look.pad, look.pad), camera, look.font, width - 2 * look.pad)
    return named


def add_action(frame: np.ndarray, action: np.ndarray | None, spec: ActionSpec) -> np.ndarray:
    """A picture above a band with an action.

    A vector becomes a bar for each dimension, up or down from the middle of its range; a choice becomes one filled square of a row.

    Args:
        frame: [H, W, 3] uint8.
        action: [A] in the simulator's units; [1] the number of a choice; None: the band stays empty.
        spec: the simulator's action spec: numbers.
    """
    look, size = TextLook.of(frame), min(frame.shape[:2])
    # Dimensions without room are left out: the first ones are shown.
    room = frame.shape[1] - 2 * look.pad
    count = max(1, min(spec.num_actions if spec.kind == "discrete" else spec.dim, room // _NARROWEST))
    step = max(_NARROWEST, min(size // 24, room // count))
    gap = 1 if step > 3 else 0
    height = (max(12, size // 8) if spec.kind == "continuous" else step) + 2 * look.pad
    top, bottom = frame.shape[0], frame.shape[0] + height
    canvas = np.concatenate([frame, np.full((height, frame.shape[1], 3), BAND, np.uint8)])
    if action is None:
        return canvas
    left, middle, reach = look.pad, (top + bottom) / 2, (height - 2 * look.pad) / 2
    with drawing(canvas) as draw:
        if spec.kind == "discrete":
            for index in range(count):
                x = left + index * step
                chosen = index == int(np.ravel(action)[0])
                draw.rectangle((x, top + look.pad, x + step - 1 - gap, bottom - look.pad), fill=_BAR if chosen else _OFF)
            return canvas
        draw.line((left, middle, left + count * step - 1, middle), fill=_AXIS)
        for index, share in enumerate(normalised(action, spec)[:count]):
            x, end = left + index * step, middle - share * reach
            draw.rectangle((x, min(middle, end), x + step - 1 - gap, max(middle, end)), fill=_BAR)
    return canvas


def normalised(action: np.ndarray, spec: ActionSpec) -> np.ndarray:
    """[A] in [-1, 1]: position of each dimension in its range; for an unbounded one, its size relative to 1."""
    values = np.asarray(action, np.float64).ravel()
    low, high = np.asarray(spec.low, np.float64), np.asarray(spec.high, np.float64)
    bounded = np.isfinite(low) & np.isfinite(high) & (high > low)
    with np.errstate(invalid="ignore", over="ignore"):
        shares = np.where(bounded, 2 * (values - low) / np.where(bounded, high - low, 1.0) - 1, values)
    return np.clip(np.nan_to_num(shares), -1.0, 1.0)


BANDS = ((31, 91, 191), (168, 76, 8))
"""Colours of the bands above the rows of the two policies."""
_ROW = 4
"""Pictures per row if two policies are compared."""
_SHORTEST_PIXELS = 96
"""Smallest height of a tile, so that the band above it is readable."""


@dataclass(frozen=True)
class Row:
    """Episodes of one policy, in the order of the other policy's seeds if there is one."""

    label: str
    episodes: Sequence[FilmedEpisode]


class Pictures(Sequence[np.ndarray]):
    """The pictures [H, W, 3] uint8 of a video. An ended episode keeps its last moment, in a frame with the colour of its outcome.

    Args:
        rows: one policy, whose episodes become a grid; or two, one above the other, each below a band with its name.
        overlays: what each tile shows in addition to its picture.
        reports_success: False: the frames are grey, because the task does not define success.
    """

    def __init__(self, rows: Sequence[Row], overlays: Overlays, *, reports_success: bool) -> None:
        self._rows, self._overlays, self._reports_success = rows, overlays, reports_success
        self._longest = max(len(episode.frames) for row in rows for episode in row.episodes)
        self._bands = Bands.of((episode for row in rows for episode in row.episodes), overlays)
        self._finals: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self._longest

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...

    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        at = index % len(self)
        if len(self._rows) == 1:
            return tile([self._tile(episode, at) for episode in self._rows[0].episodes])
        count = len(self._rows[0].episodes)
        columns = min(count, max(1, _ROW // max(1, len(self._overlays.cameras))))
        bands: list[np.ndarray] = []
        for start in range(0, count, columns):
            for row, colour in zip(self._rows, BANDS, strict=True):
                tiles = tile([self._tile(episode, at) for episode in row.episodes[start : start + columns]], columns)
                bands += [band(row.label, tiles.shape[1], tiles.shape[0], colour), tiles]
        return np.concatenate(bands)

    def _tile(self, episode: FilmedEpisode, at: int) -> np.ndarray:
        last = len(episode.frames) - 1
        if at < last:
            return self._framed(episode, at, BAND)
        known = self._finals.get(id(episode))
        if known is None:
            outcome = GREEN if episode.finished.success_once else RED
            known = self._finals[id(episode)] = self._framed(episode, last, outcome if self._reports_success else GREY)
        return known

    def _framed(self, episode: FilmedEpisode, at: int, colour: tuple[int, int, int]) -> np.ndarray:
        """A moment's picture with its overlays; if outcomes are shown, inside a frame that is there from the beginning."""
        shown = annotate(episode.frames[at], episode, episode.moments[at], self._overlays, self._bands)
        return add_border(shown, colour) if "success" in self._overlays else shown


def band(text: str, width: int, tile_height: int, colour: tuple[int, int, int]) -> np.ndarray:
    """A coloured band [h, width, 3] with a policy's name, for tiles of this height."""
    look = TextLook.of(np.empty((max(tile_height, _SHORTEST_PIXELS), max(width, _SHORTEST_PIXELS), 0)))
    height = look.line + 2 * look.pad
    canvas = np.full((height + height % 2, width, 3), colour, np.uint8)
    with drawing(canvas) as draw:
        write_line(draw, (look.pad, look.pad), text, look.font, width - 2 * look.pad)
    return canvas


FORMATS = ("mp4", "gif")
HOLD_S = 1.0
"""Seconds for which the end of the last episode stays."""
MAX_SHOWN = 64
MAX_CAMERAS = 8


@dataclass(frozen=True)
class Film(Config):
    """Settings of a film. Raises UserError for an impossible value."""

    num_episodes: ShownEpisodes | None = None
    """None: as many as `select` says, or 4."""
    select: str = "first"
    among: PlayedEpisodes | None = None
    seed: HeldOutSeed = 0
    cameras: tuple[str, ...] = ()
    """Names of cameras; empty: the default one."""
    overlay: str = "default"
    size: PictureSize = 384
    fps: FilmRate = 20
    formats: tuple[str, ...] = FORMATS
    show_progress: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for word in self.formats or ("",):
            require_known(word, FORMATS, f"format={','.join(self.formats)}: '{word}' is not a choice.")
        if len(self.cameras) > MAX_CAMERAS or len(set(self.cameras)) < len(self.cameras):
            raise UserError(f"cameras={','.join(self.cameras)}: list up to {MAX_CAMERAS} different names.")
        parse_overlays(self.overlay)
        if self.selection().num_shown > MAX_SHOWN:
            raise UserError(f"select={self.select}: at most {MAX_SHOWN} episodes can be shown.")

    def selection(self, num_recorded: int | None = None) -> Selection:
        """Episodes to show; of a recording of `num_recorded` episodes, the choice is among all unless `among` says otherwise."""
        chosen = Selection.parse(self.select, self.num_episodes, self.among)
        if num_recorded is None:
            return chosen
        among = num_recorded if self.among is None else min(self.among, num_recorded)
        return dataclasses.replace(chosen, among=among, num_shown=min(chosen.num_shown, among))


def write_videos(pictures: Sequence[np.ndarray], base: Path, film: Film) -> list[Path]:
    """Write one video per format; `base` is their path without number and suffix. Raises UserError if they cannot be written."""
    from embodied_rl.video import play_rate, write_gif, write_mp4

    rate = play_rate(len(pictures), film.fps)
    paths = free_names(base, film.formats)
    for path in paths:
        (write_mp4 if path.suffix == ".mp4" else write_gif)(path, pictures, rate, HOLD_S)
    return paths


def free_names(base: Path, formats: Sequence[str]) -> list[Path]:
    """File names with one number for all formats of a video, which none of them uses yet."""
    number = 1
    while True:
        name = base.name if number == 1 else f"{base.name}_{number}"
        paths = [base.with_name(f"{name}.{suffix}") for suffix in formats]
        if not any(path.exists() for path in paths):
            return paths
        number += 1


def file_name(text: str) -> str:
    """At most 60 characters of `text`, with dashes in place of those that do not belong in a file name."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in text[:60])
