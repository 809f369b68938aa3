"""Short runs of every kind end with the weights and the metrics that they had before, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.runs import BY_THE_CLOCK, RESUMED, RUNS, hashes, known, machine, run

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
