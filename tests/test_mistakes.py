"""Mistakes that once hung, ended in a traceback, or were taken without a word: each is one line that says what to do."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from embodied_rl.cli import run_command
from embodied_rl.compose import load_train_config
from embodied_rl.errors import UserError
from embodied_rl.hybrid.learner import resolve_device
from embodied_rl.policies.build import build_policy
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec

SPEC = SimSpec("t", {"state": TensorSpec((8,))}, ActionSpec.discrete(3))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sim={a:1}", r"^sim must be the name of one file of configs/sim, got '\{a:1\}'"),
        ("sim=[cartpole]", r"^sim must be the name .* Did you mean 'cartpole'"),
        ("logger=null", r"^logger must be the name of one file of configs/logger, got 'null'"),
        ("policy=" + "9" * 5000, r"^policy must be the name of one file of configs/policy, got '999"),
        ("run_dir=", r"^run_dir must be a folder, got ''\."),
        ("run_dir=runs/" + "x" * 300, r"^run_dir must be a folder whose names have at most 255 bytes each"),
        ("policy.name=[mlp]", r"^policy\.name=\['mlp'\] is not a choice\."),
        ("policy.name={a:1}", r"^policy\.name=\{'a': 1\} is not a choice\."),
        ("sim.kwargs.a=" + "[" * 2000 + "]" * 2000, r"^'sim\.kwargs\.a=\[.* nested too deeply"),
        ("sim.num_slots=" + "9" * 5000, r"^'?sim\.num_slots\b.*9999"),
        ("sim.num_slots=100000000000000000000", r"^sim\.num_slots must be between 1 and 1,000,000, got 1"),
        ("algorithm.learning_rate=nan", r"^algorithm\.learning_rate must be above 0 and at most 1,000, got nan"),
        ("algorithm.advantage_options.x=inf", r"^algorithm\.advantage_options\.x must be a finite number, got inf"),
    ],
)
def test_overrides(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_train_config([override])
    assert len(str(caught.value)) <= 400


def test_a_policy_larger_than_the_machine_says_how_large_it_would_be() -> None:
    config = load_train_config(["policy=mlp", "policy.hidden_sizes=[999999,999999]"]).policy
    # Of each network 8·h + h weights, h·h + h, and 3·h + 3 or h + 1; four times float32.
    h = 999_999
    weights = 2 * (8 * h + h + h * h + h) + 3 * h + 3 + h + 1
    needed = 4 * 4 * weights / 2**30
    assert psutil.virtual_memory().total / 2**30 < needed
    with pytest.raises(UserError, match=rf"takes {needed:,.0f} GiB to train .* Its largest layer is .* \[999999, 999999\]"):
        build_policy(config, SPEC)


def test_looking_at_a_policys_size_draws_no_random_numbers() -> None:
    config = load_train_config(["policy=mlp", "policy.normalize_observation=true"]).policy
    torch.manual_seed(3)
    first = build_policy(config, SPEC).state_dict()
    torch.manual_seed(3)
    from embodied_rl.policies import actor_critic

    bare = actor_critic.build_policy(config, SPEC).state_dict()  # type: ignore[arg-type]
    assert first.keys() == bare.keys()
    assert all(torch.equal(first[name], bare[name]) for name in first)


def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r"^device=cuda: torch finds 0 GPUs here .* Use device=cpu or auto\."):
        resolve_device("cuda")
    with pytest.raises(UserError, match=r"^device='gpu' is not a device: write cpu, cuda or cuda:1\."):
        resolve_device("gpu")
    assert resolve_device("cpu") == torch.device("cpu")


def test_a_folder_where_a_file_is_wanted_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_command(lambda: tmp_path.write_text("x"))
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: Is a directory.\n"
