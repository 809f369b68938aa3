"""MLflow's and trackio's own stores, read back; both are extras, and these tests skip where they are not installed."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from embodied_rl.config import LoggerConfig
from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.loggers import make_loggers

CONFIG = {"seed": 7, "sim": {"name": "toy", "kwargs": {}}}


def log_twice(run: Path, video: Path, kept: Path, name: str, options: dict[str, str]) -> None:
    """A run, and the same one resumed at step 50."""
    config = LoggerConfig(names=(name,), options={name: options})
    with make_loggers(config, run, CONFIG, 1000) as group:
        group.log(100, {"episode/return": 3.0, "episode/length": 6.0, "train/kl": math.nan})
        group.log_video(100, video)
        group.log_checkpoint(100, kept)
    with make_loggers(config, run, CONFIG, 1000, resume_step=50) as group:
        group.log(60, {"episode/return": 4.0, "episode/length": 6.0})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """(run, video, checkpoint)"""
    from PIL import Image

    video, kept = tmp_path / "push.gif", tmp_path / "step_000000100"
    Image.new("RGB", (32, 32)).save(video)
    kept.mkdir()
    (kept / "config.yaml").write_text("seed: 7\n", encoding="utf-8")
    return tmp_path / "run", video, kept


def test_mlflow_holds_metrics_parameters_video_and_checkpoint(files: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run, video, kept = files
    log_twice(run, video, kept, "mlflow", {"experiment": "arm"})
    client = mlflow.MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("arm").experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params == {"seed": "7", "sim.name": "toy", "sim.kwargs": "{}"}
    for name, values in (("episode/return", [3.0, 4.0]), ("rollout/ep_rew_mean", [3.0, 4.0]), ("episode/reward_per_step", [0.5, 4 / 6])):
        history = client.get_metric_history(found.info.run_id, name)
        assert {row.step: row.value for row in history} == pytest.approx({100: values[0], 60: values[1]}), name
    assert [one.path for one in client.list_artifacts(found.info.run_id, "model")] == ["model/config.yaml"]
    assert [one.path for one in client.list_artifacts(found.info.run_id, "videos")] == ["videos/push.gif"]


def test_trackio_holds_metrics_and_video(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    run, video, kept = files
    code = "import sys; from pathlib import Path; from tests.test_trackers import log_twice\n"
    code += "log_twice(*map(Path, sys.argv[1:4]), 'trackio', {'project': 'arm'})"
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", code, str(run), str(video), str(kept)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "store" / "arm.db") as store:
        rows = [(step, json.loads(text)) for step, text in store.execute("select step, metrics from metrics where run_name = 'run'")]
    assert sorted((step, row["rollout/ep_rew_mean"]) for step, row in rows if "episode/return" in row) == [(60, 4.0), (100, 3.0)]
    assert len(list((tmp_path / "store" / "media").rglob("*.gif"))) == 1


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_missing_tracker_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"Logger \'{name}\'.*embodied-rl\[{name}\]"):
        make_loggers(LoggerConfig(names=(name,)), tmp_path, {}, 10)
    with pytest.raises(UserError, match=rf"logger\.options\.{name}\.projekt is not an argument of"):
        make_loggers(LoggerConfig(names=(name,), options={name: {"projekt": "arm"}}), tmp_path, {}, 10)
