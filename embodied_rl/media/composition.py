"""Episodes side by side, as the pictures of one video; made one at a time, when the video is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from embodied_rl.media.episodes import FilmedEpisode
from embodied_rl.media.overlays import Bands, Overlays, annotate
from embodied_rl.video import GREEN, GREY, RED, TextLook, add_border, cut_text, tile

BANDS = ((31, 91, 191), (168, 76, 8))
"""Colours of the bands above the rows of the one policy and of the other."""
_ROW = 4
"""Pictures in a row where two policies are compared."""
_SHORTEST_PIXELS = 96
"""Height that a tile needs for a band above it to be read."""


@dataclass(frozen=True)
class Row:
    """Episodes of one policy, in the order of the other's seeds where there is another one."""

    label: str
    episodes: Sequence[FilmedEpisode]


class Pictures(Sequence[np.ndarray]):
    """The pictures [H, W, 3] uint8 of a video. An episode that has ended keeps its last moment, in a frame of its outcome's colour.

    Args:
        rows: one policy, whose episodes become a grid; or two, one above the other, each below a band with its name.
        overlays: what each tile shows beside its picture.
        reports_success: False: the frames are grey, for the task has no notion of success.
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
            return annotate(episode.frames[at], episode, episode.moments[at], self._overlays, self._bands)
        known = self._finals.get(id(episode))
        if known is None:
            known = annotate(episode.frames[last], episode, episode.moments[last], self._overlays, self._bands)
            if "success" in self._overlays:
                outcome = GREEN if episode.finished.success_once else RED
                known = add_border(known, outcome if self._reports_success else GREY)
            self._finals[id(episode)] = known
        return known


def band(text: str, width: int, tile_height: int, colour: tuple[int, int, int]) -> np.ndarray:
    """A coloured band [h, width, 3] with a policy's name, for tiles of this height."""
    from PIL import Image, ImageDraw

    look = TextLook.of(np.empty((max(tile_height, _SHORTEST_PIXELS), max(width, _SHORTEST_PIXELS), 0)))
    height = look.line + 2 * look.pad
    image = Image.new("RGB", (width, height + height % 2), colour)
    draw = ImageDraw.Draw(image)
    draw.text((look.left, look.pad), cut_text(draw, text, look.font, width - 2 * look.left), font=look.font, fill=(255, 255, 255))
    return np.asarray(image).copy()
