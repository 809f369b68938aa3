"""What all attacks share: numbered attempts that can be repeated one by one, a budget of time, and the printed counts."""

from __future__ import annotations

import importlib
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

ATTACKS = {
    "commands": "tests.chaos.commands:Commands",
    "files": "tests.chaos.files:Files",
    "requests": "tests.chaos.requests:Requests",
    "sockets": "tests.chaos.sockets:Sockets",
    "kills": "tests.chaos.kills:Kills",
}
"""What ``attacks=`` names: each target is an `Attack`."""


class Attack:
    """One kind of attack. Attempt `number` is the same for the same `chance`, so that every failure can be repeated alone."""

    name = "attack"

    def __init__(self, folder: Path) -> None:
        """`folder` is an empty folder for whatever the attempts write."""
        self.folder = folder

    def attempt(self, number: int, chance: random.Random) -> str | None:
        """Attack once. Returns None where the project withstood, else what it did: one line, and what was sent."""
        raise NotImplementedError

    def count(self) -> dict[str, int]:
        """Figures of this attack beside attempts and failures, printed with them."""
        return {}

    def close(self) -> None:
        """End what the attack has started."""


@dataclass
class Tally:
    """What one attack came to."""

    name: str
    seed: int
    attempts: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)
    """(number of the attempt, what the project did)."""
    further: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def line(self) -> str:
        counts = "".join(f", {value:,} {key}" for key, value in self.further.items())
        return f"{self.name}: {self.attempts:,} attempts, {len(self.failures)} failures{counts} ({self.seconds:.0f} s)"

    def reproductions(self) -> list[str]:
        return [
            f"  {what}\n    again: python -m tests.chaos attacks={self.name} seed={self.seed} only={number}"
            for number, what in self.failures
        ]


def load_attack(name: str, folder: Path) -> Attack:
    module, _, attribute = ATTACKS[name].partition(":")
    folder.mkdir(parents=True, exist_ok=True)
    attack: Attack = getattr(importlib.import_module(module), attribute)(folder)
    return attack


def run_attack(
    name: str, folder: Path, *, seed: int, seconds: float | None = None, attempts: int | None = None, only: int | None = None
) -> Tally:
    """Attack until the time or the number of attempts is over, whichever is first; `only` repeats one attempt."""
    tally = Tally(name, seed)
    begun = time.monotonic()
    attack = load_attack(name, folder)
    try:
        number = 0 if only is None else only
        while (attempts is None or tally.attempts < attempts) and (seconds is None or time.monotonic() - begun < seconds):
            failure = attack.attempt(number, random.Random(f"{name}/{seed}/{number}"))
            tally.attempts += 1
            if failure is not None:
                tally.failures.append((number, failure))
            number += 1
            if only is not None:
                break
        tally.further = attack.count()
    finally:
        attack.close()
        tally.seconds = time.monotonic() - begun
    return tally
