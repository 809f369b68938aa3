"""LeRobot's policies (Cadene et al. 2024, https://github.com/huggingface/lerobot) from a ``save_pretrained`` folder, in these simulators.

    python -m embodied_rl.evaluate sim=pusht_pixels policy=custom policy.target=embodied_rl.policies.lerobot:LeRobotPolicy \\
        policy.options.path=outputs/act/pretrained_model policy.chunk=100

As in LeRobot's own evaluation, the policy predicts `n_action_steps` actions at a time, with LeRobot's own pre- and postprocessing. It has
no log-probabilities: it can be played, recorded and filmed here, but LeRobot trains it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.policies.base import ActionOutput, Evaluation, Policy, TensorObservation, instructions_of
from embodied_rl.types import SimSpec, TensorSpec

TASK = "task"
"""LeRobot's name of the instruction."""
INSTRUCTION_BYTES = 1024
_PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")


def lerobot_names(key: str, *, lone: bool) -> tuple[str, ...]:
    """LeRobot's possible names of an observation part, most likely first. `lone`: it is the only picture."""
    if key in ("state", "agent_pos"):
        return ("observation.state",)
    if key == "rgb" or key.startswith("rgb."):
        names = (f"observation.images.{key.removeprefix('rgb.')}",)
        return ("observation.image", *names) if lone else names
    return (f"observation.{key}",)


def match_features(features: Mapping[str, tuple[int, ...]], parts: Mapping[str, TensorSpec], chosen: Mapping[str, str]) -> dict[str, str]:
    """Match LeRobot's features to observation parts, {feature: part}, by their names, or as the only pictures.

    Args:
        features: {feature: shape}; pictures are [C, H, W].
        parts: pictures are uint8 [H, W, C].
        chosen: pairs from the user, which take precedence.

    Raises UserError: a chosen pair that does not exist, or a vector of another length.
    """
    for feature, key in chosen.items():
        if feature not in features or key not in parts:
            wrong, known = (feature, features) if feature not in features else (key, parts)
            raise UserError(f"keys={{{feature}: {key}}}: '{wrong}' is not known.{did_you_mean(wrong, known)}")
    pictures = [key for key, part in parts.items() if part.dtype == "uint8" and len(part.shape) == 3]
    names = {name: key for key in parts for name in lerobot_names(key, lone=len(pictures) == 1)}
    lone = [feature for feature, shape in features.items() if len(shape) == 3]
    if len(lone) == len(pictures) == 1:
        names.setdefault(lone[0], pictures[0])
    pairs = {feature: names[feature] for feature in features if feature in names} | dict(chosen)
    for feature, key in pairs.items():
        shape, ours = features[feature], parts[key].shape
        if len(shape) != 3 and tuple(ours) != tuple(shape):
            raise UserError(f"LeRobot's '{feature}' is {list(shape)}, and our '{key}' is {list(ours)}.")
    return pairs


class LeRobotPolicy(Policy):
    """A LeRobot policy that reads one observation at a time: ACT, pi0, SmolVLA, or diffusion with ``n_obs_steps=1``."""

    translates = True

    def __init__(self, spec: SimSpec, *, path: str, keys: dict[str, str] | None = None, instruction: str | None = None) -> None:
        """
        Args:
            path: a folder from `save_pretrained`, with processors.
            keys: {feature of LeRobot: observation part}, for features whose name does not match.
            instruction: None: the observation's, or the simulator's own.

        Raises UserError: LeRobot or the folder is missing, the policy reads past observations, parts do not fit, or a processor names code.
        """
        super().__init__()
        self.spec, self._fixed = spec, instruction
        folder = Path(path).expanduser()
        _check_folder(folder)
        try:
            from lerobot.configs.policies import PreTrainedConfig
            from lerobot.policies.factory import get_policy_class, make_pre_post_processors
        except ImportError as error:
            raise UserError(f"A policy of LeRobot needs LeRobot, which cannot be imported ({error}): pip install lerobot") from error
        config = PreTrainedConfig.from_pretrained(str(folder))
        if config.n_obs_steps != 1:
            raise UserError(f"The policy in '{folder}' needs {config.n_obs_steps} past observations (n_obs_steps): only 1 is supported.")
        wanted = {name: tuple(feature.shape) for name, feature in config.input_features.items()}
        self._pairs = match_features(wanted, spec.tensors, keys or {})
        if lacking := [name for name in wanted if name not in self._pairs]:
            shown = ", ".join(spec.tensors)
            raise UserError(
                f"The policy reads '{lacking[0]}' {list(wanted[lacking[0]])}; '{spec.task}' shows {shown}. Name the part: "
                f"policy.options.keys={{{lacking[0]}: PART}}."
            )
        (action,) = config.output_features.values()
        if spec.action.kind != "continuous" or tuple(action.shape) != (spec.action.dim,):
            raise UserError(f"The policy in '{folder}' gives actions {list(action.shape)}; those of '{spec.task}' are {spec.action}.")
        self._num_steps = int(getattr(config, "n_action_steps", 1))
        self.inner = get_policy_class(config.type).from_pretrained(str(folder), config=config)
        self._before, self._after = make_pre_post_processors(config, pretrained_path=str(folder))
        self.requires_grad_(False)

    @property
    def observation_keys(self) -> tuple[str, ...]:
        instruction = ("instruction",) if "instruction" in self.spec.variables and self._fixed is None else ()
        return (*dict.fromkeys(self._pairs.values()), *instruction)

    @property
    def chunk_size(self) -> int:
        return self._num_steps

    @property
    def num_units(self) -> int:
        return self._num_steps * self.spec.action.dim

    def prepare(self, observation: Mapping[str, Any]) -> TensorObservation:
        """Convert to LeRobot's form: pictures [B, C, H, W] in 0 … 1, float32 vectors, and the bytes of each row's instruction."""
        parts: TensorObservation = {}
        for feature, key in self._pairs.items():
            values = torch.from_numpy(np.ascontiguousarray(observation[key]))
            pictures = values.ndim == 4 and values.dtype == torch.uint8
            parts[feature] = values.permute(0, 3, 1, 2).float() / 255 if pictures else values.float()
        rows = len(next(iter(parts.values())))
        if self._fixed is not None or self.spec.instruction is not None or "instruction" in observation:
            parts[TASK] = _bytes_of(instructions_of(observation, self.spec, self._fixed, "instruction", rows))
        return parts

    @torch.no_grad()
    def act(self, observation: TensorObservation, noise: Tensor | None) -> ActionOutput:
        """The next `n_action_steps` actions [B, K·A], in the simulator's units. Raises UserError if noise is given."""
        if noise is not None:
            raise UserError("A policy of LeRobot has no probabilities: play it without sampling (sample=false).")
        self.inner.reset()
        batch: dict[str, Any] = dict(observation)
        if TASK in batch:
            batch[TASK] = [bytes(row).rstrip(b"\0").decode("utf-8", "ignore") for row in batch[TASK].cpu().numpy()]
        ready = self._before(batch)
        steps = [self._after(self.inner.select_action(ready)) for _ in range(self._num_steps)]
        action = torch.stack(steps, dim=1).flatten(1).float()
        return ActionOutput(action, torch.zeros_like(action))

    def simulator_action(self, action: np.ndarray) -> np.ndarray:
        return action.reshape(len(action), self._num_steps, self.spec.action.dim)

    def evaluate(self, observation: TensorObservation, action: Tensor) -> Evaluation:
        """Raises UserError: the policy has no log-probabilities."""
        raise UserError("A policy of LeRobot has no log-probabilities: it can only be evaluated here. Train it with LeRobot.")

    def value(self, observation: TensorObservation) -> Tensor:
        """Raises UserError: the policy has no critic."""
        raise UserError("A policy of LeRobot has no critic: it can only be evaluated here. Train it with LeRobot.")


def _bytes_of(texts: Sequence[str]) -> Tensor:
    """Texts as [B, INSTRUCTION_BYTES] uint8, padded with zeros."""
    rows = np.zeros((len(texts), INSTRUCTION_BYTES), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        encoded = text.encode()[:INSTRUCTION_BYTES]
        row[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return torch.from_numpy(rows)


def _check_folder(folder: Path) -> None:
    """Raise UserError if a file is missing, or a processor names a class instead of a registered step: data must not name code."""
    for name in ("config.json", "model.safetensors", *_PROCESSORS):
        if not (folder / name).is_file():
            rule = "policy.options.path names what save_pretrained wrote"
            raise UserError(f"'{folder}' is not the folder of a LeRobot policy: {name} is missing; {rule}.")
    for name in _PROCESSORS:
        try:
            steps = json.loads((folder / name).read_text(encoding="utf-8"))["steps"]
            unregistered = [step.get("class") for step in steps if "registry_name" not in step]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"'{folder / name}' cannot be read as a list of LeRobot's processing steps: {error!r}.") from error
        if unregistered:
            raise UserError(f"'{folder / name}' names the code {unregistered[0]}, which is not run: steps must be registered by LeRobot.")
