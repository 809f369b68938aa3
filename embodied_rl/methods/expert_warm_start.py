"""Before a robot's policy learns by itself: behaviour cloning of the task's expert, or of the run's recorded episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embodied_rl.config import CloningConfig, HybridConfig, RecordedConfig, TrainConfig, WarmStartConfig
from embodied_rl.episodes.dataset import EpisodeDataset
from embodied_rl.learning.learner import make_learner
from embodied_rl.learning.recorded import CloningObjective, read_statistics, step_rows
from embodied_rl.methods.cloning import mean_figures
from embodied_rl.methods.demonstrations import Demonstrations, expert_of
from embodied_rl.policies.base import Policy
from embodied_rl.progress import progress_bar
from embodied_rl.sim.instrumented import instrumented
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds


def clone_expert(
    config: TrainConfig, policy: Policy, run_dir: Path, is_over: Callable[[], bool], *, shown: bool, domain: str = ""
) -> dict[str, float]:
    """Clone `algorithm.warm_start.episodes` successful episodes: those of `recording`, or of the expert, recorded into ``run_dir`` first.

    The expert plays in separate simulators, which end with it: the run's own are left as they are.

    Args:
        config: of the domain.
        domain: its name; empty: the run's only one.
        is_over: asked between the expert's rounds, which then is an error, and between epochs, of which the first is always made.

    Returns:
        ``loss`` of the last epoch, ``episodes``, ``steps`` that were learned from, and ``minibatches``.

    Raises:
        UserError: the task has no expert, none of its episodes succeeded, a recording does not fit, or the time was over.
        SimFault: see EnvManager.
    """
    options = config.algorithm.warm_start
    assert options is not None, "the run has a warm start"
    cloning = _cloning_of(config, options)
    sim = config.sim if config.recording else instrumented(config.sim, expert=expert_of(config), reconfigure=False)
    with EnvManager.from_config(sim, EpisodeSeeds.given(0), autoreset=False) as manager:
        demonstrations = Demonstrations(cloning, manager, policy, run_dir, domain=domain, is_over=is_over, shown=shown)
        episodes = demonstrations.load()
    # Nothing is left out: the success on held-out seeds says how well it went.
    data = EpisodeDataset(episodes, demonstrations.spec, demonstrations.options(), seed=config.seed)
    read_statistics(policy, data)
    hybrid = HybridConfig(device=config.hybrid.device, num_threads=config.hybrid.num_threads or 1)  # here: the run's own ranks wait
    learner = make_learner(CloningObjective(policy, cloning.algorithm), policy, cloning.algorithm, hybrid)
    figures: dict[str, float] = {}
    minibatches = 0
    with progress_bar("cloning, epochs", options.num_epochs, shown=shown) as advance:
        for epoch in range(options.num_epochs):
            if epoch > 0 and is_over():
                break
            share = 1.0 - 0.9 * epoch / max(options.num_epochs - 1, 1)
            rate, batches = share * options.learning_rate, data.epoch(epoch, options.minibatch_rows)
            taken = [learner.step(step_rows(policy, batch), rate) for batch in batches]
            figures, minibatches = mean_figures(taken), minibatches + len(taken)
            advance(1, f"loss {figures['imitation_loss']:.4g}")
    return {
        "loss": figures["imitation_loss"],
        "episodes": float(data.num_episodes),
        "steps": float(data.num_steps),
        "minibatches": float(minibatches),
    }


def _cloning_of(config: TrainConfig, options: WarmStartConfig) -> TrainConfig:
    """The run as one that clones."""
    recorded: RecordedConfig = dataclasses.replace(
        config.algorithm.recorded, expert_episodes=options.episodes, max_episodes=options.episodes, only_success=True
    )
    changes: dict[str, Any] = {"groups": None, "off_policy": None, "warm_start": None, "recorded": recorded}
    algorithm = dataclasses.replace(
        config.algorithm, **changes, cloning=CloningConfig(), learning_rate=options.learning_rate, adam_eps=1e-8, max_grad_norm=1.0
    )
    return dataclasses.replace(config, algorithm=algorithm)
