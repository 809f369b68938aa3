"""Bounds of numbers, declared once in their types: the check, the message and the documentation read them there.

`Annotated[int, Bounds(1, 100)]` is an integer from 1 to 100. The names below are the quantities of configurations and command
lines. A bound is where a value stops making physical sense, not where it stops being wise.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Bounds:
    """An interval of numbers, without NaN and infinity."""

    least: float
    most: float
    above: bool = False
    """Whether `least` itself is excluded."""
    below: bool = False
    """Whether `most` itself is excluded."""

    def hold(self, value: float) -> bool:
        """Whether `value` is inside."""
        return (self.least < value if self.above else self.least <= value) and (value < self.most if self.below else value <= self.most)

    def __str__(self) -> str:
        least, most = _digits(self.least), _digits(self.most)
        if not self.above and not self.below:
            return f"between {least} and {most}"
        return f"{'above' if self.above else 'at least'} {least} and {'below' if self.below else 'at most'} {most}"


def bounds_of(kind: Any) -> tuple[Any, Bounds | None]:
    """A type without its bounds, and the bounds; None if it has none."""
    if typing.get_origin(kind) is not Annotated:
        return kind, None
    plain, *notes = typing.get_args(kind)
    return plain, next((note for note in notes if isinstance(note, Bounds)), None)


def whole_number(text: str) -> int | None:
    """Number of a text of 1 to 18 ASCII digits; None for another text, such as ``²``, which `str.isdigit` accepts and `int` does not."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _digits(number: float) -> str:
    """1000000 as 1,000,000; numbers above a trillion, and small ones, as a power of ten."""
    return f"{number:,}" if isinstance(number, int) and abs(number) <= 10**12 else f"{number:g}"


Free = Annotated[float, Bounds(-(2**64), 2**64)]
"""An argument that only a simulator or a user's own function can check further: any number of 64 bits."""

# Counts.
Slots = Annotated[int, Bounds(1, 1_000_000)]
Processes = Annotated[int, Bounds(1, 65_536)]
"""Numbers of workers, ranks, threads, players."""
Devices = Annotated[int, Bounds(1, 65_536)]
Retries = Annotated[int, Bounds(0, 1_000_000)]
Staleness = Annotated[int, Bounds(0, 1_000_000)]
"""Age in updates."""
Steps = Annotated[int, Bounds(1, 10**12)]
"""Steps of environments or of an optimizer."""
Episodes = Annotated[int, Bounds(1, 1_000_000_000)]
Rows = Annotated[int, Bounds(1, 1_000_000_000)]
"""Rows of a batch."""
Epochs = Annotated[int, Bounds(1, 1_000_000)]
Tokens = Annotated[int, Bounds(1, 100_000_000)]
Size = Annotated[int, Bounds(1, 1_000_000)]
"""Size of a layer, a vocabulary, a list: dimensions of arrays."""
Members = Annotated[int, Bounds(2, 1_000_000)]
"""Networks whose spread is an uncertainty."""
Layers = Annotated[int, Bounds(1, 10_000)]
Chunk = Annotated[int, Bounds(1, 10_000)]
"""Steps of an action chunk."""
Pixels = Annotated[int, Bounds(16, 16_384)]
FramesPerSecond = Annotated[int, Bounds(1, 1_000)]
Seed = Annotated[int, Bounds(0, 2**31 - 1)]
HeldOutSeed = Annotated[int, Bounds(0, 2**29 - 1)]
"""Offset of held-out seeds, added to 2**30."""
PictureSize = Annotated[int, Bounds(16, 2_048)]
"""Pixels of a film's picture."""
FilmRate = Annotated[int, Bounds(1, 120)]
ShownEpisodes = Annotated[int, Bounds(1, 64)]
"""Episodes in one film."""
PlayedEpisodes = Annotated[int, Bounds(1, 1_024)]
"""Episodes played for one film, which shows some of them."""
Port = Annotated[int, Bounds(0, 65_535)]

LoraRank = Annotated[int, Bounds(0, 65_536)]
"""Rank of LoRA; 0: none."""

# Quantities.
Units = Annotated[float, Bounds(0, 65_536)]
"""Processors or accelerators, or parts of them."""
Seconds = Annotated[float, Bounds(0, 10**8, above=True)]
Megabytes = Annotated[float, Bounds(0, 10**9, above=True)]
Gibibytes = Annotated[float, Bounds(0, 10**9)]
Share = Annotated[float, Bounds(0, 1)]
PositiveShare = Annotated[float, Bounds(0, 1, above=True)]
Fraction = Annotated[float, Bounds(0, 1, above=True, below=True)]
LearningRate = Annotated[float, Bounds(0, 1_000, above=True)]
Coefficient = Annotated[float, Bounds(0, 10**9)]
Positive = Annotated[float, Bounds(0, 10**9, above=True)]
"""A scale or a limit."""
LogStd = Annotated[float, Bounds(-50, 50)]
Temperature = Annotated[float, Bounds(0, 1_000)]
"""Temperature of token sampling; 0 takes the likeliest."""
PositiveTemperature = Annotated[float, Bounds(0, 1_000, above=True)]
Score = Annotated[float, Bounds(-(10**12), 10**12)]
"""A reward or a return."""
