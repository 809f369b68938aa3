"""The errors a user can cause, each saying what is wrong, where, what the choices are and how to mend it."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

_SHOWN_CHARS = 80
"""Of a value in a message."""

LONGEST_MESSAGE = 400
"""Characters of a UserError's message."""
_LISTING_CHARS = 200
"""Of the names that `did_you_mean` lists; of more than that it lists the nearest."""
_WORD_CHARS = 80
_LISTING = re.compile(r"(?:[^\s,]+, ){8,}(?=\S)")


class UserError(ValueError):
    """A mistake in what the user gave (configuration, checkpoint, file, missing package).

    The commands print only the message, without a traceback, and exit with status 2. A message that outgrows `LONGEST_MESSAGE` is
    shortened where it says least: see `in_short`.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(in_short(message))


class MissingExtraError(UserError):
    """A simulator, logger or backend whose optional packages are not installed."""

    def __init__(self, what: str, extra: str, cause: BaseException | None = None) -> None:
        reason = f" ({cause})" if cause is not None else ""
        super().__init__(f'{what} needs packages that are not installed{reason}. Install them: pip install "embodied-rl[{extra}]"')
        self.extra = extra


class from_extra:  # noqa: N801  # a verb, as those of contextlib
    """Around imports of optional packages: ``with from_extra("MuJoCo", "mujoco"): …``. Raises MissingExtraError where one is missing."""

    def __init__(self, what: str, extra: str) -> None:
        self._what, self._extra = what, extra

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ImportError):
            raise MissingExtraError(self._what, self._extra, error) from error


class MissingAssetsError(UserError):
    """A simulator task whose meshes, textures or data sets are not on this machine."""

    def __init__(self, message: str, fetch: str = "") -> None:
        """`fetch` is the command that brings them, which the message holds too."""
        super().__init__(message)
        self.fetch = fetch


class IncompatibleCheckpointError(UserError):
    """A checkpoint that is damaged, or was made for another simulator, policy or format version."""


class NonFiniteError(FloatingPointError):
    """NaN or infinity where a finite number is needed; the run stops and says where it came from."""

    batch: Mapping[str, Any] | None = None
    """{name: array} of what it came from, to be written down."""
    slots: tuple[int, ...] = ()
    """Of the environments that it came from, where it did."""

    def context(self) -> dict[str, Any]:
        """What finding and repeating the failure needs beside arrays, JSON-able."""
        return {"message": str(self)}


def brief(what: object, limit: int = 160) -> str:
    """What an error or a file says, on one line and cut: the text is not ours and may be long."""
    text = " ".join(str(what).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """Return `` Did you mean 'x'? Known: a, b, x.`` for an error message; the first sentence only when something is near."""
    known = sorted(set(choices))
    asked = (name if isinstance(name, str) else shown(name))[:_WORD_CHARS]
    near = difflib.get_close_matches(asked, known, n=1, cutoff=0.6)
    suggestion = f" Did you mean '{near[0]}'?" if near else ""
    listing = ", ".join(known) if known else "(none)"
    if len(listing) > _LISTING_CHARS:
        nearest = sorted(difflib.get_close_matches(asked, known, n=6, cutoff=0.0))
        listing = f"{', '.join(nearest)}, … ({len(known)} in all)"
    return f"{suggestion} Known: {listing}."


def require_known(name: object, known: Collection[str], said: str) -> None:
    """Raises UserError for a name that is none of those known: what is `said`, and the choices."""
    if name not in known:
        raise UserError(f"{said}{did_you_mean(name, known)}")


class Limits:
    """A dataclass of numbers that are above 0 and finite; None sets no limit. Raises UserError for another."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{name} must be a finite number above 0, got {value}.")


def shown(value: object) -> str:
    """A value as a message names it: as YAML has it where it is simple, and never longer than a line's part."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "a number of thousands of digits"
    except RecursionError:
        return "values nested too deeply"
    return brief(text, _SHOWN_CHARS)


def in_short(message: str, most: int = LONGEST_MESSAGE) -> str:
    """The message in at most `most` characters: first lists lose what follows their fourth name, then words and paths without end their
    middle, then the message its middle. What went wrong stands at its beginning and how to mend it at its end; both stay."""
    if len(message) <= most:
        return message
    message = _LISTING.sub(lambda found: f"{', '.join(found[0].split(', ')[:4])}, … ", message)
    for word in sorted({found for found in message.split() if len(found) > _WORD_CHARS}, key=len, reverse=True):
        if len(message) > most:
            message = message.replace(word, f"{word[:50]}…{word[-25:]}")
    if len(message) <= most:
        return message
    first, last = message[: most * 3 // 5 - 3], message[-(most * 2 // 5) :]
    return f"{first.rpartition(' ')[0] or first} … {last.partition(' ')[2] or last}"
