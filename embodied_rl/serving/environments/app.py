"""Routes of the environment service, described in OpenAPI: from a request's JSON to the hub and back."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from embodied_rl import __version__
from embodied_rl.config import SimConfig
from embodied_rl.errors import did_you_mean
from embodied_rl.serving import http_server as web
from embodied_rl.serving.environments.hub import EnvRequest, Hub, ServiceLimits
from embodied_rl.sim.wire import ENCODINGS, Encoding

_SEED = {**web.COUNT, "maximum": 2**63 - 1}
_ASCENDING = {**web.COUNT, "description": "Ascending over an environment's requests; the same number again is the same request again."}
_STATE = {
    "observation": {**web.OBJECT, "description": "Every part of the spec's observation: numbers as lists or base64, texts as they are."},
    "reward": web.NUMBER,
    "terminated": web.FLAG,
    "truncated": web.FLAG,
    "success": web.FLAG,
}
CALLS: Mapping[str, tuple[str, Mapping[str, Any], Sequence[str]]] = {
    "reset": ("Begin an episode; the same seed gives the same one.", {"seed": _SEED, "options": web.OBJECT}, ["seed"]),
    "step": ("One control step.", {"action": {"description": "A list of numbers in the simulator's units, or a text."}}, ["action"]),
    "snapshot": ("Save the running episode.", {}, []),
    "restore": ("Restore a saved episode.", {"snapshot": {"description": "What snapshot gave."}}, ["snapshot"]),
    "render": ("A picture of the environment.", {}, []),
}
"""{operation: (description, request fields besides its number, required fields)}"""
_IN_BATCH = {"id": web.TEXT, "operation": {**web.TEXT, "enum": list(CALLS)}}


_PROBLEM = {"type": "object", "properties": {"error": web.TEXT, "kind": web.TEXT, "choices": web.TEXTS}, "required": ["error", "kind"]}


class EnvironmentService:
    """An `HttpServer` in front of a `Hub`."""

    def __init__(
        self,
        simulators: Mapping[str, SimConfig],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        limits: ServiceLimits | None = None,
        http: web.ServerLimits | None = None,
    ) -> None:
        """Listen and serve until `close`.

        `token`: required from clients; "none": none, on the loopback only. None: EMBODIED_RL_TOKEN, or a new one (`token`).

        Raises UserError: others could reach it and there is no token, or the address is unavailable.
        """
        self.token, self.token_is_new = web.token_to_ask_for(token, host)
        """Token required from clients, and whether it is new and must be shown to the user."""
        self.hub = Hub(simulators, limits or ServiceLimits())
        self._routes = web.Routes("embodied_rl environment service", self._table(), _PROBLEM, "bad_request")
        try:
            self._server = web.HttpServer(
                self._routes.answer, host=host, port=port, admit=self._admit, limits=http, any_host_header=self.token is not None
            )
        except BaseException:
            self.hub.close()
            raise

    @property
    def url(self) -> str:
        """``http://127.0.0.1:PORT``"""
        return self._server.url

    def close(self) -> None:
        self._server.close()
        self.hub.close()

    # ---- routes -----------------------------------------------------------------------------------------------------

    def _admit(self, request: web.HttpRequest) -> None:
        if request.path not in ("/openapi.json", "/docs"):  # these pages reveal nothing about what runs here
            web.require_token(request, self.token)

    def _table(self) -> dict[str, web.Route]:
        most = self.hub.limits.max_batch
        make = {
            "sim": web.TEXT,
            "task": web.TEXT,
            "kwargs": web.OBJECT,
            "encoding": {**web.TEXT, "enum": list(ENCODINGS)},
            "request": web.TEXT,
        }
        make["count"] = {"type": "integer", "minimum": 1, "maximum": most, "default": 1}
        request = {"type": "object", "properties": _IN_BATCH, "required": list(_IN_BATCH)}
        batch = {"requests": {"type": "array", "minItems": 1, "maxItems": most, "items": request}}
        close = self._close, web.route("Close an environment.", "Its id.", {"closed": web.TEXT})
        made = {"environments": web.TEXTS, "spec": web.OBJECT}
        table: dict[str, web.Route] = {
            "GET /v1/health": (self._health, web.route("Status and limits of the service.", "Its state.")),
            "GET /v1/simulators": (
                lambda request: web.Reply({"simulators": self.hub.names}),
                web.route("The offered simulators.", "Their names.", {"simulators": web.TEXTS}),
            ),
            "GET /v1/environments": (
                lambda request: web.Reply({"environments": self.hub.describe()}),
                web.route("The existing environments.", "Each of them.", {"environments": web.LIST}),
            ),
            "POST /v1/environments": (
                self._make,
                web.route(
                    "Make environments, each in its own process.", "Their ids and their spec.", made, body=(make, ["sim"]), status="201"
                ),
            ),
            "POST /v1/batch": (
                self._batch,
                web.route("Requests to many environments at once.", "One result each, in order.", body=(batch, ["requests"])),
            ),
            "GET /v1/environments/{id}": (
                lambda request, env_id: web.Reply(self.hub.get(env_id).describe()),
                web.route("State of an environment.", "Its state."),
            ),
            "DELETE /v1/environments/{id}": close,
            "POST /v1/environments/{id}/close": close,
        }
        for name, (about, fields, needed) in CALLS.items():
            answer = _STATE if name in ("reset", "step") else None
            call = web.route(about, "Result of the operation.", answer, body=({"number": _ASCENDING, **fields}, list(needed)))
            table[f"POST /v1/environments/{{id}}/{name}"] = functools.partial(self._call, name), call
        return table

    def _close(self, request: web.HttpRequest, env_id: str) -> web.Reply:
        self.hub.close_environment(env_id)
        return web.Reply({"closed": env_id})

    def _call(self, operation: str, request: web.HttpRequest, env_id: str) -> web.Reply:
        (outcome,) = self.hub.run([EnvRequest(env_id, operation, request.body.get("number"), _arguments(operation, request.body))])
        return web.Reply(outcome.body, outcome.status)

    def _health(self, request: web.HttpRequest) -> web.Reply:
        limits = self.hub.limits
        return web.Reply(
            {"status": "ok", "version": __version__, "environments": self.hub.num_environments, "limits": dict(vars(limits))},
        )

    def _make(self, request: web.HttpRequest) -> web.Reply:
        body = request.body
        encoding: Encoding = body.get("encoding") or "lists"
        made = self.hub.make(body["sim"], body.get("task"), body.get("kwargs") or {}, body.get("count") or 1, encoding, body.get("request"))
        return web.Reply({"environments": [environment.env_id for environment in made], "spec": made[0].spec}, 201)

    def _batch(self, request: web.HttpRequest) -> web.Reply:
        items = request.body["requests"]
        if not 1 <= len(items) <= self.hub.limits.max_batch:
            raise web.HttpProblem(
                400, "bad_request", f"A batch holds between 1 and {self.hub.limits.max_batch} requests, got {len(items)}."
            )
        outcomes = self.hub.run([_of_batch(item) for item in items])
        # Bodies are JSON already, so pictures are not parsed again here.
        results = b",".join(b'{"status":%d,"body":%b}' % (outcome.status, outcome.body) for outcome in outcomes)
        whole = all(outcome.status == 200 for outcome in outcomes)
        return web.Reply(b'{"results":[%b]}' % results, 200 if whole else 207)


def _of_batch(item: object) -> EnvRequest:
    """Request of a batch. Raises HttpProblem 400."""
    if not isinstance(item, dict):
        raise web.HttpProblem(400, "bad_request", f"A request of a batch must be an object, got {type(item).__name__}.")
    operation = item.get("operation")
    if operation not in tuple(CALLS):
        message = f"operation {operation!r:.80} is not a choice.{did_you_mean(operation, CALLS)}"
        raise web.HttpProblem(400, "bad_request", message, choices=CALLS)
    _, fields, needed = CALLS[operation]
    web.check_body(item, {**_IN_BATCH, "number": _ASCENDING, **fields}, [*_IN_BATCH, *needed], "bad_request")
    return EnvRequest(item["id"], operation, item.get("number"), _arguments(operation, item))


def _arguments(operation: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in CALLS[operation][1] if name in body}
