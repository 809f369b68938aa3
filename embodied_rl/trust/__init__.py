"""Decides what files may make this machine run (docs/trust.md)."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import shlex
import stat
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from embodied_rl.errors import UserError
from embodied_rl.files import configs_dir
from embodied_rl.reading import parse_yaml
from embodied_rl.registry import installed_config_folders, installed_targets

_NAME = "embodied_rl"


def state_folder() -> Path | None:
    """Our per-user state folder ``$XDG_STATE_HOME/embodied_rl``; None if the user has no home."""
    return _folder("XDG_STATE_HOME", ".local/state")


def _folder(variable: str, below_home: str) -> Path | None:
    given = os.environ.get(variable, "")
    if os.path.isabs(given):  # the specification ignores relative paths
        return Path(given) / _NAME
    try:
        return Path.home() / below_home / _NAME
    except RuntimeError:
        return None


KEY_FILE = "key"
"""In the user's state folder: 32 random bytes, mode 0600."""
CHECKPOINT, RECORDING = "checkpoint", "recording"
"""Kinds of signed content: a signature of one kind is not valid for another."""
_BYTES = 32


def sign(what: str, content: bytes) -> str | None:
    """Hexadecimal signature; None if there is no key and none can be made (one warning reports it).

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
    """Read the key. Raises OSError if others could have read or written it."""
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
    """Write the key completely or not at all; of several processes at once, all use the first one's key."""
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


MOST_VALUES = 1_000_000
_ALWAYS = frozenset({"address", "base_url", "endpoint", "entity", "environment", "function", "host", "target", "uri", "url"}) | {
    "api_key_env",
    "token_env",
}
"""Keys whose every text names code, a server, or a secret that is sent to a server."""
_WORDS = frozenset({"command", "env"})
"""Keys of a program's command line and its environment variables."""
_OPENS: Mapping[str, tuple[object, ...]] = {
    "allow_network": (False,),
    "python_network": (False,),
    "network": ("proxy",),
    "readable": (),
    "writable": (),
    "pass_env": (),
    "sandbox": ("landlock", "namespaces"),
    "python_sandbox": ("landlock", "namespaces"),
    "wandb_mode": ("offline",),
}
"""{key that opens a sandbox, or sends measurements to an account: harmless values besides an empty one}"""
_PROSE = ("agent", "run_dir", "recording", "resume", "trust")
"""First keys of prompts and paths, which are never resolved as names, except for `_TOOLS`."""
_TOOLS = "tool_options"
_FORM = re.compile(r"(?=[^:]*[^\W\d])[^\s:]+(?::[^\s:]+)+|\w[\w+.-]*://\S*")
"""``module:Attribute``, ``file.py:function``, ``module:Task-v0``, ``host:port``, a URL; prose has spaces."""
_DEVICE = re.compile(r"(cpu|cuda|gpu|hpu|mps|npu|xpu):[\d,-]+")
_OWN_NAMES: Mapping[str, re.Pattern[str]] = {"embodied_rl.sim.text.gem:make": re.compile(r"(game|rg):[\w-]+")}
"""{simulator: form of its tasks} for libraries whose own names contain a colon."""


@dataclass(frozen=True)
class NamedCode:
    """An entry of a configuration that makes code run, or sends something away."""

    key: str
    """Its position: ``sim.kwargs.environment``."""
    name: str
    """Its value: ``package.module:Class``, a command's words, a URL. ``trust=`` accepts it."""

    @property
    def last(self) -> str:
        return self.key.rpartition(".")[2]

    def __str__(self) -> str:
        """``sim.target=os:system``"""
        return f"{self.key.removesuffix(self.last)}{self.name}" if self.name.startswith(f"{self.last}=") else f"{self.key}={self.name}"


def named_code(plain: object) -> list[NamedCode]:
    """Everything that a configuration of plain values names, in its order.

    `plain`: mappings, lists, texts and numbers from YAML or JSON.

    Raises UserError: it has more than `MOST_VALUES` values, or contains itself.
    """
    found: list[NamedCode] = []
    waiting: list[tuple[tuple[str, ...], object, str]] = [((), plain, "")]
    for _ in range(MOST_VALUES):
        if not waiting:
            return found
        path, value, target = waiting.pop()
        last = path[-1] if path else ""
        if last in _OPENS and value and not isinstance(value, (list, tuple)) and value not in _OPENS[last]:
            found.append(NamedCode(".".join(path), last if value is True else f"{last}={_word(value)}"))
        if last in _WORDS and isinstance(value, (str, Mapping, list, tuple)):
            found += [NamedCode(".".join(path), shlex.join(_words(value)))] if value else []
        elif isinstance(value, Mapping):
            own = value.get("target")
            target = own if isinstance(own, str) else target
            waiting += [((*path, str(key)), part, target) for key, part in reversed(list(value.items()))]
        elif isinstance(value, (list, tuple)):
            waiting += [(path, part, target) for part in reversed(value)]
        elif isinstance(value, str) and value and not _is_prose(path) and _names(last, value, target):
            found.append(NamedCode(".".join(path), value))
    raise UserError(f"A configuration holds at most {MOST_VALUES:,} values.")


def code_names(plain: object) -> tuple[str, ...]:
    """Each name that `named_code` finds, once: the value of ``trust`` for a run that reads its own checkpoint."""
    return tuple(dict.fromkeys(code.name for code in named_code(plain)))


def _names(key: str, text: str, target: str) -> bool:
    if key in _ALWAYS or _FORM.fullmatch(text):
        form = _OWN_NAMES.get(target) if key == "task" else None
        if key == "address" and text in ("auto", "local"):  # the user's own cluster
            return False
        return not (_DEVICE.fullmatch(text) or (form is not None and form.fullmatch(text)))
    # Gymnasium imports the part before the colon, whatever follows it.
    return key == "task" and ":" in text


def _is_prose(path: tuple[str, ...]) -> bool:
    own = path[2:] if path[0] == "domains" else path
    return bool(own) and own[0] in _PROSE and _TOOLS not in own


def _words(value: str | Mapping[object, object] | Sequence[object]) -> list[str]:
    """Words of a command, or ``NAME=value`` of variables; values of other types become ``(type)``."""
    if isinstance(value, Mapping):
        return [f"{key}={_word(part)}" for key, part in value.items()]
    return [value] if isinstance(value, str) else [_word(part) for part in value]


def _word(value: object) -> str:
    return str(value) if isinstance(value, (str, int, float)) else f"({type(value).__name__})"


@cache
def registered_code() -> frozenset[tuple[str, str]]:
    """{(last key, name)} in shipped configurations and those of installed packages, and in registered entry points.

    Of each package, only its own code and addresses count; placeholders (``package.module:Class``) and relative paths do not.
    """
    import yaml

    kinds = {"target": ("sim", "policies"), "loss": ("losses",), "advantage": ("advantages",), "names": ("loggers",)}
    known = {(key, target) for key, groups in kinds.items() for group in groups for target in installed_targets(group).values()}
    for package, folder in {"embodied_rl": configs_dir(), **installed_config_folders()}.items():
        for path in folder.rglob("*.yaml"):
            try:
                found = named_code(yaml.safe_load(path.read_text(encoding="utf-8")))
            except (yaml.YAMLError, OSError, UnicodeDecodeError):
                continue  # reported when the file is used
            own = f"{package.partition('.')[0]}."
            known |= {(code.last, code.name) for code in found if code.name.startswith(own) or "://" in code.name}
    return frozenset(known)


ALLOW_LIST = "trusted.yaml"
"""File in the user's configuration folder with a list of names that any file may use."""
MESSAGE_LENGTH = 400
_PLAIN = re.compile(r"[\w.]+:[\w.]+")
_PACKAGE = Path(__file__).resolve().parents[1]


class UntrustedCode(UserError):
    """A file names code that is not registered here, and the user has not trusted it."""

    def __init__(self, message: str, targets: Sequence[str]) -> None:
        super().__init__(message)
        self.targets = tuple(targets)
        """Values for ``trust=``."""


def allowed() -> tuple[str, ...]:
    """Allow-list of the user's configuration folder; ``package.*`` covers a package's targets. Raises UserError: not a list of texts."""
    folder = _folder("XDG_CONFIG_HOME", ".config")
    path = None if folder is None else folder / ALLOW_LIST
    if path is None or not path.is_file():
        return ()
    try:
        names = parse_yaml(path.read_bytes()) or []
    except (ValueError, OSError) as error:
        raise UserError(f"'{path}' cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"'{path}' must be a YAML list of names such as '- my_package.my_module:MyEnv', got {names!r:.80}.")
    return tuple(names)


def require_trusted(
    plain: object,
    *,
    file: Path,
    what: str,
    content: bytes,
    signature: str | None,
    trust: Sequence[str],
    replaced: Sequence[str],
) -> None:
    """Raise UntrustedCode if a configuration from a file names code that may not run.

    Args:
        what: kind of the signature, see `sign`.
        content: the signed bytes.
        signature: the file's signature; None: it has none.
        trust: names that the user lets this file use.
        replaced: keys (``sim``, ``sim.kwargs.environment``) that the caller replaces by the user's own values.

    Raises UntrustedCode: naming the code, the file, and the command to type; UserError: the allow-list cannot be read.
    """
    found = [code for code in named_code(plain) if not any(code.key == key or code.key.startswith(f"{key}.") for key in replaced)]
    if not found or is_signed(what, content, signature):
        return
    given = (trust,) if isinstance(trust, str) else tuple(trust)
    registered = registered_code()
    strange = [code for code in found if (code.last, code.name) not in registered and code.name not in given]
    if strange:
        names = allowed()
        strange = [code for code in strange if not any(_covers(name, code.name) for name in names)]
    if strange:
        targets = list(dict.fromkeys(code.name for code in strange))
        raise UntrustedCode(_message(file, strange[0], targets, [*given, *targets]), targets)


def trusted_names(text: str | None) -> tuple[str, ...]:
    """Names of a ``trust=`` on a command line: one, or a list ``[a, b]``. Raises UserError."""
    if not text:
        return ()
    if not text.startswith("["):
        return (text,)
    try:
        names = parse_yaml(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"trust must be a name or a list of names, '[a.b:C, d.e:F]', got '{text[:80]}'.")
    return tuple(names)


def _covers(allowed_name: str, name: str) -> bool:
    if allowed_name.endswith(".*"):
        return name.startswith((allowed_name[:-1], f"{allowed_name[:-2]}:"))
    return allowed_name == name


def _message(file: Path, code: NamedCode, targets: Sequence[str], trust: Sequence[str]) -> str:
    others = f" and {len(targets) - 1} more" if len(targets) > 1 else ""
    lead = f"'{file}' names code that is not registered here: {_shown(str(code), 160)}{others}. If you trust it: "
    typed, words = _typed(trust), _command()
    if all(name.isprintable() for name in trust):  # never copy a terminal's control characters from a file
        choices = [typed if words is None else shlex.join([*words, typed]), f"add {shlex.quote(typed)} to this command"]
        for way in choices:
            if len(lead) + len(way) <= MESSAGE_LENGTH:
                return lead + way
    where = f"'{file}'" if len(str(file)) <= 120 else f"'…{str(file)[-120:]}'"
    return f"{where} names code that is not registered here: {_shown(str(code))}{others}. See docs/trust.md: trust=…."


def _typed(names: Sequence[str]) -> str:
    """Names for a command line, in the form that `trusted_names` and Hydra read."""
    if len(names) == 1 and _PLAIN.fullmatch(names[0]):
        return f"trust={names[0]}"
    return f"trust=[{','.join(name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False) for name in names)}]"


def _command() -> list[str] | None:
    """Words of the running command without its ``trust=``; None if this is another program."""
    program = Path(sys.argv[0] if sys.argv else "").resolve()
    if program.suffix != ".py" or not program.is_relative_to(_PACKAGE):
        return None
    module = ".".join(program.relative_to(_PACKAGE.parent).with_suffix("").parts)
    return ["python", "-m", module.removesuffix(".__main__"), *(word for word in sys.argv[1:] if not word.startswith("trust="))]


def _shown(name: str, limit: int = 100) -> str:
    plain = name if name.isprintable() else ascii(name)
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"
