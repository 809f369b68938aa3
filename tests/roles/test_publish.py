"""Sending less than all weights changes how many bytes are sent, and no number of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from embodied_rl.hybrid.weight_sync import DeltaSink, DeltaSource
from embodied_rl.roles.role_process import LentTensors
from tests.methods.test_multi_domain import COMMON, DOMAINS
from tests.roles.runs import GROUPS, TEXTS, assert_same_run, trained

pytestmark = pytest.mark.usefixtures("forked")

APART = "hybrid=disaggregated"
LORA = [*TEXTS, "algorithm.warm_start=null", "policy.lora_rank=2", "policy.lora_targets=[q_proj]", "total_steps=200"]


def sent(run_dir: Path) -> list[float]:
    """Bytes of each publication that the metrics tell of; the first one, of all weights, comes before them."""
    return [row["roles/published_bytes"] for row in rows_of(run_dir) if "roles/published_bytes" in row]


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    """What was logged."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_sink_has_what_the_source_has() -> None:
    source, sink = DeltaSource(), DeltaSink()
    weights = {"a": torch.arange(100.0), "b": torch.ones(3, dtype=torch.bfloat16)}
    for version in range(3):
        weights["a"][version] = -1.0
        held = sink.take(version, list(source.stream(version, weights.items())))
        assert held.keys() == weights.keys()
        assert all(torch.equal(held[name], weights[name]) for name in weights)
    list(source.stream(4, weights.items()))
    with pytest.raises(ValueError, match="differences to version 4, but the present weights have version 2"):
        sink.take(5, source.stream(5, weights.items()))
    with pytest.raises(ValueError, match="must begin with its base version, not with 'a'"):
        sink.take(6, weights.items())


def test_lent_weights_are_copied_only_if_they_wait() -> None:
    shared = {"a": torch.arange(3.0)}
    at_once, waiting = LentTensors(shared), LentTensors(shared)
    assert next(iter(at_once))[1].data_ptr() == shared["a"].data_ptr()
    for lent in (at_once, waiting):
        lent.give_back()
    shared["a"].zero_()  # the publisher writes the version after next
    assert [tensor.tolist() for _, tensor in waiting] == [[0.0, 1.0, 2.0]]
    assert not list(at_once)


def test_an_adapter_is_merged_where_it_is_played_and_what_did_not_change_stays(tmp_path: Path) -> None:
    """Of shared memory's two buffers each is filled once, so that differences are small from the third publication on."""
    task = [*LORA, APART, "total_steps=200"]
    whole = trained(tmp_path / "whole", *task)
    adapter, changed = (trained(tmp_path / how, *task, f"hybrid.publish={how}") for how in ("adapter", "changed"))
    for less in (adapter, changed):
        assert_same_run(whole, less)
        assert len(sent(less)) == len(sent(whole)) >= 2
        assert sent(less)[-1] < 0.5 * sent(whole)[-1]
        assert {row["roles/restarts"] for row in rows_of(less) if "roles/restarts" in row} == {0.0}, (
            "a player that was replaced got everything again"
        )
    assert sent(adapter)[-1] < 0.5 * sent(changed)[-1]


def test_of_several_domains_the_language_policy_sends_its_adapter(tmp_path: Path) -> None:
    """A network beside it is sent whole; of the language model's 25,000 numbers the adapter is a few hundred."""
    task = [*COMMON, *DOMAINS, "policy.lora_rank=2", "policy.lora_targets=[q_proj]", "total_steps=200", APART]
    whole, adapter = (trained(tmp_path / how, *task, f"hybrid.publish={how}") for how in ("full", "adapter"))
    assert_same_run(whole, adapter)
    assert len(sent(adapter)) == len(sent(whole)) >= 2
    assert max(sent(adapter)) < 0.5 * min(sent(whole))


@pytest.mark.slow
@pytest.mark.parametrize("publish", ["changed", "adapter"])
def test_with_ray(tmp_path: Path, publish: str) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    here, there = trained(tmp_path / "here", *LORA), trained(tmp_path / "ray", *LORA, "hybrid=ray", f"hybrid.publish={publish}")
    assert_same_run(here, there)
    apart = trained(tmp_path / "apart", *LORA, APART)
    assert max(sent(there)) < 0.5 * min(sent(apart))


@pytest.mark.slow
def test_robots_and_two_players(tmp_path: Path) -> None:
    task = [*GROUPS, "total_steps=200", APART]
    assert_same_run(trained(tmp_path / "whole", *task), trained(tmp_path / "changed", *task, "hybrid.publish=changed"))
    two = [*LORA, APART, "hybrid.players=2"]
    assert_same_run(trained(tmp_path / "two", *two), trained(tmp_path / "adapters", *two, "hybrid.publish=adapter"))
