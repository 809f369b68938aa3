"""Evaluation of real, short runs, held against episodes played by hand with plain gymnasium."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import itertools
import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.commands.evaluate import choose_sim, evaluate_checkpoint, expand_checkpoints, load_to_play, main
from embodied_rl.config import load_sim_config
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.generation.random_backend import RandomGenerator
from embodied_rl.policies.actor_critic import build_policy
from embodied_rl.rollout import evaluation
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import ActionSpec
from tests.forks import run_forked
from tests.sample_run import SPEC
from tests.short_run import one_line_error, score_interval, told, train_shortly

pytestmark = pytest.mark.usefixtures("forked")

HELD_OUT = 2**30


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at 1,024 and 2,048 steps."""
    words = ["sim=cartpole", "total_steps=2048", "checkpoint.every_steps=1024", "checkpoint.keep_last=5", "algorithm.num_epochs=8"]
    return train_shortly(tmp_path_factory.mktemp("cartpole") / "run", *words)


@pytest.fixture(scope="module")
def reach(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Success exists here; 3,072 steps are enough to reach the goal in some episodes and not in others."""
    pytest.importorskip("gymnasium_robotics")
    return train_shortly(
        tmp_path_factory.mktemp("reach") / "run",
        "sim=fetch_reach",
        "total_steps=3072",
        "algorithm.num_epochs=10",
        "policy.hidden_sizes=[64,64]",
        "policy.normalize_observation=true",
    )


def play_by_hand(run_dir: Path, seeds: range) -> list[float]:
    """Returns of the policy's mode in CartPole, one environment, one observation at a time."""
    checkpoint = load_checkpoint(run_dir)
    policy = build_policy(checkpoint.config.policy, checkpoint.spec)
    policy.load_state_dict(checkpoint.policy)
    policy.train(False)
    returns = []
    with gymnasium.make("CartPole-v1") as env:
        for seed in seeds:
            observation, _ = env.reset(seed=seed)
            total, done = 0.0, False
            while not done:
                with torch.no_grad():
                    action = policy.act({"state": torch.as_tensor(observation)[None]}, None).action
                observation, reward, terminated, truncated, _ = env.step(int(action[0, 0]))
                total, done = total + float(reward), terminated or truncated
            returns.append(total)
    return returns


@pytest.mark.parametrize("command", ["evaluate", "record", "render"])
def test_one_thread_acts_beside_the_simulators(cartpole: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training; with torch's own number each action waits for threads that simulators keep from running."""
    if command == "render":
        pytest.importorskip("pygame")
    from embodied_rl.commands import record, render
    from embodied_rl.generation.torch_backend import TorchGenerator

    found, send = set[int](), TorchGenerator.send

    def noted(self: TorchGenerator, *given: Any) -> None:
        found.add(torch.get_num_threads())
        send(self, *given)

    monkeypatch.setattr(TorchGenerator, "send", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        if command == "evaluate":
            main([f"checkpoint={cartpole}", "num_episodes=2", f"output={tmp_path}/figures"])
        elif command == "record":
            record.main([f"checkpoint={cartpole}", "num_episodes=2", f"output={tmp_path}/recording"])
        else:
            render.main([f"checkpoint={cartpole}", "num_episodes=1", "size=64", f"output={tmp_path}/film"])
        assert (found, torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)


def test_the_command_line_writes_every_episode_and_their_figures(reach: Path, tmp_path: Path) -> None:
    shutil.copytree(reach, tmp_path / "run", symlinks=True)
    arguments = ["checkpoint=run", "num_episodes=12", "seed=40", "sim.num_slots=3"]
    done = run_forked("embodied_rl.evaluate", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "run/evaluation.json").read_text(encoding="utf-8"))
    rows = document["episodes"]
    assert [row["seed"] for row in rows] == list(range(HELD_OUT + 40, HELD_OUT + 52))
    assert document["held_out_seeds"] == {"first": HELD_OUT + 40, "last": HELD_OUT + 51, "count": 12}
    successes, at_end = sum(row["success_once"] for row in rows), sum(row["success_at_end"] for row in rows)
    # success_ends_episode: an episode that reaches its goal ends there.
    assert successes == at_end == sum(row["length"] < 50 for row in rows)
    assert 0 < successes < 12, "the run should be neither hopeless nor perfect, or this test tells nothing"
    assert document["success"] == document["success_at_end"] == successes / 12
    assert document["success_interval_95"] == pytest.approx(score_interval(successes, 12), abs=1e-9)
    returns = [row["return"] for row in rows]
    assert document["return_mean"] == pytest.approx(statistics.fmean(returns), rel=1e-12)
    assert document["return_std"] == pytest.approx(statistics.stdev(returns), rel=1e-12)
    low, high = document["return_mean_interval_95"]
    assert min(returns) < low < document["return_mean"] < high < max(returns)
    assert document["length_mean"] == pytest.approx(statistics.fmean(row["length"] for row in rows), rel=1e-12)
    assert (document["task"], document["policy"], document["step"]) == ("FetchReachDense-v4", "checkpoint", 3072)
    assert document["command"] == "python -m embodied_rl.evaluate " + " ".join(arguments)
    assert document["sim"]["num_slots"] == 3
    assert document["checkpoint"] == str((tmp_path / "run/checkpoints/step_000003072").resolve())
    assert document["versions"]["numpy"] == np.__version__
    for shown in (f"{successes / 12:.1%}", "12 held-out seeds", f"{100 * document['success_interval_95'][0]:.1f}", "evaluation.json"):
        assert shown in done.stdout
    assert "\x1b" not in done.stdout


def test_episodes_are_those_played_by_hand_whatever_the_slots(cartpole: Path) -> None:
    checkpoint = load_checkpoint(cartpole, with_learner=False)
    expected = play_by_hand(cartpole, range(HELD_OUT + 5, HELD_OUT + 12))
    assert len(set(expected)) > 2
    for slots in (1, 3, 16):
        result = evaluate_checkpoint(checkpoint, 7, seed=5, sim=choose_sim(checkpoint, None, {"sim.num_slots": slots}))
        assert [episode.seed for episode in result.episodes] == list(range(HELD_OUT + 5, HELD_OUT + 12))
        assert [episode.episode_return for episode in result.episodes] == expected
        assert [episode.length for episode in result.episodes] == expected  # CartPole pays 1 for each step
        assert result.figures.success is None


def test_random_actions_balance_for_as_long_as_chance_does(cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def returns(*arguments: str) -> list[float]:
        main([f"checkpoint={cartpole}", "policy=random", f"output={tmp_path / 'random.json'}", *arguments])
        document = json.loads((tmp_path / "random.json").read_text(encoding="utf-8"))
        assert document["policy"] == "random"
        return [row["return"] for row in document["episodes"]]

    evaluation = cartpole / "evaluation.json"
    assert not evaluation.exists()
    main([f"checkpoint={cartpole}", "policy=random", f"output={tmp_path / 'at-0.1'}", "num_episodes=1"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at-0.1.csv", "at-0.1.json"], "not at-0.json, which at-0.2 would replace"
    played = returns("num_episodes=200")
    assert not evaluation.exists(), "output= was given"
    assert "random policy" in capsys.readouterr().out
    rng, by_chance = np.random.default_rng(0), []
    with gymnasium.make("CartPole-v1") as env:
        for seed in range(200):
            env.reset(seed=seed)
            length = 1
            while not env.step(int(rng.integers(2)))[2]:
                length += 1
            by_chance.append(float(length))
    # Two samples of the same distribution: their means differ by less than four standard errors.
    error = np.sqrt((np.var(played) + np.var(by_chance)) / 200)
    assert abs(np.mean(played) - np.mean(by_chance)) < 4 * error
    assert returns("num_episodes=20") == returns("num_episodes=20")
    assert returns("num_episodes=20") != returns("num_episodes=20", "seed=100")


def test_random_actions_fill_the_whole_range() -> None:
    generator = RandomGenerator(SPEC, seed=3)
    generator.publish(7)
    slots = np.arange(5000)
    generator.send(slots, {}, None)
    acted = generator.recv()
    assert acted.version == generator.version == 7
    # Uniform on [-1, 1]: mean 0, variance 1/3, and the deciles hold a tenth each.
    assert acted.action.shape == (5000, 4)
    assert acted.action.mean() == pytest.approx(0, abs=4 / np.sqrt(3 * 20_000))
    counts, _ = np.histogram(acted.action, bins=10, range=(-1, 1))
    assert counts.sum() == 20_000
    assert abs(counts - 2000).max() < 5 * np.sqrt(2000 * 0.9)
    given = np.zeros((2, 4), np.float32)
    generator.send(slots[:2], {}, given)
    np.testing.assert_array_equal(generator.recv().action, given)  # the caller's noise is left alone: erf(0) = 0


def test_random_choices_are_all_taken() -> None:
    import dataclasses

    spec = dataclasses.replace(SPEC, action=ActionSpec.discrete(3))
    generator = RandomGenerator(spec, seed=0)
    generator.send(np.arange(3000), {}, None)
    counts = np.bincount(generator.recv().action.ravel(), minlength=3)
    assert abs(counts - 1000).max() < 5 * np.sqrt(1000 * 2 / 3)


def test_values_of_the_simulator_can_be_changed(cartpole: Path) -> None:
    checkpoint = load_checkpoint(cartpole, with_learner=False)
    assert choose_sim(checkpoint, None, {}) == checkpoint.config.sim
    with pytest.raises(UserError, match="of a run with one domain: leave domain= out"):
        load_to_play(cartpole, domain="pole")
    assert load_to_play(cartpole, domain="pole", against=True).path == checkpoint.path, "the domain is that of the other checkpoint"
    one = choose_sim(checkpoint, None, {"sim.num_slots": 1})
    assert (one.num_slots, one.num_workers, one.num_groups) == (1, 1, 1)
    with pytest.raises(UserError, match=r"sim.num_workers must be <= sim.num_slots \(1\), got 2"):
        choose_sim(checkpoint, None, {"sim.num_slots": 1, "sim.num_workers": 2})
    assert choose_sim(checkpoint, None, {"sim.kwargs.sutton_barto_reward": True}).kwargs == {"sutton_barto_reward": True}
    with pytest.raises(UserError, match=r"^sim\.target must be given for a simulator of your own"):
        choose_sim(checkpoint, "custom", {})
    with pytest.raises(UserError, match=r"^sim\.kwargs must be a mapping of keys to values, got 5\.$"):
        choose_sim(checkpoint, None, {"sim.kwargs": 5, "sim.kwargs.sutton_barto_reward": True})
    assert choose_sim(checkpoint, "pendulum", {}).task == "Pendulum-v1"
    short = evaluate_checkpoint(checkpoint, 3, sim=choose_sim(checkpoint, None, {"sim.max_episode_steps": 4, "sim.num_slots": 2}))
    assert [episode.length for episode in short.episodes] == [4, 4, 4]
    # Sutton and Barto's reward is 0 but for -1 at the fall: the argument reached the simulator.
    other = evaluate_checkpoint(checkpoint, 2, sim=choose_sim(checkpoint, None, {"sim.kwargs.sutton_barto_reward": True}))
    assert [episode.episode_return for episode in other.episodes] == [-1.0, -1.0]


def test_a_task_asked_for_by_name_needs_equal_spaces_only(reach: Path) -> None:
    checkpoint = load_checkpoint(reach, with_learner=False)
    sparse = choose_sim(checkpoint, None, {"sim.task": "FetchReach-v4"})
    result = evaluate_checkpoint(checkpoint, 6, seed=40, sim=sparse)
    assert result.spec.task == "FetchReach-v4"
    # The sparse reward is 0 at the goal and -1 elsewhere, and an episode ends at its goal.
    assert [e.episode_return for e in result.episodes] == [float(e.success_once - e.length) for e in result.episodes]
    with pytest.raises(IncompatibleCheckpointError, match="made for another simulator: observation 'state'"):
        evaluate_checkpoint(checkpoint, 1, sim=choose_sim(checkpoint, None, {"sim.task": "FetchPushDense-v4"}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Argument checkpoint=… is missing"),
        (["checkpoint=RUN", "num_episode=3"], "Argument 'num_episode' is not known. Did you mean 'num_episodes'?"),
        (["checkpoint=RUN", "sim.num_slot=3"], "'sim.num_slot' is not known. Did you mean 'num_slots'?"),
        (["checkpoint=RUN", "sim.kwargs.a.b=1"], "only sim.KEY and sim.kwargs.KEY can be changed"),
        (["checkpoint=RUN", "sim.num_slots=0"], "sim.num_slots must be between 1 and 1,000,000, got 0"),
        (["checkpoint=RUN", "num_episodes=0"], "num_episodes must be between 1 and 1,000,000,000, got 0"),
        (["checkpoint=RUN", "num_episodes=ten"], "num_episodes must be an integer, got 'ten'"),
        (["checkpoint=RUN", "seed=-1"], "seed must be between 0 and 536,870,911, got -1"),
        (["checkpoint=RUN", "policy=randm"], "policy=randm is not a choice. Did you mean 'random'?"),
        (["checkpoint=RUN", "fast"], "Argument 'fast' is not of the form key=value"),
        (["checkpoint=RUN", "sim=cartpol"], "Simulator 'cartpol' is not known. Did you mean 'cartpole'?"),
        (["checkpoint=RUN", "sim=pendulum"], "was made for another simulator: observation 'state' [4] float32 ≠ [3] float32; action"),
        (["checkpoint=RUN", "sim.task=CartPole-v9"], "CartPole-v9"),
        (["checkpoint=RUN/checkpoints/step_000000512"], "does not exist. Checkpoints beside it: step_000001024, step_000002048"),
        (["checkpoint=nowhere"], "Checkpoint 'nowhere' does not exist"),
    ],
)
def test_a_mistake_is_one_line(cartpole: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = one_line_error(main, [word.replace("RUN", str(cartpole)) for word in arguments], capsys)
    assert message in line


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("policy.safetensors", lambda data: data[: len(data) // 2], "policy.safetensors' is truncated or damaged"),
        ("policy.safetensors", lambda data: b"", "policy.safetensors' is truncated or damaged"),
        ("policy.safetensors", None, "policy.safetensors is missing"),
        ("state.json", lambda data: data[: len(data) // 2], "state.json' is truncated or damaged"),
        ("state.json", lambda data: data.replace(b'"format_version": 1', b'"format_version": 99'), "has format version 99"),
        ("config.yaml", lambda data: data.replace(b"rollout_steps", b"rollout_stepz"), "Did you mean 'rollout_steps'?"),
        ("config.yaml", lambda data: data.replace(b"- 16", b"- 32"), "config.yaml' is truncated or damaged"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(
    cartpole: Path, tmp_path: Path, name: str, damage: Callable[[bytes], bytes] | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "step_000000256"
    shutil.copytree(cartpole / "checkpoints/step_000002048", folder)
    file = folder / name
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    assert message in one_line_error(main, [f"checkpoint={folder}", "num_episodes=1"], capsys)


def test_figures_are_shown_even_if_the_file_cannot_be_written(cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.csv").mkdir()  # in the way
    with pytest.raises(SystemExit) as stopped:
        main([f"checkpoint={cartpole}/checkpoints/last", "num_episodes=2", f"output={tmp_path / 'out.json'}"])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert "2 held-out seeds 0 … 1" in out
    assert "Cannot write" in err
    assert len(told(err)) == 1


# ---- several checkpoints --------------------------------------------------------------------------------------------


def test_two_checkpoints_are_compared_seed_by_seed(cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = (cartpole / "checkpoints" / name for name in ("step_000001024", "step_000002048"))
    output = tmp_path / "both.json"
    main([f"checkpoint={last}", f"against={first}", "num_episodes=8", "seed=5", f"output={output}", "sim.num_slots=3"])
    shown = capsys.readouterr().out
    document = json.loads(output.read_text(encoding="utf-8"))
    ours, theirs = document["evaluations"]
    assert (ours["label"], theirs["label"]) == ("step 2048", "step 1024")
    # The later one begins in simulators that have played already, and plays as if alone.
    for played, folder in ((ours, last), (theirs, first)):
        alone = evaluate_checkpoint(load_checkpoint(folder, with_learner=False), 8, seed=5)
        assert [row["return"] for row in played["episodes"]] == [episode.episode_return for episode in alone.episodes]
        assert played["checkpoint"] == str(folder.resolve())
        assert played["policy_sha256"] == hashlib.sha256((folder / "policy.safetensors").read_bytes()).hexdigest()
    (comparison,) = document["comparisons"]
    differences = [a["return"] - b["return"] for a, b in zip(ours["episodes"], theirs["episodes"], strict=True)]
    assert comparison["num_pairs"] == 8
    assert comparison["return_difference"] == pytest.approx(statistics.fmean(differences))
    assert comparison["return_p_value"] == by_all_signs(differences)
    assert comparison["success"] is None
    assert "success" not in shown.replace("success rate", "")
    assert f"{statistics.fmean(differences):+.4g}" in shown
    with output.with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [(row["policy"], int(row["step"])) for row in table] == [("step 2048", 2048)] * 8 + [("step 1024", 1024)] * 8
    assert [float(row["return"]) for row in table] == [row["return"] for row in (*ours["episodes"], *theirs["episodes"])]
    assert {row["success_once"] for row in table} == {""}, "no notion of success is no failure"
    assert {row["task"] for row in table} == {"CartPole-v1"}


def by_all_signs(differences: list[float]) -> float:
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    return statistics.fmean(total >= abs(sum(differences)) - 1e-9 for total in sums)


def test_a_pattern_plays_all_and_each_is_compared_with_random(cartpole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"checkpoint={cartpole}/checkpoints/step_*", "against=random", "num_episodes=6"]
    for _ in range(2):
        main(arguments)
    shown = capsys.readouterr().out
    document = json.loads((cartpole / "comparison.json").read_text(encoding="utf-8"))
    assert (cartpole / "comparison_2.json").is_file(), "an earlier comparison is kept"
    assert [one["label"] for one in document["evaluations"]] == ["step 1024", "step 2048", "random"]
    assert [one["policy"] for one in document["comparisons"]] == ["step 1024", "step 2048"]
    p_values = [one["return_p_value"] for one in document["comparisons"]]
    # Holm's for two: the smaller is doubled, the larger at least as large as that.
    smaller = min(1.0, 2 * min(p_values))
    assert [one["p_values_holm"]["return"] for one in document["comparisons"]] == [
        smaller if p == min(p_values) else max(smaller, p) for p in p_values
    ]
    for text in ("against: random", "Against random, seed by seed (6 pairs)", "adjusted for the number of comparisons"):
        assert text in shown


def test_lists_and_patterns_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c,d"):
        (tmp_path / name).mkdir()
    assert expand_checkpoints("a") == ["a"]
    assert expand_checkpoints("c,d") == ["c,d"], "a folder's own name may hold a comma"
    assert expand_checkpoints("b, a,b") == ["b", "a"]
    assert expand_checkpoints("[ab]") == ["a", "b"]
    assert expand_checkpoints("*") == ["a", "b", "c,d"]
    assert expand_checkpoints("missing") == ["missing"]  # loading it says what lies beside
    for bad, message in ((",", "names 0 checkpoints"), ("x*", r"No checkpoint matches 'x\*'")):
        with pytest.raises(UserError, match=message):
            expand_checkpoints(bad)
    for number in range(65):
        (tmp_path / f"run{number}").mkdir()
    with pytest.raises(UserError, match="names 65 checkpoints; one evaluation plays 1 to 64"):
        expand_checkpoints("run*")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["against=RUN"], "are the same; give two that differ"),
        (["against=nowhere"], "Checkpoint 'nowhere' does not exist"),
        (["against=REACH"], "was made for another simulator"),
        (["policy=random", "against=random"], "are the same; give two that differ"),
        (["checkpoint=RUN,REACH", "policy=random"], "plays the same actions for each of 2 checkpoints: give one, or against=random"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_one_line(
    cartpole: Path, reach: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("RUN", str(cartpole)).replace("REACH", str(reach)) for word in arguments]
    checkpoint = [] if arguments[0].startswith("checkpoint=") else [f"checkpoint={cartpole}"]
    assert message in one_line_error(main, [*checkpoint, "num_episodes=1", *words], capsys)


def test_success_of_two_policies_is_tested_by_pairs(reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "reach.json"
    main([f"checkpoint={reach}", "against=random", "num_episodes=24", "seed=40", f"output={output}"])
    document = json.loads(output.read_text(encoding="utf-8"))
    ours, theirs = (one["episodes"] for one in document["evaluations"])
    pairs = [(a["success_once"], b["success_once"]) for a, b in zip(ours, theirs, strict=True)]
    counts = {name: pairs.count(pair) for name, pair in (("both", (True, True)), ("only_policy", (True, False)))}
    counts |= {name: pairs.count(pair) for name, pair in (("only_against", (False, True)), ("neither", (False, False)))}
    found = document["comparisons"][0]["success"]
    assert {name: found[name] for name in counts} == counts
    assert counts["only_policy"] + counts["only_against"] > 0
    assert found["difference"] == pytest.approx((counts["only_policy"] - counts["only_against"]) / 24)
    stats = pytest.importorskip("scipy.stats")
    differing = counts["only_policy"] + counts["only_against"]
    assert found["p_value"] == pytest.approx(stats.binomtest(counts["only_policy"], differing).pvalue)
    assert f"both {counts['both']}, only this one {counts['only_policy']}" in capsys.readouterr().out


def test_each_task_of_a_multi_task_simulator_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("metaworld")
    names = ["reach-v3", "push-v3", "door-open-v3"]
    run = train_shortly(
        tmp_path / "run",
        "sim=metaworld_mt10",
        f"sim.kwargs.tasks=[{','.join(names)}]",
        "sim.max_episode_steps=12",
        "total_steps=64",
        "sim.num_workers=1",
    )
    final = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert len(final["tasks"]) == 2, "two episodes, of two of the three tasks"
    capsys.readouterr()
    main([f"checkpoint={run}", "num_episodes=7", "seed=2"])
    shown = capsys.readouterr().out
    document = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    # The seed chooses the task: 2**30 + 2 is divisible by 3, so the seven are reach, push, door, reach, push, door, reach.
    assert (HELD_OUT + 2) % 3 == 0
    assert [row["task"] for row in document["episodes"]] == [names[index % 3] for index in range(7)]
    assert list(document["tasks"]) == sorted(names)
    for name, figures in document["tasks"].items():
        returns = [row["return"] for row in document["episodes"] if row["task"] == name]
        assert figures["num_episodes"] == len(returns) == (3 if name == "reach-v3" else 2)
        assert figures["return_mean"] == pytest.approx(statistics.fmean(returns), rel=1e-12)
        assert figures["success_interval_95"] == pytest.approx(
            score_interval(round(figures["success"] * len(returns)), len(returns)), abs=1e-9
        )
        (line,) = [line for line in shown.splitlines() if name in line]
        assert f"{figures['return_mean']:.4g}" in line.split("\t")
    with (run / "evaluation.csv").open(newline="", encoding="utf-8") as file:
        assert [row["task"] for row in csv.DictReader(file)] == [row["task"] for row in document["episodes"]]


def test_an_evaluation_that_is_ended_keeps_the_seeds_up_to_the_first_unplayed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = load_sim_config("pendulum")
    with EnvManager.from_config(dataclasses.replace(sim, num_workers=1), EpisodeSeeds.held_out(0), num_slots=3) as manager:
        player = RandomGenerator(manager.spec, 0)
        asked = itertools.count()
        cut = evaluate(manager, player, 8, is_over=lambda: next(asked) >= 250)  # episodes have 200 steps
        none = evaluate(manager, player, 8, is_over=lambda: True)
        monkeypatch.setattr(evaluation, "_MOST_DECISIONS", 150)
        with pytest.raises(UserError, match=r"'Pendulum-v1' has not ended in 150 decisions\. Set a step limit: sim\.max_episode_steps"):
            evaluate(manager, player, 8)
    assert [episode.seed - 2**30 for episode in cut] == [0, 1, 2]
    assert [episode.length for episode in cut] == [200, 200, 200]
    assert none == []
