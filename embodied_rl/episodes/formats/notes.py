"""What becomes of each field of an episode in another project's format, so that a conversion loses nothing in silence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Fate = Literal["kept", "extra", "changed", "filled", "lost"]
"""kept: exact, where the format itself keeps it. extra: exact, in a place of ours that other readers of the format overlook.
changed: there, but not bit by bit or not under its name. filled: the file does not say; something else stands in its place.
lost: not there any more."""

_ORDER = ("lost", "filled", "changed", "extra", "kept")


@dataclass(frozen=True)
class FieldNote:
    """One field and its fate."""

    field: str
    """As in `RecordedEpisode`: ``log_prob``, ``observation.state``, ``seed``; or what else the line is about."""
    fate: Fate
    note: str = ""
    """Where it is, what stands for it, or why it is gone."""

    def __str__(self) -> str:
        return f"{self.fate:<8}{self.field}{': ' if self.note else ''}{self.note}"


class NoteBook:
    """Collects notes while episodes go by; the same note counts once, a worse fate of the same field wins."""

    def __init__(self, notes: Iterable[FieldNote] = ()) -> None:
        self._notes: dict[str, FieldNote] = {}
        for note in notes:
            self.add(note.field, note.fate, note.note)

    def add(self, field: str, fate: Fate, note: str = "") -> None:
        known = self._notes.get(field)
        if known is None or _ORDER.index(fate) < _ORDER.index(known.fate):
            self._notes[field] = FieldNote(field, fate, note)

    def __iter__(self) -> Iterator[FieldNote]:
        """Worst first, and by name."""
        return iter(sorted(self._notes.values(), key=lambda note: (_ORDER.index(note.fate), note.field)))

    def notes(self) -> tuple[FieldNote, ...]:
        return tuple(self)
