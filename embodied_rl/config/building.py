"""From plain data to validated dataclasses: each field's type is checked, an unknown key is one line with the choices."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from embodied_rl.errors import UserError, did_you_mean


def require(condition: bool, where: str, rule: str, got: Any) -> None:
    if not condition:
        raise UserError(f"{where} must be {rule}, got {got!r}.")


def build(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise UserError(f"'{where}' must be a mapping of keys to values, got {data!r}.")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    prefix = f"{where}." if where else ""
    for key in data:
        if key not in fields:
            raise UserError(f"Configuration key '{prefix}{key}' is not known.{did_you_mean(str(key), fields)}")
    values = {}
    for name, spec in fields.items():
        if name in data:
            values[name] = convert(hints[name], data[name], prefix + name)
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise UserError(f"Configuration key '{prefix}{name}' is missing.")
    return cls(**values)


def convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner = [argument for argument in arguments if argument is not type(None)]
        return convert(inner[0] if len(inner) == 1 else _kind(inner, value, where), value, where)
    if origin is Literal:
        if value in arguments:
            return value
        raise UserError(f"{where}={value!r} is not a choice.{did_you_mean(str(value), map(str, arguments))}")
    if origin is tuple:
        if arguments[0] is str and isinstance(value, str):
            return (value,)
        if isinstance(value, (list, tuple)):
            return tuple(convert(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
        raise UserError(f"{where} must be a list, got {value!r}.")
    if origin is dict:
        if isinstance(value, Mapping):
            return {key: convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
        raise UserError(f"{where} must be a mapping, got {value!r}.")
    if dataclasses.is_dataclass(hint):
        # Some have short forms of their own.
        from_value = getattr(hint, "from_value", None)
        return build(hint, value, where) if from_value is None else from_value(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Any or (isinstance(value, hint) and not (hint is int and isinstance(value, bool))):
        return value
    raise UserError(f"{where} must be {hint.__name__}, got {value!r} ({type(value).__name__}).")


def _kind(kinds: list[Any], value: Any, where: str) -> Any:
    """Of several dataclasses, the one whose field `name` has the value's name; the first where it has none."""
    by_name = {name: kind for kind in kinds for name in typing.get_args(typing.get_type_hints(kind)["name"])}
    if not isinstance(value, Mapping) or "name" not in value:
        return kinds[0]
    if value["name"] not in by_name:
        raise UserError(f"{where}.name={value['name']!r} is not a choice.{did_you_mean(str(value['name']), by_name)}")
    return by_name[value["name"]]
