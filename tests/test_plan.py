"""The planner's command line: what it prints, what it writes, and what it says to mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from embodied_rl.commands.plan import cluster_of, main, workload_of
from embodied_rl.compose import load_train_config
from embodied_rl.config import group_names, rules
from embodied_rl.config.hybrid import ClusterConfig, PlacementConfig, WorkloadConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.placement import Cluster, resolve
from embodied_rl.planning.measuring import fit_line, fit_spread, in_one_process, measure
from embodied_rl.sim.affinity import available_cores


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


@pytest.mark.parametrize("cluster", group_names("cluster"))
@pytest.mark.parametrize("workload", group_names("workload"))
def test_what_we_ship_can_be_planned(capsys: pytest.CaptureFixture[str], cluster: str, workload: str) -> None:
    document = json.loads(plan(capsys, f"cluster={cluster}", f"workload={workload}", "json=true"))
    speeds = [one["steps_per_s"] for one in document["placements"]]
    assert speeds == sorted(speeds, reverse=True)
    assert document["best"]["steps_per_s"] == speeds[0] > 0
    assert document["cluster"]["name"] == cluster
    assert document["workload"]["name"] == workload
    # The best is a placement that can be configured.
    described = Cluster(ClusterConfig.from_dict(document["cluster"]))
    kind = document["workload"]["simulator"]
    placed = resolve(PlacementConfig.from_value(document["best"]["placement"]), described, simulator=kind)
    assert placed.to_dict() == document["best"]["placement"]


def test_the_table_and_the_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    printed = plan(capsys, "cluster=8x8", "workload=openvla_maniskill", "workload.num_slots=2048", "rows=3", f"output={out}")
    assert "openvla_maniskill on 8x8 (8 machines, 64 GPUs, 768 cores)" in printed
    assert "Left out: hybrid.placement=multiplexed" in printed
    placement = yaml.safe_load(printed.split("as configuration:\n")[1])["hybrid"]["placement"]
    document = json.loads(out.read_text(encoding="utf-8"))
    assert placement == document["best"]["placement"]
    assert document["workload"]["num_slots"] == 2048
    best = document["best"]
    assert f"{best['steps_per_s']:,.0f}" in printed
    # All decisions of an iteration, over its seconds.
    assert best["steps_per_s"] == pytest.approx(2048 * 64 / best["iteration_s"])
    for kind in ("collocated", "hybrid", "disaggregated"):
        assert any(line.startswith(f"{kind}\t") for line in printed.splitlines()), "the best of each kind is shown"


def test_one_kind_alone(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(plan(capsys, "cluster=1x8", "workload=agents", "placement=disaggregated", "json=true"))
    assert {one["kind"] for one in document["placements"]} == {"disaggregated"}
    assert max(int(age) for age in document["best"]["ages"]) <= document["workload"]["max_staleness"]


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = ["cluster=8x8", "workload=agents"]
    assert "workload=NAME (known times)" in error_of(capsys, "cluster=8x8")
    assert "workload=NAME (known times)" in error_of(capsys, *known, "measure=true")
    assert "Did you mean '8x8'?" in error_of(capsys, "cluster=8x9", "workload=agents")
    assert "Did you mean 'agents'?" in error_of(capsys, "cluster=8x8", "workload=agent")
    assert "the file does not exist" in error_of(capsys, "cluster=no/such.yaml", "workload=agents")
    assert "'workload.num_slot' is not known" in error_of(capsys, *known, "workload.num_slot=3")
    assert "'num_slots' is a single value, 512" in error_of(capsys, *known, "workload.num_slots.x=1")
    assert "'name' is a single value, 'mine'" in error_of(capsys, *known, "workload.name=mine", "workload.name.x=1")
    assert "needs measure=true" in error_of(capsys, *known, "sim.num_slots=4")
    monkeypatch.setattr("embodied_rl.planning.measuring.measure", lambda config: pytest.fail("refused before anything is measured"))
    for word, part in (("workload.num_slot=3", "'workload.num_slot' is not known"), ("workload.num_slots=0", "must be between 1 and")):
        assert part in error_of(capsys, "measure=true", "experiment=cartpole", word)
    assert "needs measure=true" in error_of(capsys, *known, "experiment=cartpole")
    assert "rows must be between 1 and" in error_of(capsys, *known, "rows=0")
    (tmp_path / "one.yaml").write_text("nodes: [{gpus: 1, gpu_memory_gib: 300}]", encoding="utf-8")
    told = error_of(capsys, f"cluster={tmp_path / 'one.yaml'}", "workload=agents", "placement=multiplexed")
    assert "needs at least 2 GPUs, and 'one' has 1. Nearest valid choice: collocated" in told
    (tmp_path / "small.yaml").write_text("nodes: [{gpus: 2, gpu_memory_gib: 10}]", encoding="utf-8")
    assert "No placement is possible" in error_of(capsys, f"cluster={tmp_path / 'small.yaml'}", "workload=agents")
    (tmp_path / "dated.yaml").write_text("nodes: 2020-13-45", encoding="utf-8")
    assert "is not YAML: month must be in 1..12" in error_of(capsys, f"cluster={tmp_path / 'dated.yaml'}", "workload=agents")
    (tmp_path / "list.yaml").write_text("- 1", encoding="utf-8")
    assert "must be a mapping" in error_of(capsys, f"cluster={tmp_path / 'list.yaml'}", "workload=agents")


def test_fits_find_what_was_put_in() -> None:
    line = fit_line([1, 2, 4, 8], [0.5 + 0.25 * n for n in (1, 2, 4, 8)])
    assert (line.base_s, line.per_row_s) == pytest.approx((0.5, 0.25))
    assert fit_line([1, 2, 4], [0.3, 0.2, 0.1]).per_row_s == 0.0
    through_zero = fit_line([1, 2, 4], [0.9, 2.0, 4.4])
    assert through_zero.base_s == 0.0
    assert through_zero.per_row_s == pytest.approx(1.0, abs=0.05)
    rng = np.random.default_rng(0)
    spread = fit_spread(np.exp(rng.normal(np.log(0.2), 0.6, 40_000)))
    assert spread.median == pytest.approx(0.2, rel=0.02)
    assert spread.sigma == pytest.approx(0.6, rel=0.03)


def test_overrides_reach_into_mappings() -> None:
    changed = workload_of("agents", {"workload.act.base_s": 9.0, "workload.max_staleness": 4})
    assert (changed.act.base_s, changed.act.per_row_s, changed.max_staleness) == (9.0, 0.02, 4)


@pytest.mark.slow
@pytest.mark.ci_sample
def test_measuring_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "times.yaml"
    # Every environment sleeps at each step: less than that nothing can take, however busy the machine is.
    step_s, slots, rows = 0.004, 4, 16
    arguments = [
        *("measure=true", "experiment=cartpole", "sim=custom", "sim.name=sleeper", "sim.target=tests.sim.toy:CountingSim"),
        *(f"sim.kwargs.step_s={step_s}", f"sim.num_slots={slots}", "sim.num_workers=2", f"algorithm.rollout_steps={rows}"),
        *("algorithm.minibatch_size=64", f"save={saved}"),
    ]
    document: dict[str, Any] = json.loads(plan(capsys, *arguments, "json=true"))
    measured = WorkloadConfig.from_dict(yaml.safe_load(saved.read_text(encoding="utf-8")))
    assert (measured.name, measured.num_slots, measured.rollout_steps) == ("sleeper", slots, rows)
    # Two slots of each worker one after another; with two cores or more, a decision of one slot takes one sleep of one core.
    cores = available_cores()
    at_least_s = step_s * min(2, cores) / 2
    assert measured.step.median * np.exp(measured.step.sigma**2 / 2) >= at_least_s
    assert measured.act.base_s + measured.act.per_row_s > 1e-7
    assert measured.train_per_decision_s > 0
    assert 0 < measured.weights_gib < 0.01
    assert 0 < document["measured_steps_per_s"] <= 2 / step_s, "of two workers"
    # What is simulated is what was saved; its speed, where single steps took very different times, is hardly that of their mean.
    again = json.loads(plan(capsys, "cluster=here", f"workload={saved}", "json=true"))
    assert again["placements"] == document["placements"]
    assert {"collocated"} <= {one["kind"] for one in document["placements"] if one["steps_per_s"] > 0}
    assert cluster_of("here").nodes[0].count == 1
    with pytest.raises(UserError, match="has no rollouts to plan"):
        measure(load_train_config(["experiment=push_bc"]))


def test_a_run_of_several_players_is_measured_in_one_process() -> None:
    apart = load_train_config(["sim=cartpole", "hybrid=disaggregated", "hybrid.device=cpu", "hybrid.players=2", "hybrid.publish=changed"])
    assert rules.resolve(in_one_process(apart)).hybrid.players == 1
