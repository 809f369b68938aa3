"""OpenVLA and OpenVLA-OFT as policies: pictures and an instruction to action tokens, their log-probabilities, and values.

Shape legend: B rows, I images of a row, S pixels of a side, P prompt tokens, K steps of a chunk (1 for OpenVLA), A action dimensions, L =
K·A action tokens, D width of the language model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.config import OpenVLAOFTPolicyConfig, OpenVLAPolicyConfig
from embodied_rl.config.policy import VLAOptions
from embodied_rl.errors import UserError, did_you_mean, from_extra
from embodied_rl.policies.accelerated import Accelerated
from embodied_rl.policies.base import ActionOutput, Evaluation, Policy, Role, TensorObservation, image_of, instructions_of, numpy_of
from embodied_rl.policies.heads import TokenDistribution, mean_of_steps
from embodied_rl.policies.model_folder import load_state, read_safetensors, save_state
from embodied_rl.policies.openvla.config import OFTConfig, OpenVLAConfig, ViTShape, shapes_of
from embodied_rl.policies.openvla.model import Embedded, OpenVLA, VisionLanguageModel
from embodied_rl.policies.openvla.oft import OpenVLAOFT
from embodied_rl.policies.openvla.processor import OpenVLAProcessor, PixelNormaliser, libero_gripper, libero_images, range_of
from embodied_rl.policies.openvla.vision import ValueHead, value_head_state
from embodied_rl.types import SimSpec

VALUE_HEAD = "value_head.safetensors"
PREPARED = ("images", "input_ids", "prompt_mask")
"""Parts that `prepare` makes of an observation, with "proprio" if the model reads it."""


class VLAPolicy(Policy):
    """Policy whose actions are token ids [B, L]; `simulator_action` turns them into chunks."""

    translates = True
    noise_kind: Literal["uniform", "normal"] = "uniform"
    """Kind of `act`'s noise. uniform: in [0, 1), one number per action token. normal: actions are no tokens, and take no noise."""
    base_folder: Path | None = None
    chunk_size: int = 1
    temperature: float
    """Sampling and evaluation temperature: see `embodied_rl.policies.base.Policy`."""

    def __init__(
        self,
        model: VisionLanguageModel,
        processor: OpenVLAProcessor,
        spec: SimSpec,
        options: VLAOptions | None = None,
        *,
        value_head: bool = True,
        values: Literal["chunk", "action"] = "chunk",
    ) -> None:
        """`values`: one per chunk, or one per step.
        Raises UserError: the checkpoint's actions, images or robot state do not fit the simulator."""
        super().__init__()
        options, oft = options or VLAOptions(), model.oft
        self.spec, self.options, self.processor = spec, options, processor
        self.temperature = options.temperature
        self.chunk_size, self.num_images = (1, 1) if oft is None else (oft.chunk, oft.num_images)
        statistics, epsilon = model.config.norm_stats, 0.0 if oft is None else 1e-8
        self.action_range = range_of(statistics, options.unnorm_key, bounds=options.bounds, epsilon=epsilon)
        self.proprio_range = None
        if oft is not None and oft.proprio_dim is not None:
            self.proprio_range = range_of(statistics, options.unnorm_key, "proprio", bounds=options.bounds, epsilon=epsilon)
        _check_spec(spec, options, self.num_images, self.action_range.dim, oft)
        self.model, self.action_tokens = model, model.tokens
        of_steps = self.chunk_size if values == "action" and oft is not None else None
        self.value_head = ValueHead(model.config.hidden_size, of_steps).to(model.device) if value_head else None
        self.normaliser = PixelNormaliser(processor.normalisation).to(model.device)
        self._decide: Accelerated[ActionOutput] = Accelerated(self._decision, options.generation)

    @property
    def num_units(self) -> int:
        return self.chunk_size * self.action_range.dim

    @property
    def observation_keys(self) -> tuple[str, ...]:
        """Parts of an unprepared observation that `act` and `evaluate` read."""
        keys = [*self.options.cameras]
        if self.proprio_range is not None:
            keys.append(self.options.proprio_key)
        if self.options.instruction is None and self.options.instruction_key in self.spec.observation:
            keys.append(self.options.instruction_key)
        return tuple(keys)

    # ---- observations -------------------------------------------------------------------------------------------------

    def prepare(self, observation: Mapping[str, Any]) -> TensorObservation:
        """Resize images, tokenize instructions and scale the robot's state once, so that training need not do it in every epoch.
        `observation`: {key: array or tensor [B, ...]}; instructions are an object array of str.
        Returns images uint8 [B, I, S, S, 3], input_ids int64 [B, P], prompt_mask bool [B, P], proprio float32 [B, dim]; on the CPU.
        Raises UserError: an image has a wrong dtype or shape, an instruction is empty or too long."""
        options = self.options
        pictures = [self._pictures(numpy_of(observation[key]), key) for key in options.cameras]
        texts = instructions_of(observation, self.spec, options.instruction, options.instruction_key, len(pictures[0]))
        prompts = self.processor.prompts(texts, options.prompt_tokens)
        prepared = {"images": torch.from_numpy(np.stack(pictures, axis=1)), "input_ids": prompts.input_ids, "prompt_mask": prompts.mask}
        if self.proprio_range is not None:
            state = self.proprio_range.normalise(numpy_of(observation[options.proprio_key]))
            prepared["proprio"] = torch.from_numpy(state.astype(np.float32))
        return prepared

    def _pictures(self, images: np.ndarray, key: str) -> np.ndarray:
        if self.options.image_recipe == "libero":
            return libero_images(images, self.model.config.image_size)
        return self.processor.images(images, key=key)

    def _inputs(self, observation: Mapping[str, Any]) -> tuple[dict[str, Tensor | None], bool]:
        """Prepared tensors on the model's device, and whether a prompt is padded."""
        ready = cast(TensorObservation, observation) if "input_ids" in observation else self.prepare(observation)
        padded = self.is_padded(ready["prompt_mask"])
        tensors: dict[str, Tensor | None] = {key: ready[key].to(self.model.device, non_blocking=True) for key in PREPARED}
        tensors["proprio"] = ready["proprio"].to(self.model.device) if self.proprio_range is not None else None
        return tensors, padded

    @staticmethod
    def is_padded(prompt_mask: Tensor) -> bool:
        """Whether a prompt of [B, P] is padded; a mask on a device counts as padded, because reading it would wait."""
        return prompt_mask.device.type != "cpu" or not bool(prompt_mask.all())

    # ---- Policy ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, observation: Mapping[str, Any], noise: Tensor | None) -> ActionOutput:
        """Token ids [B, L] with log-probabilities [B, L] and, with a value head, values [B] or [B, K].

        Args:
            observation: the simulator's, or from `prepare`.
            noise: [B, L] uniform in [0, 1); None: the most likely tokens.
        """
        tensors, padded = self._inputs(observation)
        if noise is not None:
            self._check_noise(noise, len(cast(Tensor, tensors["input_ids"])))
        decided = self._decide(tensors | {"noise": noise}, padded=padded, temperature=self.temperature)
        return decided if self.value_head is not None else replace(decided, value=None)

    def evaluate(self, observation: Mapping[str, Any], action: Tensor) -> Evaluation:
        """Log-probabilities and entropies [B, L] of token ids [B, L], and values [B] or [B, K], from one pass; all with gradients."""
        tokens = action.to(self.model.device)
        choices = self.model.tokens.choices(tokens)
        logits, hidden = self.model.scores(self._sequence(*self._inputs(observation)), tokens)
        distribution = TokenDistribution.from_logits(logits, self.temperature)
        return Evaluation(distribution.log_prob(choices), distribution.entropy, self._value(hidden))

    def value(self, observation: Mapping[str, Any]) -> Tensor:
        """Values [B], or [B, K] of the steps. Raises UserError without a value head."""
        self._check_value_head()
        return self._value(self.model.state(self._sequence(*self._inputs(observation))))

    @staticmethod
    def role_of(name: str) -> Role:
        own_head = "lm_head" in name or name.startswith("model.action_head")
        return "value" if name.startswith("value_head") else "head" if own_head else "backbone"

    def cloning_loss(
        self, observation: Mapping[str, Any], action: Tensor, mask: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """[B] mean cross-entropy of recorded actions' tokens among the action tokens.

        Args:
            action: [B, K, A] normalised by the simulator's bounds.
            mask: [B, K] bool, steps that exist; None: all.
        """
        return mean_of_steps(-self.evaluate(observation, self.units_of(action)).log_prob, mask)

    def units_of(self, action: Tensor) -> Tensor:
        return torch.from_numpy(self.model.tokens.encode(self._in_range(action))).flatten(1)

    def _in_range(self, action: Tensor) -> np.ndarray:
        """Convert chunks normalised by the simulator's bounds to the data set's range, float64."""
        units = self.spec.action.denormalise(numpy_of(action)).astype(np.float64)
        if self.options.gripper == "libero":
            units[..., -1] = 0.5 * (1.0 - units[..., -1])  # 1 and -1 back to the data set's 0 and 1
        return self.action_range.normalise(units)

    def simulator_action(self, action: Tensor | np.ndarray) -> np.ndarray:
        """Convert token ids [B, L] to chunks [B, K, A] float32 in the simulator's own units, as in the data set."""
        normalised = self.model.tokens.decode(numpy_of(action))
        return self._in_units(normalised)

    def _in_units(self, normalised: np.ndarray) -> np.ndarray:
        actions = self.action_range.unnormalise(normalised.reshape(len(normalised), self.chunk_size, self.action_range.dim))
        return (libero_gripper(actions) if self.options.gripper == "libero" else actions).astype(np.float32)

    # ---- beside critics of actions --------------------------------------------------------------------------------------

    @property
    def num_features(self) -> int:
        return self.model.config.hidden_size

    @torch.no_grad()
    def features(self, observation: Mapping[str, Any]) -> Tensor:
        """Features [B, D] float32 at the prompt's last token. The layers below train with the policy."""
        return self.model.state(self._sequence(*self._inputs(observation))).float()

    def state_value(self, features: Tensor) -> Tensor:
        """See `Policy.state_value`. Raises UserError without a value head."""
        self._check_value_head()
        return self._value(features)

    def drawn(self, observation: Mapping[str, Any], features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Centers [B, L] of sampled tokens, and minus the entropy [B, L] of an action that is uniform within its token's interval of the
        data set's range.

        An action's gradient is that of the tokens' mean (straight-through; Bengio et al. 2013, arXiv:1308.3432).
        """
        tensors, padded = self._inputs(observation)
        self._check_noise(noise, len(cast(Tensor, tensors["input_ids"])))
        tokens = self.sampled(tensors | {"noise": noise}, padded=padded)
        coder, (logits, _) = self.model.tokens, self.model.scores(self._sequence(tensors, padded), tokens)
        distribution = TokenDistribution.from_logits(logits, self.temperature)
        every = np.arange(coder.first_token, coder.vocab_size)[:, None].repeat(self.num_units, 1)
        centers = torch.from_numpy(self.normalised_action(every)).flatten(1).to(logits.device)
        mean = torch.einsum("blv,vl->bl", distribution.log_probs.exp(), centers)
        chosen = centers.gather(0, coder.choices(tokens))
        return chosen + mean - mean.detach(), -distribution.entropy - math.log(2.0 / (coder.num_bins - 1))

    @torch.no_grad()
    def sampled(self, tensors: Mapping[str, Tensor | None], *, padded: bool) -> Tensor:
        """Token ids [B, L] as in `act`, from prepared tensors and without a CUDA graph: an update's weights may lie elsewhere each time."""
        return self._decision(padded=padded, temperature=self.temperature, **tensors).action

    # ---- files ----------------------------------------------------------------------------------------------------------

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the checkpoint in the original's form, with the tokenizer's files, and `value_head.safetensors` beside it."""
        self.model.save_pretrained(directory)
        self.processor.save(directory)
        if self.value_head is not None:
            save_state(self.value_head.state_dict(), Path(directory) / VALUE_HEAD)

    def load_value_head(self, path: str | Path) -> None:
        """Load a value head from a safetensors file with RL4VLA's names or RLinf's; other weights in it are ignored.
        Raises UserError: this policy has no value head, or the file's does not fit."""
        if self.value_head is None:
            raise UserError(f"This policy has no value head to fill from '{path}'. Set policy.value_head=true.")
        weight = self.value_head.head_l1.weight
        state = value_head_state(read_safetensors(Path(path), dtype=weight.dtype, device=weight.device))
        load_state(self.value_head, state, str(path))

    def _check_value_head(self) -> None:
        if self.value_head is None:
            raise UserError("This policy was built without a value head, which the method needs. Set policy.value_head=true.")

    def _check_noise(self, noise: Tensor, rows: int) -> None:
        if tuple(noise.shape) != (rows, self.num_units):
            raise UserError(
                f"This policy samples {self.num_units} tokens: noise must be [{rows}, {self.num_units}], got {list(noise.shape)}."
            )
        if noise.device.type == "cpu" and bool(((noise < 0) | (noise >= 1)).any()):
            raise UserError("This policy samples tokens: noise must be uniform in [0, 1), not normal.")

    def _value(self, hidden: Tensor) -> Tensor:
        """Values [B] of hidden states [B, D]."""
        return hidden.new_zeros(len(hidden), dtype=torch.float32) if self.value_head is None else self.value_head(hidden)

    def _sequence(self, tensors: Mapping[str, Any], padded: bool) -> Embedded:
        pixels = self.normaliser(tensors["images"])
        return self.model.sequence(pixels, tensors["input_ids"], tensors["prompt_mask"], padded=padded, proprio=tensors["proprio"])

    def _decision(self, *, padded: bool, temperature: float, noise: Tensor | None, **tensors: Tensor | None) -> ActionOutput:
        """Images to sampled tokens, as one fixed program that can be captured; values are 0 without a value head."""
        found = self.model.decide(self._sequence(tensors, padded), noise, self.num_units, temperature)
        return ActionOutput(found.choices + self.model.tokens.first_token, found.log_prob, self._value(found.hidden))


class RegressionPolicy(VLAPolicy):
    """OpenVLA-OFT with the regression head: K·A values of a chunk, without randomness and probabilities."""

    model: OpenVLAOFT
    noise_kind = "normal"

    def act(self, observation: Mapping[str, Any], noise: Tensor | None) -> ActionOutput:
        """Normalised actions [B, L] float32. Raises UserError for noise."""
        if noise is not None:
            raise UserError("OpenVLA-OFT with head=l1 has no probabilities: evaluate it without noise; RL needs head=discrete.")
        with torch.no_grad():
            action = self.model.regressed(self.model.decide_hidden(self._sequence(*self._inputs(observation))))
        return ActionOutput(action, torch.zeros_like(action))

    def evaluate(self, observation: Mapping[str, Any], action: Tensor) -> Evaluation:
        """Raises UserError."""
        raise UserError("OpenVLA-OFT with head=l1 has no log-probabilities: RL needs head=discrete.")

    def cloning_loss(
        self, observation: Mapping[str, Any], action: Tensor, mask: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """[B] mean distance from the recorded actions in the data set's range; see `VLAPolicy.cloning_loss`."""
        found = self.model.regressed(self.model.action_hidden(self._sequence(*self._inputs(observation))))
        wanted = torch.from_numpy(self._in_range(action)).flatten(1).to(found)
        return mean_of_steps((found - wanted).abs(), mask)

    def simulator_action(self, action: Tensor | np.ndarray) -> np.ndarray:
        """Convert the head's values [B, L] to chunks [B, K, A] float32 in the simulator's units."""
        return self._in_units(numpy_of(action).astype(np.float64))


def _check_spec(spec: SimSpec, options: VLAOptions, num_images: int, trained_dim: int, oft: OFTConfig | None) -> None:
    """Check that a checkpoint fits a simulator, with a one-line error for each mismatch."""
    if spec.action.kind != "continuous":
        raise UserError(f"Task '{spec.task}' takes {spec.action.kind} actions; OpenVLA gives continuous ones.")
    if oft is not None and oft.action_dim != trained_dim:
        raise UserError(f"The model gives {oft.action_dim} action dimensions, but the data set '{options.unnorm_key}' has {trained_dim}.")
    if spec.action.dim != trained_dim:
        raise UserError(
            f"Task '{spec.task}' takes {spec.action.dim} action dimensions, but the checkpoint's data set has {trained_dim}. "
            "Choose a control mode or a policy.unnorm_key that agrees."
        )
    if len(options.cameras) != num_images:
        raise UserError(f"The model sees {num_images} image(s), but policy.cameras names {len(options.cameras)}: {list(options.cameras)}.")
    for key in options.cameras:
        image_of(spec, key, "policy.cameras")
    if oft is not None and oft.proprio_dim is not None:
        part = spec.tensors.get(options.proprio_key)
        if part is None or part.shape != (oft.proprio_dim,):
            shape = "missing" if part is None else str(list(part.shape))
            raise UserError(
                f"The model reads a robot state of {oft.proprio_dim} numbers, but '{options.proprio_key}' of task '{spec.task}' is "
                f"{shape}. Set policy.proprio_key.{did_you_mean(options.proprio_key, spec.tensors)}"
            )


# ---- out of a checkpoint folder ---------------------------------------------------------------------------------------


def load_vla_policy(
    directory: str | Path,
    spec: SimSpec,
    options: VLAOptions | None = None,
    *,
    oft: OFTConfig | None = None,
    value_head: bool = True,
    values: Literal["chunk", "action"] = "chunk",
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    vision: tuple[ViTShape, ViTShape] | None = None,
) -> VLAPolicy:
    """Load OpenVLA or, if `oft` is given or `config.json` says so, OpenVLA-OFT as a policy for a simulator.

    A `value_head.safetensors` in the folder fills the value head; otherwise it is drawn from torch's global generator.

    Args:
        values: for OpenVLA-OFT: one per chunk, or one per step.
        dtype: dtype of the model's weights; None: as stored. The value head is float32.
        vision: see `OpenVLA.from_pretrained`.

    Raises UserError: the checkpoint is incomplete, or does not fit the simulator.
    """
    directory = Path(directory)
    config = OpenVLAConfig.read(directory, vision)
    processor = OpenVLAProcessor.from_pretrained(directory, config)
    oft = oft or config.noted_oft(directory)
    model: VisionLanguageModel
    model = (OpenVLA if oft is None else OpenVLAOFT).from_pretrained(directory, oft, dtype=dtype, device=device, vision=vision)
    if oft is not None and oft.head == "l1":
        return RegressionPolicy(model, processor, spec, options, value_head=False)
    policy = VLAPolicy(model, processor, spec, options, value_head=value_head, values=values)
    if policy.value_head is not None and (directory / VALUE_HEAD).exists():
        policy.load_value_head(directory / VALUE_HEAD)
    return policy


# ---- as a run's policy: whole or with LoRA ----------------------------------------------------------------------------


_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


def build_openvla(config: OpenVLAPolicyConfig, spec: SimSpec) -> VLAPolicy:
    """Load the checkpoint of `config.path` as a trainable policy.

    Raises:
        UserError: the folder is missing or incomplete, does not fit the simulator, or the task gives no instruction.
        MissingExtraError: transformers, or peft for LoRA, is not installed.
    """
    if not Path(config.path).is_dir():
        raise UserError(
            f"policy.path='{config.path}' is not a folder. Give the folder of an OpenVLA checkpoint, with config.json, safetensors files "
            "and the tokenizer's files (docs/openvla.md)."
        )
    if config.instruction is None and config.instruction_key not in spec.observation and spec.instruction is None:
        raise UserError(f"Task '{spec.task}' gives no instruction. A VLA acts on language: set policy.instruction='put the … on the …'.")
    oft = None
    if isinstance(config, OpenVLAOFTPolicyConfig):
        oft = OFTConfig(
            chunk=config.chunk,
            action_dim=spec.action.dim,
            num_images=len(config.cameras),
            head=config.head,
            film=config.film,
            proprio_dim=config.proprio_dim,
            variant=config.variant,
        )
    values = config.value if isinstance(config, OpenVLAOFTPolicyConfig) else "chunk"
    dtype = _DTYPES[config.dtype]
    vision = shapes_of(config.vision)
    policy = load_vla_policy(config.path, spec, config, oft=oft, value_head=config.value_head, values=values, dtype=dtype, vision=vision)
    if policy.chunk_size != config.chunk_size:
        raise UserError(f"'{config.path}' holds OpenVLA-OFT (chunks of {policy.chunk_size} steps): set policy.name=openvla_oft.")
    if config.lora_rank > 0:
        _add_lora(policy.model, config, skip="vision_backbone." if config.freeze_vision else None)
    elif config.freeze_vision:
        policy.model.vision_backbone.requires_grad_(False)
    if config.gradient_checkpointing:
        policy.model.language_model.gradient_checkpointing_enable({"use_reentrant": False})
    # With LoRA on all trained layers, the model's own weights stay those of the folder.
    policy.base_folder = Path(config.path) if config.lora_rank > 0 else None
    return policy


def _add_lora(model: nn.Module, config: OpenVLAPolicyConfig, skip: str | None) -> None:
    """Add float32 adapters beside frozen layers. Raises UserError if no layer has such a name."""
    with from_extra("policy.lora_rank", "language"):
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    wanted = [
        name
        for name in linear
        if (skip is None or not name.startswith(skip))
        and (config.lora_targets == ("all-linear",) or any(name == own or name.endswith(f".{own}") for own in config.lora_targets))
    ]
    if not wanted:
        known = sorted({name.rsplit(".", 1)[-1] for name in linear})
        raise UserError(
            f"policy.lora_targets={list(config.lora_targets)} fits no layer of this model. Its linear layers: {', '.join(known)}."
        )
    settings = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=0.0, target_modules=wanted)  # type: ignore[arg-type]
    inject_adapter_in_model(settings, model)
    # peft creates them in the layer's precision: in bfloat16, steps that are small relative to a weight would be lost.
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.cast_input_dtype_enabled = False
            for adapter in (*layer.lora_A.values(), *layer.lora_B.values()):
                adapter.float().__class__ = _Adapter


class _Adapter(nn.Linear):
    """Half of a LoRA product: stored in its own precision, computed in that of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight.to(input.dtype))
