"""The page of real files, read by an HTML parser: what stands in it, and that nothing else is loaded."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.commands.report import expand_runs, main
from embodied_rl.errors import UserError
from embodied_rl.loggers.meanings import SUCCESS_ENDS
from embodied_rl.reports import load_run, write_report
from embodied_rl.reports import sections as page_sections
from embodied_rl.reports.page import asset
from embodied_rl.reports.sections import MAX_STRETCHES, OTHER, differences, group_series, grouped, marks_of, on_one_grid, timeline_of
from tests.report_page.pages import Page, metrics_rows, write_run
from tests.short_run import one_line_error


def page(path: Path) -> tuple[str, Page]:
    source = path.read_text(encoding="utf-8")
    return source, Page(source)


def test_one_run_is_one_file_with_everything_in_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", video=True)
    path = write_report([run])
    assert path == run / "report.html"
    source, parsed = page(path)
    loads = dict(parsed.loads)
    assert loads.keys() == {"video"}
    assert (
        base64.b64decode(loads["video"].removeprefix("data:video/mp4;base64,"), validate=True)
        == next(run.glob("videos/*.mp4")).read_bytes()
    )
    assert all(link.startswith(("#", "data:,")) for link in parsed.links)
    assert not {"iframe", "object", "embed", "base", "form"} & set(parsed.tags)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import", source)
    for shown in ("Toy-v0", "75.0%", "30.1–95.4%", "50.0%", "1.5", "12,000", "2 min 15 s", "2026-01-02 03:04:05 UTC", "ab" * 32):
        assert shown in parsed.text, shown
    for heading in ("Videos", "Curves", "Evaluation", "Timeline", "Configuration", "Provenance"):
        assert f'<a href="#{heading.lower()}">{heading}</a>' in source
    assert "Failures" not in parsed.text
    assert "Runs" not in parsed.text
    # Success and return with training and held-out curves, speed, and a loss; what was never finite has none.
    titles = re.findall(r"<figcaption>([^<]+)<", source)
    assert titles[1:6] == ["Success rate", "Return per episode", "Reward per step", "Steps of an episode", "Policy loss"]
    assert "Kl" not in titles
    # The speed is the same in all rows of this run: its value, folded away, and no curve.
    assert "Steps per second" not in titles
    assert re.search(r"1 figure that never changes\s*figure\s*value\s*speed/steps_per_s\s*100", parsed.text)
    assert 'mark-evaluation"' in source


def test_the_page_allows_its_own_script_alone(tmp_path: Path) -> None:
    source, _ = page(write_report([write_run(tmp_path / "run")]))
    digest = base64.b64encode(hashlib.sha256(asset("page.js").encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', source)
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert f"<script>{asset('page.js')}</script>" in source, "the hash is of what stands there, to the byte"


def test_what_files_say_stays_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    run = write_run(
        tmp_path / "run",
        command=hostile,
        task=hostile,
        versions={hostile: hostile},
        metrics=[{"step": 1, f"train/{hostile}": 1.0}],
        config={"sim": {"name": hostile}},
    )
    (run / "faults.jsonl").write_text(json.dumps({"step": 1, "kind": hostile, "detail": f"{hostile}\n{hostile}"}) + "\n")
    source, parsed = page(write_report([run]))
    assert parsed.tags.count("script") == source.count("<script") == 2, "the page's own, and one chart's data"
    assert "img" not in parsed.tags
    assert hostile in parsed.text


def test_a_large_video_is_a_link_that_moves_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", video=True)
    (run / "videos" / "a b.gif").write_bytes(b"GIF89a")
    movie = next(run.glob("videos/*.mp4"))
    monkeypatch.setattr(page_sections, "MAX_EMBEDDED_BYTES", movie.stat().st_size - 1)
    _, parsed = page(write_report([run]))
    assert dict(parsed.loads).keys() == {"img"}, "the GIF is small"
    assert f"videos/{movie.name}" in parsed.links
    _, elsewhere = page(write_report([run], tmp_path / "pages" / "all.html"))
    assert f"../run/videos/{movie.name}" in elsewhere.links
    monkeypatch.setattr(page_sections, "MAX_PAGE_BYTES", 3)
    _, tight = page(write_report([run]))
    assert tight.loads == []
    assert "videos/a%20b.gif" in tight.links


def test_a_gif_beside_its_mp4_is_not_shown_twice_and_half_files_of_a_killed_run_are_not_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", video=True)
    movie = next(run.glob("videos/*.mp4"))
    movie.with_suffix(".gif").write_bytes(b"GIF89a")
    (run / "failures").mkdir()
    for name in ("videos/.a.tmp-7.mp4", "videos/.a.tmp-7.gif", "failures/.a.tmp-7.npz"):
        (run / name).write_bytes(b"half")
    data = load_run(run)
    assert (data.videos, data.failures) == ([movie], [])


def test_an_unfinished_run_shows_what_there_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finished=False, config={"algorithm": {"name": "grpo"}})
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 13000, "episode/succ')  # the disk was full
    source, parsed = page(write_report([run]))
    assert "unfinished" in parsed.text
    assert "grpo · actor_critic · seed 1" in parsed.text
    assert "12,000" in parsed.text
    assert source.count("<figure") >= 5
    bare = tmp_path / "bare"
    (bare / "checkpoints" / "last").mkdir(parents=True)
    (bare / "checkpoints" / "last" / "config.yaml").write_text("seed: 3\nsim: {name: toy}\n")
    assert "seed 3" in page(write_report([bare]))[1].text


def test_failures_are_told_with_their_cause(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finished=False)
    traceback = 'Traceback (most recent call last):\n  File "sim.py", line 3\nZeroDivisionError: no mass'
    slots = [{"outcome": "restored"}, {"outcome": "aborted"}, {"outcome": "restored"}]
    fault = {"step": 4000, "kind": "TIMED_OUT", "worker": 1, "detail": traceback, "slots": slots, "recovery_s": 1.5}
    (run / "faults.jsonl").write_text(json.dumps(fault) + "\nhalf a li")
    (run / "failures").mkdir()
    context = {"step": 5000, "message": "The loss is NaN."}
    arrays = {"batch/reward": np.array([1.0, np.nan, np.inf]), "batch/done": np.array([True])}
    packed = np.frombuffer(json.dumps(context).encode(), np.uint8)
    np.savez(run / "failures" / "non_finite_step_000005000.npz", allow_pickle=False, context_json=packed, **arrays)
    (run / "failures" / "damaged.npz").write_bytes(b"PK")
    data = load_run(run)
    assert data.failures[1]["context"] == context
    assert data.failures[1]["arrays"] == [
        {"name": "batch/reward", "shape": [3], "not_finite": 2},
        {"name": "batch/done", "shape": [1], "not_finite": 0},
    ]
    assert "problem" in data.failures[0]
    _, parsed = page(write_report([run]))
    for shown in ("stopped at NaN", "1 simulator fault", "timed out", "2 restored, 1 aborted", "1.50 s", "ZeroDivisionError: no mass"):
        assert shown in parsed.text, shown
    for shown in (traceback, "The loss is NaN.", "batch/reward", "faults.jsonl, line 2 is not JSON"):
        assert shown in parsed.text, shown
    # 4,000 steps were reached after 40 s.
    assert ("fault", pytest.approx(40 / 60)) in [(kind, minute) for minute, kind, _ in marks_of(data)]


def test_a_pickle_or_a_bomb_in_a_dump_is_not_opened(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "failures").mkdir()
    np.savez(run / "failures" / "evil.npz", bad=np.array([{"a": 1}], dtype=object))
    np.savez_compressed(run / "failures" / "small.npz", bomb=np.zeros(1000))
    pickled, compressed = load_run(run).failures
    assert "allow_pickle=False" in pickled["problem"]
    assert "it is compressed, as no dump is" in compressed["problem"]


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "evaluation.json").write_text("{")
    (run / "comparison.json").write_text("[1]")
    (run / "evaluation_deep.json").write_text("[" * 100_000)
    rows = [{"step": 10**6, "time/act_s": value} for value in ({}, "x", float("nan"))]
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    (run / "results.json").write_text(json.dumps({**json.loads((run / "results.json").read_text()), "config": True}))
    _, parsed = page(write_report([run]))
    assert "metrics.jsonl has 'time/act_s' that is not a finite number" in parsed.text
    assert "results.json has no configuration" in parsed.text
    assert "evaluation.json cannot be read" in parsed.text
    assert "comparison.json is not a JSON object" in parsed.text
    assert "evaluation_deep.json cannot be read: it is nested too deeply" in parsed.text
    assert "75.0%" in parsed.text


def test_evaluations_comparisons_and_tasks_have_their_tables(tmp_path: Path) -> None:
    tasks = {"reach-v3": {"num_episodes": 2, "success": 1.0, "success_interval_95": [0.34, 1.0], "return_mean": 7.0, "length_mean": 9.0}}
    run = write_run(tmp_path / "run", tasks=tasks)
    one = {"label": "step 4096", "task": "Toy-v0", "num_episodes": 50, "success": 0.9, "success_interval_95": [0.79, 0.957]}
    success = {"difference": 0.3, "interval": [0.1, 0.5], "p_value": 0.0004}
    pair = {"policy": "step 4096", "against": "random", "num_pairs": 50, "success": success, "return_difference": 2.5}
    pair |= {"return_interval": [1.5, 3.5], "return_p_value": 0.0312}
    (run / "comparison.json").write_text(json.dumps({"evaluations": [one], "comparisons": [pair]}))
    _, parsed = page(write_report([run]))
    for shown in ("reach-v3", "34.0–100.0%", "step 4096", "79.0–95.7%", "+30.0 points", "+10.0 to +50.0", "< 0.001", "0.031", "+2.5"):
        assert shown in parsed.text, shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"success": "most"}, "results.json, success is not a finite number"),
        ({"success_interval_95": [0.3]}, "results.json, success_interval_95 is not a list of two finite numbers"),
        ({"return_mean": []}, "results.json, return_mean is not a finite number"),
        ({"return_mean_interval_95": ["a", None]}, "results.json, return_mean_interval_95 is not a list of two finite numbers"),
        ({"wall_clock_s": float("nan")}, "results.json, wall_clock_s is not a finite number"),
        ({"episodes": 3}, "results.json, episodes is not a list"),
        ({"episodes": [5, {"return": 1.0, "length": "x"}, {"return": 1.0}]}, "results.json, episodes, 1, length is not a finite number"),
        ({"tasks": {"reach-v3": [1]}}, "results.json, tasks, reach-v3 is not a JSON object"),
        ({"warm_start": {"before": {"success": 0.1}, "after": 1}}, "results.json, warm_start, after is not a JSON object"),
        ({"versions": "new"}, "results.json, versions is not a JSON object"),
        ({"steps_per_s": 10**400}, "results.json, steps_per_s is not a finite number"),
        ({"command": "half \ud800", "config": {"note": "half \ud800"}}, "half ?"),
    ],
)
def test_a_damaged_figure_is_left_out_and_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    run = write_run(tmp_path / "run", **changes)
    pair = {"success": {"difference": "x", "interval": [0, 1]}, "return_difference": {}, "return_interval": 3}
    faults = [{"slots": 5}, {"slots": [1, {"outcome": "restored"}]}, {"step": 10**400, "recovery_s": "long", "detail": "half \ud800"}]
    (run / "faults.jsonl").write_text("".join(json.dumps(fault) + "\n" for fault in faults))
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 10**400, "train/kl": 1.0}) + "\n")
    played = [{"success_interval_95": 5, "task": {"name": "Toy-v0"}}, 1]
    (run / "comparison.json").write_text(json.dumps({"evaluations": played, "comparisons": [pair, "none"]}))
    text = page(write_report([run, run]))[1].text + page(write_report([run]))[1].text
    said = [f"comparison.json, {where}" for where in ("evaluations, 1 is", "comparisons, 0, success, difference is")]
    said += [
        "faults.jsonl, 0, slots is not a list",
        "faults.jsonl, 1, slots, 0 is not a JSON object",
        "faults.jsonl, 2, step is not",
        "1 restored",
    ]
    for shown in (message, *said):
        assert shown in text, shown
    assert "12,000" in text, "the other figures are there"


def test_every_chart_and_tile_has_its_sentence(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config={"sim": {"name": "toy", "task": "Toy-v0", "success_ends_episode": True}})
    source, parsed = page(write_report([run]))
    for block in re.findall(r"<figcaption>.*?</figcaption>", source):
        assert re.search(r'class="hint" tabindex="0" role="note" aria-label="[A-Z][^"]+\."', block), block
    for block in re.findall(r'<div class="label">.*?</div>', source):
        assert 'aria-label="' in block, block
    # Return over steps of the episodes: 1.5 in 25 steps.
    assert "0.06return over steps" in parsed.text
    assert load_run(run).curve("episode/reward_per_step")[1] == pytest.approx([n / (20 - n) for n in range(1, 13)])
    assert parsed.text.count(SUCCESS_ENDS) == 1
    assert "interim evaluation" in parsed.text
    assert "play different held-out seeds" in parsed.text
    plain = page(write_report([write_run(tmp_path / "other")]))[1]
    assert SUCCESS_ENDS not in plain.text, "there success ends nothing"


def test_a_warm_start_shows_before_and_after_cloning(tmp_path: Path) -> None:
    before = {"num_episodes": 300, "success": 0.02, "success_interval_95": [0.01, 0.043], "return_mean": -1.2, "length_mean": 57.0}
    after = {**before, "success": 0.62, "success_interval_95": [0.564, 0.673], "return_mean": 1.1, "length_mean": 31.0}
    run = write_run(tmp_path / "run", warm_start={"before": before, "after": after, "loss": 0.5, "wall_clock_s": 60.0})
    parsed = page(write_report([run]))[1]
    for shown in ("Before and after cloning", "2.0%", "62.0%", "56.4–67.3%", "after cloning", "after reinforcement learning"):
        assert shown in parsed.text, shown
    speaking = write_run(tmp_path / "speaking", warm_start={"success_before": 0.1, "success_after": 0.4})
    assert load_run(speaking).warm_start == {"before": {"success": 0.1}, "after": {"success": 0.4}}
    assert "before: 10.0%" in page(write_report([speaking]))[1].text


def test_dialogues_are_linked_from_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "videos").mkdir()
    for name in ("dialogues.html", "videos/Lake_step1_dialogues.html"):
        (run / name).write_text("<p>")
    _, parsed = page(write_report([run]))
    assert [link for link in parsed.links if link.endswith("html")] == ["dialogues.html", "videos/Lake_step1_dialogues.html"]
    assert "the last training episodes, failures first" in parsed.text
    _, elsewhere = page(write_report([run], tmp_path / "pages" / "all.html"))
    assert "../run/dialogues.html" in elsewhere.links


# ---- several runs ---------------------------------------------------------------------------------------------------


def test_seeds_of_one_configuration_become_their_mean_and_range(tmp_path: Path) -> None:
    first = write_run(tmp_path / "seed1", seed=1, metrics=metrics_rows(10))
    second = write_run(tmp_path / "seed2", seed=2, metrics=metrics_rows(6, offset=0.2))
    (group,) = grouped([load_run(first), load_run(second)])
    *thin, mean = group_series(group, "episode/return", "Return", 0)
    assert [series.kind for series in thin] == ["thin", "thin"]
    # Where both have data: 1,000 to 6,000 steps; the second is 0.2 above the first, whose value is the number of thousands.
    assert list(mean.x) == [1000.0 * n for n in range(1, 7)]
    assert mean.y == pytest.approx([n + 0.1 for n in range(1, 7)])
    assert mean.band is not None
    assert mean.band[0] == pytest.approx(list(range(1, 7)))
    assert mean.band[1] == pytest.approx([n + 0.2 for n in range(1, 7)])
    path = write_report([first, second])
    assert path == tmp_path / "report.html"
    source, parsed = page(path)
    for shown in ("Toy-v0: 2 runs", "mean success", "2 seeds", "seed1", "seed2", "Line: mean over seeds"):
        assert shown in parsed.text, shown
    assert 'class="band' in source


def test_different_configurations_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    runs = [
        load_run(write_run(tmp_path / f"{gamma}-{seed}", seed=seed, config={"algorithm": {"name": "ppo", "gamma": gamma}}))
        for gamma in (0.9, 0.99)
        for seed in (1, 2)
    ]
    groups = grouped(runs)
    assert [(group.label, len(group.runs)) for group in groups] == [("gamma=0.9", 2), ("gamma=0.99", 2)]
    assert differences(runs) == ["algorithm.gamma", "seed"]
    source, parsed = page(write_report([run.path for run in runs]))
    assert "gamma=0.9: mean success" in parsed.text
    assert "gamma=0.99 training" in source
    assert "algorithm.gamma" in parsed.text


def test_curves_that_never_meet_have_no_mean() -> None:
    steps, rows = on_one_grid([([1.0, 2.0], [1.0, 2.0]), ([3.0, 4.0], [1.0, 2.0])])
    assert (steps.size, rows.shape) == (0, (2, 0))
    # Between points on straight lines: at 2 the first is 2, the second half way from 0 to 4.
    steps, rows = on_one_grid([([1.0, 2.0, 3.0], [1.0, 2.0, 5.0]), ([1.0, 3.0], [0.0, 4.0])])
    assert steps.tolist() == [1.0, 2.0, 3.0]
    assert rows.tolist() == [[1.0, 2.0, 5.0], [0.0, 2.0, 4.0]]


# ---- timeline -------------------------------------------------------------------------------------------------------


def test_time_is_shared_out_and_what_is_left_is_told() -> None:
    timeline = timeline_of(metrics_rows(4))
    assert timeline is not None
    assert timeline.edges_s.tolist() == [0.0, 10.0, 20.0, 30.0, 40.0]
    # Of every 10 s: 5 simulate, 1 acts, 2.5 update, and 1.5 are spent elsewhere.
    assert {name: values.tolist() for name, values in timeline.phases.items()} == {
        "simulate": [5.0] * 4,
        "act": [1.0] * 4,
        "update": [2.5] * 4,
        OTHER: [1.5] * 4,
    }


def test_a_long_run_is_cut_into_few_stretches_that_lose_nothing() -> None:
    timeline = timeline_of(metrics_rows(1000))
    assert timeline is not None
    assert len(timeline.edges_s) == MAX_STRETCHES + 1
    assert (timeline.edges_s[0], timeline.edges_s[-1]) == (0.0, 10_000.0)
    sums = {name: values.sum() for name, values in timeline.phases.items()}
    assert sums == pytest.approx({"simulate": 5000.0, "act": 1000.0, "update": 2500.0, OTHER: 1500.0})
    together = np.sum(list(timeline.phases.values()), axis=0)
    np.testing.assert_allclose(together, np.diff(timeline.edges_s))


def test_phases_that_claim_more_time_than_passed_are_scaled() -> None:
    row = {"step": 1, "speed/wall_clock_s": 4.0, "time/simulate_s": 6.0, "time/act_s": 2.0}
    timeline = timeline_of([row])
    assert timeline is not None
    assert {name: values.tolist() for name, values in timeline.phases.items()} == {"simulate": [3.0], "act": [1.0], OTHER: [0.0]}
    assert timeline_of([{"step": 1, "speed/wall_clock_s": 4.0}]) is None
    assert timeline_of([]) is None


# ---- command line ---------------------------------------------------------------------------------------------------


def test_runs_are_named_in_any_way(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / "notes").mkdir()
    write_run(tmp_path / "lr=3e-4")
    expected = [Path("runs/a"), Path("runs/b")]
    assert expand_runs(["runs/a", "runs/b"]) == expand_runs(["runs/a,runs/b"]) == expand_runs(["runs/*"]) == expected
    assert expand_runs(["runs/a", "runs/*"]) == expected
    for arguments, written in (
        (["runs/a"], "runs/a/report.html"),
        (["run=runs/b"], "runs/b/report.html"),
        (["runs/a", "runs/b"], str(tmp_path / "runs/report.html")),
        (["run=runs/*", "output=pages/both.html"], "pages/both.html"),
        (["lr=3e-4", "run=runs/a", "run=runs/b", "output=pages/three.html"], "pages/three.html"),
    ):
        main(arguments)
        assert capsys.readouterr().out == f"{written}\n"
        assert Path(written).is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Argument run=… is missing"),
        (["run=runs/aa"], "Run 'runs/aa' does not exist. Did you mean 'a'?"),
        (["runs/x*"], "No run matches 'runs/x*'"),
        (["runs"], "'runs' is not the folder of a run: it has no results.json, metrics.jsonl or checkpoint"),
        (["runs/a", "outptu=x.html"], "Argument 'outptu' is not known. Did you mean 'output'?"),
        (["runs/a", "output=runs/a/results.json/page.html"], "annot write 'runs/a/results.json/page.html'"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a")
    assert message in one_line_error(main, arguments, capsys)


def test_a_report_is_of_a_sane_number_of_runs() -> None:
    with pytest.raises(UserError, match="needs 1 to 64 runs, got 0"):
        write_report([])
