"""Making the number of rows one that the learner can divide among ranks and micro-batches (ROLL's batch adjustment).

It happens *after* advantages: before, copied or missing rows would bias the statistics of groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from embodied_rl.errors import UserError

Adjustment = Literal["copy", "delete", "auto", "random_sample"]
"""copy: fill up with copies of random rows. delete: drop random rows. auto: the nearer of the two; copies where they are equally near
or nothing would be left. random_sample: as many random rows as the largest multiple that there are, none of them twice; where there are
fewer than one multiple, all of them and copies, drawn with replacement. A number that is divisible stays as it is, in every mode."""


@dataclass(frozen=True)
class AdjustedRows:
    """Which rows to train on, and what each counts for."""

    indices: np.ndarray
    """[n] int64 rows of the batch; kept rows stay in their order, copies come last."""
    weight: np.ndarray
    """[n] float32: 1.0, and 0.0 for copies: multiply the loss mask with it."""

    @property
    def num_rows(self) -> int:
        return int(self.indices.size)


def adjust_rows(num_rows: int, *, divisors: Sequence[int], mode: Adjustment, seed: int | Sequence[int]) -> AdjustedRows:
    """Choose rows so that their number is a multiple of D, the least common multiple of `divisors` (ranks × micro-batch, say).

    With rem = num_rows mod D: ``copy`` adds D − rem copies, ``delete`` drops rem, ``random_sample`` draws num_rows − rem rows without
    replacement, in random order, or fills fewer than D up to D with replacement. rem = 0: the batch stays as it is.

    Args:
        divisors: what the learner needs the number of rows to be divisible by.
        seed: with the arguments, all that the result depends on; give (run seed, iteration).

    Raises:
        UserError: ``delete`` would leave none.
    """
    multiple = math.lcm(*divisors)
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    rest = num_rows % multiple
    rows = np.arange(num_rows)
    if rest == 0:
        return AdjustedRows(rows, np.ones(num_rows, np.float32))
    missing = multiple - rest
    if mode == "random_sample" and num_rows > multiple:
        return AdjustedRows(rng.permutation(num_rows)[rest:], np.ones(num_rows - rest, np.float32))
    if mode in ("copy", "random_sample") or (mode == "auto" and (missing <= rest or num_rows < multiple)):
        copies = rng.integers(num_rows, size=missing) if mode == "random_sample" else _spread_draw(rng, num_rows, missing)
        return AdjustedRows(np.concatenate([rows, copies]), np.repeat(np.array([1, 0], np.float32), [num_rows, missing]))
    if num_rows < multiple:
        raise UserError(
            f"Deleting rows of a batch of {num_rows} until {multiple} (the least common multiple of {list(divisors)}) divides their number "
            "leaves none. Use mode 'copy' or 'auto', more groups per step, or smaller divisors."
        )
    kept = np.sort(rng.permutation(num_rows)[rest:])
    return AdjustedRows(kept, np.ones(kept.size, np.float32))


def _spread_draw(rng: np.random.Generator, num_rows: int, count: int) -> np.ndarray:
    """`count` random rows [count] int64, none of them once more often than another."""
    rounds = [rng.permutation(num_rows) for _ in range(-(-count // num_rows))]
    return np.concatenate(rounds)[:count]
