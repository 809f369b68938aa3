"""Filters of groups: pure functions from a finished group to the reason why it is dropped, or None.

Dropped groups are replaced by new ones until the batch is full (dynamic sampling; DAPO, Yu et al. 2025, arXiv:2503.14476); the
group queue counts them by reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from embodied_rl.bounds import Score, Share
from embodied_rl.config.building import check_constructor
from embodied_rl.errors import UserError, did_you_mean, require_known
from embodied_rl.types import EpisodeGroup

GroupFilter = Callable[[EpisodeGroup], str | None]
"""Returns None to keep the group, or the reason to drop it. Use few different strings, because they are counted."""

Over = Literal["mean", "all", "any"]
"""Value of a group's episodes that a rule checks: their mean, each of them, or at least one."""


def zero_variance(*, tolerance: Share = 1e-6) -> GroupFilter:
    """Drop groups whose scores are all equal: their group-relative advantages are 0.

    Args:
        tolerance: largest difference between scores, relative to the largest magnitude among them (at least 1), that counts as
            equal. Sums of float32 rewards that should be equal differ by rounding; exact comparison would let such groups pass.

    Raises (when applied):
        UserError: the group has one episode, so that every group would be dropped.
    """

    def apply(group: EpisodeGroup) -> str | None:
        if group.num_episodes < 2:
            raise UserError(
                "The filter zero_variance needs groups of at least two episodes, got one. Raise group_size or leave the filter out."
            )
        scores = group.scores
        spread = scores.max() - scores.min()
        return "zero_variance" if spread <= tolerance * max(1.0, float(np.abs(scores).max())) else None

    return apply


def mean_score(*, minimum: Score | None = None, maximum: Score | None = None) -> GroupFilter:
    """Keep groups with minimum <= mean score <= maximum (None: no bound): neither too hard nor too easy. A NaN is dropped.

    With success as reward, (0.1, 0.9) is RLinf-VLA's setting for LIBERO (arXiv:2510.06710).
    """
    inside = _bounds("mean_score", minimum, maximum)
    return lambda group: None if inside(group.mean_score) else "mean_score"


def path(*, path: str, minimum: Score | None = None, maximum: Score | None = None, equals: Any = None, over: Over = "mean") -> GroupFilter:
    """Keep groups by any value of the group or its episodes, named by a dotted path.

    ``success_rate`` or ``number`` is looked up in the group; ``episode.num_steps`` or ``episode.metadata.judge.score`` in each of its
    episodes. Paths follow attributes and keys of mappings.

    Args:
        minimum, maximum: bounds, both included; None: no bound.
        equals: required value, instead of bounds.
        over: how the rule checks the episodes' values; `mean` works with bounds only.

    Raises UserError: neither bounds nor `equals`, or both; or (when applied) the path leads nowhere.
    """
    if (equals is None) == (minimum is None and maximum is None):
        raise UserError(f"The filter on '{path}' needs either minimum and/or maximum, or equals.")
    require_known(over, get_args(Over), f"over={over!r} is not a choice for the filter on '{path}'.")
    first, _, rest = path.partition(".")
    of_episodes = first == "episode"
    if of_episodes and equals is not None and over == "mean":
        raise UserError(f"The filter on '{path}' compares single values: over must be 'all' or 'any' with equals, not 'mean'.")
    accepts = (lambda value: bool(value == equals)) if equals is not None else _bounds(path, minimum, maximum)
    reason = f"path:{path}"

    def apply(group: EpisodeGroup) -> str | None:
        if not of_episodes:
            return None if accepts(follow(group, path)) else reason
        values = [follow(episode, rest) for episode in group.episodes]
        if over == "mean":
            return None if accepts(float(np.mean(values))) else reason
        return None if (all if over == "all" else any)(accepts(value) for value in values) else reason

    return apply


def follow(start: object, dotted: str) -> Any:
    """The value at a dotted path of attributes and keys; keys may contain dots. Raises UserError naming the missing part and the available
    names."""
    value, parts = start, dotted.split(".")
    while parts:
        name, used = parts[0], 1
        if isinstance(value, Mapping):
            # The longest name first, because a key may itself contain dots.
            used = next((count for count in range(len(parts), 0, -1) if ".".join(parts[:count]) in value), 0)
            if not used:
                raise UserError(f"'{dotted}' does not exist: '{name}' is missing.{did_you_mean(name, map(str, value))}")
            value = value[".".join(parts[:used])]
        elif name in (public := [known for known in dir(value) if not known.startswith("_")]):
            value = getattr(value, name)
        else:
            shown = public if type(value).__module__.startswith("embodied_rl") else []
            raise UserError(f"'{dotted}' does not exist: a {type(value).__name__} has no '{name}'.{did_you_mean(name, shown)}")
        parts = parts[used:]
    return value


FILTERS: dict[str, Callable[..., GroupFilter]] = {"zero_variance": zero_variance, "mean_score": mean_score, "path": path}
"""{name: filter} for configurations."""


def build_filters(settings: Sequence[Mapping[str, Any]]) -> tuple[GroupFilter, ...]:
    """Filters from a configuration: ``[{name: zero_variance}, {name: mean_score, minimum: 0.1, maximum: 0.9}]``.
    Raises UserError for an unknown or invalid name or argument."""
    built = []
    for number, setting in enumerate(settings):
        name, arguments = str(setting.get("name")), {key: value for key, value in setting.items() if key != "name"}
        require_known(name, FILTERS, f"Group filter '{name}' is not known.")
        check_constructor(FILTERS[name], name, arguments, f"algorithm.groups.filters[{number}]")
        built.append(FILTERS[name](**arguments))
    return tuple(built)


def _bounds(what: str, minimum: float | None, maximum: float | None) -> Callable[[float], bool]:
    low, high = -np.inf if minimum is None else minimum, np.inf if maximum is None else maximum
    if not low <= high:
        raise UserError(f"The filter on '{what}' needs minimum <= maximum, got {minimum!r} and {maximum!r}.")
    # A NaN is inside no bounds.
    return lambda value: bool(low <= value <= high)
