"""The golden runs and their hashes. ``python -m tests.golden.runs [NAME …]`` runs them and renews their entries in ``hashes.json``.

A hash covers every tensor of the last checkpoint's policy and every metric that is no clock. It holds for one kind of processor and one
version of torch: others add in another order. So the file has a section for each, and a machine without one has nothing to compare.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from embodied_rl.checkpoint import MODEL_FOLDER, POLICY_FILE, STATE_FILE, load_checkpoint
from embodied_rl.config.compose import load_train_config
from embodied_rl.files import write_atomic
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.train import train

HASHES = Path(__file__).with_name("hashes.json")
AGENT = Path(__file__).resolve().parents[2] / "examples" / "agent_program"

QUICK = (
    *("video.enabled=no", "logger=quiet", "stop_at_success=null", "evaluation.num_episodes=4", "evaluation.every_steps=null"),
    *("sim.num_slots=4", "sim.num_workers=1", "hybrid.num_threads=1", "hybrid.device=cpu"),
)
PPO = (*QUICK, "algorithm.rollout_steps=32", "algorithm.minibatch_size=48", "algorithm.num_epochs=2", "policy.hidden_sizes=[16,16]")
GROUPS = (
    *("sim=cartpole", "algorithm=grpo", *QUICK, "algorithm.groups.group_size=3", "algorithm.groups.groups_per_step=2"),
    *("algorithm.num_epochs=2", "algorithm.minibatch_size=64", "policy.hidden_sizes=[16]", "total_steps=300"),
)
PENALTY = ("algorithm.kl.coef=0.1", "algorithm.kl.target=0.01", "algorithm.reward.std=running")
POINTS = ("sim=custom", "sim.name=points", "sim.target=tests.vla.toys:PointSim", *QUICK)
SMALL_VLA = (
    *("policy=tiny_vla", "policy.width=16", "policy.num_heads=2", "policy.num_layers=1", "policy.conv_channels=[4]"),
    *("policy.num_keypoints=4", "policy.num_bins=9", "policy.chunk=3"),
)
SMALL_FLOW = ("policy=flow", "policy.chunk=3", "policy.hidden_sizes=[16]", "policy.num_steps=2")
CHUNKS = ("algorithm.rollout_steps=8", "algorithm.minibatch_size=16", "algorithm.num_epochs=2", "total_steps=150")
MODEL = "policy.tiny={hidden_size: 32, num_layers: 1, num_heads: 1, num_key_value_heads: 1, intermediate_size: 32, max_context: 512}"
TEXTS = (
    *("experiment=frozenlake_text", *QUICK, MODEL, "algorithm.groups.group_size=2", "algorithm.groups.groups_per_step=4"),
    *("algorithm.groups.filters=[]", "agent.max_new_tokens=2", "algorithm.minibatch_size=16", "evaluation.interim_episodes=8"),
    *("agent.invalid_penalty=0.1", "algorithm.entropy_coef=0.02", "algorithm.warm_start=null", "total_steps=150"),
)
WARM = ("algorithm.warm_start={player: 'embodied_rl.sim.text.frozenlake:player', episodes: 8, num_epochs: 1, measured_episodes: 4}",)
LANGUAGE = (
    *("policy=language", "algorithm=grpo", "generation=tokens_torch", *QUICK, MODEL.replace("512", "2048"), "agent.answer=word"),
    *("agent.max_new_tokens=3", "agent.evaluation_temperature=1.0", "evaluation.num_episodes=2", "algorithm.groups.group_size=2"),
    *("algorithm.groups.groups_per_step=2", "algorithm.minibatch_size=32", "algorithm.num_epochs=1"),
)
POLE = "{name: cartpole, target: 'embodied_rl.sim.robots.gymnasium:make', task: CartPole-v1, num_slots: 3, num_workers: 1}"
LAKE = "{name: frozenlake, target: 'embodied_rl.sim.text.frozenlake:make', kwargs: {hints: true}, num_slots: 4, num_workers: 1}"
DOMAINS = (
    *(*LANGUAGE, "algorithm.groups.groups_per_step=4", "agent.strategy=memory", "agent.last_turns=0", "agent.chat=false"),
    f"domains.lake={{weight: 1, sim: {LAKE}, agent: {{actions: [up, down, left, right], invalid_penalty: 0.25}}}}",
    f"domains.pole={{weight: 1, sim: {POLE}, policy: {{name: actor_critic, hidden_sizes: [8]}}, algorithm: {{learning_rate: 0.01}}}}",
    "total_steps=120",
)
KEY_DOOR = ("sim=key_door", *QUICK, "policy.hidden_sizes=[16]", "algorithm.recorded.expert_episodes=4", "algorithm.minibatch_size=64")
CRITICS = ("algorithm.off_policy.hidden_sizes=[16]",)
APART = "hybrid=disaggregated"
RANKS = ("hybrid=fsdp2", "hybrid.device=cpu", "hybrid.num_threads=1")
RAY = ("hybrid=ray", "hybrid.num_threads=1", "hybrid.device=cpu")

RUNS: dict[str, tuple[str, ...]] = {
    "ppo_fused": ("sim=cartpole", *PPO, "algorithm.normalize_reward=true", "evaluation.every_steps=256", "total_steps=384"),
    "ppo_fused_gaussian": ("sim=pendulum", *PPO, "policy.normalize_observation=true", "total_steps=384"),
    "ppo_autograd": ("sim=pendulum", *PPO, "policy.activation=relu", "policy.distribution=squashed", "total_steps=384"),
    "ppo_cnn": (
        *(*POINTS, "sim.kwargs={size: 48, words: none}", "policy=cnn", "algorithm.rollout_steps=16", "algorithm.minibatch_size=32"),
        *("algorithm.num_epochs=1", "total_steps=64", "evaluation.num_episodes=2"),
    ),
    "tiny_vla_chunks": (*POINTS, *SMALL_VLA, *CHUNKS, "algorithm.advantage=gae_chunk", "algorithm.ratio=token"),
    "tiny_vla_actions": (
        *(*POINTS, *SMALL_VLA, *CHUNKS, "algorithm.advantage=gae_action", "algorithm.ratio=action", "policy.value=action"),
        "policy.decoding=autoregressive",
    ),
    "flow": (*POINTS, *SMALL_FLOW, *CHUNKS),
    "openvla_lora": (
        *(*POINTS, "sim.num_slots=2", "sim.kwargs.dim=7", "sim.kwargs.size=24", "policy=openvla", "policy.path={openvla}"),
        *("policy.lora_rank=4", "policy.dtype=float32", "policy.unnorm_key=bridge_orig", "algorithm.rollout_steps=2"),
        *("algorithm.minibatch_size=2", "algorithm.num_epochs=1", "total_steps=8", "evaluation.num_episodes=2"),
    ),
    "grpo": (*GROUPS, *PENALTY),
    "gigpo": (*GROUPS, "algorithm=gigpo"),
    "ipa": (*GROUPS, "algorithm=ipa"),
    "dapo": (*GROUPS, "algorithm=dapo", "algorithm.groups.max_rejected_per_step=100"),
    "decoupled_ppo": (*GROUPS, "algorithm=decoupled_ppo", "algorithm.groups.max_staleness=0"),
    "tiny_vla_groups": (
        *(*POINTS, *SMALL_VLA, "algorithm=grpo", "algorithm.groups.group_size=4", "algorithm.groups.groups_per_step=2"),
        *("algorithm.num_epochs=2", "algorithm.ratio=token", "algorithm.kl.coef=0.1", "total_steps=120"),
    ),
    "bc": (*KEY_DOOR, "algorithm=bc", "algorithm.num_epochs=2", "total_steps=40"),
    "bc_chunks": (
        *(*POINTS, *SMALL_VLA, "algorithm=bc", "algorithm.recorded.expert=tests.vla.toys:PointExpert"),
        *("algorithm.recorded.expert_episodes=8", "algorithm.minibatch_size=16", "policy.cloning_shift=2", "total_steps=20"),
    ),
    "dagger": (*KEY_DOOR, "algorithm=dagger", "algorithm.num_epochs=2", "total_steps=128"),
    "iql": (*KEY_DOOR, "algorithm=iql", *CRITICS, "algorithm.off_policy.updates_per_iteration=10", "total_steps=30"),
    "awac": (*KEY_DOOR, "algorithm=awac", *CRITICS, "algorithm.off_policy.updates_per_iteration=10", "total_steps=30"),
    "rlpd": (
        *(*KEY_DOOR, "algorithm=rlpd", *CRITICS, "policy.distribution=squashed", "algorithm.off_policy.warmup_steps=64"),
        *("algorithm.off_policy.updates_per_step=0.25", "algorithm.off_policy.replay_capacity=150", "total_steps=192"),
    ),
    "agents": TEXTS,
    "agents_warm_start": (*TEXTS, *WARM),
    "agents_tools": (
        *(*LANGUAGE, "sim=frozenlake", "agent.actions=[up, down, left, right]", "agent.invalid_penalty=0.1", "sim.max_episode_steps=4"),
        *("agent.strategy=last_k", "agent.last_turns=2", "agent.tools=[calculator]", "total_steps=40"),
    ),
    "domains": DOMAINS,
    "agent_program": (
        *(
            "experiment=agent_program",
            *QUICK,
            f"sim.kwargs.tasks={AGENT / 'tasks.jsonl'}",
            f"sim.kwargs.function='{AGENT / 'agent.py'}:play'",
        ),
        *(
            MODEL.replace("512", "256"),
            "algorithm.groups.groups_per_step=2",
            "algorithm.groups.group_size=2",
            "sim.num_slots=1",
            "sim.pipeline_groups=1",
        ),
        *("evaluation.num_episodes=2", "total_steps=60"),
    ),
    "initialized_sampling": (
        *("experiment=initialized_sampling", *QUICK, "algorithm.groups.group_size=4", "algorithm.groups.groups_per_step=3"),
        *("policy.hidden_sizes=[16]", "algorithm.minibatch_size=256", "algorithm.initialized.expert_episodes=2", "total_steps=1500"),
    ),
    "fsdp2_mlp": ("sim=cartpole", *PPO, *RANKS, "total_steps=256"),
    "fsdp2_language": (*TEXTS, *RANKS, "policy.lora_rank=2", "total_steps=100"),
    "fsdp2_tiny_vla": (*POINTS, *SMALL_VLA, *CHUNKS, *RANKS),
    "disaggregated": (*GROUPS, *PENALTY, APART, "hybrid.device=cpu"),
    "disaggregated_agents": (*TEXTS, *WARM, APART, "hybrid.device=cpu"),
    "two_players": (*GROUPS, APART, "hybrid.device=cpu", "hybrid.players=2", "sim.num_workers=2"),
    "ray": (*GROUPS, *PENALTY, *RAY),
    "multiplexed": (*GROUPS, "hybrid.placement=multiplexed"),
    "within_episodes": ("sim=cartpole", *PPO, "checkpoint.within_episodes=true", "checkpoint.every_steps=128", "total_steps=384"),
}
"""{name: overrides}; ``{openvla}`` stands for the folder of the tiny reference model."""

BY_THE_CLOCK = {"agent_program", "multiplexed"}
"""Runs in which the clock decides what is sampled when: only the names and shapes of tensors and the names of metrics are hashed."""

RESUMED = {
    "ppo_resumed": (*RUNS["ppo_fused"], "checkpoint.every_steps=128", "checkpoint.keep_last=9"),
    "agents_resumed": (*TEXTS, "checkpoint.every_steps=50", "checkpoint.keep_last=9"),
}
"""Runs that go on from the checkpoint of theirs that lies in ``checkpoints/``, written in November 2026: old checkpoints load."""
CHECKPOINTS = Path(__file__).with_name("checkpoints")
WRITTEN_ON = "torch 2.13.0+cpu AVX2"
"""The kind of machine that wrote them: there a run that goes on ends as the unbroken one; elsewhere the steps before were others."""


def make_openvla(directory: Path) -> Path:
    """The tiny reference model with its shapes in config.json, so that a path is all that a run needs."""
    from embodied_rl.policies.openvla.model import OpenVLA
    from embodied_rl.policies.openvla.processor import OpenVLAProcessor
    from tests.policies.openvla.conftest import FIXTURES, VISION, whole_state, write_tokenizer

    source = directory / "published"
    source.mkdir(parents=True)
    shutil.copy(FIXTURES / "config.json", source)
    save_file(whole_state(), source / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(source)
    model = OpenVLA.from_pretrained(source, vision=VISION)
    model.save_pretrained(directory)
    OpenVLAProcessor.from_pretrained(source, model.config).save(directory)
    return directory


def run(name: str, folder: Path, *changed: str) -> Path:
    """Train golden run `name` below `folder`, with one thread whatever the machine has; returns its run folder.

    `changed`: overrides after its own.
    """
    torch.set_num_threads(1)
    if name in RESUMED:
        return resumed(name, folder)
    words = [word.replace("{openvla}", str(make_openvla(folder / "openvla"))) if "{openvla}" in word else word for word in RUNS[name]]
    words = one_of_each([*words, *changed])
    return train(load_train_config([*words, f"run_dir={folder / 'run'}"]), overrides=words)


def resumed(name: str, folder: Path) -> Path:
    """Go on from the stored checkpoint, or store one where there is none."""
    words = one_of_each([*RESUMED[name]])
    whole = train(load_train_config([*words, f"run_dir={folder / 'whole'}"]))
    stored = CHECKPOINTS / name
    if not stored.is_dir():
        middle = sorted((whole / "checkpoints").glob("step_*"))[0]
        shutil.copytree(middle, stored / "checkpoints" / middle.name)
        shutil.copy(whole / "metrics.jsonl", stored)
    shutil.copytree(stored, folder / "again")
    again = train(load_train_config([*words, f"run_dir={folder / 'again'}", "resume=auto"]))
    if machine() == WRITTEN_ON:
        assert hashes(again, values=True) == hashes(whole, values=True), f"{name}: the resumed run is another one"
    return again


def one_of_each(words: list[str]) -> list[str]:
    """The last of several values of a key, where the key first stood: Hydra takes a group once."""
    values = {word.partition("=")[0]: word for word in words}
    return list(values.values())


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """{file/tensor: value} of the last checkpoint's policies, in the order of the names."""
    folder = (run_dir / "checkpoints" / "last").resolve()
    # A language model's tensors may lie in the checkpoint's model folder: they count under the names that they had before.
    files = {path for path in folder.rglob("*.safetensors") if not path.name.startswith("learner") and path.parent.name != MODEL_FOLDER}
    files |= {path.parent / POLICY_FILE for path in folder.rglob(STATE_FILE)}
    assert files, f"no weights in {folder}"
    found: dict[str, torch.Tensor] = {}
    for path in sorted(files):
        tensors = load_checkpoint(path.parent).policy if path.name == POLICY_FILE else load_file(path)
        found |= {f"{path.relative_to(folder)}/{key}": tensors[key] for key in sorted(tensors)}
    return found


def hashes(run_dir: Path, *, values: bool) -> dict[str, str]:
    """{"weights", "metrics"}: SHA-256 of every tensor of the last checkpoint's weights, and of the metrics without clocks.

    Without `values`, of their names and shapes.
    """
    digest = hashlib.sha256()
    for name, tensor in weights(run_dir).items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if values:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else np.asarray(tensor).tobytes())
    clocks = ("time", "speed", "roles", "memory", "timeline")
    rows: list[Any] = [
        {key: value for key, value in row.items() if not key.startswith(clocks)} for row in read_metrics(run_dir / "metrics.jsonl")
    ]
    rows = rows if values else [sorted({key for row in rows for key in row})]
    metrics = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    return {"weights": digest.hexdigest(), "metrics": metrics}


def machine() -> str:
    """What the order of sums depends on: torch's version and the vector instructions that it and its libraries use."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    wide = "+".join(flag for flag in ("avx512_bf16", "amx_tile") if flag in flags.split())
    return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()} {wide}".strip()


def known() -> dict[str, dict[str, dict[str, str]]]:
    """{machine: {run: hashes}}."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    return found


def main() -> None:
    names = sys.argv[1:] or [*RUNS, *RESUMED]
    for name in names:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            found = hashes(run(name, Path(folder)), values=name not in BY_THE_CLOCK)
        table: dict[str, Any] = known()
        before = table.setdefault(machine(), {}).get(name)
        table[machine()][name] = found
        write_atomic(HASHES, json.dumps(table, indent=1, sort_keys=True) + "\n")
        print(
            f"{name} ({time.monotonic() - begun:.0f} s): {'new' if before is None else 'unchanged' if before == found else 'CHANGED'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
