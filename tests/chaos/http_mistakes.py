"""Requests that no client should send, drawn from correct ones: head, body, fields, order, time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Server = Literal["environments", "agent"]


@dataclass(frozen=True)
class Sent:
    """What goes over one connection."""

    server: Server
    data: bytes
    ends: bool = False
    """Say at once that nothing more will come; otherwise the connection stays open until the answer is there."""
    answers: int = 1
    """Requests in `data`."""
    copies: int = 1
    """Connections that send it at the same time."""
    harmless: bool = True
    """Whether an answer of the 200s is in order."""


@dataclass(frozen=True)
class Targets:
    """What there is to ask for."""

    live: str
    """An environment that moves: one number from -1 to 1."""
    talking: str
    """One that takes texts."""
    closed: str
    marker: Path
    """No request may make this file."""


NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308, "", " ", "x", "ä日\u0000", "\ud800", "x" * 5000,
    "../../etc/passwd",
    "os:system", "null", [], [[]], [None], [1, [2, [3]]], [0.1] * 500, {}, {"": None}, {"a": {"b": []}}, {"__class__": "x"},
    {"target": "os:system"},
)  # fmt: skip


def message(
    method: str,
    path: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    key: str | None = "agent",
    raw: bytes | None = None,
) -> bytes:
    """A correct request, but for what the caller makes wrong in it."""
    data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    head = {"Host": "127.0.0.1", "Content-Type": "application/json"}
    if key is not None:
        head["Authorization"] = f"Bearer {key}"
    if data or method == "POST":
        head["Content-Length"] = str(len(data))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in {**head, **(headers or {})}.items())]
    return "\r\n".join([*lines, "", ""]).encode() + data


def correct(there: Targets) -> list[tuple[Server, str, str, dict[str, Any] | None]]:
    """(server, method, path, body) of requests that are answered with 200 and leave everything as it is, or are mended by a reset."""
    one, batch = f"/v1/environments/{there.live}", [{"id": there.live, "operation": "reset", "seed": 3, "number": None}]
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"}]
    called = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "cup"}'}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    talk = [
        *said,
        {"role": "assistant", "content": "go left", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    used = [
        *said[1:],
        {"role": "assistant", "content": [{"type": "text", "text": "go"}, {"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "ok"}, {"type": "text", "text": "and?"}]},
    ]
    offered, named = [{"name": "look", "input_schema": {}}], [{"type": "function", "name": "look", "parameters": {}, "strict": False}]
    items = [
        *said,
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "ok"},
    ]
    return [
        ("environments", "GET", "/v1/health", None),
        ("environments", "GET", "/v1/simulators", None),
        ("environments", "GET", "/v1/environments", None),
        ("environments", "GET", one, None),
        ("environments", "POST", f"{one}/reset", {"seed": 1, "options": {}, "number": None}),
        ("environments", "POST", f"{one}/step", {"action": [0.5]}),
        ("environments", "POST", f"{one}/snapshot", {}),
        ("environments", "POST", f"{one}/restore", {"snapshot": "AAAA"}),
        ("environments", "POST", f"{one}/render", {}),
        ("environments", "POST", f"/v1/environments/{there.talking}/step", {"action": "hello"}),
        ("environments", "POST", "/v1/batch", {"requests": batch}),
        ("environments", "POST", "/v1/environments", {"sim": "nothing", "task": None, "kwargs": {}, "count": 1, "encoding": "lists"}),
        ("agent", "GET", "/v1/models", None),
        ("agent", "GET", "/v1/sessions", None),
        ("agent", "POST", "/v1/sessions", {"id": "named", "metadata": {"task": 1}}),
        ("agent", "POST", "/v1/sessions/agent/reward", {"reward": 0.5, "turn": None, "reward_id": "once"}),
        ("agent", "POST", "/v1/chat/completions", {"model": "tiny", "messages": said, "max_tokens": 5, "temperature": 1.0, "seed": 1}),
        ("agent", "POST", "/v1/chat/completions", {"messages": talk, "tools": tools, "tool_choice": "auto", "top_k": 3, "top_p": 0.5}),
        ("agent", "POST", "/v1/chat/completions", {"messages": said, "stop": ["x"], "logprobs": True, "n": 1, "stream_options": {}}),
        ("agent", "GET", "/openapi.json", None),
        ("agent", "POST", "/v1/messages", {"max_tokens": 5, "system": "Be brief.", "messages": said[1:], "stop_sequences": ["x"]}),
        ("agent", "POST", "/v1/messages", {"max_tokens": 5, "messages": used, "tools": offered, "tool_choice": {"type": "auto"}}),
        ("agent", "POST", "/v1/messages/count_tokens", {"messages": used, "tools": offered, "output_config": {"format": None}}),
        ("agent", "POST", "/v1/responses", {"input": "go", "instructions": "Be brief.", "max_output_tokens": 5, "top_p": 0.5}),
        ("agent", "POST", "/v1/responses", {"input": items, "tools": named, "tool_choice": "auto", "text": {"format": {"type": "text"}}}),
    ]  # fmt: skip


def draw(there: Targets, chance: random.Random) -> Sent:
    """One attack."""
    kinds: dict[Callable[[Targets, random.Random], Sent], int] = {
        wrong_fields: 40, damaged_bytes: 20, forged_head: 15, wrong_json: 10, wrong_place: 10, wrong_action: 8,
        targets_in_arguments: 2, several_at_once: 3, in_a_row: 4, slow: 1,
    }  # fmt: skip
    return chance.choices(list(kinds), list(kinds.values()))[0](there, chance)


def wrong_fields(there: Targets, chance: random.Random) -> Sent:
    """One value anywhere in a correct body becomes another; or a key is added, or lost."""
    server, method, path, body = chance.choice([found for found in correct(there) if found[3] is not None])
    body = json.loads(json.dumps(body))
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            places.append((value, key))
            if isinstance(item, dict | list):
                walk(item)

    walk(body)
    if places:
        holder, key = chance.choice(places)
        how = chance.random()
        if how < 0.1 and isinstance(holder, dict):
            del holder[key]
        elif how < 0.2 and isinstance(holder, dict):
            holder[chance.choice(["sedd", "", "kwargs", "x" * 3000, "ä", "__init__", "number"])] = chance.choice(NASTY)
        else:
            holder[key] = chance.choice(NASTY)
    return Sent(server, message(method, path, body))


def damaged_bytes(there: Targets, chance: random.Random) -> Sent:
    """Bytes of a correct request are flipped, cut out, doubled, or its end is missing."""
    server, method, path, body = chance.choice(correct(there))
    data = bytearray(message(method, path, body))
    for _ in range(chance.choice([1, 1, 2, 5])):
        place = chance.randrange(len(data))
        length = chance.choice([1, 2, 10, 100])
        how = chance.randrange(5)
        if how == 0:
            data[place] = chance.randrange(256)
        elif how == 1:
            del data[place : place + length]
        elif how == 2:
            data[place:place] = data[place : place + length]
        elif how == 3:
            data[place:place] = bytes(chance.randrange(256) for _ in range(length))
        else:
            del data[place:]
        if not data:
            data = bytearray(b"\x00")
    return Sent(server, bytes(data), ends=True)


def forged_head(there: Targets, chance: random.Random) -> Sent:
    """Names, origins, lengths, encodings and versions that are not so."""
    server, method, path, body = chance.choice(correct(there))
    forged = chance.choice(
        [
            {"Host": chance.choice(["evil.example", "[::1", "127.0.0.1.evil.example", "", "127.0.0.1@evil", "localhost:x", "ä",
                "[]", "a" * 3000])},
            {"Origin": chance.choice(["http://evil.example", "null", "", "file://", "http://[::1", "http://127.0.0.1:1"])},
            {"Content-Length": chance.choice(["9" * 5000, "-1", "1e3", "+5", "0x10", " 5 5", "５", "99999999999", "5,5", "", "nan"])},
            {"Transfer-Encoding": chance.choice(["chunked", "gzip", "identity, chunked", "x"])},
            {"Content-Type": chance.choice(["text/plain", "multipart/form-data", "application/x-www-form-urlencoded", "",
                "application/json2"])},
            {"Authorization": chance.choice(["Bearer", "Basic YTpi", "Bearer ä", "Bearer a b c", "Bearer " + "x" * 9000,
                "Bearer ../x", ""])},
            {"Connection": "close"},
            {"Expect": "100-continue"},
            {"X-Long": "x" * 70_000},
            {"X y": "1"},
            {"X": "1\r\n folded"},
            {"X": "a\x00b"},
            {f"X-{number}": "1" for number in range(150)},
        ]
    )  # fmt: skip
    if "Transfer-Encoding" in forged:
        chunks = message("POST", path, None, headers=forged).replace(b"Content-Length: 0\r\n", b"") + b"5\r\nhello\r\n0\r\n\r\n"
        return Sent(server, chunks, ends=True, harmless=False)
    return Sent(server, message(method, path, body, headers=forged), ends=True)


def wrong_json(there: Targets, chance: random.Random) -> Sent:
    """Bodies that are no JSON object, too deep, too large, or not of this encoding."""
    server, _, path, _ = chance.choice([found for found in correct(there) if found[1] == "POST"])
    deep = chance.choice([65, 500, 990, 1100, 100_000])
    raw = chance.choice(
        [
            b"[" * deep, b'{"a":' * deep, b'{"a":%s%s}' % (b"[" * deep, b"]" * deep), b"null", b"[]", b"5", b'"text"', b"{", b"{]",
            b'{"a" 1}',
            b'{"a":NaN}', b'{"a":-Infinity}', b'{"seed":1e999}', b'{"seed":%s}' % (b"9" * 5000), b'{"a":"\xff"}', b'{"a":"\x00"}',
            b"\xef\xbb\xbf{}",
            '{"a":1}'.encode("utf-16"), b"{'a':1}", b'{"a":1}{"b":2}', b"\x80\x04K\x05.", b" " * 3_000_000,
            b'{"a":"%s"}' % (b"x" * 3_000_000),
            b'{"seed":[%s0]}' % (b"0," * 300_000), b'{"a":1,"a":2}', b"--x\r\n", b"{}" * 1000,
        ]
    )  # fmt: skip
    return Sent(server, message("POST", path, raw=raw), harmless=path.startswith("/v1/environments/") or raw == b'{"a":1,"a":2}')


def wrong_place(there: Targets, chance: random.Random) -> Sent:
    """Methods and paths that are none, environments and sessions that are not there, or no more."""
    server, method, path, body = chance.choice(correct(there))
    if chance.random() < 0.4:
        method = chance.choice(
            ["PUT", "PATCH", "OPTIONS", "TRACE", "BREW", "get", "CONNECT", "P" * 500, "DELETE" if "/sessions" in path else "PUT"]
        )
    else:
        gone = chance.choice([there.closed, "nothing", "..", "%2e%2e", "a" * 5000, "ä".encode().decode("latin-1"), "0"])
        places = [
            f"/v1/environments/{gone}",
            f"/v1/environments/{gone}/step",
            f"/v1/environments/{there.live}/{gone}",
            f"/v1/sessions/{gone}/end",
        ]
        places += [
            f"/v1/sessions/{gone}",
            f"/{gone}",
            f"//{gone}",
            f"http://[::1/{gone}",
            "*",
            "/",
            f"/v1/{gone}?a=b#c",
            "x",
            "/v1/environments/",
        ]
        path, body = chance.choice(places), {"action": [0.0]} if method == "POST" else None
    return Sent(server, message(method, path, body), harmless=False)


def wrong_action(there: Targets, chance: random.Random) -> Sent:
    """Actions that are no numbers, too many, infinite, or texts without an end."""
    raw = chance.choice(
        [b"NaN", b"Infinity", b"1e300", b"1e999", b'["NaN"]', b"[NaN]", b"[1e300]", b'["x"]', b"[[]]", b"[null]", b"[1,2]", b"{}",
        b'"text"', b"[true]",
         b"[%s]" % (b"9" * 400), b'"%s"' % (b"x" * 100_000), b'"\\ud800"', b"5", b'["1"]']
    )  # fmt: skip
    path = f"/v1/environments/{chance.choice([there.live, there.talking])}/step"
    return Sent("environments", message("POST", path, raw=b'{"action":%b}' % raw))


def targets_in_arguments(there: Targets, chance: random.Random) -> Sent:
    """Code that a request names."""
    touch = f"touch {there.marker}"
    sim, kwargs = chance.choice(
        [
            ("text_task", {"environment": "os:system", "command": touch}),
            ("text_task", {"environment": "subprocess:getoutput", "cmd": touch}),
            ("custom", {"target": "os:system", "command": touch}),
            ("program", {"command": touch}),
            ("gem_guess_number", {"opponents": "os:system", "environment": "os:system", "command": touch}),
            ("os:system", {"command": touch}),
            ("remote", {"url": "http://127.0.0.1:1", "sim": "cartpole"}),
        ]
    )
    return Sent("environments", message("POST", "/v1/environments", {"sim": sim, "kwargs": kwargs}), harmless=False)


def several_at_once(there: Targets, chance: random.Random) -> Sent:
    """The same request from twenty connections."""
    server, method, path, body = chance.choice(correct(there))
    return Sent(server, message(method, path, body), copies=20)


def in_a_row(there: Targets, chance: random.Random) -> Sent:
    """Several requests in one packet, before the first was answered."""
    server = chance.choice(["environments", "agent"])
    some = [found for found in correct(there) if found[0] == server]
    number = chance.randint(2, 6)
    return Sent(server, b"".join(message(*chance.choice(some)[1:]) for _ in range(number)), answers=number)  # type: ignore[arg-type]


def slow(there: Targets, chance: random.Random) -> Sent:
    """The beginning of a request, and then nothing."""
    server, method, path, body = chance.choice([found for found in correct(there) if found[3] is not None])
    data = message(method, path, body)
    return Sent(server, data[: chance.randrange(1, len(data))], harmless=False)
