"""Short runs of every kind end with the weights and the metrics that they had before, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.golden.runs import BY_THE_CLOCK, RESUMED, RUNS, hashes, known, machine, run, weights

OFTEN = {"ppo_fused", "ppo_autograd", "ppo_cnn", "tiny_vla_chunks", "flow", "openvla_lora", "grpo", "gigpo", "ipa", "dapo", "decoupled_ppo"}
OFTEN |= {
    "tiny_vla_groups",
    "bc",
    "bc_chunks",
    "dagger",
    "iql",
    "rlpd",
    "agents_warm_start",
    "domains",
    "initialized_sampling",
    "ppo_resumed",
}
OFTEN |= {"fsdp2_mlp", "within_episodes"}
"""Runs of a few seconds; the others are slow."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in [*RUNS, *RESUMED]])
def test_golden_run(name: str, tmp_path: Path) -> None:
    if name == "ray":
        pytest.importorskip("ray", reason="ray is not installed")
    table = known()
    if machine() not in table:
        pytest.skip(
            f"hashes.json has no section '{machine()}': python -m tests.golden.runs on a commit that is known to be right makes one"
        )
    found = hashes(run(name, tmp_path), values=name not in BY_THE_CLOCK)
    assert found == table[machine()][name], "renew it with python -m tests.golden.runs only where the commit says which sum changed and why"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in sorted(OFTEN - set(RESUMED)) if name in RUNS])
def test_a_golden_run_on_a_gpu_ends_as_on_a_processor_and_repeats(name: str, tmp_path: Path) -> None:
    """To rounding: sums have another order there. On an H200 the largest difference of any run was 9e-5, of a CNN."""
    if name == "bc_chunks":
        pytest.importorskip("av", reason="films are not installed")
    there = ["hybrid.device=cuda", *(["hybrid.sharding.num_shards=1"] if name.startswith("fsdp2") else [])]
    here, first, second = (
        weights(run(name, tmp_path / folder, *words)) for folder, words in (("cpu", there[1:]), ("gpu", there), ("again", there))
    )
    for key, wanted in here.items():
        torch.testing.assert_close(first[key], wanted, rtol=1e-2, atol=1e-3, msg=key)
        assert torch.equal(first[key], second[key]), key
