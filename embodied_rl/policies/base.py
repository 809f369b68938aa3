"""The base of every policy: actions with log-probabilities from observations, and the same log-probabilities again for training."""

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
from embodied_rl.policies.heads import ActionTokenizer
from embodied_rl.types import ActionLayout, SimSpec, TensorSpec

TensorObservation = dict[str, Tensor]
"""{key: [B, ...]}"""
Role = Literal["backbone", "head", "value"]
"""Part of the policy that a parameter belongs to; each role may have its own learning rate."""


@dataclass(frozen=True)
class ActionOutput:
    """Result of `Policy.act`."""

    action: Tensor
    """[B, A] normalised, unclipped; int64 [B, 1] for discrete actions; [B, W] of a policy that `translates`."""
    log_prob: Tensor
    """[B, L] log-probability of each action unit."""
    value: Tensor | None = None
    """[B], or [B, K] for each step of a chunk, if the policy computes it on the way. Training computes its own in one batch."""


@dataclass(frozen=True)
class Evaluation:
    """Result of `Policy.evaluate`; all with gradients."""

    log_prob: Tensor
    """[B, L]"""
    entropy: Tensor
    """[B, L]"""
    value: Tensor
    """[B], or [B, K] for each step of a chunk."""


class TrainedModule(nn.Module):
    """The module that a run trains, as learners, checkpoints and weight publication see it: one policy, or those of all domains."""

    forward_rows: int = 512
    """Most rows of one forward without gradients: bounds the memory that images take."""
    reference: tuple[nn.Module, ...] = ()
    """The copy that `keep_reference` kept; in a tuple, so that it is not a submodule, and neither saved nor moved for training."""
    even_rows: int = 1
    """Forwards without gradients are padded to a multiple of this number of rows."""
    work: Literal["large", "vectors", "pictures"] = "large"
    """Kind of work of an update, for its threads: small products of vectors, convolutions computed side by side, or anything else."""
    has_description: bool = False
    """Whether `save_description` writes files that the module is built from."""

    @property
    def base_folder(self) -> Path | None:
        """Folder of the base model if its weights stay frozen (LoRA), so that checkpoints need not hold them; None: there is none."""
        return None

    def update_statistics(self, observation: TensorObservation) -> None:
        """Fold a rollout's observations into the normalisation statistics."""

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """(name, tensor) of the weights that act."""
        return self.state_dict().items()

    def unmerged_weights(self, *, base: bool) -> Iterable[tuple[str, Tensor]]:
        """(name, tensor) of the weights that act, with an adapter apart from its model; with `base` also the weights it leaves frozen."""
        return (self.state_dict() if base else saved_tensors(self)).items()

    def save_description(self, folder: Path) -> None:
        """Write the files that the module is built from, without weights, into a checkpoint's folder ``model``."""

    def introduction(self) -> str:
        """One console line about what the policy reads; empty: none."""
        return ""

    def exported_names(self) -> dict[str, tuple[str, str]]:
        """{tensor of the state: (file in the folder ``model``, name in it)} of tensors that other tools read there; our file has others."""
        return {}

    def acting_in(self, domain: str) -> Policy:
        """The robot policy that acts in a domain; a single policy ignores the name."""
        raise AssertionError(f"{type(self).__name__} speaks")

    # ---- for the learner --------------------------------------------------------------------------------------------

    def value(self, observation: TensorObservation) -> Tensor:
        """[B] state values, or [B, K] for each step of a chunk."""
        raise NotImplementedError

    @staticmethod
    def role_of(name: str) -> Role:
        """Role of a parameter, for separate learning rates."""
        return "value" if name.startswith("critic") else "backbone"

    def parameter_groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """{group: {name in the optimizer's state: parameter}}; objectives step one optimizer per group. By default one group, ``""``."""
        return {"": {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}}

    def changing(self) -> set[str]:
        """Names of the parameters that learning changes."""
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def beside(self) -> dict[str, Tensor]:
        """Tensors that a resumed run needs and no policy's checkpoint holds; not copies."""
        return {}

    def describe(self) -> dict[str, Any]:
        """JSON-able description from which another process builds the module (see `embodied_rl.learning.train_worker`)."""
        raise NotImplementedError

    def keep_reference(self) -> None:
        """Keep a copy of the present weights, which a KL term compares with."""
        self.reference = (copy.deepcopy(self).eval(),)

    def reference_state(self) -> dict[str, Tensor]:
        """Copies of the reference's tensors, on the host."""
        return {name: tensor.to("cpu", copy=True) for reference in self.reference for name, tensor in reference.state_dict().items()}

    def load_reference_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `reference_state` returned, after `keep_reference`."""
        for reference in self.reference:
            reference.load_state_dict(state)


class Policy(TrainedModule):
    """A torch module that acts. `evaluate` on an action of `act` gives the same log-probabilities.

    By default an action is the simulator's own, normalised, for one step. A policy with other actions (tokens, a denoising, a chunk)
    sets `translates`, declares the number of its units and has its own `cloning_loss`.
    """

    spec: SimSpec
    built_from: AnyPolicyConfig
    """Configuration of the policy, set by `build_policy`."""
    translates: bool = False
    """Whether `simulator_action` converts recorded actions to the simulator's."""
    action_units: Literal["normalised", "simulator"] = "simulator"
    """Units of what `simulator_action` returns."""
    noise_kind: Literal["uniform", "normal"] = "normal"
    """Kind of noise that `act` takes, if it `translates`."""
    temperature: float | None = None
    """Temperature at which tokens are sampled and scored; None for other policies. An evaluation at another one sets it meanwhile."""
    action_tokens: ActionTokenizer | None = None
    """Tokens of action values, if actions are token ids; see `units_of`."""

    def acting_in(self, domain: str) -> Policy:
        return self

    @property
    def observation_keys(self) -> tuple[str, ...]:
        """Keys of the observation that the policy reads."""
        raise NotImplementedError

    def introduction(self) -> str:
        """State which observations the policy reads, and which it ignores."""
        read = self.observation_keys
        left = [key for key in self.spec.observation if key not in read]
        return f"The policy reads {', '.join(read) or 'nothing'}" + (f" and ignores {', '.join(left)}." if left else ".")

    @property
    def squashed(self) -> bool:
        """Whether actions approach the simulator's bounds and never reach them."""
        return False

    @property
    def chunk_size(self) -> int:
        """K: number of steps of an action."""
        return 1

    @property
    def num_units(self) -> int:
        """L: number of action units, each with its own log-probability."""
        return ActionLayout.of(self.spec.action).num_units

    @property
    def action_width(self) -> int:
        """W: number of values of a recorded action."""
        return self.num_units

    @property
    def noise_width(self) -> int:
        """Number of random values per row that `act` takes."""
        return self.num_units

    @property
    def action_layout(self) -> ActionLayout:
        """Layout of the policy's recorded actions."""
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
        """Convert the simulator's arrays {key: [B, ...]}, texts included, to tensors for the networks; on the CPU."""
        return {key: torch.from_numpy(part) for key, part in observation.items()}

    def simulator_action(self, action: np.ndarray) -> np.ndarray:
        """[B, K, A] actions for the simulator from recorded actions [B, W], in the `action_units`."""
        return self.spec.action.denormalise(action)[:, None]

    def units_of(self, action: Tensor) -> Tensor:
        """Convert chunks [B, K, A], normalised by the simulator's bounds, to token ids [B, L]; for a policy with `action_tokens`."""
        raise NotImplementedError

    def act(self, observation: TensorObservation, noise: Tensor | None) -> ActionOutput:
        """Sample with the given noise [B, noise_width], as `action_layout` draws it; None: act with the mode."""
        raise NotImplementedError

    def evaluate(self, observation: TensorObservation, action: Tensor) -> Evaluation:
        """Log-probabilities, entropies and values of recorded actions, with gradients."""
        raise NotImplementedError

    def cloning_noise(self, num_rows: int) -> Tensor | None:
        """[B, …] random numbers of `cloning_loss`, on the host, from torch's global generator; None: it needs none. They are drawn once for
        a whole minibatch, so that its parts, on any number of ranks, have those of one process."""
        return None

    def cloning_loss(
        self, observation: TensorObservation, action: Tensor, mask: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """[B] loss that imitation minimises, with gradients; by default -log π of recorded actions.

        Args:
            action: [B, A] normalised, int64 [B, 1] for discrete; [B, K, A] for a policy that `translates`.
            mask: [B, K] bool, steps of chunks that exist; None: all steps.
            noise: from `cloning_noise`.
        """
        assert mask is None, "a policy that acts in chunks has its own cloning loss"
        return -self.evaluate(observation, action).log_prob.sum(-1)

    # ---- beside critics of actions: `algorithm.off_policy` --------------------------------------------------------------

    critics_train: tuple[str, ...] = ()
    """Name prefixes of the parameters that `features` computes with and that the critics' loss trains, not the policy's loss."""

    @property
    def num_features(self) -> int | None:
        """F: number of `features`; None: there are none, so that the policy cannot have critics of actions."""
        return None

    def features(self, observation: TensorObservation) -> Tensor:
        """[B, F] features that critics of actions read."""
        raise NotImplementedError

    def state_value(self, features: Tensor) -> Tensor:
        """[B] state value V(s) from `features`, for implicit Q-learning."""
        raise NotImplementedError

    def normalised_action(self, action: np.ndarray) -> np.ndarray:
        """Recorded actions [B, W] in the critics' form: [B, A] within the simulator's bounds, or chunks [B, K, A]."""
        if self.translates:
            given = self.simulator_action(action)
            return np.clip(given, -1.0, 1.0) if self.action_units == "normalised" else self.spec.action.normalise(given)
        return action if self.spec.action.kind == "discrete" else np.clip(action, -1.0, 1.0)

    def drawn(self, observation: TensorObservation, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample actions in the critics' form, [B, K·A] normalised and within the bounds (int64 [B, 1] for discrete), and their entropy
        cost: [B, L] log-densities or their means. Soft actor-critic follows both gradients.

        Args:
            features: features of the same observation.
            noise: [B, noise_width]
        """
        raise NotImplementedError

    def likelihood(
        self, observation: TensorObservation, features: Tensor, action: Tensor, executed: Tensor | None, noise: Tensor | None
    ) -> Tensor:
        """[B] objective that imitation of recorded actions maximises, with gradients; see `cloning_loss`."""
        return -self.cloning_loss(observation, action, executed, noise)

    def limit_noise(self, smallest: float) -> None:
        """Keep the actions' log standard deviations above a bound: noiseless data would drive them to minus infinity."""

    def describe(self) -> dict[str, Any]:
        return {"policy": dataclasses.asdict(self.built_from), "spec": self.spec.to_dict()}


def prepare_observation(policy: Policy, observation: Mapping[str, Any]) -> TensorObservation:
    """Prepare (`Policy.prepare`) the parts of an observation that the policy reads."""
    return policy.prepare({key: observation[key] for key in policy.observation_keys})


def given_action(policy: Policy, action: np.ndarray) -> np.ndarray:
    """Convert recorded actions [B, W] to the simulator's units: [B, A], or chunks [B, K, A] if K > 1."""
    chunk = policy.simulator_action(action)
    if policy.action_units == "normalised":
        chunk = policy.spec.action.denormalise(chunk)
    return chunk if chunk.shape[1] > 1 else chunk[:, 0]


def saved_tensors(policy: TrainedModule) -> dict[str, Tensor]:
    """Tensors of a policy that a checkpoint holds: the whole state, or with a ``base_folder`` the trained parameters and buffers."""
    state: dict[str, Tensor] = policy.state_dict()
    if policy.base_folder is None:
        return state
    kept = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    kept |= {name for name, _ in policy.named_buffers()}
    return {name: tensor for name, tensor in state.items() if name in kept}


def load_saved(policy: TrainedModule, tensors: Mapping[str, Tensor]) -> None:
    """Load what `saved_tensors` returned, or the whole state. Raises KeyError if names differ."""
    missing, unknown = policy.load_state_dict(dict(tensors), strict=False)
    if differing := [*unknown, *(saved_tensors(policy).keys() & set(missing))]:
        raise KeyError(f"{sorted(differing)[0]} is not a tensor of both the policy and what was saved")


def image_of(spec: SimSpec, key: str, option: str) -> TensorSpec:
    """Spec of the image that a policy reads. Raises UserError, naming `option`, if the simulator has no such image."""
    images = [name for name, part in spec.tensors.items() if part.is_picture]
    if key not in images:
        seen = "no image at all" if not images else f"no image '{key}'"
        raise UserError(
            f"{option}='{key}': task '{spec.task}' shows {seen}, and the policy reads one (uint8 [height, width, 3])."
            f"{did_you_mean(key, images)} Choose a simulator with a camera."
        )
    return spec.tensors[key]


def vector_of(spec: SimSpec, key: str, option: str) -> TensorSpec:
    """Spec of the vector that a policy reads. Raises UserError, naming `option`, if the simulator has no such vector."""
    vectors = [name for name, part in spec.tensors.items() if len(part.shape) == 1]
    require_known(key, vectors, f"{option}='{key}' is not a vector of task '{spec.task}'.")
    return spec.tensors[key]


def instructions_of(observation: Mapping[str, Any], spec: SimSpec, fixed: str | None, key: str, rows: int) -> list[str]:
    """Each row's instruction: the fixed one, else the observation's, else the simulator's. Raises UserError if there is none."""
    if fixed is None and key in observation:
        return [str(text) for text in observation[key]]
    text = spec.instruction if fixed is None else fixed
    if not text:
        raise UserError(f"Task '{spec.task}' gives no instruction. A VLA acts on language: set policy.instruction='reach the …'.")
    return [text] * rows


def numpy_of(values: Tensor | npt.ArrayLike) -> np.ndarray:
    """Convert a tensor of any device, or an array-like, to numpy."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
