"""Servers for the tests: the environment service with small simulators, a proxy that loses answers, and one with ROCK's routes."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from embodied_rl.config import SimConfig
from embodied_rl.serving.environments.app import EnvironmentService
from embodied_rl.serving.environments.hub import ServiceLimits
from embodied_rl.serving.http_server import HttpProblem, HttpRequest, HttpServer, Reply, ServerLimits
from embodied_rl.sim import remote_client

SIMULATORS = {
    "puck": SimConfig("puck", "tests.sim.check_toys:Puck"),
    "count": SimConfig("count", "tests.sim.toy:CountingSim", kwargs={"length": 7}),
    "saved_count": SimConfig("saved_count", "tests.sim.toy:SavedCountingSim", kwargs={"length": 30}),
    "meeting": SimConfig("meeting", "tests.service.toys:MeetingSim"),
    "busy": SimConfig("busy", "tests.service.toys:BusySim"),
    "talk": SimConfig("talk", "tests.sim.toy:TalkingSim"),
}


@contextmanager
def served(
    *, http: ServerLimits | None = None, token: str = "none", offered: Mapping[str, SimConfig] | None = None, **limits: Any
) -> Iterator[EnvironmentService]:
    """`offered`: beside `SIMULATORS`, or in their place."""
    service = EnvironmentService({**SIMULATORS, **(offered or {})}, token=token, limits=ServiceLimits(**limits), http=http)
    try:
        yield service
    finally:
        service.close()


def pauses_take_no_time(monkeypatch: pytest.MonkeyPatch, longer_by_s: float = 0.0) -> None:
    """A client's pauses between its attempts pass at once (and are longer than it meant): deadlines of minutes are over soon."""
    ahead_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal ahead_s
        ahead_s += seconds + longer_by_s

    monkeypatch.setattr(remote_client, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s, sleep=sleep))


class LosingProxy:
    """Passes bytes on to the server at `port`, and cuts connections: `lose_answers` of the next requests after they were delivered."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.lose_answers = 0
        self.num_lost = 0
        self.down = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            if self.down:
                return
            with socket.create_connection(("127.0.0.1", self.port)) as server:
                while data := _message(client):
                    server.sendall(data)
                    answer = _message(server)
                    if self.down or self.lose_answers > 0:
                        self.lose_answers -= 1
                        self.num_lost += 1
                        return
                    client.sendall(answer)

    def close(self) -> None:
        self._listener.close()


def _message(connection: socket.socket) -> bytes:
    """One request or answer with a Content-Length, whole."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while len(body) < (lengths or [0])[0]:
        part = connection.recv(65536)
        if not part:
            return b""
        body += part
    return head + b"\r\n\r\n" + body


class RockServer:
    """ROCK's GEM routes over GEM's own environments; `wrapped` puts answers into ``result``, as newer servers do."""

    def __init__(self, wrapped: bool = False) -> None:
        self.sandboxes: dict[str, Any] = {}
        self.calls: list[str] = []
        self._wrapped, self._ids, self._lock = wrapped, itertools.count(), threading.Lock()
        self.server = HttpServer(self._answer)

    @property
    def url(self) -> str:
        return self.server.url

    def _answer(self, request: HttpRequest) -> Reply:
        prefix, _, route = request.path.rpartition("/")
        assert (request.method, prefix) == ("POST", "/apis/v1/envs/gem")
        with self._lock:
            self.calls.append(route)
            found = getattr(self, f"_{route}")(request.body)
        return Reply({"status": "Success", "result": found} if self._wrapped else found)

    def _make(self, body: dict[str, Any]) -> dict[str, Any]:
        from embodied_rl.sim.text.gem import registered

        registered()  # before GEM is imported
        import gem

        if "GuessTheNumber" not in body["env_id"]:
            raise HttpProblem(500, "", f"no such environment: {body['env_id']}")
        sandbox_id = f"sandbox-{next(self._ids)}"
        self.sandboxes[sandbox_id] = gem.make(body["env_id"])
        return {"sandbox_id": sandbox_id}

    def _reset(self, body: dict[str, Any]) -> dict[str, Any]:
        # Each sandbox is a process over there; here they share the generators that GEM draws from, and a reset seeds these.
        observation, info = self.sandboxes[body["sandbox_id"]].reset(seed=body["seed"])
        random.seed(None)
        return {"observation": observation, "info": info}

    def _step(self, body: dict[str, Any]) -> dict[str, Any]:
        observation, reward, terminated, truncated, info = self.sandboxes[body["sandbox_id"]].step(body["action"])
        return {"observation": observation, "reward": reward, "terminated": terminated, "truncated": truncated, "info": info}

    def _close(self, body: dict[str, Any]) -> dict[str, Any]:
        self.sandboxes.pop(body["sandbox_id"], None)
        return {"sandbox_id": body["sandbox_id"]}
