"""Turns plain data into validated dataclasses: each value must fit its field's type and bounds; an unknown key is a one-line error."""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union

from embodied_rl.bounds import Bounds, Free
from embodied_rl.errors import UserError, did_you_mean, require_known, shown

Built = TypeVar("Built")
_KINDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


Checks = Iterator[tuple[bool, str, str, object]]
"""(whether it holds, the key, what its value must be, its value); the empty key is that of the whole part."""


def require(condition: bool, where: str, rule: str, got: object) -> None:
    if not condition:
        raise UserError(f"{where} must be {rule}, got {shown(got)}.")


class Config:
    """A part of a configuration: a frozen dataclass whose numbers are within the bounds of their types, however it is made.
    ``class SimConfig(Config, place="sim")`` names its key, for messages about values that were not read from a file."""

    _place: ClassVar[str] = ""

    def __init_subclass__(cls, place: str | None = None) -> None:
        super().__init_subclass__()
        if place is not None:
            cls._place = place

    def __post_init__(self) -> None:
        cls: type = type(self)
        for name, hint in _bounded(cls).items():
            convert(hint, vars(self)[name], self._key(name))
        for holds, name, rule, got in self.checks():
            require(holds, self._key(name), rule, got)

    def checks(self) -> Checks:
        """What must hold beside the types and bounds of the fields, in this order. May raise UserError itself."""
        return iter(())

    def _key(self, name: str) -> str:
        return ".".join(filter(None, (self._place, name)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build and validate. Raises UserError naming the key, the value and the choices."""
        return cls.from_value(data)

    @classmethod
    def from_value(cls, value: object, where: str | None = None) -> Self:
        """Build from a configuration's value at `where`: a mapping, or a short form that the class knows. Raises UserError."""
        return build(cls, value, cls._place if where is None else where)


def build(cls: type[Built], data: object, where: str) -> Built:
    if not isinstance(data, Mapping):
        raise UserError(f"{where or 'The configuration'} must be a mapping of keys to values, got {shown(data)}.")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for key in data:
        require_known(key, fields, f"Configuration key {shown(f'{prefix}{key}')} is not known.")
    kind: type = cls
    values = {}
    for name, spec in fields.items():
        if name in data:
            values[name] = convert(type_hints(kind)[name], data[name], prefix + name)
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise UserError(f"Configuration key '{prefix}{name}' is missing.")
    return cls(**values)


def convert(hint: Any, value: Any, where: str) -> Any:
    """Convert `value` to the type `hint`. Raises UserError naming `where`, the rule and the value."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        number = convert(arguments[0], value, where)
        bounds = next(note for note in arguments[1:] if isinstance(note, Bounds))
        require(bounds.hold(number), where, str(bounds), value)
        return number
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner = [argument for argument in arguments if argument is not type(None)]
        if len(inner) > 1 and (words := [argument for argument in inner if typing.get_origin(argument) is Literal]):
            if isinstance(value, str):
                return convert(words[0], value, where)
            inner.remove(words[0])
        return convert(inner[0] if len(inner) == 1 else _kind(inner, value, where), value, where)
    if origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
        raise UserError(f"{where}={shown(value)} is not a choice.{did_you_mean(value, arguments)}")
    if origin in (tuple, list):
        if arguments[0] is str and isinstance(value, str):
            return (value,)
        require(isinstance(value, (list, tuple)), where, "a list", value)
        return origin(convert(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        require(isinstance(value, Mapping), where, "a mapping of keys to values", value)
        for key in value:
            require(isinstance(key, str), f"A key of {where}", "text", key)
        return {key: convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Config):
        return hint.from_value(value, where)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, value, where)
    return _plain(value, where) if hint is Any else _scalar(hint, value, where)


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any], where: str) -> None:
    """Check a function's configured arguments against the types in its signature and their bounds: ``Annotated[…]``, as in
    `embodied_rl.bounds`. Leaves names outside the signature, and types that no configuration has, to the caller. Raises UserError."""
    try:
        hints = type_hints(function)
    except NameError:  # a user's function, whose types are imported only for type checkers
        return
    for name, hint in hints.items():
        if name in given and _is_known(hint):
            convert(hint, given[name], f"{where}.{name}")


def check_constructor(
    cls: type[Any] | Callable[..., Any], name: str, given: Mapping[str, Any], where: str, *, offered: Collection[str] = ()
) -> None:
    """Check the options of a class (against its constructor) or a function, which the package also gives `offered`. Raises UserError."""
    parameters = inspect.signature(cls).parameters
    kinds = {key: parameter.kind.name for key, parameter in parameters.items()}
    allowed = [key for key, kind in kinds.items() if key not in offered and not kind.startswith("VAR_")]
    for key in given if "VAR_KEYWORD" not in kinds.values() else ():
        require_known(key, allowed, f"{where}.{key} is not an argument of '{name}'.")
    missing = [key for key in allowed if parameters[key].default is inspect.Parameter.empty and key not in given]
    if missing:
        raise UserError(f"'{name}' needs {where}.{missing[0]}.")
    check_arguments(cls.__init__ if isinstance(cls, type) else cls, given, where)  # type: ignore[misc]


def _is_known(hint: object) -> bool:
    """Whether `convert` has rules for a type in a signature."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return any(isinstance(note, Bounds) for note in arguments[1:]) and _is_known(arguments[0])
    if origin in (Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        return len(inner) == 1 and _is_known(inner[0])
    if origin in (tuple, list, dict):
        return bool(arguments) and _is_known(arguments[1 if origin is dict else 0])
    return hint is Any or hint in _KINDS or origin is Literal


def _scalar(kind: type, value: object, where: str) -> object:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    require(isinstance(value, kind) and not (kind is int and isinstance(value, bool)), where, _KINDS.get(kind, kind.__name__), value)
    # Bytes from a terminal that are not UTF-8 become surrogates, which our files cannot hold.
    is_text = not isinstance(value, str) or ("\0" not in value and not any("\ud800" <= sign <= "\udfff" for sign in value))
    require(is_text, where, "text that is UTF-8 and has no NUL", value)
    return value


def _plain(value: object, where: str) -> object:
    """Check an argument of a simulator or a function, of which only the finiteness of numbers can be checked here."""
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, (int, float)):
        bounds = next(bounds_in(Free))
        require(bounds.hold(value), where, f"a finite number {bounds}", value)
    return value


def _kind(kinds: list[type], value: object, where: str) -> type:
    """The dataclass whose field `name` has the value's name; the first if the value has none."""
    by_name = {name: kind for kind in kinds for name in typing.get_args(type_hints(kind)["name"])}
    if not isinstance(value, Mapping) or "name" not in value:
        return kinds[0]
    convert(Literal[tuple(by_name)], value["name"], f"{where}.name")
    return by_name[value["name"]]


@cache
def type_hints(cls: Any) -> dict[str, Any]:
    """{field, or argument of a function: its type, with bounds}."""
    return typing.get_type_hints(cls, include_extras=True)


@cache
def _bounded(cls: Any) -> dict[str, Any]:
    """Fields with bounded numbers, including free mappings, excluding fields of nested dataclasses."""
    hints = {f.name: type_hints(cls)[f.name] for f in dataclasses.fields(cls)}
    return {name: hint for name, hint in hints.items() if any(bounds_in(hint)) or _is_free(hint)}


def _is_free(hint: object) -> bool:
    return hint is Any or any(_is_free(argument) for argument in typing.get_args(hint))


def bounds_in(hint: object) -> Iterator[Bounds]:
    """Bounds of a type's numbers: of the number itself, or of a list's numbers."""
    for argument in typing.get_args(hint):
        if isinstance(argument, Bounds):
            yield argument
        else:
            yield from bounds_in(argument)
