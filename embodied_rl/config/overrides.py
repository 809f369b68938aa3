"""The words of ``python -m embodied_rl.train``: what is a flag, a setting or a mistake, and how a value that is plain text reaches Hydra.

Hydra gives commas, brackets, spaces and letters beyond ASCII a special meaning; paths have them too. A path is quoted here, so that
the user types it as it is.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from embodied_rl.errors import UserError, did_you_mean, shown

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_PLAIN_FLAGS = ("--help", "-h", "--hydra-help", "--version", "--multirun", "-m", "--run", "-r", "--resolve")
_FLAGS_WITH_VALUE = {
    **dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all")),
    **dict.fromkeys(("--info", "-i"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")),
    **dict.fromkeys(("--config-dir", "-cd"), ()),
    **dict.fromkeys(("--package", "-p"), ()),
}
"""{flag of Hydra: its choices; none where any text is in order}."""
FLAGS = (*_PLAIN_FLAGS, *_FLAGS_WITH_VALUE, "--shell-completion", "-sc")

_PATHS = re.compile(r"\+{0,2}(?:run_dir|resume|hydra\.(?:run|sweep)\.dir|(?:[\w.]+\.)?(?:\w+_)?(?:path|dir|folder|checkpoint|model))")
"""Keys whose values are paths: taken as they are, whatever Hydra would read in them."""
_SWEEPER = "hydra.sweeper.params"
_SYNTAX = "[{('\""
"""A value that begins so is meant for Hydra."""


def split_flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """({Hydra's flags: their values}, settings). Raises UserError for a flag that is not known, or lacks its value."""
    flags: dict[str, str] = {}
    settings: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            settings.append(word)
            continue
        flag, equals, value = word.partition("=")
        if flag in _FLAGS_WITH_VALUE:
            choices = _FLAGS_WITH_VALUE[flag]
            if not equals and (not left or "=" in left[0]) and flag not in ("--info", "-i"):
                raise UserError(f"{flag} needs a value: {' or '.join(f'{flag} {c}' for c in choices) or f'{flag} FOLDER'}.")
            if not equals and left and "=" not in left[0]:
                value = left.pop(0)
            if value and choices and value not in choices:
                raise UserError(f"{flag} {shown(value)} is not a choice.{did_you_mean(value, choices)}")
        elif flag not in FLAGS:
            raise UserError(_no_flag(flag, value))
        flags[flag] = value
    return flags, settings


def _no_flag(flag: str, value: str) -> str:
    name = flag.lstrip("-").replace("-", "_")
    if flag in ("--config-name", "-cn", "--config-path", "-cp"):
        folder = "or bring files of your own with --config-dir FOLDER"
        return f"{flag} is not taken: the configuration is configs/train.yaml. Choose its parts (experiment=…, sim=…), {folder}."
    if not name:
        return f"Argument {shown(flag)} says nothing. Settings are key=value, such as seed=5; see --help."
    typed = f"{name}={value}" if value else f"{name}=VALUE"
    return f"Flag {shown(flag)} is not known. Settings are key=value without dashes; type: {shlex.quote(typed)}"


def hydra_words(words: Iterable[str], sweep: bool = False) -> list[str]:
    """The words with values quoted for Hydra where they are plain text: those of keys that name paths, and those that its grammar cannot
    read. ``~/`` at a value's beginning is the home folder. `sweep`: commas separate values."""
    return [_quoted(word, sweep) for word in words]


def _quoted(word: str, sweep: bool) -> str:
    key, equals, value = word.partition("=")
    if not equals or word.startswith(("-", "~")) or not value or value[0] in _SYNTAX:
        return word
    if value == "~" or value.startswith("~/"):
        value = str(Path(value).expanduser())
        word = f"{key}={value}"
    is_path = _PATHS.fullmatch(key) and value != "null" and not (sweep and "," in value) and "${" not in value
    return f"{key}={quoted_value(value)}" if is_path or (parsed(word) is None and parsed(f"{key}=x") is not None) else word


def quoted_value(value: str) -> str:
    """A text in Hydra's double quotes, inside which a backslash counts only before a quote."""
    if value and re.fullmatch(r"[A-Za-z_/.][\w/.-]*", value, re.ASCII):
        return value
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f'"{escaped}{chr(92) * trailing}"'


def parsed(word: str) -> Override | None:
    """What Hydra reads in a word; None where it cannot."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except (HydraException, ValueError, RecursionError):  # numbers of 5,000 digits, and nesting as deep
        return None


def check_form(word: str, groups: Sequence[str], *, sweep: bool) -> None:
    """Raises UserError for a word that is no setting, whatever the configuration holds: with what to type instead."""
    key, equals, value = word.partition("=")
    name = key.lstrip("+~")
    if not equals and not (word.startswith("~") and re.fullmatch(r"[\w./@-]+", name)):
        near = f" Type: {name}=VALUE" if name in groups else did_you_mean(name, groups) if re.fullmatch(r"\w+", name) else ""
        raise UserError(f"Argument {shown(word)} is not of the form key=value, such as seed=5 or sim=cartpole.{near}")
    if not name or parsed(f"{name}=x") is None:
        raise UserError(f"{shown(key)} in argument {shown(word)} is no key of a configuration. Settings are key=value, such as seed=5.")
    found = parsed(word)
    if found is None:
        typed = shlex.quote(f"{key}={quoted_value(value)}")
        raise UserError(
            f"The value of {shown(key)} cannot be read: {shown(value)}. Lists are [1,2] and mappings {{a:1}}, closed; "
            f"a text with such characters is quoted twice, for Hydra and for the shell. Type: {typed}"
        )
    if found.is_sweep_override() and not sweep:
        typed = shlex.quote(f"{key}={quoted_value(value)}")
        raise UserError(
            f"{shown(word)} lists several values, which is a sweep: python -m embodied_rl.train -m {shlex.quote(word)}. "
            f"A list is [1,2]; as one text, type: {typed}"
        )


def of_each_value(words: Sequence[str]) -> list[list[str]]:
    """Words of single runs in which each value of a sweep appears at least once, others at their first."""
    choices = _choices(words)
    first = [values[0] for values in choices]
    return [first, *([*first[:at], value, *first[at + 1 :]] for at, values in enumerate(choices) for value in values[1:])]


def runs_of(words: Sequence[str]) -> list[list[str]]:
    """Words of all runs of a sweep, in the order in which Hydra's own sweeper begins them."""
    return [list(run) for run in itertools.product(*_choices(words))]


def _choices(words: Sequence[str]) -> list[list[str]]:
    choices = []
    for word in words:
        found = parsed(word)
        swept = found is not None and found.is_discrete_sweep()
        choices.append([f"{found.get_key_element()}={text}" for text in found.sweep_string_iterator()] if found and swept else [word])
    return choices


def with_sweeper_params(words: Sequence[str], sweep: bool) -> list[str]:
    """Words in which ``hydra.sweeper.params={seed: '1,2'}`` and ``hydra.sweeper.params.seed=1,2`` are what Hydra's own sweeper makes of
    them: ``seed=1,2``, before the others.

    Raises:
        UserError: there is no sweep, or the value is no mapping of keys to texts.
    """
    first: list[str] = []
    others: list[str] = []
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key != _SWEEPER and not key.startswith(_SWEEPER + "."):
            others.append(word)
            continue
        if not sweep:
            raise UserError(f"{shown(word)} lists runs of a sweep. Add -m, which begins one.")
        if key != _SWEEPER:
            first.append(f"{key.removeprefix(_SWEEPER + '.')}={value.strip(chr(39) + chr(34))}")
            continue
        found = parsed(word)
        mapping = found.value() if found is not None else None
        if not isinstance(mapping, dict):
            raise UserError(f"{_SWEEPER} must be a mapping of keys to values, such as {_SWEEPER}={{seed: '1,2'}}, got {shown(value)}.")
        first += [f"{name}={text}" for name, text in mapping.items()]
    return [*first, *others]
