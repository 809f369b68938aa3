"""Values that are wrong by the type of their key: what is generated here is known to be a mistake."""

from __future__ import annotations

import dataclasses
import math
import random
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union

from embodied_rl.bounds import bounds_of
from embodied_rl.config.building import type_hints

LONG = "9" * 5_000
DEEP = "[" * 600 + "]" * 600
UNICODE = "\u0663"
"""An Arabic three: `int` would take it."""


def leaves(cls: Any, plain: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, its type) of every key that a composed configuration has."""
    for name, hint in type_hints(cls).items():
        if name.startswith("_") or name not in plain:
            continue
        yield from _below(hint, plain[name], f"{where}{name}")


def _below(hint: Any, value: Any, key: str) -> Iterator[tuple[str, Any]]:
    kinds = [kind for kind in _members(hint) if dataclasses.is_dataclass(kind)]
    if kinds and isinstance(value, Mapping):
        named = [kind for kind in kinds if value.get("name") in typing.get_args(type_hints(kind).get("name"))]
        yield key, hint
        yield from leaves((named or kinds)[0], value, f"{key}.")
    elif typing.get_origin(hint) is dict and value and dataclasses.is_dataclass(typing.get_args(hint)[1]):
        for name, item in value.items():
            yield from _below(typing.get_args(hint)[1], item, f"{key}.{name}")
    else:
        yield key, hint


def _members(hint: Any) -> list[Any]:
    """The kinds of a union but null; the type itself where it is none."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [member for member in typing.get_args(hint) if member is not type(None)]
    return [hint]


def wrong_value(hint: Any, chance: random.Random) -> str:
    """A text that an override's right side may be, and that `hint` forbids."""
    nullable = type(None) in typing.get_args(hint)
    members = _members(hint)
    choices = [] if nullable else ["null"]
    numbers = [member for member in members if bounds_of(member)[1] is not None]
    worded = bool(numbers) and all(typing.get_origin(member) is Literal for member in members if member not in numbers)
    kind, bounds = bounds_of((numbers if worded else members)[0])
    origin = typing.get_origin(kind)
    if (len(members) > 1 and not worded) or dataclasses.is_dataclass(kind):
        short_form = dataclasses.is_dataclass(kind) and hasattr(kind, "kind")  # a name is a form of hybrid.placement
        choices += ["3", "[1,2]", "true", "{nope:1}", "1.5"] + ([] if short_form else ["word", "''"])
    elif origin is Literal:
        word = chance.choice(typing.get_args(kind))
        choices += [word + "x", word[::-1] + "_", word + word, "[" + word + "]", f"{{{word}:1}}", "3", "''", "1.5"]
    elif origin is tuple:
        element = typing.get_args(kind)[0]
        choices += ["{a:1}", "3", "true", "1.5", f"[{wrong_value(element, chance)}]"]
        choices += [] if element is str else ["word", "''"]
    elif origin is dict:
        choices += ["3", "word", "[1]", "true", "1.5"]
    elif bounds is not None:
        choices += [
            "word",
            "''",
            "[1]",
            "{a:1}",
            "true",
            UNICODE,
            "nan",
            "inf",
            "-inf",
            ".nan",
            LONG,
            "1" * 200 + "x",
            DEEP,
            "1_",
            "0x",
            "--1",
        ]
        choices += [_number(kind, bounds.least - (not bounds.above) * _step(kind, bounds.least))]
        choices += [_number(kind, bounds.most + (not bounds.below) * _step(kind, bounds.most)), "1e30", "-1e30"]
        if kind is int:
            choices += ["1.5", "1e3", "3.0", str(10**20), str(-(10**20))]
    elif kind is bool:
        choices += ["1", "0", "word", "''", "[true]", "{a:1}", "nan", "2.5", LONG]
    elif kind is str:
        choices += ["[a]", "{a:1}", "3", "1.5", "true", "nan", DEEP]
    else:
        choices = ["nan", "inf", "{a:nan}", "[inf]"]  # an argument of somebody else's function
    return chance.choice(choices)


def _step(kind: Any, at: float) -> float:
    return 1 if kind is int else max(abs(at) * 1e-9, 1e-9)


def _number(kind: Any, value: float) -> str:
    return str(int(value)) if kind is int else (repr(float(value)) if math.isfinite(value) else "inf")


def misspelt(key: str, known: set[str], chance: random.Random) -> str:
    """The key with one letter of its last part changed, so that there is none of the name."""
    before, dot, last = key.rpartition(".")
    for _ in range(50):
        at = chance.randrange(len(last))
        letter = chance.choice("abcxyz_")
        name = chance.choice([last[:at] + last[at + 1 :], last[:at] + letter + last[at:], last[:at] + letter + last[at + 1 :]])
        if name and name.isidentifier() and f"{before}{dot}{name}" not in known:
            return f"{before}{dot}{name}"
    return f"{key}_nope"


MALFORMED = (
    *("{key}", "={value}", "{key}=[1", "{key}={{a", "{key}={{a:", "{key}='x", "~{key}x", "{key}=1,2", "{key}=${{", "{key}=${{nope}}", "@"),
    *("{key}=[1]]", "++", "+{key}.x=1", "{key}={{{{", "{key} = 1", "--{key}=1"),
)
"""No override at all, or none that fits."""

TEXTS = ("{key}=a=b", "{key}=\\", "{key}=)", "{key}=\x07")
"""Texts, and so mistakes only where a key takes none."""


def takes_text(hint: Any) -> bool:
    """Whether a key of this type takes any text, by itself or in a list."""
    return any(bounds_of(member)[0] is str or str in typing.get_args(member) for member in _members(hint))
