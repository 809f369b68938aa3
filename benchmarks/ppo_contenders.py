"""The sides of ppo_cpu.py; each runs its own training loop and stops at the gate between two iterations."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gate import Gate, Stop, gate_of_this_process
from peer_environments import PeerEnvironment
from ppo_outside import Workload, timed

from embodied_rl.config import TrainConfig

NEVER = 10**12
"""Environment steps: the gate ends a contender, not its own limit."""
MOST_TRIALS = 100
"""Iterations in which a run chooses how its slots are stepped; what it chooses after them, it chooses while it is measured."""
OURS, OURS_ONE, OURS_AHEAD = "ours", "ours, 1 worker", "ours, max_staleness=1"
VARIANTS = {OURS: [], OURS_ONE: ["sim.num_workers=1"], OURS_AHEAD: ["algorithm.max_staleness=1"]}
"""{ours: what is said beside the task}. With a staleness of 1 rollouts are played by the weights of the update before."""
SB3_DUMMY, SB3_SUBPROC, SB3_DUMMY_ONE = "SB3 DummyVecEnv", "SB3 SubprocVecEnv", "SB3 DummyVecEnv, 1 thread"
EAGER = "CleanRL's structure"
PIXEL_NAMES = (*VARIANTS, SB3_DUMMY, SB3_SUBPROC, SB3_DUMMY_ONE)
NAMES = (*PIXEL_NAMES, EAGER)
SAC_NAMES = (OURS, SB3_DUMMY, SB3_DUMMY_ONE)
OUTSIDE = {
    "skrl": PeerEnvironment("skrl", ("skrl==2.1.1",)),
    "rsl_rl": PeerEnvironment("rsl_rl", ("rsl-rl-lib==5.5.1",)),
    "sample_factory": PeerEnvironment(
        "sample_factory",
        ("sample-factory==2.1.1", "signal-slot-mp==1.0.5", "faster-fifo==1.5.2", "colorlog==6.12.0", "tensorboardx==2.6.5"),
        without_dependencies=True,
    ),
    # It has installed nowhere yet (its set-up downloads Raylib, and fails without), so there is no side to run.
    "pufferlib": PeerEnvironment("pufferlib", ("pufferlib==3.0.0",), without_dependencies=True),
    "cleanrl": PeerEnvironment(
        "cleanrl",
        ("cleanrl==0.4.8",),
        cannot="1.2.0 wants Python < 3.11, and 0.4.8 of 2021 steps one environment of gym's former interface: our script in its "
        "structure takes part.",
    ),
}
"""Peers in environments of their own; their sides are in ppo_outside.py."""


def command_of(name: str, script: str, overrides: list[str]) -> list[str]:
    """The command line of a contender. Raises MissingPeerError where it cannot be installed."""
    if name not in OUTSIDE:
        return [sys.executable, script, "--contender", name, "--overrides", *overrides]
    from embodied_rl.compose import load_train_config

    work = workload_of(load_train_config(overrides))
    return [str(OUTSIDE[name].python()), str(Path(__file__).with_name("ppo_outside.py")), name, work.to_json()]


def workload_of(config: TrainConfig) -> Workload:
    """What peers with other words for it are to do. Raises UserError where not all sides can do it alike."""
    from peers import ppo_arguments

    ppo_arguments(config)
    algorithm, policy = config.algorithm, config.policy
    assert config.sim.task is not None
    return Workload(
        task=config.sim.task,
        num_envs=config.sim.num_slots,
        rollout_steps=algorithm.rollout_steps,
        num_epochs=algorithm.num_epochs,
        num_minibatches=-(-config.steps_per_iteration // algorithm.minibatch_size),
        hidden_sizes=policy.hidden_sizes,
        init_log_std=policy.init_log_std,
        learning_rate=algorithm.learning_rate,
        adam_eps=algorithm.adam_eps,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
        clip=algorithm.clip_high,
        value_coef=algorithm.value_coef,
        entropy_coef=algorithm.entropy_coef,
        max_grad_norm=algorithm.max_grad_norm,
        seed=config.seed,
    )


def run_contender(name: str, overrides: list[str]) -> None:
    """Be one contender: train whenever the gate is open, until the parent closes it for good."""
    gate = gate_of_this_process(rest="update" if name in VARIANTS else "policy")
    if name in VARIANTS:
        # As `python -m embodied_rl.train` does, and before torch is loaded; the peers keep their own defaults.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from embodied_rl.compose import load_train_config
    from embodied_rl.sim.rendering import configure_rendering

    configure_rendering()  # before MuJoCo is loaded: the peers draw in this process, or in its children
    with tempfile.TemporaryDirectory() as folder:
        config = load_train_config([*overrides, *VARIANTS.get(name, []), f"total_steps={NEVER}", f"run_dir={folder}"])
        sides: dict[str, Callable[[TrainConfig, Gate], None]] = {
            **dict.fromkeys(VARIANTS, _ours),
            SB3_DUMMY: lambda config, gate: _sb3(config, gate, processes=False),
            SB3_SUBPROC: lambda config, gate: _sb3(config, gate, processes=True),
            SB3_DUMMY_ONE: lambda config, gate: _sb3(config, gate, processes=False, threads=1),
            EAGER: _eager,
        }
        try:
            sides[name](config, gate)
        except Stop:
            return


def _ours(config: TrainConfig, gate: Gate) -> None:
    """The unmodified `Trainer.run`; only the beginnings and times of its rollouts are listened to, once the run has chosen how its slots
    are stepped."""
    from embodied_rl.learning.executors import LocalExecutor
    from embodied_rl.sim.manager import EnvManager
    from embodied_rl.trainer import Trainer

    with Trainer(config, Path(config.run_dir), command="benchmarks/ppo_cpu.py") as trainer:
        collector: Any = trainer.method.collector
        collect = collector.next_rollout

        def gated(iteration: int) -> Any:
            if isinstance(trainer.manager, EnvManager) and trainer.manager.trials is not None and iteration < MOST_TRIALS:
                return collect(iteration)
            gate.begin()
            rollout = collect(iteration)
            gate.add("environment", collector.times.simulate_s)
            gate.add("policy", collector.times.act_s)
            return rollout

        collector.next_rollout = gated
        (learner,) = trainer.method.all_learners
        parts = learner.executor.side_by_side if isinstance(learner.executor, LocalExecutor) else 1
        gate.tell(threads=parts * learner.compute_threads, processes=1 + trainer.manager.num_workers)
        trainer.run()


def _sb3(config: TrainConfig, gate: Gate, processes: bool, threads: int | None = None) -> None:
    """The unmodified ``PPO.learn``, or ``SAC.learn``; a callback hears of its iterations, and the calls to time are timed from outside.

    Args:
        threads: of torch; None: its own default.
    """
    import torch
    from peers import ppo_arguments, sac_arguments, vec_env
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback

    class AtTheGate(BaseCallback):
        def _on_rollout_start(self) -> None:
            gate.begin()

        def _on_step(self) -> bool:
            return True

    if threads is not None:
        torch.set_num_threads(threads)
    envs = vec_env(config, processes)
    try:
        model: Any = SAC(env=envs, **sac_arguments(config)) if config.algorithm.off_policy else PPO(env=envs, **ppo_arguments(config))
        stepped: Any = model.env  # what the library has put around ours, too: pictures' channels come first
        stepped.step = timed(stepped.step, lambda seconds: gate.add("environment", seconds))
        model.train = timed(model.train, lambda seconds: gate.add("update", seconds))
        gate.tell(threads=torch.get_num_threads(), processes=1 + (config.sim.num_slots if processes else 0))
        model.learn(total_timesteps=NEVER, callback=AtTheGate())
    finally:
        envs.close()


def _eager(config: TrainConfig, gate: Gate) -> None:
    from eager_ppo import train

    train(config, gate)
