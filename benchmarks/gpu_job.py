"""Two large models trained in simulators, end to end: seconds of each stage of an iteration, and what moves between them.

``python benchmarks/gpu_job.py``. The weights are random, and the simulators are light ones: what is measured is the loop itself,
`python -m embodied_rl.train` as it runs for everybody.

- OpenVLA-7B by PPO from pictures of 224 x 224: LoRA, all weights, and all weights with FSDP2, whose optimizer leaves the device while
  actions are generated (``hybrid.offload=[optimizer,gradients]``).
- A language agent with 1.7 billion weights by GRPO: its tokens from torch or from vLLM, whose engine sleeps while FSDP2 trains.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from gpu import end_all
from tables import provenance, text_table
from vla import SHAPES, random_model
from vllm_turns import SIZES, make_model

from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.policies.openvla.model import OpenVLA
from embodied_rl.policies.openvla.processor import OpenVLAProcessor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
STEPS, ROUNDS = 8, 3
ITERATION = "time/update_s"
LIMIT_S = 300.0
"""Of a run's first iterations, its start included."""
ONE_RANK = ("hybrid=fsdp2", "hybrid.sharding.num_shards=1", "policy.gradient_checkpointing=true")
WAYS = {
    "LoRA": ("policy.lora_rank=32", "policy.lora_alpha=32"),
    "all weights": ("policy.gradient_checkpointing=true",),
    "FSDP2, optimizer out": (*ONE_RANK, "hybrid.offload=[optimizer,gradients]"),
    "agents, torch": ("generation=tokens_torch", "policy.gradient_checkpointing=true"),
    "agents, vLLM": ("generation=vllm", *ONE_RANK, "hybrid.offload=[optimizer,gradients,kv_cache]"),
}
AGENTS = "agents"


def make_vla(folder: Path, shape: str, device: str) -> None:
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


@dataclass(frozen=True)
class Job:
    """What all ways have in common."""

    device: str
    slots: int
    micro: int
    """Rows of a micro-batch of OpenVLA."""
    vla: Path
    language: Path
    run_dir: Path

    def words(self, way: str) -> list[str]:
        """The overrides of a run that goes on until it is ended."""
        own = self._agents() if way.startswith(AGENTS) else self._vla()
        # On processors vLLM frees nothing.
        special = WAYS[way] if self.device == "cuda" else [word.replace(",kv_cache", "") for word in WAYS[way]]
        return [
            *(*own, "sim.num_workers=2", "sim.pipeline_groups=1", f"sim.num_slots={self.slots}", f"hybrid.device={self.device}", *special),
            *("algorithm.num_epochs=1", f"total_steps={10_000 * self.slots}", "stop_at_success=null", f"run_dir={self.run_dir}"),
            *("logger=quiet", "video.enabled=no", "evaluation.every_steps=null", "evaluation.num_episodes=2"),
        ]

    def _vla(self) -> list[str]:
        return [
            *("sim=custom", "sim.name=points", "sim.target=tests.vla.toys:PointSim", "sim.kwargs={dim: 7, size: 224}"),
            *("policy=openvla", f"policy.path={self.vla}", "policy.unnorm_key=bridge_orig", "policy.prompt_tokens=32"),
            f"policy.generation={'cuda_graph' if self.device == 'cuda' else 'eager'}",
            *(f"algorithm.rollout_steps={STEPS}", f"algorithm.minibatch_size={2 * self.slots}", f"algorithm.micro_batch_size={self.micro}"),
        ]

    def _agents(self) -> list[str]:
        """An episode a slot, in groups of 8; every turn has an answer of 16 tokens, nearly all of which say nothing.

        A step of a token takes some 60 ms where a slow host starts a GPU's kernels one by one (H200, 1.7 billion weights, torch).
        """
        return [
            *("sim=frozenlake", "policy=language", f"policy.model={self.language}", "algorithm=grpo", "algorithm.groups.filters=[]"),
            *("agent.answer=word", "agent.actions=[up, down, left, right]", "agent.invalid_penalty=0.1", "agent.max_new_tokens=16"),
            *("algorithm.groups.group_size=8", f"algorithm.groups.groups_per_step={max(1, self.slots // 8)}"),
            *(f"sim.max_episode_steps={STEPS}", "algorithm.entropy_coef=0.01", f"algorithm.minibatch_size={8 * self.slots}"),
            "policy.max_tokens_per_micro_batch=16384",
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
    size, decisions = last.get("residency/moved_bytes", 0.0), last.get("agent/turns", STEPS * slots)
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
        job = Job(device, options.slots, options.micro, Path(folder) / "openvla", Path(folder) / "language", Path(folder) / "run")
        begun = time.perf_counter()
        if not all(way.startswith(AGENTS) for way in options.ways):
            make_vla(job.vla, shape, device)
        if any(way.startswith(AGENTS) for way in options.ways):
            make_model(job.language, SIZES["full" if device == "cuda" else "tiny"], device)
        print(f"{shape} shape on {device}, {options.slots} slots; checkpoint written in {time.perf_counter() - begun:.0f} s\n", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
        for way in options.ways:
            begun = time.perf_counter()
            found, error = iterations(job.words(way), job.run_dir, ROUNDS)
            if error:
                errors.append(f"{way}: {error}")
            else:
                rows.append(row_of(way, found[-1], options.slots, begun))
                print(f"{way}: {found[-1]}", flush=True)
            shutil.rmtree(job.run_dir, ignore_errors=True)
    head = ["way", "act s", "actions/s", "simulate s", "update s", "rows/s", "turns", "steps/s", "whole s"]
    print(text_table(head, rows))
    best = max((float(row[-2]) for row in rows if not row[0].startswith(AGENTS)), default=0.0)
    turns = max((float(row[-2]) for row in rows if row[0].startswith(AGENTS)), default=0.0)
    figure = f"figure: OpenVLA {shape} trained by PPO at {best:.1f} environment steps/s, a language agent by GRPO at {turns:.1f}"
    print("\n".join(["", *errors, f"{figure}, acting and updating included"]))
    raise SystemExit(1 if errors else 0)


if __name__ == "__main__":
    main()
