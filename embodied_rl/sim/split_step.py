"""A control step in two parts: what happens, and what is seen of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from embodied_rl.types import StepBuffers


class SplitStep(ABC):
    """Base class of simulators whose control step has two parts, so that an observation that is not read is not made.

    A simulator writes `advance` and `observe`, and `step` follows from them. The worker plays the inner steps of an action chunk with
    `advance`, and asks `observe` for those environments whose chunk or episode is over there. A wrapper that needs every observation
    (a recording, a film, an expert) calls `step`.
    """

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        """See `embodied_rl.sim.env.SimEnv`."""
        self.advance(env_ids, actions, out)
        self.observe(env_ids, out)

    @abstractmethod
    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        """As `SimEnv.step`, reward, flags and info included, but the rows of ``out.observation`` may be left as they are."""

    @abstractmethod
    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        """Write the observations of the present states, after `advance` and before the next `reset`.

        It changes nothing that the episode depends on, random generators included: the same episode follows whether it is called after
        a step or not. The names may be some of those that were advanced last, also where all environments step together.
        """


class Stepping(Protocol):
    """A simulator that is stepped as a whole: see `embodied_rl.sim.env.SimEnv`."""

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None: ...


class _WholeStep(SplitStep):
    """A simulator that observes whenever it steps."""

    def __init__(self, sim: Stepping) -> None:
        self._sim = sim

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        self._sim.step(env_ids, actions, out)

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        """The step has written them."""


def split_step(sim: Stepping) -> SplitStep:
    """The two parts of a simulator's step; of one that is not a `SplitStep`, the whole step and nothing."""
    return sim if isinstance(sim, SplitStep) else _WholeStep(sim)
