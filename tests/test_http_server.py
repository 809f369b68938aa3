"""What comes over a socket and is no proper request: one JSON error in time, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from embodied_rl.errors import UserError
from embodied_rl.serving import http_server
from embodied_rl.serving.environments.hub import ServiceLimits
from embodied_rl.serving.http_server import EventStream, HttpRequest, HttpServer, Reply, ServerLimits, token_to_ask_for

LIMITS = ServerLimits(max_body_mb=2 / 16, max_connections=3, request_s=0.5)


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    def echo(request: HttpRequest) -> Reply:
        return Reply({"method": request.method, "path": request.path, "body": request.body, "gone": request.client_gone()})

    running = HttpServer(echo, limits=LIMITS)
    yield running
    running.close()


def sent(server: HttpServer, data: bytes, *, whole: bool = True) -> tuple[int, dict[str, object]]:
    """(status, JSON body) of the first answer; the connection's end is waited for. `whole`: nothing more is sent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(data)
        if whole:
            connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def posted(body: bytes, *headers: bytes, first: bytes = b"POST /x HTTP/1.1") -> bytes:
    head = [first, b"Host: 127.0.0.1", b"Content-Type: application/json", *headers]
    if not any(header.lower().startswith(b"content-length") for header in headers):
        head.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*head, b"", body])


def got(*headers: bytes, target: bytes = b"/x") -> bytes:
    return b"\r\n".join([b"GET " + target + b" HTTP/1.1", *headers, b"", b""])


LOCAL = b"Host: 127.0.0.1"


@pytest.mark.parametrize(
    ("data", "status", "part"),
    [
        (got(b"Host: [::1"), 403, "address or localhost"),
        (got(b"Host: evil.example"), 403, "address or localhost"),
        (got(LOCAL, b"Origin: http://evil.example"), 403, "evil.example"),
        (got(LOCAL, b"Origin: null"), 403, "null"),
        (got(LOCAL, target=b"http://[::1/"), 400, "target must be a path"),
        (got(LOCAL, target=b"x" * 70_000), 414, "65,536"),
        (posted(b"", b"Content-Length: " + b"9" * 5000), 413, "5000-digit"),
        (posted(b"", b"Content-Length: 131073"), 413, "131,073 bytes; this server takes 131,072"),
        (posted(b"", b"Content-Length: \xd9\xa3"), 400, "must be a number"),
        (posted(b"{}", b"Content-Length: 2", b"Content-Length: 3"), 400, "there twice"),
        (got(LOCAL, LOCAL), 400, "there twice"),
        (got(LOCAL, b"Content-Length : 2"), 400, "cannot be read"),
        (got(LOCAL, b"no colon here", b"Content-Length: 2"), 400, "cannot be read"),
        (got(LOCAL, b"X: folded\r\n over two lines"), 400, "cannot be read"),
        (got(*[b"X-%d: 1" % number for number in range(200)]), 431, ""),
        (b"GET /x\r\n\r\n", 400, "first line"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400, ""),
        (b"GET /x HTTP/9.9\r\n\r\n", 400, ""),
        (posted(b'{"a": 1'), 400, "not JSON"),
        (posted(b'{"a": 1e999}'), 400, "out of range"),
        (posted(b'{"a": -Infinity}'), 400, "not a JSON number"),
        (posted(b'{"a": %s}' % (b"9" * 5000)), 400, "not JSON"),
        (posted(b'{"a": %s1%s}' % (b"[" * 64, b"]" * 64)), 400, "64 levels"),
        (posted(b"[" * 100_000), 400, "not JSON"),
        (posted(b'{"a": "\xff"}'), 400, "not JSON"),
        (posted(b"\xef\xbb\xbf{}"), 400, "BOM"),
        (posted("{}".encode("utf-16")), 400, "not JSON"),
        (posted(b"{}", b"Content-Length: 7"), 400, "ends after 2 of 7"),
    ],
)
def test_what_cannot_be_meant_is_one_json_error(server: HttpServer, data: bytes, status: int, part: str) -> None:
    found, body = sent(server, data)
    assert found == status
    assert part in str(body["error"])
    assert "\n" not in str(body["error"])
    assert len(str(body["error"])) <= 400
    assert sent(server, posted(b'{"a": 1}'))[1]["body"] == {"a": 1}


def test_what_can_be_meant_is_answered(server: HttpServer) -> None:
    assert sent(server, b"\r\n" + got(b"Host: [::1]:80", b"Origin: http://[::1]:80", target=b"http://[::1]:80/a?b=c"))[1]["path"] == "/a"
    assert sent(server, posted(b'{"a": %s1%s}' % (b"[" * 63, b"]" * 63)))[0] == 200
    bare = b"POST /x HTTP/1.1\r\n" + LOCAL + b"\r\n\r\n"  # curl -X POST: no body, and no word of it
    assert sent(server, bare)[1]["body"] == {}
    assert sent(server, posted(b"{}", first=b"BREW /pot HTTP/1.1"))[1]["method"] == "BREW", "methods are the handler's affair"


def test_slow_requests_have_an_end(server: HttpServer) -> None:
    assert sent(server, b"POST /x HTTP/1.1\r\nHost: 127.0", whole=False)[0] == 408
    assert sent(server, posted(b'{"a"', b"Content-Length: 20"), whole=False)[1]["kind"] == "too_slow"


def test_a_body_is_not_read_for_a_request_that_is_refused_by_its_head(server: HttpServer) -> None:
    """Nothing of it is sent, and the connection is not kept: what came would be taken for the next request."""
    began = time.monotonic()
    assert sent(server, b"POST /x HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 100000\r\n\r\n", whole=False)[0] == 403
    assert time.monotonic() - began < LIMITS.request_s


def test_a_stream_for_a_client_of_http_1_0_ends_with_its_connection() -> None:
    streaming = HttpServer(lambda request: EventStream(event for event in (b"data: 1\n\n", b"data: 2\n\n")))
    for version, told in ((b"1.0", b"data: 1\n\ndata: 2\n\n"), (b"1.1", b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n")):
        with socket.create_connection(("127.0.0.1", streaming.port), timeout=60) as connection:
            connection.sendall(b"GET / HTTP/" + version + b"\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
        assert body == told
        assert (b"chunked" in head) == (version == b"1.1")
    streaming.close()


def test_a_stream_that_fails_is_cut_off_for_its_client_and_told_to_us(capsys: pytest.CaptureFixture[str]) -> None:
    def events() -> Iterator[bytes]:
        yield b"data: 1\n\n"
        raise KeyError("our own mistake")

    streaming = HttpServer(lambda request: EventStream(events()))
    with socket.create_connection(("127.0.0.1", streaming.port), timeout=60) as connection:
        connection.sendall(got(LOCAL))
        body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")[2]
    assert body == b"9\r\ndata: 1\n\n\r\n", "without the last chunk"
    assert "KeyError: 'our own mistake'" in capsys.readouterr().err
    streaming.close()


def test_a_client_that_asks_before_it_sends_its_body_is_told_to(server: HttpServer) -> None:
    """As curl does before a megabyte; one whose head is refused hears that instead."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(posted(b"", b"Content-Length: 2", b"Expect: 100-continue", b"Connection: close"))
        assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"{}")
        assert b"".join(iter(lambda: connection.recv(65536), b"")).startswith(b"HTTP/1.1 200 ")
    assert sent(server, posted(b"", b"Content-Length: 131073", b"Expect: 100-continue"), whole=False)[0] == 413


def test_a_refusal_arrives_though_the_body_is_still_being_sent(server: HttpServer) -> None:
    # A connection that is closed over unread bytes is reset, and the answer in its way is lost.
    assert sent(server, posted(b"x" * 2_000_000))[0] == 413


def held(server: HttpServer) -> socket.socket:
    """A connection that was answered and stays; one that has just ended may still count, so it asks until there is room."""
    deadline = time.monotonic() + 20
    while True:
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        connection.sendall(got(LOCAL))
        if connection.recv(65536).startswith(b"HTTP/1.1 200"):
            return connection
        connection.close()
        assert time.monotonic() < deadline, "no room"
        time.sleep(0.05)


def test_one_connection_too_many_is_told(server: HttpServer) -> None:
    with held(server), held(server), held(server):
        status, body = sent(server, b"", whole=False)
    assert (status, body["kind"]) == (503, "busy")


def test_one_connection_too_many_is_told_before_it_has_asked(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As most clients do, it sends head and body before it reads."""
    monkeypatch.setattr(http_server, "_LINGER_S", 60.0)
    with held(server), held(server), held(server), socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, body = posted(b"x" * 2**20).partition(b"\r\n\r\n")
        for part in (head, body, body):
            connection.sendall(part)
    assert answer.startswith(b"HTTP/1.1 503")


def test_a_client_behind_a_high_descriptor_is_there(server: HttpServer) -> None:
    """A program with a thousand simulators has descriptors that `select.select` does not know."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"a process may have {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while opened.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        assert sent(server, posted(b"{}", b"Connection: close"), whole=False)[1]["gone"] is False


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_is_none(port: int) -> None:
    with pytest.raises(UserError, match="0 to 65535"):
        HttpServer(lambda request: Reply({}), port=port)


@pytest.mark.parametrize("token", [" correct horse", "correct horse\n", "correct h\u00f6rse", "correct\thorse", "correct \udc80"])
def test_a_token_that_no_header_carries_is_refused(token: str) -> None:
    with pytest.raises(UserError, match=r"^token must consist of printable ASCII"):
        token_to_ask_for(token, "127.0.0.1")
    assert token_to_ask_for("correct horse", "127.0.0.1") == ("correct horse", False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_limits_are_finite(value: float) -> None:
    with pytest.raises(UserError, match="max_body_mb must be a finite number above 0"):
        ServerLimits(max_body_mb=value)
    with pytest.raises(UserError, match="idle_s must be a finite number above 0"):
        ServiceLimits(idle_s=value)
