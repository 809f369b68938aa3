"""Shard any module over a mesh of ranks: FSDP2 by blocks, and the operations around it that a training step needs.

The mesh has three dimensions. Rows of a batch are divided over ``replicate`` x ``shard``; ``shard`` divides each parameter, ``tensor``
divides matrix products. Gradients are *summed* over ranks: every rank divides its loss by the denominator of the whole batch
(`algorithms.aggregation`), so a step is the same on any number of ranks.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from embodied_rl.config import ShardingConfig
from embodied_rl.errors import UserError
from embodied_rl.policies.model_folder import value_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ParallelStyle
    from transformers import PretrainedConfig, PreTrainedModel
    from typing_extensions import TypeIs

AnyModule = TypeVar("AnyModule", bound=nn.Module)
MESH = ("replicate", "shard", "tensor")
FORWARD_METHODS = ("evaluate", "value", "act", "features", "cloning_loss", "gathered")
"""Policy methods that compute with its parameters; FSDP gathers the parameters before the call and frees them after."""

WHOLE_METHODS = ("sampled",)
"""Policy methods that read parameters past their modules: all blocks are gathered for the call."""


def is_cut(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether a rank holds only a part of the tensor. Does not import torch's slow module of sharded tensors if nothing else has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(module: object) -> TypeIs[FSDPModule]:
    """Whether FSDP gathers the module, as a block or as the whole. Avoids FSDP's import as `is_cut` does."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def make_mesh(config: ShardingConfig, device_type: str) -> DeviceMesh:
    """Mesh of the initialised process group. Raises UserError if its size differs from the configuration's."""
    from torch.distributed.device_mesh import init_device_mesh

    num_ranks = dist.get_world_size()
    if num_ranks != config.num_ranks:
        raise UserError(
            f"hybrid.sharding asks for {config.num_replicas} x {config.num_shards} x {config.num_tensor_shards} = {config.num_ranks} "
            f"ranks (num_replicas x num_shards x num_tensor_shards), but there are {num_ranks}."
        )
    return init_device_mesh(device_type, (config.num_replicas, config.num_shards, config.num_tensor_shards), mesh_dim_names=MESH)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The parts that are gathered one at a time: the entries of the outermost module
    lists (a transformer's layers), else the outermost sequences (one MLP each)."""
    lists = [child for part in _outermost(module, nn.ModuleList) for child in part.children()]
    found = lists or _outermost(module, nn.Sequential)
    return [block for block in found if any(True for _ in block.parameters())]


def shard(module: AnyModule, mesh: DeviceMesh, config: ShardingConfig) -> AnyModule:
    """Shard a module's parameters over the mesh, in place, and return it. All ranks call it with equal parameters.

    Frozen and trained parameters (LoRA) may be mixed. Make the optimizer afterwards: its parameters are the local parts.
    Raises UserError: a parameter has no dimension to divide, or tensor parallelism is configured and the model has no plan for it.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method

    scalars = [name for name, parameter in module.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise UserError(f"Parameter '{scalars[0]}' has no dimension to shard: give it shape [1] to train on several ranks.")
    if config.num_tensor_shards > 1:
        parallelize(module, mesh["tensor"])
    blocks = blocks_of(module)
    if config.checkpoint_activations:
        for block in blocks:
            # On the instance and below the module's hooks, so that names stay and FSDP's view does not change.
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    data_mesh = mesh["shard"] if config.num_replicas == 1 else mesh["replicate", "shard"]
    offload = CPUOffloadPolicy(pin_memory=True) if config.cpu_offload and mesh.device_type == "cuda" else OffloadPolicy()
    low = torch.bfloat16 if config.precision == "bfloat16" else None
    # A model of transformers continues in its layers' precision; the modules around ours (heads, normalisation) compute in float32.
    ours = bool(blocks) and not any(type(part).__module__.startswith("transformers.") for part in module.modules())
    inner = MixedPrecisionPolicy(low, torch.float32, output_dtype=torch.float32 if ours and low else None)
    outer = MixedPrecisionPolicy(None if ours else low, torch.float32, cast_forward_inputs=False)
    # The backward begins in the last block; in pi0 at its cached keys, not at its output, whose gradient has FSDP gather it.
    last = {block for part in _outermost(module, nn.ModuleList) for block in [*part.children()][-1:]}
    for block in blocks:
        frees = config.reshard_after_forward and block not in last
        fully_shard(block, mesh=data_mesh, mp_policy=inner, offload_policy=offload, reshard_after_forward=frees)
    for head in () if ours or not blocks else _beside(module, blocks):  # value heads read float32
        fully_shard(head, mesh=data_mesh, mp_policy=MixedPrecisionPolicy(None, torch.float32), offload_policy=offload)
    fully_shard(module, mesh=data_mesh, mp_policy=outer, offload_policy=offload)
    for part in sharded_parts(module):
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
        # Once here: a block that no forward runs (the last of a vision transformer) would have no gathered parameter to check.
        part.unshard()
        part.reshard()
    # Values and entropies are views; no caller writes into a policy's outputs.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for name in FORWARD_METHODS:
        if name in dir(module):
            register_fsdp_forward_method(module, name)
    for owner, name in ((owner, name) for owner in module.modules() for name in WHOLE_METHODS if name in dir(owner)):
        setattr(owner, name, functools.partial(_with_blocks, owner, getattr(owner, name)))
    return module


def _with_blocks(module: nn.Module, compute: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
    blocks = [part for child in module.children() for part in sharded_parts(child)]
    for block in blocks:
        block.unshard()
    try:
        return compute(*arguments, **options)
    finally:
        for block in blocks:
            block.reshard()


def sharded_parts(module: nn.Module) -> list[FSDPModule]:
    """Every module that is gathered separately, `module` itself included."""
    return [part for part in module.modules() if is_sharded(part)]


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, so that `named_parameters` are the local parts; a forward without a backward leaves the root gathered."""
    for part in sharded_parts(module):
        part.reshard()


def accumulate(module: nn.Module, losses: Sequence[Callable[[], Tensor]], inputs: list[Tensor] | None = None) -> None:
    """Add up the gradients of several micro-batches; ranks exchange gradients once, after the last.

    Args:
        losses: one function per micro-batch, equally many on every rank; each already divides by the whole step's denominator.
        inputs: for an unsharded module, the parameters that get gradients; None: all that the losses depend on.
    """
    if not is_sharded(module):
        for loss in losses:
            loss().backward(inputs=inputs)
        return
    for index, loss in enumerate(losses):
        last = index == len(losses) - 1
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        loss().backward()


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale gradients down to a global norm of `max_norm`; return the Euclidean norm before, over the parts of all ranks, summed in float64
    (the same rule as torch's on one rank)."""
    held = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    sums: dict[tuple[int, ...], Tensor] = {}
    meshes: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
    for gradient in held:
        groups: list[dist.ProcessGroup] = []
        if is_cut(gradient):
            from torch.distributed.tensor import Replicate

            mesh, placements = gradient.device_mesh, gradient.placements
            groups = [mesh.get_group(dim) for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
        key = tuple(id(group) for group in groups)
        total = local_part(gradient).double().square().sum()
        sums[key] = sums[key] + total if key in sums else total
        meshes[key] = groups
    squared = 0.0
    for key, total in sums.items():
        for group in meshes[key]:
            if dist.get_backend(group) == "nccl" and total.device.type == "cpu":
                total = total.cuda()  # NCCL reduces only on GPUs, and offloaded gradients are on the host
            dist.all_reduce(total, group=group)
        squared += float(total)
    norm = math.sqrt(squared) if squared >= 0 else math.nan
    if math.isfinite(norm):
        for gradient in held:
            local_part(gradient).mul_(min(max_norm / (norm + 1e-6), 1.0))
    return norm


# ---- whole tensors ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Assemble a tensor from the ranks' parts; a collective call. Returns a plain tensor as it is, detached."""
    tensor = tensor.detach()
    if not is_cut(tensor):
        return tensor
    if tensor.device_mesh.device_type == "cuda" and tensor.device.type == "cpu":
        # Offloaded: ranks can exchange it only on the GPU.
        return whole(tensor.to("cuda"))
    return tensor.full_tensor()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; a plain tensor as it is."""
    return tensor.to_local() if is_cut(tensor) else tensor


def gather_named(module: nn.Module, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of parameters and buffers, one at a time; a collective call that every rank must exhaust.
    `wanted`: names; None: all names."""
    reshard(module)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if wanted is None or name in wanted:
            yield name, whole(tensor)


def own_slice(tensor: DTensor) -> tuple[slice, ...]:
    """Slices of the whole tensor that this rank holds; empty slices if it holds nothing."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


@torch.no_grad()
def fill(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor into a whole or sharded one; each rank takes its part, nothing is sent. Raises ValueError if shapes differ."""
    if target.shape != source.shape:
        raise ValueError(f"a tensor of shape {tuple(source.shape)} does not fit one of shape {tuple(target.shape)}")
    if is_cut(target):
        target.to_local().copy_(source[own_slice(target)])
    else:
        target.copy_(source)


def load_named(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill parameters and buffers from whole tensors. Raises KeyError if one is missing, ValueError for another shape."""
    reshard(module)
    for name, target in module.state_dict(keep_vars=True).items():
        fill(target, tensors[name])


# ---- inside -------------------------------------------------------------------------------------------------------------


def _outermost(module: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if isinstance(child, kind) else _outermost(child, kind)
    return found


def _beside(module: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Children with parameters that contain none of the blocks."""
    inside = set(blocks)
    return [child for child in module.children() if inside.isdisjoint(child.modules()) and any(True for _ in child.parameters())]


# ---- tensor parallelism by a transformers model's own plan: columns and rows of its linear layers ----------------------------------------


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
