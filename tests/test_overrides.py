"""What is typed behind ``python -m embodied_rl.train``: paths as they are, and mistakes in our own words with what to type instead."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from embodied_rl.commands.cli import Argument, Command
from embodied_rl.config.compose import check_overrides, compose_config, hydra_overrides, load_train_config, parsed
from embodied_rl.errors import UserError
from tests.forks import run_forked
from tests.test_readme import ONE_AFTER_THE_OTHER

ROOT = Path(__file__).resolve().parents[1]
PATHS = [
    "runs/ä é 日",
    "a b",
    "(1)",
    "lr=3e-4",
    "a&b",
    "#1",
    "a,b",
    "1e5",
    "true",
    "a~b",
    'say "so"',
    "it's",
    "end\\",
    'x\\"',
    "[x]x",
    "a:b",
]
PATHS += ["$x", "-x", "x" * 250]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_reaches_the_run_as_it_was_typed(path: str) -> None:
    for key in ("run_dir", "resume", "hydra.run.dir", "policy.path"):
        (word,) = hydra_overrides([f"{key}=./{path}"])
        found = parsed(word)
        assert found is not None
        assert (found.is_sweep_override(), found.value()) == (False, f"./{path}")
        assert parsed(hydra_overrides([word])[0]).value() == f"./{path}", "quoting what is quoted changes nothing"  # type: ignore[union-attr]


def test_home_is_the_users_and_lists_stay_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jörg")
    assert hydra_overrides(["run_dir=~/x"]) == ['run_dir="/home/jörg/x"']
    assert hydra_overrides(["policy.hidden_sizes=[1,2]", "seed=1,2", "resume=null", "resume=auto"]) == [
        *("policy.hidden_sizes=[1,2]", "seed=1,2", "resume=null", "resume=auto")
    ]
    assert hydra_overrides(["run_dir=a,b"], sweep=True) == ["run_dir=a,b"]
    command = Command("x", "", (Argument("output", str, ""),))
    assert command.parse(["output=~/ä"])[0] == {"output": "/home/jörg/ä"}


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--seed=5"], "type: seed=5"),
        (["--config-name=nope"], "Choose its parts"),
        (["--cfg", "nope"], "Known: all, hydra, job"),
        (["--cfg"], "--cfg job"),
        (["--config-dir=/nowhere", "seed=1"], "not a folder"),
        (["domains={1:{}}"], "A key of domains must be text, got 1."),
        (["domains={arm:3}"], "domains.arm must be a mapping of keys to values, got 3."),
        (["a=[1"], "Type: 'a=\"[1\"'"),
        (["sim==x"], "sim must be the name of one file of configs/sim, got '=x'"),
        (["sim={a:1}"], "sim must be the name of one file"),
        (["sim=[cartpole]"], "sim must be the name of one file"),
        (["+x"], "not of the form key=value"),
        (["sim"], "Type: sim=VALUE"),
        (["@"], "not of the form key=value"),
        (["=5"], "not a configuration key"),
        (["seed=1,2"], "-m seed=1,2"),
        (["-m", "sim=cartpole,nope"], "Simulator 'nope' is not known"),
        (["~sim"], "removes a key that a run needs"),
        (["seed=${nothing}"], "refers to a value that does not exist"),
        (["+seed=5"], "remove the '+'"),
        (["+experiment=cartpole"], "'experiment' is in the configuration already. Type: experiment=cartpole"),
        (["resume=true"], "write resume=auto"),
        (
            ["sim=cartpole", "seed=1", "sim=fetch_reach"],
            "'sim' is given twice: 'cartpole' and 'fetch_reach'. Remove one. For a run with each",
        ),
        (["sim=cartpole", "sim=fetch_reach"], "type: -m sim=cartpole,fetch_reach"),
        (["-m", "seed=1,2", "seed=3"], "'seed' is given twice"),
        (["sim=cartpole", "sim.kwargs.a=1", "++sim.kwargs.a=2"], "'sim.kwargs.a' is given twice: '1' and '2'. Remove one."),
    ],
)
def test_mistakes_are_told_in_our_words(words: list[str], part: str) -> None:
    with pytest.raises(UserError) as found:
        check_overrides(words)
    assert part in str(found.value)
    assert len(str(found.value)) <= 400
    assert "\n" not in str(found.value)


def test_composing_in_python_takes_the_same_paths() -> None:
    assert compose_config(["run_dir=/tmp/ä (1), 日"])["run_dir"] == "/tmp/ä (1), 日"


@pytest.mark.slow
@pytest.mark.ci_sample
def test_everything_lies_below_a_home_with_letters_beyond_ascii(tmp_path: Path) -> None:
    home = tmp_path / "jörg (日 é) #1 & co"
    for name in ("embodied_rl", "configs", "assets/report_page"):
        shutil.copytree(ROOT / name, home / name)  # with what was compiled, or each process would compile it anew
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(home)}

    small = ["sim=cartpole", "total_steps=256", "sim.num_slots=4", "sim.num_workers=1", "algorithm.rollout_steps=64"]
    small += ["algorithm.minibatch_size=64", "evaluation.num_episodes=2", "video.enabled=no", "stop_at_success=null"]
    run_dir = home / "lr=3e-4, a~b"
    evaluate, train_on = ["evaluate", f"checkpoint={run_dir}"], ["train", f"resume={run_dir}", "total_steps=512"]
    commands = [["train", *small, "run_dir=~/lr=3e-4, a~b"], [*evaluate, "num_episodes=2", "output=~/ergebnis ä.json"], train_on]
    program = [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps(commands)]
    done = subprocess.run(program, cwd=home, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run_dir / "results.json").is_file()
    hints = [line[line.index("python -m embodied_rl.") :] for line in done.stdout.splitlines() if "python -m embodied_rl." in line]
    pasted = [[module.removeprefix("embodied_rl."), *words] for _, _, module, *words in map(shlex.split, hints)]
    assert train_on in pasted
    assert evaluate in [words[:2] for words in pasted]
    assert (home / "ergebnis ä.json").is_file()
    assert '"step": 512' in (run_dir / "checkpoints/last/state.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(("num_slots", "steps"), [(4, 64), (16, 64), (32, 32), (64, 16), (100, 10), (4096, 1)])
def test_ppo_keeps_its_rows(num_slots: int, steps: int) -> None:
    words = ["sim=cartpole", f"sim.num_slots={num_slots}", "algorithm.minibatch_size=64"]
    assert load_train_config(words).algorithm.rollout_steps == steps


def test_given_steps_are_taken() -> None:
    assert load_train_config(["sim=cartpole", "sim.num_slots=64", "algorithm.rollout_steps=5"]).algorithm.rollout_steps == 5


def test_a_sweep_is_refused_before_its_first_run_begins(tmp_path: Path) -> None:
    words = ["-m", "sim=cartpole", "algorithm.minibatch_size=256,100000", "run_dir=run"]
    done = run_forked("embodied_rl.train", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"error: algorithm.minibatch_size .*\n", done.stderr)
    assert not (tmp_path / "run").exists()

    done = run_forked("embodied_rl.train", "-m", "sim=cartpole", "seed=1,2", "run_dir=run", cwd=tmp_path)
    assert (done.returncode, done.stderr[:62]) == (2, "error: run_dir=run is the folder of several runs of this sweep")
    (tmp_path / "old/checkpoints/step_000000001").mkdir(parents=True)
    (tmp_path / "old/checkpoints/step_000000001/state.json").write_text("{}")
    done = run_forked("embodied_rl.train", "-m", "sim=cartpole", "run_dir=run,old", cwd=tmp_path)
    assert (done.returncode, done.stderr[:38]) == (2, "error: run_dir=old already has a run. ")
    assert not (tmp_path / "run").exists()
