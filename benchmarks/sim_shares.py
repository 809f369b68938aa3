"""Which share of a simulator's step is physics, which is drawing, which is other compiled sums of the package's, and which is Python
around them, of the processor time of all threads.

``python benchmarks/sim_shares.py [NAME …]``: simulators of ``configs/sim``, each in a process of its own; without names all robots' that
are installed here. Every native call of MuJoCo, PhysX (sapien), Chipmunk (pymunk) and their renderers is timed where it is called; "other
sums" are robosuite's operational space (numba: inverses by singular values) and the polygons that PushT's reward cuts (GEOS). The rest of
a step is Python. Of every other step only the whole is timed, of the others only such calls, less what the clock takes for one that does
nothing. Actions are random and drawn beforehand; episodes that end begin anew outside of what is timed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from tables import provenance, text_table

from embodied_rl.compose import load_train_config
from embodied_rl.config import SimConfig
from embodied_rl.files import configs_dir
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.rendering import configure_rendering
from embodied_rl.types import StepBuffers

NUM_ENVS = 2
LOOK_UPS = ("mj_name2id", "mj_id2name")
"""Functions of MuJoCo that compute nothing."""
DRAWING = ("mjr_render", "mjr_readPixels", "mjv_updateScene")
CLASSES = {
    "sapien.physx": (("PhysxCpuSystem", "step", "physics"),),
    "sapien.render": (("RenderCameraComponent", "take_picture", "drawing"), ("RenderCameraComponent", "get_picture", "drawing")),
    "gym_pusht.envs.pusht": (("PushTEnv", "_render", "drawing"),),
    "shapely": (("MultiPolygon", "intersection", "sums"),),
}
"""{module: (class, method, what it does)}"""
LIBRARIES = {"pymunk.space": ("cp", "cpSpaceStep"), "pymunk._chipmunk": ("lib", "cpSpaceStep")}
"""{module: (what it calls the library, its function that is physics)}: a library's functions cannot be replaced, its name can."""
COMPILED = {
    "robosuite.utils.control_utils": ("opspace_matrices", "nullspace_torques", "orientation_error"),
    "robosuite.controllers.osc": ("opspace_matrices", "nullspace_torques", "orientation_error"),
}
"""{module: functions that numba compiles}"""
SHORTCUTS = {
    "embodied_rl.sim.robots.gymnasium_robotics": "know_indices",
    "embodied_rl.sim.robots.metaworld": "shorten_steps",
    "embodied_rl.sim.robots.pusht": "shorten_steps",
    "embodied_rl.sim.robots.robosuite": "shorten_steps",
}
"""{module: the function that takes look-ups out of an environment's steps}"""


class Clock:
    """Processor seconds of steps, and of native calls within them, by kind: of every other step whole, of the others its calls, for looking
    at the clock costs as much as a small call. A call from within another counts for the outer one."""

    def __init__(self) -> None:
        self._seconds, self._calls = (dict.fromkeys(("step", "physics", "drawing", "sums"), 0.0) for _ in range(2))
        self._own_s = 0.0
        """What of a call's time is the clock's."""
        self._inside, self._whole = True, False

    def seconds(self) -> dict[str, float]:
        """Of half of the steps, {"step", "physics", "drawing", "sums"}, without what the clock took."""
        return {kind: seconds - self._calls[kind] * self._own_s for kind, seconds in self._seconds.items()}

    def calibrate(self, num_calls: int = 20_000) -> None:
        """Measure the clock on calls that do nothing. It takes more where the process has many threads: to be called once it has."""
        before, now = self._seconds["sums"], time.process_time
        nothing, self._inside = int, False
        timed = self.timed(nothing, "sums")
        for _ in range(num_calls):
            timed()
        started = now()
        for _ in range(num_calls):
            nothing()
        self._own_s = (self._seconds["sums"] - before - (now() - started)) / num_calls
        self._seconds["sums"], self._calls["sums"], self._inside = before, 0, True

    def step(self, sim: SimEnv, action: np.ndarray, out: StepBuffers) -> None:
        """A step of all environments."""
        self._whole = not self._whole
        if not self._whole:
            self._inside = False
            sim.step(range(NUM_ENVS), action, out)
            self._inside = True
            return
        started = time.process_time()
        sim.step(range(NUM_ENVS), action, out)
        self._seconds["step"] += time.process_time() - started
        self._calls["step"] += 1

    def timed(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """The same function, whose time is counted."""
        now = time.process_time

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, started = True, now()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[kind] += now() - started
                self._calls[kind] += 1
                self._inside = False

        return call

    def watch(self) -> None:
        """Time the native functions of what is installed: before the simulators are imported, which may keep them by name."""
        for module in imported("mujoco", "mujoco._functions", "mujoco._render"):
            for name, function in list(vars(module).items()):
                if callable(function) and name.startswith(("mj_", "mjr_", "mjv_")) and name not in LOOK_UPS:
                    setattr(module, name, self.timed(function, "drawing" if name in DRAWING else "physics"))
        for name, methods in CLASSES.items():
            for module in imported(name):
                for owner, method, kind in methods:
                    kept = vars(module)[owner]
                    setattr(kept, method, self.timed(getattr(kept, method), kind))
        for name, (called, function) in LIBRARIES.items():
            for module in imported(name):
                library = vars(module)[called]
                known = {each: getattr(library, each) for each in dir(library)}
                setattr(module, called, SimpleNamespace(**{**known, function: self.timed(known[function], "physics")}))

    def watch_compiled(self) -> None:
        """The same for what numba compiled, once a simulator has been made."""
        for name, functions in COMPILED.items():
            if name in sys.modules:
                vars(sys.modules[name]).update({each: self.timed(vars(sys.modules[name])[each], "sums") for each in functions})


def imported(*names: str) -> Iterable[Any]:
    """Those modules that are installed."""
    for name in names:
        try:
            yield importlib.import_module(name)
        except ImportError:
            continue


def measure(name: str, num_steps: int, rounds: int) -> list[dict[str, float]]:
    """Microseconds of one environment's step, {"step", "physics", "drawing", "sums"}: medians of the rounds, after one that warms up.

    Second, the same of the simulator without the shortcuts that we take in it, in the same rounds; nothing where we take none. (The
    tolerances of Meta-World stay quick: they are the whole process's.)
    """
    config, clocks = simulator(name), [Clock()]
    clocks[0].watch()
    sims = [SimFactory(config.target, config.task, config.kwargs, config.extra).make(NUM_ENVS)]
    shortcut = SHORTCUTS.get(config.target.partition(":")[0])
    if shortcut:
        setattr(importlib.import_module(config.target.partition(":")[0]), shortcut, lambda env: None)
        clocks.append(Clock())
        clocks[1].watch()
        sims.append(SimFactory(config.target, config.task, config.kwargs, config.extra).make(NUM_ENVS))
    for clock in clocks:
        clock.watch_compiled()
        clock.calibrate()
    players = [Player(sim, clock) for sim, clock in zip(sims, clocks, strict=True)]
    for number in range(rounds + 1):
        for player in players[:: 1 if number % 2 else -1]:
            player.play(num_steps)
    for sim in sims:
        sim.close()
    return [{kind: statistics.median(each[kind] for each in player.found[1:]) for kind in player.found[0]} for player in players]


class Player:
    """Steps a simulator by random actions, the same ones for each; episodes that end begin anew, outside of what is timed."""

    def __init__(self, sim: SimEnv, clock: Clock) -> None:
        self._sim, self._clock, self._seeds = sim, clock, itertools.count()
        self._out, self._rng = StepBuffers.allocate(sim.spec, NUM_ENVS), np.random.default_rng(0)
        self.found: list[dict[str, float]] = []
        """Microseconds of one environment's step, for each round."""
        self._begin(range(NUM_ENVS))

    def play(self, num_steps: int) -> None:
        """A round."""
        before, action, out = self._clock.seconds(), self._sim.spec.action, self._out
        for normalised in self._rng.uniform(-1.0, 1.0, (2 * num_steps, NUM_ENVS, action.dim)).astype(np.float32):
            self._clock.step(self._sim, action.denormalise(normalised).astype(np.float32), out)
            self._begin([i for i in range(NUM_ENVS) if out.terminated[i] or out.truncated[i]])
        microseconds = 1e6 / (num_steps * NUM_ENVS)
        self.found.append({kind: (seconds - before[kind]) * microseconds for kind, seconds in self._clock.seconds().items()})

    def _begin(self, env_ids: Sequence[int]) -> None:
        if env_ids:
            self._sim.reset(env_ids, [next(self._seeds) for _ in env_ids], self._out)


def simulator(name: str) -> SimConfig:
    """What ``sim=name`` says."""
    policy = ["policy=cnn"] if name.startswith("libero") else []
    return load_train_config([f"sim={name}", *policy]).sim


def robots() -> list[str]:
    """Names of the simulators of robots that need nothing but a processor, in ``configs/sim``."""
    paths = sorted((configs_dir() / "sim").glob("*.yaml"))
    return [path.stem for path in paths if "target: embodied_rl.sim.robots." in path.read_text() and "_gpu" not in path.stem]


def row(name: str, num_steps: int, rounds: int) -> list[str]:
    """A line of the table, measured in a process of its own; one that cannot run here says why in few words."""
    command = [sys.executable, __file__, "--only", name, "--steps", str(num_steps), "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [name, *["-"] * 6, (done.stderr.strip().splitlines() or ["?"])[-1][:80]]
    us, *plain = json.loads(done.stdout.splitlines()[-1])
    python = us["step"] - us["physics"] - us["drawing"] - us["sums"]
    shares = [f"{part / us['step']:.0%}" for part in (us["physics"], us["drawing"], us["sums"], python)]
    before = [f"{plain[0]['step']:.0f}", f"{plain[0]['step'] / us['step']:.2f}x"] if plain else ["", ""]
    return [name, f"{us['step']:.0f}", *shares, *before]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of configs/sim; none: all robots'")
    parser.add_argument("--steps", type=int, default=100, help="of each environment in a round, timed, and as many whose calls are")
    parser.add_argument("--rounds", type=int, default=3, help="timed, after one that warms up")
    parser.add_argument("--only", help="measure this one in this process, and print JSON")
    options = parser.parse_args()
    if options.only:
        configure_rendering()
        print(json.dumps(measure(options.only, options.steps, options.rounds)))
        return
    rows = []
    for name in options.names or robots():
        rows.append(row(name, options.steps, options.rounds))
        print("\t".join(rows[-1]), file=sys.stderr, flush=True)
    print(provenance("mujoco"))
    print(f"{NUM_ENVS} environments in one process, {options.rounds} rounds of {options.steps} steps, medians")
    print(text_table(["simulator", "processor us a step", "physics", "drawing", "other sums", "Python", "before", "before / ours"], rows))
    measured = [each for each in rows if each[5].endswith("%")]
    below = [each[0] for each in measured if float(each[5].rstrip("%")) > 50.0]
    print(f"\nfigure: Python is more than half of a step in {len(below)} of {len(measured)} simulators: {', '.join(below) or 'none'}")


if __name__ == "__main__":
    main()
