"""A small JSON server on the standard library's threads: routes are the caller's, limits and refusals are here.

One thread a connection, connections kept open. No framework is needed for a handful of routes whose time goes into simulators and
language models, and nothing has to be installed beside them.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from embodied_rl.errors import UserError

_IDLE_CONNECTION_S = 75.0
"""A connection on which nothing comes for so long is closed: clients reconnect, and threads are not for ever."""
_POLL_S = 0.05
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HttpProblem(Exception):
    """A request that is refused, or could not be done: status, a word for programs, a sentence for people."""

    def __init__(
        self, status: int, kind: str, message: str, *, choices: Iterable[str] = (), headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message
        self.choices = sorted(choices)
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        """{error, kind, choices}: the body of the answer."""
        return {"error": self.message, "kind": self.kind, "choices": self.choices}


@dataclass(frozen=True)
class HttpRequest:
    """One request whose body was read and is JSON."""

    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: dict[str, Any]
    """Empty for GET and DELETE."""
    client_gone: Callable[[], bool] = field(repr=False)
    """Whether the client has closed its end: nobody waits for the answer any more."""

    @property
    def bearer(self) -> str | None:
        """What follows ``Authorization: Bearer``."""
        scheme, _, value = self.headers.get("authorization", "").partition(" ")
        return value.strip() if scheme.lower() == "bearer" and value.strip() else None


@dataclass(frozen=True)
class Reply:
    """A JSON answer."""

    body: Any
    """What JSON can hold, or bytes that are JSON already."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EventStream:
    """Server-sent events, as their bytes; what is raised between them ends the connection."""

    events: Iterator[bytes]


Handler = Callable[[HttpRequest], Reply | EventStream]
ProblemFormat = Callable[[HttpProblem], Any]


@dataclass(frozen=True)
class ServerLimits:
    """What one client may ask of the server."""

    max_body_bytes: int = 32 * 2**20
    max_connections: int = 256
    """Open at a time; a further one is answered 503."""


class _Listening(ThreadingHTTPServer):
    """A thread for each of so many connections at most; a further one is turned away."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], requests: type[BaseHTTPRequestHandler], max_connections: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._places = threading.Semaphore(max_connections)
        self.connections = set[socket.socket]()
        super().__init__(address, requests)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            self.connections.add(request)
            try:
                super().process_request(request, client_address)
            except BaseException:  # no thread could be started: its place is free again
                self.connections.discard(request)
                self._places.release()
                raise
        else:
            with contextlib.suppress(OSError):
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.discard(request)
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a connection that broke is the client's affair


class HttpServer:
    """Listens from construction on; `close` ends it. The handler is called from many threads at once."""

    def __init__(
        self,
        handle: Handler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: ServerLimits | None = None,
        any_host_header: bool = False,
        format_problem: ProblemFormat = HttpProblem.to_dict,
    ) -> None:
        """Bind and answer in a thread of its own.

        Args:
            handle: answers a request; HttpProblem becomes its status and body, UserError 422, anything else 500.
            host: an address of this machine. Whether others may reach it is `require_token_off_loopback`'s affair.
            port: 0 takes a free one.
            any_host_header: answer whatever name the client called us by. Without it only addresses and ``localhost`` are: a page in a
                browser on this machine could otherwise reach a server without a token through a name of its own.
            format_problem: the body of a refusal.

        Raises:
            UserError: the address is not ours, or the port is taken.
        """
        allowed = limits or ServerLimits()

        class Requests(_Requests):
            settings = _Settings(handle, allowed, any_host_header, format_problem)

        try:
            self._server = _Listening((host, port), Requests, allowed.max_connections)
        except OSError as error:
            raise UserError(f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another host= or port=.") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        host = str(self._server.server_address[0])
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Take no more requests; those being answered may end. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
        for connection in list(self._server.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # answers still leave; kept connections end


def is_loopback(host: str) -> bool:
    """Whether an address or name can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require_token_off_loopback(host: str, token: str | None, *, variable: str) -> None:
    """Raises UserError when others than this machine could use a server that asks for no token."""
    if not is_loopback(host) and not token:
        raise UserError(
            f"host={host} can be reached from other machines, and there is no token. Set the environment variable {variable} "
            "(clients send it as 'Authorization: Bearer …'), or listen on 127.0.0.1."
        )


def token_from(variable: str) -> str | None:
    """The token in an environment variable; None where it is not set. Raises UserError for one that is too short to be a secret."""
    token = os.environ.get(variable)
    if token is not None and len(token) < 8:
        raise UserError(f"The environment variable {variable} holds {len(token)} characters; a token has at least 8.")
    return token


def same_token(given: str | None, token: str) -> bool:
    """In a time that says nothing about where they differ."""
    return given is not None and hmac.compare_digest(given.encode(), token.encode())


def require_token(request: HttpRequest, token: str | None) -> None:
    """Raises HttpProblem 401 unless the request brings the token, where there is one."""
    if token is not None and not same_token(request.bearer, token):
        message = "This server asks for a token: send 'Authorization: Bearer …'."
        raise HttpProblem(401, "unauthorized", message, headers={"WWW-Authenticate": "Bearer"})


# ---- one connection -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    handle: Handler
    limits: ServerLimits
    any_host_header: bool
    format_problem: ProblemFormat


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "embodied_rl", ""
    disable_nagle_algorithm = True
    wbufsize = 2**16  # head and body leave in one packet
    timeout = _IDLE_CONNECTION_S
    settings: _Settings

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    do_PUT = do_PATCH = do_OPTIONS = do_GET  # noqa: N815 - for the handler to refuse

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses by itself (a malformed request line, headers that are too long), as JSON like the rest."""
        self.close_connection = True
        self._send(self._refusal(HttpProblem(int(code), "bad_request", message or "The request cannot be read.")))

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle(self) -> None:
        # A client that goes away in the middle, at any place, is no error of ours.
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def _serve(self) -> None:
        try:
            answer = self._answer()
        except HttpProblem as problem:
            answer = self._refusal(problem)
        if isinstance(answer, Reply):
            self._send(answer)
        else:
            self._stream(answer)
        self.wfile.flush()

    def _answer(self) -> Reply | EventStream:
        request = self._read()
        try:
            return self.settings.handle(request)
        except HttpProblem:
            raise
        except UserError as error:
            raise HttpProblem(422, "user_error", str(error)) from error
        except Exception as error:
            # The program's own mistake: told by its type alone, for its text may hold what is not the client's to know.
            import traceback

            traceback.print_exc()
            raise HttpProblem(500, "internal_error", f"The server failed ({type(error).__name__}); its log says more.") from error

    def _refusal(self, problem: HttpProblem) -> Reply:
        return Reply(self.settings.format_problem(problem), problem.status, problem.headers)

    def _read(self) -> HttpRequest:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self._read_body(headers)
        if not self.settings.any_host_header and not _is_address(headers.get("host", "")):
            raise HttpProblem(403, "wrong_host", "This server is called by its address or localhost; set a token to allow other names.")
        return HttpRequest(self.command, urlsplit(self.path).path, headers, body, self._client_gone)

    def _read_body(self, headers: Mapping[str, str]) -> dict[str, Any]:
        # Whatever is refused before its body was read leaves the connection in the middle of one: it is closed.
        length = headers.get("content-length")
        if "transfer-encoding" in headers or (length is None and self.command == "POST"):
            self.close_connection = True
            raise HttpProblem(411, "length_required", "Send the body with a Content-Length; chunked bodies are not taken.")
        if length is not None and not length.isdecimal():
            self.close_connection = True
            raise HttpProblem(400, "bad_request", f"Content-Length must be a number, got '{length[:40]}'.")
        size, most = int(length or 0), self.settings.limits.max_body_bytes
        if size > most:
            self.close_connection = True
            raise HttpProblem(413, "body_too_large", f"The body has {size:,} bytes; this server takes {most:,}.")
        data = self.rfile.read(size)
        if len(data) != size:
            self.close_connection = True
            raise HttpProblem(400, "bad_request", f"The body ends after {len(data):,} of {size:,} bytes.")
        if not data:
            return {}
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HttpProblem(415, "not_json", "Send the body as 'Content-Type: application/json'.")
        return parse_object(data)

    def _client_gone(self) -> bool:
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True

    def _send(self, reply: Reply) -> None:
        try:
            data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            reply = self._refusal(HttpProblem(500, "internal_error", f"The answer cannot be written as JSON: {error}."))
            data = json.dumps(reply.body).encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, stream: EventStream) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in stream.events:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except Exception:
            self.close_connection = True  # without the last chunk the client knows that this is not the end
            raise
        finally:
            close = getattr(stream.events, "close", None)
            if close is not None:
                close()


def _is_address(host_header: str) -> bool:
    host = urlsplit(f"//{host_header}").hostname or ""
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises HttpProblem 400 for anything else, NaN and infinities included."""
    try:
        found = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise HttpProblem(400, "bad_request", f"The body is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise HttpProblem(400, "bad_request", f"The body must be a JSON object, got {type(found).__name__}.")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
