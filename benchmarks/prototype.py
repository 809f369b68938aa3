"""The least that our own scheme can cost: a slab of shared memory and a flag each way per worker, spin-then-block at both ends.

No faults, no deadlines, no counts, no ends of episodes: what our manager costs beyond it is what it promises beyond it. Every step has
a number; one flag of a worker holds the number of the step that was asked for last, another that of the step that was done.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from steppers import Env, Side

LINE = 16
"""Words in a cache line: every flag has a line of its own."""
END = 0xFFFFFFFF
_SPINS, _YIELDS, _NAP_S, _LONGEST_NAP_S = 20, 1000, 100e-6, 20e-3


class Slab:
    """Observations, actions and flags as a process sees them; `parts` is what another process needs to see the same."""

    def __init__(self, num_envs: int, num_workers: int, shape: tuple[int, ...], dtype: str, blocks: Any) -> None:
        self.parts = (num_envs, num_workers, shape, dtype, blocks)
        observation, action, asked, done = (memoryview(block).cast("B") for block in blocks)
        self.observation = np.frombuffer(observation, dtype).reshape(num_envs, *shape)
        self.action = np.frombuffer(action, np.float32).reshape(num_envs, -1)
        self.asked, self.done = asked.cast("I"), done.cast("I")

    @staticmethod
    def create(context: Any, env: Env, num_envs: int, num_workers: int) -> Slab:
        one = env.make()
        space, num_actions = one.observation_space, one.action_space.shape[0]
        one.close()
        flags = num_workers * LINE * 4
        sizes = (num_envs * int(np.prod(space.shape)) * space.dtype.itemsize, num_envs * num_actions * 4, flags, flags)
        return Slab(num_envs, num_workers, space.shape, space.dtype.str, [context.RawArray("B", size) for size in sizes])


class PrototypeStepper:
    """`num_workers` processes with the simulator of ``env.ours``, in lockstep."""

    def __init__(self, side: Side, shares: list[range], actions: np.ndarray) -> None:
        context = multiprocessing.get_context("spawn")
        self._slab = Slab.create(context, side.env, side.num_envs, side.num_workers)
        self._processes = [
            context.Process(target=_work, args=(dict(side.env.ours), self._slab.parts, worker, rows.start, rows.stop), daemon=True)
            for worker, rows in enumerate(shares)
        ]
        for process in self._processes:
            process.start()
        self._number = 1
        for worker in range(side.num_workers):
            _wait(self._slab.done, worker * LINE, self._number)
        self._owned = self._slab.observation.copy()
        self._actions = itertools.cycle(actions)

    def run(self, num_steps: int) -> None:
        slab, owned, number = self._slab, self._owned, self._number
        flags = [worker * LINE for worker in range(slab.parts[1])]
        for actions in itertools.islice(self._actions, num_steps):
            slab.action[:] = actions
            number = (number + 1) % END
            for flag in flags:
                slab.asked[flag] = number
            for flag in flags:
                _wait(slab.done, flag, number)
            np.copyto(owned, slab.observation)
        self._number = number

    def observations(self) -> np.ndarray:
        return self._owned

    def close(self) -> None:
        for worker in range(len(self._processes)):
            self._slab.asked[worker * LINE] = END
        for process in self._processes:
            process.join()


def _wait(flags: memoryview, index: int, number: int) -> None:
    """Spin a little, yield, then nap until the flag holds the number, or END."""
    for _ in range(_SPINS):
        if flags[index] == number:
            return
    for _ in range(_YIELDS):
        os.sched_yield()
        if flags[index] == number:
            return
    nap_s = _NAP_S
    while flags[index] not in (number, END):
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)  # who is not measured takes no time of the others'


def _work(factory: dict[str, Any], parts: Any, worker: int, first: int, last: int) -> None:
    from embodied_rl.sim.factory import SimFactory
    from embodied_rl.types import StepBuffers

    slab, ids, flag = Slab(*parts), list(range(last - first)), worker * LINE
    sim = SimFactory(**factory).make(len(ids))
    out = StepBuffers.allocate(sim.spec, len(ids))
    out.observation[next(iter(sim.spec.observation))] = slab.observation[first:last]
    sim.reset(ids, ids, out)
    action, number = slab.action[first:last], 1
    slab.done[flag] = number
    while True:
        number = (number + 1) % END
        _wait(slab.asked, flag, number)
        if slab.asked[flag] == END:
            break
        sim.step(ids, action, out)
        slab.done[flag] = number
    sim.close()
