"""The environment service described in OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0), for generated clients and pages that show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from embodied_rl import __version__
from embodied_rl.serving.environments.environment import ServiceLimits
from embodied_rl.sim.wire import ENCODINGS

_TEXT, _OBJECT, _FLAG = {"type": "string"}, {"type": "object"}, {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 0}
_TEXTS = {"type": "array", "items": _TEXT}
_NUMBER = {**_COUNT, "description": "Ascending over an environment's requests; the same number again is the same request again."}
_STATE = {
    "observation": {**_OBJECT, "description": "Every part of the spec's observation: numbers as lists or base64, texts as they are."},
    "reward": {"type": "number"},
    "terminated": _FLAG,
    "truncated": _FLAG,
    "success": _FLAG,
}
CALLS: Mapping[str, tuple[str, Mapping[str, Any], Sequence[str]]] = {
    "reset": ("Begin an episode; the same seed gives the same one.", {"seed": _COUNT, "options": _OBJECT}, ["seed"]),
    "step": ("One control step.", {"action": {"description": "A list of numbers in the simulator's units, or a text."}}, ["action"]),
    "snapshot": ("Save the running episode.", {}, []),
    "restore": ("Take up a saved episode.", {"snapshot": {"description": "What snapshot gave."}}, ["snapshot"]),
    "render": ("A picture of the environment.", {}, []),
}
"""{operation: (what it does, what its request says beside its number, which of that must be there)}"""


def described(limits: ServiceLimits) -> dict[str, Any]:
    """The whole document."""
    one = [{"name": "id", "in": "path", "required": True, "schema": _TEXT}]
    make = {"sim": _TEXT, "task": _TEXT, "kwargs": _OBJECT, "encoding": {**_TEXT, "enum": list(ENCODINGS)}, "request": _TEXT}
    make["count"] = {"type": "integer", "minimum": 1, "maximum": limits.max_batch, "default": 1}
    request = {"type": "object", "properties": {"id": _TEXT, "operation": {**_TEXT, "enum": list(CALLS)}}, "required": ["id", "operation"]}
    batch = {"requests": {"type": "array", "minItems": 1, "maxItems": limits.max_batch, "items": request}}
    paths: dict[str, dict[str, Any]] = {
        "/v1/health": {"get": _route("Whether the service runs, and its limits.", "Its state.")},
        "/v1/simulators": {"get": _route("Which simulators are offered.", "Their names.", {"simulators": _TEXTS})},
        "/v1/environments": {
            "get": _route("Which environments there are.", "Each of them.", {"environments": {"type": "array", "items": _OBJECT}}),
            "post": _route(
                "Make environments, each in its own process.",
                "Their ids and their spec.",
                {"environments": _TEXTS, "spec": _OBJECT},
                body=(make, ["sim"]),
                status="201",
            ),
        },
        "/v1/batch": {"post": _route("Requests to many environments at once.", "One result each, in order.", body=(batch, ["requests"]))},
        "/v1/environments/{id}": {
            "parameters": one,
            "get": _route("Where an environment stands.", "Its state."),
            "delete": _route("Close an environment.", "Its id.", {"closed": _TEXT}),
        },
        "/v1/environments/{id}/close": {"parameters": one, "post": _route("Close an environment.", "Its id.", {"closed": _TEXT})},
    }
    for name, (about, fields, needed) in CALLS.items():
        answer = _STATE if name in ("reset", "step") else None
        route = _route(about, "What came of it.", answer, body=({"number": _NUMBER, **fields}, list(needed)))
        paths[f"/v1/environments/{{id}}/{name}"] = {"parameters": one, "post": route}
    problem = {"type": "object", "properties": {"error": _TEXT, "kind": _TEXT, "choices": _TEXTS}, "required": ["error", "kind"]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "embodied_rl environment service", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Problem": problem},
            "responses": {
                "Problem": {"description": "What is wrong and the choices.", "content": _json({"$ref": "#/components/schemas/Problem"})}
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _route(
    about: str,
    answer: str,
    fields: Mapping[str, Any] | None = None,
    *,
    body: tuple[Mapping[str, Any], Sequence[str]] | None = None,
    status: str = "200",
) -> dict[str, Any]:
    """One method of a path; `body` is (its fields, those that must be there)."""
    answered = {"type": "object", "properties": dict(fields)} if fields else _OBJECT
    responses = {status: {"description": answer, "content": _json(answered)}, "default": {"$ref": "#/components/responses/Problem"}}
    route: dict[str, Any] = {"summary": about, "responses": responses}
    if body is not None:
        wanted, needed = body
        schema = {"type": "object", "properties": dict(wanted), "required": list(needed), "additionalProperties": False}
        route["requestBody"] = {"required": bool(needed), "content": _json(schema)}
    return route


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": dict(schema)}}
