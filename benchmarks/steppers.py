"""The sides of the environment benchmarks: each steps the same environments with the same actions in its own way.

A side is described by what JSON holds (`Side`), so that it can be started in a process of its own (`contest.py`), by another
interpreter too where a library does not live in this one. Libraries are imported by the side that needs them.

A step of a side ends when the observations lie in memory that belongs to the caller, as a rollout needs them: views are copied,
and fresh memory is taken as it is.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from prototype import PrototypeStepper

NUM_PREPARED = 64
"""Steps whose actions are drawn beforehand and then repeated, so that no side pays for drawing."""


@dataclass(frozen=True)
class Env:
    """One environment as every side gets it."""

    target: str
    """``module:factory`` of a `gymnasium.Env`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `SimFactory`; empty: the adapter of `target`."""
    envpool: str | None = None
    """EnvPool's id of the same task."""

    def make(self) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(import_module(module), name)(**self.kwargs)


@dataclass(frozen=True)
class Side:
    """Which side, and how it is set."""

    kind: str
    env: Env
    num_envs: int
    num_workers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


class Stepper(Protocol):
    """One side's environments, ready to be stepped."""

    def run(self, num_steps: int) -> None:
        """Step every environment this many times; nothing is in flight afterwards."""
        ...

    def observations(self) -> np.ndarray:
        """[N, ...] what the caller owns after the last step."""
        ...

    def close(self) -> None: ...


def prepared_actions(env: Env, num_envs: int) -> np.ndarray:
    """[NUM_PREPARED, N, A] float32, uniform between the bounds, the same for every side."""
    one = env.make()
    low, high = one.action_space.low, one.action_space.high
    one.close()
    return np.random.default_rng(0).uniform(low, high, (NUM_PREPARED, num_envs, *low.shape)).astype(np.float32)


class PlainStepper:
    """A loop over the environments in this process: what stepping costs without any transport."""

    def __init__(self, side: Side, first: int = 0, count: int | None = None) -> None:
        count = side.num_envs if count is None else count
        self._envs = [side.env.make() for _ in range(count)]
        self._owned = np.stack([env.reset(seed=first + i)[0] for i, env in enumerate(self._envs)])
        actions = prepared_actions(side.env, side.num_envs)[:, first : first + count]
        self._actions: Iterator[np.ndarray] = itertools.cycle(actions)

    def run(self, num_steps: int) -> None:
        numbered, owned = list(enumerate(self._envs)), self._owned
        for actions in itertools.islice(self._actions, num_steps):
            for i, env in numbered:
                observation, _, terminated, truncated, _ = env.step(actions[i])
                if terminated or truncated:
                    observation, _ = env.reset()
                owned[i] = observation

    def observations(self) -> np.ndarray:
        return self._owned

    def close(self) -> None:
        for env in self._envs:
            env.close()


class PlainPerCoreStepper:
    """A plain loop in each of `num_workers` processes at once, which never wait for each other: what the machine's cores give together."""

    def __init__(self, side: Side) -> None:
        context = multiprocessing.get_context("spawn")
        shares = _shares(side.num_envs, side.num_workers)
        self._pipes, self._processes = [], []
        for rows in shares:
            ours, theirs = context.Pipe()
            process = context.Process(target=_plain_worker, args=(side, rows.start, rows.stop - rows.start, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self._owned = np.concatenate([pipe.recv() for pipe in self._pipes])

    def run(self, num_steps: int) -> None:
        for pipe in self._pipes:
            pipe.send(num_steps)
        self._owned = np.concatenate([pipe.recv() for pipe in self._pipes])

    def observations(self) -> np.ndarray:
        return self._owned

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def _plain_worker(side: Side, first: int, count: int, pipe: Any) -> None:
    stepper = PlainStepper(side, first, count)
    pipe.send(stepper.observations())
    while (num_steps := pipe.recv()) is not None:
        stepper.run(num_steps)
        pipe.send(stepper.observations())
    stepper.close()


class OurStepper:
    """The manager. Options: ``mode`` is "lockstep", "halves" (two alternating groups, as the training loop steps them) or
    "asynchronous" (whatever is ready, at least ``min_ready`` slots, is sent again at once); ``placement`` as of `EnvManager`."""

    def __init__(self, side: Side) -> None:
        from embodied_rl.sim.factory import SimFactory
        from embodied_rl.sim.manager import EnvManager

        factory = SimFactory(**side.env.ours) if side.env.ours else SimFactory(side.env.target, kwargs=side.env.kwargs)
        self._num_envs = n = side.num_envs
        self._mode, self._min_ready = side.options.get("mode", "lockstep"), side.options.get("min_ready", 1)
        groups = 2 if self._mode == "halves" else 1
        placement = side.options.get("placement", "none")
        self._manager = EnvManager(factory, n, num_workers=side.num_workers, num_groups=groups, placement=placement)
        first = self._manager.reset()
        self._key = next(iter(first.observation))
        self._owned = first.observation[self._key].copy()
        self._actions = itertools.cycle(prepared_actions(side.env, n))
        self._run = {"lockstep": self._lockstep, "halves": self._halves, "asynchronous": self._asynchronous}[self._mode]

    def run(self, num_steps: int) -> None:
        self._run(num_steps)

    def _lockstep(self, num_steps: int) -> None:
        manager, key, owned = self._manager, self._key, self._owned
        for actions in itertools.islice(self._actions, num_steps):
            np.copyto(owned, manager.step(actions).observation[key])

    def _halves(self, num_steps: int) -> None:
        manager, key, half = self._manager, self._key, self._num_envs // 2
        parts = [(range(half), self._owned[:half]), (range(half, self._num_envs), self._owned[half:])]
        actions = next(self._actions)
        for group, _ in parts:
            manager.send(group, actions[group.start : group.stop])
        for step in range(num_steps):
            actions = next(self._actions)
            for group, owned in parts:
                np.copyto(owned, manager.recv(group).observation[key])
                if step < num_steps - 1:
                    manager.send(group, actions[group.start : group.stop])

    def _asynchronous(self, num_steps: int) -> None:
        manager, key, owned, in_flight = self._manager, self._key, self._owned, self._num_envs
        left = [num_steps - 1] * self._num_envs
        manager.send(range(self._num_envs), next(self._actions))
        while in_flight:
            batch = manager.recv(min_ready=min(self._min_ready, in_flight))
            slots = batch.slots
            owned[slots] = batch.observation[key]
            again = [slot for slot in slots.tolist() if left[slot]]
            for slot in again:
                left[slot] -= 1
            in_flight -= len(slots) - len(again)
            if again:
                manager.send(slots if len(again) == len(slots) else again, next(self._actions)[again])

    def observations(self) -> np.ndarray:
        return self._owned

    def close(self) -> None:
        self._manager.close()


class AsyncStepper:
    """gymnasium's AsyncVectorEnv: one process per environment, observations through shared memory. Option ``copy``: its own copy."""

    def __init__(self, side: Side) -> None:
        from gymnasium.vector import AsyncVectorEnv, AutoresetMode

        self._copy = bool(side.options.get("copy", True))
        makers = [side.env.make] * side.num_envs
        self._envs = AsyncVectorEnv(makers, shared_memory=True, copy=self._copy, autoreset_mode=AutoresetMode.SAME_STEP)
        self._owned = np.array(self._envs.reset(seed=0)[0])
        self._actions = itertools.cycle(prepared_actions(side.env, side.num_envs))

    def run(self, num_steps: int) -> None:
        for actions in itertools.islice(self._actions, num_steps):
            observation = self._envs.step(actions)[0]
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

    def __init__(self, side: Side) -> None:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        self._envs = SubprocVecEnv([side.env.make] * side.num_envs)
        self._owned: Any = self._envs.reset()
        self._actions = itertools.cycle(prepared_actions(side.env, side.num_envs))

    def run(self, num_steps: int) -> None:
        for actions in itertools.islice(self._actions, num_steps):
            self._owned = self._envs.step(actions)[0]

    def observations(self) -> np.ndarray:
        return self._owned

    def close(self) -> None:
        self._envs.close()


class QueueStepper:
    """`num_workers` processes with a share of the environments each, commands and results through `multiprocessing.Queue`.

    The way of RLinf's and verl's simulator processes. All workers are told before any is waited for.
    """

    def __init__(self, side: Side) -> None:
        context = multiprocessing.get_context("spawn")
        self._shares = [slice(rows.start, rows.stop) for rows in _shares(side.num_envs, side.num_workers)]
        self._commands: list[Any] = [context.Queue() for _ in self._shares]
        self._results: list[Any] = [context.Queue() for _ in self._shares]
        self._processes = [
            context.Process(target=_queue_worker, args=(side, rows.start, rows.stop - rows.start, commands, results), daemon=True)
            for rows, commands, results in zip(self._shares, self._commands, self._results, strict=True)
        ]
        for process in self._processes:
            process.start()
        self._owned = np.concatenate([results.get(timeout=120)[0] for results in self._results])
        self._actions = itertools.cycle(prepared_actions(side.env, side.num_envs))

    def run(self, num_steps: int) -> None:
        for actions in itertools.islice(self._actions, num_steps):
            for rows, commands in zip(self._shares, self._commands, strict=True):
                commands.put(actions[rows])
            for rows, results in zip(self._shares, self._results, strict=True):
                self._owned[rows] = results.get()[0]

    def observations(self) -> np.ndarray:
        return self._owned

    def close(self) -> None:
        for commands in self._commands:
            commands.put(None)
        for process in self._processes:
            process.join()


def _queue_worker(side: Side, first: int, count: int, commands: Any, results: Any) -> None:
    envs = [side.env.make() for _ in range(count)]
    zeros, flags = np.zeros(count, np.float32), np.zeros(count, bool)
    results.put((np.stack([env.reset(seed=first + i)[0] for i, env in enumerate(envs)]), zeros, flags, flags))
    while (actions := commands.get()) is not None:
        rows = [_step_and_reset(env, action) for env, action in zip(envs, actions, strict=True)]
        observation, reward, terminated, truncated = zip(*rows, strict=True)
        results.put((np.stack(observation), np.array(reward, np.float32), np.array(terminated), np.array(truncated)))
    for env in envs:
        env.close()


def _step_and_reset(env: Any, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
    observation, reward, terminated, truncated, _ = env.step(action)
    if terminated or truncated:
        observation, _ = env.reset()
    return observation, reward, terminated, truncated


class RayStepper:
    """One Ray actor per environment; all are called before any is waited for."""

    def __init__(self, side: Side) -> None:
        import ray

        # Actors import this module and the environments' by name, in processes that Ray starts.
        folder = os.path.dirname(os.path.abspath(__file__))
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.path.dirname(folder)])
        self._ray = ray
        ray.init(address="local", num_cpus=side.num_envs, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        actor = ray.remote(num_cpus=1)(EnvActor)
        self._actors = [actor.remote(side.env) for _ in range(side.num_envs)]
        self._owned = np.stack(ray.get([actor.reset.remote(i) for i, actor in enumerate(self._actors)]))
        self._actions = itertools.cycle(prepared_actions(side.env, side.num_envs))

    def run(self, num_steps: int) -> None:
        get, owned = self._ray.get, self._owned
        for actions in itertools.islice(self._actions, num_steps):
            answers = get([actor.step.remote(action) for actor, action in zip(self._actors, actions, strict=True)])
            for i, answer in enumerate(answers):
                owned[i] = answer[0]

    def observations(self) -> np.ndarray:
        return self._owned

    def close(self) -> None:
        self._ray.shutdown()


class EnvActor:
    """What lives in a Ray actor."""

    def __init__(self, env: Env) -> None:
        self._env = env.make()

    def reset(self, seed: int) -> np.ndarray:
        return self._env.reset(seed=seed)[0]

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        return _step_and_reset(self._env, action)


class EnvPoolStepper:
    """EnvPool (Weng et al. 2022): C++ environments on threads. Option ``batch_size``: less than all is its asynchronous mode."""

    def __init__(self, side: Side) -> None:
        import envpool

        assert side.env.envpool is not None, f"EnvPool has no {side.env.target}"
        n = side.num_envs
        self._batch_size = int(side.options.get("batch_size", n))
        self._batches = n // self._batch_size
        self._pool = envpool.make_gymnasium(side.env.envpool, num_envs=n, batch_size=self._batch_size, num_threads=side.num_workers, seed=0)
        actions = prepared_actions(side.env, n)[:, : self._batch_size].astype(self._pool.action_space.dtype)
        self._actions = itertools.cycle(actions)
        self._owned = np.zeros((n, *self._pool.observation_space.shape))
        if self._batches == 1:
            self._owned = self._pool.reset()[0]
        else:
            self._pool.async_reset()
            self._waiting = [self._pool.recv()[-1]["env_id"] for _ in range(self._batches)]

    def run(self, num_steps: int) -> None:
        pool = self._pool
        if self._batches == 1:
            for actions in itertools.islice(self._actions, num_steps):
                self._owned = pool.step(actions)[0]
            return
        for ids in self._waiting:
            pool.send(next(self._actions), ids)
        for actions in itertools.islice(self._actions, self._batches * (num_steps - 1)):
            observation, _, _, _, info = pool.recv()
            ids = info["env_id"]
            self._owned[ids] = observation
            pool.send(actions, ids)
        self._waiting = []
        for _ in range(self._batches):
            observation, _, _, _, info = pool.recv()
            self._waiting.append(info["env_id"])
            self._owned[info["env_id"]] = observation

    def observations(self) -> np.ndarray:
        return self._owned

    def close(self) -> None:
        self._pool.close()


def _prototype(side: Side) -> Stepper:
    return PrototypeStepper(side, _shares(side.num_envs, side.num_workers), prepared_actions(side.env, side.num_envs))


STEPPERS: dict[str, Callable[[Side], Stepper]] = {
    "plain": PlainStepper,
    "plain_per_core": PlainPerCoreStepper,
    "ours": OurStepper,
    "prototype": _prototype,
    "async": AsyncStepper,
    "subproc": SubprocStepper,
    "queue": QueueStepper,
    "ray": RayStepper,
    "envpool": EnvPoolStepper,
}

NEEDS: dict[str, str] = {"subproc": "stable_baselines3", "ray": "ray", "envpool": "envpool"}
"""Modules that a side needs and that may be missing."""


def side_from_dict(data: Mapping[str, Any]) -> Side:
    """The inverse of `dataclasses.asdict`."""
    return Side(**{**data, "env": Env(**data["env"])})


def start(side: Side) -> Stepper:
    """Build a side's environments in this process. Raises whatever its library raises."""
    return STEPPERS[side.kind](side)


def _shares(num_envs: int, num_workers: int) -> list[range]:
    bounds = [round(worker * num_envs / num_workers) for worker in range(num_workers + 1)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]
