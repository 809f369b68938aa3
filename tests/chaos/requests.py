"""Attack a live environment service and a live agent proxy: each wrong request gets one JSON error, and nothing stays behind."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied_rl.config import SimConfig
from embodied_rl.generation.tokens import ScriptedTokens
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.tiny_language import train_tokenizer
from embodied_rl.serving.agents.app import AgentProxy, ProxyOptions
from embodied_rl.serving.environments.app import EnvironmentService
from embodied_rl.serving.environments.hub import ServiceLimits, offered_simulators
from embodied_rl.serving.http_server import ServerLimits
from tests.chaos.harness import Attack
from tests.chaos.http_mistakes import Sent, Targets, draw, message

_END = 2
_IN_TIME_S = 30.0
"""For an answer, on a busy machine; slow requests are given up after `_REQUEST_S`."""
_REQUEST_S = 0.5
_LONGEST = 400
"""Characters of an error."""
_LEAKS_EVERY = 200
_TOYS = {"puck": SimConfig("puck", "tests.sim.check_toys:Puck"), "talk": SimConfig("talk", "tests.sim.toy:TalkingSim")}


@dataclass(frozen=True)
class Answered:
    status: int
    kind: str
    """Of the content."""
    body: bytes


class Requests(Attack):
    name = "requests"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        http = ServerLimits(max_body_mb=2.0, request_s=_REQUEST_S)
        self._envs = EnvironmentService(
            {**offered_simulators(), **_TOYS}, token="none", limits=ServiceLimits(max_environments=4), http=http
        )
        tokenizer = ChatTokenizer(train_tokenizer(["go left", "go right", "Where is the cup?"] * 4, 300), "tiny")
        answer = [*(int(token) for token in tokenizer.encode("go left")), _END]
        options = ProxyOptions(model="tiny", stop_ids=(_END,))
        self._agent = AgentProxy(ScriptedTokens(lambda request: answer), tokenizer, options, http=http)
        self._ports = {"environments": _port(self._envs.url), "agent": _port(self._agent.base_url.removesuffix("/v1"))}
        live, talking, closed = (self._make(sim) for sim in ("puck", "talk", "puck"))
        self._right("environments", "DELETE", f"/v1/environments/{closed}")
        self._there = Targets(live, talking, closed, folder / "ran")
        self._right("environments", "POST", f"/v1/environments/{talking}/reset", {"seed": 1})
        self._first = self._observed()
        self._num_requests, self._num_refused = 0, 0
        self._before = self._held()

    def attempt(self, number: int, chance: random.Random) -> str | None:
        sent = draw(self._there, chance)
        failure = self._answers_to(sent) or self._goes_on()
        if failure is None and number % _LEAKS_EVERY == _LEAKS_EVERY - 1:
            failure = self._leaks()
        return None if failure is None else f"{failure} | sent to {sent.server}: {sent.data[:300]!r}{'…' * (len(sent.data) > 300)}"

    def count(self) -> dict[str, int]:
        return {"requests": self._num_requests, "refused": self._num_refused, "leaked": int(self._leaks() is not None)}

    def close(self) -> None:
        self._agent.close()
        self._envs.close()

    # ---- one attack -------------------------------------------------------------------------------------------------

    def _answers_to(self, sent: Sent) -> str | None:
        self._num_requests += sent.answers * sent.copies
        begun = time.monotonic()
        try:
            if sent.copies == 1:
                answers = [self._exchange(sent)]
            else:
                with ThreadPoolExecutor(sent.copies) as pool:
                    answers = list(pool.map(self._exchange, [sent] * sent.copies))
        except OSError as error:
            return f"no answer: {type(error).__name__}: {error}"
        if time.monotonic() - begun > _IN_TIME_S:
            return f"answered after {time.monotonic() - begun:.0f} s only"
        if self._there.marker.exists():
            self._there.marker.unlink()
            return "code that the request names was run"
        for found in answers:
            if not found:
                return "closed without an answer"
            for answer in found:
                self._num_refused += answer.status >= 400
                if (wrong := _wrong(answer, sent)) is not None:
                    return wrong
            if len(found) != sent.answers and found[-1].status < 400 and not sent.ends:
                return f"{len(found)} answers to {sent.answers} requests"
        return None

    def _exchange(self, sent: Sent) -> list[Answered]:
        with socket.create_connection(("127.0.0.1", self._ports[sent.server]), timeout=_IN_TIME_S) as connection:
            connection.sendall(sent.data)
            if sent.ends:
                connection.shutdown(socket.SHUT_WR)
            data, found = b"", list[Answered]()
            bodiless = sent.data.startswith(b"HEAD ")
            while sent.ends or len(found) < sent.answers:
                part = connection.recv(2**16)
                data += part
                while (taken := _first(data, bodiless)) is not None:
                    if taken[0].status != 100:
                        found.append(taken[0])
                    data = data[taken[1] :]
                if not part:
                    break
        return [*found, Answered(0, "", data)] if data else found

    def _goes_on(self) -> str | None:
        """Whether a correct request is answered as ever."""
        try:
            if self._observed() != self._first:
                return "an environment is not what it was after its reset"
            asked = {"messages": [{"role": "user", "content": "go"}]}
            told = self._right("agent", "POST", "/v1/chat/completions", asked)["choices"][0]["message"]["content"]
            return None if told == "go left" else f"the agent proxy says {told!r}"
        except (OSError, AssertionError) as error:
            return f"a correct request afterwards fails: {type(error).__name__}: {error}"

    def _observed(self) -> Any:
        return self._right("environments", "POST", f"/v1/environments/{self._there.live}/reset", {"seed": 7})["observation"]["state"]

    def _make(self, sim: str) -> str:
        return str(self._right("environments", "POST", "/v1/environments", {"sim": sim})["environments"][0])

    def _right(self, server: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        (answer,) = self._exchange(Sent(server, message(method, path, body)))  # type: ignore[arg-type]
        assert answer.status in (200, 201), f"{method} {path}: {answer.status} {answer.body[:300]!r}"
        return json.loads(answer.body)

    # ---- what stays behind ------------------------------------------------------------------------------------------

    def _held(self) -> dict[str, int]:
        open_files = len(os.listdir("/proc/self/fd"))
        return {"threads": threading.active_count(), "descriptors": open_files, "environments": self._envs.hub.num_environments}

    def _leaks(self) -> str | None:
        """What is held beyond the beginning, once connections that end have ended; sessions are ended here."""
        for session in self._right("agent", "GET", "/v1/sessions")["sessions"]:
            if session["in_flight"]:
                return f"session {session['id']} has {session['in_flight']} requests in flight for ever"
            self._right("agent", "POST", f"/v1/sessions/{session['id']}/end", {})
        self._agent.take_finished()
        until = time.monotonic() + _IN_TIME_S
        while any(now > self._before[what] for what, now in self._held().items()):
            if time.monotonic() > until:
                return f"left behind: {self._held()}, at first {self._before}"
            time.sleep(0.05)
        return None


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _first(data: bytes, bodiless: bool) -> tuple[Answered, int] | None:
    """The first whole answer and its size."""
    head, end, rest = data.partition(b"\r\n\r\n")
    if not end:
        return None
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])}
    status, kind = int(head.split()[1]), headers.get(b"content-type", b"").decode("latin-1")
    size = 0 if bodiless else int(headers.get(b"content-length", b"0"))
    if headers.get(b"transfer-encoding") == b"chunked":
        place = rest.find(b"0\r\n\r\n")
        return None if place < 0 else (Answered(status, kind, rest[:place]), len(head) + 4 + place + 5)
    return None if len(rest) < size else (Answered(status, kind, rest[:size]), len(head) + 4 + size)


def _wrong(answer: Answered, sent: Sent) -> str | None:
    """What is wrong with an answer: it must be of the 200s where that is harmless, or a refusal of one JSON line."""
    if answer.status == 207:  # a batch: each part is an answer of its own
        parts = [(int(part["status"]), part["body"]) for part in json.loads(answer.body)["results"]]
    elif answer.kind.startswith("text/event-stream"):
        return None if answer.status == 200 and answer.body else "an empty stream"
    elif answer.kind != "application/json":
        return f"no JSON but {answer.kind!r}: {answer.status} {answer.body[:200]!r}"
    else:
        try:
            parts = [(answer.status, json.loads(answer.body) if answer.body else {})]
        except ValueError:
            return f"no JSON: {answer.body[:200]!r}"
    for status, body in parts:
        if 200 <= status < 300:
            if sent.harmless:
                continue
            return f"answered with {status}: {str(body)[:200]}"
        error = body.get("error")
        text = error.get("message") if isinstance(error, dict) else error
        if status == 503 and sent.ends and isinstance(error, dict) and error["code"] == "aborted":
            continue  # it said that it was gone
        if not 400 <= status < 500:
            return f"answered with {status}: {text!r:.300}"
        if not isinstance(text, str) or not text or "\n" in text or len(text) > _LONGEST:
            return f"{status} with an error that is no line of at most {_LONGEST} characters: {text!r:.500}"
    return None
