"""``python -m embodied_rl.catalog simulators``: what there is, whether it is installed, and the command that uses it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embodied_rl.cli import run_command

KINDS = {"simulators": "sim", "policies": "policy", "algorithms": "algorithm", "experiments": "experiment", "loggers": "logger"}
"""What a user asks for → folder below configs/."""

_WITH = "With: "

_USAGE = f"""usage: python -m embodied_rl.catalog {{{"|".join(KINDS)}}} [--json]

List what there is: names, tasks, a line about each, which packages it needs and whether they are installed.
Without a kind: everything."""


@dataclass(frozen=True)
class Entry:
    """One configuration file."""

    name: str
    task: str | None
    """The simulator's task; None for other kinds."""
    description: str
    """The file's first comment line."""
    extra: str | None
    """Extra of this package that it needs, None where it needs nothing more."""
    installed: bool
    """Whether everything that the extra names is installed."""
    command: str
    """How to use it, or how to install what it lacks."""


def entries(kind: str) -> list[Entry]:
    """What there is of one kind (a key of `KINDS`), by name. Raises UserError with the nearest kind."""
    from embodied_rl.config import group_names
    from embodied_rl.errors import UserError, did_you_mean
    from embodied_rl.paths import configs_dir

    if kind not in KINDS:
        raise UserError(f"'{kind}' is not a kind of the catalogue.{did_you_mean(kind, KINDS)}")
    group = KINDS[kind]
    return [_entry(group, name, configs_dir() / group / f"{name}.yaml") for name in group_names(group)]


def extra_installed(extra: str) -> bool:
    """Whether every distribution that an extra of this package names is installed in a fitting version."""
    return not missing_distributions(extra)


def missing_distributions(extra: str) -> list[str]:
    """The requirements of an extra of this package that are not met, as pip writes them; of an unknown extra, the extra itself."""
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
    """{extra: requirements}: from the installed package's metadata, or from setup.cfg of a checkout that was not installed."""
    from importlib.metadata import PackageNotFoundError, metadata

    from packaging.requirements import Requirement

    try:
        found = metadata("embodied-rl")
    except PackageNotFoundError:
        return _extras_of_checkout()
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


def _extras_of_checkout() -> dict[str, list[str]]:
    import configparser

    parser = configparser.ConfigParser()
    parser.read(Path(__file__).resolve().parent.parent / "setup.cfg", encoding="utf-8")
    section = parser["options.extras_require"] if parser.has_section("options.extras_require") else {}
    return {
        name: [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")] for name, text in section.items()
    }


def _entry(group: str, name: str, path: Path) -> Entry:
    import yaml

    text = path.read_text(encoding="utf-8")
    data = yaml.safe_load(text) or {}
    extra = _extra(group, name, data)
    installed = extra is None or extra_installed(extra)
    comments = _comments(text)
    # "# With: policy=cnn" says what a choice cannot do without: pixels, for one, are nothing for the default policy.
    further = [line.removeprefix(_WITH).strip() for line in comments if line.startswith(_WITH)]
    command = " ".join([f"python -m embodied_rl.train {group}={name}", *further])
    if not installed:
        command = f'pip install "embodied-rl[{extra}]"'
    return Entry(name, data.get("task") if group == "sim" else None, comments[0] if comments else "", extra, installed, command)


def _extra(group: str, name: str, data: dict[str, Any]) -> str | None:
    """A simulator says itself what it needs; an experiment needs what its simulator needs."""
    if group == "sim":
        return data.get("extra")
    if group == "logger":
        return "wandb" if "wandb" in (data.get("names") or []) else None
    if group == "experiment":
        from embodied_rl.config import load_sim_config

        for choice in data.get("defaults") or []:
            if isinstance(choice, dict):
                for key, value in choice.items():
                    if key.removeprefix("override").strip().strip("/") == "sim":
                        return load_sim_config(value).extra
    return None


def _comments(text: str) -> list[str]:
    """The words of the comment lines; Hydra's own directives are comments as well, and left out."""
    lines = (line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#"))
    return [words for words in lines if words and not words.startswith("@package")]


def print_entries(kind: str) -> None:
    """Print one kind as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    found = entries(kind)
    with_tasks = any(entry.task for entry in found)
    table = Table(title=f"{kind} ({len(found)})", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("name", *(("task",) if with_tasks else ()), "what it is", "needs", "command"):
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for entry in found:
        needs = "" if entry.extra is None else f"{entry.extra} {'✓' if entry.installed else '✗ not installed'}"
        table.add_row(entry.name, *((entry.task or "",) if with_tasks else ()), entry.description, needs, entry.command.replace("[", "\\["))
    # A pipe has no width: whole lines are better than lines cut at 80 letters.
    Console(highlight=False, width=None if sys.stdout.isatty() else 240).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    run_command(lambda: _main(arguments))


def _main(argv: Sequence[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(_USAGE)
        return
    kinds = [word for word in argv if word != "--json"] or list(KINDS)
    if "--json" in argv:
        print(json.dumps({kind: [asdict(entry) for entry in entries(kind)] for kind in kinds}, indent=1))
        return
    for kind in kinds:
        print_entries(kind)


if __name__ == "__main__":
    main()
