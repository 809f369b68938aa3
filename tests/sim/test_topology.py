"""What is read of machines with one, two and eight nodes, and what is said where a machine does not tell."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim import topology as topology_module
from embodied_rl.sim.topology import Gpu, Topology, driver_gpus, format_list, normalise_pci, parse_list, sysfs_gpus, visible_gpus
from tests.sim.fake_sysfs import GIB, FakeNode, adjacent_siblings, build, eight_nodes, far_siblings, single_threads, status, two_nodes

A100, H100 = "0000:41:00.0", "0000:c1:00.0"


# --- nodes, cores, memory --------------------------------------------------------------------------------------------


def test_two_sockets_with_two_threads_per_core(tmp_path: Path) -> None:
    topology = Topology.read(two_nodes(tmp_path))
    assert topology.numa_known
    assert topology.notes == ()
    assert [node.cores for node in topology.nodes] == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    assert topology.physical_cores == ((0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15))
    assert topology.usable_in(1) == ((4, 12), (5, 13), (6, 14), (7, 15))
    assert topology.cores == tuple(range(16))
    assert [dict(node.distances) for node in topology.nodes] == [{0: 10, 1: 21}, {0: 21, 1: 10}]
    assert (topology.nodes[0].memory_total_bytes, topology.nodes[0].memory_free_bytes) == (8 * GIB, 6 * GIB)
    assert topology.memory_nodes == (0, 1)


def test_threads_numbered_side_by_side(tmp_path: Path) -> None:
    topology = Topology.read(build(tmp_path, adjacent_siblings(4), {0: FakeNode("0-7", distances="10")}))
    assert topology.physical_cores == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_eight_nodes_have_two_kinds_of_neighbours(tmp_path: Path) -> None:
    topology = Topology.read(eight_nodes(tmp_path))
    assert len(topology.nodes) == 8
    assert topology.nodes[5].distances == {0: 32, 1: 32, 2: 32, 3: 32, 4: 12, 5: 10, 6: 12, 7: 12}
    assert topology.nearest(5, range(8)) == (5, 4, 6, 7, 0, 1, 2, 3)
    assert topology.nearest(5, (0, 7, 3)) == (7, 0, 3)


def test_node_numbers_may_have_gaps(tmp_path: Path) -> None:
    nodes = {0: FakeNode("0-1", distances="10 40"), 8: FakeNode("2-3", distances="40 10")}
    topology = Topology.read(build(tmp_path, single_threads(4), nodes))
    assert [node.index for node in topology.nodes] == [0, 8]
    assert topology.nodes[0].distances == {0: 10, 8: 40}
    assert topology.usable_in(8) == ((2,), (3,))


def test_kernel_without_numa_is_one_node_and_says_so(tmp_path: Path) -> None:
    topology = Topology.read(build(tmp_path, far_siblings(2), nodes=None, gpus={H100: -1}))
    assert not topology.numa_known
    (node,) = topology.nodes
    assert node.cores == (0, 1, 2, 3)
    assert (node.memory_total_bytes, node.memory_free_bytes) == (4 * GIB, 2 * GIB)
    assert topology.memory_nodes == ()  # there is nothing to choose
    assert topology.gpus[0].node == 0  # of one node it is certain
    assert len(topology.notes) == 1
    assert "NUMA nodes are not reported" in topology.notes[0]


def test_cpuset_takes_cores_and_memory_away(tmp_path: Path) -> None:
    topology = Topology.read(two_nodes(tmp_path, files=status("2-5,10-12", "1")))
    # 13 is outside, so core 5 has one thread left; cores 2 and 3 keep both.
    assert topology.physical_cores == ((2, 10), (3, 11), (4, 12), (5,))
    assert topology.usable_in(0) == ((2, 10), (3, 11))
    assert topology.memory_nodes == (1,)
    assert topology.nodes[0].cores == (0, 1, 2, 3, 8, 9, 10, 11)  # the machine's, not ours


def test_offline_cores_are_left_out(tmp_path: Path) -> None:
    topology = Topology.read(two_nodes(tmp_path, files={"sys/devices/system/cpu/online": "0-7"}))
    assert topology.physical_cores == tuple((core,) for core in range(8))


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    # No distances, no thread lists of core 1, core 3 on no node.
    build(tmp_path, single_threads(4), {0: FakeNode("0-1"), 1: FakeNode("2")}, gpus={A100: -1, H100: 7})
    (tmp_path / "sys/devices/system/cpu/cpu1/topology/thread_siblings_list").unlink()
    topology = Topology.read(tmp_path)
    said = "\n".join(topology.notes)
    assert topology.cores == (0, 1, 2)
    assert "cores 3 belong to no NUMA node" in said
    assert "hardware threads of cores 1 are not reported" in said
    assert "node 0 does not report its distance" in said
    assert "node 1 does not report its distance" in said
    # -1 and a node that does not exist: unknown, not node 0.
    assert [gpu.node for gpu in topology.gpus] == [None, None]
    assert f"GPU 0 ({A100}): its NUMA node is not reported" in said
    assert f"GPU 1 ({H100}): its NUMA node is not reported" in said
    assert not topology.nodes[0].distances
    assert len(topology.notes) == 6


def test_nothing_there_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"No core is listed below .*sysfs"):
        Topology.read(tmp_path)


def test_file_that_is_not_a_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="node1/cpulist' holds '4-x'"):
        Topology.read(build(tmp_path, single_threads(4), {0: FakeNode("0-3"), 1: FakeNode("4-x")}))


def test_lists_as_the_kernel_writes_them() -> None:
    assert parse_list("0-3,8,10-11\n", "x") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_list("\n", "x") == frozenset()
    assert format_list({0, 1, 2, 3, 8, 10, 11}) == "0-3,8,10-11"
    assert format_list(()) == ""
    numbers = frozenset(range(1, 200, 3)) | frozenset(range(50, 90))
    assert parse_list(format_list(numbers), "x") == numbers
    for wrong in ("a", "1-", "-1", "1;2"):
        with pytest.raises(UserError, match="'somewhere' holds"):
            parse_list(wrong, "somewhere")


# --- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "sysfs"),
    [
        ("00000000:C1:00.0", "0000:c1:00.0"),  # nvidia-smi
        ("0000:c1:00.0", "0000:c1:00.0"),
        ("C1:00.0", "0000:c1:00.0"),  # lspci
        ("0001B0F2:0A:1F.7", "1b0f2:0a:1f.7"),  # a domain that needs more digits (Azure, VMD)
        ("0000ABCD:00:02.0", "abcd:00:02.0"),
    ],
)
def test_pci_addresses_are_normalised(written: str, sysfs: str) -> None:
    assert normalise_pci(written) == sysfs


@pytest.mark.parametrize("wrong", ["", "GPU-1234", "c1:00", "0000:c1:00.9", "0000:zz:00.0"])
def test_what_is_no_pci_address_is_refused(wrong: str) -> None:
    with pytest.raises(UserError, match="not a PCI address"):
        normalise_pci(wrong)


def test_gpus_of_sysfs_come_by_address_and_without_other_devices(tmp_path: Path) -> None:
    # As numbers: domain 0x10000 comes after 0xabcd, which text would have first.
    root = two_nodes(tmp_path, gpus={"10000:01:00.0": 0, H100: 1, A100: 0, "abcd:00:00.0": 1})
    assert [gpu.pci for gpu in sysfs_gpus(root)] == [A100, H100, "abcd:00:00.0", "10000:01:00.0"]
    assert [(gpu.index, gpu.node) for gpu in Topology.read(root).gpus] == [(0, 0), (1, 1), (2, 1), (3, 0)]
    assert Topology.read(root, with_gpus=False).gpus == ()
    (root / "proc/driver/nvidia/gpus" / H100).mkdir(parents=True)  # a container that was given one of them
    assert [gpu.pci for gpu in sysfs_gpus(root)] == [H100]


def test_gpus_of_the_driver_find_their_node_in_spite_of_their_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = two_nodes(tmp_path, gpus={A100: 0, H100: 1})
    listed = [Gpu(0, normalise_pci("00000000:41:00.0")), Gpu(1, normalise_pci("00000000:C1:00.0"))]
    reader = topology_module._Reader(root)
    monkeypatch.setattr(reader, "here", True)
    monkeypatch.setattr(topology_module, "driver_gpus", lambda: listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [(gpu.pci, gpu.node) for gpu in reader.read(with_gpus=True).gpus] == [(A100, 0), (H100, 1)]
    # GPU 0 of a process that sees the second alone is that one: neither a worker's rank nor nvidia-smi's number.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (only,) = reader.read(with_gpus=True).gpus
    assert (only.index, only.pci, only.node) == (0, H100, 1)


FOUR = [Gpu(i, f"0000:0{i}:00.0", uuid=f"GPU-{'abcd'[i]}0{i}") for i in range(4)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3, 1", [3, 1]),
        ("GPU-b", [1]),
        ("GPU-d03,0", [3, 0]),
        ("1,-1,2", [1]),  # the list ends at -1
        ("-1", []),
    ],
)
def test_visible_devices_are_understood(visible: str | None, expected: list[int]) -> None:
    assert visible_gpus(FOUR, visible) == ([FOUR[index] for index in expected], "")


@pytest.mark.parametrize("entry", ["7", "MIG-1234", "GPU-", "GPU-x", "one"])
def test_visible_devices_that_are_not_understood_are_named(entry: str) -> None:
    chosen, unclear = visible_gpus(FOUR, f"2,{entry},1")
    assert chosen == [FOUR[2]]
    assert f"'{entry}'" in unclear


@pytest.mark.parametrize(
    ("prints", "found"),
    [
        (
            "00000000:C1:00.0, GPU-C1, Test, GPU\n00000000:41:00.0, GPU-41, Test GPU\n",
            [(A100, "GPU-41", "Test GPU"), (H100, "GPU-C1", "Test, GPU")],
        ),
        ("", []),
        ("00000000:41:00.0, GPU-41, Test GPU\nWARNING: infoROM is corrupted at gpu 0000:41:00.0\nexit 14", [(A100, "GPU-41", "Test GPU")]),
        ("GPU 0 is lost\n", None),
        ("Failed to initialize NVML: Driver/library version mismatch\nexit 18", None),
    ],
)
def test_driver_is_asked(prints: str, found: list[tuple[str, str, str]] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, _, status = prints.partition("exit ")
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{text}'\nexit {status or 0}\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if found is not None:
        gpus = driver_gpus()
        assert gpus is not None
        assert [(gpu.pci, gpu.uuid, gpu.name) for gpu in gpus] == found
        assert [gpu.index for gpu in gpus] == list(range(len(found)))
        return
    with pytest.raises(UserError, match=r"driver does not answer \(.*\)\. Does nvidia-smi work here" if not status else "version mismatch"):
        driver_gpus()


def test_a_question_to_the_driver_that_nothing_can_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that hangs in the kernel: here the signal does not come."""
    killed = list[subprocess.Popen[str]]()
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nexec {shutil.which('sleep')} 60\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(topology_module, "_DRIVER_S", 0.2)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: killed.append(process))
    began = time.monotonic()
    with pytest.raises(UserError, match=r"does not answer .*timed out"):
        driver_gpus()
    assert time.monotonic() - began < 30.0
    os.kill(killed[0].pid, signal.SIGKILL)
    killed[0].communicate()


def test_without_a_driver_there_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_gpus() is None


@pytest.mark.gpu
def test_gpus_here_are_those_of_torch() -> None:
    import torch

    seen = Topology.read().gpus
    assert len(seen) == torch.cuda.device_count()
    for index, gpu in enumerate(seen):
        properties = torch.cuda.get_device_properties(index)
        domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        assert gpu.pci == f"{domain:04x}:{bus:02x}:{device:02x}.0"


# --- this machine ----------------------------------------------------------------------------------------------------


def test_this_machine_is_what_lscpu_says() -> None:
    """util-linux reads the same files by a program of its own."""
    if shutil.which("lscpu") is None:
        pytest.skip("no lscpu")
    environment = {**os.environ, "LC_ALL": "C"}
    output = subprocess.run(["lscpu", "-p=CPU,CORE,NODE"], capture_output=True, text=True, check=True, env=environment).stdout
    allowed = os.sched_getaffinity(0)
    rows = [line.split(",") for line in output.splitlines() if not line.startswith("#")]
    rows = [row for row in rows if int(row[0]) in allowed]
    topology = Topology.read()
    assert topology.cores == tuple(sorted(int(cpu) for cpu, _, _ in rows))
    assert len(topology.physical_cores) == len({core for _, core, _ in rows})
    if topology.numa_known:
        node_of = {thread: node.index for node in topology.nodes for thread in node.cores}
        assert {int(cpu): int(node) for cpu, _, node in rows} == {thread: node_of[thread] for thread in topology.cores}


def test_affinity_of_the_process_is_respected() -> None:
    last = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{last}])\nfrom embodied_rl.sim.topology import Topology\nprint(Topology.read().cores)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert result.stdout.strip() == f"({last},)", result.stderr
