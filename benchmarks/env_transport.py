"""Microseconds per environment step of a no-op environment: our manager, gymnasium's AsyncVectorEnv, SB3's SubprocVecEnv.

A contender's step ends when the observations lie in memory that belongs to the caller, as a rollout needs them: ours are
views into shared memory and are copied once; AsyncVectorEnv copies by itself, or is asked not to and copied once as ours are.
The contenders take turns within each round, so that a change of the machine's load meets all of them; medians over rounds.

    python benchmarks/env_transport.py
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import gymnasium
import numpy as np
from no_op import COUNT_MODULUS, NoOpEnv
from tables import provenance, text_table

from embodied_rl.sim.affinity import available_cores
from embodied_rl.sim.env import SimFactory
from embodied_rl.sim.manager import EnvManager

NUM_ENVS = 8
PAYLOADS: dict[str, dict[str, int]] = {"100 B": {"num_floats": 25}, "224x224x3": {"image": 224}}
ASYNC, ASYNC_VIEWS, SUBPROC = "gymnasium AsyncVectorEnv", "gymnasium AsyncVectorEnv, copy=False", "SB3 SubprocVecEnv"


class Stepper(Protocol):
    """One side's environments, ready to be stepped."""

    def run(self, num_steps: int) -> None:
        """Step all environments this many times."""
        ...

    def observations(self) -> np.ndarray:
        """[N, ...] what the caller owns after the last step."""
        ...

    def close(self) -> None: ...


class OurStepper:
    """The manager in lockstep, or with two halves of the slots alternating as the training loop does."""

    def __init__(self, target: str, kwargs: dict[str, int], num_workers: int, halves: bool) -> None:
        self._manager = EnvManager(SimFactory(target, kwargs=kwargs), NUM_ENVS, num_workers=num_workers)
        first = self._manager.reset()
        self._key = next(iter(first.observation))
        self._owned = first.observation[self._key].copy()
        self._actions = np.zeros((NUM_ENVS, 1), np.float32)
        bounds = (0, NUM_ENVS // 2, NUM_ENVS) if halves else (0, NUM_ENVS)
        self._groups = [range(start, stop) for start, stop in itertools.pairwise(bounds)]

    def run(self, num_steps: int) -> None:
        if len(self._groups) == 1:
            for _ in range(num_steps):
                np.copyto(self._owned, self._manager.step(self._actions).observation[self._key])
            return
        manager, key = self._manager, self._key
        parts = [(group, self._actions[group.start : group.stop], self._owned[group.start : group.stop]) for group in self._groups]
        for group, actions, _ in parts:
            manager.send(group, actions)
        for step in range(num_steps):
            for group, actions, owned in parts:
                np.copyto(owned, manager.recv(group).observation[key])
                if step < num_steps - 1:
                    manager.send(group, actions)

    def observations(self) -> np.ndarray:
        return self._owned

    def close(self) -> None:
        self._manager.close()


class AsyncStepper:
    """gymnasium's AsyncVectorEnv: one process per environment, observations through shared memory."""

    def __init__(self, kwargs: dict[str, int], copy: bool) -> None:
        self._envs = gymnasium.vector.AsyncVectorEnv([partial(NoOpEnv, **kwargs)] * NUM_ENVS, shared_memory=True, copy=copy)
        self._copy = copy
        self._owned = np.array(self._envs.reset()[0])
        self._actions = np.zeros((NUM_ENVS, 1), np.float32)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            observation = self._envs.step(self._actions)[0]
            if self._copy:
                self._owned = observation
            else:
                np.copyto(self._owned, observation)

    def observations(self) -> np.ndarray:
        return self._owned

    def close(self) -> None:
        self._envs.close()


class SubprocStepper:
    """stable-baselines3's SubprocVecEnv: one process per environment, everything through pipes; what comes back is fresh memory."""

    def __init__(self, kwargs: dict[str, int]) -> None:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        self._envs = SubprocVecEnv([partial(NoOpEnv, **kwargs)] * NUM_ENVS)
        self._owned: Any = self._envs.reset()
        self._actions = np.zeros((NUM_ENVS, 1), np.float32)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._owned = self._envs.step(self._actions)[0]

    def observations(self) -> np.ndarray:
        return self._owned

    def close(self) -> None:
        self._envs.close()


def our_name(env: str, num_workers: int, halves: bool) -> str:
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    return f"ours, {env}, {workers}, {'halves' if halves else 'lockstep'}"


def default_name() -> str:
    """What a user gets who sets nothing: a gymnasium.Env, as many workers as there are cores, two alternating groups."""
    return our_name("gymnasium.Env", min(available_cores(), NUM_ENVS), halves=True)


def contenders(kwargs: dict[str, int]) -> dict[str, Callable[[], Stepper]]:
    """{name: how to start it} for one payload."""
    factories: dict[str, Callable[[], Stepper]] = {}
    for env, target in (("gymnasium.Env", "no_op:NoOpEnv"), ("native SimEnv", "no_op:NoOpSim")):
        for num_workers in sorted({1, 2, min(available_cores(), NUM_ENVS)}):
            for halves in (False, True):
                factories[our_name(env, num_workers, halves)] = partial(OurStepper, target, kwargs, num_workers, halves)
    factories[ASYNC] = partial(AsyncStepper, kwargs, copy=True)
    factories[ASYNC_VIEWS] = partial(AsyncStepper, kwargs, copy=False)
    factories[SUBPROC] = partial(SubprocStepper, kwargs)
    return factories


@dataclass
class Contender:
    """A started stepper with its measurements."""

    stepper: Stepper
    steps_per_segment: int = 0
    total_steps: int = 0
    us: list[float] = field(default_factory=list)
    """Microseconds per environment step, one per round."""

    def segment(self, num_steps: int) -> float:
        """Seconds for this many steps of all environments."""
        started = time.perf_counter()
        self.stepper.run(num_steps)
        seconds = time.perf_counter() - started
        self.total_steps += num_steps
        return seconds

    def calibrate(self, segment_s: float) -> None:
        """Warm up, then choose how many steps make a segment of about `segment_s` seconds."""
        self.segment(20)
        self.steps_per_segment = max(10, round(segment_s / (self.segment(50) / 50)))

    def measure(self) -> None:
        self.us.append(1e6 * self.segment(self.steps_per_segment) / (self.steps_per_segment * NUM_ENVS))

    def check(self, name: str) -> None:
        """Every step must have arrived, exactly once, in every environment."""
        counts = self.stepper.observations().reshape(NUM_ENVS, -1)[:, 0]
        if not (counts == self.total_steps % COUNT_MODULUS).all():
            raise AssertionError(f"{name}: after {self.total_steps} steps the environments report {counts} (modulo {COUNT_MODULUS}).")


def measure(payload: str, rounds: int, segment_s: float) -> dict[str, list[float]]:
    """{contender: µs per environment step, one per round}; all contenders are alive, one after another is stepped."""
    running: dict[str, Contender] = {}
    try:
        for name, start in contenders(PAYLOADS[payload]).items():
            running[name] = Contender(start())
        for contender in running.values():
            contender.calibrate(segment_s)
        for _ in range(rounds):
            for contender in running.values():
                contender.measure()
        for name, contender in running.items():
            contender.check(name)
    finally:
        # Newest first: AsyncVectorEnv's processes are forks of this one and hold whatever was open when they were made.
        for contender in reversed(running.values()):
            contender.stepper.close()
    return {name: contender.us for name, contender in running.items()}


def report(payload: str, us: dict[str, list[float]]) -> str:
    """The table of one payload; the ratio is to the faster of AsyncVectorEnv's two settings."""
    medians = {name: statistics.median(values) for name, values in us.items()}
    peer = min(medians[ASYNC], medians[ASYNC_VIEWS])
    rows = [
        [name, f"{medians[name]:.2f}", f"{min(us[name]):.2f}", f"{max(us[name]):.2f}", f"{peer / medians[name]:.1f}x"]
        for name in sorted(us, key=lambda name: medians[name])
    ]
    return text_table([f"{payload}, {NUM_ENVS} environments", "µs/step", "min", "max", "AsyncVectorEnv / it"], rows)


def figure(payload: str, us: dict[str, list[float]]) -> str:
    """The figure we quote: our default and our best configuration, both with the gymnasium.Env that the peer runs too."""
    medians = {name: statistics.median(values) for name, values in us.items()}
    peer = min(medians[ASYNC], medians[ASYNC_VIEWS])
    best = min((name for name in us if name.startswith("ours, gymnasium.Env")), key=lambda name: medians[name])
    native = min((name for name in us if name.startswith("ours, native")), key=lambda name: medians[name])
    parts = [f"{peer / medians[default_name()]:.1f}x by default"]
    parts += [f"{peer / medians[name]:.1f}x at best ({name.removeprefix('ours, ')})" for name in (best, native)]
    return f"figure: AsyncVectorEnv / ours at {payload}: {'; '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--segment-s", type=float, default=0.2, help="seconds that each contender is measured in each round")
    parser.add_argument("--payloads", nargs="+", choices=list(PAYLOADS), default=list(PAYLOADS))
    arguments = parser.parse_args()
    print(provenance("stable-baselines3"))
    results = {payload: measure(payload, arguments.rounds, arguments.segment_s) for payload in arguments.payloads}
    for payload, us in results.items():
        print(f"\n{report(payload, us)}")
    print(f"\nmedians of {arguments.rounds} interleaved rounds; by default: {default_name().removeprefix('ours, ')}")
    for payload, us in reversed(results.items()):
        print(figure(payload, us))


if __name__ == "__main__":
    main()
