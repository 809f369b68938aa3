"""Before a robot's policy learns by itself: behaviour cloning of the task's expert, or of the run's recorded episodes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embodied_rl.config import CloningConfig, HybridConfig, RecordedConfig, TrainConfig
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


def clone_experts(
    configs: Mapping[str, TrainConfig], policy: Policy, run_dir: Path, is_over: Callable[[], bool], *, shown: bool
) -> dict[str, dict[str, float]]:
    """Clone `algorithm.warm_start.episodes` successful episodes: those of `recording`, or of the expert, recorded into ``run_dir`` first.

    The expert plays in separate simulators, which end with it: the run's own are left as they are.

    Args:
        configs: {domain: its own} of those that the policy plays, cloned together so that none is forgotten; a run's only one has no name.
        is_over: asked between the expert's rounds, which then is an error, and between epochs, of which the first is always made.

    Returns:
        Of each domain ``loss`` of the last epoch, ``episodes``, ``steps`` that were learned from, and ``minibatches``.

    Raises:
        UserError: the task has no expert, none of its episodes succeeded, a recording does not fit, or the time was over.
        SimFault: see EnvManager.
    """
    sets: dict[str, EpisodeDataset] = {}
    for domain, own in configs.items():
        sim = own.sim if own.recording else instrumented(own.sim, expert=expert_of(own), reconfigure=False)
        with EnvManager.from_config(sim, EpisodeSeeds.given(0), autoreset=False) as manager:
            demonstrations = Demonstrations(_cloning_of(own), manager, policy, run_dir, domain=domain, is_over=is_over, shown=shown)
            episodes = demonstrations.load()
        # Nothing is left out: the success on held-out seeds says how well it went.
        data = sets[domain] = EpisodeDataset(episodes, demonstrations.spec, demonstrations.options(), seed=own.seed)
        read_statistics(policy, data)
    config = next(iter(configs.values()))
    cloning, options = _cloning_of(config), config.algorithm.warm_start
    assert options is not None, "the run has a warm start"
    hybrid = HybridConfig(device=config.hybrid.device, num_threads=config.hybrid.num_threads or 1)  # here: the run's own ranks wait
    learner = make_learner(CloningObjective(policy, cloning.algorithm), policy, cloning.algorithm, hybrid)
    figures: dict[str, float] = {}
    minibatches = 0
    with progress_bar("cloning, epochs", options.num_epochs, shown=shown) as advance:
        for epoch in range(options.num_epochs):
            if epoch > 0 and is_over():
                break
            share = 1.0 - 0.9 * epoch / max(options.num_epochs - 1, 1)
            turns = itertools.zip_longest(*(data.epoch(epoch, options.minibatch_rows) for data in sets.values()))
            batches = (batch for turn in turns for batch in turn if batch is not None)
            taken = [learner.step(step_rows(policy, batch), share * options.learning_rate) for batch in batches]
            figures, minibatches = mean_figures(taken), minibatches + len(taken)
            advance(1, f"loss {figures['imitation_loss']:.4g}")
    common = {"loss": figures["imitation_loss"], "minibatches": float(minibatches)}
    return {name: {**common, "episodes": float(data.num_episodes), "steps": float(data.num_steps)} for name, data in sets.items()}


def _cloning_of(config: TrainConfig) -> TrainConfig:
    """The run as one that clones."""
    options = config.algorithm.warm_start
    assert options is not None, "the run has a warm start"
    recorded: RecordedConfig = dataclasses.replace(
        config.algorithm.recorded, expert_episodes=options.episodes, max_episodes=options.episodes, only_success=True
    )
    changes: dict[str, Any] = {"groups": None, "off_policy": None, "warm_start": None, "recorded": recorded}
    algorithm = dataclasses.replace(
        config.algorithm, **changes, cloning=CloningConfig(), learning_rate=options.learning_rate, adam_eps=1e-8, max_grad_norm=1.0
    )
    return dataclasses.replace(config, algorithm=algorithm)
