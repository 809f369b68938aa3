"""Every figure that we claim for GPUs, in one command: ``python -m benchmarks.gpu`` on a machine with one.

It runs section after section, each in a process of its own and within eight minutes, and writes ``gpu.json`` and ``gpu.md`` after each:
what is done stays done, and the same command goes on with the next section. Sections are the scripts of this folder; ``--tiny`` runs each
with shapes that a processor can hold, so that none fails for a trivial reason on the day a GPU is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 480.0
"""Of a section."""
END_S = 20.0
"""For processes that were killed to be gone."""


@dataclass(frozen=True)
class Section:
    """One script with its arguments for a GPU, and for a processor with tiny shapes."""

    title: str
    on_gpu: tuple[str, ...]
    tiny: tuple[str, ...]


def marked_gpu() -> tuple[str, ...]:
    """Test files with tests that are marked so: collecting all would take longer than running these."""
    return tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text())


SECTIONS: dict[str, Section] = {
    "audit": Section("Device audit: copies between host and device, by stage", ("gpu_audit.py",), ("gpu_audit.py",)),
    "tests": Section(
        "Tests marked gpu",
        ("-m", "pytest", "-q", "-n", "0", "-m", "gpu and not slow", *marked_gpu()),
        ("-m", "pytest", "-q", "-n", "0", "-m", "gpu and not gpu", *marked_gpu()),
    ),
    "runs": Section(
        "Golden runs on the GPU and on the CPU: do they end, agree, repeat?",
        ("gpu_runs.py",),
        ("gpu_runs.py", "--device", "cpu", "ppo_autograd", "grpo"),
    ),
    "small": Section(
        "Small policies: acting and updating on the CPU and on the GPU",
        ("gpu_small.py",),
        ("gpu_small.py", "--rounds", "1", "--policies", "MLP (64, 64) of a state"),
    ),
    "actions": Section(
        "OpenVLA-7B and OFT shapes: actions a second with and without CUDA graphs, against transformers and the roofline",
        ("vla.py", "--batches", "1", "8", "32", "--rounds", "10"),
        ("vla.py", "--cpu", "--rounds", "2"),
    ),
    "training": Section(
        "OpenVLA-7B training steps: all weights and LoRA, FSDP2 with offload",
        ("vla_training.py", "--rounds", "2"),
        ("vla_training.py", "--shape", "tiny", "--device", "cpu", "--rows", "1", "--rounds", "1"),
    ),
    "turns": Section(
        "Engine turns: seconds and GB/s of offload and onload, bytes left",
        ("offload.py", "--megabytes", "8000"),
        ("offload.py", "--megabytes", "12", "--rounds", "2"),
    ),
    "job": Section(
        "OpenVLA-7B by PPO and a language agent by GRPO, end to end: seconds of each stage",
        ("gpu_job.py",),
        ("gpu_job.py", "--shape", "tiny", "--slots", "4", "--micro", "4", "--ways", "LoRA", "agents, torch"),
    ),
    "tokens": Section(
        "Language models: tokens a second of the torch backend and of vLLM against transformers",
        ("generation.py", "--batches", "1", "32", "--rounds", "1", "--requests", "8", "--compiled"),
        ("generation.py", "--batches", "4", "--requests", "8", "--rounds", "1"),
    ),
    "vllm": Section("vLLM: seconds to sleep and wake, bytes left", ("vllm_turns.py",), ("vllm_turns.py", "--tiny")),
    "weights": Section("Publication of weights", ("weight_sync.py",), ("weight_sync.py", "--megabytes", "8", "--rounds", "2")),
    "maniskill": Section(
        "ManiSkill on the GPU: steps a second through the environment manager",
        ("maniskill_gpu.py",),
        ("maniskill_gpu.py", "--sim", "cartpole", "--slots", "2", "4", "--seconds", "0.2"),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What a section came to."""

    title: str
    command: str
    status: str
    """ok, failed, or out of time."""
    seconds: float
    figure: str
    output: str


def run(name: str, *, tiny: bool, limit_s: float) -> Outcome:
    """Run a section in a process of its own, which ends with all that it started."""
    section = SECTIONS[name]
    words = section.tiny if tiny else section.on_gpu
    folder = Path(__file__).parent
    command = [sys.executable, *(words if words[0] == "-m" else (str(folder / words[0]), *words[1:]))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    begun = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=limit_s)
        # pytest's 5: no test was selected.
        status = "ok" if process.returncode in (0, 5) else "failed"
    except subprocess.TimeoutExpired:
        end_all(process)
        status, (output, errors) = "out of time", process.communicate(timeout=END_S)
    finally:
        end_all(process)
    output += errors if status != "ok" else ""
    figure = next((line.removeprefix("figure: ") for line in reversed(output.splitlines()) if line.startswith("figure: ")), "")
    return Outcome(section.title, " ".join(["python", *words]), status, time.monotonic() - begun, figure, output[-20_000:])


def end_all(process: subprocess.Popen[str]) -> None:
    """Kill a process with all that are below it; nothing where it has ended."""
    if process.poll() is not None:  # its number may be another process's by now
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait(END_S)


def markdown(outcomes: dict[str, Outcome]) -> str:
    """All sections as a page."""
    parts = ["# GPU figures"]
    for outcome in outcomes.values():
        head = f"## {outcome.title}\n\n`{outcome.command}`: {outcome.status}, {outcome.seconds:.0f} s"
        parts += [head, *([f"**{outcome.figure}**"] if outcome.figure else []), f"```text\n{cleaned(outcome.output)}\n```"]
    return "\n\n".join(parts) + "\n"


def cleaned(output: str) -> str:
    """Without the folders of this machine and the figure, which stands above."""
    lines = [line for line in output.strip().splitlines() if not line.startswith("figure: ")]
    return re.sub(re.escape(f"{ROOT}/"), "", "\n".join(lines[-60:])).strip()


def write_beside(path: Path, text: str) -> None:
    """Write and rename: what is done stays done, whenever the machine goes."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.rename(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=tuple(SECTIONS), default=list(SECTIONS), metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder of gpu.json and gpu.md")
    parser.add_argument("--tiny", action="store_true", help="shapes that a processor can hold")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a section at most")
    parser.add_argument("--again", action="store_true", help="also sections that are done")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    notes = options.output / "gpu.json"
    outcomes = {name: Outcome(**row) for name, row in json.loads(notes.read_text()).items()} if notes.exists() else {}
    for name in options.sections:
        if not options.again and name in outcomes and outcomes[name].status == "ok":
            print(f"{name}: done before")
            continue
        outcomes[name] = run(name, tiny=options.tiny, limit_s=options.limit)
        write_beside(notes, json.dumps({key: asdict(row) for key, row in outcomes.items()}, indent=1))
        write_beside(notes.with_suffix(".md"), markdown(outcomes))
        print(f"{name}: {outcomes[name].status}, {outcomes[name].seconds:.0f} s. {outcomes[name].figure}", flush=True)
    good = sum(outcome.status == "ok" for outcome in outcomes.values())
    print(f"\n{options.output / 'gpu.md'}\nfigure: {good} of {len(SECTIONS)} sections are done")
    raise SystemExit(0 if all(outcomes[name].status == "ok" for name in options.sections) else 1)


if __name__ == "__main__":
    main()
