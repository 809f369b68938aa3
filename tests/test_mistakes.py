"""Mistakes that once hung, ended in a traceback, or were taken without a word: each is one line that says what to do."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from embodied_rl.algorithms.fitted_q import FittedQConfig, RecordedSteps, fit_q
from embodied_rl.commands.cli import run_command
from embodied_rl.config.compose import load_train_config
from embodied_rl.errors import UserError
from embodied_rl.learning.devices import resolve_device
from embodied_rl.policies import actor_critic
from embodied_rl.policies.build import build_policy
from embodied_rl.policies.q_ensemble import ActorWithCritics
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
        ("algorithm.advantage_options.x=inf", r"^algorithm\.advantage_options\.x must be a finite number between .*, got inf"),
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


def test_critics_larger_than_the_machine_say_how_large_they_would_be() -> None:
    h, observation, choices = 999_999, 8, 3
    sizes = ["algorithm=rlpd", "algorithm.off_policy.hidden_sizes=[999999,999999]", "algorithm.off_policy.num_critics=2"]
    config = load_train_config(["sim=cartpole", "policy.hidden_sizes=[16]", "policy.distribution=gaussian", *sizes])
    # Of each critic weights, and scales and shifts of its layer norms; four times float32 for training, once for the target.
    weights = (observation + choices) * h + h + h * h + h + h + 1 + 4 * h
    critics = 2 * 5 * 4 * weights / 2**30
    with pytest.raises(
        UserError, match=rf"^algorithm\.off_policy: .* takes {critics:,.0f} GiB .* weights\.1 \[2, 999999, 999999\]"
    ) as caught:
        ActorWithCritics(actor_critic.build_policy(config.policy, SPEC), config.algorithm.off_policy)  # type: ignore[arg-type]
    assert len(str(caught.value)) <= 400

    nothing = torch.zeros(2, dtype=torch.int64)
    steps = RecordedSteps(
        features=torch.zeros(2, observation), state=nothing, next_state=nothing, action=torch.zeros(2, choices), reward=torch.zeros(2),
        continues=torch.ones(2, dtype=torch.bool), episode=nothing, first_state=nothing[:1], draws=torch.zeros(2, 1, choices),
    )  # fmt: skip
    needed = 8 * 5 * 4 * ((observation + choices + 1) * h + (h + 1) * h + h + 1) / 2**30
    with pytest.raises(UserError, match=rf"^fqe\.hidden_sizes=\[999999, 999999\] takes {needed:,.0f} GiB .* is \[8, 999999, 999999\]\."):
        fit_q(steps, 0.9, FittedQConfig(hidden_sizes=(h, h)))


def test_what_the_system_has_no_memory_for_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fork() -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    for take in (lambda: np.empty(2**58, np.uint8), lambda: torch.empty(2**58, dtype=torch.uint8), fork):
        with pytest.raises(SystemExit) as stopped:
            run_command(take)
        assert stopped.value.code == 1
        told = capsys.readouterr().err
        assert told.startswith("error: This machine has too little memory: ")
        assert told.count("\n") == 1
        assert len(told) <= 410


def test_more_files_than_the_process_may_open_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(SystemExit) as stopped:
            run_command(os.pipe)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert stopped.value.code == 1
    told = capsys.readouterr().err
    assert told == "error: Too many open files: this process may have 3. Raise that (ulimit -n 4096), or use fewer workers.\n"


def test_looking_at_a_policys_size_draws_no_random_numbers() -> None:
    config = load_train_config(["policy=mlp", "policy.normalize_observation=true"]).policy
    torch.manual_seed(3)
    first = build_policy(config, SPEC).state_dict()
    torch.manual_seed(3)
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
