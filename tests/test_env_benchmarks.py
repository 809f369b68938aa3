"""The arithmetic of the environment benchmarks, by hand, and what their sides do; `test_benchmark_runs.py` runs the scripts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.test_benchmarks import columns, scripts_can_be_imported

__all__ = ["scripts_can_be_imported"]  # a fixture, used by all

# ---- env_transport --------------------------------------------------------------------------------------------------


def measured_of(**us: list[float]) -> dict[str, Any]:
    """{name: what a contest would have measured}."""
    from contest import Measured

    return {name: Measured(values, cpu_us=2 * values[0]) for name, values in us.items()}


def test_transport_figure_is_a_ratio_of_medians_to_the_faster_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    import env_transport

    monkeypatch.setattr(env_transport, "available_cores", lambda: 2)
    us = {
        "ours, gymnasium.Env, 1 worker, lockstep": [8.0, 8.0, 8.0],
        "ours, gymnasium.Env, 2 workers, halves": [3.0, 4.0, 50.0],  # median 4, mean 19: one outlier must not count
        "ours, native SimEnv, 2 workers, lockstep": [1.0, 2.0, 3.0],
        env_transport.ASYNC: [60.0, 64.0, 70.0],
        env_transport.ASYNC_VIEWS: [40.0, 48.0, 99.0],  # the faster of the two by its median, 48
        env_transport.SUBPROC: [96.0, 96.0, 96.0],
    }
    measured = measured_of(**us)
    # By hand: 48 / 4, 48 / 4 and 48 / 2.
    assert env_transport.figure("100 B", measured) == (
        "figure: AsyncVectorEnv / ours at 100 B: 12.0x by default; 12.0x at best (gymnasium.Env, 2 workers, halves); "
        "24.0x at best (native SimEnv, 2 workers, lockstep)"
    )
    rows = columns(env_transport.report("100 B", measured).splitlines(), below="100 B")
    assert next(iter(rows)) == "ours, native SimEnv, 2 workers, lockstep"
    assert rows["ours, gymnasium.Env, 2 workers, halves"] == ["4.00", "3.00", "50.00", "6.0", "12.0x"]
    assert rows[env_transport.SUBPROC] == ["96.00", "96.00", "96.00", "192.0", "0.5x"]
    # 64 / 4, 48 / 4 and 96 / 4; 4 µs are more than the 3 that we want.
    assert env_transport.ratios("100 B", measured) == (
        "100 B: ours 4.00 µs (reach: 3 µs, missed); to ours: gymnasium AsyncVectorEnv 16.0x, "
        "gymnasium AsyncVectorEnv, copy=False 12.0x, SB3 SubprocVecEnv 24.0x"
    )
    assert "(reach: 25 µs, kept)" in env_transport.ratios("224x224x3", measured)
    assert "reach" not in env_transport.ratios("4 KB", measured)


def test_prototype_takes_every_step_once_and_its_ratio_is_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    import env_transport
    from steppers import start

    (entry,) = [entry for entry in env_transport.against_prototype("100 B") if entry.name == "prototype, 2 workers"]
    stepper = start(dataclasses.replace(entry.side, num_envs=3))
    stepper.run(7)
    stepper.run(300)
    try:
        assert stepper.observations()[:, 0].tolist() == [307 % 256] * 3
    finally:
        stepper.close()
    us = {env_transport.our_name("native SimEnv", workers, False): [3.0, 8.0, 5.0] for workers in (1, 2, 4)}
    us |= {env_transport.prototype_name(workers): [2.0, 4.0, 5.0] for workers in (1, 2, 4)}
    # By hand: 1.5, 2 and 1, whose median is 1.5.
    rows = columns(env_transport.prototype_report("100 B", measured_of(**us)).splitlines(), below="100 B")
    assert rows["2"] == ["5.00", "4.00", "1.50x", "kept"]


def test_auto_is_held_against_every_other_setting() -> None:
    import auto_workers
    from auto_workers import Setting

    assert auto_workers.ratio([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == (2.0, pytest.approx(2 / 3**0.5))
    first, second, third = Setting(2, 1), Setting(2, 2), Setting(1, 2)
    asked: list[Setting] = []

    def seconds_of(setting: Setting) -> float:
        asked.append(setting)
        return {first: 1.0, second: 1.0, third: 2.0}[setting]

    pairs = auto_workers.compare(first, [first, second, third], seconds_of, until=0.0)
    assert pairs == {first: ([1.0] * 3, [1.0] * 3), second: ([1.0] * 3, [1.0] * 3), third: ([1.0] * 3, [2.0] * 3)}
    assert [asked.count(each) for each in (first, second, third)] == [6, 3, 3]  # auto's twice, to see the noise
    row = {"slots": 8, "auto": "2x1", "decided": True, "choosing_s": 3.0, "start_s": 0.4, "steps_per_s": 1000, "rounds": 9}
    behind = {"2x1": [1.0, 0.02], "2x2": [0.90, 0.03], "1x2": [1.8, 0.1]}
    noise = {"2x1": [1.0, 0.02], "2x2": [0.93, 0.03], "1x2": [1.8, 0.1]}
    rows = [
        {**row, "sim": "behind", "ratios": behind},
        {**row, "sim": "noise", "ratios": noise},
        {**row, "sim": "best", "ratios": {"2x1": [1.0, 0.02]}},
    ]
    assert auto_workers.worst(rows[0]) == ("2x2", 0.90, 0.03)
    text = auto_workers.report(rows)
    assert "behind 95% of the best setting with 1 of 3 simulators (behind)" in text
    assert text.endswith("its mean is at 95% or more with 1")
    assert text.splitlines()[0] == "|  | slots | 1 × 2 | 2 × 1 | 2 × 2 | auto took | chose in, s | decided after, s |"
    assert text.splitlines()[3] == "| noise | 8 | 1.80 ± 0.10 | 1.00 ± 0.02 | 0.93 ± 0.03 | 2x1 | 0.40 | 3 |"


def test_default_is_what_a_user_gets_who_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import env_transport

    from embodied_rl.config import SimConfig

    assert SimConfig("any", "any:thing").num_groups == 2
    for cores in (1, 2, 6, 64):
        monkeypatch.setattr(env_transport, "available_cores", lambda cores=cores: cores)
        assert env_transport.default_name() in [entry.name for entry in env_transport.entries("100 B")]


# ---- contest, steppers ----------------------------------------------------------------------------------------------


class _Process:
    """A side's process that takes a known time for a step, and may lose one of them."""

    def __init__(self, lost: int = 0) -> None:
        self.count, self.facts, self.pid = -lost, {"counts": [0] * 8}, 1

    def run(self, num_steps: int) -> Any:
        from gate import Segment

        self.count += num_steps
        self.facts = {"counts": [self.count % 256] * 8}
        return Segment(num_steps, 0.004 * num_steps, {})


def contender_of(monkeypatch: pytest.MonkeyPatch, process: _Process) -> Any:
    import contest
    from steppers import Env, Side

    monkeypatch.setattr(contest, "GatedProcess", lambda *_: process)
    return contest.Contender(contest.Entry("lossy", Side("plain", Env("no_op:NoOpEnv"), num_envs=8)))


def test_contender_counts_its_steps_and_its_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    contender = contender_of(monkeypatch, _Process())
    contender.calibrate(segment_s=0.2)
    assert contender.steps_per_segment == 50  # 0.2 s / 4 ms
    seconds = iter([1.0, 1.1, 2.0, 2.3, 3.0, 3.0, 4.0, 4.0])  # before and after each round: 0.4 s of the processors in all
    monkeypatch.setattr(contender, "_cpu_seconds", lambda: next(seconds))
    for _ in range(4):
        contender.measure()
    assert contender.measured.us == pytest.approx([500.0] * 4)  # 4 ms for 8 environments
    assert contender.measured.cpu_us == pytest.approx(0.4e6 / (4 * 50 * 8))
    contender.check_counts(256)  # 20 + 50 + 4 * 50 steps, more than 256: the count has gone round
    broken = contender_of(monkeypatch, _Process(lost=1))
    broken.segment(30)
    with pytest.raises(AssertionError, match=r"lossy: after 30 steps the environments report .*29"):
        broken.check_counts(256)


SIDES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_per_core": {"num_workers": 2},
    "ours": {"num_workers": 2},
    "ours halves": {"num_workers": 2, "options": {"mode": "halves"}},
    "ours asynchronous": {"num_workers": 2, "options": {"mode": "asynchronous", "min_ready": 2}},
    "async": {},
    "async views": {"options": {"copy": False}},
    "queue": {"num_workers": 2},
}


@pytest.mark.parametrize("name", SIDES)
def test_every_side_steps_every_environment_as_often_as_it_is_told(name: str) -> None:
    from steppers import Env, Side, start

    stepper = start(Side(name.split()[0], Env("no_op:NoOpEnv", {"num_floats": 3}), 4, **SIDES[name]))
    try:
        for num_steps, total in ((1, 1), (3, 4), (2, 6)):
            stepper.run(num_steps)
            np.testing.assert_array_equal(stepper.observations(), [[total, 1, 1]] * 4)
    finally:
        stepper.close()


def test_sides_do_the_same_work() -> None:
    from env_throughput import task_env
    from steppers import PlainStepper, Side, start

    env, seen = task_env("HalfCheetah-v5"), {}
    for kind in ("plain", "plain_per_core", "queue", "async"):
        # Seeds 0, 1, … on all of these.
        stepper = start(Side(kind, env, 4, num_workers=2))
        stepper.run(20)
        seen[kind] = np.array(stepper.observations())
        stepper.close()
    for kind, observation in seen.items():
        np.testing.assert_array_equal(observation, seen["plain"], err_msg=kind)
    # Independent of the loop: the same by hand.
    by_hand = PlainStepper(Side("plain", env, 4))
    one = env.make()
    one.reset(seed=2)
    for _ in range(20):
        last = one.step(next(by_hand._actions)[2])[0]
    np.testing.assert_array_equal(seen["plain"][2], last)
    one.close()
    by_hand.close()


@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_envpool_steps_every_environment_as_often_as_it_is_told(batch_size: int) -> None:
    pytest.importorskip("envpool")
    from env_throughput import task_env
    from steppers import EnvPoolStepper, Side

    stepper = EnvPoolStepper(Side("envpool", task_env("HalfCheetah-v5"), 4, 2, {"batch_size": batch_size}))
    pool, counts = stepper._pool, []
    real = pool.recv

    def recv(*arguments: Any, **options: Any) -> Any:
        answer = real(*arguments, **options)
        counts.append((answer[-1]["env_id"].copy(), answer[-1]["elapsed_step"].copy()))
        return answer

    pool.recv = recv  # its own `step` calls `recv` too
    stepper.run(5)
    stepper.run(7)
    stepper.close()
    assert sum(len(ids) for ids, _ in counts) == 12 * 4
    # An asynchronous pool may favour an environment, but all of them move, and what has been received was stepped once.
    for env_id in range(4):
        steps = [int(step) for ids, elapsed in counts for i, step in zip(ids, elapsed, strict=True) if i == env_id]
        assert steps == list(range(1, len(steps) + 1)), env_id
        assert steps, env_id


def test_side_without_its_library_is_left_out_and_named() -> None:
    from contest import Entry, only_possible
    from steppers import NEEDS, Env, Side

    env = Env("no_op:NoOpEnv")
    entries = [Entry("plain loop", Side("plain", env, 2)), Entry("a library's", Side("missing", env, 2))]
    NEEDS["missing"] = "no_such_library"
    possible, notes = only_possible(entries, [])
    assert [entry.name for entry in possible] == ["plain loop"]
    assert notes == [
        "left out: a library's ('no_such_library' is not installed here; --python missing=PATH names an interpreter that has it)"
    ]
    _, notes = only_possible(entries, [f"missing={sys.executable}"])
    assert "No module named 'no_such_library'" in notes[0]
    NEEDS["missing"] = "json"
    possible, notes = only_possible(entries, [f"missing={sys.executable}"])
    assert [entry.python for entry in possible] == [sys.executable] * 2
    assert notes == []


def test_side_survives_the_way_to_its_process() -> None:
    from env_throughput import entries
    from steppers import side_from_dict

    for entry in entries("Ant-v5", cores=2):
        assert side_from_dict(json.loads(json.dumps(dataclasses.asdict(entry.side)))) == entry.side


# ---- env_throughput -------------------------------------------------------------------------------------------------


def test_throughput_share_is_of_the_plain_loop_times_cores_in_the_same_round() -> None:
    import env_throughput

    measured = measured_of(
        **{
            env_throughput.PLAIN: [40.0, 20.0, 40.0],
            "ours, lockstep": [40.0, 40.0, 40.0],  # 40/2/40, 20/2/40, 40/2/40: median 0.5
            "ours, asynchronous": [25.0, 12.5, 20.0],  # 0.8, 0.8, 1.0
            "EnvPool, synchronous": [32.0, 16.0, 32.0],  # 0.625 each
            env_throughput.ASYNC: [200.0, 100.0, 200.0],  # 0.1 each
        }
    )
    shares = env_throughput.shares(measured, cores=2)
    assert shares["ours, asynchronous"] == pytest.approx([0.8, 0.8, 1.0])
    assert env_throughput.figure("HalfCheetah-v5", measured, 2) == (
        "figure: share of plain loop x 2 cores on HalfCheetah-v5: ours 0.80 (asynchronous); EnvPool 0.62 (synchronous); "
        "AsyncVectorEnv 0.10, 8.0x slower than ours (reach for ours: 0.75, kept)"
    )
    assert env_throughput.figure("Ant-v5", measured, 2).endswith("(reach for ours: 0.85, missed)")
    rows = columns(env_throughput.report("HalfCheetah-v5", measured, 2).splitlines(), below="HalfCheetah-v5")
    assert rows["ours, asynchronous"] == ["50,000", "0.80", "0.80", "1.00", "50.0", "10.0x"]
    assert rows[env_throughput.PLAIN] == ["25,000", "0.50", "0.50", "0.50", "80.0", "5.0x"]


# ---- maniskill ------------------------------------------------------------------------------------------------------


def test_maniskill_multiple_is_of_the_plain_loop_times_cores_in_the_same_round() -> None:
    import maniskill

    measured = measured_of(
        **{
            maniskill.PLAIN: [1800.0, 900.0, 1800.0],
            maniskill.SINGLES: [900.0, 450.0, 900.0],  # 1800/2/900: 1.0 each
            maniskill.BATCH: [300.0, 180.0, 360.0],  # 3.0, 2.5, 2.5
            maniskill.ASYNC: [1800.0, 900.0, 1800.0],  # 0.5 each
        }
    )
    assert maniskill.multiples(measured, cores=2)[maniskill.BATCH] == pytest.approx([3.0, 2.5, 2.5])
    assert maniskill.figure("PushCube-v1", measured, 2) == (
        "figure: PushCube-v1, multiple of ManiSkill's plain loop x 2 cores: ours, batch, lockstep 2.50; 5.0x AsyncVectorEnv "
        "(reach: 2.5, kept)"
    )
    assert maniskill.figure("PickCube-v1", measured, 2).endswith("(reach: 3.5, missed)")


@pytest.mark.slow
def test_maniskill_sides_see_the_same_episode() -> None:
    """Environment 0 of the plain loop begins with seed 0; ours is put there too."""
    pytest.importorskip("mani_skill")
    import maniskill
    from steppers import PlainStepper, Side

    from embodied_rl.sim.factory import SimFactory
    from embodied_rl.types import StepBuffers

    env = maniskill.task_env("PushCube-v1", batched=True)
    plain = PlainStepper(Side("plain", env, 2))
    by_hand = PlainStepper(Side("plain", env, 2))
    sim = SimFactory(**env.ours).make(2)
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([0, 1], [0, 1], out)
    for _ in range(20):
        sim.step([0, 1], next(by_hand._actions), out)
    plain.run(20)
    np.testing.assert_array_equal(plain.observations(), out.observation["state"])
    us, share = maniskill.physics_share("PushCube-v1", 2, 5, batched=True)
    assert us > 0
    assert 0 < share < 1
    for one in (plain, by_hand, sim):
        one.close()


# ---- env_memory, env_offload ----------------------------------------------------------------------------------------


def test_memory_figure_is_the_difference_of_medians() -> None:
    from env_memory import Memory, figure, more_mb, report

    pair = ([Memory(40.0, 30.0, 20.0), Memory(50.0, 30.0, 20.0), Memory(41.0, 30.0, 20.0)], [Memory(50.5, 31.0, 22.0)] * 3)
    assert more_mb(pair) == pytest.approx(9.5)
    assert figure({"no-op": pair}) == ("figure: resident memory of a worker beyond its simulator's own: no-op +9.5 MB (reach: 30 MB, kept)")
    (row,) = columns(report({"no-op": pair}).splitlines(), below="MB").values()
    assert row == ["41", "50", "+9.5", "30", "31", "+1.0", "20", "22", "+2.0"]
    heavy = ([Memory(40.0, 0.0, 0.0)], [Memory(71.0, 0.0, 0.0)])
    assert figure({"no-op": pair, "heavy": heavy}).endswith("heavy +31.0 MB (reach: 30 MB, missed)")


def test_memory_sees_what_a_process_holds() -> None:
    from env_memory import Memory

    code = "import sys; held = bytearray(b'x' * 100_000_000); print('ready', flush=True); sys.stdin.read()"
    sizes = []
    for text in (code, code.replace("100_000_000", "1")):
        with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline().strip() == b"ready"
            sizes.append(Memory.of(process.pid))
            process.stdin.close()
    for kind in ("rss", "pss", "uss"):
        assert getattr(sizes[0], kind) - getattr(sizes[1], kind) == pytest.approx(100.0, abs=3.0), kind


def test_offload_ratio_is_of_the_same_round() -> None:
    from env_offload import Offload, Warm, figure, report, report_warm

    one = Offload(
        kind="exact",
        bytes_per_slot=[1000.0, 1000.0, 1600.0],
        snapshot_ms=[1.0, 2.0, 9.0],
        offload_ms=[10.0, 10.0, 100.0],
        onload_ms=[30.0, 40.0, 300.0],
        anew_ms=[80.0, 100.0, 400.0],  # 80/40, 100/50, 400/400: median 2
        freed_mb=[90.0, 91.0, 92.0],
        drift=[0.0, 0.0, 0.0],
    )
    assert one.ratio == 2.0
    (row,) = columns(report({"cheetah": one}, 8, 2).splitlines(), below="8 slots").values()
    assert row == ["exact", "1,000", "2.0", "10", "40", "50", "100", "2.00x", "91", "none"]
    warm = Warm(switch_ms=[10.0, 20.0, 10.0], cold_ms=[40.0, 40.0, 50.0], steps_per_s=[9.0], steps_per_s_meanwhile=[5.0])
    assert "switch + reset 10 ms, cold start + reset 40 ms" in report_warm(warm)
    assert figure({"cheetah": one}, warm) == (
        "figure: offload + onload: cheetah 1,000 B/slot, 50 ms, exact; warm switch 4.0x faster than a cold start"
    )
    one.drift = [0.0, 0.003, 0.0]  # one round in three is enough
    assert figure({"cheetah": one}, None) == "figure: offload + onload: cheetah 1,000 B/slot, 50 ms, drift 0.003"


def test_both_no_op_environments_report_the_same_steps() -> None:
    from no_op import NoOpEnv, NoOpSim

    from embodied_rl.sim.robots.gymnasium import GymnasiumSim
    from embodied_rl.types import StepBuffers

    for kwargs, key in (({"num_floats": 5}, "state"), ({"image": 4}, "rgb")):
        sims = [NoOpSim(2, **kwargs), GymnasiumSim([NoOpEnv(**kwargs), NoOpEnv(**kwargs)])]
        assert sims[0].spec.observation == sims[1].spec.observation
        seen = []
        for sim in sims:
            out = StepBuffers.allocate(sim.spec, 2)
            sim.reset([0, 1], [7, 8], out)
            for ids in ([0, 1], [1], [1]):
                sim.step(ids, np.zeros((len(ids), 1), np.float32), out)
            seen.append(out.observation[key].reshape(2, -1).copy())
        np.testing.assert_array_equal(seen[0], seen[1])
        np.testing.assert_array_equal(seen[0][:, 0], [1, 3])
        np.testing.assert_array_equal(seen[0][:, 1:], 1)
