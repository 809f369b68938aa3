"""The command: recordings and checkpoints on disk in, tables, JSON and a page out; no simulator is loaded; mistakes are one line."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.commands.offline_eval import COMMAND, main, refusals, settings_of
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.evaluation.offline_study import ALL_ESTIMATORS
from embodied_rl.loggers.meanings import OFFLINE
from tests.offline_toys import CHOICES, VECTORS, info_of, play, save_policy, write
from tests.short_run import one_line_error

pytestmark = pytest.mark.usefixtures("forked")

QUICK = ("fqe.num_steps=150", "fqe.num_members=3", "fqe.hidden_sizes=[16]", "num_samples=200")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints (step 1 played the recording), and recordings of choices and of vectors with pictures."""
    folder = tmp_path_factory.mktemp("offline")
    for step, (bias, weight) in enumerate([(0.8, 0.0), (0.0, 0.5), (0.0, 2.0)]):
        path = save_policy(folder / "run", CHOICES, step, bias, weight=weight)
        if step == 1:
            write(folder / "recording", CHOICES, play(path, 100))
    path = save_policy(folder / "arm", VECTORS, 7, 0.1, weight=0.5)
    rng = np.random.default_rng(0)
    episodes = [
        dataclasses.replace(e, images={"front": rng.integers(0, 256, (e.num_steps + 1, 32, 48, 3), dtype=np.uint8)}) for e in play(path, 12)
    ]
    with RecordingWriter(folder / "filmed", info_of(VECTORS), video="png") as writer:
        for episode in episodes:
            writer.add(episode)
    return folder


class Page(HTMLParser):
    """Everything that a browser would fetch, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "data", "poster") and value]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def ranked(folder: Path) -> tuple[str, dict[str, object], str]:
    """What three checkpoints give: the command's output, its JSON and its page. gymnasium and every simulator are out of reach."""
    blocked = "('gymnasium', 'mujoco', 'sapien', 'mani_skill', 'metaworld', 'gymnasium_robotics')"
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked}:
            raise ImportError(name + ' is not installed')
sys.meta_path.insert(0, Refuse())
from embodied_rl.commands.offline_eval import main
main(sys.argv[1:])
assert not [name for name in sys.modules if name.startswith('embodied_rl.sim')], 'the simulators were loaded'
"""
    paths = ",".join(f"run/checkpoints/step_00000000{step}" for step in (0, 1, 2))
    arguments = ["recording=recording", f"checkpoint={paths}", "reward_range=0,1", *QUICK]
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    out = folder / "run" / "offline_eval"
    return (
        done.stdout,
        json.loads((out / "offline_eval.json").read_text(encoding="utf-8")),
        (out / "offline_eval.html").read_text(encoding="utf-8"),
    )


def test_several_checkpoints_are_ranked_without_a_simulator(ranked: tuple[str, dict, str]) -> None:
    printed, document, _ = ranked
    assert document["ranking"] == ["step 2", "step 1", "step 0"]
    assert document["ranked_by"] == "wdr"
    assert sum(document["best_share"].values()) == pytest.approx(1.0)
    assert document["num_episodes"] == 100
    assert document["recorded_policy"] == {"kind": "checkpoint", "sample": True}
    assert document["settings"]["given"]["horizon"] == 8
    by_label = {policy["label"]: policy for policy in document["policies"]}
    assert set(by_label["step 0"]["estimates"]) == set(ALL_ESTIMATORS)
    for label, policy in by_label.items():
        for name, estimate in policy["estimates"].items():
            assert estimate["value"] is not None, (label, name, estimate["refused"])
            assert (estimate["concentration"] is not None) == (name in ("is", "pdis"))
            assert f"{estimate['value']:.4g}" in printed
    # The checkpoint that played the recording: all weights are 1.
    own = by_label["step 1"]["estimates"]
    assert own["is"]["value"] == pytest.approx(document["behaviour"]["value"], rel=1e-4)
    assert own["is"]["weights"]["ess"] == pytest.approx(100, rel=1e-4)
    assert "Ranked by wdr" in printed
    assert "offline_eval.html" in printed


def test_the_page_stands_alone_and_says_what_the_json_says(ranked: tuple[str, dict, str]) -> None:
    _, document, text = ranked
    page = Page(text)
    assert all(source.startswith("#") or source == "data:," for source in page.sources)
    assert "iframe" not in page.tags
    charts = page.tags.count("figure")
    assert charts == 1 + 1 + 3 * 3, "the estimates, the weights, and the action of three episodes of each policy"
    assert page.tags.count("script") == charts - 1 + 1, "points for the charts with curves, and the script that the security policy names"
    assert "url(" not in text
    for policy in document["policies"]:
        for name, estimate in policy["estimates"].items():
            assert f"{estimate['value']:.4g}" in page.text, name
            assert f'title="{html.escape(OFFLINE[name])}"' in text, "every figure explains itself"
    assert "python -m embodied_rl.offline_eval" in page.text


def test_pictures_of_recorded_episodes_are_in_the_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import av

    main([f"recording={folder / 'filmed'}", f"checkpoint={folder / 'arm'}", f"output={tmp_path}", *QUICK])
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "offline_eval.json").read_text(encoding="utf-8"))
    page = Page((tmp_path / "offline_eval.html").read_text(encoding="utf-8"))
    videos = [source for source in page.sources if source.startswith("data:video/mp4;base64,")]
    assert len(videos) == 3, "the same episodes as in the plots"
    (tmp_path / "video.mp4").write_bytes(base64.b64decode(videos[0].partition(",")[2]))
    with av.open(str(tmp_path / "video.mp4")) as video:
        frames = sum(1 for _ in video.decode(video=0))
    assert frames >= 9, "a picture for every step, and the last one stays"
    loop = document["policies"][0]["open_loop"]
    assert f"{loop['mse']['mean']:.4g}" in printed
    assert "dimension 0" in printed
    assert loop["num_bins"] == 256
    main([f"recording={folder / 'filmed'}", f"checkpoint={folder / 'arm'}", f"output={tmp_path}", "max_episodes=1", "estimators=none"])
    source = (tmp_path / "offline_eval.html").read_text(encoding="utf-8")
    with open_recording(folder / "filmed") as filmed:
        lowest = int(np.argmin(filmed.seeds))
    assert source.count("<video") == 1
    assert f"<figcaption>episode {lowest}, seed" in source


def test_open_loop_alone_and_a_folder_that_is_never_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in ("", "_2"):
        main([f"recording={folder / 'filmed'}", f"checkpoint={folder / 'arm'}", "estimators=none"])
        assert (folder / "arm" / f"offline_eval{number}" / "offline_eval.json").is_file()
    document = json.loads((folder / "arm" / "offline_eval" / "offline_eval.json").read_text(encoding="utf-8"))
    assert document["behaviour"] is None
    assert document["policies"][0]["estimates"] == {}
    assert "concentration" not in capsys.readouterr().out


def test_refusals_are_printed_once_with_their_reason(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mode = write(
        tmp_path / "mode", CHOICES, play(folder / "run/checkpoints/step_000000001", 30, sample=False), kind="checkpoint", sample=False
    )
    two = ",".join(str(folder / f"run/checkpoints/step_00000000{step}") for step in (0, 2))
    main([f"recording={mode}", f"checkpoint={two}", f"output={tmp_path / 'out'}", *QUICK])
    printed = " ".join(capsys.readouterr().out.split())
    reason = "refused: deterministic behaviour: the recording says that the policy took its most likely actions"
    assert printed.count(reason) == 4, "for weights and for fitted values, for two policies"
    assert "The policies are not ranked" in printed
    document = json.loads((tmp_path / "out" / "offline_eval.json").read_text(encoding="utf-8"))
    assert document["ranked_by"] is None
    assert all(estimate["value"] is None for estimate in document["policies"][0]["estimates"].values())
    assert "refused" in (tmp_path / "out" / "offline_eval.html").read_text(encoding="utf-8")


MISTAKES = [
    (["recording=nowhere"], r"Recording 'nowhere' does not exist"),
    (["estimators=wis,fque"], r"'fque' is not a choice. Did you mean 'fqe'\?"),
    (["checkpoint={run},{run}"], r"are the same checkpoint"),
    (["checkpoint=,"], r"checkpoint= is empty"),
    (["checkpoint=nothing"], r"Checkpoint 'nothing' does not exist"),
    (["gamma=1.5"], r"gamma must be between 0 and 1, got 1.5"),
    (["confidence=95"], r"confidence must be between 0.5 and 0.999, got 95"),
    (["max_weight=0.5"], r"max_weight must be between 1 and 1,000,000,000, got 0.5"),
    (["reward_range=1"], r"reward_range=1 must be two numbers"),
    (["reward_range=1,0"], r"two finite numbers, the smaller one first"),
    (["reward_range=0,0.5"], r"reward_range=0,0.5 is wrong"),
    (["fqe.num_stepz=3"], r"'fqe.num_stepz' is not known. Did you mean 'num_steps'\?"),
    (["fqe.num_members=1"], r"fqe.num_members must be between 2 and 1,000,000, got 1"),
    (["fqe.num_steps=0"], r"fqe.num_steps must be between 1 and 1,000,000, got 0"),
    (["task=lime"], r"task 'lime'.*Did you mean 'line'\?"),
    (["target=best"], r"target=best is not a choice"),
    (["recordings=x"], r"Argument 'recordings' is not known. Did you mean 'recording'\?"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[" ".join(changes) for changes, _ in MISTAKES])
def test_mistakes_are_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], message: str) -> None:
    run = folder / "run" / "checkpoints" / "step_000000002"
    arguments = {"recording": f"{folder / 'recording'}", "checkpoint": str(run), "output": str(tmp_path), "estimators": "is"}
    words = [f"{key}={value}" for key, value in arguments.items() if not any(change.startswith(f"{key}=") for change in changes)]
    assert re.search(message, one_line_error(main, [*words, *(change.format(run=run) for change in changes)], capsys))
    assert not (tmp_path / "offline_eval.json").exists()


def test_a_checkpoint_of_other_spaces_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = one_line_error(main, [f"recording={folder / 'recording'}", f"checkpoint={folder / 'arm'}"], capsys)
    assert "was made for another simulator" in line


def test_settings_come_from_the_arguments() -> None:
    words = [
        "recording=a",
        "checkpoint=b",
        "estimators=wis,fqe,wis",
        "reward_range=-1,2.5",
        "gamma=0.9",
        "fqe.hidden_sizes=[8,4]",
        "seed=5",
    ]
    settings = settings_of(*COMMAND.parse(words))
    assert settings.estimators == ("wis", "fqe")
    assert settings.given.reward_range == (-1.0, 2.5)
    assert (settings.given.gamma, settings.given.seed, settings.fitted_q.seed) == (0.9, 5, 5)
    assert settings.fitted_q.hidden_sizes == (8, 4)
    assert settings_of(*COMMAND.parse(["recording=a", "checkpoint=b"])).estimators == ALL_ESTIMATORS
    assert settings_of(*COMMAND.parse(["recording=a", "checkpoint=b", "estimators=none"])).estimators == ()


def test_equal_reasons_are_told_together() -> None:
    from embodied_rl.episodes.assessment import Estimate

    told = refusals([Estimate("is", None, refused="why"), Estimate("fqe", 1.0, notes=("mind",)), Estimate("wis", None, refused="why")])
    assert told == ["is, wis: refused: why", "fqe: mind"]
