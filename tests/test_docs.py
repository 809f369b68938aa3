"""The documentation builds, and what it says about the configuration is what the code says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from embodied_rl import config
from embodied_rl.commands.train import help_text
from embodied_rl.config import group_names
from embodied_rl.config.compose import compose_config
from embodied_rl.config.describing import GROUPS, described_keys

ROOT = Path(__file__).resolve().parents[1]


def test_configuration_page_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("config_tables", ROOT / "scripts" / "config_tables.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.rewritten(page) == page, "run: .venv/bin/python scripts/config_tables.py"
    # Some rows by hand, so that an empty table is noticed.
    assert '| <a id="algorithm.gamma"></a>`algorithm.gamma` | float | between 0 and 1 | `0.99` |' in page
    assert "`sim.num_workers` | int or 'auto' or null | between 1 and 65,536 | `'auto'` |" in page
    anchors, links = re.findall(r'<a id="([^"]+)">', page), re.findall(r"\]\(#([^)]+)\)", page)
    assert len(anchors) == len(set(anchors)) > 300
    assert len(links) > 30
    assert set(links) <= set(anchors)


@pytest.mark.slow
@pytest.mark.ci_sample
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    missing = [page for page in pages if page.name != "README.html" and not (tmp_path / "site" / page).is_file()]
    assert not missing
    assert "algorithm.gamma" in (tmp_path / "site" / "configuration.html").read_text(encoding="utf-8")


def test_every_key_is_described_and_the_help_fits_a_terminal() -> None:
    keys = [key for group in described_keys().values() for key in group]
    assert len(keys) > 300
    parts = {name for name, part in vars(config).items() if isinstance(part, type) and name.endswith("Config")}
    assert parts == set(GROUPS.values()) - {"VLAOptions", "FlowOptions", "PI0Options"}
    assert [key.name for key in keys if not key.text] == []
    assert {key.kind for key in keys if key.kind.isidentifier()} <= {"bool", "float", "int", "str"}, "a name says no choices"
    text = help_text(width=80)
    assert "  sim.kwargs  (dict[str, Any]: {obs_mode: state, control_mode:" in text.splitlines()
    assert "  stop_at_success  (float or null, above 0 and at most 1: 0.96)" in text.splitlines(), "what --cfg job prints"
    assert all(key.name in text for key in keys)
    assert [line for line in text.splitlines() if len(line) > 80 and not line.startswith("  python -m ")] == []
    assert re.search(r"  total_steps  \(int, between 1 and [\d,]+: 250000\)\n      Environment steps to train for, at most; gradient", text)


def test_every_key_of_the_tables_can_be_typed() -> None:
    """Some choice of files has it; but for what is open, and parts that are set whole."""
    files = ["algorithm=bc", "algorithm=iql", "algorithm=grpo", "generation=vllm", "hybrid=fsdp2"]
    files += [f"policy={name}" for name in group_names("policy")]
    composed = [compose_config(["sim=pendulum", file, *["policy.target=a.b:c"] * (file == "policy=custom")]) for file in files]

    def has(there: Any, parts: list[str]) -> bool:
        return not parts or (isinstance(there, dict) and parts[0] in there and has(there[parts[0]], parts[1:]))

    whole = ("algorithm.warm_start.", "hybrid.placement.", "hybrid.reward_worker.", "domains.NAME", "generation.mix.NAME", "logger.options")
    keys = [key.name for group in described_keys().values() for key in group if not key.name.startswith(whole)]
    assert [key for key in keys if not any(has(one, key.split(".")) for one in composed)] == []
