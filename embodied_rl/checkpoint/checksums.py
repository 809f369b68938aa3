"""SHA-256 of a folder's files, noted when they are written and held against them when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FileSums = dict[str, dict[str, Any]]
"""{path within the folder: {"sha256": hexadecimal, "bytes": size}}"""


def sha256_of(path: Path) -> str:
    """Hexadecimal digest of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums_of(folder: Path, files: Iterable[Path]) -> FileSums:
    """Sums of files below `folder`."""
    return {path.relative_to(folder).as_posix(): {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in sorted(files)}


def fault_of(path: Path, told: Mapping[str, Any]) -> str | None:
    """What is wrong with a file: it is missing, shorter or longer than it was, or changed; None: nothing."""
    if not path.is_file():
        return "it is missing"
    if (size := path.stat().st_size) != told["bytes"]:
        return f"it has {size:,} bytes instead of {told['bytes']:,}"
    return None if sha256_of(path) == told["sha256"] else "its content is not what was written (SHA-256 differs)"


def sum_of_document(document: Mapping[str, Any], but: str) -> str:
    """Digest of a JSON document without the entry `but`, which holds it; the same after the document was written and read."""
    rest = {key: value for key, value in document.items() if key != but}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
