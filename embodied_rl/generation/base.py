"""Generators turn observations into actions and carry a weight version; they face the environment manager with the same shape."""

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
"""With the noise that is given, by the mode, or with random actions in place of the policy's."""


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
    """[n, A], or chunks [n, K, A], in the simulator's units: what it gets of actions that are not its own. None: `action`, denormalised."""

    def rows(self, index: np.ndarray) -> ActedBatch:
        """Some of its rows."""
        given = None if self.given is None else self.given[index]
        return ActedBatch(self.slots[index], self.action[index], self.log_prob[index], self.version, given)

    def for_simulator(self, action: ActionSpec, chunk_size: int = 1) -> np.ndarray:
        """What `EnvManager.send` takes: [n, A], or [n, k, A] where the manager plays chunks of up to `chunk_size` steps."""
        given = action.denormalise(self.action) if self.given is None else self.given
        return given[:, None] if chunk_size > 1 and given.ndim == 2 else given


class Generator:
    """`send` hands over observations, `recv` returns the oldest batch that has been acted on."""

    version: int = 0
    """Of the weights that act."""
    remembers: bool = False
    """Whether it remembers an episode's past: `begin` says where a new one begins, and it acts only for slots that play."""
    has_values: bool = False
    """Whether `value` estimates states."""
    way: Way = "noisy"
    """How it acts, where that can be switched (`methods.acting`)."""
    on_answer: Callable[..., object] | None = None
    """Called with each answer of a language agent, see `AgentGenerator`; other generators give none."""
    shares_weights: bool = False
    """Whether it acts with the very parameters that are trained, and with no copy of them."""

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        """Ask for actions. Observations are read before this returns, so views into shared memory may be passed.

        Args:
            observation: {key: [n, ...]}.
            noise: [n, A] float32: standard normal for continuous actions, uniform in [0, 1) for discrete ones (or as the policy's
                `ActionLayout` says); the caller draws it so that a run's randomness depends only on its seed. None: the mode.
        """
        raise RuntimeError(f"{type(self).__name__} does not act in this process.")

    def recv(self) -> ActedBatch:
        """The oldest batch. Raises RuntimeError when nothing was sent."""
        raise RuntimeError(f"{type(self).__name__} does not act in this process.")

    def act_in_parts(self, slots: np.ndarray, observation: Observation, noise: np.ndarray, parts: Sequence[slice]) -> ActedBatch:
        """`send` and `recv` of each of these `parts`, which follow one another and cover all rows, as one batch: not a bit of a row
        depends on the rows of other parts."""
        acted = []
        for part in parts:
            self.send(slots[part], {key: rows[part] for key, rows in observation.items()}, noise[part])
            acted.append(self.recv())
        given = [own.given for own in acted if own.given is not None]
        return ActedBatch(
            slots=np.concatenate([own.slots for own in acted]),
            action=np.concatenate([own.action for own in acted]),
            log_prob=np.concatenate([own.log_prob for own in acted]),
            version=acted[0].version,
            given=np.concatenate(given) if given else None,
        )

    def publish(self, version: int) -> None:
        """Take the policy's present weights as `version`."""
        self.version = version

    @property
    def caches(self) -> Sequence[TokenCache]:
        """The key-value caches of its token backends, which may be let go."""
        return ()

    def begin(self, slots: Iterable[int]) -> None:
        """The next observations of these slots are the first ones of new episodes."""

    def value(self, observation: Observation) -> np.ndarray:
        """State values [n] float32, where it `has_values`."""
        raise NotImplementedError(f"{type(self).__name__} estimates no values")

    def at_temperature(self, temperature: float) -> AbstractContextManager[ActionLayout]:
        """Act at another temperature within, with noise as the layout that is given says. Training's is the policy's own.

        Raises UserError: it does not draw action tokens.
        """
        raise UserError("evaluation.temperature is of action tokens; language agents have agent.evaluation_temperature. Set it null.")

    def figures(self) -> dict[str, float]:
        """Shares of answers since the last call, where there are any."""
        return {}

    def close(self) -> None:
        """End what was started for it; may be called twice."""


class QueuedGenerator(Generator):
    """The base of generators whose `send` puts what was acted into `_acted`."""

    def __init__(self) -> None:
        self._acted: deque[ActedBatch] = deque()

    def recv(self) -> ActedBatch:
        if not self._acted:
            raise RuntimeError("recv was called although no observation had been sent.")
        return self._acted.popleft()
