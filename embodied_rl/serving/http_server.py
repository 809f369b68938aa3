"""A small JSON server on the standard library's threads: the caller brings the routes; limits, refusals and OpenAPI 3.1 are here.

One thread per connection, and connections stay open. A handful of routes that spend their time in simulators and language models needs no
framework, so nothing has to be installed. OpenAPI (https://spec.openapis.org/oas/v3.1.0) serves generated clients.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import ipaddress
import json
import math
import os
import re
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.errors import FirstHeaderLineIsContinuationDefect, MisplacedEnvelopeHeaderDefect, MissingHeaderBodySeparatorDefect
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from embodied_rl import __version__
from embodied_rl.bounds import Bounds
from embodied_rl.distributed.channel import can_be_read
from embodied_rl.errors import Limits, UserError, did_you_mean, in_short
from embodied_rl.reading import parse_json, yaml_text

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


TOKEN_VARIABLE = "EMBODIED_RL_TOKEN"
"""Environment variable with a server's token, read by the server and its clients."""
DEEPEST = 64
"""Deepest nesting of lists and objects in a body."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
_ONCE = frozenset({"host", "origin", "content-length", "content-type", "authorization"})
_HEADER_DEFECTS = (FirstHeaderLineIsContinuationDefect, MisplacedEnvelopeHeaderDefect, MissingHeaderBodySeparatorDefect)


class HttpProblem(Exception):
    """A refused or failed request: status, a word for programs, a sentence for people."""

    def __init__(
        self, status: int, kind: str, message: str, *, choices: Iterable[str] = (), headers: Mapping[str, str] | None = None
    ) -> None:
        message = in_short(message) if status < 500 else message  # keep every detail of our own faults
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message
        self.choices = sorted(choices)
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        """Body of the answer: {error, kind, choices}."""
        return {"error": self.message, "kind": self.kind, "choices": self.choices}


def checked_headers(found: Message) -> dict[str, str]:
    """Headers by lower-case name. Raises HttpProblem 400 for headers that two readers could interpret differently."""
    headers: dict[str, str] = {}
    if any(isinstance(defect, _HEADER_DEFECTS) for defect in found.defects):
        raise HttpProblem(400, "bad_request", "The headers cannot be read: each is a line 'Name: value'.")
    for name, value in found.items():
        key = name.lower()
        if not _TOKEN.fullmatch(name) or any(char < " " and char != "\t" for char in value):
            raise HttpProblem(400, "bad_request", f"The header {name!r:.80} cannot be read: each is a line 'Name: value'.")
        if key in headers and key in _ONCE:
            raise HttpProblem(400, "bad_request", f"The header {name} is there twice.")
        headers[key] = value
    return headers


def path_of(target: str) -> str:
    """Path of ``/path?query`` or ``http://host/path?query``. Raises HttpProblem 400."""
    if target.startswith("/"):
        return target.partition("?")[0].partition("#")[0]
    try:
        parts = urlsplit(target)
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in ("http", "https"):
        raise HttpProblem(400, "bad_request", f"The request's target must be a path that begins with '/', got {target!r:.80}.")
    return parts.path or "/"


def require_our_name(headers: Mapping[str, str]) -> None:
    """Raise HttpProblem 403 for a request that another site's page may have caused in a browser on this machine."""
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _is_address(host):
        raise HttpProblem(403, "wrong_host", "This server is called by its address or localhost; set a token to allow other names.")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        raise HttpProblem(403, "wrong_origin", f"Pages of {origin[:80]} cannot use this server; set a token to allow them.")


def _is_address(host_header: str) -> bool:
    try:
        host = urlsplit(f"//{host_header}").hostname or ""
        if host != "localhost":
            ipaddress.ip_address(host)
    except ValueError:  # not an address, or unclosed brackets
        return False
    return True


def parse_body(data: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    """Parsed body; {} if empty. Raises HttpProblem: 415 for another content type; 400 for anything but a JSON object, for NaN, infinite
    numbers, and nesting beyond `DEEPEST`."""
    if not data:
        return {}
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpProblem(415, "not_json", "Send the body as 'Content-Type: application/json'.")
    try:
        found = parse_json(data.decode(), finite=True, depth=DEEPEST)
    except ValueError as error:
        raise HttpProblem(400, "bad_request", f"The body is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise HttpProblem(400, "bad_request", f"The body must be a JSON object, got {type(found).__name__}.")
    return found


_IDLE_CONNECTION_S = 75.0
"""Seconds without traffic after which a connection is closed; clients reconnect."""
_POLL_S = 0.05
_LINGER_S = 2.0
"""Seconds for which a closing connection still reads its client's data."""
_SLOWEST_BYTES_S = 100_000
"""Bytes per additional second that a body may take."""
_LONGEST_LINE = 2**16


@dataclass(frozen=True)
class HttpRequest:
    """One request with its parsed JSON body."""

    method: str
    path: str
    """Path without the query."""
    headers: Mapping[str, str]
    """Headers by lower-case name."""
    body: dict[str, Any]
    """Parsed body; {} for GET and DELETE."""
    client_gone: Callable[[], bool] = field(repr=False)
    """Whether the client has closed its end and no longer waits for the answer."""

    @property
    def key(self) -> str | None:
        """Token in ``Authorization: Bearer``, or in ``x-api-key`` as Anthropic's clients send it."""
        scheme, _, value = self.headers.get("authorization", "").partition(" ")
        return (value.strip() if scheme.lower() == "bearer" else "") or self.headers.get("x-api-key")


@dataclass(frozen=True)
class Reply:
    """An answer that is sent as a whole."""

    body: object
    """A JSON value, or bytes of the content type."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


@dataclass(frozen=True)
class EventStream:
    """Server-sent events as bytes; an exception between them ends the connection."""

    events: Generator[bytes]


Handler = Callable[[HttpRequest], Reply | EventStream]
ProblemFormat = Callable[[HttpProblem, str], dict[str, Any]]
_Connection = socket.socket | tuple[bytes, socket.socket]
_Address = tuple[str, int] | str


@dataclass(frozen=True)
class ServerLimits(Limits):
    """Limits of one client. Raises UserError for a limit that is not above 0 and finite."""

    max_body_mb: float = 32.0
    """Size of one request (2**20 bytes)."""
    max_connections: int = 256
    """Most open connections; a further one gets 503."""
    request_s: float = 30.0
    """Seconds from a request's first byte to its last; large bodies get more."""


class HttpServer(ThreadingHTTPServer):
    """Listens from construction until `close`, with a thread for each connection, up to a limit; further ones are refused. The threads call
    the handler in parallel."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        answer: Handler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        admit: Callable[[HttpRequest], None] = lambda request: None,
        limits: ServerLimits | None = None,
        any_host_header: bool = False,
        format_problem: ProblemFormat = lambda problem, path: problem.to_dict(),
    ) -> None:
        """Bind and answer in a separate thread.

        Args:
            answer: answers a request; HttpProblem becomes its status and body, UserError 422, anything else 500.
            host: an address of this machine; `require_token_off_loopback` checks whether others may reach it.
            port: 0 selects a free one.
            admit: raises HttpProblem to refuse a request before its body is read (it sees an empty body).
            any_host_header: answer for any name in the Host header. Otherwise only addresses and ``localhost`` are valid, because a page
                in a browser on this machine could reach a server without a token through a name that its site controls.
            format_problem: body of a refusal, from it and the request's path; "" if that is unknown.

        Raises UserError: the address is not ours, or the port is taken.
        """
        self.answer, self.admit, self.limits = answer, admit, limits or ServerLimits()
        self.any_host_header, self.format_problem = any_host_header, format_problem
        self._full = self._refusal_when_full()
        self._places = threading.Semaphore(self.limits.max_connections)
        self._connections = set[socket.socket]()
        self._refused = dict[socket.socket, float]()
        """{connection beyond the limit: time until which it is read}"""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Requests)
        except (OSError, OverflowError, ValueError) as error:  # the last two: an impossible port or name
            why = (error.strerror if isinstance(error, OSError) else None) or error
            raise UserError(f"Cannot listen on {host}:{port}: {why}. Choose another host= or port= (0 to 65535).") from error
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """URL without a final slash."""
        host = str(self.server_address[0])
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Accept no more requests; present ones may finish. May be called twice."""
        self.shutdown()
        self.server_close()
        self._thread.join(5.0)
        for connection in self._refused:
            connection.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # answers can still be sent; kept connections end

    def process_request(self, request: _Connection, client_address: _Address) -> None:
        assert isinstance(request, socket.socket), "TCP"
        if self._places.acquire(blocking=False):
            self._connections.add(request)
            try:
                super().process_request(request, client_address)
            except BaseException:  # no thread could be started: free its slot
                self._connections.discard(request)
                self._places.release()
                raise
        else:
            with contextlib.suppress(OSError):
                request.setblocking(False)
                request.sendall(self._full)
                request.shutdown(socket.SHUT_WR)
            self._refused[request] = time.monotonic() + _LINGER_S

    def service_actions(self) -> None:
        """Read what refused clients send, in the thread that accepts, as `_Requests._linger` does for others."""
        for connection, until in list(self._refused.items()):
            try:
                is_over = not connection.recv(2**20)
            except OSError as error:
                is_over = not isinstance(error, BlockingIOError)
            if is_over or time.monotonic() > until or len(self._refused) > self.request_queue_size:
                del self._refused[connection]
                self.shutdown_request(connection)

    def process_request_thread(self, request: _Connection, client_address: _Address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.discard(request)
            self._places.release()

    def handle_error(self, request: _Connection, client_address: _Address) -> None:
        pass  # a broken connection is the client's problem

    def _refusal_when_full(self) -> bytes:
        """Complete answer to a connection beyond the limit."""
        message = f"{self.limits.max_connections} connections are open, the most of this server; try again soon."
        body = json.dumps(self.format_problem(HttpProblem(503, "busy", message), "")).encode()
        head = f"Retry-After: 1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
        return f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n\r\n".encode() + body


def is_loopback(host: str) -> bool:
    """Whether an address or name is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require_token_off_loopback(host: str, token: str | None) -> None:
    """Raise UserError if others than this machine could use a server without a token."""
    if not is_loopback(host) and not token:
        raise UserError(
            f"host={host} can be reached from other machines, but no token is set. Set the environment variable {TOKEN_VARIABLE} (clients "
            "send it as 'Authorization: Bearer …'), or listen on 127.0.0.1."
        )


def token_to_ask_for(asked: str | None, host: str) -> tuple[str | None, bool]:
    """Token of a server: the given one, that of `TOKEN_VARIABLE`, or on the loopback a new one.

    `asked`: "none": no token, allowed on the loopback only. None: as above. Otherwise the token itself.

    Returns (the token, whether it is new and must be shown to the user).

    Raises UserError: others could reach the server without a token, or the given one is too short.
    """
    if asked == "none" and not is_loopback(host):
        raise UserError(f"token=none is not allowed: host={host} can be reached from other machines. Listen on 127.0.0.1, or set a token.")
    if asked == "none":
        return None, False
    where = "token"
    if asked is None:
        asked, where = os.environ.get(TOKEN_VARIABLE), f"The environment variable {TOKEN_VARIABLE}"
    if asked is None:
        require_token_off_loopback(host, asked)
        return secrets.token_urlsafe(24), True
    if len(asked) < 8:
        raise UserError(f"{where} has {len(asked)} characters; a token needs at least 8.")
    if not asked.isascii() or not asked.isprintable() or asked != asked.strip():
        raise UserError(
            f"{where} must consist of printable ASCII characters, without spaces at its ends: no header carries others unchanged."
        )
    return asked, False


def same_token(given: str | None, token: str) -> bool:
    """Compare in a time that does not reveal where they differ."""
    return given is not None and hmac.compare_digest(given.encode(), token.encode())


def require_token(request: HttpRequest, token: str | None) -> None:
    """Raise HttpProblem 401 if there is a token and the request lacks it."""
    if token is not None and not same_token(request.key, token):
        message = "This server needs a token: send 'Authorization: Bearer …'."
        raise HttpProblem(401, "unauthorized", message, headers={"WWW-Authenticate": "Bearer"})


# ---- one connection -------------------------------------------------------------------------------------------------


class _PatientReader(io.RawIOBase):
    """Reads a connection until the time `until`; then raises TimeoutError, however many bytes trickled in."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self.until = connection, 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._connection.settimeout(max(self.until - time.monotonic(), 0.001))
        return self._connection.recv_into(buffer)


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # an unreadable request line is answered with headers too
    server_version, sys_version = "embodied_rl", ""
    disable_nagle_algorithm = True
    wbufsize = 2**16  # headers and body leave in one packet
    timeout = _IDLE_CONNECTION_S
    server: HttpServer

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._patient = _PatientReader(self.connection)
        self.rfile: io.BufferedReader = io.BufferedReader(self._patient)

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            pass  # a client that disconnects in the middle is not our error
        except Exception:  # in the middle of a stream, where no refusal can be sent any more
            traceback.print_exc()

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()
        with contextlib.suppress(OSError):
            self._linger()

    def _linger(self) -> None:
        """Read what a refused client is still sending: closing a connection with unread bytes resets it and loses the refusal."""
        self.connection.shutdown(socket.SHUT_WR)
        until = time.monotonic() + _LINGER_S
        while (left := until - time.monotonic()) > 0:
            self.connection.settimeout(left)
            if not self.connection.recv(2**16):
                return

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refusal by the base class: a malformed request line, or headers that are too long."""
        status = 400 if code >= 500 else int(code)  # an unsupported HTTP version is the client's problem
        raise HttpProblem(status, "bad_request", f"{message or 'The request cannot be read'}.")

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        return True  # the client is told to go on once its head was accepted

    def handle_one_request(self) -> None:
        """Wait for a request, read it in time, answer it."""
        self._patient.until = time.monotonic() + _IDLE_CONNECTION_S
        self.command, self.requestline, self.request_version = "", "", self.default_request_version
        self._path, self._read_whole, self.close_connection = "", False, True
        if not self.rfile.peek(1):
            return
        self._patient.until = time.monotonic() + self.server.limits.request_s
        try:
            answer = self._answer()
        except HttpProblem as problem:
            answer = self._refusal(problem)
        if not self._read_whole:
            self.close_connection = True  # the request was not read to its end, so the next one's start is unknown
        self.connection.settimeout(_IDLE_CONNECTION_S)
        if isinstance(answer, Reply):
            self._send(answer)
        else:
            self._stream(answer)
        self.wfile.flush()

    def _answer(self) -> Reply | EventStream:
        try:
            request = self._read()
        except TimeoutError:
            took = f"{self.server.limits.request_s:g} s"
            raise HttpProblem(408, "too_slow", f"The request did not arrive within {took}; send it again.") from None
        try:
            return self.server.answer(request)
        except HttpProblem:
            raise
        except UserError as error:
            raise HttpProblem(422, "user_error", str(error)) from error
        except Exception as error:
            # Our own bug: the client gets only the exception's type, because its text may contain what the client must not see.
            traceback.print_exc()
            raise HttpProblem(500, "internal_error", f"The server failed ({type(error).__name__}); see its log.") from error

    def _refusal(self, problem: HttpProblem) -> Reply:
        return Reply(self.server.format_problem(problem, self._path), problem.status, problem.headers)

    def _read(self) -> HttpRequest:
        self.raw_requestline = self.rfile.readline(_LONGEST_LINE + 1)
        if self.raw_requestline in (b"\r\n", b"\n"):  # clients may send one after their last body
            self.raw_requestline = self.rfile.readline(_LONGEST_LINE + 1)
        if len(self.raw_requestline) > _LONGEST_LINE:
            raise HttpProblem(414, "bad_request", f"The request's first line has more than {_LONGEST_LINE:,} bytes.")
        if not self.parse_request() or len(self.requestline.split()) != 3:
            raise HttpProblem(
                400, "bad_request", f"The request's first line must be 'METHOD /path HTTP/1.1', got {self.requestline!r:.80}."
            )
        headers = checked_headers(self.headers)
        self._read_whole = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        if not self.server.any_host_header:
            require_our_name(headers)
        self._path = path_of(self.path)
        request = HttpRequest(self.command, self._path, headers, {}, self._client_gone)
        self.server.admit(request)
        body = self._read_body(headers)
        self._read_whole = True
        return replace(request, body=parse_body(body, headers))

    def _read_body(self, headers: Mapping[str, str]) -> bytes:
        length = headers.get("content-length")
        if "transfer-encoding" in headers:
            raise HttpProblem(411, "length_required", "Send the body with a Content-Length; chunked bodies are not taken.")
        if length is not None and not (length.isascii() and length.isdecimal()):
            raise HttpProblem(400, "bad_request", f"Content-Length must be a number, got '{length[:40]}'.")
        digits, most = (length or "0").lstrip("0"), int(self.server.limits.max_body_mb * 2**20)
        if len(digits) > 18 or int(digits or 0) > most:
            size_text = f"{int(digits):,}" if len(digits) <= 18 else f"a {len(digits)}-digit number of"
            raise HttpProblem(413, "body_too_large", f"The body has {size_text} bytes; this server takes {most:,}.")
        size = int(digits or 0)
        self._patient.until += size / _SLOWEST_BYTES_S
        if size and headers.get("expect", "").lower() == "100-continue":
            self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        data = self.rfile.read(size)
        if len(data) != size:
            raise HttpProblem(400, "bad_request", f"The body ends after {len(data):,} of {size:,} bytes.")
        return data

    def _client_gone(self) -> bool:
        try:
            return can_be_read(self.connection.fileno(), timeout_s=0.0) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True

    def _send(self, reply: Reply) -> None:
        try:
            data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            reply = self._refusal(HttpProblem(500, "internal_error", f"The answer cannot be written as JSON: {error}."))
            data = json.dumps(reply.body).encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(data)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _stream(self, stream: EventStream) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        chunked = self.request_version != "HTTP/1.0"  # HTTP/1.0 streams end with the connection
        self.close_connection |= not chunked
        self.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Connection", "close")))
        self.end_headers()
        try:
            for event in stream.events:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event) if chunked else event)
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n" if chunked else b"")
        except Exception:
            self.close_connection = True  # the missing last chunk tells the client that the answer is incomplete
            raise
        finally:
            stream.events.close()


TEXT, OBJECT, FLAG, NUMBER = {"type": "string"}, {"type": "object"}, {"type": "boolean"}, {"type": "number"}
TEXTS, LIST = {"type": "array", "items": TEXT}, {"type": "array", "items": OBJECT}
COUNT = {"type": "integer", "minimum": 0}
_TYPES: Mapping[str, tuple[type | UnionType, str]] = {
    "string": (str, "a text"),
    "object": (dict, "an object"),
    "array": (list, "a list"),
    "boolean": (bool, "true or false"),
    "integer": (int, "a whole number"),
    "number": (int | float, "a number"),
}
"""{type in a schema: (type of its values, words for it)}"""


def check_body(body: Mapping[str, Any], fields: Mapping[str, Any], needed: Sequence[str], kind: str | None = None) -> None:
    """Refuse unknown fields, missing ones, and values of another type or outside their bounds; null means that an optional one is missing.

    Args:
        fields: {name: schema}
        needed: names of the fields that must be there.
        kind: word for programs; None: unknown_parameter, unsupported_parameter (not in ``enum``) or invalid_request.

    Raises HttpProblem: 400, with the choices.
    """

    def refusal(word: str, message: str) -> HttpProblem:
        return HttpProblem(400, kind or word, message, choices=fields)

    for name in needed:
        if name not in body:
            raise refusal("invalid_request", f"'{name}' is missing.")
    for name, value in body.items():
        if value is None and name not in needed:
            continue
        if name not in fields:
            raise refusal("unknown_parameter", f"'{name}' is not known.{did_you_mean(name, fields)}")
        schema, got = fields[name], f"got {value!r:.80}"
        if value not in schema.get("enum", [value]):
            raise refusal("unsupported_parameter", f"'{name}' can only be {' or '.join(map(repr, schema['enum']))} here, {got}.")
        python, words = _TYPES.get(schema.get("type", ""), (object, ""))
        if not isinstance(value, python) or (isinstance(value, bool) and python not in (bool, object)):
            raise refusal("invalid_request", f"'{name}' must be {words}, {got}.")
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        if isinstance(value, int | float) and not low <= value <= high:
            bounds = Bounds(low, high) if high < math.inf else f">= {low}"
            raise refusal("invalid_request", f"'{name}' must be {words} {bounds}, {got}.")


def json_content(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": dict(schema)}}


def route(
    about: str,
    answer: str,
    fields: Mapping[str, Any] | None = None,
    *,
    body: tuple[Mapping[str, Any], Sequence[str]] | None = None,
    status: str = "200",
    streams: bool = False,
) -> dict[str, Any]:
    """One method of a path.

    Args:
        body: (its fields, the required ones).
        streams: whether the answer may be server-sent events.
    """
    answered = {"type": "object", "properties": dict(fields)} if fields else OBJECT
    content = {**json_content(answered), **({"text/event-stream": {"schema": TEXT}} if streams else {})}
    responses = {status: {"description": answer, "content": content}, "default": {"$ref": "#/components/responses/Problem"}}
    made: dict[str, Any] = {"summary": about, "responses": responses}
    if body is not None:
        wanted, needed = body
        schema = {"type": "object", "properties": dict(wanted), "required": list(needed), "additionalProperties": False}
        made["requestBody"] = {"required": bool(needed), "content": json_content(schema)}
    return made


Route: TypeAlias = tuple[Callable[..., Reply | EventStream], dict[str, Any]]
"""(handler of the request and the values of the path's braces; its description by `route`)"""


class Routes:
    """A server's routes, and its description at /openapi.json and /docs: one table for both.

    Args:
        table: {"METHOD /path/{part}": route}; a part `{name:path}` may contain slashes.
        problem: schema of a refusal's body.
        kind: see `check_body`.
    """

    def __init__(self, title: str, table: Mapping[str, Route], problem: Mapping[str, Any], kind: str | None = None) -> None:
        refused = {"description": "What is wrong and the choices.", "content": json_content({"$ref": "#/components/schemas/Problem"})}
        self.document: dict[str, Any] = {
            "openapi": "3.1.0",
            "info": {"title": title, "version": __version__},
            "paths": {},
            "components": {
                "schemas": {"Problem": dict(problem)},
                "responses": {"Problem": refused},
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"token": []}, {}],
        }
        self._kind = kind
        self._handlers: dict[str, dict[str, tuple[Callable[..., Reply | EventStream], Mapping[str, Any] | None]]] = {
            "/openapi.json": {"GET": (lambda request: Reply(self.document), None)},
            "/docs": {"GET": (self._as_text, None)},
        }
        for place, (handler, described) in table.items():
            method, _, path = place.partition(" ")
            schema = described["requestBody"]["content"]["application/json"]["schema"] if "requestBody" in described else None
            self._handlers.setdefault(path, {})[method] = handler, schema
            parts = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in re.findall(r"\{(\w+)", path)]
            item = self.document["paths"].setdefault(path.replace(":path", ""), {"parameters": parts} if parts else {})
            item[method.lower()] = described
        self._patterns = {path: re.compile(re.sub(r"\{\w+\}", "([^/]+)", re.sub(r"\{\w+:path\}", "(.+)", path))) for path in self._handlers}

    def answer(self, request: HttpRequest) -> Reply | EventStream:
        """Answer a request. Raises HttpProblem: unknown path, a method that it lacks, or another body than described."""
        for path, handlers in self._handlers.items():
            if (match := self._patterns[path].fullmatch(request.path)) is not None:
                if request.method not in handlers:
                    methods = sorted(handlers)
                    message = f"{request.path[:200]} takes {' and '.join(methods)}, not {request.method}."
                    raise HttpProblem(405, "wrong_method", message, choices=methods, headers={"Allow": ", ".join(methods)})
                handler, schema = handlers[request.method]
                if schema is not None:
                    check_body(request.body, schema["properties"], schema["required"], self._kind)
                return handler(request, *match.groups())
        paths = sorted(path.replace(":path", "") for path in self._handlers)
        near = did_you_mean(request.path, paths)
        raise HttpProblem(404, "unknown_route", f"Unknown path {request.path[:200]}.{near}", choices=paths)

    def _as_text(self, request: HttpRequest) -> Reply:
        """Description as YAML, which a browser shows as text: nothing in it loads or runs."""
        written_out = json.loads(json.dumps(self.document))  # routes share parts, which would become aliases
        return Reply(yaml_text(written_out).encode(), content_type="text/plain; charset=utf-8")
