"""Where workers go on machines of one, two and eight nodes (worked out by hand), and that they really are there on this one."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.errors import UserError
from embodied_rl.sim.affinity import (
    Placement,
    PlacementPolicy,
    choose_policy,
    describe_placements,
    describe_topology,
    place_workers,
    plan_placement,
)
from embodied_rl.sim.topology import Gpu, NumaNode, Topology
from tests.sim.fake_sysfs import FakeNode, adjacent_siblings, build, eight_nodes, far_siblings, single_threads, status, two_nodes

FIRST, SECOND = "0000:41:00.0", "0000:c1:00.0"
"""Two PCI addresses in their order."""
QUIET = Path("/there-is-no-quota-here")


def cores(placements: list[Placement]) -> list[tuple[int, ...]]:
    return [placement.cores for placement in placements]


def nodes(placements: list[Placement]) -> list[int | None]:
    return [placement.node for placement in placements]


# --- one node --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["pack", "spread"])
@pytest.mark.parametrize(
    ("num_workers", "expected"),
    [
        (1, [(0, 1, 2, 3)]),
        (2, [(0, 1), (2, 3)]),
        (3, [(0,), (1,), (2,)]),  # as many for each: core 3 is left to others
        (4, [(0,), (1,), (2,), (3,)]),
        (6, [(0,), (1,), (2,), (3,), (0,), (1,)]),
    ],
)
def test_one_node_of_four_cores(tmp_path: Path, policy: PlacementPolicy, num_workers: int, expected: list[tuple[int, ...]]) -> None:
    topology = Topology.read(build(tmp_path, single_threads(4), {0: FakeNode("0-3", distances="10")}))
    plan = plan_placement(topology, num_workers, policy)
    assert cores(plan) == expected
    assert nodes(plan) == [0] * num_workers
    assert {placement.memory_nodes for placement in plan} == {(0,)}
    assert [placement.worker for placement in plan] == list(range(num_workers))
    assert [placement.shares_with for placement in plan] == ([(4,), (5,), (), (), (0,), (1,)] if num_workers == 6 else [()] * num_workers)


def test_machine_without_numa_is_pinned_and_its_memory_left_alone(tmp_path: Path) -> None:
    topology = Topology.read(build(tmp_path, far_siblings(2)))
    plan = plan_placement(topology, 2, "spread")
    assert cores(plan) == [(0, 2), (1, 3)]
    assert [(placement.node, placement.memory_nodes) for placement in plan] == [(None, ()), (None, ())]


def test_none_pins_nothing(tmp_path: Path) -> None:
    expected = [Placement(0), Placement(1), Placement(2)]
    assert plan_placement(Topology.read(two_nodes(tmp_path)), 3, "none") == expected
    assert not expected[0].cores


# --- two nodes: node 0 has the physical cores (0, 8) (1, 9) (2, 10) (3, 11), node 1 (4, 12) (5, 13) (6, 14) (7, 15) ----


@pytest.mark.parametrize(
    ("policy", "num_workers", "expected"),
    [
        ("spread", 1, [(0, 1, 2, 3, 8, 9, 10, 11)]),
        ("spread", 2, [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        # Node 0 holds two, so the one on node 1 gets two cores as well.
        ("spread", 3, [(0, 1, 8, 9), (4, 5, 12, 13), (2, 3, 10, 11)]),
        ("spread", 4, [(0, 1, 8, 9), (4, 5, 12, 13), (2, 3, 10, 11), (6, 7, 14, 15)]),
        ("spread", 5, [(0, 8), (4, 12), (1, 9), (5, 13), (2, 10)]),
        ("spread", 8, [(0, 8), (4, 12), (1, 9), (5, 13), (2, 10), (6, 14), (3, 11), (7, 15)]),
        # More than physical cores: a thread each, second threads last.
        ("spread", 10, [(0,), (4,), (1,), (5,), (2,), (6,), (3,), (7,), (8,), (12,)]),
        ("pack", 2, [(0, 1, 8, 9), (2, 3, 10, 11)]),
        ("pack", 3, [(0, 8), (1, 9), (2, 10)]),
        ("pack", 4, [(0, 8), (1, 9), (2, 10), (3, 11)]),
        ("pack", 5, [(0, 8), (1, 9), (2, 10), (3, 11), (4, 12)]),
        ("pack", 10, [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (9,)]),
    ],
)
def test_two_nodes(tmp_path: Path, policy: PlacementPolicy, num_workers: int, expected: list[tuple[int, ...]]) -> None:
    plan = plan_placement(Topology.read(two_nodes(tmp_path)), num_workers, policy)
    assert cores(plan) == expected
    home = {core: 0 if core % 8 < 4 else 1 for core in range(16)}
    assert nodes(plan) == [home[own[0]] for own in expected]
    assert [placement.memory_nodes for placement in plan] == [(home[own[0]],) for own in expected]


def test_two_threads_of_a_core_are_shared_and_that_is_said(tmp_path: Path) -> None:
    plan = plan_placement(Topology.read(two_nodes(tmp_path)), 10, "pack")
    assert {p.worker: p.shares_with for p in plan if p.shares_with} == {0: (8,), 1: (9,), 8: (0,), 9: (1,)}
    said = dict(describe_placements(plan))
    assert said["shared"].startswith("4 of 10 workers share")


def test_more_workers_than_threads_go_round_again(tmp_path: Path) -> None:
    plan = plan_placement(Topology.read(two_nodes(tmp_path)), 18, "spread")
    # 8 on physical cores, 8 on second threads, and the last two on the first threads again.
    assert cores(plan)[8:] == [(8,), (12,), (9,), (13,), (10,), (14,), (11,), (15,), (0,), (4,)]
    assert plan[0].shares_with == (8, 16)
    assert plan[16].shares_with == (0, 8)


def test_threads_numbered_side_by_side(tmp_path: Path) -> None:
    tree = build(tmp_path, adjacent_siblings(8), {0: FakeNode("0-7", distances="10 21"), 1: FakeNode("8-15", distances="21 10")})
    topology = Topology.read(tree)
    assert cores(plan_placement(topology, 4, "pack")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert cores(plan_placement(topology, 4, "spread")) == [(0, 1, 2, 3), (8, 9, 10, 11), (4, 5, 6, 7), (12, 13, 14, 15)]
    assert cores(plan_placement(topology, 9, "pack")) == [(0,), (2,), (4,), (6,), (8,), (10,), (12,), (14,), (1,)]


def test_cpuset_is_kept_to_and_uneven_nodes_get_their_part(tmp_path: Path) -> None:
    # Left: node 0 the core (3, 11); node 1 the cores (4,), (5,), (6,).
    files = status("3-6,11", "1")
    topology = Topology.read(two_nodes(tmp_path, files=files))
    plan = plan_placement(topology, 4, "spread")
    # Fullness afterwards, node 0 against node 1: 1/1 : 1/3, 1/1 : 2/3, 1/1 : 3/3 (lower number first), then node 1.
    assert nodes(plan) == [1, 1, 0, 1]
    assert cores(plan) == [(4,), (5,), (3, 11), (6,)]
    # Node 0's memory is not ours: its worker takes that of node 1.
    assert [placement.memory_nodes for placement in plan] == [(1,)] * 4
    # The fifth finds the second thread of core 3, the only one that is left; all have one thread each then.
    assert cores(plan_placement(topology, 5, "spread")) == [(4,), (5,), (3,), (6,), (11,)]


# --- near a GPU ------------------------------------------------------------------------------------------------------


def test_near_the_gpu_of_two_nodes(tmp_path: Path) -> None:
    topology = Topology.read(two_nodes(tmp_path, gpus={FIRST: 1, SECOND: 0}))
    plan = plan_placement(topology, 4, "near_gpu")
    assert cores(plan) == [(4, 12), (5, 13), (6, 14), (7, 15)]
    assert [placement.gpu for placement in plan] == [0] * 4
    assert cores(plan_placement(topology, 2, "near_gpu", gpus=(1,))) == [(0, 1, 8, 9), (2, 3, 10, 11)]
    # The fifth finds the near node full, and goes to the other while that has whole cores.
    assert nodes(plan_placement(topology, 5, "near_gpu")) == [1, 1, 1, 1, 0]


def test_near_the_gpu_of_eight_nodes_goes_by_distance(tmp_path: Path) -> None:
    topology = Topology.read(eight_nodes(tmp_path, gpus={SECOND: 5}))
    plan = plan_placement(topology, 9, "near_gpu")
    # Node 5 first, then 4, 6 and 7 of its socket (distance 12), then the other socket (32); two cores on each.
    assert nodes(plan) == [5, 5, 4, 4, 6, 6, 7, 7, 0]
    assert cores(plan) == [(10,), (11,), (8,), (9,), (12,), (13,), (14,), (15,), (0,)]
    assert [placement.memory_nodes for placement in plan] == [(5,), (5,), (4,), (4,), (6,), (6,), (7,), (7,), (0,)]


def test_workers_go_to_the_gpus_in_blocks(tmp_path: Path) -> None:
    topology = Topology.read(eight_nodes(tmp_path, gpus={FIRST: 1, SECOND: 5}))
    plan = plan_placement(topology, 6, "near_gpu", gpus=(0, 1))
    assert [placement.gpu for placement in plan] == [0, 0, 0, 1, 1, 1]
    assert nodes(plan) == [1, 1, 0, 5, 5, 4]
    # A worker's number is not a GPU's: GPU 1 alone serves all, and 5 workers on 2 GPUs are 3 and 2.
    assert [placement.gpu for placement in plan_placement(topology, 3, "near_gpu", gpus=(1,))] == [1, 1, 1]
    assert [placement.gpu for placement in plan_placement(topology, 5, "near_gpu", gpus=(0, 1))] == [0, 0, 0, 1, 1]


def test_gpus_on_one_node_share_it_fairly(tmp_path: Path) -> None:
    topology = Topology.read(eight_nodes(tmp_path, gpus={FIRST: 5, SECOND: 5}))
    plan = plan_placement(topology, 4, "near_gpu", gpus=(0, 1))
    # One of each GPU gets one of the node's two cores; the others go next door together.
    assert [(placement.gpu, placement.node) for placement in plan] == [(0, 5), (0, 4), (1, 5), (1, 4)]
    assert cores(plan) == [(10,), (8,), (11,), (9,)]


def test_gpu_on_a_node_without_usable_cores_sends_workers_next_door(tmp_path: Path) -> None:
    files = status("0-9,14-15")  # nodes 5 and 6 belong to somebody else
    topology = Topology.read(eight_nodes(tmp_path, gpus={SECOND: 5}, files=files))
    assert nodes(plan_placement(topology, 5, "near_gpu")) == [4, 4, 7, 7, 0]


def test_gpu_whose_node_is_not_known_is_not_taken_for_node_0(tmp_path: Path) -> None:
    topology = Topology.read(two_nodes(tmp_path, gpus={FIRST: -1}))
    plan = plan_placement(topology, 4, "near_gpu")
    assert cores(plan) == cores(plan_placement(topology, 4, "spread"))
    assert {(placement.gpu, placement.note) for placement in plan} == {
        (None, "the NUMA node of GPU 0 is not reported, so workers are spread")
    }
    assert dict(describe_placements(plan))["instead"] == plan[0].note


def test_memory_of_a_node_without_any_comes_from_the_nearest(tmp_path: Path) -> None:
    # Node 0 has cores alone, node 2 memory alone; 2 is nearer to 0 than 1 is.
    nodes_here = {
        0: FakeNode("0-1", memory_gib=0, distances="10 40 17"),
        1: FakeNode("2-3", distances="40 10 40"),
        2: FakeNode("", memory_gib=64, distances="17 40 10"),
    }
    topology = Topology.read(build(tmp_path, single_threads(4), nodes_here))
    plan = plan_placement(topology, 4, "spread")
    assert nodes(plan) == [0, 1, 0, 1]  # nobody runs on node 2
    assert [placement.memory_nodes for placement in plan] == [(2,), (1,), (2,), (1,)]


# --- auto ------------------------------------------------------------------------------------------------------------


def test_auto_chooses_by_machine(tmp_path: Path) -> None:
    two = Topology.read(two_nodes(tmp_path / "two"))
    assert choose_policy(two, cgroup_root=QUIET) == "spread"
    near = Topology.read(two_nodes(tmp_path / "near", gpus={FIRST: 1}))
    assert choose_policy(near, cgroup_root=QUIET) == "near_gpu"
    assert choose_policy(near, gpus=(0, 1), cgroup_root=QUIET) == "spread"  # there is no GPU 1
    assert choose_policy(Topology.read(two_nodes(tmp_path / "vm", gpus={FIRST: -1})), cgroup_root=QUIET) == "spread"
    one = Topology.read(build(tmp_path / "one", single_threads(64), {0: FakeNode("0-63")}, gpus={FIRST: 0}))
    assert choose_policy(one, cgroup_root=QUIET) == "none"
    # One core on one node and two on the other: too few to be told where to run.
    small = status("3-5")
    assert choose_policy(Topology.read(two_nodes(tmp_path / "small", files=small)), cgroup_root=QUIET) == "none"
    # Eight cores, but of one node.
    half = status("0-3,8-11")
    assert choose_policy(Topology.read(two_nodes(tmp_path / "half", files=half)), cgroup_root=QUIET) == "none"


@pytest.mark.parametrize(("quota", "pinned"), [("max 100000", True), ("1600000 100000", True), ("1500000 100000", False)])
def test_auto_pins_nothing_under_a_quota(tmp_path: Path, quota: str, pinned: bool) -> None:
    """A quota of 15 of 16 cores: the rest of the machine belongs to others, who may be pinned to the same cores."""
    root = two_nodes(tmp_path, gpus={FIRST: 1}, files={"sys/fs/cgroup/cpu.max": quota})
    assert nodes(place_workers(2, root=root)) == ([1, 1] if pinned else [None, None])


def test_wrong_wishes_are_refused(tmp_path: Path) -> None:
    topology = Topology.read(two_nodes(tmp_path, gpus={FIRST: 0}))
    with pytest.raises(UserError, match=r"near_gpu needs GPU 3, which does not exist; .*: 0 \(0000:41:00.0\)\. Choose spread, pack"):
        plan_placement(topology, 2, "near_gpu", gpus=(0, 3))
    with pytest.raises(UserError, match="none is set"):
        plan_placement(topology, 2, "near_gpu", gpus=())
    with pytest.raises(UserError, match=r"'spred' is not a choice\. Did you mean 'spread'"):
        plan_placement(topology, 2, "spred")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="at least one worker"):
        plan_placement(topology, 0, "spread")


# --- what holds for every machine ------------------------------------------------------------------------------------


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Up to four nodes of up to four cores of one or two threads, numbered in any order, with any distances."""
    widths = [[draw(st.integers(1, 2)) for _ in range(draw(st.integers(0, 4)))] for _ in range(draw(st.integers(1, 4)))]
    if not any(widths):
        widths[0] = [1]
    numbers = draw(st.permutations(range(sum(map(sum, widths)))))
    supply = iter(numbers)
    members = [[tuple(sorted(next(supply) for _ in range(width))) for width in node] for node in widths]
    count = len(widths)
    rows = [[10 if a == b else draw(st.integers(11, 40)) for b in range(count)] for a in range(count)]
    built = tuple(
        NumaNode(index, tuple(sorted(itertools.chain(*own))), 1, 1, dict(enumerate(rows[index]))) for index, own in enumerate(members)
    )
    gpus = (Gpu(0, FIRST, draw(st.integers(0, count - 1))),)
    return Topology(built, True, tuple(sorted(itertools.chain(*members))), tuple(range(count)), gpus)


@given(machines(), st.integers(1, 40), st.sampled_from(["pack", "spread", "near_gpu"]))
def test_nobody_shares_a_core_while_another_is_free(topology: Topology, num_workers: int, policy: PlacementPolicy) -> None:
    plan = plan_placement(topology, num_workers, policy)
    assert plan == plan_placement(topology, num_workers, policy)
    home = {thread: core for core in topology.physical_cores for thread in core}
    used = [{home[thread] for thread in placement.cores} for placement in plan]
    num_physical, num_threads = len(topology.physical_cores), len(topology.cores)
    if num_workers <= num_physical:
        assert sum(map(len, used)) == len(set().union(*used))  # disjoint
        assert len({len(own) for own in used}) == 1
        assert not any(placement.shares_with for placement in plan)
    else:
        assert set().union(*used) == set(topology.physical_cores)
        if num_workers <= num_threads:
            assert len({placement.cores for placement in plan}) == num_workers
        else:
            assert {placement.cores for placement in plan} == {(thread,) for thread in topology.cores}
    for placement, own in zip(plan, used, strict=True):
        assert placement.node is not None
        assert own <= set(topology.usable_in(placement.node))
        assert placement.memory_nodes == (placement.node,)
        assert set(placement.shares_with) == {b for b, other in enumerate(used) if b != placement.worker and own & other}


@given(machines(), st.integers(1, 16))
def test_near_and_spread_are_as_good_as_can_be(topology: Topology, num_workers: int) -> None:
    """Against every way to distribute the workers over the nodes."""
    room = {node.index: len(topology.usable_in(node.index)) for node in topology.nodes}
    num_workers = min(num_workers, sum(room.values()))
    ways = [way for way in itertools.product(*(range(size + 1) for size in room.values())) if sum(way) == num_workers]
    near, spread = (plan_placement(topology, num_workers, policy) for policy in ("near_gpu", "spread"))
    start = topology.gpus[0].node
    assert start is not None
    costs = [topology.nodes[start].distances[node] for node in room]
    assert sum(costs[placement.node or 0] for placement in near) == min(
        sum(number * cost for number, cost in zip(way, costs, strict=True)) for way in ways
    )
    fullest = max(sum(placement.node == node for placement in spread) / size for node, size in room.items() if size)
    assert fullest == min(max(number / size for number, size in zip(way, room.values(), strict=True) if size) for way in ways)


# --- in words --------------------------------------------------------------------------------------------------------


def test_description_names_nodes_gpus_and_workers(tmp_path: Path) -> None:
    topology = Topology.read(two_nodes(tmp_path, gpus={SECOND: 1}, files=status("2-15")))
    rows = [*describe_topology(topology), *describe_placements(plan_placement(topology, 3, "near_gpu"))]
    assert [f"{name}: {text}" for name, text in rows] == [
        "node 0: cores 0-3,8-11 (usable: 2-3,8-11); 4 physical, 6 hardware threads; 8.0 GiB, 6.0 free; distances 0:10 1:21",
        "node 1: cores 4-7,12-15; 4 physical, 8 hardware threads; 8.0 GiB, 6.0 free; distances 0:21 1:10",
        "GPU 0: 0000:c1:00.0, node 1, NVIDIA",
        "node 1: worker 0 on 4,12, 1 on 5,13, 2 on 6,14; memory of node 1",
    ]
    assert describe_placements(plan_placement(topology, 3, "none")) == [("workers", "3, not pinned: the kernel places them")]


# --- really ----------------------------------------------------------------------------------------------------------


def in_a_process(body: str) -> dict[str, Any]:
    """Run statements that fill `result` in a fresh interpreter; what the kernel's files say about it comes along."""
    code = f"""
import json, os, re
for name in list(os.environ):
    if name.endswith('_NUM_THREADS'):
        del os.environ[name]
from embodied_rl.sim.affinity import *
result = {{}}
{body}
result["allowed"] = re.search(r"Cpus_allowed_list:\\s*(\\S+)", open("/proc/self/status").read())[1]
try:
    result["policies"] = sorted({{line.split()[1] for line in open("/proc/self/numa_maps")}})
except FileNotFoundError:
    pass  # a kernel without NUMA
print(json.dumps(result))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)  # type: ignore[no-any-return]


def test_one_core_and_one_node_are_set_and_read_back() -> None:
    core = max(os.sched_getaffinity(0))
    topology = Topology.read()
    memory = topology.memory_nodes[:1]
    said = in_a_process(f"result = apply_placement({[core]}, {memory})")
    assert said["cores"] == [core]
    assert said["allowed"] == str(core)
    if said["memory_policy"].startswith("unavailable"):
        assert said["problems"] or not memory
    else:
        # The kernel's own listing of this process' memory agrees.
        assert said["problems"] == []
        assert said["memory_policy"] == (f"preferred:{memory[0]}" if memory else "default")
        assert not memory or f"prefer:{memory[0]}" in said["policies"]


def test_nothing_asked_for_nothing_changed() -> None:
    said = in_a_process("result = apply_placement((), ())")
    assert said["cores"] == sorted(os.sched_getaffinity(0))
    assert said["problems"] == []
    assert said["memory_policy"].split(":")[0] in ("default", "unavailable")


def test_threads_that_exist_already_and_children_are_pinned_too() -> None:
    core = max(os.sched_getaffinity(0))
    said = in_a_process(f"""
import subprocess, sys, threading
ready, done = threading.Event(), threading.Event()
def other():
    ready.set()
    done.wait()
    result["thread"] = sorted(os.sched_getaffinity(0))
thread = threading.Thread(target=other)
thread.start()
ready.wait()
apply_placement([{core}], [])
done.set()
thread.join()
result["child"] = subprocess.check_output([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"], text=True).strip()
""")
    assert said["thread"] == [core]
    assert said["child"] == f"[{core}]"


def test_what_cannot_be_had_is_said_and_nothing_breaks() -> None:
    said = in_a_process("result = apply_placement([1023], [1000])")
    assert said["cores"] == sorted(os.sched_getaffinity(0))
    assert said["memory_policy"].startswith("unavailable: set_mempolicy preferred:1000: ")
    assert [problem.partition(":")[0] for problem in said["problems"]] == [
        "cores 1023 cannot be set",
        "memory is not taken from node 1000",
        "asked for cores 1023, got " + said["allowed"],
    ]


SECCOMP = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
# Load the call's number; return EPERM for set_mempolicy and get_mempolicy (x86-64), else allow.
lines = [(0x20, 0, 0, 0), (0x15, 1, 0, 238), (0x15, 0, 1, 239), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(len(lines), ctypes.addressof(code))
one = ctypes.c_ulong(1)
assert libc.prctl(38, one, *[ctypes.c_ulong(0)] * 3) == 0
result["filtered"] = libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(program), *[ctypes.c_ulong(0)] * 2) == 0
"""
"""The filter that container runtimes set for processes without the capability SYS_NICE, for these two calls."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is written for x86-64")
def test_container_that_forbids_memory_policies() -> None:
    said = in_a_process(f"{SECCOMP}\nresult['policy'] = set_memory_policy((0,))\nresult['now'] = set_memory_policy(())")
    if not said["filtered"]:
        pytest.skip("this kernel has no seccomp filters")
    assert said["policy"] == "unavailable: set_mempolicy preferred:0: not permitted here (containers need the capability SYS_NICE)"
    assert said["now"].startswith("unavailable: get_mempolicy: not permitted")


def test_thread_pools_are_limited_and_torch_is_not_imported_for_it() -> None:
    said = in_a_process("""
import sys
limit_threads(1)
result["torch before"] = "torch" in sys.modules
import numba, torch
result["as loaded"] = [torch.get_num_threads(), numba.get_num_threads()]
torch.set_num_threads(2)
limit_threads(1)
result["again"] = [torch.get_num_threads(), numba.get_num_threads()]
result["environment"] = [os.environ["OMP_NUM_THREADS"], os.environ["LP_NUM_THREADS"]]
""")
    assert said["torch before"] is False
    assert said["as loaded"] == [1, 1]  # the variables arrived
    assert said["again"] == [1, 1]
    assert said["environment"] == ["1", "0"]  # the rasteriser counts the threads beside the one that draws
