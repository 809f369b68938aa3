"""docs/text_environments.md: its example runs, and what it says about the tasks is so."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from embodied_rl.config import load_sim_config
from embodied_rl.errors import MissingExtraError
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.text import gem

PAGE = Path(__file__).resolve().parents[3] / "docs" / "text_environments.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs a checkout")


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    try:
        gem.tasks()
    except MissingExtraError as error:
        pytest.skip(str(error))


def test_the_example_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, str(PAGE), "exec"), {})
    assert "Let me see: \\boxed{5}" in printed.getvalue()


def test_the_table_is_what_the_configurations_say() -> None:
    rows = re.findall(r"^\| `(gem_\w+)` \| `([^`]+)`.*\| (\d+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 3
    for name, task, steps in rows:
        config = load_sim_config(name)
        assert config.task == task
        sim = SimFactory(config.target, config.task, config.kwargs, config.extra).make(1)
        assert sim.spec.max_episode_steps == int(steps)
