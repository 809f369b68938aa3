"""The planner's simulation against closed forms, second implementations and a real run of processes that sleep."""

from __future__ import annotations

import math
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from embodied_rl.config.hybrid import BatchTimeConfig, ClusterConfig, NodesConfig, PlacementConfig, SpreadConfig, WorkloadConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.placement import Cluster, resolve
from embodied_rl.planning.model import costs, plan, simulate
from embodied_rl.planning.stations import (
    EpisodeRun,
    EpisodeSimulation,
    EventClock,
    Station,
    iterations,
    pipelined_rollout,
    slowest_of,
    stage_steps,
)

EIGHT = Cluster(ClusterConfig((NodesConfig(gpus=8, cores=64, memory_gib=1000),)))


def workload(**changes: Any) -> WorkloadConfig:
    fields: dict[str, Any] = {
        "num_slots": 64,
        "act": {"base_s": 0.1, "per_row_s": 0.01},
        "train_per_decision_s": 0.01,
        "rollout_steps": 16,
        "step": {"median": 0.02},
    }
    return WorkloadConfig.from_dict({**fields, **changes})


# ---- lockstep -------------------------------------------------------------------------------------------------------


def constant(step_s: float, act_s: float, num_rounds: int, num_stages: int, *, shared: bool = False) -> float:
    shape = (1, num_rounds, num_stages)
    return float(pipelined_rollout(np.full(shape, step_s), np.full(shape, act_s), shared=shared)[0])


@pytest.mark.parametrize(("step_s", "act_s"), [(3.0, 2.0), (1.0, 4.0), (2.0, 2.0)])
def test_rollouts_of_constant_times_have_closed_forms(step_s: float, act_s: float) -> None:
    rounds = 7
    assert constant(step_s, act_s, rounds, 1) == pytest.approx(rounds * (step_s + act_s))
    # The slower side never waits, except for the other's first or last turn.
    assert constant(step_s, act_s, rounds, 2) == pytest.approx(2 * rounds * max(step_s, act_s) + min(step_s, act_s))
    assert constant(step_s, act_s, rounds, 3, shared=True) == pytest.approx(3 * rounds * (step_s + act_s))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_random_times_agree_with_the_event_simulation(num_stages: int) -> None:
    rng, rounds = np.random.default_rng(num_stages), 9
    step_s, act_s = rng.lognormal(size=(1, rounds, num_stages)), rng.lognormal(size=(1, rounds, num_stages))
    clock = EventClock()
    finished: list[int] = []

    def acted(job: tuple[int, int]) -> None:
        stage, t = job
        if t + 1 < rounds:
            env.put((stage, t + 1))
        else:
            finished.append(stage)

    env = Station(clock, 1, lambda jobs: float(step_s[0, jobs[0][1], jobs[0][0]]), lambda job: act.put(job))
    act = Station(clock, 1, lambda jobs: float(act_s[0, jobs[0][1], jobs[0][0]]), acted)
    for stage in range(num_stages):
        env.put((stage, 0))
    clock.run(lambda: len(finished) == num_stages)
    # Stages are served in turns there and first come, first served here: in a ring of two stations that is the same order.
    assert pipelined_rollout(step_s, act_s, shared=False)[0] == pytest.approx(clock.now_s)


def test_steps_of_a_stage() -> None:
    rng = np.random.default_rng(0)
    # 10 environments on 4 cores: some core has three.
    assert stage_steps(rng, (1, 2, 1), 10, 4.0, 0.5, 0.0) == pytest.approx(1.5)
    # Half a core: twice as long.
    assert stage_steps(rng, (1, 2, 1), 3, 0.5, 0.5, 0.0) == pytest.approx(3.0)
    # One environment per core: the largest of n lognormals; P(max <= x) = Φ(ln x / σ)^n, so its median is exp(σ Φ⁻¹(2^(-1/n))).
    drawn = stage_steps(rng, (400, 20, 1), 16, 16.0, 1.0, 0.7).reshape(-1)
    from statistics import NormalDist

    assert float(np.median(drawn)) == pytest.approx(math.exp(0.7 * NormalDist().inv_cdf(2 ** (-1 / 16))), rel=0.03)
    # Two on one core: their sum, of mean 2 exp(σ²/2).
    drawn = stage_steps(rng, (400, 20, 1), 2, 1.0, 1.0, 0.5)
    assert float(drawn.mean()) == pytest.approx(2 * math.exp(0.125), rel=0.03)


def test_iterations_overlap_as_far_as_staleness_allows() -> None:
    rollouts = np.full(40, 3.0)

    def period(max_staleness: int, train_s: float, *, overlap: bool = True) -> float:
        published = iterations(rollouts, train_s, 0.5, max_staleness, overlap=overlap)
        return float(published[-1] - published[-11]) / 10

    assert period(0, 2.0, overlap=False) == pytest.approx(5.5)
    assert period(0, 2.0) == pytest.approx(5.5), "without staleness, devices of their own do not help"
    assert period(1, 2.0) == pytest.approx(3.0)
    assert period(1, 5.0) == pytest.approx(5.5)


def test_the_slowest_of_many() -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(10, 2, (4000, 64)).max(axis=1).mean()
    assert slowest_of(rng.normal(10, 2, 4000), 64) == pytest.approx(truth, rel=0.02)
    assert slowest_of(np.asarray([1.0, 3.0]), 1) == 2.0


# ---- stations -------------------------------------------------------------------------------------------------------


def test_the_queue_of_constant_service_waits_as_theory_says() -> None:
    """M/D/1: the mean wait is ρ·s / (2·(1 − ρ))."""
    rng, clock, service, load, count = np.random.default_rng(2), EventClock(), 1.0, 0.7, 60_000
    arrived: dict[int, float] = {}
    waits: list[float] = []
    station = Station(clock, 1, lambda jobs: service, lambda job: waits.append(clock.now_s - arrived[job] - service))

    def arrive(number: int) -> None:
        arrived[number] = clock.now_s
        station.put(number)
        if number + 1 < count:
            clock.after(float(rng.exponential(service / load)), arrive, number + 1)

    clock.after(0.0, arrive, 0)
    clock.run(lambda: len(waits) == count)
    assert float(np.mean(waits)) == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)
    assert station.busy_s == pytest.approx(count * service)


def test_batches_are_shared_by_idle_servers_and_servers_can_leave() -> None:
    clock, done = EventClock(), {}
    station = Station(clock, 2, lambda jobs: 1.0 + 0.1 * len(jobs), lambda job: done.__setitem__(job, clock.now_s), batches=True)
    for number in range(6):
        station.put(number)
    left: list[float] = []
    clock.after(0.5, lambda: station.resize(1, lambda: left.append(clock.now_s)))
    clock.after(0.6, lambda: [station.put(number) for number in range(6, 10)])
    clock.run(lambda: len(done) == 10)
    # Two batches of three take 1.3 s; then the one server that stays takes all four: 1.4 s more.
    assert [done[number] for number in range(6)] == pytest.approx([1.3] * 6)
    assert [done[number] for number in range(6, 10)] == pytest.approx([2.7] * 4)
    assert left == pytest.approx([1.3])


# ---- episodes -------------------------------------------------------------------------------------------------------


def episode_run(**changes: Any) -> EpisodeRun:
    fields: dict[str, Any] = {
        "num_slots": 4,
        "num_cores": 4.0,
        "num_devices": 1,
        "devices_while_training": 0,
        "groups_per_batch": 2,
        "group_size": 2,
        "length": SpreadConfig(3.0),
        "step": SpreadConfig(1.0),
        "act": BatchTimeConfig(0.3, 0.05),
        "train_s": lambda decisions: 0.5 * decisions,
        "publish_s": 0.25,
    }
    return EpisodeRun(**{**fields, **changes})


def test_synchronous_episodes_by_hand() -> None:
    outcome = EpisodeSimulation(episode_run(), np.random.default_rng(0)).simulate(3)
    # Four slots step side by side and are acted for together: 3 × (1 + 0.3 + 4 × 0.05) = 4.5; 12 decisions train 6 s; 0.25 s to publish.
    assert outcome.published_s == pytest.approx([10.75, 21.5, 32.25])
    assert outcome.decisions == [12, 12, 12]
    assert outcome.ages == {0: 6}
    assert outcome.devices.busy_s == pytest.approx(3 * 3 * 0.5)
    assert outcome.cores.busy_s == pytest.approx(3 * 4 * 3 * 1.0)


def test_asynchronous_episodes_take_as_long_as_the_slower_side() -> None:
    fast = episode_run(devices_while_training=1, max_staleness=1, train_s=lambda decisions: 2.0, publish_s=0.0)
    published = EpisodeSimulation(fast, np.random.default_rng(0)).simulate(12).published_s
    # Generation never stands still: a batch every 4.5 s.
    assert np.diff(published[2:]) == pytest.approx([4.5] * 9)
    slow = episode_run(devices_while_training=1, max_staleness=1, train_s=lambda decisions: 7.0, publish_s=0.0)
    published = EpisodeSimulation(slow, np.random.default_rng(0)).simulate(12).published_s
    assert np.diff(published[2:]) == pytest.approx([7.0] * 9)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_older_than_allowed_whatever_the_tails(max_staleness: int, seed: int) -> None:
    run = episode_run(
        num_slots=24,
        max_staleness=max_staleness,
        devices_while_training=1,
        length=SpreadConfig(3.0, 1.2, most=60),
        step=SpreadConfig(0.5, 1.0),
        train_s=lambda decisions: 0.05 * decisions,
    )
    outcome = EpisodeSimulation(run, np.random.default_rng(seed)).simulate(20)
    assert max(outcome.ages) <= max_staleness
    assert sum(outcome.ages.values()) == 2 * len(outcome.decisions)
    assert 20 <= len(outcome.decisions) <= 21
    assert np.all(np.diff(outcome.published_s) > 0)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_the_model_of_the_group_queue_is_as_fast_as_the_group_queue(max_staleness: int) -> None:
    from embodied_rl.config import GroupsConfig
    from tests.rollout.test_groups_throughput import Simulation

    sigma, size, groups, slots, train_s, steps = 0.8, 4, 8, 48, 2.0, 60
    rng = np.random.default_rng(4)
    queue = GroupsConfig(group_size=size, groups_per_step=groups, max_staleness=max_staleness)
    real = Simulation(queue, lambda assignment: float(np.exp(sigma * rng.standard_normal())), slots, train_s).run(steps).publish_times_s
    run = episode_run(
        num_slots=slots,
        num_cores=float(slots),
        devices_while_training=1,
        groups_per_batch=groups,
        group_size=size,
        length=SpreadConfig(1.0),
        step=SpreadConfig(1.0, sigma),
        act=BatchTimeConfig(1e-6),
        train_s=lambda decisions: train_s,
        publish_s=0.0,
        max_staleness=max_staleness,
    )
    model = EpisodeSimulation(run, np.random.default_rng(5)).simulate(steps).published_s
    periods = [float(times[-1] - times[9]) / (steps - 10) for times in (real, model)]
    assert periods[1] == pytest.approx(periods[0], rel=0.06)


# ---- whole placements -----------------------------------------------------------------------------------------------


def test_a_placement_by_hand() -> None:
    outlook = simulate(workload(), resolve(PlacementConfig(), EIGHT), EIGHT)
    # 8 rows per GPU and 8 cores for them: 16 × (0.02 + 0.1 + 0.08); 1024 decisions on 8 devices.
    assert outlook.rollout_s == pytest.approx(16 * 0.2)
    assert outlook.train_s == pytest.approx(1.28 + costs(workload(), outlook.placement, EIGHT).train_gather_s)
    assert outlook.steps_per_s == pytest.approx(1024 / outlook.iteration_s)
    assert outlook.iteration_s == pytest.approx(3.2 + outlook.train_s + outlook.costs.publish_s)
    assert outlook.busy["generation"] == pytest.approx(16 * 0.18 / outlook.iteration_s)
    assert outlook.bubble == pytest.approx(1 - (16 * 0.18 + outlook.train_s) / outlook.iteration_s)


def test_switching_and_publishing_by_hand() -> None:
    heavy = workload(weights_gib=14.0, train_state_gib=500.0, cache_gib=10.0, switch_s=0.5)
    spent = costs(heavy, resolve(PlacementConfig(), EIGHT), EIGHT)
    gb = 2**30 / 1e9
    # 24 + 62.5 GiB do not fit into 80 together: out and in over the 25 GB/s link, and 0.5 s twice.
    assert spent.offloads
    assert spent.switch_s == pytest.approx(1.0 + 2 * (500 / 8 + 14) * gb / 25)
    assert spent.gpu_gib == pytest.approx(62.5)
    assert spent.publish_s == pytest.approx(14 * gb * 7 / 8 / 200)
    assert spent.train_gather_s == pytest.approx(2 * 14 * gb * 7 / 8 / 200)
    # Over two machines, the network is the slowest link.
    two = Cluster(ClusterConfig((NodesConfig(count=2, gpus=4, cores=32, memory_gib=1000),)))
    apart = resolve(PlacementConfig("disaggregated", num_train_gpus=4), two)
    spent = costs(workload(weights_gib=14.0), apart, two)
    assert spent.publish_s == pytest.approx(14 * gb / 12.5)
    assert not spent.offloads


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    apart = resolve(PlacementConfig("disaggregated", num_train_gpus=1), EIGHT)
    with pytest.raises(UserError, match=r"training needs 200\.0 GiB .* valid choice: training on 3 devices"):
        costs(workload(train_state_gib=200.0), apart, EIGHT)
    with pytest.raises(UserError, match=r"workload\.devices_per_copy=2"):
        costs(workload(weights_gib=100.0, train_state_gib=1.0), apart, EIGHT)
    with pytest.raises(UserError, match=r"valid choice: workload\.num_slots=500"):
        costs(workload(gib_per_slot=2.0, num_slots=1000), apart, EIGHT)
    many = resolve(PlacementConfig("collocated", num_pipeline_stages=4), EIGHT)
    with pytest.raises(UserError, match=r"need 32 slots, and there are 16\. .*num_slots=32, or 4 devices"):
        simulate(workload(num_slots=16), many, EIGHT)
    with pytest.raises(UserError, match="fixed number of steps"):
        simulate(workload(), resolve(PlacementConfig("multiplexed"), EIGHT), EIGHT)


def test_the_plan_is_sorted_and_prefers_what_theory_prefers() -> None:
    # Both sides are bound by their base, which neither more devices nor smaller batches divide: nothing is gained by stages.
    balanced = workload(
        simulator="gpu", step_batch={"base_s": 0.2}, act={"base_s": 0.2}, train_per_decision_s=1e-4, rollout_steps=64, num_slots=256
    )
    found = plan(balanced, EIGHT)
    speeds = [outlook.steps_per_s for outlook in found.outlooks]
    assert speeds == sorted(speeds, reverse=True)
    kinds = {outlook.placement.kind: outlook for outlook in found.best_of_each_kind}
    assert set(kinds) == {"collocated", "hybrid", "disaggregated"}
    assert kinds["hybrid"].rollout_s == pytest.approx(64 * 0.4, rel=0.01)
    # Bound by rows, GPUs that do both in turns are never worse than splitting them.
    rows = workload(simulator="gpu", step_batch={"base_s": 0, "per_row_s": 0.01}, act={"base_s": 0, "per_row_s": 0.01}, num_slots=256)
    assert plan(rows, EIGHT).best.placement.kind == "collocated"


def test_thousands_of_devices_take_seconds() -> None:
    many = Cluster(ClusterConfig((NodesConfig(count=512, gpus=8, cores=64, memory_gib=1000),)))
    agents = workload(
        num_slots=65536,
        rollout_steps=0,
        episodes_per_iteration=65536,
        group_size=8,
        episode_decisions={"median": 6, "sigma": 0.8, "most": 40},
        step={"median": 0.5, "sigma": 1.0},
        max_staleness=2,
    )
    robots = workload(num_slots=65536, simulator="gpu", step_batch={"base_s": 0.05, "per_row_s": 0.004})
    for wanted in (agents, robots):
        started = time.process_time()
        found = plan(wanted, many)
        assert len(found.outlooks) >= 10
        # Some two seconds of a processor; each device by itself would take hours.
        assert time.process_time() - started < 240
    # A tenth of the cluster with a tenth of the work takes about as long: the cells are the same.
    small = Cluster(ClusterConfig((NodesConfig(count=64, gpus=8, cores=64, memory_gib=1000),)))
    less = workload(**{**vars_of(agents), "num_slots": 8192, "episodes_per_iteration": 8192})
    config = PlacementConfig("disaggregated", num_train_gpus=128)
    part = simulate(less, resolve(config, small), small)
    whole = simulate(agents, resolve(PlacementConfig("disaggregated", num_train_gpus=1024), many), many)
    assert whole.steps_per_s == pytest.approx(8 * part.steps_per_s, rel=0.1)


def vars_of(config: WorkloadConfig) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(config)


# ---- a real run -----------------------------------------------------------------------------------------------------


def sleeper(connection: Connection, seconds: list[list[float]]) -> None:
    """A station as a process: takes (stage, round), sleeps as long as that takes, gives it back with the machine's clock at the end."""
    while (job := connection.recv()) is not None:
        time.sleep(seconds[job[1]][job[0]])
        connection.send((*job, time.monotonic()))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_processes_that_sleep_take_as_long_as_simulated(num_stages: int) -> None:
    """A service counts from when station and job were both there, so that it holds what a busy machine adds: messages, late awakenings."""
    rng, rounds = np.random.default_rng(5), 12
    step_s, act_s = (0.03 * rng.lognormal(0, 0.4, (rounds, num_stages)) for _ in range(2))
    expected = float(pipelined_rollout(step_s[None], act_s[None], shared=False)[0])
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=sleeper, args=(pipe[1], times.tolist())) for pipe, times in zip(pipes, (step_s, act_s), strict=True)
    ]
    for process in processes:
        process.start()
    env, act = pipes[0][0], pipes[1][0]
    for connection in (env, act):  # both are up and running
        connection.send((0, 0))
        connection.recv()
    started = time.monotonic()
    free, there = {env: started, act: started}, {(env, stage): started for stage in range(num_stages)}
    took = {env: np.zeros((rounds, num_stages)), act: np.zeros((rounds, num_stages))}
    for stage in range(num_stages):
        env.send((stage, 0))
    left = num_stages
    while left:
        for connection in multiprocessing.connection.wait([env, act]):
            assert isinstance(connection, Connection)
            stage, t, ended = connection.recv()
            took[connection][t, stage] = ended - max(there[connection, stage], free[connection])
            free[connection] = there[act if connection is env else env, stage] = ended
            if connection is env:
                act.send((stage, t))
            elif t + 1 < rounds:
                env.send((stage, t + 1))
            else:
                left -= 1
    measured = free[act] - started
    for connection, process in zip((env, act), processes, strict=True):
        connection.send(None)
        process.join(10)
    # Sleeps are never shorter than asked for.
    assert (took[env] >= step_s - 1e-6).all()
    assert (took[act] >= act_s - 1e-6).all()
    assert expected <= measured + 1e-6
    assert measured == pytest.approx(float(pipelined_rollout(took[env][None], took[act][None], shared=False)[0]), abs=1e-6)
