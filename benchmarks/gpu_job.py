"""OpenVLA-7B trained by PPO in a simulator, end to end: seconds of each stage of an iteration, and what the device holds.

``python benchmarks/gpu_job.py``. The weights are random, and the simulator is a light one with pictures of 224 x 224: what is measured is
the loop itself, `python -m embodied_rl.train` as it runs for everybody. Ways: LoRA, all weights, and all weights with FSDP2, whose
optimizer leaves the device while actions are generated (``hybrid.offload=[optimizer,gradients]``).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from gpu import end_all
from tables import provenance, text_table
from vla import SHAPES, random_model

from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.policies.openvla.model import OpenVLA
from embodied_rl.policies.openvla.processor import OpenVLAProcessor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
STEPS, ROUNDS = 8, 3
ITERATION = "time/update_s"
LIMIT_S = 300.0
"""Of a run's first iterations, its start included."""
WAYS = {
    "LoRA": ("policy.lora_rank=32", "policy.lora_alpha=32"),
    "all weights": ("policy.gradient_checkpointing=true",),
    "FSDP2, optimizer out": (
        "policy.gradient_checkpointing=true",
        "hybrid=fsdp2",
        "hybrid.sharding.num_shards=1",
        "hybrid.offload=[optimizer,gradients]",
    ),
}


def make_checkpoint(folder: Path, shape: str, device: str) -> None:
    """A folder as a published checkpoint's, with random weights."""
    from tests.policies.openvla.conftest import FIXTURES, write_tokenizer

    source = folder.with_name("published")
    source.mkdir()
    shutil.copy(FIXTURES / "config.json", source)
    write_tokenizer(source)
    ends = {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]}
    config = replace(SHAPES[shape](), norm_stats={"bridge_orig": {"action": ends}})
    model = random_model(lambda: OpenVLA(config), device, torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(folder)
    OpenVLAProcessor.from_pretrained(source, model.config).save(folder)


def words_of(way: str, path: Path, run_dir: Path, device: str, slots: int, micro: int) -> list[str]:
    """The overrides of a run that goes on until it is ended."""
    return [
        *("sim=custom", "sim.name=points", "sim.target=tests.vla.toys:PointSim", "sim.kwargs={dim: 7, size: 224}"),
        *("sim.num_workers=2", "sim.pipeline_groups=1", f"sim.num_slots={slots}"),
        *("policy=openvla", f"policy.path={path}", "policy.unnorm_key=bridge_orig", "policy.prompt_tokens=32"),
        *(f"hybrid.device={device}", f"policy.generation={'cuda_graph' if device == 'cuda' else 'eager'}", *WAYS[way]),
        *(f"algorithm.rollout_steps={STEPS}", f"algorithm.minibatch_size={2 * slots}", "algorithm.num_epochs=1"),
        *(f"algorithm.micro_batch_size={micro}", f"total_steps={100 * STEPS * slots}", "stop_at_success=null", f"run_dir={run_dir}"),
        *("logger=quiet", "video.enabled=no", "evaluation.every_steps=null", "evaluation.num_episodes=2"),
    ]


def iterations(words: list[str], run_dir: Path, count: int) -> tuple[list[dict[str, float]], str]:
    """Metrics of the first `count` iterations of a run, which is ended then: its last checkpoint would take minutes; and its error."""
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "embodied_rl.train", *words]
        process, until = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, text=True), time.monotonic() + LIMIT_S
        try:
            while True:
                ended = process.poll() is not None
                file = run_dir / "metrics.jsonl"
                rows = [row for row in read_metrics(file) if ITERATION in row] if file.exists() else []
                if len(rows) >= count:
                    return rows[:count], ""
                if ended or time.monotonic() > until:
                    output.seek(0)
                    why = "it ended" if ended else f"no {count} iterations in {LIMIT_S:.0f} s"
                    return rows, f"{why}: {output.read()[-4000:]}"
                time.sleep(0.5)
        finally:
            end_all(process)


def row_of(way: str, last: dict[str, float], slots: int, begun: float) -> list[str]:
    """A line of the table, of a run's last iteration."""
    act, update, moved = last["time/act_s"], last["time/update_s"], last.get("residency/moved_s", 0.0)
    size, decisions = last.get("residency/moved_bytes", 0.0), STEPS * slots
    turns = f"{moved:.2f} s, {size / 1e9:.0f} GB" if moved else ""
    cells = [f"{act:.2f}", f"{decisions / act:.0f}", f"{last['time/simulate_s']:.2f}", f"{update:.2f}", f"{decisions / update:.1f}", turns]
    return [way, *cells, f"{decisions / (act + last['time/simulate_s'] + update):.1f}", f"{time.perf_counter() - begun:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: 7b on a CUDA device, else tiny")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--micro", type=int, default=16, help="rows of a micro-batch")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    options = parser.parse_args()
    print(provenance("transformers", "peft"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = options.shape or ("7b" if device == "cuda" else "tiny")
    rows, errors = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "openvla"
        begun = time.perf_counter()
        make_checkpoint(path, shape, device)
        print(f"{shape} shape on {device}, {options.slots} slots; checkpoint written in {time.perf_counter() - begun:.0f} s\n", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
        for way in options.ways:
            run_dir = Path(folder) / "run"
            begun = time.perf_counter()
            words = words_of(way, path, run_dir, device, options.slots, options.micro)
            found, error = iterations(words, run_dir, ROUNDS)
            if error:
                errors.append(f"{way}: {error}")
            else:
                rows.append(row_of(way, found[-1], options.slots, begun))
            shutil.rmtree(run_dir, ignore_errors=True)
    head = ["way", "act s", "actions/s", "simulate s", "update s", "rows/s", "turns", "steps/s", "whole s"]
    print(text_table(head, rows))
    best = max((float(row[-2]) for row in rows), default=0.0)
    print(
        "\n".join(["", *errors, f"figure: OpenVLA {shape} trained by PPO at {best:.1f} environment steps/s, acting and updating included"])
    )
    raise SystemExit(1 if errors else 0)


if __name__ == "__main__":
    main()
