"""The GPU benchmark on a machine without one: no policy copies between devices, planted faults are found, sections resume."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.forks import run_forked
from tests.test_benchmark_runs import run_script

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[1]

PLANTED = """
import sys
sys.path.insert(0, {benchmarks!r})
import gpu_audit
from embodied_rl.config import PolicyConfig
from embodied_rl.policies.actor_critic import ActorCritic

gpu_audit.register_virtual()
value = ActorCritic.value

for plant in {plants}:

    def stranded(self, observation):
        import torch
        return value(self, observation) + eval(plant)

    ActorCritic.value = stranded
    found = gpu_audit.audit(PolicyConfig(hidden_sizes=(8, 8)), gpu_audit.spec_of(), gpu_audit.VIRTUAL)
    print("; ".join(gpu_audit.failures({{"mlp": found}})))
"""
PLANTS = {
    "torch.zeros(4)": "mlp, value: FakeTensorDeviceMismatchError",
    "torch.zeros(4).to(observation['state'].device)": "mlp, value: to the device 1x",
    "torch.zeros(4, device=observation['state'].device).cpu().to(observation['state'].device)": "mlp, value: to the host 1x",
}
"""Left behind, moved in a step, there and back."""


@pytest.mark.slow
@pytest.mark.ci_sample
def test_policies_stay_on_their_device() -> None:
    lines = run_script("gpu_audit.py", "--device", "virtual")
    assert lines[-1] == "figure: 6 policies, 0 copies or failures"


def test_a_tensor_on_the_wrong_device_is_found(tmp_path: Path) -> None:
    program = PLANTED.format(benchmarks=str(ROOT / "benchmarks"), plants=list(PLANTS))
    (tmp_path / "planted.py").write_text(program, encoding="utf-8")
    done = run_forked("planted", cwd=tmp_path)
    lines = done.stdout.splitlines()[-len(PLANTS) :]
    assert [told in line for told, line in zip(PLANTS.values(), lines, strict=True)] == [True] * len(PLANTS), done.stdout + done.stderr


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    words = ("-m", "benchmarks.gpu", "--tiny", "--output", str(folder), *words)
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=590, check=False)


def test_the_number_of_a_process_that_has_ended_is_another_ones() -> None:
    from benchmarks.gpu import end_all

    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    with subprocess.Popen(["sleep", "600"]) as other:
        ended.pid = other.pid
        end_all(ended)
        other.terminate()
        assert other.wait() == -signal.SIGTERM


def test_what_is_done_stays_done(tmp_path: Path) -> None:
    first = command(tmp_path, "--sections", "maniskill")
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.splitlines()[-1] == "figure: 1 of 12 sections are done"
    noted = json.loads((tmp_path / "gpu.json").read_text())["maniskill"]
    assert noted["figure"].startswith("cartpole ")
    assert noted["figure"] in (tmp_path / "gpu.md").read_text()
    assert "maniskill: done before" in command(tmp_path, "--sections", "maniskill").stdout


def test_a_section_out_of_time_ends_with_what_it_started(tmp_path: Path) -> None:
    before = set(psutil.pids())
    done = command(tmp_path, "--sections", "runs", "--limit", "4")
    assert done.returncode == 1
    assert "runs: out of time" in done.stdout, done.stdout + done.stderr
    left = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"]) if one.pid not in before]
    assert not [words for words in left if "gpu_runs.py" in " ".join(words)]


@pytest.mark.slow
def test_every_section_runs_on_a_processor(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("peft")
    done = command(tmp_path)
    assert done.stdout.splitlines()[-1] == "figure: 12 of 12 sections are done", done.stdout + (tmp_path / "gpu.md").read_text()
