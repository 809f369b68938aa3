"""Small policies on the CPU and on the GPU: seconds of acting and of the update in an iteration of PPO.

``python benchmarks/gpu_small.py``. The simulator is a light one; a run on each device, side by side, and the times of its last iteration.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from gpu_job import iterations
from tables import provenance, text_table

POINTS = (
    *("sim=custom", "sim.name=points", "sim.target=tests.vla.toys:PointSim", "sim.num_workers=1", "sim.pipeline_groups=1"),
    *("sim.num_slots=32", "algorithm.rollout_steps=32", "algorithm.minibatch_size=256", "algorithm.num_epochs=4", "total_steps=1000000"),
    *("logger=quiet", "video.enabled=no", "stop_at_success=null", "evaluation.every_steps=null", "checkpoint.every_steps=null"),
)
POLICIES: dict[str, tuple[str, ...]] = {
    "MLP (64, 64) of a state": ("sim.kwargs={words: none, pixels: false}",),
    "MLP (1024, 1024) of a state": ("sim.kwargs={words: none, pixels: false}", "policy.hidden_sizes=[1024,1024]"),
    "CNN of 84 x 84": ("sim.kwargs={words: none, size: 84}", "policy=cnn"),
    "tiny_vla of 64 x 64, chunks of 4": ("sim.kwargs={size: 64}", "policy=tiny_vla", "policy.chunk=4"),
}


def measure(name: str, device: str, rounds: int) -> tuple[float, float] | str:
    """(seconds of acting, of the update) of the last of some iterations, or the run's error."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        rows, error = iterations([*POINTS, *POLICIES[name], f"hybrid.device={device}", f"run_dir={run_dir}"], run_dir, rounds)
        return error or (rows[-1]["time/act_s"], rows[-1]["time/update_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=tuple(POLICIES), default=list(POLICIES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=4, help="iterations of each run")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(provenance() + "\n")
    rows, errors = [], []
    for name in options.policies:
        with ThreadPoolExecutor(2) as pool:
            here, there = pool.map(lambda where, own=name: measure(own, where, options.rounds), ("cpu", device))
        if isinstance(here, str) or isinstance(there, str):
            errors.append(f"{name}: {here if isinstance(here, str) else there}")
        else:
            rows.append([name, *(f"{1e3 * part:.0f}" for part in (here[0], there[0], here[1], there[1]))])
            print(rows[-1], flush=True)
    print(text_table(["1,024 steps in 32 slots", "act, CPU ms", f"{device} ms", "update, CPU ms", f"{device} ms"], rows))
    print("\n".join(["", *errors, f"figure: {len(rows)} of {len(options.policies)} small policies trained on {device}"]))
    raise SystemExit(1 if errors else 0)


if __name__ == "__main__":
    main()
