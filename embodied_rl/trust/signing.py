"""Signatures of what this user wrote on this machine: HMAC-SHA256 with a random key that only the user can read.

A valid signature says that this user's own run wrote a configuration, and nothing about its quality. It cannot be made without the key,
which never leaves the user's state folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import warnings
from functools import cache
from pathlib import Path

from embodied_rl.trust.folders import state_folder

KEY_FILE = "key"
"""In the user's state folder: 32 random bytes, mode 0600."""
CHECKPOINT, RECORDING = "checkpoint", "recording"
"""What is signed: a signature of one kind is none of another."""
_BYTES = 32


def sign(what: str, content: bytes) -> str | None:
    """A signature, hexadecimal; None where there is no key, and none can be made (one warning says so).

    Args:
        what: one of the kinds above.
        content: the configuration's bytes.
    """
    key = _key_of(state_folder(), make=True)
    return None if key is None else _digest(key, what, content)


def is_signed(what: str, content: bytes, signature: str | None) -> bool:
    """Whether this user signed it on this machine."""
    if not signature:
        return False
    key = _key_of(state_folder(), make=False)
    return key is not None and hmac.compare_digest(_digest(key, what, content).encode(), str(signature).encode())


def _digest(key: bytes, what: str, content: bytes) -> str:
    return hmac.new(key, f"embodied_rl {what} 1\n".encode() + content, hashlib.sha256).hexdigest()


def _key_of(folder: Path | None, *, make: bool) -> bytes | None:
    path = None if folder is None else folder / KEY_FILE
    problem = "the user has no home folder"
    if path is not None:
        try:
            if make and not path.exists():
                _make(path)
            return _read(path)
        except FileNotFoundError as error:
            problem = f"'{path}': {error.strerror}"
        except OSError as error:
            problem = f"'{path}' cannot be used: {error.strerror or error}"
    if make:
        _warn(problem)
    return None


def _read(path: Path) -> bytes:
    """Raises OSError for a key that others could have read or written."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise OSError(f"it must be a file of this user with mode 0600, and has {stat.S_IMODE(about.st_mode):04o}")
        key = file.read(_BYTES + 1)
    if len(key) != _BYTES:
        raise OSError(f"it holds {len(key)} bytes instead of {_BYTES}")
    return key


def _make(path: Path) -> None:
    """Write the key whole or not at all; of several processes at once, all use the first one's key."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@cache
def _warn(problem: str) -> None:
    warnings.warn(
        f"What this run writes is not signed ({problem}). Code of your own that it names is asked about when it is read again: trust=….",
        stacklevel=5,
    )
