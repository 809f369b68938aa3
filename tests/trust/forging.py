"""Files as a stranger would send them: whole, with right checksums, and naming code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from embodied_rl.checkpoint import save_checkpoint
from embodied_rl.config import TrainConfig
from embodied_rl.files import sum_of_document, sums_of
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec
from tests.sample_run import make_config

EVIL = "tests.trust.evil:run"
CARTPOLE = SimSpec(
    task="CartPole-v1",
    observation={"state": TensorSpec((4,), "float32")},
    action=ActionSpec.discrete(2),
    max_episode_steps=500,
    can_render=True,
)
SIM = {"name": "cartpole", "target": "embodied_rl.sim.robots.gymnasium:make", "task": "CartPole-v1", "num_slots": 2}


def cartpole_config(run_dir: Path, **changes: Any) -> TrainConfig:
    changes = {"sim": SIM, "video": {"enabled": "no"}, "algorithm": {"rollout_steps": 32, "minibatch_size": 32}, **changes}
    return make_config(run_dir, **changes)


def checkpoint_in(run_dir: Path, config: TrainConfig | None = None) -> Path:
    """A checkpoint of a policy that was never trained."""
    from embodied_rl.policies.build import build_policy

    config = config or cartpole_config(run_dir)
    policy = build_policy(config.policy, CARTPOLE)
    return save_checkpoint(
        run_dir,
        100,
        policy=policy.state_dict(),
        learner={"rng": torch.get_rng_state()},
        state={"rng": np.random.default_rng(4).bit_generator.state},
        config=config,
        spec=CARTPOLE,
        metrics={},
        command="python -m embodied_rl.train sim=cartpole",
    )


def forge(checkpoint: Path, changes: Mapping[str, Any], *, signature: Callable[[str], str | None] = lambda old: old) -> Path:
    """Change keys of the configuration (``sim.kwargs.environment``), and make all checksums right again.

    Args:
        signature: from the old signature to the new one; None leaves it out.
    """
    data = yaml.safe_load((checkpoint / "config.yaml").read_text(encoding="utf-8"))
    for key, value in changes.items():
        place = data
        *way, last = key.split(".")
        for part in way:
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
        place[last] = value
    (checkpoint / "config.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name not in ("MODEL_CARD.md", "state.json")]
    state["files"] = sums_of(checkpoint, files)
    state["signature"] = signature(state.get("signature"))
    if state["signature"] is None:
        del state["signature"]
    state["sha256"] = sum_of_document(state)
    (checkpoint / "state.json").write_text(json.dumps(state), encoding="utf-8")
    return checkpoint


def strangers(checkpoint: Path, folder: Path, changes: Mapping[str, Any]) -> Path:
    """A copy of a run with such changes, and without a signature."""
    run = shutil.copytree(checkpoint.parent.parent, folder, symlinks=True)
    return forge(run / "checkpoints" / checkpoint.name, changes, signature=lambda old: None)
