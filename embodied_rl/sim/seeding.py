"""Seeds of episodes: each depends only on the slot and the episode's number, never on workers or siblings."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

One = TypeVar("One")

HELD_OUT_START = 2**30
"""Training seeds lie below this, held-out seeds at or above it, so that the two never meet."""


def chosen(seed: int, training: Sequence[One], held_out: Sequence[One]) -> One:
    """Item for an episode's seed: held-out seeds use `held_out` in turn, others draw from `training`."""
    if seed >= HELD_OUT_START:
        return held_out[(seed - HELD_OUT_START) % len(held_out)]
    return training[int(np.random.default_rng(seed).integers(len(training)))]


@dataclass(frozen=True)
class EpisodeSeeds:
    """Seeds of the episodes of every slot; built by `training` or `held_out`."""

    kind: Literal["training", "held_out", "given"]
    base: int
    first: tuple[int | None, ...] = ()
    """Seed of each slot's first episode in round 0, or None; empty: none is given."""
    before: int = 0
    """Slots of other processes that are numbered before these, in training."""

    @staticmethod
    def training(base: int, first: Sequence[int | None] = (), before: int = 0) -> EpisodeSeeds:
        """Seeds spread over [0, 2**30) by a hash of (base, round, slot, index), apart from those in `first`."""
        return EpisodeSeeds("training", base, tuple(first), before)

    @staticmethod
    def held_out(base: int = 0) -> EpisodeSeeds:
        """The consecutive seeds 2**30 + base + 0, 1, 2, …: slot s of N gets 2**30 + base + s + index·N.

        The episodes of seeds first … first + n − 1 are then a fixed set, whichever slots finish early.
        """
        return EpisodeSeeds("held_out", base)

    @staticmethod
    def given(seed: int) -> EpisodeSeeds:
        """Seeds that are all `seed`."""
        return EpisodeSeeds("given", seed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; leaves out unused fields."""
        plain = {"kind": self.kind, "base": self.base}
        return plain | ({"first": list(self.first)} if self.first else {}) | ({"before": self.before} if self.before else {})

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> EpisodeSeeds:
        return EpisodeSeeds(data["kind"], data["base"], tuple(data.get("first", ())), data.get("before", 0))

    def seed(self, slot: int, index: int, num_slots: int, seed_round: int = 0) -> int:
        """Seed of the `index`-th episode of `slot` since the manager was reset for `seed_round`."""
        if self.first and not (index or seed_round) and (given := self.first[slot]) is not None:
            return given
        if self.kind == "given":
            return self.base
        if self.kind == "held_out":
            return HELD_OUT_START + self.base + slot + index * num_slots
        digest = hashlib.blake2b(f"{self.base}/{seed_round}/{self.before + slot}/{index}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") >> 2


@dataclass(frozen=True)
class SeedStream:
    """Seeds of one slot's episodes. A snapshot includes it, so that the episodes after a restored one are the same too."""

    seeds: EpisodeSeeds
    seed_round: int
    slot: int
    num_slots: int

    def seed(self, index: int) -> int:
        return self.seeds.seed(self.slot, index, self.num_slots, self.seed_round)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"seeds": self.seeds.to_dict()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SeedStream:
        return SeedStream(EpisodeSeeds.from_dict(data["seeds"]), int(data["seed_round"]), int(data["slot"]), int(data["num_slots"]))
