"""What a run with one task offers, of a run with several: offloading, starts inside episodes, warm starts, films."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from tests.methods.test_multi_domain import COMMON, DOMAINS
from tests.roles.runs import TWO_POLES, assert_same_run, configured, curve, trained


def test_everything_of_several_domains_is_moved_out_and_back(tmp_path: Path) -> None:
    """Two learners' optimizers, one cache, three tasks' simulators: the run is the one in which nothing moves, bit for bit."""
    task = [*COMMON, *DOMAINS, "total_steps=200"]
    plain = trained(tmp_path / "plain", *task)
    config = configured(tmp_path / "moved", *task, "hybrid.offload=[optimizer,gradients,kv_cache,simulators]", "hybrid.device=cpu")
    (tmp_path / "moved").mkdir()
    with Trainer(config, tmp_path / "moved", command="test") as trainer:
        assert len(trainer.method.all_learners) == 2
        trainer.run()
        usage = trainer.engine.residency.memory_usage()
    rows = curve(tmp_path / "moved")
    assert all(row["residency/moved_bytes"] > 0 for row in rows if "groups/consumed" in row)
    assert usage.keys() == {"optimizer", "gradients", "kv_cache", "simulators"}
    before, after = (load_checkpoint(folder) for folder in (plain, tmp_path / "moved"))
    assert all((before.policy[name] == after.policy[name]).all() for name in before.policy)


def test_each_domain_has_its_own_starts_inside_episodes_and_resumes_to_the_bit(tmp_path: Path) -> None:
    starts = "{share: 0.6, success_return: 15, sources: [success], chunk_steps: 4, min_episodes: 2}"
    task = [*TWO_POLES, f"algorithm.initialized={starts}", "domains.near.algorithm.initialized.share=0.3", "total_steps=2500"]
    task += ["checkpoint.every_steps=900", "checkpoint.keep_last=9"]
    whole = trained(tmp_path / "whole", *task)
    last = curve(whole)[-1]
    assert last["domains/near/initialized/sources"] > 0
    assert last["domains/far/initialized/sources"] > 0
    middle = sorted((whole / "checkpoints").glob("step_*"))[0]
    told = load_checkpoint(middle).state["algorithm"]["starts"]
    assert told.keys() == {"near", "far"}
    part = tmp_path / "part"
    shutil.copytree(middle, part / "checkpoints" / middle.name)
    shutil.copy(whole / "metrics.jsonl", part)
    assert_same_run(whole, train(configured(part, *task, "resume=auto")))
