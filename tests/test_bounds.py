"""Every number of a configuration has bounds in its type, and what does not fit them is one line."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
import typing
from typing import Any, Literal

import pytest

import embodied_rl.algorithms.fitted_q
import embodied_rl.config
from embodied_rl.bounds import Bounds, Seconds, Share
from embodied_rl.config import HybridConfig, SimConfig
from embodied_rl.config.algorithm import RewardConfig
from embodied_rl.config.building import Config, check_arguments, convert, type_hints
from embodied_rl.errors import UserError, shown


def config_classes() -> list[type]:
    """All parts of configurations, wherever they are declared."""
    for module in pkgutil.iter_modules(embodied_rl.config.__path__):
        importlib.import_module(f"embodied_rl.config.{module.name}")
    found, waiting = [], [Config]
    while waiting:
        cls = waiting.pop()
        found += cls.__subclasses__()
        waiting += cls.__subclasses__()
    return found


def bare_numbers(hint: Any) -> bool:
    """Whether a type holds an int or a float without bounds."""
    if typing.get_origin(hint) is typing.Annotated:
        return not any(isinstance(note, Bounds) for note in typing.get_args(hint)[1:])
    return hint in (int, float) or any(bare_numbers(argument) for argument in typing.get_args(hint))


def test_every_dataclass_of_the_configuration_is_checked_and_every_number_has_bounds() -> None:
    classes = config_classes()
    assert embodied_rl.algorithms.fitted_q.FittedQConfig in classes
    assert len(classes) > 30
    for name, value in vars(embodied_rl.config).items():
        assert not (isinstance(value, type) and dataclasses.is_dataclass(value)) or value in classes, name
    bare = [
        f"{cls.__name__}.{key}"
        for cls in classes
        for key, hint in type_hints(cls).items()
        if not key.startswith("_") and bare_numbers(hint)
    ]
    assert not bare


def test_a_number_without_bounds_would_be_noticed() -> None:
    assert bare_numbers(int)
    assert bare_numbers(float | None)
    assert bare_numbers(tuple[int, ...])
    assert not bare_numbers(typing.Annotated[int, Bounds(0, 1)] | None)
    assert not bare_numbers(str)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "text"),
    [
        (Bounds(1, 1_000_000), (1, 1_000_000), (0, -1, 1_000_001, 10**20, math.nan, math.inf, -math.inf), "between 1 and 1,000,000"),
        (Bounds(0, 1, above=True), (1e-300, 1.0), (0.0, -0.0, 1.0000001, math.nan), "above 0 and at most 1"),
        (Bounds(0, 1, below=True), (0, 0.999), (1.0, math.nan), "at least 0 and below 1"),
        (Bounds(0, 1, above=True, below=True), (0.5,), (0, 1), "above 0 and below 1"),
    ],
)
def test_bounds_hold_what_they_say(bounds: Bounds, inside: tuple[float, ...], outside: tuple[float, ...], text: str) -> None:
    assert all(bounds.hold(value) for value in inside)
    assert not any(bounds.hold(value) for value in outside)
    assert str(bounds) == text


FREE = "between -1.84467e+19 and 1.84467e+19"
"""What 64 bits hold."""
SIM = {"name": "a", "target": "b:c"}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_slots", 10**20, "sim.num_slots must be between 1 and 1,000,000, got 100000000000000000000."),
        ("num_slots", 1.5, "sim.num_slots must be an integer, got 1.5."),
        ("num_slots", True, "sim.num_slots must be an integer, got true."),
        ("num_slots", None, "sim.num_slots must be an integer, got null."),
        pytest.param("num_slots", 10**5000, "sim.num_slots must be between 1 and 1,000,000, got a number", id="long"),
        ("step_timeout_s", 10**400, "sim.step_timeout_s must be above 0 and at most 100,000,000, got 1000"),
        ("step_timeout_s", math.nan, "sim.step_timeout_s must be above 0 and at most 100,000,000, got nan."),
        ("memory_limit_mb", math.inf, "sim.memory_limit_mb must be above 0 and at most 1,000,000,000, got inf."),
        ("success_ends_episode", 1, "sim.success_ends_episode must be true or false, got 1."),
        ("name", ["a"], "sim.name must be text, got ['a']."),
        ("kwargs", [1], "sim.kwargs must be a mapping of keys to values, got [1]."),
        ("kwargs", {1: 2}, "A key of sim.kwargs must be text, got 1."),
        ("kwargs", {"a": [{"b": math.nan}]}, f"sim.kwargs.a[0].b must be a finite number {FREE}, got nan."),
        ("kwargs", {"size": 10**20}, f"sim.kwargs.size must be a finite number {FREE}, got 100000000000000000000."),
        ("kwargs", {"size": -1e300}, f"sim.kwargs.size must be a finite number {FREE}, got -1e+300."),
        ("on_fault", ["restore"], "sim.on_fault=['restore'] is not a choice."),
        ("placement", {"x" * 1000: 1}, "sim.placement={'xxxx"),
    ],
)
def test_a_value_that_does_not_fit_is_one_short_line(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        SimConfig.from_dict({**SIM, key: value})
    text = str(caught.value)
    assert text.startswith(message)
    assert "\n" not in text
    assert len(text) <= 400


def test_bounds_hold_for_what_is_built_in_python_too() -> None:
    with pytest.raises(UserError, match=r"^sim\.num_slots must be between 1 and 1,000,000, got 0\.$"):
        SimConfig(name="a", target="b:c", num_slots=0)
    with pytest.raises(UserError, match=r"^sim\.kwargs\.size must be a finite number"):
        SimConfig(name="a", target="b:c", kwargs={"size": math.inf})
    with pytest.raises(UserError, match=r"^hybrid\.players must be between 1 and 65,536, got 0\.$"):
        dataclasses.replace(HybridConfig(), players=0)
    with pytest.raises(UserError, match=r"^algorithm\.reward\.overlong_penalty must be between 0 and 1,000,000,000, got -1\.0\.$"):
        RewardConfig(overlong_tokens=9, overlong_penalty=-1.0)


def test_arguments_are_held_against_the_signature_of_what_takes_them() -> None:
    def takes(
        *,
        share: Share = 0.5,
        seconds: Seconds | None = None,
        where: Literal["here", "there"] = "here",
        other: Any = None,
        rates: list[float] | None = None,
        either: int | str = 0,
    ) -> None: ...

    check_arguments(takes, {"share": 1, "seconds": None, "where": "there", "other": {"a": 10**19}, "unknown": math.nan}, "x")
    check_arguments(takes, {"rates": [1], "either": "a"}, "x")  # types that no configuration has are the function's own affair
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"share": math.nan}, "x.share must be between 0 and 1, got nan."),
        ({"share": "much"}, "x.share must be a number, got 'much'."),
        ({"seconds": 1e20}, "x.seconds must be above 0 and at most 100,000,000, got 1e+20."),
        ({"where": "nowhere"}, "x.where='nowhere' is not a choice."),
        ({"other": {"a": math.inf}}, f"x.other.a must be a finite number {FREE}, got inf."),
    ]
    for given, message in wrong:
        with pytest.raises(UserError) as caught:
            check_arguments(takes, given, "x")
        assert str(caught.value).startswith(message)


def test_lists_name_the_number_that_is_wrong() -> None:
    hint = tuple[typing.Annotated[int, Bounds(1, 9)], ...]
    assert convert(hint, [1, 9], "sizes") == (1, 9)
    with pytest.raises(UserError, match=r"^sizes\[1\] must be between 1 and 9, got 10\.$"):
        convert(hint, [1, 10], "sizes")
    with pytest.raises(UserError, match=r"^sizes must be a list, got \{'a': 1\}\.$"):
        convert(hint, {"a": 1}, "sizes")


def test_shown_is_short_whatever_it_shows() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "values nested too deeply"
    assert len(shown("x" * 10_000)) <= 80
    assert shown([1, 2]) == "[1, 2]"
    assert shown(None) == "null"
