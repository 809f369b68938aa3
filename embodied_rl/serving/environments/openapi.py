"""What the environment service's routes take and give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from embodied_rl.serving.environments.environment import ServiceLimits
from embodied_rl.serving.openapi import COUNT, FLAG, NUMBER, OBJECT, TEXT, TEXTS, Paths, document, route
from embodied_rl.sim.wire import ENCODINGS

_ASCENDING = {**COUNT, "description": "Ascending over an environment's requests; the same number again is the same request again."}
_STATE = {
    "observation": {**OBJECT, "description": "Every part of the spec's observation: numbers as lists or base64, texts as they are."},
    "reward": NUMBER,
    "terminated": FLAG,
    "truncated": FLAG,
    "success": FLAG,
}
CALLS: Mapping[str, tuple[str, Mapping[str, Any], Sequence[str]]] = {
    "reset": ("Begin an episode; the same seed gives the same one.", {"seed": COUNT, "options": OBJECT}, ["seed"]),
    "step": ("One control step.", {"action": {"description": "A list of numbers in the simulator's units, or a text."}}, ["action"]),
    "snapshot": ("Save the running episode.", {}, []),
    "restore": ("Take up a saved episode.", {"snapshot": {"description": "What snapshot gave."}}, ["snapshot"]),
    "render": ("A picture of the environment.", {}, []),
}
"""{operation: (what it does, what its request says beside its number, which of that must be there)}"""


def described(limits: ServiceLimits) -> dict[str, Any]:
    """The whole document."""
    one = [{"name": "id", "in": "path", "required": True, "schema": TEXT}]
    make = {"sim": TEXT, "task": TEXT, "kwargs": OBJECT, "encoding": {**TEXT, "enum": list(ENCODINGS)}, "request": TEXT}
    make["count"] = {"type": "integer", "minimum": 1, "maximum": limits.max_batch, "default": 1}
    request = {"type": "object", "properties": {"id": TEXT, "operation": {**TEXT, "enum": list(CALLS)}}, "required": ["id", "operation"]}
    batch = {"requests": {"type": "array", "minItems": 1, "maxItems": limits.max_batch, "items": request}}
    paths: Paths = {
        "/v1/health": {"get": route("Whether the service runs, and its limits.", "Its state.")},
        "/v1/simulators": {"get": route("Which simulators are offered.", "Their names.", {"simulators": TEXTS})},
        "/v1/environments": {
            "get": route("Which environments there are.", "Each of them.", {"environments": {"type": "array", "items": OBJECT}}),
            "post": route(
                "Make environments, each in its own process.",
                "Their ids and their spec.",
                {"environments": TEXTS, "spec": OBJECT},
                body=(make, ["sim"]),
                status="201",
            ),
        },
        "/v1/batch": {"post": route("Requests to many environments at once.", "One result each, in order.", body=(batch, ["requests"]))},
        "/v1/environments/{id}": {
            "parameters": one,
            "get": route("Where an environment stands.", "Its state."),
            "delete": route("Close an environment.", "Its id.", {"closed": TEXT}),
        },
        "/v1/environments/{id}/close": {"parameters": one, "post": route("Close an environment.", "Its id.", {"closed": TEXT})},
    }
    for name, (about, fields, needed) in CALLS.items():
        answer = _STATE if name in ("reset", "step") else None
        call = route(about, "What came of it.", answer, body=({"number": _ASCENDING, **fields}, list(needed)))
        paths[f"/v1/environments/{{id}}/{name}"] = {"parameters": one, "post": call}
    problem = {"type": "object", "properties": {"error": TEXT, "kind": TEXT, "choices": TEXTS}, "required": ["error", "kind"]}
    return document("embodied_rl environment service", paths, problem)
