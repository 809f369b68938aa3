"""What a configuration names that would run, found in one walk by its form, and which of it is registered on this machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from embodied_rl.errors import UserError
from embodied_rl.paths import configs_dir
from embodied_rl.registry import installed_config_folders, installed_targets

MOST_VALUES = 1_000_000
_ALWAYS = frozenset({"address", "base_url", "endpoint", "entity", "environment", "function", "host", "target", "uri", "url"}) | {
    "api_key_env",
    "token_env",
}
"""Keys whose every text names code, a server, or a secret that is sent to one."""
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
"""{keys that open a sandbox, or send what a run measures to an account: their values that do neither, beside nothing}"""
_PROSE = ("agent", "run_dir", "recording", "resume", "trust")
"""First keys of what is prompts and paths and never resolved as a name, but for `_TOOLS`."""
_TOOLS = "tool_options"
_FORM = re.compile(r"(?=[^:]*[^\W\d])[^\s:]+(?::[^\s:]+)+|\w[\w+.-]*://\S*")
"""``module:Attribute``, ``file.py:function``, ``module:Task-v0``, ``host:port``, a URL; prose has spaces."""
_DEVICE = re.compile(r"(cpu|cuda|gpu|hpu|mps|npu|xpu):[\d,-]+")
_OWN_NAMES: Mapping[str, re.Pattern[str]] = {"embodied_rl.sim.text.gem:make": re.compile(r"(game|rg):[\w-]+")}
"""{simulator: form of its tasks} where a colon stands in names of a library's own registry."""


@dataclass(frozen=True)
class NamedCode:
    """Something in a configuration that makes code run, or sends something away."""

    key: str
    """Where: ``sim.kwargs.environment``."""
    name: str
    """What: ``package.module:Class``, a command's words, a URL. ``trust=`` takes it."""

    @property
    def last(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    def __str__(self) -> str:
        """``sim.target=os:system``"""
        return f"{self.key.removesuffix(self.last)}{self.name}" if self.name.startswith(f"{self.last}=") else f"{self.key}={self.name}"


def named_code(plain: object) -> list[NamedCode]:
    """All that a configuration of plain values names, in its order.

    Args:
        plain: mappings, lists, texts and numbers, as they were read from YAML or JSON.

    Raises:
        UserError: it holds more than `MOST_VALUES` values, or itself.
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
    """What `named_code` finds, each name once: for a run that reads its own checkpoint, what ``trust`` is."""
    return tuple(dict.fromkeys(code.name for code in named_code(plain)))


def _names(key: str, text: str, target: str) -> bool:
    if key in _ALWAYS or _FORM.fullmatch(text):
        form = _OWN_NAMES.get(target) if key == "task" else None
        if key == "address" and text in ("auto", "local"):  # a cluster of the user's own
            return False
        return not (_DEVICE.fullmatch(text) or (form is not None and form.fullmatch(text)))
    # Gymnasium imports what stands before the colon, whatever follows it.
    return key == "task" and ":" in text


def _is_prose(path: tuple[str, ...]) -> bool:
    own = path[2:] if path[0] == "domains" else path
    return bool(own) and own[0] in _PROSE and _TOOLS not in own


def _words(value: str | Mapping[object, object] | Sequence[object]) -> list[str]:
    """The words of a command, or ``NAME=value`` of variables; what is none of these is no text."""
    if isinstance(value, Mapping):
        return [f"{key}={_word(part)}" for key, part in value.items()]
    return [value] if isinstance(value, str) else [_word(part) for part in value]


def _word(value: object) -> str:
    return str(value) if isinstance(value, (str, int, float)) else f"({type(value).__name__})"


@cache
def registered_code() -> frozenset[tuple[str, str]]:
    """{(last key, name)} of what the shipped configurations and those of installed packages name, and of what entry points register.

    Of each package its own code counts, and addresses; a placeholder (``package.module:Class``) and a relative path do not.
    """
    import yaml

    kinds = {"target": ("sim", "policies"), "loss": ("losses",), "advantage": ("advantages",), "names": ("loggers",)}
    known = {(key, target) for key, groups in kinds.items() for group in groups for target in installed_targets(group).values()}
    for package, folder in {"embodied_rl": configs_dir(), **installed_config_folders()}.items():
        for path in folder.rglob("*.yaml"):
            try:
                found = named_code(yaml.safe_load(path.read_text(encoding="utf-8")))
            except (yaml.YAMLError, OSError, UnicodeDecodeError):
                continue  # reported where the file is used
            own = f"{package.partition('.')[0]}."
            known |= {(code.last, code.name) for code in found if code.name.startswith(own) or "://" in code.name}
    return frozenset(known)
