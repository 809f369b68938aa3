"""What every policy is: actions with log-probabilities out of observations, and the same log-probabilities again for training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.types import ActionLayout, SimSpec, TensorSpec

TensorObservation = dict[str, Tensor]
"""{key: [B, ...]}"""
Role = Literal["backbone", "head", "value"]
"""What a parameter belongs to; each may have a learning rate of its own."""


@dataclass(frozen=True)
class ActionOutput:
    """What `Policy.act` returns."""

    action: Tensor
    """[B, A] normalised, unclipped; int64 [B, 1] for discrete actions."""
    log_prob: Tensor
    """[B, L] log-probability of each action unit."""
    value: Tensor | None = None
    """[B] where the policy computes it on the way; None where the learner computes it in one batch afterwards."""


@dataclass(frozen=True)
class Evaluation:
    """What `Policy.evaluate` returns; all with gradients."""

    log_prob: Tensor
    """[B, L]"""
    entropy: Tensor
    """[B, L]"""
    value: Tensor
    """[B]"""


class Policy(Protocol):
    """A torch module that acts. `evaluate` on what `act` produced gives the same log-probabilities.

    A policy may also have:

    - ``num_units`` (L), ``action_width`` (W), ``noise_width``, ``noise_kind``, ``chunk_size`` (K): where its action is not the simulator's
      own, normalised, step by step (see `layout_of`);
    - ``simulator_action(action) -> [B, K, A]``: what the simulator gets of such an action, in its own units, or normalised where the
      policy says ``action_units = "normalised"``;
    - ``prepare(observation) -> TensorObservation``: arrays and texts of the simulator to tensors, once (see `prepare_observation`);
    - ``cloning_loss(observation, action [B, K, A], mask [B, K]) -> [B]``: what imitation minimises;
    - ``role_of(name) -> Role``: which learning rate a parameter has;
    - ``temperature``: of tokens, where it samples and scores such; who evaluates at another one sets it for as long;
    - ``base_folder``: the model's folder whose weights stay as they are (LoRA), so that checkpoints need not hold them.
    """

    spec: SimSpec

    @property
    def observation_keys(self) -> tuple[str, ...]:
        """The parts of an observation that the policy reads."""
        ...

    def act(self, observation: TensorObservation, noise: Tensor | None) -> ActionOutput:
        """Sample with the given noise (standard normal [B, A], or uniform [B, 1] for discrete); None acts deterministically (mode)."""
        ...

    def evaluate(self, observation: TensorObservation, action: Tensor) -> Evaluation: ...

    def value(self, observation: TensorObservation) -> Tensor:
        """[B] state values."""
        ...

    def update_statistics(self, observation: TensorObservation) -> None:
        """Fold a rollout's observations into the normalisation statistics."""
        ...

    def parameters(self) -> Any: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> Any: ...

    def train(self, mode: bool = True) -> torch.nn.Module: ...

    def eval(self) -> torch.nn.Module: ...

    def modules(self) -> Any: ...

    def named_parameters(self) -> Any: ...

    def to(self, device: Any) -> Any: ...


def layout_of(policy: Policy) -> ActionLayout:
    """What the policy's recorded actions look like."""
    own: Any = policy
    units = getattr(own, "num_units", None)
    if units is None:
        return ActionLayout.of(own.spec.action)
    kind = own.noise_kind
    return ActionLayout(
        width=getattr(own, "action_width", units),
        dtype="int64" if kind == "uniform" else "float32",
        num_units=units,
        noise_width=getattr(own, "noise_width", units),
        noise_kind=kind,
        chunk_size=own.chunk_size,
    )


def prepare_observation(policy: Policy, observation: Mapping[str, Any]) -> TensorObservation:
    """Arrays {key: [B, ...]}, texts among them, to the tensors that the policy's networks read; on the CPU."""
    read = {key: observation[key] for key in policy.observation_keys}
    own = getattr(policy, "prepare", None)
    return own(read) if own is not None else {key: torch.from_numpy(part) for key, part in read.items()}


def given_action(policy: Policy, action: np.ndarray) -> np.ndarray:
    """What the simulator gets of recorded actions [B, W], in its units: [B, A], or chunks [B, K, A] where K > 1."""
    translate = getattr(policy, "simulator_action", None)
    if translate is None:
        return policy.spec.action.denormalise(action)
    chunk = translate(action)
    if getattr(policy, "action_units", "simulator") == "normalised":
        chunk = policy.spec.action.denormalise(chunk)
    return chunk if chunk.shape[1] > 1 else chunk[:, 0]


def saved_tensors(policy: Any) -> dict[str, Tensor]:
    """What a checkpoint holds of a policy: its whole state, or with a ``base_folder`` what is trained, and buffers."""
    state: dict[str, Tensor] = policy.state_dict()
    if getattr(policy, "base_folder", None) is None:
        return state
    kept = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    kept |= {name for name, _ in policy.named_buffers()}
    return {name: tensor for name, tensor in state.items() if name in kept}


def load_saved(policy: Any, tensors: Mapping[str, Tensor]) -> None:
    """Take up what `saved_tensors` gave. Raises KeyError where names differ."""
    if (differing := saved_tensors(policy).keys() ^ tensors.keys()) != set():
        raise KeyError(f"{sorted(differing)[0]} is not a tensor of both the policy and what was saved")
    policy.load_state_dict(dict(tensors), strict=False)


def image_of(spec: SimSpec, key: str, option: str) -> TensorSpec:
    """The image that a policy reads. Raises UserError, naming `option`, where the simulator shows none of that name."""
    images = [name for name, part in spec.tensors.items() if part.dtype == "uint8" and len(part.shape) == 3 and part.shape[-1] == 3]
    if key not in images:
        seen = "no image at all" if not images else f"no image '{key}'"
        raise UserError(
            f"{option}='{key}': task '{spec.task}' shows {seen}, and the policy reads one (uint8 [height, width, 3])."
            f"{did_you_mean(key, images)} Choose a simulator with a camera."
        )
    return spec.tensors[key]


def vector_of(spec: SimSpec, key: str, option: str) -> TensorSpec:
    """The vector that a policy reads. Raises UserError, naming `option`, where the simulator shows none of that name."""
    vectors = [name for name, part in spec.tensors.items() if len(part.shape) == 1]
    if key not in vectors:
        raise UserError(f"{option}='{key}' is no vector that task '{spec.task}' shows.{did_you_mean(key, vectors)}")
    return spec.tensors[key]


def instructions_of(observation: Mapping[str, Any], spec: SimSpec, fixed: str | None, key: str, rows: int) -> list[str]:
    """Each row's instruction: the fixed one, else the observation's, else the simulator's. Raises UserError where there is none."""
    if fixed is None and key in observation:
        return [str(text) for text in observation[key]]
    text = spec.instruction if fixed is None else fixed
    if text is None:
        raise UserError(f"Task '{spec.task}' gives no instruction. A VLA acts on language: set policy.instruction='reach the …'.")
    return [text] * rows
