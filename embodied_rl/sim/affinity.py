"""Place worker processes: choose the cores and the memory of each worker, set them in the worker, and read them back.

`plan_placement` decides from a `Topology` only, so that tests can cover machines that are not at hand. `apply_placement` runs in the worker
before its simulator is imported and reports what the kernel says.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from embodied_rl.errors import UserError, require_known
from embodied_rl.sim.topology import Gpu, Topology, format_list

# ---- the kernel's memory policy of the calling thread -----------------------------------------------------------------


_MODES = {0: "default", 1: "preferred", 2: "bind", 3: "interleave", 4: "local", 5: "preferred", 6: "weighted interleave"}
"""MPOL_* of <linux/mempolicy.h>; 5 is MPOL_PREFERRED_MANY, which is preferred with several nodes."""
_PREFERRED, _PREFERRED_MANY = 1, 5
_MODE_FLAGS = 0b111 << 13
"""MPOL_F_NUMA_BALANCING, MPOL_F_RELATIVE_NODES, MPOL_F_STATIC_NODES: ORed into the mode."""
_CALL_NUMBERS = {"x86_64": (238, 239), "aarch64": (237, 236), "riscv64": (237, 236)}
"""{machine: numbers of set_mempolicy and get_mempolicy}."""
_MASK_BITS = 1024
"""Nodes a mask has room for; the kernel refuses masks smaller than its own number of possible nodes (at most 1024)."""
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def set_memory_policy(nodes: Sequence[int]) -> str:
    """Make this thread prefer new memory from `nodes`, and return the policy that the kernel reports afterwards.

    Memory in use stays where it is; threads and processes that start later inherit the policy. Never raises for lack of permission.

    Args:
        nodes: NUMA nodes, all below 1024; empty: report the policy and do not change it.
    Returns ``default``, ``preferred:0-1``, …, or ``unavailable: `` and the reason.
    """
    numbers = _CALL_NUMBERS.get(platform.machine()) if platform.system() == "Linux" and _WORD_BITS == 64 else None
    if numbers is None:
        return f"unavailable: {platform.system()} on {platform.machine()} has no number for its call here"
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    set_policy, get_policy = map(ctypes.c_long, numbers)
    bits = ctypes.c_ulong(_MASK_BITS + 1)  # the kernel subtracts one
    mask = (ctypes.c_ulong * (_MASK_BITS // _WORD_BITS))()
    if nodes:
        for node in nodes:
            mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
        if syscall(set_policy, ctypes.c_int(_PREFERRED if len(nodes) == 1 else _PREFERRED_MANY), mask, bits) != 0:
            return _refusal(f"set_mempolicy preferred:{format_list(set(nodes))}")
    mode = ctypes.c_int()
    if syscall(get_policy, ctypes.byref(mode), mask, bits, None, ctypes.c_ulong(0)) != 0:
        return _refusal("get_mempolicy")
    name = _MODES.get(mode.value & ~_MODE_FLAGS, f"mode {mode.value}")
    found = [word * _WORD_BITS + bit for word, value in enumerate(mask) for bit in range(_WORD_BITS) if value >> bit & 1]
    return f"{name}:{format_list(found)}" if found else name


def _refusal(call: str) -> str:
    code = ctypes.get_errno()
    reason = {
        errno.EPERM: "not permitted here (containers need the capability SYS_NICE)",
        errno.ENOSYS: "this kernel has no NUMA support",
        errno.EINVAL: "the kernel refuses these nodes or this mode",
    }.get(code, os.strerror(code))
    return f"unavailable: {call}: {reason}"


PlacementPolicy = Literal["auto", "none", "pack", "spread", "near_gpu"]
POLICIES: tuple[PlacementPolicy, ...] = ("auto", "none", "pack", "spread", "near_gpu")

MIN_CORES = 4
"""Physical cores below which "auto" pins nothing: learner and workers share the cores, and the kernel must be free to move them."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables that numeric libraries read once, when they are loaded."""


def thread_variables(num_threads: int) -> dict[str, str]:
    """Environment variables for a process whose libraries may use `num_threads` threads each."""
    # Mesa's software rasteriser counts helpers only; with none, the calling thread draws.
    helpers = num_threads if num_threads > 1 else 0
    return {**dict.fromkeys(THREAD_VARIABLES, str(num_threads)), "LP_NUM_THREADS": str(helpers)}


# --- how many cores --------------------------------------------------------------------------------------------------


def available_cores(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Number of cores usable by this process, at least 1 (affinity mask, then cgroup v2 or v1 CPU quota)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(float(cores), _quota(cgroup_root))))


def _quota(root: Path) -> float:
    """Cores of the cgroup's quota, of version 2 or 1; infinite without one."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            limit, period = " ".join((root / name).read_text() for name in names).split()
            return math.inf if limit in ("max", "-1") else int(limit) / int(period)
    return math.inf


# --- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Cores, memory and GPU of one worker."""

    worker: int
    cores: tuple[int, ...] = ()
    """The kernel's CPU numbers, ascending; empty: not pinned."""
    node: int | None = None
    """NUMA node of the cores; None: not pinned, or the machine reports no nodes."""
    memory_nodes: tuple[int, ...] = ()
    """Nodes that its memory comes from; empty: the kernel chooses."""
    gpu: int | None = None
    """GPU that it is placed near, as this process numbers GPUs."""
    shares_with: tuple[int, ...] = ()
    """Workers that share a physical core with it, because there are more workers than cores."""
    note: str = ""
    """Why the worker is not where the policy wants it; empty if it is."""


def place_workers(
    num_workers: int, policy: PlacementPolicy = "auto", gpus: Sequence[int] = (0,), root: Path = Path("/")
) -> list[Placement]:
    """Read the machine and plan. Reads only what the policy needs: no driver on a machine with one node."""
    topology = Topology.read(root, with_gpus=policy == "near_gpu")
    if policy == "auto" and choose_policy(topology, cgroup_root=root / "sys/fs/cgroup") != "none":
        topology = Topology.read(root)
    chosen = choose_policy(topology, gpus, root / "sys/fs/cgroup") if policy == "auto" else policy
    return plan_placement(topology, num_workers, chosen, gpus)


def choose_policy(topology: Topology, gpus: Sequence[int] = (0,), cgroup_root: Path = Path("/sys/fs/cgroup")) -> PlacementPolicy:
    """Policy that "auto" means on this machine.

    ``none`` with one node, with fewer than `MIN_CORES` physical cores, or under a CPU quota, because other runs on the machine would choose
    the same cores. Otherwise ``near_gpu`` if the node of all `gpus` is known, else ``spread``.
    """
    nodes = [node for node in topology.nodes if topology.usable_in(node.index)]
    if len(nodes) < 2 or len(topology.physical_cores) < MIN_CORES or _quota(cgroup_root) < len(topology.cores):
        return "none"
    known = {gpu.index for gpu in topology.gpus if gpu.node is not None}
    return "near_gpu" if gpus and known.issuperset(gpus) else "spread"


def plan_placement(topology: Topology, num_workers: int, policy: PlacementPolicy, gpus: Sequence[int] = (0,)) -> list[Placement]:
    """Plan cores and memory for each worker; equal arguments give equal plans.

    Policies:
        none: nothing is pinned.
        pack: the fewest nodes that have a physical core for each worker, in the order of their numbers.
        spread: evenly over all nodes in proportion to their cores. Workers i and i + 1 are on different nodes, so that both
            halves of a pipeline (`sim.pipeline_groups`) keep all nodes busy.
        near_gpu: on the node of the GPU that consumes the worker's frames, then on the nearest with free cores.
            Worker i belongs to ``gpus[i * len(gpus) // num_workers]``, in blocks, as slots belong to workers.
        auto: see `choose_policy`.

    While there are enough physical cores, all workers get equally many of their own, with all their hardware threads. With more workers
    than physical cores each worker gets one hardware thread, of different cores first; with more workers than threads they share threads in
    turns. `shares_with` lists who shares.

    Args:
        gpus: as this process numbers them; only near_gpu uses them.
    Raises:
        UserError: an unknown policy, no worker, or near_gpu with a GPU that is not there.
    """
    if num_workers < 1:
        raise UserError(f"Placement needs at least one worker, got {num_workers}.")
    require_known(policy, POLICIES, f"sim.placement={policy!r} is not a choice.")
    if policy == "auto":
        policy = choose_policy(topology, gpus)
    if policy == "none":
        return [Placement(worker) for worker in range(num_workers)]
    served: list[Gpu | None] = [None] * num_workers
    note = ""
    if policy == "near_gpu":
        served = _served_gpus(topology, num_workers, gpus)
        unknown = {gpu.index for gpu in served if gpu is not None and gpu.node is None}
        if unknown:
            note = f"the NUMA node of GPU {format_list(unknown)} is not reported, so workers are spread"
            policy, served = "spread", [None] * num_workers
    return _choose_cores(topology, _choose_nodes(topology, policy, served), served, note)


def _served_gpus(topology: Topology, num_workers: int, gpus: Sequence[int]) -> list[Gpu | None]:
    known = {gpu.index: gpu for gpu in topology.gpus}
    missing = {index for index in gpus if index not in known}
    if missing or not gpus:
        there = ", ".join(f"{gpu.index} ({gpu.pci})" for gpu in topology.gpus) or "none"
        named = f"GPU {format_list(missing)}, which does not exist" if missing else "a GPU, and none is set"
        raise UserError(f"sim.placement=near_gpu needs {named}; GPUs that this process sees: {there}. Choose spread, pack or none.")
    return [known[gpus[worker * len(gpus) // num_workers]] for worker in range(num_workers)]


def _choose_nodes(topology: Topology, policy: PlacementPolicy, served: Sequence[Gpu | None]) -> dict[int, int]:
    """{worker: node}. Physical cores are filled on all nodes first, then their other hardware threads, then both again."""
    usable = {node.index: topology.usable_in(node.index) for node in topology.nodes}
    physical = {node: len(own) for node, own in usable.items()}
    capacities = itertools.cycle((physical, {node: sum(map(len, own)) - len(own) for node, own in usable.items()}))
    capacity: dict[int, int] = {}
    left: dict[int, int] = {}
    chosen: dict[int, int] = {}
    # The first worker of each GPU chooses, then the second of each, …
    gpus = [None if gpu is None else gpu.index for gpu in served]
    for worker in sorted(range(len(gpus)), key=lambda worker: (gpus[:worker].count(gpus[worker]), worker)):
        while not any(left.values()):
            capacity = next(capacities)
            left = dict(capacity)
        free = sorted(node for node in left if left[node])
        gpu = served[worker]
        if policy == "near_gpu" and gpu is not None and gpu.node is not None:
            node = topology.nearest(gpu.node, free)[0]
        elif policy == "spread":
            node = min(free, key=lambda node: ((capacity[node] - left[node] + 1) / capacity[node], node))
        else:
            node = free[0]
        left[node] -= 1
        chosen[worker] = node
    return chosen


def _choose_cores(topology: Topology, nodes: Mapping[int, int], served: Sequence[Gpu | None], note: str) -> list[Placement]:
    members = {node: sorted(worker for worker in nodes if nodes[worker] == node) for node in set(nodes.values())}
    share = min(len(topology.usable_in(node)) // len(workers) for node, workers in members.items())
    given: dict[int, tuple[int, ...]] = {}
    for node, workers in members.items():
        own = topology.usable_in(node)
        # The first hardware thread of every core, then the second of those that have one, …
        single = [thread for level in itertools.zip_longest(*own) for thread in level if thread is not None]
        for place, worker in enumerate(workers):
            whole = tuple(sorted(itertools.chain(*own[place * share : (place + 1) * share])))
            given[worker] = whole or (single[place % len(single)],)
    home = {thread: core for core in topology.physical_cores for thread in core}
    used = {worker: {home[thread] for thread in threads} for worker, threads in given.items()}
    placements = []
    for worker in sorted(given):
        node, gpu = nodes[worker], served[worker]
        placements.append(
            Placement(
                worker,
                given[worker],
                node=node if topology.numa_known else None,
                memory_nodes=topology.nearest(node, topology.memory_nodes)[:1],
                gpu=None if gpu is None else gpu.index,
                shares_with=tuple(other for other in sorted(used) if other != worker and used[other] & used[worker]),
                note=note,
            )
        )
    return placements


# --- in the worker ---------------------------------------------------------------------------------------------------


def apply_placement(cores: Sequence[int], memory_nodes: Sequence[int]) -> dict[str, Any]:
    """Pin this process and bind its memory, then read back the result. Never raises for lack of permission.

    Call it in the worker's main thread before the simulator is imported: existing memory stays where it is, and the memory policy applies
    to the calling thread and the threads that it starts later. Cores are set for all threads of the process.

    Returns what the kernel reports: ``cores`` that the process may run on (empty if the system does not say), ``memory_policy`` as
    `set_memory_policy` does, and ``problems``, a sentence for each request that the kernel did not fulfil.
    """
    problems = []
    if cores and not hasattr(os, "sched_setaffinity"):
        problems.append(f"{sys.platform} cannot pin processes")
    elif cores:
        try:
            set_cores(os.getpid(), cores)
        except OSError as error:
            problems.append(f"cores {format_list(cores)} cannot be set: {error.strerror}")
    policy = set_memory_policy(memory_nodes)
    if memory_nodes and policy.startswith("unavailable"):
        problems.append(f"memory is not taken from node {format_list(memory_nodes)}: {policy}")
    got = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cores and set(got) != set(cores):
        problems.append(f"asked for cores {format_list(cores)}, got {format_list(got) or 'no answer'}")
    return {"cores": got, "memory_policy": policy, "problems": problems}


def set_cores(pid: int, cores: Sequence[int]) -> None:
    """Restrict every thread of a process to `cores`; the system's call sets one thread only. Raises OSError."""
    os.sched_setaffinity(pid, cores)
    tasks = Path(f"/proc/{pid}/task")
    for task in tasks.iterdir() if tasks.is_dir() else ():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(task.name), cores)


def limit_threads(num_threads: int) -> None:
    """Limit the thread pools of libraries in this process.

    Libraries that are loaded later read the variables of `thread_variables`. For loaded libraries this function calls torch and numba, and
    limits OpenBLAS, MKL and OpenMP if threadpoolctl is installed. Without it they keep their number, so set the variables before the
    process starts. It never imports torch.
    """
    os.environ.update(thread_variables(num_threads))
    torch, numba = sys.modules.get("torch"), sys.modules.get("numba")
    if torch is not None:
        torch.set_num_threads(num_threads)
        # torch refuses this after the first parallel work.
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(num_threads)
    if numba is not None:
        numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
    with contextlib.suppress(ModuleNotFoundError):
        from threadpoolctl import threadpool_limits

        threadpool_limits(num_threads)


# --- text ------------------------------------------------------------------------------------------------------------


def describe_topology(topology: Topology) -> list[tuple[str, str]]:
    """(what, text) rows of each node, each GPU and each unknown."""
    rows = []
    for node in topology.nodes:
        physical = topology.usable_in(node.index)
        usable = [thread for core in physical for thread in core]
        parts = [f"cores {format_list(node.cores) or 'none'}"]
        if set(usable) != set(node.cores):
            parts[0] += f" (usable: {format_list(usable) or 'none'})"
        if len(usable) > len(physical):
            parts.append(f"{len(physical)} physical, {len(usable)} hardware threads")
        if node.memory_total_bytes is not None:
            free = "?" if node.memory_free_bytes is None else f"{node.memory_free_bytes / 2**30:.1f}"
            parts.append(f"{node.memory_total_bytes / 2**30:.1f} GiB, {free} free")
        if len(topology.nodes) > 1 and node.distances:
            parts.append("distances " + " ".join(f"{other}:{cost}" for other, cost in sorted(node.distances.items())))
        rows.append((f"node {node.index}" if topology.numa_known else "all (no NUMA reported)", "; ".join(parts)))
    for gpu in topology.gpus:
        where = "node unknown" if gpu.node is None else f"node {gpu.node}" if topology.numa_known else "the only node"
        rows.append((f"GPU {gpu.index}", f"{gpu.pci}, {where}" + (f", {gpu.name}" if gpu.name else "")))
    return [*rows, *((f"note {number}", note) for number, note in enumerate(topology.notes, 1))]


def describe_placements(placements: Sequence[Placement]) -> list[tuple[str, str]]:
    """(node, its workers) rows, followed by what is not ideal; one row if nothing is pinned."""
    if not any(placement.cores for placement in placements):
        return [("workers", f"{len(placements)}, not pinned: the kernel places them")]
    rows = []
    for node in sorted({-1 if placement.node is None else placement.node for placement in placements}):
        own = [placement for placement in placements if placement.node == (None if node < 0 else node)]
        memory = {number for placement in own for number in placement.memory_nodes}
        text = "worker " + ", ".join(f"{placement.worker} on {format_list(placement.cores)}" for placement in own)
        rows.append(("workers" if node < 0 else f"node {node}", text + (f"; memory of node {format_list(memory)}" if memory else "")))
    shared = sum(bool(placement.shares_with) for placement in placements)
    if shared:
        rows.append(("shared", f"{shared} of {len(placements)} workers share a physical core: there are more workers than cores"))
    return [*rows, *(("instead", note) for note in sorted({placement.note for placement in placements} - {""}))]
