"""What every policy is: actions with log-probabilities out of observations, and the same log-probabilities again for training."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from embodied_rl.config import AnyPolicyConfig
from embodied_rl.errors import UserError, did_you_mean, require_known
from embodied_rl.types import ActionLayout, SimSpec, TensorSpec

TensorObservation = dict[str, Tensor]
"""{key: [B, ...]}"""
Role = Literal["backbone", "head", "value"]
"""What a parameter belongs to; each role may have its own learning rate."""


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


class TrainedModule(nn.Module):
    """What a run trains, as learners, checkpoints and the publication of weights know it: a policy, or those of all domains."""

    forward_rows: int = 512
    """Rows of one forward without gradients at most: bounds the memory that images take."""
    reference: tuple[nn.Module, ...] = ()
    """What `keep_reference` kept; in a tuple, so that it is neither a submodule, nor saved, nor moved to be trained."""
    even_rows: int = 1
    """Such forwards are filled up to a multiple of so many rows."""
    work: Literal["large", "vectors", "pictures"] = "large"
    """What an update computes, for its threads: small products of vectors, convolutions that are computed side by side, or anything."""
    has_description: bool = False
    """Whether `save_description` writes what the module is built from."""

    @property
    def base_folder(self) -> Path | None:
        """The model's folder whose weights stay as they are (LoRA), so that checkpoints need not hold them; None: there is none."""
        return None

    def update_statistics(self, observation: TensorObservation) -> None:
        """Fold a rollout's observations into the normalisation statistics."""

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """(name, tensor) of what acts."""
        return self.state_dict().items()

    def unmerged_weights(self, *, base: bool) -> Iterable[tuple[str, Tensor]]:
        """(name, tensor) of what acts, any adapter apart from its model; with `base` also what an adapter leaves as it was."""
        return (self.state_dict() if base else saved_tensors(self)).items()

    def save_description(self, folder: Path) -> None:
        """Write what the module is built from into a checkpoint's folder ``model``, without weights."""

    def introduction(self) -> str:
        """One line about what it reads, for the console; empty: nothing is to be said."""
        return ""

    def exported_names(self) -> dict[str, tuple[str, str]]:
        """{tensor of the state: (file of the folder ``model``, name in it)}: what other tools read there. All else is our own file's."""
        return {}

    def acting_in(self, domain: str) -> Policy:
        """The robot's policy that acts in a domain; the only one, whatever its domain is called."""
        raise AssertionError(f"{type(self).__name__} speaks")

    # ---- for the learner --------------------------------------------------------------------------------------------

    def value(self, observation: TensorObservation) -> Tensor:
        """[B] state values, or [B, K] of each step of a chunk."""
        raise NotImplementedError

    @staticmethod
    def role_of(name: str) -> Role:
        """What a parameter belongs to, for separate learning rates."""
        return "value" if name.startswith("critic") else "backbone"

    def parameter_groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """{group: {name in the optimizer's state: parameter}}, each with an optimizer that an objective steps; by default one, ``""``."""
        return {"": {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}}

    def changing(self) -> set[str]:
        """Names of the parameters that learning changes."""
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def beside(self) -> dict[str, Tensor]:
        """What a resumed run needs of the module and no policy's checkpoint holds; the tensors themselves."""
        return {}

    def describe(self) -> dict[str, Any]:
        """What another process builds the module from, JSON-able (see `embodied_rl.learning.train_worker`)."""
        raise NotImplementedError

    def keep_reference(self) -> None:
        """Keep the present weights as those that a KL term compares with."""
        self.reference = (copy.deepcopy(self).eval(),)

    def reference_state(self) -> dict[str, Tensor]:
        """Copies of the tensors of the kept reference."""
        return {name: tensor.detach().clone() for reference in self.reference for name, tensor in reference.state_dict().items()}

    def load_reference_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `reference_state` gave, after `keep_reference`."""
        for reference in self.reference:
            reference.load_state_dict(state)


class Policy(TrainedModule):
    """A torch module that acts. `evaluate` on what `act` produced gives the same log-probabilities.

    By default an action is the simulator's own, normalised, for one step. A policy whose actions are its own (tokens, a denoising, a
    chunk) says so with `translates`, and how many units they have; it has its own `cloning_loss`.
    """

    spec: SimSpec
    built_from: AnyPolicyConfig
    """Its configuration; `build_policy` notes it."""
    translates: bool = False
    """Whether `simulator_action` turns recorded actions into the simulator's."""
    action_units: Literal["normalised", "simulator"] = "simulator"
    """Of what `simulator_action` gives."""
    noise_kind: Literal["uniform", "normal"] = "normal"
    """Of the noise that `act` takes, where it `translates`."""
    temperature: float | None = None
    """Of tokens, where it samples and scores such; an evaluation at another one sets it for as long."""

    def acting_in(self, domain: str) -> Policy:
        return self

    @property
    def observation_keys(self) -> tuple[str, ...]:
        """The parts of an observation that the policy reads."""
        raise NotImplementedError

    def introduction(self) -> str:
        """Which observations it reads, and which of its simulator's it leaves."""
        read = self.observation_keys
        left = [key for key in self.spec.observation if key not in read]
        return f"The policy reads {', '.join(read) or 'nothing'}" + (f" and leaves {', '.join(left)}." if left else ".")

    @property
    def squashed(self) -> bool:
        """Whether actions come close to the simulator's bounds and never reach them."""
        return False

    @property
    def chunk_size(self) -> int:
        """K: steps of an action."""
        return 1

    @property
    def num_units(self) -> int:
        """L: units of an action that have a log-probability each."""
        return ActionLayout.of(self.spec.action).num_units

    @property
    def action_width(self) -> int:
        """W: numbers of a recorded action."""
        return self.num_units

    @property
    def noise_width(self) -> int:
        """Random numbers that `act` takes for a row."""
        return self.num_units

    @property
    def action_layout(self) -> ActionLayout:
        """What the policy's recorded actions look like."""
        if not self.translates:
            return ActionLayout.of(self.spec.action)
        return ActionLayout(
            width=self.action_width,
            dtype="int64" if self.noise_kind == "uniform" else "float32",
            num_units=self.num_units,
            noise_width=self.noise_width,
            noise_kind=self.noise_kind,
            chunk_size=self.chunk_size,
        )

    def prepare(self, observation: Mapping[str, Any]) -> TensorObservation:
        """Arrays {key: [B, ...]} of the simulator, texts among them, to the tensors that the networks read; on the CPU."""
        return {key: torch.from_numpy(part) for key, part in observation.items()}

    def simulator_action(self, action: np.ndarray) -> np.ndarray:
        """What the simulator gets [B, K, A] of recorded actions [B, W], in the `action_units`."""
        return self.spec.action.denormalise(action)[:, None]

    def act(self, observation: TensorObservation, noise: Tensor | None) -> ActionOutput:
        """Sample with the given noise (standard normal [B, A], or uniform [B, 1] for discrete); None acts deterministically (mode)."""
        raise NotImplementedError

    def evaluate(self, observation: TensorObservation, action: Tensor) -> Evaluation:
        """Log-probabilities, entropies and values of recorded actions, with gradients."""
        raise NotImplementedError

    def cloning_loss(self, observation: TensorObservation, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B] what imitation minimises, with gradients: by default -log π of recorded actions.

        Args:
            action: [B, A] normalised, int64 [B, 1] for discrete; [B, K, A] of a policy that `translates`.
            mask: [B, K] bool, steps of chunks that exist; None: all.
        """
        assert mask is None, "a policy that acts in chunks has its own cloning loss"
        return -self.evaluate(observation, action).log_prob.sum(-1)

    # ---- beside critics of actions: `algorithm.off_policy` --------------------------------------------------------------

    critics_train: tuple[str, ...] = ()
    """Beginnings of the names of parameters that `features` computes with and that the critics' loss trains, not the policy's."""

    @property
    def num_features(self) -> int | None:
        """F: numbers of `features`; None: there are none, so that critics of actions cannot stand beside the policy."""
        return None

    def features(self, observation: TensorObservation) -> Tensor:
        """[B, F] what critics of actions read."""
        raise NotImplementedError

    def state_value(self, features: Tensor) -> Tensor:
        """[B] of `features`: implicit Q-learning's V(s)."""
        raise NotImplementedError

    def normalised_action(self, action: np.ndarray) -> np.ndarray:
        """Recorded actions [B, W] as critics read them: [B, A] within the simulator's bounds, or chunks [B, K, A]."""
        if self.translates:
            given = self.simulator_action(action)
            return np.clip(given, -1.0, 1.0) if self.action_units == "normalised" else self.spec.action.normalise(given)
        return action if self.spec.action.kind == "discrete" else np.clip(action, -1.0, 1.0)

    def drawn(self, observation: TensorObservation, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions as critics read them, [B, K·A] normalised and within the bounds (int64 [B, 1] for discrete), and what they cost in
        entropy, [B, L] log-densities or their means. Soft actor-critic follows both gradients.

        Args:
            features: of the same observation.
            noise: [B, noise_width]
        """
        raise NotImplementedError

    def likelihood(self, observation: TensorObservation, features: Tensor, action: Tensor, executed: Tensor | None) -> Tensor:
        """[B] what imitation of recorded actions maximises, with gradients; see `cloning_loss`."""
        return -self.cloning_loss(observation, action, mask=executed)

    def limit_noise(self, smallest: float) -> None:
        """Keep log standard deviations of actions above a bound: data without noise would drive them to minus infinity."""

    def describe(self) -> dict[str, Any]:
        return {"policy": dataclasses.asdict(self.built_from), "spec": self.spec.to_dict()}


def prepare_observation(policy: Policy, observation: Mapping[str, Any]) -> TensorObservation:
    """Of an observation what the policy reads, as `Policy.prepare` makes it."""
    return policy.prepare({key: observation[key] for key in policy.observation_keys})


def given_action(policy: Policy, action: np.ndarray) -> np.ndarray:
    """What the simulator gets of recorded actions [B, W], in its units: [B, A], or chunks [B, K, A] where K > 1."""
    chunk = policy.simulator_action(action)
    if policy.action_units == "normalised":
        chunk = policy.spec.action.denormalise(chunk)
    return chunk if chunk.shape[1] > 1 else chunk[:, 0]


def saved_tensors(policy: TrainedModule) -> dict[str, Tensor]:
    """What a checkpoint holds of a policy: its whole state, or with a ``base_folder`` what is trained, and buffers."""
    state: dict[str, Tensor] = policy.state_dict()
    if policy.base_folder is None:
        return state
    kept = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    kept |= {name for name, _ in policy.named_buffers()}
    return {name: tensor for name, tensor in state.items() if name in kept}


def load_saved(policy: TrainedModule, tensors: Mapping[str, Tensor]) -> None:
    """Take up what `saved_tensors` gave. Raises KeyError where names differ."""
    if (differing := saved_tensors(policy).keys() ^ tensors.keys()) != set():
        raise KeyError(f"{sorted(differing)[0]} is not a tensor of both the policy and what was saved")
    policy.load_state_dict(dict(tensors), strict=False)


def image_of(spec: SimSpec, key: str, option: str) -> TensorSpec:
    """The image that a policy reads. Raises UserError, naming `option`, where the simulator shows none of that name."""
    images = [name for name, part in spec.tensors.items() if part.is_picture]
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
    require_known(key, vectors, f"{option}='{key}' is no vector that task '{spec.task}' shows.")
    return spec.tensors[key]


def instructions_of(observation: Mapping[str, Any], spec: SimSpec, fixed: str | None, key: str, rows: int) -> list[str]:
    """Each row's instruction: the fixed one, else the observation's, else the simulator's. Raises UserError where there is none."""
    if fixed is None and key in observation:
        return [str(text) for text in observation[key]]
    text = spec.instruction if fixed is None else fixed
    if not text:
        raise UserError(f"Task '{spec.task}' gives no instruction. A VLA acts on language: set policy.instruction='reach the …'.")
    return [text] * rows


def numpy_of(values: Tensor | npt.ArrayLike) -> np.ndarray:
    """A tensor of any device, or what numpy reads."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
