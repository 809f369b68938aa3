"""Errors that a user can cause; each says what is wrong, where, what the choices are and how to fix it."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_SHOWN_CHARS = 80
"""Longest value in a message, in characters."""

LONGEST_MESSAGE = 400
"""Longest message of a UserError, in characters."""
_LISTING_CHARS = 200
"""Longest list of names in `did_you_mean`, in characters; longer lists show only the nearest names."""
_WORD_CHARS = 80
_LISTING = re.compile(r"(?:[^\s,]+, ){8,}(?=\S)")


class UserError(ValueError):
    """A mistake in the user's input (configuration, checkpoint, file, missing package).

    The commands print only the message, without a traceback, and exit with status 2. `in_short` shortens a message above
    `LONGEST_MESSAGE` where it says least.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(in_short(message))


class MissingExtraError(UserError):
    """A simulator, logger or backend whose optional packages are not installed."""

    def __init__(self, what: str, extra: str, cause: BaseException | None = None) -> None:
        reason = f" ({cause})" if cause is not None else ""
        super().__init__(f'{what} needs packages that are not installed{reason}. Install them: pip install "embodied-rl[{extra}]"')
        self.extra = extra


@contextmanager
def from_extra(what: str, extra: str) -> Iterator[None]:
    """Context for imports of optional packages: ``with from_extra("MuJoCo", "mujoco"): …``. Raises MissingExtraError if one is missing."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(what, extra, error) from error


class MissingAssetsError(UserError):
    """A simulator task whose meshes, textures or data sets are not on this machine."""

    def __init__(self, message: str, fetch: str = "") -> None:
        """`fetch`: command that downloads them; the message contains it too."""
        super().__init__(message)
        self.fetch = fetch


class IncompatibleCheckpointError(UserError):
    """A checkpoint that is damaged, or was made for another simulator, policy or format version."""


class NonFiniteError(FloatingPointError):
    """NaN or infinity where a finite number is needed; the run stops and reports the origin."""

    batch: Mapping[str, Any] | None = None
    """{name: array} of the batch with the number, to be written to a file."""
    slots: tuple[int, ...] = ()
    """Slots of the environments that it came from, if any."""

    def context(self) -> dict[str, Any]:
        """JSON-able facts that help to find and repeat the failure, beside arrays."""
        return {"message": str(self)}


def brief(what: object, limit: int = 160) -> str:
    """An error's or a file's text on one line, shortened, because it is not ours and may be long."""
    text = " ".join(str(what).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """Return `` Did you mean 'x'? Known: a, b, x.`` for an error message; the first sentence only if a name is near."""
    known = sorted(set(choices))
    asked = (name if isinstance(name, str) else shown(name))[:_WORD_CHARS]
    folded = {choice.casefold(): choice for choice in known}
    near = difflib.get_close_matches(asked.casefold(), folded, n=1, cutoff=0.6)
    suggestion = f" Did you mean '{folded[near[0]]}'?" if near else ""
    listing = ", ".join(known) if known else "(none)"
    if len(listing) > _LISTING_CHARS:
        nearest = sorted(difflib.get_close_matches(asked, known, n=6, cutoff=0.0))
        listing = f"{', '.join(nearest)}, … ({len(known)} in all)"
    return f"{suggestion} Known: {listing}."


def require_known(name: object, known: Collection[str], said: str) -> None:
    """Raise UserError for an unknown name, with the text `said` and the choices."""
    if name not in known:
        raise UserError(f"{said}{did_you_mean(name, known)}")


class Limits:
    """A dataclass of finite numbers above 0; None sets no limit. Raises UserError for other numbers."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{name} must be a finite number above 0, got {value}.")


def shown(value: object) -> str:
    """A value for a message: as in YAML if it is simple, and shortened."""
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
    """Shorten the message to at most `most` characters: lists lose everything after their fourth name, then endless words and paths lose
    their middle, then the message loses its middle. Its beginning (what went wrong) and its end (how to fix it) stay."""
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
