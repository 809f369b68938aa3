"""Do training runs work on a GPU as they do on processors? Every golden run, here and there, from the same seed.

``python benchmarks/gpu_runs.py``. Each run is made on the CPU, then twice on the GPU, to its end, checkpoints and evaluation included.
The table has the relative difference of all final weights (a Euclidean norm) between the two devices, and between the two runs on the
GPU: the same seed gives the same run. Sums have other orders on a GPU, so the devices agree to rounding, as long as no action that is
drawn lies on the edge of two.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from gpu import end_all
from tables import provenance, text_table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.golden.runs import APART, BY_THE_CLOCK, RUNS, run, weights  # noqa: E402

LIMIT_S = 60.0
"""Of one run on both devices."""
AGREEMENT = 1e-2
"""Of runs whose devices agree."""


def names() -> list[str]:
    """Of the runs that what is installed and the number of GPUs allow."""
    needed = {"ray": "ray", "bc_chunks": "av"}
    lacking = {name for name, module in needed.items() if not importlib.util.find_spec(module)}
    if torch.cuda.device_count() == 1:
        lacking |= {"multiplexed", *(name for name, words in RUNS.items() if APART in words)}
    return [name for name in RUNS if name not in lacking]


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all weights, relative to the norm of the second."""
    assert one.keys() == other.keys(), "the runs have other tensors"
    squares = [(one[name].double() - other[name].double()).square().sum() for name in one]
    return float((sum(squares) / sum(tensor.double().square().sum() for tensor in other.values())) ** 0.5)


def compare(name: str, device: str) -> dict[str, float | str]:
    """{cpu_s, device_s, difference, repeated}, or {error}."""
    here = ["hybrid.sharding.num_shards=1"] if name.startswith("fsdp2") else []
    there = [*here, f"hybrid.device={device}"]
    seconds, found = [], []
    try:
        for words in (here, there, there):
            with tempfile.TemporaryDirectory() as folder:
                begun = time.perf_counter()
                found.append(weights(run(name, Path(folder), *words)))
                seconds.append(time.perf_counter() - begun)
    except Exception as error:  # whatever a run raises is the finding
        frames = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-4:]]
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({' > '.join(frames)})"}
    cpu, first, second = found
    return {"cpu_s": seconds[0], "device_s": seconds[2], "difference": difference(first, cpu), "repeated": difference(second, first)}


def alone(name: str, device: str) -> dict[str, float | str]:
    """What `compare` found in a process of its own, which is ended with all that it started after `LIMIT_S`."""
    command = [sys.executable, __file__, "--device", device, "--alone", name]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        errors = process.communicate(timeout=LIMIT_S + 10)[1]
    except subprocess.TimeoutExpired:
        errors = ""
    finally:
        end_all(process)
    lines = errors.splitlines()
    rows = [line for line in lines if line.startswith('{"')]
    found: dict[str, float | str] = json.loads(rows[-1]) if rows else {"error": f"status {process.poll()}: " + "\n".join(lines[-40:])}
    return found


def measure(chosen: list[str], device: str, jobs: int) -> dict[str, dict[str, float | str]]:
    """{run: what `compare` found}, `jobs` at a time; each is printed when it has ended."""
    found = {}
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed(waiting := {pool.submit(alone, name, device): name for name in chosen}):
            found[waiting[future]] = future.result()
            print(f"{waiting[future]}: {found[waiting[future]]}", flush=True)
    return {name: found[name] for name in chosen}


def report(found: dict[str, dict[str, float | str]], device: str) -> tuple[str, bool]:
    """The table and the figure; whether every run ended."""
    rows, errors = [], []
    for name, row in found.items():
        if "error" in row:
            rows.append([name, "failed", "", "", ""])
            errors.append(f"{name}: {row['error']}")
        else:
            clock = " (by the clock)" if name in BY_THE_CLOCK else ""
            cells = [f"{row['cpu_s']:.1f}", f"{row['device_s']:.1f}", f"{row['difference']:.1e}", f"{row['repeated']:.1e}"]
            rows.append([name + clock, *cells])
    ended = [row for row in found.values() if "error" not in row]
    agree = sum(row["difference"] < AGREEMENT for row in ended)  # type: ignore[operator]
    same = sum(row["repeated"] == 0 for row in ended)
    table = text_table(["run", "CPU s", f"{device} s", "difference", "repeated"], rows)
    figure = f"figure: {len(ended)} of {len(found)} runs end on {device}; {agree} agree with the CPU to 1%, {same} repeat bit for bit"
    return "\n".join([table, "", *errors, *([""] if errors else []), figure]), not errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="default: all golden runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--jobs", type=int, default=8, help="runs side by side")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device, chosen = options.device or ("cuda" if torch.cuda.is_available() else "cpu"), options.runs or names()
    if options.alone:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        print(json.dumps(compare(chosen[0], device)), file=sys.stderr, flush=True)
        return
    print(provenance("transformers", "peft"))
    text, ended = report(measure(chosen, device, options.jobs), device)
    print(f"\n{text}")
    raise SystemExit(0 if ended else 1)


if __name__ == "__main__":
    main()
