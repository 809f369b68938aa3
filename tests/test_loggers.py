"""Loggers are read back by somebody else: json, TensorBoard's and W&B's own readers, PIL, a real terminal."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from embodied_rl.config import LoggerConfig
from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.loggers import make_loggers
from embodied_rl.loggers.base import LoggerGroup
from embodied_rl.loggers.console import ConsoleLogger, metrics_table, time_shares
from embodied_rl.loggers.jsonl import JsonlLogger, PlotLogger, choose_panels, draw_curves, read_metrics
from embodied_rl.loggers.meanings import FIGURES, MEANINGS, Meaning, derived, explain_text, meaning_of, with_aliases
from embodied_rl.loggers.trackers import TensorBoardLogger
from embodied_rl.progress import _Display, _Phase, clock_text, progress_bar
from embodied_rl.video import write_gif, write_mp4

METRICS = {
    "episode/success": 0.25,
    "episode/return": 3.5,
    "speed/steps_per_s": 1234.5,
    "time/simulate_s": 3.0,
    "time/act_s": 1.0,
    "train/policy_loss": -0.0125,
    "train/value_loss": 0.5,
}


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_is_on_disk_after_every_line_and_never_holds_nan(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    logger.log(128, {"episode/success": 0.5, "train/kl": math.nan, "train/ratio": math.inf})
    # Strict JSON: a bare NaN or Infinity would raise here.
    (row,) = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row.pop("time_unix_s") > 1e9
    assert row == {"step": 128, "episode/success": 0.5, "train/kl": None, "train/ratio": None}
    logger.log(256, {})
    assert [row["step"] for row in read_metrics(tmp_path)] == [128, 256]
    logger.close()


def test_resuming_drops_what_came_after_the_checkpoint_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 100, "a": 1}\n{"step": 200, "a": 2}\n{"step": 300, "a": 3}\n{"step": 40')
    logger = JsonlLogger(tmp_path, resume_step=200)
    logger.log(300, {"a": 33.0})
    logger.close()
    assert [(row["step"], row["a"]) for row in rows(path)] == [(100, 1), (200, 2), (300, 33.0)]


def test_a_new_run_in_an_old_folder_keeps_the_old_numbers(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        logger = JsonlLogger(tmp_path)
        logger.log(1, {"a": value})
        logger.close()
    found = {path.name: [row["a"] for row in rows(path)] for path in tmp_path.iterdir()}
    assert found == {"metrics_2.jsonl": [1.0], "metrics_3.jsonl": [2.0], "metrics.jsonl": [3.0]}


def test_tensorboard_reads_the_scalars_and_forgets_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LoggerConfig(names=("tensorboard",))
    with make_loggers(config, tmp_path, {}, 1000) as group:
        for step in (100, 200, 300):
            group.log(step, {"episode/return": step / 8, "train/kl": math.nan})
    with make_loggers(config, tmp_path, {}, 1000, resume_step=200) as group:
        group.log(300, {"episode/return": -1.5})
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("episode/return")] == [(100, 12.5), (200, 25.0), (300, -1.5)]
    assert math.isnan(reader.Scalars("train/kl")[0].value)


LOG_AND_DIE = """
import os, signal, sys
from pathlib import Path
from embodied_rl.loggers.trackers import TensorBoardLogger
logger = TensorBoardLogger(Path(sys.argv[1]))
for step in range(100, 2100, 100):
    logger.log(step, {"a": float(step)})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_tensorboard_holds_what_was_logged_when_the_process_is_killed(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    died = subprocess.run([sys.executable, "-c", LOG_AND_DIE, str(tmp_path)], capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    logger = TensorBoardLogger(tmp_path, resume_step=2000)
    logger.log(2100, {"a": 2100.0})
    logger.close()
    reader = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    assert [event.step for event in reader.Scalars("a")] == list(range(100, 2200, 100))


def test_tensorboard_reads_runs_of_one_second_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Event files are read in the order of their names, which hold the second and then the process's number."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for number, resume_step in ((999, None), (1000, 100), (998, 200), (1, 300)):
        monkeypatch.setattr(os, "getpid", lambda number=number: number)
        logger = TensorBoardLogger(tmp_path, resume_step)
        for step in ((resume_step or 0) + 100, (resume_step or 0) + 200):
            logger.log(step, {"a": float(number)})
        logger.close()
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("a")] == [(100, 999), (200, 1000), (300, 998), (400, 1), (500, 1)]


def moving_square(num_frames: int) -> list[np.ndarray]:
    frames = [np.full((48, 64, 3), (20, 40, 120), np.uint8) for _ in range(num_frames)]
    for index, frame in enumerate(frames):
        frame[16:32, 3 * index : 3 * index + 16] = (230, 210, 40)
    return frames


@pytest.mark.parametrize("beside", [True, False])
def test_tensorboard_shows_a_video_as_a_gif_that_plays(tmp_path: Path, beside: bool) -> None:
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    frames = moving_square(12)
    movie = write_mp4(tmp_path / "videos" / "push.mp4", frames, fps=10)
    if beside:
        write_gif(tmp_path / "videos" / "push.gif", frames, fps=10)
    with make_loggers(LoggerConfig(names=("tensorboard",)), tmp_path, {}, 1000) as group:
        group.log_video(300, movie)
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    (event,) = reader.Images("video")
    assert (event.step, event.width, event.height) == (300, 64, 48)
    with Image.open(io.BytesIO(event.encoded_image_string)) as image:
        assert (image.format, image.size) == ("GIF", (64, 48))
        assert getattr(image, "n_frames", 1) == 12
        for index, frame in enumerate(frames):
            image.seek(index)
            shown = np.asarray(image.convert("RGB")).astype(int)
            assert abs(shown - frame).mean() < 12, "another picture, or another order"
            assert image.info["duration"] == 100
    if beside:
        assert event.encoded_image_string == (tmp_path / "videos" / "push.gif").read_bytes()


@pytest.mark.parametrize("name", ["push.mp4", "push.gif"])
def test_a_video_that_is_none_is_one_line(tmp_path: Path, name: str) -> None:
    for content in (b"GIF89a", b"not a film"):
        (tmp_path / name).write_bytes(content)
        with (
            make_loggers(LoggerConfig(names=("tensorboard",)), tmp_path, {}, 1000) as group,
            pytest.raises(UserError, match=rf"{name}' is not a video that can be read"),
        ):
            group.log_video(300, tmp_path / name)


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a W&B file: LevelDB's log format, 32 KiB blocks of (crc32, length, kind) and data, after a header of 7 bytes."""
    position, record = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        length, kind = struct.unpack_from("<xxxxHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_offline_keeps_metrics_and_video(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    video = tmp_path / "push.gif"
    from PIL import Image

    Image.new("RGB", (32, 32)).save(video)
    kept = tmp_path / "step_000000100"
    kept.mkdir()
    (kept / "config.yaml").write_text("seed: 7\n")
    program = (
        "import sys; from pathlib import Path; from embodied_rl.config import LoggerConfig; from embodied_rl.loggers import make_loggers\n"
        "run = Path(sys.argv[1])\n"
        "with make_loggers(LoggerConfig(names=('wandb',), wandb_project='arm'), run, {'seed': 7}, 1000) as group:\n"
        "    group.log(100, {'episode/success': 0.5}); group.log_video(100, Path(sys.argv[2]))\n"
        "    group.log_checkpoint(100, Path(sys.argv[3]))\n"
        "with make_loggers(LoggerConfig(names=('wandb',), wandb_project='arm'), run, {'seed': 7}, 1000, resume_step=50) as group:\n"
        "    group.log(60, {'episode/success': 0.75})\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "run"), str(video), str(kept)], check=True, timeout=280, env=environment)
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.stem for file in files}) == 1, "a resumed run continues the same W&B run"
    history: list[dict[str, Any]] = []
    project = set()
    artefacts: list[tuple[str, list[str], list[str]]] = []
    for file in sorted(files, key=lambda file: file.stat().st_mtime):
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                project.add(record.run.project)
            if record.HasField("artifact"):
                artefacts.append(
                    (record.artifact.type, sorted(record.artifact.aliases), [e.path for e in record.artifact.manifest.contents])
                )
            if record.HasField("history"):
                history.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    assert project == {"arm"}
    assert [(row["step"], row["episode/success"]) for row in history if "episode/success" in row] == [(100, 0.5), (60, 0.75)]
    assert [row["rollout/success_rate"] for row in history if "episode/success" in row] == [0.5, 0.75], "under the field's name too"
    assert [row["step"] for row in history if "video" in row] == [100]
    assert artefacts == [("model", ["latest", "step-100"], ["config.yaml"])]
    assert len(list(files[0].parent.parent.rglob("media/videos/*.gif"))) == 1


def test_a_missing_wandb_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is Python's own way to make an import fail as if the package were absent.
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r'pip install "embodied-rl\[wandb\]"'):
        make_loggers(LoggerConfig(names=("jsonl", "wandb")), tmp_path, {}, 1000)


def test_curves_are_drawn_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    from PIL import Image

    clock = Clock()
    logger = PlotLogger(tmp_path, interval_s=60.0, clock=clock)
    path = tmp_path / "curves.png"
    logger.log(100, METRICS)
    clock.now_s += 59
    logger.log(200, METRICS)
    assert not path.exists()
    clock.now_s += 1
    logger.log(300, METRICS)
    first = path.read_bytes()
    with Image.open(io.BytesIO(first)) as image:
        image.load()
        assert image.width > 1000
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=2**24) or []}
        # matplotlib's first colour: a curve is really drawn.
        assert (31, 119, 180) in colours
    clock.now_s += 10
    logger.log(400, {**METRICS, "episode/success": 0.9})
    assert path.read_bytes() == first
    logger.close()
    assert path.read_bytes() != first


def test_a_resumed_plot_continues_the_curve_of_the_metrics_file(tmp_path: Path) -> None:
    config = LoggerConfig(names=("plot", "jsonl"))
    with make_loggers(config, tmp_path, {}, 1000) as group:
        for step in (100, 200, 300):
            group.log(step, {"episode/success": step / 1000})
    group = make_loggers(config, tmp_path, {}, 1000, resume_step=200)
    group.log(250, {"episode/success": 0.5})
    (plot,) = [logger for logger in group.loggers if isinstance(logger, PlotLogger)]
    assert dict(plot._curves) == {"episode/success": ([100, 200, 250], [0.1, 0.2, 0.5])}
    group.close()


def test_the_curves_of_a_long_run_take_no_more_memory(tmp_path: Path) -> None:
    plot = PlotLogger(tmp_path)
    for step in range(20_000):
        plot.log(step, {"episode/success": step / 1e6, **({"eval/success": 0.5} if step % 10_000 == 0 else {})})
    assert plot._curves["episode/success"][0] == list(range(0, 20_000, 8))
    assert plot._curves["eval/success"] == ([0, 10_000], [0.5, 0.5])


def test_panels_put_training_and_held_out_together_and_losses_last() -> None:
    names = [
        "train/entropy",
        "train/value_loss",
        "train/policy_loss",
        "eval/success",
        "episode/success",
        "time/act_s",
        "train/learning_rate",
    ]
    assert choose_panels(names) == [
        ("Success rate", ["episode/success", "eval/success"]),
        ("Policy loss", ["train/policy_loss"]),
        ("Value loss", ["train/value_loss"]),
        ("Entropy", ["train/entropy"]),
    ]


def test_a_plot_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write .*curves\.png"):
        draw_curves({"episode/return": ([1], [2.0])}, tmp_path / "file" / "curves.png")


def test_without_a_terminal_the_console_writes_a_sober_line_every_ten_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    logger = ConsoleLogger(2000, stream=stream, clock=clock)
    for step in range(100, 1001, 100):
        clock.now_s += 3.0
        logger.log(step, METRICS)
    logger.message("saved [step 1000]")
    logger.close()
    lines = stream.getvalue().splitlines()
    # At 3 s the first, then 10 s later at the earliest (15 s, 27 s), and what was still pending at the end.
    assert [line.split(" · ")[0] for line in lines] == [
        "step 100/2,000 (5%)",
        "step 500/2,000 (25%)",
        "step 900/2,000 (45%)",
        "saved [step 1000]",
        "step 1,000/2,000 (50%)",
    ]
    assert "success 25.0% · return 3.5 · steps/s 1,234" in lines[0]
    assert "time simulate 75% act 25%" in lines[0]
    assert "policy_loss -0.0125 · value_loss 0.5" in lines[0]
    # 400 steps took 12 s after the first iteration, whose time is that of compiling; 1500 more take 45 s.
    assert lines[1].endswith("elapsed 0:15 · 0:45 left")
    assert "\x1b" not in stream.getvalue()


def test_a_line_that_was_kept_back_tells_the_time_of_its_step() -> None:
    clock, stream = Clock(), io.StringIO()
    logger = ConsoleLogger(300, stream=stream, clock=clock)
    for step in (100, 200):
        clock.now_s += 3.0
        logger.log(step, METRICS)
    clock.now_s += 60.0  # evaluated and filmed meanwhile
    logger.close()
    assert stream.getvalue().splitlines()[1].endswith("elapsed 0:06 · training has ended")


def test_time_left_of_a_resumed_run_counts_its_own_steps_only() -> None:
    clock = Clock()
    logger = ConsoleLogger(10_000, resume_step=8_000, stream=io.StringIO(), clock=clock)
    assert logger.seconds_left() is None
    clock.now_s += 10
    logger.log(8_500, {})
    # 500 steps in 10 s; 1500 to go: 30 s. Counting from zero it would say 1.8 s.
    assert logger.seconds_left() == pytest.approx(30.0)


def test_time_left_knows_what_comes_after_the_steps_and_what_ends_them_earlier() -> None:
    clock, speed = Clock(), {"speed/steps_per_s": 100.0, "episode/length": 50.0}
    run_config = {"max_minutes": 2, "stop_at_success": 0.9, "evaluation": {"num_episodes": 40}}
    logger = ConsoleLogger(10_000, run_config, stream=(stream := io.StringIO()), clock=clock)
    clock.now_s += 30  # the first iteration compiles kernels
    logger.log(1_000, speed)
    clock.now_s += 10
    logger.log(2_000, speed)
    # 8,000 steps at 100 a second, 40 · 50 steps of the final evaluation at 100 a second; 120 s after the command everything is over.
    assert logger.seconds_left() == pytest.approx(min(80 + 20, 120 - 40))
    assert " · ≤ " in stream.getvalue()
    longer = ConsoleLogger(10_000, {"evaluation": {"num_episodes": 40}}, stream=io.StringIO(), clock=clock)
    clock.now_s += 10
    longer.log(1_000, speed)
    assert longer.seconds_left() == pytest.approx(90 + 20)


def test_phases_without_a_terminal_are_a_line_every_interval(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied_rl.progress.LINE_INTERVAL_S", 0.2)
    with progress_bar("starting"), progress_bar("cloning", 4) as advance:
        advance(1, "loss 0.5")
        said, until = "", time.monotonic() + 60
        while said.count("1/4") < 2 and time.monotonic() < until:
            time.sleep(0.1)
            said += capsys.readouterr().err
    with progress_bar("hidden", shown=False):
        time.sleep(0.6)
    lines = [line for line in said.splitlines() if "1/4" in line]
    assert len(lines) >= 2
    for line in lines:
        assert re.fullmatch(r"cloning 1/4 · loss 0\.5 · elapsed \d+:\d\d · left (?!0:00)\d+:\d\d", line), line
    assert "hidden" not in capsys.readouterr().err


def test_a_phase_that_ends_as_its_line_is_due_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    class Ending(list[_Phase]):
        def __bool__(self) -> bool:
            found = len(self) > 0
            self.clear()  # by the main thread, which runs now
            return found

    class Once(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            was_set = self.is_set()
            self.set()
            return was_set

    display = _Display()
    display.phases = Ending([_Phase("starting", None)])
    display._speak(Once())
    assert "starting" in capsys.readouterr().err


def test_on_a_terminal_phases_stand_below_the_table_and_leave_nothing() -> None:
    code = "import sys; from embodied_rl.loggers.console import ConsoleLogger; from embodied_rl.progress import progress_bar\n"
    code += "with progress_bar('starting simulators'): pass\nlogger = ConsoleLogger(100, {'sim': {'task': 'Push'}})\n"
    code += "logger.log(50, {'episode/return': 2.5})\n"
    code += "with progress_bar('final evaluation', 8) as advance: advance(3); logger.log(60, {})\nlogger.close(); print('over')"
    reading, writing = os.openpty()
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=writing, check=False, env={**os.environ, "COLUMNS": "120"})
    os.close(writing)
    raw = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(reading, 65536):
            raw += part
    os.close(reading)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw.decode())
    assert done.returncode == 0, shown
    assert "starting simulators" in shown
    assert re.search(r"return\s+2\.5[\s\S]*final evaluation.*3/8", shown)
    assert shown.rstrip().endswith("over")
    assert "final evaluation" not in shown.rpartition("60/100 steps")[2], "the last picture is the run's own"


def test_on_a_terminal_there_is_a_bar_and_a_grouped_table() -> None:
    reading, writing = os.openpty()
    os.set_blocking(reading, False)
    with os.fdopen(writing, "w") as stream:
        assert stream.isatty()
        logger = ConsoleLogger(1000, {"sim": {"task": "PushCube-v1"}}, stream=stream)
        logger.log(500, METRICS)
        logger.log(750, {"eval/success": 0.5})
        logger.close()
        stream.flush()
        raw = b""
        while True:
            try:
                raw += os.read(reading, 65536)
            except BlockingIOError:
                break
    os.close(reading)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw.decode()).rpartition("PushCube-v1")[2]
    assert "750/1,000 steps" in last
    assert "75%" in last
    for part in ("Episodes", "Time", "Training", "success", "25.0%", "interim success", "50.0%", "3.00 s (75%)", "policy loss"):
        assert part in last, part
    assert "\x1b[?25h" in raw.decode(), "the cursor comes back"


def test_shares_of_time_sum_to_one_and_clocks_read_well() -> None:
    assert time_shares({"time/simulate_s": 1.0, "time/act_s": 3.0, "speed/steps_per_s": 7.0, "time/wall_clock_s": 99.0}) == {
        "simulate": 0.25,
        "act": 0.75,
    }
    assert time_shares({"time/simulate_s": 0.0}) == {}
    assert [clock_text(value) for value in (None, 0.4, 59.6, 3723.0)] == ["-:--", "0:00", "1:00", "1:02:03"]


def test_a_group_closes_every_logger_though_one_fails(tmp_path: Path) -> None:
    class Failing(JsonlLogger):
        def close(self) -> None:
            super().close()
            raise OSError("disk full")

    first, second = Failing(tmp_path / "a"), JsonlLogger(tmp_path / "b")
    group = LoggerGroup([first, second])
    with pytest.raises(OSError, match="disk full"):
        group.close()
    assert second._file.closed
    group.close()


def test_making_the_usual_loggers_imports_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from embodied_rl.config import LoggerConfig; from embodied_rl.loggers import make_loggers\n"
        "make_loggers(LoggerConfig(), Path(sys.argv[1]), {}, 10).log(1, {'a/b': 1.0})\n"
        "print(sorted({'torch', 'matplotlib', 'wandb'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=280, capture_output=True, text=True).stdout
    assert output.splitlines()[-1] == "[]"


def test_every_metric_of_a_run_has_its_sentence() -> None:
    for name, meaning in MEANINGS.items():
        assert meaning.text.endswith("."), name
        assert meaning_of(name).text == meaning.text
    assert meaning_of("train/robot/entropy").text == MEANINGS["train/entropy"].text, "of one of several domains"
    assert meaning_of("groups/lake/consumed").text == MEANINGS["groups/consumed"].text
    assert (meaning_of("train/my_loss").label, meaning_of("train/my_loss").text) == ("my loss", "")
    assert meaning_of("eval/success").label == "interim success"
    assert all(len(line) <= 80 for line in explain_text(80).splitlines())
    for meaning in (*MEANINGS.values(), *map(Meaning, FIGURES, FIGURES.values())):
        assert " ".join(meaning.text.split()) in " ".join(explain_text(80).split()) or not meaning.label, meaning


def test_reward_per_step_is_the_rewards_of_the_episodes_over_their_steps() -> None:
    # Two episodes: 3 in 10 steps and 9 in 20; the mean of their ratios, 0.375, would weigh the short one more.
    shown = derived({"episode/success": 1.0, "episode/return": 6.0, "episode/length": 15.0})
    assert list(shown) == ["episode/success", "episode/return", "episode/reward_per_step", "episode/length"]
    assert shown["episode/reward_per_step"] == pytest.approx(12 / 30)
    assert derived({"episode/return": 6.0}) == {"episode/return": 6.0}


def test_a_narrow_terminal_has_a_table_that_fits() -> None:
    metrics = {
        **METRICS,
        "episode/length": 17.02,
        "train/explained_variance": 0.8626,
        "train/learning_rate": 0.0003,
        "speed/wall_clock_s": 119.0,
    }
    for width in (80, 120):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(metrics_table(metrics, width))
        lines = console.export_text().splitlines()
        assert max(map(len, lines)) <= width
        assert "…" not in "".join(lines)
        assert any("reward per step" in line for line in lines)
    with_three = [line for line in lines if line.count("│") == 4]
    assert with_three, "where there is room, three groups stand side by side"


def test_the_names_of_the_field_are_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    for name, meaning in MEANINGS.items():
        assert (f"| `{name}` | `{meaning.alias}` | {meaning.text} |" in page) == bool(meaning.alias), name
    shown = with_aliases({"episode/return": 6.0, "episode/length": 15.0, "train/my_loss": 2.0})
    assert shown["rollout/ep_rew_mean"] == 6.0
    assert shown["rollout/ep_len_mean"] == 15.0
    assert shown["episode/reward_per_step"] == pytest.approx(0.4)
    assert set(shown) == {
        "episode/return", "episode/length", "episode/reward_per_step", "rollout/ep_rew_mean", "rollout/ep_len_mean", "train/my_loss",
    }  # fmt: skip
