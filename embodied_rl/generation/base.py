"""Generators turn observations into actions and carry a weight version; their `send` and `recv` mirror the environment manager's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import TokenCache
from embodied_rl.types import ActionLayout, ActionSpec, Observation

Way = Literal["noisy", "mode", "random"]
"""Act with the given noise, with the mode, or with random actions in place of the policy's."""


@dataclass(frozen=True)
class ActedBatch:
    """Actions for the slots whose observations were sent."""

    slots: np.ndarray
    """[n] int64"""
    action: np.ndarray
    """[n, A] float32 normalised and unclipped; int64 [n, 1] for discrete actions; [n, W] of a policy with its own `ActionLayout`."""
    log_prob: np.ndarray
    """[n, L] float32"""
    version: int
    """Version of the weights that acted."""
    given: np.ndarray | None = None
    """Actions in the simulator's units, [n, A] or chunks [n, K, A], if the policy's are of another kind. None: `action`, denormalised."""

    @staticmethod
    def joined(parts: Sequence[ActedBatch]) -> ActedBatch:
        """The rows of several batches of one version, in their order."""
        if len(parts) == 1:
            return parts[0]
        given = [own.given for own in parts if own.given is not None]
        return ActedBatch(
            slots=np.concatenate([own.slots for own in parts]),
            action=np.concatenate([own.action for own in parts]),
            log_prob=np.concatenate([own.log_prob for own in parts]),
            version=parts[0].version,
            given=np.concatenate(given) if given else None,
        )

    def rows(self, index: np.ndarray) -> ActedBatch:
        """The batch with only these rows."""
        given = None if self.given is None else self.given[index]
        return ActedBatch(self.slots[index], self.action[index], self.log_prob[index], self.version, given)

    def for_simulator(self, action: ActionSpec, chunk_size: int = 1) -> np.ndarray:
        """Actions for `EnvManager.send`: [n, A], or [n, k, A] if the manager plays chunks of up to `chunk_size` steps."""
        given = action.denormalise(self.action) if self.given is None else self.given
        return given[:, None] if chunk_size > 1 and given.ndim == 2 else given


class Generator:
    """`send` takes observations; `recv` returns the oldest batch of actions."""

    version: int = 0
    """Version of the weights that act."""
    remembers: bool = False
    """Whether it keeps memory across an episode: `begin` marks where a new one begins, and it acts only for slots that play."""
    has_values: bool = False
    """Whether `value` estimates state values."""
    way: Way = "noisy"
    """How it acts, if that can be switched (`methods.building`)."""
    on_answer: Callable[..., object] | None = None
    """Called with each answer of a language agent, see `AgentGenerator`; other generators never call it."""
    shares_weights: bool = False
    """Whether it acts with the trained parameters themselves, not with a copy."""

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        """Ask for actions. Observations are read before this returns, so you may pass views into shared memory.

        Args:
            observation: {key: [n, ...]}.
            noise: [n, noise_width] float32, as the policy's `ActionLayout` draws it: by default [n, A] standard normal for continuous
                actions, uniform in [0, 1) for discrete ones. The caller draws it, so that a run's randomness depends only on its seed.
                None: the mode.
        """
        raise RuntimeError(f"{type(self).__name__} does not act in this process.")

    def recv(self) -> ActedBatch:
        """Return the oldest batch. Raises RuntimeError if nothing was sent."""
        raise RuntimeError(f"{type(self).__name__} does not act in this process.")

    def act_in_parts(self, slots: np.ndarray, observation: Observation, noise: np.ndarray, parts: Sequence[slice]) -> ActedBatch:
        """Act on each of these `parts` with `send` and `recv`, and join the results. The parts follow one another and cover all rows; not a
        bit of a row depends on the rows of other parts."""
        acted = []
        for part in parts:
            self.send(slots[part], {key: rows[part] for key, rows in observation.items()}, noise[part])
            acted.append(self.recv())
        return ActedBatch.joined(acted)

    def publish(self, version: int) -> None:
        """Act with the policy's present weights from now on, as `version`."""
        self.version = version

    @property
    def caches(self) -> Sequence[TokenCache]:
        """Key-value caches of its token backends; the engine may free them."""
        return ()

    def begin(self, slots: Iterable[int]) -> None:
        """Mark the next observations of these slots as the first ones of new episodes."""

    def value(self, observation: Observation) -> np.ndarray:
        """[n] float32 state values, if it `has_values`."""
        raise NotImplementedError(f"{type(self).__name__} estimates no values")

    def at_temperature(self, temperature: float) -> AbstractContextManager[ActionLayout]:
        """Act at another temperature inside the context; draw noise as the layout that it gives says. Training uses the policy's own.
        Raises UserError: it does not sample action tokens."""
        raise UserError("evaluation.temperature is for action tokens (language agents: agent.evaluation_temperature). Set it to null.")

    def figures(self) -> dict[str, float]:
        """Shares of language agents' answers since the last call; empty for other generators."""
        return {}

    def close(self) -> None:
        """Stop the processes and threads that were started for it; may be called twice."""


class QueuedGenerator(Generator):
    """Base of generators whose `send` puts the finished batch into `_acted`."""

    def __init__(self) -> None:
        self._acted: deque[ActedBatch] = deque()

    def recv(self) -> ActedBatch:
        if not self._acted:
            raise RuntimeError("recv was called before any observation was sent.")
        return self._acted.popleft()
