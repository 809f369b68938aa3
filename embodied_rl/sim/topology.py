"""The machine as Linux describes it: NUMA nodes, physical cores, memory, and each GPU's node.

Everything is read below a root folder that can be replaced, so that tests can cover machines that are not at hand. What the machine does
not report stays unknown and is listed in `Topology.notes`; nothing is assumed to be on node 0.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from embodied_rl.errors import UserError, brief

# ---- GPUs: from NVIDIA's driver, else from sysfs; without torch --------------------------------------------------------


_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""PCI classes of devices that compute: VGA, 3D and other display controllers, processing accelerators."""
_PCI_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)
_WARNED = 14
"""Exit status of nvidia-smi that lists the GPUs, and warns that an infoROM is damaged."""
_DRIVER_S = 60.0
"""Seconds that NVIDIA's driver has to answer: without persistence mode it starts every GPU first."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as this process numbers it (``cuda:index``)."""

    index: int
    pci: str
    """PCI address as sysfs writes it: ``0000:c1:00.0``."""
    node: int | None = None
    """NUMA node; None: not reported."""
    name: str | None = None
    uuid: str | None = None


def normalise_pci(text: str) -> str:
    """PCI address as sysfs writes it: lower case, with a domain of four digits (more if needed)."""
    match = _PCI_ADDRESS.fullmatch(text.strip())
    if match is None:
        raise UserError(f"'{text}' is not a PCI address; one looks like '0000:c1:00.0' or '00000000:C1:00.0'.")
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def _by_address(found: Iterable[tuple[str, str | None, str]]) -> list[Gpu]:
    """GPUs of these (PCI address, UUID, name), numbered by their addresses: domain, bus, device, function."""
    rows = sorted(
        ((normalise_pci(pci), uuid, name) for pci, uuid, name in found), key=lambda row: [int(n, 16) for n in re.split("[:.]", row[0])]
    )
    return [Gpu(index, pci, name=name, uuid=uuid) for index, (pci, uuid, name) in enumerate(rows)]


def sysfs_gpus(root: Path) -> list[Gpu]:
    """NVIDIA's and AMD's GPUs below ``sys/bus/pci/devices``, by PCI address; in a container, all GPUs of the machine, except those of
    NVIDIA that its driver's own list, which containers have for themselves, leaves out."""
    listed = {folder.name for folder in (root / "proc/driver/nvidia/gpus").glob("*")}
    found = []
    for folder in (root / "sys/bus/pci/devices").glob("*"):
        vendor, kind = ((folder / name).read_text().strip() if (folder / name).is_file() else "" for name in ("vendor", "class"))
        if vendor in _VENDORS and kind.startswith(_CLASSES):
            name = _VENDORS[vendor]
            if name != "NVIDIA" or not listed or folder.name in listed:
                found.append((folder.name, None, name))
    return _by_address(found)


def driver_gpus() -> list[Gpu] | None:
    """GPUs that NVIDIA's driver shows to this process, by PCI address; None if nvidia-smi, which asks it, is not installed.

    Raises UserError with the driver's message if it is installed and fails (after an update without a restart, say).
    """
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=pci.bus_id,uuid,name", "--format=csv,noheader"]
    try:
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            listed, complaint = asked.communicate(timeout=_DRIVER_S)
        except subprocess.TimeoutExpired:
            asked.kill()  # and no wait for it, as `subprocess.run` does: where it hangs in the kernel, it does not end
            raise
        if asked.returncode not in (0, _WARNED):
            raise ValueError(listed + complaint or f"exit status {asked.returncode}")
        lines = [line for line in listed.splitlines() if not line.startswith("WARNING")]
        return _by_address((pci, uuid, name) for pci, uuid, name in (line.split(", ", 2) for line in lines))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UserError(f"NVIDIA's driver does not answer ({brief(error, 200)}). Does nvidia-smi work here?") from error


def visible_gpus(found: Sequence[Gpu], visible: str | None) -> tuple[list[Gpu], str]:
    """GPUs as the framework numbers them under ``CUDA_VISIBLE_DEVICES``, and the part of it that was not understood ("" if all was).

    As in CUDA, the list ends at its first entry that names no GPU, a UUID may be shortened, and an empty list hides all.
    """
    if visible is None:
        return list(found), ""
    chosen: list[Gpu] = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        if entry.isdigit() and int(entry) < len(found):
            chosen.append(found[int(entry)])
            continue
        matching = [gpu for gpu in found if gpu.uuid is not None and entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        if len(matching) != 1:
            hidden = "" if entry == "-1" else f"CUDA_VISIBLE_DEVICES={visible}: '{entry}' is no GPU whose PCI address is known here"
            return chosen, hidden
        chosen.extend(matching)
    return chosen, ""


# ---- the machine ------------------------------------------------------------------------------------------------------


_NODES = "sys/devices/system/node"
_CPUS = "sys/devices/system/cpu"


@dataclass(frozen=True)
class NumaNode:
    """A set of cores with their own memory."""

    index: int
    """The kernel's number; numbers may have gaps."""
    cores: tuple[int, ...]
    """All CPU numbers (hardware threads) of this node, usable or not; empty: a node with memory only."""
    memory_total_bytes: int | None
    """Bytes of memory; None: not reported; 0: a node with cores only."""
    memory_free_bytes: int | None
    distances: Mapping[int, int] = field(default_factory=dict)
    """{node: relative cost of reaching its memory}, 10 for the node itself; empty if not reported."""


@dataclass(frozen=True)
class Topology:
    """Machine as `Topology.read` found it."""

    nodes: tuple[NumaNode, ...]
    """Nodes by number; a single one with everything if the machine reports none (`numa_known` False)."""
    numa_known: bool
    physical_cores: tuple[tuple[int, ...], ...]
    """Hardware threads of each physical core that this process may use, both levels ascending."""
    memory_nodes: tuple[int, ...]
    """Nodes with memory that this process may use."""
    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()
    """Facts that the machine does not report or reports in contradictory ways, one sentence each."""

    @property
    def cores(self) -> tuple[int, ...]:
        """Hardware threads that this process may use, ascending."""
        return tuple(sorted(thread for core in self.physical_cores for thread in core))

    def usable_in(self, node: int) -> tuple[tuple[int, ...], ...]:
        """Physical cores of one node that this process may use."""
        own = {core for each in self.nodes if each.index == node for core in each.cores}
        return tuple(core for core in self.physical_cores if own.issuperset(core))

    def nearest(self, start: int, choices: Sequence[int]) -> tuple[int, ...]:
        """`choices` from the nearest to `start` to the farthest; unknown distances come last, and ties in numerical order."""
        costs = next((node.distances for node in self.nodes if node.index == start), {})
        return tuple(sorted(choices, key=lambda node: (node != start, node not in costs, costs.get(node), node)))

    @staticmethod
    def read(root: Path = Path("/"), *, with_gpus: bool = True) -> Topology:
        """Read the machine whose ``sys`` and ``proc`` lie below `root`. `with_gpus`: False skips GPUs and calls no driver.

        For this machine (`root` is "/") the cores come from `sched_getaffinity`, and the GPUs from NVIDIA's driver, as
        ``CUDA_VISIBLE_DEVICES`` selects them. For another tree cores and GPUs come from its files only.

        Raises UserError: a file does not contain what the kernel writes there, or no core is left.
        """
        return _Reader(root).read(with_gpus)


class _Reader:
    """Reads one machine and collects the notes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.here = root.resolve() == Path("/")
        self.notes: list[str] = []

    def read(self, with_gpus: bool) -> Topology:
        nodes = self._nodes()
        numa_known = bool(nodes)
        usable = self._usable_cores(nodes)
        if not nodes:
            self.notes.append("NUMA nodes are not reported: the machine is taken as one node")
            nodes = (NumaNode(0, tuple(sorted(usable)), *self._memory("proc/meminfo")),)
        homeless = usable - {core for node in nodes for core in node.cores}
        if homeless:
            self.notes.append(f"cores {format_list(homeless)} belong to no NUMA node and are left out")
        physical = self._physical_cores(usable - homeless)
        if not physical:
            raise UserError(f"None of the cores that this process may use ({format_list(usable) or 'none'}) belongs to a NUMA node.")
        allowed = self._listed("Mems_allowed_list")
        with_memory = [node.index for node in nodes if node.memory_total_bytes != 0]
        memory_nodes = tuple(index for index in with_memory if allowed is None or index in allowed)
        gpus = self._gpus(nodes) if with_gpus else ()
        return Topology(nodes, numa_known, physical, memory_nodes if numa_known else (), gpus, tuple(self.notes))

    def _nodes(self) -> tuple[NumaNode, ...]:
        folders = {int(path.name[4:]): path for path in (self.root / _NODES).glob("node*") if path.name[4:].isdigit()}
        rows = {index: (self._text(f"{_NODES}/node{index}/distance") or "").split() for index in folders}
        nodes = []
        for index in sorted(folders):
            cores = parse_list(self._text(f"{_NODES}/node{index}/cpulist") or "", f"{_NODES}/node{index}/cpulist")
            distances: dict[int, int] = {}
            # A row has one figure for each online node, in numerical order.
            if len(rows[index]) == len(folders) and all(cost.isdigit() for cost in rows[index]):
                distances = dict(zip(sorted(folders), map(int, rows[index]), strict=True))
            else:
                self.notes.append(f"node {index} does not report its distance to each of the {len(folders)} nodes")
            nodes.append(NumaNode(index, tuple(sorted(cores)), *self._memory(f"{_NODES}/node{index}/meminfo"), distances))
        # A folder without any cores does not tell where anything is.
        return tuple(nodes) if any(node.cores for node in nodes) else ()

    def _memory(self, name: str) -> tuple[int | None, int | None]:
        """Total and free bytes in the meminfo file of the machine or of a node."""
        text = self._text(name) or ""
        found = {key: int(kib) * 1024 for key, kib in re.findall(r"(MemTotal|MemFree):\s+(\d+) kB", text)}
        return found.get("MemTotal"), found.get("MemFree")

    def _usable_cores(self, nodes: Sequence[NumaNode]) -> frozenset[int]:
        """Online cores that the scheduler leaves to this process, cpusets of containers included."""
        name = f"{_CPUS}/online"
        text = self._text(name)
        online = parse_list(text, name) if text else frozenset(core for node in nodes for core in node.cores)
        here = self.here and hasattr(os, "sched_getaffinity")
        allowed = frozenset(os.sched_getaffinity(0)) if here else self._listed("Cpus_allowed_list")
        # If sysfs is hidden, only the scheduler's list is known.
        usable = online if allowed is None else online & allowed or allowed
        if not usable:
            raise UserError(f"No core is listed below '{self.root / _CPUS}' or '{self.root / _NODES}'. Is sysfs mounted there?")
        return usable

    def _physical_cores(self, usable: frozenset[int]) -> tuple[tuple[int, ...], ...]:
        groups, silent = set(), set()
        for core in usable:
            names = [f"{_CPUS}/cpu{core}/topology/{name}" for name in ("core_cpus_list", "thread_siblings_list")]
            name, text = next(((name, text) for name in names if (text := self._text(name))), ("", ""))
            if not text:
                silent.add(core)
            siblings = parse_list(text, name) & usable | {core}
            groups.add(tuple(sorted(siblings)))
        if silent:
            self.notes.append(f"hardware threads of cores {format_list(silent)} are not reported: each is taken as one core")
        return tuple(sorted(groups))

    def _listed(self, key: str) -> frozenset[int] | None:
        """Cores or memory nodes in this process's status, which its cpuset limits; None: not reported."""
        match = re.search(rf"^{key}:[ \t]*(\S*)", self._text("proc/self/status") or "", re.MULTILINE)
        return None if match is None else parse_list(match[1], "proc/self/status")

    def _gpus(self, nodes: Sequence[NumaNode]) -> tuple[Gpu, ...]:
        found = self._find_gpus()
        chosen, unclear = visible_gpus(found, os.environ.get("CUDA_VISIBLE_DEVICES") if self.here else None)
        if unclear:
            self.notes.append(unclear)
        if len({gpu.name for gpu in found}) > 1 and not (self.here and os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"):
            self.notes.append("the GPUs are of different kinds: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or CUDA numbers the fastest first")
        return tuple(replace(gpu, index=i, node=self._node_of(i, gpu.pci, nodes)) for i, gpu in enumerate(chosen))

    def _find_gpus(self) -> Sequence[Gpu]:
        try:
            answer = driver_gpus() if self.here else None
        except UserError as error:
            self.notes.append(str(error))
            return ()
        return sysfs_gpus(self.root) if answer is None else answer

    def _node_of(self, index: int, pci: str, nodes: Sequence[NumaNode]) -> int | None:
        text = self._text(f"sys/bus/pci/devices/{pci}/numa_node")
        node = int(text) if text and re.fullmatch(r"-?\d+", text) else -1
        if node in {each.index for each in nodes}:
            return node
        if len(nodes) == 1:
            return nodes[0].index
        # Virtual machines and some firmware report -1.
        self.notes.append(f"GPU {index} ({pci}): its NUMA node is not reported")
        return None

    def _text(self, name: str) -> str | None:
        """Stripped content of a file; None if it does not exist. An unreadable file is noted."""
        try:
            return (self.root / name).read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.notes.append(f"{name} cannot be read: {error.strerror}")
            return None


def parse_list(text: str, where: str) -> frozenset[int]:
    """Parse the kernel's list format: ``0-3,8`` is {0, 1, 2, 3, 8}, an empty text is the empty set. Raises UserError naming `where`."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise UserError(f"'{where}' holds '{text.strip()}', which is not a list such as '0-3,8'.")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(numbers)


def format_list(numbers: Sequence[int] | frozenset[int] | set[int]) -> str:
    """Write the kernel's list format, ascending: {0, 1, 2, 8} is ``0-2,8``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in ranges)
