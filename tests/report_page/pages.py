"""Run folders to report about, and a second reader of the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import av
import numpy as np


class Page(HTMLParser):
    """Tags, the addresses they load or lead to, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[tuple[str, str]] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "poster", "srcset", "data", "background"):
                self.loads.append((tag, value or ""))
            elif name == "href":
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def metrics_rows(num_rows: int = 12, *, offset: float = 0.0) -> list[dict[str, Any]]:
    """A row every 1,000 steps and 10 s: half of the time simulates, a quarter updates, a tenth acts; every third has an evaluation."""
    rows = []
    for number in range(1, num_rows + 1):
        row: dict[str, Any] = {"step": 1000 * number, "time_unix_s": 1e9 + 10 * number, "episode/success": min(1.0, number / 10 + offset)}
        row |= {
            "episode/return": float(number) + offset,
            "episode/length": 20.0 - number,
            "speed/steps_per_s": 100.0,
            "speed/wall_clock_s": 10.0 * number,
        }
        row |= {"time/simulate_s": 5.0, "time/act_s": 1.0, "time/update_s": 2.5, "train/policy_loss": -0.01 * number, "train/kl": None}
        if number % 3 == 0:
            row |= {"eval/success": min(1.0, number / 9 + offset), "eval/return": float(number)}
        rows.append(row)
    return rows


def write_run(
    folder: Path,
    *,
    seed: int = 1,
    metrics: Sequence[Mapping[str, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
    finished: bool = True,
    video: bool = False,
    **results: Any,
) -> Path:
    """A run's folder with plain files, as the trainer leaves them."""
    folder.mkdir(parents=True)
    rows = metrics_rows() if metrics is None else metrics
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    whole = {"seed": seed, "run_dir": str(folder), "sim": {"name": "toy", "task": "Toy-v0"}, "algorithm": {"name": "ppo", "gamma": 0.99}}
    whole = {**whole, "policy": {"name": "actor_critic"}, **(config or {})}
    if finished:
        (folder / "results.json").write_text(json.dumps(results_of(whole, **results)), encoding="utf-8")
    else:
        (folder / "checkpoints" / "last").mkdir(parents=True)
        (folder / "checkpoints" / "last" / "config.yaml").write_text(json.dumps(whole), encoding="utf-8")  # JSON is YAML
    if video:
        write_movie(folder / "videos" / "Toy-v0_step000012000.mp4")
    return folder


def results_of(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """What the trainer writes at the end."""
    episodes = [
        {"seed": 2**30 + n, "success_once": n > 0, "success_at_end": n > 1, "return": float(n), "length": 10 * (n + 1), "terminated": n > 0}
        for n in range(4)
    ]
    return {
        "task": "Toy-v0",
        "algorithm": "ppo",
        "policy": "actor_critic",
        "seed": config["seed"],
        "num_episodes": 4,
        "success": 0.75,
        "success_interval_95": [0.301, 0.954],
        "success_at_end": 0.5,
        "success_at_end_interval_95": [0.15, 0.85],
        "return_mean": 1.5,
        "return_std": 1.29,
        "return_mean_interval_95": [0.5, 2.5],
        "length_mean": 25.0,
        "held_out_seeds": {"first": 2**30, "last": 2**30 + 3, "count": 4},
        "steps": 12_000,
        "iterations": 12,
        "wall_clock_s": 135.0,
        "train_wall_clock_s": 120.0,
        "steps_per_s": 100.0,
        "command": "python -m embodied_rl.train sim=toy",
        "checkpoint": "checkpoints/step_000012000",
        "finished": "2026-01-02T03:04:05+00:00",
        "config_sha256": "ab" * 32,
        "versions": {"python": "3.11"},
        "machine": {"cpu": "a processor", "cores": 2},
        "config": config,
        "episodes": episodes,
        **changes,
    }


def write_movie(path: Path, num_frames: int = 20) -> Path:
    """A real H.264 film of a moving square."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream: Any = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for index in range(num_frames):
            frame = np.full((64, 64, 3), (20, 40, 120), np.uint8)
            frame[20:40, 2 * index : 2 * index + 16] = (230, 210, 40)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path
