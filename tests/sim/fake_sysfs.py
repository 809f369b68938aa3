"""Builds the part of sysfs, procfs and cgroupfs that describes a machine, as the kernel writes it, for machines not at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True)
class FakeNode:
    """One NUMA node; `memory_gib` None: its meminfo says nothing."""

    cores: str
    memory_gib: float | None = 8.0
    free_gib: float = 6.0
    distances: str = ""


def far_siblings(num_physical: int) -> list[tuple[int, ...]]:
    """Two threads per core as Intel and most of AMD number them: i and i + num_physical."""
    return [(core, core + num_physical) for core in range(num_physical)]


def adjacent_siblings(num_physical: int) -> list[tuple[int, ...]]:
    """Two threads per core as IBM, some AMD and many virtual machines number them: 2i and 2i + 1."""
    return [(2 * core, 2 * core + 1) for core in range(num_physical)]


def single_threads(num_cores: int) -> list[tuple[int, ...]]:
    return [(core,) for core in range(num_cores)]


def two_level_distances(num_nodes: int, per_socket: int, near: int, far: int) -> list[str]:
    """A row of distances for each node: 10 to itself, `near` in its own socket of `per_socket` nodes, `far` elsewhere."""
    return [
        " ".join(str(10 if a == b else near if a // per_socket == b // per_socket else far) for b in range(num_nodes))
        for a in range(num_nodes)
    ]


def status(cpus: str, mems: str = "") -> dict[str, str]:
    """What the kernel says of a process whose affinity or cpuset leaves it these cores and memory nodes."""
    lists = f"Cpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\nMems_allowed:\t1\n"
    return {"proc/self/status": f"Name:\tpython\n{lists}" + (f"Mems_allowed_list:\t{mems}\n" if mems else "")}


def build(
    root: Path,
    siblings: Sequence[tuple[int, ...]],
    nodes: Mapping[int, FakeNode] | None = None,
    gpus: Mapping[str, int] | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write the tree and return `root`.

    Args:
        siblings: hardware threads of each physical core.
        nodes: None: a kernel without NUMA.
        gpus: {PCI address: what its numa_node file says}. Beside them there is a network card and a server's own display.
        files: anything else, such as `status`.
    """
    threads = sorted(thread for core in siblings for thread in core)
    written = {"sys/devices/system/cpu/online": ",".join(map(str, threads)), "proc/meminfo": "MemTotal: 4194304 kB\nMemFree: 2097152 kB"}
    for core in siblings:
        for thread in core:
            written[f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"] = ",".join(map(str, core))
    for index, node in (nodes or {}).items():
        written |= {f"sys/devices/system/node/node{index}/{name}": text for name, text in _node_files(index, node).items()}
    devices = {"0000:00:1f.6": ("0x8086", "0x020000", 0), "0000:03:00.0": ("0x1a03", "0x030000", 0)}
    devices |= {pci: ("0x10de", "0x030200", node) for pci, node in (gpus or {}).items()}
    for pci, (vendor, kind, node_number) in devices.items():
        folder = f"sys/bus/pci/devices/{pci}"
        written |= {f"{folder}/vendor": vendor, f"{folder}/class": kind, f"{folder}/numa_node": str(node_number)}
    for name, text in {**written, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def _node_files(index: int, node: FakeNode) -> dict[str, str]:
    files = {"cpulist": node.cores}
    if node.distances:
        files["distance"] = node.distances
    if node.memory_gib is not None:
        total, free = (round(gib * GIB / 1024) for gib in (node.memory_gib, min(node.free_gib, node.memory_gib)))
        used = total - free
        files["meminfo"] = f"Node {index} MemTotal:  {total} kB\nNode {index} MemFree:  {free} kB\nNode {index} MemUsed:  {used} kB"
    return files


def two_nodes(root: Path, gpus: Mapping[str, int] | None = None, files: Mapping[str, str] | None = None) -> Path:
    """2 sockets of 4 cores with 2 threads: node 0 has cores 0-3 and 8-11, node 1 has 4-7 and 12-15."""
    nodes = {0: FakeNode("0-3,8-11", distances="10 21"), 1: FakeNode("4-7,12-15", distances="21 10")}
    return build(root, far_siblings(8), nodes, gpus, files)


def eight_nodes(root: Path, gpus: Mapping[str, int] | None = None, files: Mapping[str, str] | None = None) -> Path:
    """2 sockets of 4 nodes of 2 cores, one thread each: node n has cores 2n and 2n + 1; distances 10, 12 and 32."""
    rows = two_level_distances(8, 4, 12, 32)
    nodes = {index: FakeNode(f"{2 * index}-{2 * index + 1}", distances=rows[index]) for index in range(8)}
    return build(root, single_threads(16), nodes, gpus, files)
