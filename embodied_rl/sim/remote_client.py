"""JSON over HTTP for remote simulators: one kept connection, deadlines, and retries where a retry is harmless."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from embodied_rl.errors import Limits, UserError

_RETRIED = frozenset({408, 425, 429, 502, 503, 504})
"""Temporary statuses. 500 is not one: it reports an environment that failed."""
_LINE = 300
MOST_BYTES = 2**28
"""Most bytes of one answer."""


class RemoteFault(RuntimeError):
    """A remote environment failed, or its service is unreachable."""

    def __init__(self, kind: str, message: str, env_id: int | None = None) -> None:
        super().__init__(message)
        self.env_id = env_id
        """Number of the client's environment that failed; None: none in particular."""
        self.kind = kind
        """``connection``, ``bad_response``, or the service's word: raised, died, timed_out, idle, unknown_environment, …"""


@dataclass(frozen=True)
class Answer:
    """Response of any status."""

    status: int
    body: dict[str, Any]

    @property
    def kind(self) -> str:
        """Service's word for the failure; empty if it gave none."""
        return str(self.body.get("kind", ""))

    @property
    def message(self) -> str:
        """Service's sentence about the failure."""
        found = self.body.get("error") or self.body.get("detail") or self.body.get("message") or f"HTTP status {self.status}"
        return found if isinstance(found, str) else json.dumps(found)[:_LINE]


@dataclass(frozen=True)
class Patience(Limits):
    """Timeouts and retries of a client. Raises UserError for a time that is not above 0 and finite."""

    attempt_s: float = 20.0
    """Seconds without an answer after which the client drops the connection and sends the request on another."""
    deadline_s: float = 50.0
    """Seconds for one call with all its retries; keep it below `sim.step_timeout_s`, or the manager gives up first."""
    first_wait_s: float = 0.05
    """Seconds before the second attempt; doubles with each further one, and half of it is drawn at random."""
    max_wait_s: float = 2.0


class JsonClient:
    """Talks to one server, from one thread."""

    def __init__(self, url: str, *, token: str | None = None, patience: Patience | None = None) -> None:
        """Prepare a connection without sending anything. Raises UserError if `url` is not the URL of a server."""
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # brackets that do not close, a port beyond 65535
            usable = False
        if not usable:
            raise UserError(f"url must be like http://127.0.0.1:8700, got {url!r:.80}.")
        self.url = url.rstrip("/")
        self._parts, self._prefix = parts, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Connection": "keep-alive"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self.patience = patience or Patience()
        self._connection: http.client.HTTPConnection | None = None
        self._random = random.Random()
        self.num_repeats = 0
        """Attempts beyond the first, over all calls."""

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, repeat: bool = True, deadline_s: float | None = None
    ) -> Answer:
        """Send until there is an answer.

        Args:
            repeat: whether the request may reach the server twice; if not, only a refused connection is tried again.
            deadline_s: replaces the patience's deadline.

        Raises:
            RemoteFault: "connection" or "bad_response" after the deadline; "bad_response" for an answer of more than `MOST_BYTES`.
        """
        data = None if body is None else json.dumps(body).encode()
        until = time.monotonic() + (self.patience.deadline_s if deadline_s is None else deadline_s)
        attempt = 0
        said: RemoteFault | None = None
        while True:
            attempt, sent = attempt + 1, False
            longest = min(self.patience.first_wait_s * 2.0 ** (attempt - 1), self.patience.max_wait_s)
            wait = longest * (0.5 + 0.5 * self._random.random())
            try:
                connection = self._connected(until)
                sent = True
                answer, retry_after = self._exchange(connection, method, path, data)
                if answer.status not in _RETRIED or (not repeat and answer.status not in (429, 503)):
                    return answer
                fault = said = RemoteFault(answer.kind or "connection", answer.message)
                wait = max(wait, retry_after)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                fault = RemoteFault("connection", f"{type(error).__name__}: {error}")
                if said is not None and isinstance(error, TimeoutError) and time.monotonic() >= until:
                    fault = said  # the last attempt had no time to fail
            except (ValueError, RecursionError) as error:
                self.close()
                fault = said = RemoteFault("bad_response", f"its answer is not a JSON object: {error}")
            if (sent and not repeat and fault.kind in ("connection", "bad_response")) or time.monotonic() + wait >= until:
                raise RemoteFault(fault.kind, f"No answer from {self.url}{path} after {attempt} attempt{'s' * (attempt > 1)}: {fault}")
            self.num_repeats += 1
            time.sleep(wait)

    def send_all(self, method: str, requests: Sequence[tuple[str, Mapping[str, Any] | None]], deadline_s: float) -> None:
        """Send requests (path, body), each on its own connection and at once, because this process may end before they are answered; then
        wait for the answers. Failures are ignored."""
        until, connections = time.monotonic() + deadline_s, list[http.client.HTTPConnection]()
        with contextlib.suppress(OSError, http.client.HTTPException):
            for path, body in requests:
                connections.append(self._connected(until))
                self._connection = None
                connections[-1].request(method, self._prefix + path, None if body is None else json.dumps(body).encode(), self._headers)
            for connection in connections:
                connection.sock.settimeout(max(until - time.monotonic(), 0.001))
                connection.getresponse().read()
        for connection in connections:
            connection.close()

    def close(self) -> None:
        """Drop the connection; the next call makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self, until: float) -> http.client.HTTPConnection:
        timeout = min(self.patience.attempt_s, max(until - time.monotonic(), 0.05))
        if self._connection is None:
            host = str(self._parts.hostname)
            kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(host, self._parts.port, timeout=timeout)
        if self._connection.sock is None:  # a new connection, or one that the server's last answer closed (HTTP/1.0, Connection: close)
            self._connection.timeout = timeout
            self._connection.connect()
        self._connection.sock.settimeout(timeout)
        return self._connection

    def _exchange(self, connection: http.client.HTTPConnection, method: str, path: str, data: bytes | None) -> tuple[Answer, float]:
        connection.request(method, self._prefix + path, data, self._headers)
        response = connection.getresponse()
        content = response.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            response.close()
            self.close()
            raise RemoteFault("bad_response", f"An answer of {self.url}{path} is longer than {MOST_BYTES:,} bytes.")
        retry_after = response.headers.get("Retry-After", "0")
        try:
            body = json.loads(content) if content else {}
        except ValueError:
            if response.status < 400:
                raise
            body = {"error": content[:_LINE].decode("utf-8", "replace")}  # a gateway's page
        if not isinstance(body, dict):
            raise ValueError(type(body).__name__)
        return Answer(response.status, body), float(retry_after) if retry_after.replace(".", "", 1).isdigit() else 0.0
