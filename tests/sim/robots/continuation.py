"""Plays simulators with seeded random actions and keeps every bit of what comes out; also run as a program, for a fresh process.

``python continuation.py RECIPES.json``: for each recipe, build its simulator, restore its snapshot into the environment it names,
play on and write the trace.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.sim.factory import SimFactory
from embodied_rl.types import SimSpec, StepBuffers

Trace = dict[str, np.ndarray]
NUM_STEPS = 120
ACTION_SEED = 2
NEXT_SEED = 200
"""Seed of the episode that begins after the end of the one that was taken up."""


@dataclass(frozen=True)
class Subject:
    """A simulator under test."""

    target: str
    task: str | None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def make(self, num_envs: int) -> Any:
        return SimFactory(f"embodied_rl.sim.robots.{self.target}", self.task, self.kwargs).make(num_envs)


def random_actions(spec: SimSpec, num_steps: int = NUM_STEPS, seed: int = ACTION_SEED, hold: int = 8) -> np.ndarray:
    """[num_steps, A] within the bounds, each held for `hold` steps so that arms get somewhere and touch things."""
    rng = np.random.default_rng(seed)
    count = -(-num_steps // hold)
    if spec.action.kind == "discrete":
        return np.repeat(rng.integers(spec.action.num_actions, size=(count, 1)), hold, axis=0)[:num_steps]
    low, high = np.asarray(spec.action.low), np.asarray(spec.action.high)
    return np.repeat(rng.uniform(low, high, (count, spec.action.dim)), hold, axis=0)[:num_steps].astype(np.float32)


def start(sim: Any, env_id: int, seed: int) -> None:
    sim.reset([env_id], [seed], StepBuffers.allocate(sim.spec, env_id + 1), {"reconfigure": True})


def play(sim: Any, env_id: int, actions: np.ndarray, next_seed: int = NEXT_SEED) -> Trace:
    """One step per action; after an episode's end the next one starts from `next_seed`, `next_seed` + 1, …"""
    out = StepBuffers.allocate(sim.spec, env_id + 1)
    rows: dict[str, list[np.ndarray]] = {}
    for action in actions:
        sim.step([env_id], action[None], out)
        seen = {**out.observation, "reward": out.reward, "terminated": out.terminated, "truncated": out.truncated, "success": out.success}
        for key, value in seen.items():
            rows.setdefault(key, []).append(value[env_id].copy())
        if out.terminated[env_id] or out.truncated[env_id]:
            sim.reset([env_id], [next_seed], out, {"reconfigure": True})
            for key, value in out.observation.items():
                rows.setdefault(f"first {key}", []).append(value[env_id].copy())
            next_seed += 1
    return {key: np.stack(values) for key, values in rows.items()}


def differences(left: Trace, right: Trace) -> list[str]:
    """What is not equal bit by bit, with the first step where it is not; [] when all is."""
    found = [f"{key} is in one trace only" for key in left.keys() ^ right.keys()]
    for key in left.keys() & right.keys():
        a, b = left[key], right[key]
        if a.shape != b.shape:
            found.append(f"{key}: shapes {a.shape} and {b.shape}")
        elif a.tobytes() != b.tobytes():
            steps = [step for step in range(len(a)) if a[step].tobytes() != b[step].tobytes()]
            gap = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
            found.append(f"{key}: {len(steps)} of {len(a)} steps differ, the first at {steps[0]}, by at most {gap:.3g}")
    return sorted(found)


def continue_elsewhere(cases: list[tuple[Subject, bytes]], folder: Path) -> list[Trace]:
    """Take every snapshot up in one fresh process, by environment 1 of a simulator that has never been reset, and play on."""
    recipes = []
    for number, (subject, data) in enumerate(cases):
        (folder / f"{number}.snapshot").write_bytes(data)
        recipes.append({"target": subject.target, "task": subject.task, "kwargs": subject.kwargs})
    (folder / "recipes.json").write_text(json.dumps(recipes))
    done = subprocess.run([sys.executable, __file__, str(folder / "recipes.json")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    traces = []
    for number in range(len(cases)):
        with np.load(folder / f"{number}.npz") as saved:
            traces.append({key: saved[key] for key in saved.files})
    return traces


def main(recipes: Path) -> None:
    for number, recipe in enumerate(json.loads(recipes.read_text())):
        sim = Subject(**recipe).make(2)
        sim.restore(1, (recipes.parent / f"{number}.snapshot").read_bytes())
        trace: Any = play(sim, 1, random_actions(sim.spec))
        np.savez(recipes.parent / f"{number}.npz", **trace)
        sim.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
