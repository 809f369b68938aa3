"""OpenVLA and OpenVLA-OFT as a run's policy: from a configuration, whole or with LoRA, and what of them is trained."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from embodied_rl.config import OpenVLAOFTPolicyConfig, OpenVLAPolicyConfig
from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.policies.openvla.build import load_vla_policy
from embodied_rl.policies.openvla.config import shapes_of
from embodied_rl.policies.openvla.oft import OFTConfig
from embodied_rl.policies.openvla.policy import VLAPolicy
from embodied_rl.types import SimSpec

_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


def build_openvla(config: OpenVLAPolicyConfig, spec: SimSpec) -> VLAPolicy:
    """The checkpoint of `config.path` as a policy that trains.

    Raises:
        UserError: the folder is missing or incomplete, does not fit the simulator, or the task gives no instruction.
        MissingExtraError: transformers, or peft for LoRA, is not installed.
    """
    if not Path(config.path).is_dir():
        raise UserError(
            f"policy.path='{config.path}' is no folder. Give the folder of an OpenVLA checkpoint: config.json, safetensors and the "
            "tokenizer's files (docs/openvla.md)."
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
    choose_trained(policy, config)
    # With LoRA on everything that is trained, the model's own weights stay as the folder has them.
    policy.base_folder = Path(config.path) if config.lora_rank > 0 else None
    return policy


def choose_trained(policy: VLAPolicy, config: OpenVLAPolicyConfig) -> None:
    """Freeze what is not to be trained, put LoRA in, and have layers computed again in the backward pass, as the configuration says."""
    vision = policy.model.vision_backbone
    if config.lora_rank > 0:
        _add_lora(policy.model, config, skip="vision_backbone." if config.freeze_vision else None)
    elif config.freeze_vision:
        vision.requires_grad_(False)
    if config.gradient_checkpointing:
        policy.model.language_model.gradient_checkpointing_enable({"use_reentrant": False})


def _add_lora(model: nn.Module, config: OpenVLAPolicyConfig, skip: str | None) -> None:
    """Adapters in float32 beside frozen layers. Raises UserError where no layer has such a name."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtraError("policy.lora_rank", "language", error) from error
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
