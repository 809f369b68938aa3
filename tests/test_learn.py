"""`embodied_rl.learn` and `load_policy`: what they return is held against episodes that are played by hand with plain gymnasium."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import embodied_rl
from embodied_rl import trainer
from embodied_rl.commands import learn
from embodied_rl.errors import UserError
from tests.forks import run_forked
from tests.short_run import QUICK

pytestmark = pytest.mark.usefixtures("forked")

SETTINGS = [word for word in QUICK if not word.startswith("total_steps=")]
README = Path(__file__).parents[1] / "README.md"


class Docking(gymnasium.Env[np.ndarray, np.ndarray]):
    """A boat on a line comes to rest at the pier; it begins further away than its bounds say nothing about."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-3.0, 5.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.state, self.num_steps = np.array([self.np_random.uniform(-1, 1), 0.0], np.float32), 0
        return self.state.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        self.state[1] += 0.1 * float(action[0])
        self.state[0] += 0.1 * self.state[1]
        return self.state.copy(), -float(np.abs(self.state).sum()), self.num_steps == 20, False, {}


def played(env: gymnasium.Env[Any, Any], policy: Any, seed: int) -> tuple[float, int]:
    """(return, length) of an episode, step by step."""
    observation, _ = env.reset(seed=seed)
    policy.reset()
    total, length, over = 0.0, 0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(policy.predict(observation))
        total, length, over = total + float(reward), length + 1, terminated or truncated
    return total, length


def test_an_env_class_is_learned_and_its_policy_plays_as_the_run_was_evaluated(tmp_path: Path) -> None:
    run = embodied_rl.learn(sim=Docking, total_steps=256, run_dir=tmp_path / "run", overrides=SETTINGS)
    policy = run.load_policy()
    first = run.results["episodes"][0]
    assert first["seed"] == 2**30
    assert played(Docking(), policy, first["seed"]) == (pytest.approx(first["return"], rel=1e-4), 20)
    assert run.metrics["step"].tolist() == [256.0]
    assert np.isfinite(run.metrics["episode/return"]).all()
    assert run.report == tmp_path / "run" / "report.html"

    rows = np.array([[0.5, 0.0], [-0.5, 0.25], [9.0, 9.0]])
    batch = policy.predict({"state": rows, "further": 3})
    assert batch.shape == (3, 1)
    assert batch.dtype == np.float32
    np.testing.assert_allclose(batch, [policy.predict(row) for row in rows], rtol=1e-5)
    assert batch.min() >= -3
    assert batch.max() <= 5
    for wrong, message in (
        (np.zeros(3), r"'state' must be \[2\] or \[n, …\], got \[3\]\. Expected: \{'state': \[2\] float32\}, or a batch"),
        ({"position": rows}, r"The observation lacks 'state'; it has position\."),
        ([[0.0, 1.0], [2.0]], r"'state' must be an array, got \[\[0\.0, 1\.0\], \[2\.0\]\]\."),
        (np.array(["a", "b"]), r"'state' must have dtype float32, got <U1"),
    ):
        with pytest.raises(UserError, match=message):
            policy.predict(wrong)

    longer = run.resume(total_steps=512)
    assert longer.path.resolve() == run.path.resolve()
    assert run.metrics["step"].tolist() == [256.0, 512.0]


def test_a_gymnasium_id_is_a_simulator_and_its_card_shows_lines_that_run(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    run = embodied_rl.learn("CartPole-v1", total_steps=256, run_dir=tmp_path / "run", overrides=SETTINGS)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers are its own"
    first = run.results["episodes"][0]
    policy = embodied_rl.load_policy(run.checkpoint)
    assert played(gymnasium.make("CartPole-v1"), policy, first["seed"]) == (first["return"], first["length"])
    assert isinstance(policy.predict(np.zeros(4)), int)
    assert policy.predict(np.zeros((2, 4))).tolist() in ([0, 0], [1, 1])
    card = (run.checkpoint / "MODEL_CARD.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    known: dict[str, Any] = {"observation": {"state": np.zeros(4)}}
    exec(code, known)
    assert known["action"] == policy.predict(np.zeros(4))
    assert f"resume={run.path}/checkpoints/step_000000256\n" in card
    assert "embodied_rl.train.train(config)" not in card


def test_the_script_of_the_readme_runs_with_its_own_class(tmp_path: Path) -> None:
    (env,) = re.findall(r"```python\n# my_package/my_module.py\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (use,) = re.findall(r"```python\n(import embodied_rl\n.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    limit = '["sim.max_episode_steps=100"]'
    assert use.count(limit) == 1, "without a step limit no episode of this class ends"
    script = env + use.replace(limit, f"[*{SETTINGS}, *{limit}], run_dir='my run'").replace("20_000", "256")
    (tmp_path / "script.py").write_text(script + "print(action, run.path)\n", encoding="utf-8")
    done = run_forked("script", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[[-\d.e]+\] my run$", done.stdout.rstrip())
    (module,) = (tmp_path / "my run" / "source").glob("docking_*.py")
    assert "class Docking(gymnasium.Env):" in module.read_text(encoding="utf-8")


class Endless(Docking):
    """No episode ends."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self.state.copy(), 0.0, False, False, {}


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one begins before the first has written anything; without a run, no folder stays."""

    class Now(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Now:
            return cls(2026, 1, 2)

    found: list[Path] = []

    def begin(words: list[str], source: Path) -> embodied_rl.Run:
        found.append(source.parent)
        if len(found) == 1:
            embodied_rl.learn("cartpole")
        return embodied_rl.Run(source.parent)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learn, "datetime", Now)
    monkeypatch.setattr(learn, "trained", begin)
    embodied_rl.learn("cartpole")
    assert [folder.name for folder in found] == ["20260102-000000-seed1", "20260102-000000-seed1_2"]
    assert list(tmp_path.iterdir()) == []


def test_runs_on_a_disk_that_is_gone_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"^Cannot write 'runs/cartpole/"):
        embodied_rl.learn("cartpole")


def test_a_task_whose_episodes_never_end_is_not_evaluated_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_ENDLESS_STEPS", 32)
    with pytest.raises(UserError, match=r"^No episode of 'Endless' has ended in 256 steps, .* Set a step limit, sim\.max_episode_steps=…"):
        embodied_rl.learn(Endless, total_steps=256, run_dir=tmp_path / "run", overrides=SETTINGS)
    assert (tmp_path / "run/checkpoints/step_000000256/state.json").is_file()
    run = embodied_rl.Run(tmp_path / "run")
    assert run.metrics["step"].tolist() == [256.0]


def test_what_cannot_be_sent_to_a_process_is_one_line(tmp_path: Path) -> None:
    class Inside(Docking):
        pass

    for sim in (Inside, lambda: Docking()):
        with pytest.raises(UserError, match=r"is defined inside a function or as a lambda.*Write it into a file"):
            embodied_rl.learn(sim, run_dir=tmp_path / "run")
    for made in (Docking(), functools.partial(Docking)):
        with pytest.raises(UserError, match=r"sim must be a name, a class or a function, got .*Docking"):
            embodied_rl.learn(made, run_dir=tmp_path / "run")
    for overrides in ("sim.num_slots=4", {"sim.num_slots": 4}, ["sim.num_slots", 4]):
        with pytest.raises(UserError, match=r"^overrides must be a list of 'key=value', got "):
            embodied_rl.learn(Docking, run_dir=tmp_path / "run", overrides=overrides)  # type: ignore[arg-type]
    script = "import embodied_rl\nlock = __import__('threading').Lock()\nclass Env:\n    def step(self, action):\n        return lock\n"
    script += "class WithoutMethods(Env):\n    size = 3\n"
    (tmp_path / "script.py").write_text(script + "embodied_rl.learn(WithoutMethods)\n", encoding="utf-8")
    done = run_forked("script", cwd=tmp_path)
    assert "UserError: 'WithoutMethods' uses 'lock', a lock, which no other process can get. Write it into a file" in done.stderr


def test_importing_the_package_brings_nothing_heavy() -> None:
    code = "import sys, embodied_rl; assert not {'torch', 'numpy', 'hydra'} & set(sys.modules); print(embodied_rl.learn.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "learn\n", done.stderr
    with pytest.raises(AttributeError, match="has no attribute 'lern'"):
        embodied_rl.lern  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_a_language_agent_answers_texts(tmp_path: Path) -> None:
    words = ["experiment=frozenlake_text", "algorithm.warm_start=null", "evaluation.num_episodes=1", "logger=quiet", "video.enabled=no"]
    words += ["sim.num_slots=4", "sim.num_workers=1", "algorithm.groups.filters=[]"]  # its groups are equal: nothing is learned
    run = embodied_rl.learn("frozenlake", policy="language", algorithm="grpo", total_steps=1, run_dir=tmp_path / "run", overrides=words)
    policy = run.load_policy()
    text = "You stand on a frozen lake."
    assert isinstance(policy.predict(text), str)
    policy.reset()
    assert len(policy.predict([text, text, text])) == 3


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_class_of_a_notebook_cell_is_sent_to_the_simulator_processes(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    from traitlets.config import Config

    (env,) = re.findall(r"```python\n# my_package/my_module.py\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    imports, _, cell = env.partition("\n\n\n")
    use = f"run = embodied_rl.learn(Docking, total_steps=256, overrides={[*SETTINGS, 'sim.max_episode_steps=20']}, run_dir='run')\n"
    asked = "print(run.load_policy().predict([[0.5, 0.0], [0.1, 0.2]]).shape, len(run.metrics['step']))"
    cells = [nbformat.v4.new_code_cell(text) for text in (imports + "\nimport embodied_rl", cell, use, asked)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:  # as in test_examples: not over TCP, and of a short name
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        folder = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(notebook, timeout=280, startup_timeout=240, config=config, resources=folder).execute()
    # A line may come in two pieces.
    assert "".join(output["text"] for output in notebook.cells[-1].outputs) == "(2, 1) 1\n"
    (module,) = (tmp_path / "run" / "source").glob("docking_*.py")
    assert "class Docking(gymnasium.Env):" in module.read_text(encoding="utf-8")
