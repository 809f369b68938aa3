"""A point on a line that no simulator is needed for, policies for it in real checkpoints, and recordings that they play."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied_rl.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from embodied_rl.episodes.recording import RecordedEpisode, RecordingInfo
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.policies.actor_critic import ActorCritic, build_policy
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec
from tests.sample_run import make_config

LIMIT = 8
CHOICES = SimSpec("line", {"state": TensorSpec((2,))}, ActionSpec.discrete(2), max_episode_steps=LIMIT)
VECTORS = SimSpec("line", {"state": TensorSpec((2,))}, ActionSpec.continuous([-2.0], [2.0]), max_episode_steps=LIMIT)


def save_policy(
    run_dir: Path, spec: SimSpec, step: int, bias: float, *, weight: float = 0.0, log_std: float = -0.5, distribution: str = "gaussian"
) -> Path:
    """A checkpoint whose policy pushes to the right with `bias` − `weight` · position: the logit of choice 1, or the mean of the vector."""
    policy_config = {"hidden_sizes": [], "distribution": distribution}
    config = make_config(run_dir, policy=policy_config, sim={"name": "line", "task": "line"}, checkpoint={"keep_last": 100})
    policy = build_policy(config.policy, spec)
    with torch.no_grad():
        layer = policy.actor[0]
        assert isinstance(layer, torch.nn.Linear)
        layer.weight.zero_()
        layer.bias.zero_()
        layer.weight[-1, 0], layer.bias[-1] = -weight, bias
        if spec.action.kind == "continuous":
            for name, parameter in policy.named_parameters():
                if name.endswith("log_std"):
                    parameter.fill_(log_std)
    return save_checkpoint(
        run_dir, step, policy=policy.state_dict(), learner={}, state={}, config=config, spec=spec, metrics={}, command="made by a test"
    )


def policy_of(path: Path) -> tuple[Checkpoint, ActorCritic]:
    checkpoint = load_checkpoint(path, with_learner=False)
    policy = build_policy(checkpoint.config.policy, checkpoint.spec)
    policy.load_state_dict(checkpoint.policy)
    policy.train(False)
    return checkpoint, policy


def play(path: Path, count: int, *, seed: int = 0, sample: bool = True) -> list[RecordedEpisode]:
    """Episodes of a checkpoint's policy: x' = x + 0.3 push + noise, reward 1 − |x| (at least 0), terminated beyond 1.5."""
    checkpoint, policy = policy_of(path)
    action = checkpoint.spec.action
    rng, episodes = np.random.default_rng([seed, 99]), []
    for number in range(count):
        x, rows, seen = float(rng.uniform(-0.5, 0.5)), [], []
        for time in range(LIMIT):
            state = np.array([x, 1.0], np.float32)
            seen.append(state)
            noise = rng.random((1, 1)) if action.kind == "discrete" else rng.standard_normal((1, 1))
            with torch.no_grad():
                out = policy.act({"state": torch.from_numpy(state)[None]}, torch.from_numpy(noise.astype(np.float32)) if sample else None)
            drawn = out.action.numpy()[0]
            taken = action.denormalise(drawn)
            push = 2.0 * float(taken[0]) - 1.0 if action.kind == "discrete" else 0.5 * float(taken[0])
            x += 0.3 * push + float(rng.normal(0, 0.05))
            over = abs(x) > 1.5
            rows.append((taken, drawn, out.log_prob.numpy()[0], max(0.0, 1 - abs(x)), over, not over and time == LIMIT - 1))
            if over:
                break
        taken, drawn, log_prob, reward, terminated, truncated = zip(*rows, strict=True)
        episodes.append(
            RecordedEpisode(
                seed=1000 * seed + number,
                observation={"state": np.stack([*seen, np.array([x, 1.0], np.float32)])},
                action=np.stack(taken),
                reward=np.array(reward, np.float32),
                terminated=np.array(terminated),
                truncated=np.array(truncated),
                success=np.zeros(len(rows), bool),
                sampled_action=np.stack(drawn),
                log_prob=np.stack(log_prob) if sample else None,
            )
        )
    return episodes


def info_of(spec: SimSpec, *, metadata: dict[str, Any] | None = None, **policy: Any) -> RecordingInfo:
    return RecordingInfo(spec, {"task": "line"}, policy or {"kind": "checkpoint", "sample": True}, metadata=metadata or {})


def write(folder: Path, spec: SimSpec, episodes: Sequence[RecordedEpisode], **changes: Any) -> Path:
    """A recording in our own format."""
    with RecordingWriter(folder, info_of(spec, **changes)) as writer:
        for episode in episodes:
            writer.add(episode)
    return folder
