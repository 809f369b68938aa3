"""The Python in docs/language_models.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "language_models.md"


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    # Left out: images, which the example's model does not take, and a server that is not there.
    blocks = [block for block in blocks if "images" not in block and "http://" not in block]
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert (tmp_path / "runs" / "tiny" / "model.safetensors").is_file()
    # A new value head says 0, and "go left" was learned as few tokens.
    result = names["result"]
    assert float(result.value.detach().abs().max()) == 0.0
    assert int(result.mask.sum()) == len(names["sampled"]) <= 3
    assert float(result.log_prob[result.mask].detach().max()) < 0.0
    assert names["completion"].num_tokens == 64 or names["completion"].finish_reason == "stop"
    assert names["backend"].version == 1
    assert "tensor" in capsys.readouterr().out


def test_table_of_backends_names_what_exists() -> None:
    import importlib

    found = re.findall(r"^\| `(\w+)\.(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == 5
    for module, name in found:
        assert hasattr(importlib.import_module(f"embodied_rl.generation.{module}"), name)
