"""What is asked of a server, taken apart: header lines, target and JSON body, each refused in one sentence where it cannot be meant."""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Iterable, Mapping
from email.errors import FirstHeaderLineIsContinuationDefect, MisplacedEnvelopeHeaderDefect, MissingHeaderBodySeparatorDefect
from email.message import Message
from typing import Any
from urllib.parse import urlsplit

from embodied_rl.errors import in_short

DEEPEST = 64
"""Lists and objects inside each other in a body."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
_ONCE = frozenset({"host", "origin", "content-length", "content-type", "authorization"})
_HEADER_DEFECTS = (FirstHeaderLineIsContinuationDefect, MisplacedEnvelopeHeaderDefect, MissingHeaderBodySeparatorDefect)


class HttpProblem(Exception):
    """A request that is refused, or could not be done: status, a word for programs, a sentence for people."""

    def __init__(
        self, status: int, kind: str, message: str, *, choices: Iterable[str] = (), headers: Mapping[str, str] | None = None
    ) -> None:
        message = in_short(message) if status < 500 else message  # of a fault of ours every detail counts
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message
        self.choices = sorted(choices)
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        """{error, kind, choices}: the body of the answer."""
        return {"error": self.message, "kind": self.kind, "choices": self.choices}


def checked_headers(found: Message) -> dict[str, str]:
    """Headers by their name in lower case. Raises HttpProblem 400 for what two readers could understand differently."""
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
    """Of ``/path?query`` or ``http://host/path?query``. Raises HttpProblem 400."""
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
    """Raises HttpProblem 403 for a request that a page of another site may have made a browser on this machine send."""
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
    except ValueError:  # no address, or brackets that do not close
        return False
    return True


def parse_body(data: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    """Empty for no body. Raises HttpProblem 415 for one that is not sent as JSON, 400 for one that is none."""
    if not data:
        return {}
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpProblem(415, "not_json", "Send the body as 'Content-Type: application/json'.")
    return parse_object(data)


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises HttpProblem 400 for anything else: NaN, infinities and numbers that become one, nesting beyond `DEEPEST`."""
    try:
        found = json.loads(data, parse_constant=_no_constant, parse_float=_finite_float)
    except (ValueError, RecursionError) as error:
        raise HttpProblem(400, "bad_request", f"The body is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise HttpProblem(400, "bad_request", f"The body must be a JSON object, got {type(found).__name__}.")
    if data.count(b"[") + data.count(b"{") > DEEPEST and _deeper_than(found, DEEPEST):
        raise HttpProblem(400, "bad_request", f"The body nests lists and objects more than {DEEPEST} deep.")
    return found


def _deeper_than(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(_deeper_than(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value))


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond the numbers of a computer")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
