"""What a batch says of its queue: how much waits behind it, and how old it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.types import EpisodeGroup


def batch_figures(queue: GroupQueue, groups: Sequence[EpisodeGroup], version: int) -> dict[str, float]:
    """Figures of a batch that was taken a moment ago for the weights `version`.

    ``groups/ready`` and ``groups/held`` are the queue's lengths: whole groups that wait for their turn, and all places in use, those of
    the batch included. ``groups/age_*`` are of the batch, see `age_figures`.
    """
    lengths = queue.lengths()
    figures = {f"groups/{name}": float(value) for name, value in lengths.items()}
    return figures | age_figures("groups", (group.age(version) for group in groups), queue.config.max_staleness)


def age_figures(place: str, ages: Iterable[int], max_age: int) -> dict[str, float]:
    """``<place>/age_mean``, ``age_max``, and the histogram: how many are 0, 1, … `max_age` versions old as ``age_0``, ``age_1``, …"""
    found = list(ages)
    counts = Counter(found)
    histogram = {f"{place}/age_{age}": float(counts[age]) for age in range(max(max_age, max(found, default=0)) + 1)}
    return {f"{place}/age_mean": float(np.mean(found)) if found else 0.0, f"{place}/age_max": float(max(found, default=0)), **histogram}
