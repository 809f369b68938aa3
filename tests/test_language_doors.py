"""What is wrong with a language model's folder or its prompts is one line at every door, before anything is played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.commands import evaluate, serve_agent
from embodied_rl.compose import load_train_config
from embodied_rl.errors import UserError
from embodied_rl.policies.tiny_language import TinyShape, make_tiny_model
from embodied_rl.train import train
from tests.short_run import one_line_error

LAKE = ("sim=frozenlake", "sim.num_workers=1", "policy=language", "agent.actions=[up,down,left,right]", "agent.answer=word")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer was left behind."""
    path = make_tiny_model(tmp_path_factory.mktemp("doors") / "model", ["up down left right"], shape=TinyShape(max_context=128))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    return path


def refused(run_dir: Path, *words: str) -> str:
    """The line that a run's start says."""
    with pytest.raises(UserError) as caught:
        train(
            load_train_config([*LAKE, "algorithm=grpo", "generation=tokens_torch", "logger=quiet", f"run_dir={run_dir}", *words]),
            command="test",
        )
    (line,) = str(caught.value).splitlines()
    return line


def test_training_from_a_folder_without_tokenizer(folder: Path, tmp_path: Path) -> None:
    assert f"Model folder '{folder}' has no tokenizer" in refused(tmp_path / "run", f"policy.model={folder}")


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (evaluate.main, [*LAKE, "policy.model={folder}", "num_episodes=1"]),
        (serve_agent.main, ["model={folder}", "port=0", "output={run}"]),
    ],
    ids=["evaluate", "serve_agent"],
)
def test_a_folder_without_tokenizer(
    main: Callable[[Sequence[str]], None], words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = one_line_error(main, [word.format(folder=folder, run=tmp_path / "run") for word in words], capsys)
    assert f"Model folder '{folder}' has no tokenizer (none of tokenizer.json, tokenizer.model" in line
    assert line.endswith(f"hf download OWNER/MODEL --include 'tokenizer*' 'vocab*' 'merges*' --local-dir {folder}")


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        (["agent.max_prompt_tokens=121"], "agent.max_prompt_tokens=121 is more than the 120 tokens that agent.max_new_tokens=8 leaves"),
        (["agent.max_prompt_tokens=2"], "agent.max_prompt_tokens=2 is too few for a prompt: agent.system, agent.template"),
        (["agent.max_new_tokens=126"], "The 2 tokens that agent.max_new_tokens=126 leaves of 128 of context are too few for a prompt"),
        (["agent.max_new_tokens=128"], "agent.max_new_tokens=128 leaves no room for a prompt in the model's context of 128 tokens"),
    ],
)
def test_prompts_that_cannot_be(agent: list[str], told: str, tmp_path: Path) -> None:
    assert told in refused(tmp_path / "run", "policy.tiny.max_context=128", "agent.max_new_tokens=8", *agent)
