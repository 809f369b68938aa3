"""Plays text episodes with random moves; also a script, so that a test can have the same episodes played by a new process."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any

from embodied_rl.sim.text import gem
from embodied_rl.sim.text.turns import TextSim
from embodied_rl.types import StepBuffers


def outcome(out: StepBuffers, i: int) -> list[Any]:
    """Everything that a step put out for one environment."""
    return [str(out.observation["text"][i]), float(out.reward[i]), bool(out.terminated[i]), bool(out.truncated[i]), bool(out.success[i])]


def go_on(sim: TextSim, i: int, out: StepBuffers, first: int = 0, limit: int = 200) -> list[list[Any]]:
    """Random moves from number `first` on until the episode ends or `limit` moves were made; the outcome of each."""
    rows = []
    for t in range(first, first + limit):
        sim.step([i], [sim.sample_action(i, 1000 + t)], out)
        rows.append(outcome(out, i))
        if out.terminated[i] or out.truncated[i]:
            break
    return rows


def episode(sim: TextSim, i: int, seed: int, limit: int = 200) -> list[Any]:
    """The first observation, then the outcome of every move."""
    out = StepBuffers.allocate(sim.spec, len(sim._games))
    sim.reset([i], [seed], out)
    return [str(out.observation["text"][i]), *go_on(sim, i, out, limit=limit)]


def main() -> None:
    """Read {"episodes": [[task, seed], …], "restored": [[task, first move, snapshot in hex], …]}; write what follows from each."""
    wanted, answers = json.load(sys.stdin), sys.stdout
    sys.stdout = io.StringIO()
    played = [episode(gem.make(task, 1), 0, seed) for task, seed in wanted["episodes"]]
    continued = []
    for task, first, data in wanted["restored"]:
        sim = gem.make(task, 2)
        sim.reset([1], [99], out := StepBuffers.allocate(sim.spec, 2))
        sim.restore(1, bytes.fromhex(data))
        continued.append(go_on(sim, 1, out, first))
    heavy = [name for name in ("torch", "transformers", "gymnasium") if name in sys.modules]
    root, said = logging.getLogger(), sys.stdout.getvalue()
    logs = [root.level, len(root.handlers)]
    json.dump({"episodes": played, "restored": continued, "heavy": heavy, "logging": logs, "printed": said}, answers)


if __name__ == "__main__":
    main()
