"""A policy out of a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from embodied_rl.config.policy import VLAOptions
from embodied_rl.policies.openvla.config import OpenVLAConfig, ViTShape
from embodied_rl.policies.openvla.model import OpenVLA
from embodied_rl.policies.openvla.oft import OFT_KEY, OFTConfig, OpenVLAOFT
from embodied_rl.policies.openvla.policy import VALUE_HEAD, OFTPolicy, OpenVLAPolicy, VLAPolicy
from embodied_rl.policies.openvla.processor import OpenVLAProcessor
from embodied_rl.types import SimSpec


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
    """OpenVLA or, where `oft` is given or `config.json` says so, OpenVLA-OFT as a policy for a simulator.

    A `value_head.safetensors` in the folder fills the value head; otherwise it is drawn from torch's global generator.

    Args:
        values: of OpenVLA-OFT: one for a chunk, or one for each of its steps.
        dtype: of the model's weights; None: as stored. The value head is float32.
        vision: see `OpenVLA.from_pretrained`.

    Raises:
        UserError: the checkpoint is incomplete, or does not fit the simulator.
    """
    directory = Path(directory)
    config = OpenVLAConfig.read(directory, vision)
    processor = OpenVLAProcessor.from_pretrained(directory, config)
    policy: VLAPolicy
    if oft is not None or OFT_KEY in config.raw:
        chunked = OpenVLAOFT.from_pretrained(directory, oft, dtype=dtype, device=device, vision=vision)
        policy = OFTPolicy(chunked, processor, spec, options, value_head=value_head, values=values)
    else:
        model = OpenVLA.from_pretrained(directory, dtype=dtype, device=device, vision=vision)
        policy = OpenVLAPolicy(model, processor, spec, options, value_head=value_head)
    if policy.value_head is not None and (directory / VALUE_HEAD).exists():
        policy.load_value_head(directory / VALUE_HEAD)
    return policy
