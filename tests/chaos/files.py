"""Damaged files: each ends in one line that names it, or is read as it was written; nothing hangs, nothing fills the memory."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from embodied_rl.errors import UserError
from tests.chaos.damage import Files as Contents
from tests.chaos.damage import damage, write
from tests.chaos.genuine import KINDS, Content, same
from tests.chaos.harness import Attack

TIME_S = 20.0
"""For one file; a sound one takes a few hundredths of a second."""
MEMORY = 3 * 2**29
"""Address space beyond what the process has."""
MEMORY_TAKEN = 2**28
"""Bytes of real memory that a file of some kilobytes may take before it is refused."""
LARGEST_MESSAGE = 400


class Overtime(BaseException):
    """Not caught by anything that reads."""


class Files(Attack):
    """Attempt n damages a file of kind n modulo their number."""

    name = "files"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._genuine: dict[str, tuple[Contents, Content]] = {}
        self._counts: Counter[str] = Counter()

    def attempt(self, number: int, chance: random.Random) -> str | None:
        kind = list(KINDS)[number % len(KINDS)]
        files, expected = self._sound(kind)
        place = self.folder / "damaged"
        _remove(place)
        place.mkdir()
        told = damage(files, place, chance)
        self._counts[f"damaged {kind}"] += 1
        # Half of what has checksums is made to fit them again: what they protect from must not be all that protects.
        forged = KINDS[kind].forged if chance.random() < 0.5 else None
        read = forged or KINDS[kind].read
        fault = self._read(read, place, None if KINDS[kind].forged is None or forged else expected)
        return None if fault is None else f"{kind}{', sums forged' if forged else ''}, {told}: {fault}"

    def count(self) -> dict[str, int]:
        return dict(sorted(self._counts.items()))

    def close(self) -> None:
        _remove(self.folder / "damaged")

    def _sound(self, kind: str) -> tuple[Contents, Content]:
        """Files and content of a genuine one, made when it is first asked for."""
        if kind not in self._genuine:
            folder = self.folder / kind
            KINDS[kind].make(folder)
            files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if _is_own_file(path, folder)}
            again = self.folder / f"{kind}-again"
            write(files, again)
            self._genuine[kind] = files, KINDS[kind].read(again)
        return self._genuine[kind]

    def _read(self, read: Callable[[Path], Content], place: Path, expected: Content | None) -> str | None:
        """What went wrong, if anything; `expected` is what must be read if anything is, None: that cannot be known."""
        before = _largest_memory()
        try:
            with _limited(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = read(place)
        except UserError as error:
            self._counts["told"] += 1
            grown = _largest_memory() - before
            return _complaint(str(error), place) if grown < MEMORY_TAKEN else f"took {grown >> 20} MiB before it was refused"
        except Overtime:
            return f"no end within {TIME_S:g} s"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
        self._counts["read"] += 1
        for name in found.keys() & ({} if expected is None else expected).keys():
            if not same(found[name], expected[name]):
                return f"'{name}' was read, and is not what was written"
        return None


def _largest_memory() -> int:
    """Bytes of real memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _complaint(message: str, place: Path) -> str | None:
    """What is wrong with a message."""
    plain = message.replace(str(place.resolve()), "").replace(str(place), "")
    named = plain != message or "…" in message  # where paths are long, messages shorten them
    if "\n" in message:
        return f"a message of several lines: {message[:200]!r}"
    if len(plain) > LARGEST_MESSAGE:
        return f"a message of {len(plain)} letters: {plain[:200]}"
    return None if named else f"a message that names no file: {message[:200]}"


@contextmanager
def _limited() -> Iterator[None]:
    """So much time and memory, and no more."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Overtime

    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, end)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_REAL, TIME_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)


def _is_own_file(path: Path, folder: Path) -> bool:
    """Not what is seen twice through a link."""
    return path.is_file() and not any(part.is_symlink() for part in (path, *path.parents) if part.is_relative_to(folder))


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
