"""A service described in OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0), for generated clients; and a page of it to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from embodied_rl import __version__
from embodied_rl.serving.http_server import Reply

TEXT, OBJECT, FLAG, NUMBER = {"type": "string"}, {"type": "object"}, {"type": "boolean"}, {"type": "number"}
TEXTS = {"type": "array", "items": TEXT}
COUNT = {"type": "integer", "minimum": 0}

Paths = dict[str, dict[str, Any]]
"""{path: {method: what it takes and gives}}"""


def json_content(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON body of a schema."""
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
        fields: of the answer.
        body: (its fields, those that must be there).
        streams: whether the answer may come as server-sent events.
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


def document(title: str, paths: Paths, problem: Mapping[str, Any]) -> dict[str, Any]:
    """The whole description. `problem`: the schema of a refusal's body."""
    refused = {"description": "What is wrong and the choices.", "content": json_content({"$ref": "#/components/schemas/Problem"})}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Problem": dict(problem)},
            "responses": {"Problem": refused},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def page(described: Mapping[str, Any]) -> Reply:
    """A description as a page to read: each path with its methods, what they take and what they give. It loads nothing and runs nothing."""
    info = described["info"]
    sections = [
        _section(path, method, found)
        for path, item in described["paths"].items()
        for method, found in item.items()
        if isinstance(found, Mapping)
    ]
    title = escape(f"{info['title']} {info['version']}")
    body = "".join(sections)
    text = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>'
        f'<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>{body}</html>'
    )
    policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return Reply(text.encode(), headers=policy, content_type="text/html; charset=utf-8")


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222;background:#fff}"
    "h2{font-size:1em;margin:2em 0 .3em;font-family:monospace}b{background:#246;color:#fff;padding:.1em .5em;border-radius:3px}"
    "table{border-collapse:collapse;margin:.3em 0}td{border-top:1px solid #ddd;padding:.2em 1em .2em 0;vertical-align:top}"
    "td:first-child{font-family:monospace}@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}a{color:#8be}}"
)


def _section(path: str, method: str, found: Mapping[str, Any]) -> str:
    heading = f"<h2><b>{escape(method.upper())}</b> {escape(path)}</h2><p>{escape(found['summary'])}</p>"
    taken = found.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    answers = [(status, answer) for status, answer in found["responses"].items() if "content" in answer]
    tables = [_table("Takes", taken.get("properties", {}), taken.get("required", ()))]
    for status, answer in answers:
        about = f"{status}: {answer['description']}" + (" Streams." if "text/event-stream" in answer["content"] else "")
        fields = answer["content"].get("application/json", {}).get("schema", {}).get("properties", {})
        tables.append(f"<p>{escape(about)}</p>" + _table("Gives", fields, ()))
    return heading + "".join(tables)


def _table(name: str, fields: Mapping[str, Mapping[str, Any]], needed: Sequence[str]) -> str:
    if not fields:
        return ""
    rows = []
    for field, schema in fields.items():
        kind = " or ".join(map(str, schema["enum"])) if "enum" in schema else str(schema.get("type", ""))
        about = ", ".join(filter(None, [kind, "needed" if field in needed else "", str(schema.get("description", ""))]))
        rows.append(f"<tr><td>{escape(field)}</td><td>{escape(about)}</td></tr>")
    return f"<table><caption hidden>{name}</caption>{''.join(rows)}</table>"
