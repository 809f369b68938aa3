"""docs/algorithms.md and docs/groups.md name what there is: every method with its needs, options and source, every setting and metric.

Formulas are prose and cannot be checked here; what the tables know is, and the pages' examples are run.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.algorithms import rewards
from embodied_rl.algorithms.advantage_table import ADVANTAGES, AdvantageInfo
from embodied_rl.algorithms.aggregation import AGGREGATION_MODES
from embodied_rl.algorithms.filters import FILTERS
from embodied_rl.algorithms.loss_table import LOSS_TERMS, LOSSES, LossInfo
from embodied_rl.algorithms.ratios import LEVELS
from embodied_rl.config import AlgorithmConfig, GroupsConfig, group_names
from embodied_rl.config.compose import compose_config
from embodied_rl.learning.rows import Adjustment
from embodied_rl.rollout.groups import EpisodeCounts, GroupCounts

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLES: dict[str, dict[str, Any]] = {"Advantages": ADVANTAGES, "Losses": LOSSES, "Loss terms": LOSS_TERMS}
METHODS = [(chapter, name) for chapter, table in TABLES.items() for name in table]
LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def plain(text: str) -> str:
    """Without links' addresses and line breaks."""
    return " ".join(LINK.sub(r"\1", text).split())


def chapter(name: str) -> str:
    """What stands below a heading of the second level of docs/algorithms.md."""
    parts = re.split(r"^## (.+)$", page("algorithms.md"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[name]


def section(chapter_name: str, method: str) -> str:
    """The one section of a chapter that has the method in its heading."""
    parts = re.split(r"^### (.+)$", chapter(chapter_name), flags=re.MULTILINE)
    found = [text for heading, text in zip(parts[1::2], parts[2::2], strict=True) if f"`{method}`" in heading]
    assert len(found) == 1, f"'{method}' needs a section of its own in the chapter {chapter_name}"
    return found[0]


def rows(text: str) -> dict[str, list[str]]:
    """{name in the first cell: the cells after it} of every Markdown table; a cell may hold several names."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        cells = [plain(cell) for cell in line.strip().strip("|").split("|")]
        if line.startswith("|"):
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), cells[1:])
    return found


@pytest.mark.parametrize(("chapter_name", "method"), METHODS)
def test_a_method_has_a_section_with_its_source_and_options(chapter_name: str, method: str) -> None:
    info = TABLES[chapter_name][method]
    text = section(chapter_name, method)
    told = plain(text).rpartition("**Source**")[2]
    for source in info.source.split("; "):
        assert source in told, f"the source of '{method}' is {info.source}"
    for option in info.options:
        assert f"`{option}`" in text, f"'{method}' has the option {option}"
    named = plain(text.partition("**Options**")[2].partition("- **")[0])
    known = {*info.options, *AGGREGATION_MODES, *LEVELS, *_choices(info)}
    unknown = [word for word in re.findall(r"`([a-z_]+)`", named) if word not in known]
    assert not unknown, f"'{method}' has no option or choice {unknown}"


def _choices(info: AdvantageInfo | LossInfo) -> set[str]:
    """Words that an option of the function may be set to."""
    words = set()
    for hint in typing.get_type_hints(info.load()).values():
        for part in (hint, *typing.get_args(hint)):
            words |= {value for value in typing.get_args(part) if isinstance(value, str)}
    return words


@pytest.mark.parametrize(("chapter_name", "method"), METHODS)
def test_the_overview_says_what_the_table_says(chapter_name: str, method: str) -> None:
    info = TABLES[chapter_name][method]
    unit, *others = rows(chapter(chapter_name).partition("###")[0])[method]
    needs = others[-1] if chapter_name == "Advantages" else others[0]
    assert unit == info.unit
    wanted = {need.replace("_log_prob", " log-probs").replace("_", " ") for need in info.needs}
    assert set(needs.split(", ")) - {"–"} == wanted
    if chapter_name == "Losses":
        assert others[-1] == info.default_aggregation
    if chapter_name == "Advantages":
        per_entry = {"[T, N]"} if info.layout == "time" else {"[B, L]"} if "reward" in info.inputs else {"[B]"}
        assert {others[0]} == per_entry


@pytest.mark.parametrize("chapter_name", TABLES)
def test_nothing_is_told_that_is_not_there(chapter_name: str) -> None:
    assert rows(chapter(chapter_name).partition("###")[0]).keys() == TABLES[chapter_name].keys()


def test_links_to_papers_lead_to_the_paper_they_name() -> None:
    for name in ("algorithms.md", "groups.md"):
        text = page(name)
        papers = [(label, address) for label, address in LINK.findall(text) if label.startswith("arXiv:")]
        assert papers
        assert all(address == f"https://arxiv.org/abs/{label.removeprefix('arXiv:')}" for label, address in papers)
        assert len(papers) == text.count("[arXiv:"), "every arXiv number is a link"


def public_rewards() -> dict[str, Any]:
    """{name: function or class} that the module of rewards defines."""
    return {
        name: value
        for name, value in vars(rewards).items()
        if not name.startswith("_") and isinstance(value, types.FunctionType | type) and value.__module__ == rewards.__name__
    }


@pytest.mark.parametrize("name", sorted(public_rewards()))
def test_every_reward_function_has_a_row_with_its_source(name: str) -> None:
    cells = " ".join(rows(chapter("Rewards"))[name])
    documentation = inspect.getdoc(public_rewards()[name]) or ""
    for source in (*re.findall(r"arXiv:\d{4}\.\d{5}", documentation), *re.findall(r"\b(?:19|20)\d\d\b", documentation)):
        assert source in cells, f"the source of {name} in its docstring: {source}"


def test_rewards_told_are_there() -> None:
    assert rows(chapter("Rewards")).keys() == public_rewards().keys()


def test_modes_and_levels_are_all_told() -> None:
    assert rows(chapter("Conventions")).keys() >= set(AGGREGATION_MODES)
    levels = chapter("Losses").partition("### Levels of a ratio")[2].partition("###")[0]
    assert rows(levels).keys() == set(LEVELS)


def test_settings_filters_and_modes_of_groups_are_all_told() -> None:
    found = rows(page("groups.md"))
    defaults = {field.name: field.default for field in dataclasses.fields(GroupsConfig) if field.name != "filters"}
    ways = typing.get_args(typing.get_type_hints(GroupsConfig)["overtaking"])
    assert found.keys() >= {*defaults, *FILTERS, *ways, *typing.get_args(Adjustment)}
    for name, default in defaults.items():
        assert found[name][0] == ("null" if default is None else str(default)), name
    for name, build in FILTERS.items():
        for setting in inspect.signature(build).parameters:
            assert f"`{setting}`" in found[name][1], f"the filter {name} has the setting {setting}"


def test_counts_of_groups_add_up_on_the_page_too() -> None:
    sums = dict(re.findall(r"^(groups|episodes)\s+(.+)$", page("groups.md"), flags=re.MULTILINE))
    for kind, counts in (("groups", GroupCounts), ("episodes", EpisodeCounts)):
        whole, parts = sums[kind].split("=")
        names = [field.name for field in dataclasses.fields(counts)]
        assert [whole.strip(), *(part.strip().replace(" ", "_") for part in parts.split("+"))] == names
    (told,) = re.findall(r"A run logs `groups/([^;]+?), of several", page("groups.md"))
    assert [f"groups/{name}" for name in re.findall(r"[a-z_]{3,}", told.replace(" and ", " "))] == list(GroupCounts().figures())


@pytest.mark.parametrize("name", ["algorithms.md", "groups.md"])
def test_keys_of_the_configuration_are_there(name: str) -> None:
    text = page(name)
    named = set(re.findall(r"\balgorithm\.([a-z_]+(?:\.[a-z_]+)*)", text))
    assert named
    open_keys = {"advantage_options", "loss_options"}
    for key in named:
        holder: Any = AlgorithmConfig
        for part in key.split("."):
            hints = typing.get_type_hints(holder)
            assert part in hints, f"algorithm.{key} is no key"
            if part in open_keys:
                break
            holder = next((kind for kind in (hints[part], *typing.get_args(hints[part])) if dataclasses.is_dataclass(kind)), None)
    assert set(re.findall(r"\balgorithm=([a-z_]+)", text)) <= set(group_names("algorithm"))


def test_settings_of_ppo_are_those_of_its_file() -> None:
    import yaml

    found = rows(chapter("PPO, as it runs here").partition("### Settings")[2].partition("###")[0])
    written = yaml.safe_load((DOCS.parent / "configs" / "algorithm" / "ppo.yaml").read_text(encoding="utf-8"))
    values = {name: value for name, value in compose_config([])["algorithm"].items() if name in written}
    names = [word for word in found if word in values]
    assert {"gamma", "clip_high", "target_kl", "reward_clip"} <= set(names)
    for name in names:
        told = [yaml.safe_load(cell) for cell in found[name][0].split(", ")]
        # YAML's own reader takes "3e-4" for a word.
        assert values[name] in [float(value) if isinstance(value, str) and re.fullmatch(r"\de-\d", value) else value for value in told], (
            name
        )


@pytest.mark.parametrize("name", ["algorithms.md", "groups.md"])
def test_examples_run(name: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", page(name), flags=re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, name, "exec"), found)
    if name == "algorithms.md":
        # Two scores 1 and 0 differ from their mean by 1/2, and their unbiased deviation is sqrt(1/2).
        expected = torch.tensor([1.0, -1.0, -1.0, 1.0])[:, None] * 0.5 / (0.5**0.5 + 1e-6)
        mask = found["mask"]
        assert float(found["denominator"]) == int(mask.sum()) == 12
        # d(-A r)/d(log pi) = -A at r = 1, over the 12 entries of both micro-batches.
        wanted = torch.where(mask, -expected / 12, torch.zeros(()))
        torch.testing.assert_close(found["log_prob"].grad, wanted, rtol=1e-5, atol=1e-8)
