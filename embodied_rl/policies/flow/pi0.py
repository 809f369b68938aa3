"""pi0 (Black et al. 2024, arXiv:2410.24164) as a policy, from a folder that transformers' `PI0ForConditionalGeneration` reads.

PIL resizes pictures, because transformers' own pi0 processor needs torchvision; the prompt equals that processor's. Shape legend: see
below.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from embodied_rl.config.policy import FlowOptions, PI0Options, PI0PolicyConfig
from embodied_rl.errors import UserError
from embodied_rl.files import reset_mode, write_atomic
from embodied_rl.policies.base import (
    TensorObservation,
    image_of,
    instructions_of,
    numpy_of,
    vector_of,
)
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.flow.policy import FlowPolicy, VelocityModel
from embodied_rl.policies.model_folder import (
    check_model_folder,
    check_tokenizer,
    load_model,
    load_state,
    read_safetensors,
    save_state,
)
from embodied_rl.policies.openvla.processor import check_images
from embodied_rl.policies.openvla.vision import ValueHead
from embodied_rl.reading import parse_json, read_regular
from embodied_rl.types import SimSpec

if TYPE_CHECKING:
    from transformers import Cache, PI0ForConditionalGeneration, PretrainedConfig, PreTrainedTokenizerBase


# ---- transformers' pi0 as a velocity model ----------------------------------------------------------------------------

# Shape legend: B rows, I images of a row, S pixels of a side, P tokens of the prefix (images and prompt), H steps and D dimensions of a
# chunk, F width of the language model.


@dataclass(frozen=True)
class PI0Context:
    """Shared data of the denoising steps of one decision."""

    cache: Cache
    """Keys and values of the prefix; a step's are added to what it attends to, and not stored."""
    mask: Tensor
    """[B, P] int64, 0 at padding."""
    state: Tensor
    """[B, max_state_dim]"""
    features: Tensor
    """[B, F] mean of the prefix's last hidden states."""


class PI0Model(VelocityModel[PI0Context]):
    """Velocity model around a `PI0ForConditionalGeneration`."""

    pi0: PI0ForConditionalGeneration

    def __init__(self, pi0: PI0ForConditionalGeneration, observation_keys: tuple[str, ...]) -> None:
        """`observation_keys`: keys that `PI0Policy.prepare` reads."""
        super().__init__()
        self.pi0 = pi0
        self.observation_keys = observation_keys
        config = self.pi0.config
        self.latent = (int(config.chunk_size), int(config.max_action_dim))
        self.vlm_config = cast("PretrainedConfig", config.vlm_config)
        self.num_features = int(self.vlm_config.text_config.hidden_size)

    def context(self, observation: Mapping[str, Any]) -> PI0Context:
        """Encode the parts of `PI0Policy.prepare`."""
        model = self.pi0.model
        weight = self.pi0.action_out_proj.weight
        tensors = {key: observation[key].to(weight.device) for key in ("images", "input_ids", "attention_mask", "state")}
        # SigLIP's normalisation: [0, 255] to [-1, 1].
        pixels = (tensors["images"].movedim(-1, -3).to(weight.dtype) / 127.5) - 1.0
        seen = torch.ones(pixels.shape[:2], dtype=torch.bool, device=weight.device)
        mask = tensors["attention_mask"]
        embedded = model.embed_prefix(tensors["input_ids"], pixels, seen)
        output = model.vlm(
            inputs_embeds=embedded,
            attention_mask=mask,
            position_ids=mask.cumsum(-1) - 1,
            # One block: all tokens of the prefix attend to each other, as in pi0's training.
            token_type_ids=torch.zeros_like(embedded)[:, :, 0],
            use_cache=True,
            return_dict=True,
        )
        share = (mask / mask.sum(-1, keepdim=True)).to(torch.float32)
        features = torch.einsum("bp,bpf->bf", share, output.last_hidden_state.float())
        return PI0Context(_fixed(output.past_key_values), mask, tensors["state"].to(weight.dtype), features)

    def features(self, context: PI0Context) -> Tensor:
        return context.features

    def velocity(self, context: PI0Context, x: Tensor, t: Tensor) -> Tensor:
        output = self.pi0(
            state=context.state,
            noise=x.to(context.state.dtype),
            timestep=t,
            attention_mask=context.mask,
            past_key_values=context.cache,
        )
        return output.logits.to(x.dtype)


def _fixed(written: Any) -> Cache:
    """The prefix's cache for denoising steps. Neither it nor `written`, which the prefix's layers refer to, stores anything from here on:
    layers that are computed again in the backward pass must find what they found the first time."""
    prefix = [(layer.keys, layer.values) for layer in written.layers]

    def beside(keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return torch.cat([prefix[layer][0], keys], dim=-2), torch.cat([prefix[layer][1], values], dim=-2)

    cache: Any = copy.copy(written)
    cache.update = beside
    written.update = lambda keys, values, layer: (keys, values)
    return cast("Cache", cache)


VALUE_HEAD, NOISE_NET, STATISTICS = "value_head.safetensors", "noise_net.safetensors", "flow_statistics.json"
_EPSILON = 1e-8


@dataclass(frozen=True)
class Moments:
    """Mean and deviation for scaling values, from training; empty: values pass unscaled."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise UserError(f"Statistics of a flow policy: {len(self.mean)} means but {len(self.std)} deviations.")

    def normalise(self, values: np.ndarray) -> np.ndarray:
        """[..., A] in the robot's units → [..., A] float32."""
        if not self.mean:
            return values.astype(np.float32)
        return ((values - np.asarray(self.mean)) / (np.asarray(self.std) + _EPSILON)).astype(np.float32)

    def unnormalise(self, values: np.ndarray) -> np.ndarray:
        """Inverse of `normalise`."""
        if not self.mean:
            return values.astype(np.float32)
        return (values * (np.asarray(self.std) + _EPSILON) + np.asarray(self.mean)).astype(np.float32)


class PI0Policy(FlowPolicy[PI0Context]):
    """pi0 with the interface of every policy. The simulator receives actions in the units of the checkpoint's training data."""

    action_units = "simulator"
    critics_train: tuple[str, ...] = ()  # the layers under the features train with the policy
    model: PI0Model

    def __init__(
        self,
        pi0: PI0ForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        spec: SimSpec,
        options: PI0Options,
        flow: FlowOptions,
        *,
        state: Moments,
        action: Moments,
    ) -> None:
        """Raises UserError when the checkpoint does not fit the simulator."""
        if spec.action.kind != "continuous":
            raise UserError(f"pi0 makes continuous actions, but task '{spec.task}' takes {spec.action.kind} ones.")
        trained = len(action.mean)
        if trained and trained != spec.action.dim:
            raise UserError(f"Task '{spec.task}' takes {spec.action.dim} action dimensions, but this pi0 was trained with {trained}.")
        keys = [*options.cameras]
        for key in keys:
            image_of(spec, key, "policy.cameras")
        if options.state_key is not None:
            (width,), most = vector_of(spec, options.state_key, "policy.state_key").shape, int(pi0.config.max_state_dim)
            if width > most or (state.mean and width != len(state.mean)):
                wanted = f"{len(state.mean)}" if state.mean else f"at most {most}"
                raise UserError(f"The robot's state '{options.state_key}' has {width} numbers, but this pi0 was trained with {wanted}.")
            keys.append(options.state_key)
        if options.instruction is None and options.instruction_key in spec.observation:
            keys.append(options.instruction_key)
        model = PI0Model(pi0, tuple(keys))
        chunk = (options.chunk or model.latent[0], spec.action.dim)
        super().__init__(model, ValueHead(model.num_features), spec, flow, chunk)
        self.tokenizer, self.reads, self.state_moments, self.action_moments = tokenizer, options, state, action

    def prepare(self, observation: Mapping[str, Any]) -> TensorObservation:
        """Resize, tokenize and scale once, so that training need not do it in every epoch.
        Raises UserError: an image has a wrong dtype or shape, or there is no instruction."""
        options, config = self.reads, self.model.pi0.config
        pictures = []
        for key in options.cameras:
            images = numpy_of(observation[key])
            check_images(images, key)
            pictures.append(np.stack([letterbox(image, int(self.model.vlm_config.vision_config.image_size)) for image in images]))
        rows = len(pictures[0])
        state = np.zeros((rows, int(config.max_state_dim)), np.float32)
        if options.state_key is not None:
            given = self.state_moments.normalise(numpy_of(observation[options.state_key]))
            state[:, : given.shape[1]] = given
        ids, mask = self._prompts(instructions_of(observation, self.spec, options.instruction, options.instruction_key, rows))
        return {
            "images": torch.from_numpy(np.stack(pictures, axis=1)),
            "input_ids": ids,
            "attention_mask": mask,
            "state": torch.from_numpy(state),
        }

    def _prompts(self, instructions: list[str]) -> tuple[Tensor, Tensor]:
        """``<image>…<image><bos>{instruction}\\n`` as ids and mask [B, P] int64, padded on the right."""
        config, options = self.model.vlm_config, self.reads
        patches = int(config.vision_config.image_size) // int(config.vision_config.patch_size)
        images = [int(config.image_token_id)] * (patches**2 * len(options.cameras))
        start = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        texts = {text: images + start + self.tokenizer(text + "\n", add_special_tokens=False)["input_ids"] for text in set(instructions)}
        length = max(len(ids) for ids in texts.values())
        if options.prompt_tokens is not None:
            if length > (room := len(images) + options.prompt_tokens):
                longest = max(texts, key=lambda text: len(texts[text]))
                problem = f"The instruction '{longest}' has {length - len(images)} tokens"
                raise UserError(f"{problem}; raise policy.prompt_tokens={options.prompt_tokens}.")
            length = room
        pad = self.tokenizer.pad_token_id or 0
        ids = [texts[text] + [pad] * (length - len(texts[text])) for text in instructions]
        mask = [[1] * len(texts[text]) + [0] * (length - len(texts[text])) for text in instructions]
        return torch.tensor(ids), torch.tensor(mask)

    def simulator_action(self, action: Tensor | np.ndarray) -> np.ndarray:
        """Recorded actions [B, W] → chunks [B, K, A] float32 in the data set's units."""
        return self.action_moments.unnormalise(super().simulator_action(action))

    def bounded(self, chunk: Tensor) -> Tensor:
        """See `FlowPolicy.bounded`; converts from the data set's units."""
        low, high = (chunk.new_tensor(bound) for bound in (self.spec.action.low, self.spec.action.high))
        if self.action_moments.mean:
            chunk = chunk * (chunk.new_tensor(self.action_moments.std) + _EPSILON) + chunk.new_tensor(self.action_moments.mean)
        return ((chunk - low) / (0.5 * (high - low)).clamp_min(_EPSILON) - 1.0).clamp(-1.0, 1.0)

    def cloning_loss(
        self, observation: Mapping[str, Any], action: Tensor, mask: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """See `FlowPolicy.cloning_loss`; `action` [B, K, A] is normalised by the simulator's bounds, as everywhere. If K < H, the last step
        pads the rest, which the mask excludes."""
        units = torch.from_numpy(self.action_moments.normalise(self.spec.action.denormalise(numpy_of(action)))).to(action.device)
        if (more := self.layout.latent[0] - units.shape[1]) > 0:
            mask = torch.ones(units.shape[:2], dtype=torch.bool, device=action.device) if mask is None else mask
            mask = torch.nn.functional.pad(mask, (0, more))
            units = torch.cat([units, units[:, -1:].expand(-1, more, -1)], 1)
        return super().cloning_loss(observation, units, mask, noise)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the folder: transformers' files, the tokenizer, and this package's heads and statistics."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".saving-") as temporary:
            self.model.pi0.save_pretrained(temporary)
            self.tokenizer.save_pretrained(temporary)
            reset_mode(Path(temporary))
            for path in sorted(Path(temporary).iterdir()):
                os.replace(path, directory / path.name)
        save_state(self.critic.state_dict(), directory / VALUE_HEAD)
        if self.noise_net is not None:
            save_state(self.noise_net.state_dict(), directory / NOISE_NET)
        moments = {"state": self.state_moments, "action": self.action_moments}
        data = {name: {"mean": list(part.mean), "std": list(part.std)} for name, part in moments.items()}
        write_atomic(directory / STATISTICS, json.dumps(data, indent=2))


def load_pi0_policy(
    directory: str | Path,
    spec: SimSpec,
    options: PI0Options | None = None,
    flow: FlowOptions | None = None,
    *,
    state: Moments | None = None,
    action: Moments | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> PI0Policy:
    """Load pi0 from a folder. Value head and learned deviation are loaded if saved, otherwise drawn from torch's global generator.

    Args:
        flow: None: `FlowOptions` with the checkpoint's own number of steps.
        state, action: None: from `flow_statistics.json` in the folder, else unscaled.

    Raises UserError: the folder is incomplete, contains another kind of model, or does not fit the simulator.
    """
    folder = Path(directory)
    data = check_model_folder(folder)
    if data["model_type"] != "pi0":
        raise UserError(f"'{folder}' holds a model of type '{data['model_type']}', not pi0.")
    check_tokenizer(folder)
    model = load_model(folder, dtype=str(dtype).removeprefix("torch."), kind="PI0ForConditionalGeneration")
    pi0 = cast("PI0ForConditionalGeneration", model)
    tokenizer = ChatTokenizer.read(folder, pi0.config).of_transformers
    saved = _read_statistics(folder)
    policy = PI0Policy(
        pi0,
        tokenizer,
        spec,
        options or PI0Options(),
        flow or FlowOptions(num_steps=pi0.config.num_inference_steps),
        state=state or saved.get("state", Moments()),
        action=action or saved.get("action", Moments()),
    )
    if (folder / VALUE_HEAD).exists():
        load_state(policy.critic, read_safetensors(folder / VALUE_HEAD), str(folder / VALUE_HEAD))
    if policy.noise_net is not None and (folder / NOISE_NET).exists():
        load_state(policy.noise_net, read_safetensors(folder / NOISE_NET), str(folder / NOISE_NET))
    return policy.to(device).eval()


def build_pi0(config: PI0PolicyConfig, spec: SimSpec) -> PI0Policy:
    """Load the folder of `config.path` as a trainable policy.
    Raises UserError: the folder is missing or incomplete, does not fit the simulator, or the task gives no instruction."""
    if not Path(config.path).is_dir():
        raise UserError(
            f"policy.path='{config.path}' is not a folder. Give the folder of a pi0 checkpoint of transformers, with config.json, "
            "safetensors files and the tokenizer's files (docs/flow_policies.md)."
        )
    if config.instruction is None and config.instruction_key not in spec.observation and spec.instruction is None:
        raise UserError(f"Task '{spec.task}' gives no instruction; pi0 acts on language. Set policy.instruction='pick up the …'.")
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    policy = load_pi0_policy(config.path, spec, config, config, dtype=dtype)
    if config.freeze_vlm:
        policy.model.pi0.model.vlm.requires_grad_(False)
    return policy


def letterbox(image: np.ndarray, size: int) -> np.ndarray:
    """Resize uint8 [H, W, 3] to [size, size, 3]: longer side to `size`, the other rounded down, bilinear, black bars on both sides, as in
    openpi's training."""
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    ratio = max(height, width) / size
    new = max(1, int(width / ratio)), max(1, int(height / ratio))
    canvas = np.zeros((size, size, 3), np.uint8)
    top, left = (size - new[1]) // 2, (size - new[0]) // 2
    canvas[top : top + new[1], left : left + new[0]] = np.asarray(Image.fromarray(image).resize(new, Image.Resampling.BILINEAR))
    return canvas


def _read_statistics(folder: Path) -> dict[str, Moments]:
    path = folder / STATISTICS
    if not path.is_file():
        return {}
    try:
        data = parse_json(read_regular(path))
        return {name: Moments(tuple(map(float, part["mean"])), tuple(map(float, part["std"]))) for name, part in data.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"'{path}' is damaged: {type(error).__name__}: {error}.") from error
