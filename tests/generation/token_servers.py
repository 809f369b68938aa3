"""Small HTTP servers that speak OpenAI's protocol, well or badly, each request answered as a plan says; and vLLM's own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

Handler = Callable[["Exchange"], None]


@dataclass
class Exchange:
    """One request at the server, and the means to answer it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    number: int
    """Counts the server's requests from 0."""
    handler: BaseHTTPRequestHandler = field(repr=False)
    num_sent: int = 0
    """For plans that count what they have sent."""

    def answer(self, status: int, content: str | bytes, headers: dict[str, str] | None = None) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.handler.send_response(status)
        for name, value in (headers or {}).items():
            self.handler.send_header(name, value)
        self.handler.send_header("Content-Length", str(len(data)))
        self.handler.end_headers()
        self.handler.wfile.write(data)

    def json(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.answer(status, json.dumps(data), headers)

    def begin_stream(self) -> None:
        self.handler.send_response(200)
        self.handler.send_header("Content-Type", "text/event-stream")
        self.handler.send_header("Connection", "close")
        self.handler.end_headers()
        self.handler.close_connection = True

    def event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        self.handler.wfile.write(f"data: {text}\n\n".encode())
        self.handler.wfile.flush()

    def drop(self) -> None:
        """Close the connection without a word."""
        self.handler.close_connection = True
        self.handler.connection.close()


class TokenServer:
    """Answers on a free port of the loopback until it is closed."""

    def __init__(self, plan: Handler) -> None:
        self.exchanges: list[Exchange] = []
        self.times: list[float] = []
        self.broken_pipes = 0
        self._lock = threading.Lock()
        outer = self

        class Requests(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    exchange = Exchange(self.path, dict(self.headers.items()), body, len(outer.exchanges), self)
                    outer.exchanges.append(exchange)
                    outer.times.append(time.monotonic())
                try:
                    plan(exchange)
                except (BrokenPipeError, ConnectionResetError):
                    outer.broken_pipes += 1
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def handle(self) -> None:
                try:
                    super().handle()
                except (OSError, ValueError):
                    self.close_connection = True

            def finish(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    super().finish()

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Requests)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def choice(token_ids: list[int], reason: str | None, text: str = "x") -> dict[str, Any]:
    """A piece of a completion in vLLM's form: token t has log-probability −t/10."""
    return {
        "choices": [
            {"text": text, "token_ids": token_ids, "logprobs": {"token_logprobs": [-t / 10 for t in token_ids]}, "finish_reason": reason}
        ]
    }


@contextlib.contextmanager
def vllm_server(folder: Path, *arguments: str) -> Iterator[str]:
    """Base URL of vLLM's api_server (``vllm serve`` looks for a distribution called vllm, which the CPU build is not)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    options = ["--model", str(folder), "--served-model-name", "toy", "--dtype", "float32", "--enforce-eager", *arguments]
    options += ["--host", "127.0.0.1", "--port", str(port), "--generation-config", "vllm"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
    with tempfile.TemporaryFile() as said, _running(command, environment, said) as process:
        deadline = time.monotonic() + 400
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                said.seek(0)
                raise AssertionError(f"vLLM's server did not come up: {said.read().decode(errors='replace')[-3000:]}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A server and the processes of its own, which one that is killed would leave behind."""
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
