"""The players of a recording: the simulator's expert, or a generator, step by step or in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from embodied_rl.generation.base import ActedBatch, Generator
from embodied_rl.sim.instrumented import Split
from embodied_rl.types import ActionLayout, ActionSpec, Observation


@dataclass(frozen=True)
class Played:
    """What a player did with n observations; None: not known. With a chunk of K steps each part has an axis [n, K, ...] but `value`."""

    action: Any
    """[n, A] in the simulator's units, or n texts; [n, K, A] of chunks."""
    sampled_action: np.ndarray | None = None
    """[n, A] normalised and unclipped; action tokens int64 of a policy that gives tokens."""
    log_prob: np.ndarray | None = None
    """[n, L] under the policy that acted; of a chunk [n, K, L / K], the units of each step."""
    value: np.ndarray | None = None
    """[n]; None of chunks: it is not known in their middle."""
    version: int | None = None


class Player(Protocol):
    """Chooses the actions of a recording: an expert or a generator."""

    draws: bool
    """Whether its actions are drawn with noise."""
    layout: ActionLayout | None
    """What its actions look like; None: the simulator's own, step by step."""

    def act(self, seen: Split, noise: np.ndarray | None) -> Played:
        """Actions for all rows; `noise` [n, noise_width] as `Generator.send` takes it, None where `draws` is False."""
        ...


class ExpertPlayer:
    """Does what the simulator's expert says (`embodied_rl.sim.instrumented`). Implements `Player`."""

    draws = False
    layout: ActionLayout | None = None

    def act(self, seen: Split, noise: np.ndarray | None) -> Played:
        assert seen.expert_action is not None, "the simulator was made without an expert"
        return Played(seen.expert_action.copy())


class GeneratorPlayer:
    """A generator: a policy's mode, or its samples with their log-probabilities. Implements `Player`.

    Args:
        generator: with weights published.
        action: of the simulator.
        draws: sample; False: the mode, which has no log-probability: as a behaviour policy it is deterministic.
        layout: of a policy whose actions are not the simulator's own, normalised, step by step.
        values: also ask a generator that has them; False: the policy has no critic.
    """

    def __init__(
        self, generator: Generator, action: ActionSpec, draws: bool, layout: ActionLayout | None = None, *, values: bool = True
    ) -> None:
        self.draws, self.layout = draws, layout
        self._generator, self._action = generator, action
        self._value: Callable[[Observation], np.ndarray] | None = generator.value if values and generator.has_values else None

    def act(self, seen: Split, noise: np.ndarray | None) -> Played:
        num_rows = len(next(iter(seen.observation.values())))
        self._generator.send(np.arange(num_rows), seen.observation, noise)
        acted = self._generator.recv()
        if self.layout is not None and self.layout.chunk_size > 1:
            return self._chunks(acted, self.layout)
        # An action that does not consist of one number a unit (a denoising) cannot be stored.
        kept = self.layout is None or self.layout.width == self.layout.num_units
        value = None if self._value is None else self._value(seen.observation)
        return Played(
            action=acted.for_simulator(self._action),
            sampled_action=acted.action if kept else None,
            log_prob=acted.log_prob if self.draws else None,
            value=value if value is None or value.ndim == 1 else value[:, 0],
            version=acted.version,
        )

    def _chunks(self, acted: ActedBatch, layout: ActionLayout) -> Played:
        steps = layout.unit_steps(self._action.dim)

        def by_step(units: np.ndarray) -> np.ndarray:
            """[n, L] → [n, K, L / K]"""
            return np.stack([units[:, steps == step] for step in range(layout.chunk_size)], axis=1)

        return Played(
            action=acted.for_simulator(self._action, layout.chunk_size),
            sampled_action=by_step(acted.action) if layout.width == layout.num_units else None,
            log_prob=by_step(acted.log_prob) if self.draws else None,
            version=acted.version,
        )


@dataclass
class ChunkInPlay:
    """The chunk that a slot is playing out."""

    played: Played
    row: int
    """Of `played`."""
    number: int
    """Of the chunk in its episode."""
    next: int = 0
    """Step of the chunk that is due."""

    @property
    def is_over(self) -> bool:
        return self.next >= self.played.action.shape[1]

    def take(self) -> dict[str, Any]:
        """{column: this step's row}, and on to the next step."""
        parts = {name: getattr(self.played, name) for name in ("action", "sampled_action", "log_prob")}
        row = {name: part[self.row, self.next] for name, part in parts.items() if part is not None}
        self.next += 1
        return {**row, "policy_version": self.played.version, "chunk": self.number}
