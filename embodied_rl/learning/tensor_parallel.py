"""Tensor parallelism by a transformers model's own plan: columns and rows of its linear layers over a mesh dimension."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from torch import nn

from embodied_rl.errors import UserError
from embodied_rl.policies.model_folder import value_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle
    from transformers import PretrainedConfig, PreTrainedModel


def parallelize(module: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Divide the linear layers of the transformers models inside `module`, in place; return their names. Raises UserError: no model has a
    plan, the plan has an unknown style, a size is not a multiple of the ranks, or the layers carry LoRA."""
    from torch.distributed.tensor.parallel import parallelize_module

    cut: list[str] = []
    for path, model in _models(module):
        plan = _plan(model)
        if not plan or any(path.startswith(f"{done}.") for done in cut):
            continue
        _check_heads(model.config, mesh.size())
        for name, part in model.named_modules():
            style = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), None)
            if style is None:
                continue
            where = f"{path}.{name}".strip(".")
            parallelize_module(part, mesh, _style(part, style, where, mesh.size()))
            cut.append(where)
    if not cut:
        raise _no_plan(module, mesh.size())
    return cut


def check_plan(module: nn.Module, num_shards: int) -> None:
    """Raise UserError if no model inside `module` has a plan, or its heads cannot be divided; called before any rank starts."""
    planned = [model for _, model in _models(module) if _plan(model)]
    if not planned:
        raise _no_plan(module, num_shards)
    for model in planned:
        _check_heads(model.config, num_shards)


def _no_plan(module: nn.Module, num_shards: int) -> UserError:
    return UserError(
        f"hybrid.sharding.num_tensor_shards={num_shards}: {type(module).__name__} has no tensor-parallel plan. Set it to 1 and use "
        "num_shards, which shards the parameters of any module."
    )


def _check_heads(config: PretrainedConfig, num_shards: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = value_of(config, name)
        if heads is not None and heads % num_shards:
            raise UserError(f"hybrid.sharding.num_tensor_shards={num_shards} does not divide the model's {name} {heads}.")


def _models(module: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    found = [(name, part) for name, part in module.named_modules() if hasattr(part, "base_model_prefix") and hasattr(part, "config")]
    return cast("list[tuple[str, PreTrainedModel]]", found)


def _plan(model: PreTrainedModel) -> dict[re.Pattern[str], str]:
    """{pattern of a layer's name within `model`: style}. The configuration has the plan of a base model's layers."""
    if model.base_model_prefix in dict(model.named_children()):
        return {}  # the base model below has the plan; the output layer stays whole
    plan = value_of(model.config, "base_model_tp_plan") or {}
    return {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()}


def _style(part: nn.Module, style: str, where: str, num_shards: int) -> ParallelStyle:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if hasattr(part, "lora_A"):
        raise UserError(f"hybrid.sharding.num_tensor_shards: layer '{where}' has LoRA, which only num_shards can shard. Set it to 1.")
    if style not in ("colwise", "rowwise", "colwise_rep", "colwise_gather_output") or not isinstance(part, nn.Linear):
        raise UserError(
            f"hybrid.sharding.num_tensor_shards: layer '{where}' needs the unknown tensor-parallel style '{style}'. Set it to 1."
        )
    size = part.in_features if style == "rowwise" else part.out_features
    if size % num_shards:
        raise UserError(f"hybrid.sharding.num_tensor_shards={num_shards} does not divide the {size} features of layer '{where}'.")
    if style == "rowwise":
        return RowwiseParallel()
    return ColwiseParallel() if style == "colwise" else ColwiseParallel(output_layouts=Replicate())
