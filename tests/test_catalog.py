"""The catalogue against the configuration files, the installed packages and setup.cfg."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.algorithms.advantage_table import ADVANTAGES
from embodied_rl.algorithms.loss_table import LOSS_TERMS, LOSSES
from embodied_rl.commands import catalog
from embodied_rl.commands.catalog import KINDS, METHODS, entries, main, methods, missing_distributions
from embodied_rl.config import load_sim_config
from embodied_rl.config.compose import load_train_config
from embodied_rl.errors import UserError
from embodied_rl.files import configs_dir
from embodied_rl.policies.actor_critic import build_policy
from embodied_rl.registry import load_target
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.rendering import mujoco_backend
from tests.short_run import one_line_error

ROOT = Path(__file__).parents[1]
MODULE_OF_EXTRA = {
    "mujoco": "mujoco",
    "language": "transformers",
    "maniskill": "mani_skill",
    "metaworld": "metaworld",
    "robotics": "gymnasium_robotics",
    "pusht": "gym_pusht",
    "aloha": "gym_aloha",
    "robosuite": "robosuite",
    "libero": "libero",
    "text": "gem",
    "textarena": "textarena",
    "textworld": "textworld",
    "alfworld": "alfworld",
    "appworld": "appworld",
    "wandb": "wandb",
}

TABLES: dict[str, dict[str, Any]] = {"advantages": ADVANTAGES, "losses": LOSSES, "loss_terms": LOSS_TERMS}


def files(kind: str) -> list[Path]:
    return sorted((configs_dir() / KINDS[kind]).glob("*.yaml"))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_file_is_listed_with_its_first_comment(kind: str) -> None:
    found = entries(kind)
    assert [entry.name for entry in found] == [path.stem for path in files(kind)]
    for entry, path in zip(found, files(kind), strict=True):
        comments = [line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ") and "@package" not in line]
        assert entry.description == comments[0]
        assert len(entry.description) > 10


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_command_is_a_configuration(kind: str) -> None:
    for entry in entries(kind):
        if not entry.installed:
            assert entry.command == f'pip install "embodied-rl[{entry.extra}]"'
            continue
        words = shlex.split(entry.command)
        assert words[:3] == ["python", "-m", "embodied_rl.train"]
        config = load_train_config(words[3:])
        if kind == "simulators":
            assert config.sim.name == entry.name
            assert config.sim.task == entry.task
            assert config.sim.extra == entry.extra
        elif kind == "experiments":
            needed = {config.sim.extra, "language" if config.policy.name == "language" else None}
            needed |= {domain.sim.extra for domain in config.domains.values()}
            assert needed - {None} == set(entry.extra.split(",") if entry.extra else ())
        elif kind == "policies":
            assert entry.extra == ("language" if config.policy.name == "language" else None)


@pytest.mark.parametrize("name", ["cartpole", "pixel_reach", "pusht_pixels"])
def test_a_command_chooses_a_policy_that_reads_what_the_simulator_shows(name: str) -> None:
    (entry,) = [entry for entry in entries("simulators") if entry.name == name]
    if not entry.installed or (name == "pixel_reach" and mujoco_backend() is None):
        pytest.skip(f"{name} cannot be made here")
    config = load_train_config(shlex.split(entry.command)[3:])
    sim = SimFactory(config.sim.target, config.sim.task, config.sim.kwargs, config.sim.extra).make(1)
    try:
        assert config.policy.observation_key in sim.spec.observation
        build_policy(config.policy, sim.spec)
        if name != "cartpole":
            with pytest.raises(UserError, match="observation_key"):
                build_policy(load_train_config([f"sim={name}"]).policy, sim.spec)
    finally:
        sim.close()


def test_what_is_installed_is_what_python_finds() -> None:
    seen = {entry.extra: entry.installed for kind in KINDS for entry in entries(kind) if entry.extra is not None}
    assert {name for extra in seen for name in extra.split(",")} == MODULE_OF_EXTRA.keys()
    for extra, installed in seen.items():
        assert installed == all(importlib.util.find_spec(MODULE_OF_EXTRA[name]) is not None for name in extra.split(",")), extra


def test_what_is_missing_or_too_old_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "mani-skill":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2.0" if name == "metaworld" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert missing_distributions("maniskill") == ["mani-skill<3.1,>=3.0.1"]
    assert missing_distributions("metaworld") == ["metaworld<3.2,>=3.1.1"]
    assert missing_distributions("no-such-extra") == ["embodied-rl-no-such-extra"]
    # "all" names other extras, and lacks what they lack.
    assert {"mani-skill<3.1,>=3.0.1", "metaworld<3.2,>=3.1.1"} <= set(missing_distributions("all"))
    by_name = {entry.name: entry for entry in entries("simulators")}
    assert not by_name["maniskill_pushcube"].installed
    assert by_name["maniskill_pushcube"].command == 'pip install "embodied-rl[maniskill]"'
    assert by_name["cartpole"].installed
    assert not {e.name: e for e in entries("experiments")}["maniskill_pushcube"].installed
    main(["simulators"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("maniskill_pickcube\t")]
    assert "maniskill ✗ not installed" in row
    assert 'pip install "embodied-rl[maniskill]"' in row


def test_the_extras_are_those_of_setup_cfg(tmp_path: Path) -> None:
    def normal(extras: dict[str, list[str]]) -> dict[str, set[str]]:
        from packaging.requirements import Requirement

        return {name: {str(Requirement(text)) for text in texts} for name, texts in extras.items()}

    if not (ROOT / "setup.cfg").is_file():
        pytest.skip("needs a checkout")
    # The metadata as they are built now: those of an editable installation are as old as it.
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    built = importlib.metadata.PathDistribution(tmp_path / "embodied_rl.egg-info").metadata
    declared = catalog._extras_of_checkout(ROOT / "setup.cfg")
    assert normal(declared) == normal(catalog._extras_of_metadata(built))
    assert normal(declared)["maniskill"] == {"mani-skill<3.1,>=3.0.1"}


def test_the_command_line_prints_json_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from embodied_rl.commands.catalog import main; main(['--json']); "
        "print([name for name in ('torch', 'hydra', 'mani_skill', 'mujoco', 'gymnasium') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    document = json.loads(done.stdout)
    assert [kind for kind in document if kind not in METHODS] == list(KINDS)
    for kind in KINDS:
        assert [row["name"] for row in document[kind]] == [path.stem for path in files(kind)]
    after_algorithms = list(document).index("algorithms") + 1
    assert tuple(list(document)[after_algorithms : after_algorithms + len(METHODS)]) == METHODS
    ipa = next(row for row in document["losses"] if row["name"] == "ipa")
    assert ipa["needs"] == ["behaviour_log_prob", "chunk_id", "old_log_prob"]
    assert ipa["required_options"] == ["max_mismatch"]
    pushcube = next(row for row in document["simulators"] if row["name"] == "maniskill_pushcube")
    assert pushcube["task"] == load_sim_config("maniskill_pushcube").task
    only = subprocess.run(
        [sys.executable, "-m", "embodied_rl.catalog", "loggers", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert list(json.loads(only.stdout)) == ["loggers"]


def test_tables_name_everything(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    for kind in KINDS:
        assert f"{kind} ({len(files(kind))})" in printed
        for entry in entries(kind):
            assert f"\n{entry.name}\t" in printed
            assert entry.command in printed
            assert entry.description in printed, "also with words in brackets"
    main(["policies", "loggers"])
    some = capsys.readouterr().out
    assert "policies (" in some
    assert "experiments (" not in some
    assert "advantages (" not in some


def test_other_names_of_kinds_and_unpadded_lines(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for words in (["simulators"], ["sims"], ["sim"]):
        main(words)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]
    rows = [line.split("\t") for line in printed[0].splitlines()[2:-1]]
    assert [row[0] for row in rows] == [entry.name for entry in entries("simulators")]
    assert [cell for row in rows for cell in row if cell != cell.strip()] == [], "cells are not padded"


def test_algorithms_lists_the_mathematics_after_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    main(["algorithms"])
    printed = capsys.readouterr().out
    titles = ["algorithms (", *(f"{kind.replace('_', ' ')} ({len(TABLES[kind])})" for kind in METHODS)]
    places = [printed.index(title) for title in titles]
    assert places == sorted(places)
    lines: dict[str, dict[str, str]] = {}
    for kind, start, end in zip(METHODS, places[1:], [*places[2:], len(printed)], strict=True):
        lines[kind] = {line.split()[0]: line for line in printed[start:end].splitlines() if line.strip()}
        for name, info in TABLES[kind].items():
            # Whole and unchanged: "-H[pi]" is no markup.
            assert info.summary in lines[kind][name]
            assert lines[kind][name].rstrip().endswith(info.source)
            assert f"\t{info.unit}\t" in lines[kind][name]
    assert "\tcritic\t" in lines["advantages"]["gae"]
    assert "\tbehaviour log-probs\t" in lines["losses"]["topr"]
    assert "log-probs" not in lines["losses"]["policy_gradient"]


@pytest.mark.parametrize("kind", METHODS)
def test_methods_are_those_of_the_tables(kind: str) -> None:
    found = methods(kind)
    assert [method.name for method in found] == list(TABLES[kind])
    for method in found:
        info = TABLES[kind][method.name]
        assert set(method.needs) == info.needs
        assert set(method.required_options) <= set(method.options)
        # The function that the catalogue names takes what the catalogue says it takes.
        assert {*method.options} <= inspect.signature(load_target(method.target)).parameters.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulatrs"], "'simulatrs' is not a kind of the catalogue. Did you mean 'simulators'? Known: algorithms, experiments"),
        (["policies", "robots", "--json"], "'robots' is not a kind of the catalogue."),
        (["policies", "robots"], "'robots' is not a kind of the catalogue."),
        (["--jsn"], "'--jsn' is not a kind"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in one_line_error(main, arguments, capsys)
    with pytest.raises(SystemExit):
        main(arguments)
    assert capsys.readouterr().out == "", "no table before it"


def test_help_names_the_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert "|".join(KINDS) in capsys.readouterr().out
