"""``python -m embodied_rl.catalog simulators``: what exists, whether it is installed, and the command that uses it."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.algorithms.advantage_table import ADVANTAGES, AdvantageInfo
from embodied_rl.algorithms.loss_table import LOSS_TERMS, LOSSES, LossInfo
from embodied_rl.bounds import Seed, Size, Slots
from embodied_rl.commands.cli import Argument, Command, as_command, fail, print_tables, terminal_width
from embodied_rl.config import SimConfig, config_file, group_names, load_sim_config
from embodied_rl.errors import UserError, require_known
from embodied_rl.progress import progress_bar, wrapped_lines
from embodied_rl.sim.check import check_sim
from embodied_rl.sim.factory import SimFactory, task_list

if TYPE_CHECKING:
    from importlib.metadata import PackageMetadata


KINDS = {"simulators": "sim", "policies": "policy", "algorithms": "algorithm", "experiments": "experiment", "loggers": "logger"}
"""{kind as users write it: folder below configs/}."""

_ALSO = {"sims": "simulators", "simulator": "simulators", **{folder: kind for kind, folder in KINDS.items()}}
"""Other names of kinds: those of the folders, as in the training command."""

METHODS = ("advantages", "losses", "loss_terms")
"""Mathematics that configurations of algorithms can name, which `algorithms` lists too."""

_WITH = "With: "
_WIDE = 140
"""Columns of a terminal with room for a command in each row."""

_WORDS = """List the entries of a kind with their tasks, descriptions and packages, and whether the packages are installed. Without a kind:
list all kinds. `algorithms` also lists the advantages, losses and loss terms that a configuration can name, with their formulas, needs and
sources.

tasks: list all tasks of a simulator (sim.task=NAME selects one). SIM is a name from the list of simulators."""
CHECK = Command(
    name="catalog check",
    summary=(
        "Play a simulator and test the properties that training needs (determinism, seeds, snapshots, rows, …). The exit status is 1 if a "
        "test fails. --json: print the report as JSON."
    ),
    arguments=(
        Argument("task", str, "the same as sim.task=NAME of the training command", None),
        Argument("target", str, "the same as sim.target=MODULE:CLASS", None),
        Argument("num_envs", Slots, "number of environments", 3),
        Argument("steps", Size, "length of the compared episodes", 100),
        Argument("seed", Seed, "their seed", 0),
    ),
    prefixes={"kwargs.": "the same as sim.kwargs.KEY=VALUE"},
    paths=(Argument("sim", str, "a name from the list of simulators, or package.module:Class"),),
    examples=("maniskill_pushcube", "halfcheetah task=Ant-v5 steps=200", "custom target=my_package.my_module:MyEnv kwargs.gravity=1.6"),
)


def usage() -> str:
    lines = ["usage: python -m embodied_rl.catalog KIND [--json]", f"       KIND is {'|'.join(KINDS)}"]
    lines += ["       python -m embodied_rl.catalog tasks SIM [--json]"]
    for paragraph in _WORDS.split("\n\n"):
        lines += ["", *wrapped_lines(paragraph, terminal_width())]
    return "\n".join([*lines, "", CHECK.usage()])


@dataclass(frozen=True)
class Entry:
    """One configuration file."""

    name: str
    task: str | None
    """Simulator's task; None for other kinds."""
    description: str
    """The file's first comment line."""
    extra: str | None
    """Extra of this package that it needs; None: no extra."""
    installed: bool
    """Whether all packages of the extra are installed."""
    command: str
    """Command that uses it, or that installs what it lacks."""


def entries(kind: str) -> list[Entry]:
    """Entries of one kind (a key of `KINDS`), by name. Raises UserError with the nearest kind."""
    group = KINDS[kind_of(kind)]
    missing = functools.cache(missing_distributions)
    return [_entry(group, name, config_file(group, name), missing) for name in group_names(group)]


def kind_of(word: str) -> str:
    """Key of `KINDS` that a user's word means. Raises UserError with the nearest kind."""
    kind = _ALSO.get(word, word)
    require_known(kind, KINDS, f"'{kind}' is not a kind of the catalogue.")
    return kind


def methods(kind: str) -> list[AdvantageInfo | LossInfo]:
    """Advantages, losses or loss terms (`METHODS`) that a configuration can name, in the tables' order. Loads no tensor library."""
    return list(ADVANTAGES.values()) if kind == "advantages" else list((LOSSES if kind == "losses" else LOSS_TERMS).values())


def missing_distributions(extra: str) -> list[str]:
    """Unmet requirements of an extra of this package, as pip writes them; for an unknown extra, the extra itself."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import Requirement

    requirements = [Requirement(text) for text in _extras().get(extra, [f"embodied-rl-{extra}"])]
    missing = []
    for requirement in requirements:
        if requirement.name == "embodied-rl":
            missing += [name for inner in sorted(requirement.extras) for name in missing_distributions(inner)]
            continue
        try:
            fits = requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            fits = False
        if not fits:
            missing.append(str(requirement))
    return missing


def _extras() -> dict[str, list[str]]:
    """{extra: requirements}: from setup.cfg of a checkout, whose installation may be older; otherwise from the package's metadata."""
    from importlib.metadata import PackageNotFoundError, metadata

    declared = Path(__file__).resolve().parents[2] / "setup.cfg"
    if declared.is_file():
        return _extras_of_checkout(declared)
    try:
        return _extras_of_metadata(metadata("embodied-rl"))
    except PackageNotFoundError:
        return {}


def _extras_of_metadata(found: PackageMetadata) -> dict[str, list[str]]:
    from packaging.requirements import Requirement

    extras: dict[str, list[str]] = {name: [] for name in found.get_all("Provides-Extra") or []}
    for text in found.get_all("Requires-Dist") or []:
        requirement = Requirement(text)
        for name in extras:
            marker = requirement.marker
            if marker is not None and marker.evaluate({"extra": name}) and not marker.evaluate({"extra": ""}):
                requirement.marker = None
                extras[name].append(str(requirement))
                requirement.marker = marker
    return extras


def _extras_of_checkout(declared: Path) -> dict[str, list[str]]:
    import configparser

    parser = configparser.ConfigParser()
    parser.read(declared, encoding="utf-8")
    section = parser["options.extras_require"] if parser.has_section("options.extras_require") else {}
    return {
        name: [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")] for name, text in section.items()
    }


def _entry(group: str, name: str, path: Path | None, missing: Callable[[str], list[str]]) -> Entry:
    """`path` is None for a simulator that an installed package registered with a target but without a file."""
    import yaml

    if path is None:
        target = load_sim_config(name).target
        return Entry(name, None, f"Registered by an installed package: {target}.", None, True, f"python -m embodied_rl.train sim={name}")
    text = path.read_text(encoding="utf-8")
    data = yaml.safe_load(text) or {}
    extra = _extra(group, name, data)
    installed = extra is None or not any(missing(name) for name in extra.split(","))
    lines = (line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#"))
    comments = [words for words in lines if words and not words.startswith("@package")]  # without Hydra's own directives
    # "# With: policy=cnn" names other required choices: the default policy cannot read pixels, for one.
    further = [line.removeprefix(_WITH).strip() for line in comments if line.startswith(_WITH)]
    command = " ".join([f"python -m embodied_rl.train {group}={name}", *further])
    if not installed:
        command = f'pip install "embodied-rl[{extra}]"'
    return Entry(name, data.get("task") if group == "sim" else None, comments[0] if comments else "", extra, installed, command)


def _extra(group: str, name: str, data: dict[str, Any]) -> str | None:
    """A simulator declares its extra; an experiment needs those of its simulators and its policy, which commas separate."""
    if group == "sim":
        return data.get("extra")
    if group == "logger":
        return "wandb" if "wandb" in (data.get("names") or []) else None
    if group == "policy":
        return "language" if data.get("name") == "language" else None
    found: list[str | None] = []
    for choice in (data.get("defaults") or []) if group == "experiment" else ():
        for key, value in choice.items() if isinstance(choice, dict) else ():
            chosen = key.removeprefix("override").strip().strip("/").partition("@")[0]  # /sim@domains.arm.sim is a simulator too
            if chosen == "sim":
                found.append(load_sim_config(value).extra)
            if chosen == "policy" and value == "language":
                found.append("language")
    return ",".join(dict.fromkeys(extra for extra in found if extra is not None)) or None


def _print_rows(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows of equal keys as a table."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{title} ({len(rows)})", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "unit"))
    for row in rows:
        table.add_row(*map(escape, row.values()))
    print_tables(table)


def print_entries(kind: str) -> None:
    found = entries(kind)
    # Eighty columns have no room for a command in each row; it is the same for all, and printed below.
    narrow = sys.stdout.isatty() and shutil.get_terminal_size().columns < _WIDE
    left_out = {"task", "command"} if narrow else set()
    if not any(entry.task for entry in found):
        left_out.add("task")
    rows = []
    for entry in found:
        needs = "" if entry.extra is None else f"{entry.extra} {'✓' if entry.installed else '✗ not installed'}"
        row = {"name": entry.name, "task": entry.task or "", "description": entry.description, "needs": needs, "command": entry.command}
        rows.append({column: text for column, text in row.items() if column not in left_out})
    _print_rows(kind, rows)
    if narrow:
        print(f"Use one: python -m embodied_rl.train {KINDS[kind]}=NAME")
    if kind == "simulators":
        print("To list all tasks of a simulator (sim.task=NAME): python -m embodied_rl.catalog tasks SIM")
    if kind == "algorithms":
        for name in METHODS:
            print()
            _print_rows(name.replace("_", " "), [_row_of(method) for method in methods(name)])


def _row_of(method: AdvantageInfo | LossInfo) -> dict[str, str]:
    needs = ", ".join(need.replace("_log_prob", " log-probs").replace("_", " ") for need in sorted(method.needs))
    return {"name": method.name, "formula": method.summary, "unit": method.unit, "needs": needs, "source": method.source}


@as_command
def main(argv: Sequence[str]) -> None:
    given, as_json = [word for word in argv if word != "--json"] or list(KINDS), "--json" in argv
    if "--help" in argv or "-h" in argv:
        print(usage())
    elif given[0] == "tasks":
        _tasks(given[1:], as_json)
    elif given[0] == "check":
        _check(given[1:], as_json)
    elif as_json:
        print(json.dumps(_document([kind_of(word) for word in given]), indent=1))
    else:
        for kind in [kind_of(word) for word in given]:
            print_entries(kind)


def _document(kinds: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    document: dict[str, list[dict[str, Any]]] = {}
    for kind in kinds:
        document[kind] = [asdict(entry) for entry in entries(kind)]
        if kind == "algorithms":
            document |= {name: [_plain(method) for method in methods(name)] for name in METHODS}
    return document


def _plain(method: AdvantageInfo | LossInfo) -> dict[str, Any]:
    """Fields for a user."""
    rest = {name: vars(method)[name] for name in ("options", "required_options", "source", "target")}
    return {"name": method.name, "formula": method.summary, "unit": method.unit, "needs": sorted(method.needs), **rest}


def _tasks(arguments: Sequence[str], as_json: bool) -> None:
    if len(arguments) != 1:
        raise UserError("Which simulator? python -m embodied_rl.catalog tasks SIM; `python -m embodied_rl.catalog simulators` lists them.")
    config = load_sim_config(arguments[0])
    tasks, sets = task_list(config.target)
    if as_json:
        print(json.dumps({"target": config.target, "tasks": tasks, "sets": sets}, indent=1))
        return
    for name in sets:
        print(f"{name}  (several tasks)")
    print(*tasks, sep="\n")
    counted = f"{len(tasks)} tasks" if len(tasks) != 1 else "1 task"
    print(f"{counted}; python -m embodied_rl.train sim={config.name} sim.task=NAME", file=sys.stderr)


def _check(arguments: Sequence[str], as_json: bool) -> None:
    config, numbers = what_to_check(arguments)

    with progress_bar(f"checking {config.name}"):
        report = check_sim(SimFactory(config.target, config.task, config.kwargs, config.extra), **numbers)
    print(json.dumps(report.to_dict(), indent=1) if as_json else report, flush=True)
    if config.target == "embodied_rl.sim.robots.maniskill:make" and config.task is not None:
        from embodied_rl.sim.robots.maniskill import batch_verdict

        print(f"In a batch: {batch_verdict(config.task, config.kwargs)}", file=sys.stderr if as_json else sys.stdout)
    if not report.ok:
        fail(f"'{config.name}' fails these tests: {', '.join(report.failed)}.", 1)


def what_to_check(arguments: Sequence[str]) -> tuple[SimConfig, dict[str, Any]]:
    """Simulator's configuration and arguments of `check_sim`, from the words after ``check``. Raises UserError."""
    words = [word.removeprefix("sim.") if "=" in word else word for word in arguments]
    numbers, kwargs = CHECK.parse(words)
    name, task, target = (numbers.pop(key) for key in ("sim", "task", "target"))
    config = SimConfig(name=name, target=name) if ":" in name else load_sim_config(name)
    own = {key.removeprefix("kwargs."): value for key, value in kwargs.items()}
    changed = {"task": task or config.task, "target": target or config.target, "kwargs": {**config.kwargs, **own}}
    return SimConfig.from_dict({**asdict(config), **changed}).with_target(), numbers
