"""`python alone.py ENV NUM_ENVS NUM_STEPS`: a simulator in a process that has nothing else, for its memory to be measured.

Imports what the simulator needs and no more; says "ready" on stdout and waits for the end of its stdin.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def gymnasium_alone(target: str, kwargs: Mapping[str, Any], num_envs: int, num_steps: int) -> list[Any]:
    """Environments of a factory ``module:name`` of a `gymnasium.Env`, after so many steps each."""
    module, _, name = target.partition(":")
    envs = [getattr(import_module(module), name)(**kwargs) for _ in range(num_envs)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
        action = env.action_space.sample()
        for _ in range(num_steps):
            env.step(action)
    return envs


def adapter_alone(factory: Mapping[str, Any], num_envs: int, num_steps: int) -> Any:
    """The same through our adapter, for what cannot be made without it; `factory`: arguments of `SimFactory`."""
    import numpy as np

    from embodied_rl.sim.factory import SimFactory
    from embodied_rl.types import StepBuffers

    sim = SimFactory(**factory).make(num_envs)
    out, rows = StepBuffers.allocate(sim.spec, num_envs), list(range(num_envs))
    sim.reset(rows, rows, out)
    actions = np.zeros((num_envs, sim.spec.action.dim), np.float32)
    for _ in range(num_steps):
        sim.step(rows, actions, out)
    return sim


def main() -> None:
    env, num_envs, num_steps = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if env["target"]:
        kept = gymnasium_alone(env["target"], env["kwargs"], num_envs, num_steps)
    else:
        kept = adapter_alone(env["ours"], num_envs, num_steps)
    print("ready", flush=True)
    sys.stdin.read()
    del kept


if __name__ == "__main__":
    main()
