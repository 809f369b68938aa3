"""What a run leaves behind, against hand arithmetic, an HTML parser and the files themselves."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.commands import evaluate, render
from embodied_rl.compose import load_train_config
from embodied_rl.errors import UserError
from embodied_rl.reporting import RunSummary, config_hash, summarise, write_results
from embodied_rl.reports.page import closing_text, result_text
from embodied_rl.types import EpisodeSummary
from tests.report_page.pages import Page
from tests.sample_run import SPEC, make_config
from tests.short_run import score_interval, train_shortly

pytestmark = pytest.mark.usefixtures("forked")

FIRST = 2**30


def episode(index: int, episode_return: float, length: int, once: bool, at_end: bool) -> EpisodeSummary:
    return EpisodeSummary(index % 2, index // 2, FIRST + index, episode_return, length, once, at_end, terminated=once)


EPISODES = [episode(0, 1.0, 10, True, True), episode(1, 2.0, 20, True, False), episode(2, 6.0, 60, False, False)]


def run_summary(run_dir: Path, **changes: Any) -> RunSummary:
    values: dict[str, Any] = {
        "run_dir": run_dir,
        "config": make_config(run_dir),
        "spec": SPEC,
        "episodes": EPISODES,
        "steps": 10_000,
        "iterations": 40,
        "train_wall_clock_s": 8.0,
        "wall_clock_s": 12.348,
        "command": "python -m embodied_rl.train experiment=fetch_reach 'policy.hidden_sizes=[8,8]'",
        "checkpoint": run_dir / "checkpoints" / "step_000010000",
        "extra": {"peak_memory_gib": 0.5},
    }
    return RunSummary(**{**values, **changes})


def test_figures_are_those_of_hand_arithmetic() -> None:
    figures = summarise(EPISODES, reports_success=True)
    assert (figures.num_episodes, figures.seeds) == (3, (FIRST, FIRST + 2))
    assert figures.success == 2 / 3
    assert figures.success_at_end == 1 / 3
    assert figures.success_interval == pytest.approx(score_interval(2, 3), abs=1e-9)
    assert figures.success_at_end_interval == pytest.approx(score_interval(1, 3), abs=1e-9)
    # Mean (1 + 2 + 6) / 3 = 3; squares of the differences 4 + 1 + 9 = 14, over n - 1 = 2.
    assert figures.return_mean == pytest.approx(3.0, rel=1e-12)
    assert figures.return_std == pytest.approx(math.sqrt(7.0), rel=1e-12)
    # Of the 27 resamples of three, 1/27 have mean 1 and 1/27 have mean 6: 3.7% each, more than the 2.5% left out on a side.
    assert figures.return_interval == (1.0, 6.0)
    assert figures.length_mean == pytest.approx(30.0, rel=1e-12)


def test_figures_without_success_or_of_one_episode() -> None:
    one = summarise(EPISODES[2:], reports_success=False)
    assert (one.success, one.success_interval, one.success_at_end, one.success_at_end_interval) == (None, None, None, None)
    assert (one.return_mean, one.return_std, one.return_interval, one.seeds) == (6.0, 0.0, (6.0, 6.0), (FIRST + 2, FIRST + 2))
    with pytest.raises(ValueError, match="no episode"):
        summarise([], reports_success=True)


def test_results_json_holds_figures_rows_and_provenance(tmp_path: Path) -> None:
    summary = run_summary(tmp_path)
    returned = write_results(summary)
    document = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert document["success"] == 2 / 3
    assert document["success_interval_95"] == pytest.approx(list(score_interval(2, 3)), abs=1e-9)
    assert (document["success_at_end"], document["return_mean"], document["length_mean"]) == (1 / 3, 3.0, 30.0)
    assert document["held_out_seeds"] == {"first": FIRST, "last": FIRST + 2, "count": 3}
    assert document["episodes"] == [
        {"seed": FIRST, "success_once": True, "success_at_end": True, "return": 1.0, "length": 10, "terminated": True},
        {"seed": FIRST + 1, "success_once": True, "success_at_end": False, "return": 2.0, "length": 20, "terminated": True},
        {"seed": FIRST + 2, "success_once": False, "success_at_end": False, "return": 6.0, "length": 60, "terminated": False},
    ]
    assert (document["steps"], document["iterations"], document["steps_per_s"]) == (10_000, 40, 1250.0)  # 10,000 / 8 s
    assert (document["wall_clock_s"], document["train_wall_clock_s"]) == (12.35, 8.0)
    assert (document["task"], document["sim"], document["seed"]) == ("FetchReachDense-v4", "fetch_reach", 1)
    assert document["command"] == summary.command
    assert document["peak_memory_gib"] == 0.5
    assert document["config"] == json.loads(json.dumps(summary.config.to_dict()))
    assert {"python", "torch", "numpy", "embodied_rl"} <= document["versions"].keys()
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["cpu"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", document["finished"])
    assert returned["success"] == document["success"]


def test_the_hash_is_of_what_determines_a_run(tmp_path: Path) -> None:
    base = config_hash(make_config(tmp_path))
    assert re.fullmatch("[0-9a-f]{64}", base)
    same = [
        make_config(tmp_path / "elsewhere"),
        make_config(tmp_path, logger={"names": ["console"]}),
        make_config(tmp_path, video={"size": 128}),
        make_config(tmp_path, resume="auto"),
    ]
    other = [
        make_config(tmp_path, seed=2),
        make_config(tmp_path, algorithm={"gamma": 0.98}),
        make_config(tmp_path, sim={"num_slots": 16}),
        make_config(tmp_path, evaluation={"seed": 5}),
    ]
    assert {config_hash(config) for config in same} == {base}
    assert len({base, *(config_hash(config) for config in other)}) == 5


def test_the_sentence_says_success_or_return(tmp_path: Path) -> None:
    low, high = (100 * end for end in score_interval(2, 3))
    told = f"Final evaluation, success on 3 held-out seeds: 66.7% (95% interval {low:.1f}–{high:.1f}%)"
    assert result_text(write_results(run_summary(tmp_path))) == told
    spec = dataclasses.replace(SPEC, reports_success=False)
    results = write_results(run_summary(tmp_path, spec=spec))
    assert result_text(results) == "Final evaluation, return on 3 held-out seeds: 3 (95% interval 1 to 6)"
    assert results["success"] is None


def commands_of(text: str) -> dict[str, list[str]]:
    """{what for: the words of the command} of the closing text."""
    lines = text.split("Next:\n")[1].splitlines()
    return {line[:26].strip(): shlex.split(line[26:]) for line in lines}


def test_the_closing_text_lists_what_exists_and_commands_that_can_be_run(tmp_path: Path) -> None:
    summary = run_summary(tmp_path)
    results = write_results(summary)
    bare = closing_text(summary, results, [])
    assert str(tmp_path / "results.json") in bare
    for absent in ("report.html", "curves.png", "checkpoints", "tensorboard --logdir", "video "):
        assert absent not in bare.split("Next:")[0], absent
    for name in ("report.html", "curves.png", "film.mp4"):
        (tmp_path / name).write_text("x")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
    full = closing_text(summary, results, [tmp_path / "film.mp4", tmp_path / "gone.gif"])
    places = {line.split()[0]: Path(line.split()[1]) for line in full.split("Next:")[0].splitlines() if line.startswith("  ")}
    assert places.keys() == {"checkpoint", "curves", "video", "report", "results"}
    assert all(path.exists() for path in places.values())
    assert "gone.gif" not in full
    assert "66.7%" in full
    assert "10,000 steps. Wall-clock since the command: trained after 0:08, evaluated after 0:12." in full
    filmed = closing_text(summary, write_results(summary, whole_wall_clock_s=41.2), [tmp_path / "film.mp4"])
    assert "evaluated after 0:12, films and report done after 0:41." in filmed
    commands = commands_of(full)
    assert commands.keys() == {"more held-out episodes", "more videos", "train on", "look at the curves"}
    assert evaluate.COMMAND.parse(commands["more held-out episodes"][3:])[0]["checkpoint"] == str(tmp_path)
    assert render.COMMAND.parse(commands["more videos"][3:])[0]["checkpoint"] == str(tmp_path)
    assert commands["look at the curves"] == ["tensorboard", "--logdir", str(tmp_path)]
    onward = load_train_config(commands["train on"][3:])
    assert onward.resume == str(tmp_path)
    assert onward.total_steps == 10_000 + summary.config.total_steps
    assert not any(word.startswith("policy.") for word in commands["train on"]), "the checkpoint holds the configuration"
    assert onward.stop_at_success is None, "a run that stopped at its goal would stop again at once"


@pytest.mark.parametrize(
    ("can_render", "target", "videos", "reason", "offered"),
    [
        (True, "gymnasium:make", True, "", True),
        (True, "gymnasium:make", False, "", True),  # not tried: video.enabled=no
        (True, "gymnasium:make", False, "no driver", False),
        (False, "gymnasium:make_vec", False, "", False),
        # State mode: the simulator is made without drawing while it trains, and with it to be filmed.
        (False, "embodied_rl.sim.robots.maniskill:make", False, "", True),
        (False, "embodied_rl.sim.robots.maniskill:make", True, "", True),
        (False, "embodied_rl.sim.robots.maniskill:make", False, "no Vulkan", False),
    ],
)
def test_more_videos_are_offered_where_there_can_be_any(
    tmp_path: Path, can_render: bool, target: str, videos: bool, reason: str, offered: bool
) -> None:
    spec = dataclasses.replace(SPEC, can_render=can_render)
    summary = run_summary(tmp_path, spec=spec, config=make_config(tmp_path, sim={"target": target}))
    made = [tmp_path / "film.mp4"] if videos else []
    text = closing_text(summary, write_results(summary), made, reason)
    assert ("more videos" in text) == ("embodied_rl.render" in text) == offered
    assert (f"no video    {reason}" in text) == bool(reason)


def test_a_real_run_ends_with_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train_shortly(
        tmp_path / "run", "sim=cartpole", "evaluation.num_episodes=5", "video.enabled=yes", "video.size=64", "logger.names=[jsonl,plot]"
    )
    text = capsys.readouterr().out
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    returns = [row["return"] for row in results["episodes"]]
    assert len(returns) == 5
    assert results["return_mean"] == pytest.approx(sum(returns) / 5)
    assert f"Final evaluation, return on 5 held-out seeds: {sum(returns) / 5:.4g}" in text
    assert results["steps"] == 256
    assert 0 < results["train_wall_clock_s"] < results["wall_clock_s"] < results["whole_wall_clock_s"] < 3600
    listed = [Path(line.split()[1]) for line in text.split("Next:")[0].splitlines() if line.startswith("  ")]
    assert {path.suffix for path in listed} == {"", ".png", ".mp4", ".gif", ".html", ".json"}
    assert all(path.exists() for path in listed)
    (movie,) = (run / "videos").glob("*.mp4")
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    embedded = dict(page.loads)
    assert base64.b64decode(embedded["video"].partition("base64,")[2]) == movie.read_bytes()
    assert "svg" in page.tags
    assert f"{results['return_mean']:.4g}" in page.text
    card = (run / "checkpoints" / "last" / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert f"| held-out return (5 seeds) | {results['return_mean']:.4g} " in card
    assert "more videos" in text


@pytest.mark.parametrize("enabled", ["auto", "yes"])
def test_a_task_that_cannot_be_filmed_is_trained_all_the_same(tmp_path: Path, enabled: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["sim=custom", "sim.target=tests.sim.toy:NoOpSim", "sim.max_episode_steps=8", f"video.enabled={enabled}"]
    if enabled == "yes":
        with pytest.raises(UserError, match="Task 'no-op' has no pictures"):
            train_shortly(tmp_path / "run", *overrides)
    else:
        train_shortly(tmp_path / "run", *overrides)
    text = capsys.readouterr().out
    assert "  no video    Task 'no-op' has no pictures" in text
    assert "more videos" not in text
    assert json.loads((tmp_path / "run/results.json").read_text(encoding="utf-8"))["length_mean"] == 8
    assert (tmp_path / "run/report.html").is_file()
    assert not (tmp_path / "run/videos").exists()
