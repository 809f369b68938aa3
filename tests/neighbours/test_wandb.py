"""Weights & Biases' own command reads the files that a run left without a network, and sends what is in them: here to a server of ours."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.neighbours.overlay import REPOSITORY

RUN = """
import sys; from pathlib import Path; from embodied_rl.config import LoggerConfig; from embodied_rl.loggers import make_loggers
run, options = Path(sys.argv[1]), LoggerConfig(names=("wandb",), wandb_project="arm")
with make_loggers(options, run, {"seed": 7}, 1000) as group:
    group.log(100, {"episode/success": 0.5}); group.log_video(100, Path(sys.argv[2]))
with make_loggers(options, run, {"seed": 7}, 1000, resume_step=50) as group:
    group.log(60, {"episode/success": 0.75})
"""


class Received:
    """What the command has sent."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.runs: set[tuple[str, str]] = set()
        """(project, id)"""
        self.configs: list[dict[str, Any]] = []
        self.files: dict[str, int] = {}
        """{name: bytes}"""


@pytest.fixture
def service() -> Iterator[tuple[str, Received]]:
    """As much of the service's interface as an upload asks for."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            told = json.dumps(self.reply(body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        do_GET = do_POST = do_PUT = answer  # noqa: N815

        def reply(self, body: bytes) -> dict[str, Any]:
            if self.path.startswith("/put/"):
                received.files[self.path.removeprefix("/put/")] = len(body)
                return {}
            if self.path.endswith("/file_stream"):
                lines = json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
                received.history += [json.loads(line) for line in lines]
                return {}
            asked = json.loads(body)
            given = asked.get("variables") or {}
            if "UpsertBucket" in asked["query"]:
                received.runs.add((given["project"], given["name"]))
                received.configs.append(json.loads(given["config"] or "{}"))
                project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "me"}}
                bucket = {"id": "b", "name": given["name"], "displayName": "arm", "config": "{}", "project": project, "historyLineCount": 0}
                return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
            if "CreateRunFiles" in asked["query"]:
                places = [{"name": name, "uploadUrl": f"{url}/put/{name}"} for name in given["files"]]
                return {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": places}}}
            return {"data": {}}

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield url, received
    server.shutdown()
    thread.join()
    server.server_close()


def test_wandb_sync_sends_what_a_run_logged(service: tuple[str, Received], tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    url, received = service
    video, run = tmp_path / "push.gif", tmp_path / "run"
    Image.new("RGB", (32, 32)).save(video)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", RUN, str(run), str(video)], check=True, timeout=280, env=plain)
    offline = sorted((run / "wandb").glob("offline-run-*"))
    assert len(offline) == 2
    command = shutil.which("wandb", path=str(Path(sys.executable).parent)) or "wandb"
    known = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40, "HOME": str(tmp_path)}
    done = subprocess.run([command, "sync", "--yes", *map(str, offline)], env=plain | known, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Finished syncing") == 2
    name = (run / "wandb_run_id.txt").read_text().strip()
    assert received.runs == {("arm", name)}, "a resumed run continues the same W&B run"
    assert all(config["seed"]["value"] == 7 for config in received.configs if "seed" in config)
    assert any("seed" in config for config in received.configs)
    logged = sorted((row["step"], row["episode/success"]) for row in received.history if "episode/success" in row)
    assert logged == [(60, 0.75), (100, 0.5)]
    assert [row["step"] for row in received.history if "video" in row] == [100]
    sizes = [size for file, size in received.files.items() if file.startswith("media/videos/")]
    assert sizes == [video.stat().st_size]
