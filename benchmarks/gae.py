"""Generalised advantage estimation: how long it takes, against the loops it replaces and against the memory it must touch.

``python benchmarks/gae.py``: rollouts of 512 steps in 512 slots, float32. Sides take turns in each round and are called five times in a
row; medians over rounds, one thread where nothing else is said. A round's first call finds caches and free memory as the side before left
them, and shows that more than anything else; the other calls are what is compared.

- ours: `embodied_rl.algorithms.advantages.gae`, numba, the whole call with its checks and allocations; with one thread, and with one
  for each core;
- ours, to the host and back: with tensors on a GPU, where there is one;
- torch loop, numpy loop: backwards over time, each step vectorised over slots, as published PPO implementations do;
- memory floor: two plain copies, of rewards and values, and reading the flags once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tables import provenance, text_table
from torch import Tensor

from embodied_rl.algorithms.advantages import gae
from embodied_rl.sim.affinity import available_cores

GAMMA, LAMBDA = 0.99, 0.95
CALLS = 5
WANTED = 10.0
"""Times faster than the torch loop."""


def make_rollout(num_steps: int, num_slots: int, truncated_share: float) -> dict[str, np.ndarray]:
    """Random numbers; one step in a hundred terminates."""
    rng = np.random.default_rng(0)
    shape = (num_steps, num_slots)
    terminated, truncated = rng.random(shape) < 0.01, rng.random(shape) < truncated_share
    num_cut = int((truncated & ~terminated).sum())
    floats = {name: rng.normal(size=size).astype(np.float32) for name, size in (("reward", shape), ("value", shape))}
    ends = {"last_value": rng.normal(size=num_slots).astype(np.float32), "final_value": rng.normal(size=num_cut).astype(np.float32)}
    return {**floats, **ends, "terminated": terminated, "truncated": truncated}


def torch_loop(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loop of published implementations, made right for truncations: everything that needs no loop is outside of it."""
    reward, value = given["reward"], given["value"]
    cut = given["truncated"] & ~given["terminated"]
    following = torch.cat([value[1:], given["last_value"][None]])
    following[cut] = given["final_value"]
    delta = reward + GAMMA * following * (~given["terminated"]) - value
    decay = GAMMA * LAMBDA * (~(given["terminated"] | given["truncated"]))
    advantage, carried = torch.empty_like(reward), torch.zeros_like(reward[0])
    for t in range(len(reward) - 1, -1, -1):
        carried = delta[t] + decay[t] * carried
        advantage[t] = carried
    return advantage, advantage + value


def numpy_loop(given: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The same with numpy."""
    reward, value = given["reward"], given["value"]
    following = np.concatenate([value[1:], given["last_value"][None]])
    following[given["truncated"] & ~given["terminated"]] = given["final_value"]
    delta = reward + np.float32(GAMMA) * following * ~given["terminated"] - value
    decay = np.float32(GAMMA * LAMBDA) * ~(given["terminated"] | given["truncated"])
    advantage, carried = np.empty_like(reward), np.zeros_like(reward[0])
    for t in range(len(reward) - 1, -1, -1):
        carried = delta[t] + decay[t] * carried
        advantage[t] = carried
    return advantage, advantage + value


def memory_floor(given: dict[str, np.ndarray]) -> None:
    """Touch what the computation must touch: read rewards, values and flags, write advantages and returns.

    Both are held until the end: a second array in the place of the first would be in the cache already.
    """
    advantage, returns = np.empty_like(given["reward"]), np.empty_like(given["value"])
    np.copyto(advantage, given["reward"])
    np.copyto(returns, given["value"])
    np.count_nonzero(given["terminated"])
    np.count_nonzero(given["truncated"])


def threaded(tensors: dict[str, Tensor], num_threads: int) -> Any:
    """Ours with so many threads."""
    torch.set_num_threads(num_threads)
    try:
        return gae(**tensors, gamma=GAMMA, gae_lambda=LAMBDA)
    finally:
        torch.set_num_threads(1)


def sides_of(arrays: dict[str, np.ndarray]) -> dict[str, Callable[[], Any]]:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    sides: dict[str, Callable[[], Any]] = {
        "ours, numba": lambda: gae(**tensors, gamma=GAMMA, gae_lambda=LAMBDA),
        "ours, numba, a thread per core": lambda: threaded(tensors, available_cores()),
        "torch loop": lambda: torch_loop(tensors),
        "numpy loop": lambda: numpy_loop(arrays),
        "memory floor": lambda: memory_floor(arrays),
    }
    if torch.cuda.is_available():
        on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}

        def synchronised(compute: Callable[[], Any]) -> Any:
            result = compute()
            torch.cuda.synchronize()
            return result

        sides["ours, to the host and back"] = lambda: synchronised(lambda: gae(**on_gpu, gamma=GAMMA, gae_lambda=LAMBDA))
        sides["torch loop on the GPU"] = lambda: synchronised(lambda: torch_loop(on_gpu))
    return sides


def largest_difference(sides: dict[str, Callable[[], Any]]) -> float:
    """Of any side's advantages and returns from the first side's."""
    expected = [torch.as_tensor(part) for part in next(iter(sides.values()))()]
    differences = [0.0]
    for compute in sides.values():
        found = compute()
        if found is not None:
            differences += [float((torch.as_tensor(x).cpu() - y).abs().max()) for x, y in zip(found, expected, strict=True)]
    return max(differences)


def measure(sides: dict[str, Callable[[], Any]], num_rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each side in each round: of its first call, and the median of the others."""
    first: dict[str, list[float]] = {name: [] for name in sides}
    later: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(num_rounds):
        for name, compute in sides.items():
            seconds = []
            for _ in range(CALLS):
                start = time.perf_counter()
                compute()
                seconds.append(time.perf_counter() - start)
            first[name].append(seconds[0])
            later[name].append(statistics.median(seconds[1:]))
    return first, later


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--truncated", type=float, default=0.003, help="share of the steps that are truncated")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sides = sides_of(make_rollout(options.steps, options.slots, options.truncated))
    difference = largest_difference(sides)
    if not difference < 1e-4:
        raise SystemExit(f"The sides do not agree: they differ by {difference:.2g}.")
    first, seconds = measure(sides, options.rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ours = medians["ours, numba"]
    print(provenance("numba"))
    rows = [
        [name, *(f"{1e3 * part:.3f}" for part in (medians[name], min(own), max(own), statistics.median(first[name])))]
        for name, own in seconds.items()
    ]
    rows = [[*row, f"{medians[row[0]] / ours:.1f}"] for row in rows]
    print(f"T={options.steps}, N={options.slots}, float32, {options.rounds} rounds; largest difference of any side {difference:.1g}\n")
    print(text_table(["side", "median ms", "min", "max", "first call", "to ours"], rows))
    ratio = medians["torch loop"] / ours
    fastest = min(seconds["torch loop"]) / min(seconds["ours, numba"])
    print()
    print(
        f"figure: torch loop / ours = {ratio:.1f}x, fastest rounds {fastest:.1f}x "
        f"(reach: {WANTED:.0f}x, {'kept' if min(ratio, fastest) >= WANTED else 'missed'}); "
        f"numpy loop / ours = {medians['numpy loop'] / ours:.1f}x; ours / memory floor = {ours / medians['memory floor']:.2f}x"
    )


if __name__ == "__main__":
    main()
