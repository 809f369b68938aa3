"""Files that are either whole or absent: written under a temporary name, flushed to the disk and renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from embodied_rl.errors import UserError


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Replace `path` by `content` in one step; makes folders as needed. Raises UserError if it cannot be written."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    return write_atomic_with(path, lambda temporary: temporary.write_bytes(data))


def write_atomic_with(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a temporary file beside `path` (same suffix, for libraries that check it), then rename it.
    Raises UserError: the folder or file cannot be written."""
    temporary = path.with_name(f".{path.stem}.tmp-{threading.get_native_id()}{path.suffix}")  # the process's number in its main thread
    try:
        if path.exists() and not path.is_file():  # root would replace /dev/null by the file
            raise OSError(errno.EINVAL, "it is not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        reset_mode(temporary)
        fsync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        if temporary.exists():
            temporary.unlink()
    return path


def replace_folder(whole: Path, folder: Path, aside: str = ".old-") -> Path:
    """Replace a folder by the finished one beside it; the old one gets the prefix `aside` first, because renaming needs an empty target."""
    fsync(whole)
    old = folder.with_name(f"{aside}{folder.name}")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    whole.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    fsync(folder.parent)
    return folder


def copy_files(source: Path, target: Path) -> None:
    """Copy a folder's regular files, following links to files; pipes, devices and links to folders are left out. Raises OSError."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            copied = target / path.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)


def reset_mode(*paths: Path) -> None:
    """Give private files (of folders: all files inside) the mode that `open` gives new files under the user's umask.

    safetensors writes through a temporary file that is private under any umask.
    """
    for file in (file for path in paths for file in ([*path.rglob("*")] if path.is_dir() else [path])):
        if not file.is_file() or file.stat().st_mode & 0o077:
            continue
        # Reading the umask would set it for all threads; the mode of a new file shows it too.
        probe = file.with_name(f".mode-{os.getpid()}-{threading.get_ident()}")
        descriptor = os.open(probe, os.O_CREAT | os.O_WRONLY, 0o666)
        try:
            file.chmod(stat.S_IMODE(os.fstat(descriptor).st_mode))
        finally:
            os.close(descriptor)
            probe.unlink(missing_ok=True)


def append_whole(file: FileIO, data: bytes, path: Path) -> None:
    """Append `data` to a log that is open without a buffer, so that closing does not retry a failed write.
    Raises UserError: it could not be written completely."""
    with writing_to(path):
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line of JSON to a file. Raises UserError as `append_whole` does, and OSError: it cannot be opened."""
    with path.open("ab", buffering=0) as file:
        append_whole(file, f"{json.dumps(row)}\n".encode(), path)


def fsync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


FileSums = dict[str, dict[str, Any]]
"""{path within the folder: {"sha256": hexadecimal, "bytes": size}}"""
_CHANGED = "its content has changed since it was written (SHA-256 differs)"


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums_of(folder: Path, files: Iterable[Path]) -> FileSums:
    return {path.relative_to(folder).as_posix(): {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in sorted(files)}


def fault_of(path: Path, expected: Mapping[str, Any]) -> str | None:
    """The fault of a file: missing, shorter or longer than it was, or changed; None: no fault."""
    if not path.is_file():
        return "it is missing"
    if (size := path.stat().st_size) != expected["bytes"]:
        return f"it has {size:,} bytes instead of {expected['bytes']:,}"
    return None if sha256_of(path) == expected["sha256"] else _CHANGED


def sum_of_document(document: Mapping[str, Any]) -> str:
    """Digest of a JSON document without the entry ``sha256``, which holds it; unchanged by writing and reading the document."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_sums(document: Mapping[str, Any]) -> None:
    """Raise ValueError if a document differs from its digest ``sha256``, or if its ``files`` are no `FileSums`; either may be absent."""
    if "sha256" in document and sum_of_document(document) != document["sha256"]:
        raise ValueError(_CHANGED)
    sums = document.get("files", {})
    for entry in sums.values() if isinstance(sums, dict) else [None]:
        if not (isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)):
            raise ValueError("'files' has no checksums")


def cannot_write(path: Path, error: OSError) -> UserError:
    """One-line error for a path that cannot be written."""
    return UserError(f"Cannot write '{path}': {error.strerror or error}. Choose another folder, or check permissions and free space.")


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Raise `cannot_write` in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def finite(value: object) -> Any:
    """The value with null for NaN and infinities, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"algorithm.gamma": 0.99, …} from {"algorithm": {"gamma": 0.99, …}, …}"""
    rows: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            rows |= flat(value, f"{prefix}{key}.")
        else:
            rows[f"{prefix}{key}"] = value
    return rows


def next_free(path: Path) -> Path:
    """`path` if nothing is there, else the first free ``name_2.ext``, ``name_3.ext``, …"""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}_{number}{path.suffix}")
    return candidate


class RememberedAnswers:
    """Small JSON values in a folder of the user's cache, found again by their question; a damaged file counts as missing.

    Example: ``RememberedAnswers("workers").write("cartpole", [8, "host"], {"num_workers": 2})``.
    """

    def __init__(self, folder: str) -> None:
        """`folder`: its name in ``~/.cache/embodied_rl``, or in ``$XDG_CACHE_HOME/embodied_rl``."""
        self.folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "embodied_rl" / folder

    def path(self, label: str, question: object) -> Path:
        """The file: `label` for people, and a digest of the question's `repr`."""
        digest = hashlib.blake2b(repr(question).encode(), digest_size=8).hexdigest()
        return self.folder / f"{''.join(sign if sign.isalnum() or sign in '-_' else '_' for sign in label[:60])}-{digest}.json"

    def read(self, label: str, question: object) -> dict[str, object] | None:
        """The remembered answer; None if there is none that can be read."""
        return _json_object(self.path(label, question))

    def write(self, label: str, question: object, answer: object) -> None:
        """Remember an answer. If the folder cannot be written, nothing is kept and the question is asked again next time."""
        with suppress(UserError):
            write_atomic(self.path(label, question), json.dumps(answer))

    def __iter__(self) -> Iterator[dict[str, object]]:
        """Every readable answer, by file name."""
        for path in sorted(self.folder.glob("*.json")):
            if (answer := _json_object(path)) is not None:
                yield answer


def _json_object(path: Path) -> dict[str, object] | None:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else None
    return None


def configs_dir() -> Path:
    """Folder of configuration files: inside an installed wheel, or beside the package in a checkout."""
    return _beside("configs")


def assets_dir() -> Path:
    """Folder of meshes, pages and texts, likewise."""
    return _beside("assets")


def _beside(name: str) -> Path:
    package = Path(__file__).resolve().parent
    return installed if (installed := package / name).is_dir() else package.parent / name
