"""OpenAI's responses API: ``/v1/responses``, read into a `ChatRequest` and written from a `ChatAnswer`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embodied_rl.serving.agents.chat import (
    SAMPLING,
    SOME,
    TOOL_CHOICE,
    TOP_LOGPROBS,
    AnswerStream,
    ChatAnswer,
    ChatRequest,
    Interface,
    Recall,
    bad,
    constraints,
    parallel,
    plain_call,
    plain_message,
    plain_text,
    sampling,
    sse,
    whole_number,
)
from embodied_rl.serving.http_server import FLAG, LIST, OBJECT, TEXT, TEXTS, HttpProblem

_FIELDS = {
    "model": TEXT,
    "input": {"description": "A text, or items: messages, function calls and their outputs."},
    "instructions": TEXT,
    "previous_response_id": TEXT,
    "tools": LIST,
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": FLAG,
    "text": {**OBJECT, "description": "format: text, json_object, or json_schema with its schema."},
    "include": TEXTS,
    "max_output_tokens": SOME,
    **SAMPLING,
    "top_logprobs": TOP_LOGPROBS,
    "stream": FLAG,
}
_HARMLESS = frozenset(
    {
        "metadata",
        "store",
        "user",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "stream_options",
        "reasoning",
        "max_tool_calls",
    }
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"truncation": ("disabled", "auto"), "background": (False,)}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = ("reasoning.encrypted_content", _LOGPROBS)
_MAX_TOP_LOGPROBS = 20


class _ResponseStream(AnswerStream):
    """``response.created``, the items with what they grow by, ``response.completed``."""

    _number = -1
    _items = 0
    _text: str | None = None
    """Of the message so far; None: it has not begun."""

    def begin(self) -> Iterator[bytes]:
        begun = _response(self.chat, self.completion_id, self.model, None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def piece(self, text: str) -> Iterator[bytes]:
        if self._text is None:
            self._text = ""
            yield self._event("response.output_item.added", item=_message(self.completion_id, None, "in_progress"))
            yield self._part("response.content_part.added", part=_output_text("", None))
        self._text += text
        yield self._part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, answer: ChatAnswer) -> Iterator[bytes]:
        rest = self.rest(answer)
        if rest or (self._text is None and not answer.calls):
            yield from self.piece(rest)
        if self._text is not None:
            part = _output_text(answer.content, answer.logprobs)
            yield self._part("response.output_text.done", text=answer.content, logprobs=answer.logprobs or [])
            yield self._part("response.content_part.done", part=part)
            yield self._event("response.output_item.done", item=_message(self.completion_id, part, _status(answer)))
            self._items += 1
        for number, call in enumerate(answer.calls):
            item = _call_item(self.completion_id, number, call)
            yield self._event("response.output_item.added", item={**item, "arguments": "", "status": "in_progress"})
            where: dict[str, object] = {"item_id": item["id"]}
            yield self._event("response.function_call_arguments.delta", **where, delta=item["arguments"])
            yield self._event("response.function_call_arguments.done", **where, arguments=item["arguments"], name=item["name"])
            yield self._event("response.output_item.done", item=item)
            self._items += 1

    def done(self, answers: Sequence[ChatAnswer]) -> Iterator[bytes]:
        (answer,) = answers
        response = _response(self.chat, self.completion_id, self.model, answer)
        yield self._event(f"response.{response['status']}", response=response)

    def _part(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=_message_id(self.completion_id), content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        self._number += 1
        where = {} if "response" in fields else {"output_index": self._items}
        return sse({"type": kind, "sequence_number": self._number, **where, **fields}, kind)


class Responses(Interface):
    """OpenAI's ``/v1/responses``."""

    stream = _ResponseStream
    id_prefix = "resp_"
    fields, harmless, neutral = _FIELDS, _HARMLESS, _NEUTRAL

    def read(self, body: Mapping[str, Any], recall: Recall) -> ChatRequest:
        self.check(body)
        choice, tools = body.get("tool_choice"), None
        if choice != "none":
            tools = _tools(body.get("tools"))
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        include = body.get("include") or []
        if not isinstance(include, list) or any(name not in _INCLUDED for name in include):
            raise HttpProblem(400, "unsupported_parameter", f"'include' asks for {include!r:.80}.", choices=_INCLUDED)
        top = whole_number(body, "top_logprobs", 0, _MAX_TOP_LOGPROBS) or 0
        instructions, earlier = body.get("instructions"), _earlier(body, recall)
        system = [] if instructions is None else [{"role": "system", "content": plain_text(instructions, "instructions")}]
        return ChatRequest(
            messages=(*system, *earlier, *_messages(body.get("input"))),
            tools=tools,
            logprobs=_LOGPROBS in include or top > 0,
            top_logprobs=top,
            **constraints(choice, tools, _schema(body.get("text")), parallel(body)),
            **sampling(body, "max_output_tokens"),
            recalled_from=len(system),
        )

    def whole(self, chat: ChatRequest, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        (answer,) = answers
        return _response(chat, answer.completion_id, answer.model, answer)

    def broken(self, problem: HttpProblem) -> bytes:
        return sse({"type": "error", "code": problem.kind, "message": problem.message, "param": None, "sequence_number": 0}, "error")


def _response(chat: ChatRequest, completion_id: str, model: str, answer: ChatAnswer | None) -> dict[str, Any]:
    """The whole object; `answer` is None while it is being sampled."""
    asked, usage, output = chat.asked, None, []
    if answer is not None:
        sampled = answer.num_sampled_tokens
        usage = {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + sampled,
        }
        if answer.content or not answer.calls:
            output.append(_message(completion_id, _output_text(answer.content, answer.logprobs), _status(answer)))
        output += [_call_item(completion_id, number, call) for number, call in enumerate(answer.calls)]
    status = "in_progress" if answer is None else _status(answer)
    return {
        "id": completion_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": model,
        "output": output,
        "usage": usage,
        **{name: asked.get(name) for name in ("instructions", "previous_response_id", "max_output_tokens")},
        "metadata": asked.get("metadata") or {},
        "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
        "temperature": chat.temperature,
        "top_p": chat.top_p,
        "tools": asked.get("tools") or [],
        "tool_choice": asked.get("tool_choice") or "auto",
        "text": asked.get("text") or {"format": {"type": "text"}},
        "truncation": "disabled",
    }


def _status(answer: ChatAnswer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _message_id(completion_id: str) -> str:
    return f"msg_{completion_id.removeprefix('resp_')}"


def _message(completion_id: str, part: Mapping[str, Any] | None, status: str) -> dict[str, Any]:
    content = [] if part is None else [part]
    return {"type": "message", "id": _message_id(completion_id), "role": "assistant", "status": status, "content": content}


def _output_text(text: str, logprobs: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs or [])}


def _call_item(completion_id: str, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    name = f"fc_{completion_id.removeprefix('resp_')}_{number}"
    return {"type": "function_call", "id": name, "call_id": call["id"], **call["function"], "status": "completed"}


def _tools(tools: object) -> tuple[dict[str, Any], ...] | None:
    """In the form of chat completions, which templates know."""
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise bad("'tools' must be a list of objects.")
    for tool in tools:
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise HttpProblem(
                400, "unsupported_parameter", f"'tools' can only be functions with a name here, got type {tool.get('type')!r:.40}."
            )
    described = [{name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None} for tool in tools]
    return tuple({"type": "function", "function": function} for function in described)


def _schema(text: object) -> object:
    """The JSON schema that ``text.format`` asks for; None: any text."""
    form = text.get("format") if isinstance(text, dict) else None
    if form is None or form == {"type": "text"}:
        return None
    if isinstance(form, dict) and form.get("type") == "json_object":
        return {"type": "object"}
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        message = f"'text.format' must be {{'type': …}} with text, json_object, or json_schema and its schema, got {form!r:.80}."
        raise HttpProblem(400, "invalid_request", message, choices=["text", "json_object", "json_schema"])
    return form["schema"]


def _earlier(body: Mapping[str, Any], recall: Recall) -> tuple[dict[str, Any], ...]:
    """The conversation that ``previous_response_id`` ends; instructions are not handed on."""
    name = body.get("previous_response_id")
    if name is None:
        return ()
    found = recall(str(name))
    if found is None:
        raise HttpProblem(404, "unknown_response", f"This session has no answer {name!r:.80} ('previous_response_id').")
    return found


def _messages(items: object) -> list[dict[str, Any]]:
    """Items as messages; calls go into the assistant's message before them."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise bad("'input' must be a text or a list of at least one item.")
    found: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            found.append(plain_message({"role": item.get("role"), "content": item.get("content")}, place))
        elif kind == "function_call":
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            call = plain_call(item.get("call_id"), item.get("name"), item.get("arguments"))
            found[-1] = {**found[-1], "tool_calls": [*found[-1].get("tool_calls", []), call]}
        elif kind == "function_call_output":
            said = plain_text(item.get("output"), f"input[{place}]")
            found.append({"role": "tool", "content": said, "tool_call_id": str(item.get("call_id", ""))})
        else:
            raise HttpProblem(400, "unsupported_content", f"input[{place}]: items of type {kind!r:.40} are not taken here.")
    return found
