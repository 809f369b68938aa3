"""python -m embodied_rl.plan: the fastest placement of simulators, generation and training, for this machine or another cluster."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.bounds import Seed, Size
from embodied_rl.commands.cli import Argument, Command, WrittenFile, as_command, command_line, print_tables, terminal_width
from embodied_rl.config import config_file, group_names
from embodied_rl.config.building import convert, type_hints
from embodied_rl.config.compose import load_train_config
from embodied_rl.config.hybrid import ClusterConfig, PlacementConfig, WorkloadConfig, load_yaml
from embodied_rl.errors import UserError, did_you_mean, require_known, shown
from embodied_rl.files import write_atomic
from embodied_rl.hybrid.placement import Cluster
from embodied_rl.planning.model import Plan, candidates, plan
from embodied_rl.progress import figure_table, progress_bar, wrapped_lines
from embodied_rl.reading import yaml_text
from embodied_rl.versions import provenance

if TYPE_CHECKING:
    from rich.table import Table

    from embodied_rl.planning.measuring import Measurement

COMMAND = Command(
    name="plan",
    summary="Simulate every placement of simulators, generation and training on the devices of a cluster, and print the fastest.",
    arguments=(
        Argument("cluster", str, "cluster: a file, or a name in configs/cluster; here: this machine", "here"),
        Argument("workload", str, "times and sizes of an iteration: a file, or a name in configs/workload", None),
        Argument("measure", bool, "measure an experiment on this machine for half a minute instead", False),
        Argument("experiment", str, "with measure=true: the experiment", None),
        Argument("sim", str, "with measure=true: another simulator", None),
        Argument("algorithm", str, "with measure=true: another algorithm", None),
        Argument("policy", str, "with measure=true: another policy", None),
        Argument("placement", str, "only this kind of placement", None, ("collocated", "disaggregated", "hybrid", "multiplexed")),
        Argument("rows", Size, "rows of the table", 8),
        Argument("seed", Seed, "seed of the random durations", 0),
        Argument("save", WrittenFile, "with measure=true: write the workload into this YAML file", None),
        Argument("output", WrittenFile, "write everything into this JSON file", None),
        Argument("json", bool, "print JSON instead of tables", False),
    ),
    prefixes={
        "workload.": "change a value of the workload, e.g. workload.num_slots=512 workload.max_staleness=2",
        "sim.": "with measure=true: change the run, e.g. sim.num_slots=8",
        "algorithm.": "the same, e.g. algorithm.num_epochs=2",
        "policy.": "the same, e.g. policy.chunk=8",
    },
    examples=(
        "measure=true experiment=cartpole",
        "cluster=8x8 workload=openvla_maniskill",
        "cluster=8x8 workload=agents workload.max_staleness=2 output=plan.json",
    ),
)

_RUN = ("experiment", "sim", "algorithm", "policy")
"""Arguments that define a run to measure."""


@as_command
def main(argv: Sequence[str]) -> None:
    values, overrides = COMMAND.parse(argv)

    _check(values, overrides)
    cluster = Cluster(cluster_of(values["cluster"]))
    with progress_bar("planning: measuring a run" if values["measure"] else "planning"):
        measured = _measure(argv, values) if values["measure"] else None
    if measured is None:
        workload = workload_of(values["workload"], overrides)
    else:
        workload = WorkloadConfig.from_dict(_merged(dataclasses.asdict(measured.workload), overrides))
        if values["save"] is not None:
            write_atomic(Path(values["save"]), yaml_text(dataclasses.asdict(workload)))
    only: list[PlacementConfig] | None = None
    if values["placement"] is not None:
        only = [config for config in candidates(workload, len(cluster.compute)) if config.kind == values["placement"]]
        # A cluster that is too small has no candidate; planning this kind then reports the reason.
        only = only or [PlacementConfig(values["placement"])]
    with progress_bar("planning: comparing placements"):
        found = plan(workload, cluster, only=only, seed=values["seed"])
    document = document_of(found, workload, cluster, measured, command_line("plan", argv))
    if values["json"]:
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        print_tables(_table(found, workload, cluster, values["rows"]))
        _explain(found, measured)
    if values["output"] is not None:
        write_atomic(Path(values["output"]), json.dumps(document, indent=1, allow_nan=False) + "\n")


def cluster_of(name: str) -> ClusterConfig:
    """Cluster from a file, a name of configs/cluster, or ``here``. Raises UserError with the nearest name."""
    if name == "here":
        from embodied_rl.planning.measuring import this_machine

        return this_machine()
    path = _find("cluster", name)
    return ClusterConfig.from_dict({"name": path.stem, **load_yaml(path, "cluster")})


def workload_of(name: str, overrides: Mapping[str, Any]) -> WorkloadConfig:
    """Workload from a file or a name of configs/workload, with overrides. Raises UserError with the nearest name."""
    path = _find("workload", name)
    return WorkloadConfig.from_dict(_merged({"name": path.stem, **load_yaml(path, "workload")}, overrides))


def _find(group: str, name: str) -> Path:
    if Path(name).is_file():
        return Path(name)
    if "/" in name or name.endswith((".yaml", ".yml")):
        raise UserError(f"{group}={name}: the file does not exist.")
    found = config_file(group, name)
    if found is None:
        known = [*group_names(group), *(["here"] if group == "cluster" else [])]
        raise UserError(f"{group}={name} is neither a known name nor a file (format: docs/planning.md).{did_you_mean(name, known)}")
    return found


def _merged(data: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge overrides; `workload.act.base_s=1` changes a nested value."""
    for key, value in overrides.items():
        if not key.startswith("workload."):
            continue
        *path, last = key.split(".")[1:]
        inner = data
        for part in path:
            if not isinstance(below := inner.get(part) or {}, dict):
                raise UserError(f"{key}: '{part}' is a single value, {shown(below)}. Give workload.….{part}=VALUE.")
            inner[part] = dict(below)
            inner = inner[part]
        inner[last] = value
    return data


def _measure(argv: Sequence[str], values: Mapping[str, Any]) -> Measurement:
    from embodied_rl.planning.measuring import measure

    chosen = [f"{group}={values[group]}" for group in _RUN if values[group] is not None]
    return measure(load_train_config([*chosen, *(word for word in argv if word.startswith(tuple(f"{group}." for group in _RUN)))]))


def _check(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    if values["measure"] == (values["workload"] is not None):
        raise UserError(
            "Give the times of an iteration: workload=NAME (known times), or measure=true experiment=NAME (measured on this machine)."
        )
    hints = {field.name: type_hints(WorkloadConfig)[field.name] for field in dataclasses.fields(WorkloadConfig)}
    for key, value in overrides.items():  # before a run is measured
        group, name, *below = key.split(".")
        if group == "workload":
            require_known(name, hints, f"Configuration key {shown(key)} is not known.")
            if not below:
                convert(hints[name], value, key)
    if not values["measure"]:
        wrong = [key for key in overrides if not key.startswith("workload.")]
        wrong += [name for name in (*_RUN, "save") if values[name] is not None]
        if wrong:
            raise UserError(f"{wrong[0]} needs measure=true. To change known times, use workload.KEY=VALUE.")


def document_of(found: Plan, workload: WorkloadConfig, cluster: Cluster, measured: Measurement | None, command: str) -> dict[str, Any]:
    return {
        "cluster": dataclasses.asdict(cluster.config),
        "workload": dataclasses.asdict(workload),
        "measured_steps_per_s": None if measured is None else measured.steps_per_s,
        "best": found.best.to_dict(),
        "placements": [outlook.to_dict() for outlook in found.outlooks],
        "refused": [{"kind": kind, "reason": reason} for kind, reason in found.refused.items()],
        **provenance(command),
    }


def _table(found: Plan, workload: WorkloadConfig, cluster: Cluster, rows: int) -> Table:
    """The fastest placements, and the best of each kind."""
    size = f"{len(cluster.nodes)} machines, {len(cluster.gpus)} GPUs, {sum(spec.cores for spec in cluster.nodes)} cores"
    columns = ("placement", "stages", "env", "gen", "train", "steps/s", "iteration s", "rollout s", "update s", "idle", "GiB", "age")
    table = figure_table(f"{workload.name} on {cluster.config.name} ({size})", columns)
    for place, outlook in enumerate(found.outlooks):
        if place >= rows and not any(outlook is one for one in found.best_of_each_kind):
            continue
        placement = outlook.placement
        age = sum(age * share for age, share in outlook.ages.items())
        table.add_row(
            placement.kind,
            str(placement.num_pipeline_stages),
            *(str(len(placement[role])) for role in ("env", "generation", "train")),
            f"{outlook.steps_per_s:,.1f}" if outlook.steps_per_s < 1000 else f"{outlook.steps_per_s:,.0f}",
            f"{outlook.iteration_s:.3g}",
            f"{outlook.rollout_s:.3g}",
            f"{outlook.train_s:.3g}",
            f"{outlook.bubble:.0%}",
            f"{outlook.costs.gpu_gib:.1f}",
            f"{age:.1f}",
        )
    return table


def _explain(found: Plan, measured: Measurement | None) -> None:
    for reason in found.refused.values():
        print("\n".join(wrapped_lines(f"Left out: {reason}", terminal_width())))
    if measured is not None:
        print(f"Measured here: {measured.steps_per_s:,.0f} steps/s, collocated, {measured.num_stages} stages.")
    text = yaml_text({"hybrid": {"placement": found.best.placement.to_dict()}}, default_flow_style=None)
    print("The fastest placement, as configuration:", text.rstrip(), sep="\n")
