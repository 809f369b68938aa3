"""Rows of the Python state of a batch: kept while other environments are stepped or reset, taken out of it and put into it.

A value belongs to the environments one by one where its first dimension is their number: tensors, poses, arrays, lists and ManiSkill's
generators, in the attributes of the task, its robots and their controllers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG
from mani_skill.utils.structs import Pose
from mani_skill.utils.structs.base import BaseStruct

from embodied_rl.sim.robots.maniskill_state import owners_of


@contextmanager
def kept_rows(env: Any, rows: Sequence[int]) -> Iterator[None]:
    """Whatever happens meanwhile to the attributes of other environments than `rows` is undone."""
    num_envs = env.num_envs
    if len(rows) == num_envs:
        yield
        return
    others = torch.ones(num_envs, dtype=torch.bool)
    others[list(rows)] = False
    before = [(vars(owner), _copies(vars(owner), num_envs)) for _, owner in owners_of(env)]
    try:
        yield
    finally:
        for present, copies in before:
            for name, copy in copies.items():
                now = present.get(name)
                if isinstance(now, Pose) and isinstance(copy, Pose):
                    now, copy = now.raw_pose, copy.raw_pose
                if isinstance(now, torch.Tensor) and isinstance(copy, torch.Tensor) and now.shape == copy.shape:
                    now[others] = copy[others]


def _copies(attributes: dict[str, Any], num_envs: int) -> dict[str, Any]:
    copies: dict[str, Any] = {}
    for name, value in attributes.items():
        kind = type(value)
        if kind is torch.Tensor:
            if value.ndim and value.shape[0] == num_envs:
                copies[name] = value.clone()
        elif kind is Pose and value.raw_pose.shape[0] == num_envs:
            copies[name] = Pose(raw_pose=value.raw_pose.clone())
    return copies


def row_of(value: Any, single: Any, i: int, num_envs: int, seen: dict[int, Any]) -> Any:
    """Environment `i`'s part of an attribute, in the form that it has in an environment by itself.

    Args:
        single: the attribute of an environment by itself; what has the same shape there belongs to no single one.
        seen: parts of objects met before, so that attributes which are one object stay one.
    """
    if id(value) in seen:
        return seen[id(value)]
    part = value
    if isinstance(value, torch.Tensor | np.ndarray):
        if _is_row_by_row(value, single, num_envs):
            part = value[i : i + 1].clone() if isinstance(value, torch.Tensor) else value[i : i + 1].copy()
    elif isinstance(value, Pose):
        part = Pose(raw_pose=row_of(value.raw_pose, getattr(single, "raw_pose", None), i, num_envs, seen))
    elif isinstance(value, BatchedRNG):
        part = BatchedRNG(rngs=[value.rngs[i]])
    elif type(value) is dict:
        others = single if type(single) is dict else {}
        part = {key: row_of(item, others.get(key), i, num_envs, seen) for key, item in value.items()}
    elif type(value) is list and len(value) == num_envs and not (type(single) is list and len(single) == num_envs):
        part = [value[i]]
    seen[id(value)] = part
    return part


def with_row(value: Any, single: Any, i: int, num_envs: int) -> Any:
    """An attribute of the batch with environment `i`'s part replaced by that of an environment by itself; the inverse of `row_of`."""
    if isinstance(single, torch.Tensor):
        if value is None and single.ndim and single.shape[0] == 1:
            value = torch.zeros((num_envs, *single.shape[1:]), dtype=single.dtype)
        if isinstance(value, torch.Tensor) and _is_row_by_row(value, single, num_envs):
            value = value.clone()
            value[i] = single[0]
    elif isinstance(single, np.ndarray):
        if isinstance(value, np.ndarray) and _is_row_by_row(value, single, num_envs):
            value = value.copy()
            value[i] = single[0]
    elif isinstance(single, Pose):
        raw = with_row(None if value is None else value.raw_pose, single.raw_pose, i, num_envs)
        value = Pose(raw_pose=raw)
    elif isinstance(single, BatchedRNG) and isinstance(value, BatchedRNG):
        value.rngs[i] = single.rngs[0]
    elif type(single) is dict and type(value) is dict:
        value.update({key: with_row(value.get(key), item, i, num_envs) for key, item in single.items() if key in value})
    elif (
        type(single) is list
        and type(value) is list
        and len(single) == 1
        and len(value) == num_envs
        and not isinstance(single[0], BaseStruct)
    ):
        value[i] = single[0]
    return value


def _is_row_by_row(value: Any, single: Any, num_envs: int) -> bool:
    if not value.ndim or value.shape[0] != num_envs:
        return False
    return not isinstance(single, torch.Tensor | np.ndarray) or tuple(single.shape) == (1, *value.shape[1:])
