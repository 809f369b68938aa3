"""`embodied_rl.load_policy`: a trained policy outside of training, for a control loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.errors import UserError, shown
from embodied_rl.generation.base import Generator
from embodied_rl.types import SimSpec, TensorSpec


class LoadedPolicy:
    """Asks a trained policy for actions: its likeliest, in the units of the simulator that it was trained in."""

    def __init__(self, generator: Generator, spec: SimSpec, keys: Sequence[str]) -> None:
        """
        Args:
            generator: with its weights published.
            spec: of the simulator that the policy was trained in.
            keys: the parts of an observation that it reads.
        """
        self.spec, self.keys = spec, tuple(keys)
        self._generator, self._num_rows = generator, 0

    @property
    def expects(self) -> str:
        """What `predict` takes, in one line."""
        parts = [(key, self.spec.observation[key]) for key in self.keys]
        told = [f"{key!r}: {f'{list(p.shape)} {p.dtype}' if isinstance(p, TensorSpec) else p.kind}" for key, p in parts]
        return "{" + ", ".join(told) + "}, or a batch of them, [n, …] each"

    def reset(self) -> None:
        """A new episode begins: a policy that remembers forgets the last one. The first call of `predict` needs none."""
        self._num_rows = 0

    def predict(self, observation: object) -> Any:
        """The action for an observation, or the actions of a batch.

        Args:
            observation: {key: value} with what the policy reads, further keys are left; a single value where it reads one key. Arrays have
                the shape of the simulator's observation, or with a leading n those of n environments at a time.

        Returns:
            [A] float32, or [n, A] for a batch; [K, A] and [n, K, A] of a policy that acts in chunks of K > 1 steps; an int, or [n] int64,
            for discrete actions; a str, or a list, of a language agent.

        Raises:
            UserError: a key is missing, or a shape or a kind of number differs; with what the policy expects.
        """
        parts, num_rows = self._batch(observation)
        slots = np.arange(1 if num_rows is None else num_rows)
        if self._generator.remembers and len(slots) != self._num_rows:
            self._generator.begin(slots.tolist())
        self._num_rows = len(slots)
        self._generator.send(slots, parts, None)
        actions = self._generator.recv().for_simulator(self.spec.action)
        if self.spec.action.kind == "text":
            texts = [str(text) for text in actions]
            return texts[0] if num_rows is None else texts
        if self.spec.action.kind == "discrete":
            actions = actions[..., 0]
            return int(actions[0]) if num_rows is None and actions.ndim == 1 else actions[0] if num_rows is None else actions
        return actions[0] if num_rows is None else actions

    def close(self) -> None:
        """End what was started to act."""
        self._generator.close()

    def _batch(self, observation: object) -> tuple[dict[str, np.ndarray], int | None]:
        """({key: [n, …]}, n), or None for n where it is a single observation."""
        if not isinstance(observation, Mapping):
            if len(self.keys) != 1:
                raise UserError(f"An observation must name its parts. The policy expects {self.expects}.")
            observation = {self.keys[0]: observation}
        parts, sizes = {}, set[int | None]()
        for key in self.keys:
            if key not in observation:
                raise UserError(f"The observation lacks {shown(key)}; it has {', '.join(map(str, observation))}. Expected: {self.expects}.")
            parts[key], size = self._part(key, observation[key])
            sizes.add(size)
        if len(sizes) > 1:
            told = ", ".join("a single one" if size is None else f"{size} rows" for size in sorted(sizes, key=str))
            raise UserError(f"The parts of an observation must be of the same batch, got {told}. Expected: {self.expects}.")
        return parts, sizes.pop()

    def _part(self, key: str, value: object) -> tuple[np.ndarray, int | None]:
        part = self.spec.observation[key]
        if not isinstance(part, TensorSpec):
            rows = list(value) if isinstance(value, list | tuple | np.ndarray) else [value]
            if part.kind == "text" and (wrong := [row for row in rows if not isinstance(row, str)]):
                raise UserError(f"{shown(key)} must be a text, got {type(wrong[0]).__name__}. Expected: {self.expects}.")
            column = np.empty(len(rows), object)
            column[:] = rows
            return column, None if rows and rows[0] is value else len(rows)
        array = np.asarray(value)
        single = array.shape == part.shape
        if not single and array.shape[1:] != part.shape:
            raise UserError(f"{shown(key)} must be {list(part.shape)} or [n, …], got {list(array.shape)}. Expected: {self.expects}.")
        if not np.can_cast(array.dtype, part.dtype, "same_kind"):
            raise UserError(f"{shown(key)} must hold {part.dtype}, got {array.dtype}. Expected: {self.expects}.")
        array = np.ascontiguousarray(array, part.dtype)
        return (array[None], None) if single else (array, len(array))


def load_policy(path: Path | str, *, domain: str | None = None, trust: Sequence[str] = ()) -> LoadedPolicy:
    """The policy of a run's folder (its last checkpoint) or of a checkpoint's folder, of any kind: small networks, VLAs, language agents.

    Args:
        path: see above.
        domain: of a run with several domains, whose policy.
        trust: code that the checkpoint may name beside what is registered (docs/trust.md).

    Raises:
        UserError: there is no checkpoint, or it cannot be read.
        IncompatibleCheckpointError: its tensors do not fit its configuration.
    """
    from embodied_rl.commands.evaluate import load_to_play, make_generator, make_policy
    from embodied_rl.generation.torch_backend import TorchGenerator

    checkpoint = load_to_play(path, domain=domain, overrides=("sim",), trust=trust)
    if checkpoint.config.policy.name == "language":
        return LoadedPolicy(make_generator(checkpoint, checkpoint.spec), checkpoint.spec, list(checkpoint.spec.observation))
    policy = make_policy(checkpoint, checkpoint.spec)
    generator = TorchGenerator(policy)
    generator.publish(0)
    return LoadedPolicy(generator, checkpoint.spec, policy.observation_keys)
