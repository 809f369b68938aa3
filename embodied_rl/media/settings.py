"""How a film is made, and the files that it becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embodied_rl.bounds import FilmRate, HeldOutSeed, PictureSize, PlayedEpisodes, ShownEpisodes
from embodied_rl.config.building import Config
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.media.episodes import Selection

if TYPE_CHECKING:
    import numpy as np

FORMATS = ("mp4", "gif")
HOLD_S = 1.0
"""How long the end of the last episode stays."""
MAX_SHOWN = 64
MAX_CAMERAS = 8


@dataclass(frozen=True)
class Film(Config):
    """How a film is made and what it shows. Raises UserError for an impossible value."""

    num_episodes: ShownEpisodes = 4
    select: str = "first"
    among: PlayedEpisodes | None = None
    seed: HeldOutSeed = 0
    cameras: tuple[str, ...] = ()
    """Names; none: the default one."""
    overlay: str = "default"
    size: PictureSize = 384
    fps: FilmRate = 20
    formats: tuple[str, ...] = FORMATS
    show_progress: bool = False

    def __post_init__(self) -> None:
        from embodied_rl.media.overlays import parse_overlays

        super().__post_init__()
        for word in self.formats or ("",):
            if word not in FORMATS:
                raise UserError(f"format={','.join(self.formats)}: '{word}' is not a choice.{did_you_mean(word, FORMATS)}")
        if len(self.cameras) > MAX_CAMERAS or len(set(self.cameras)) < len(self.cameras):
            raise UserError(f"cameras={','.join(self.cameras)}: name up to {MAX_CAMERAS}, each once.")
        parse_overlays(self.overlay)
        if self.selection().num_shown > MAX_SHOWN:
            raise UserError(f"select={self.select}: at most {MAX_SHOWN} episodes can be shown.")

    def selection(self, num_recorded: int | None = None) -> Selection:
        """What is shown; of a recording of so many episodes, which are all selected from unless `among` says otherwise."""
        chosen = Selection.parse(self.select, self.num_episodes, self.among)
        if num_recorded is None:
            return chosen
        among = num_recorded if self.among is None else min(self.among, num_recorded)
        return dataclasses.replace(chosen, among=among, num_shown=min(chosen.num_shown, among))


def write_videos(pictures: Sequence[np.ndarray], base: Path, film: Film) -> list[Path]:
    """Write one video per format; `base` is their name without number and ending. Raises UserError where they cannot be written."""
    from embodied_rl.video import play_rate, write_gif, write_mp4

    rate = play_rate(len(pictures), film.fps)
    paths = free_names(base, film.formats)
    for path in paths:
        (write_mp4 if path.suffix == ".mp4" else write_gif)(path, pictures, rate, HOLD_S)
    return paths


def free_names(base: Path, formats: Sequence[str]) -> list[Path]:
    """One number for all formats of a video, and none that is taken in either."""
    number = 1
    while True:
        name = base.name if number == 1 else f"{base.name}_{number}"
        if not any(base.with_name(f"{name}.{suffix}").exists() for suffix in formats):
            return [base.with_name(f"{name}.{suffix}") for suffix in formats]
        number += 1


def file_name(text: str) -> str:
    """`text` with what a file's name should not hold as dashes."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in text)
