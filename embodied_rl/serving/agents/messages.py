"""Anthropic's messages API: ``/v1/messages``, read into a `ChatRequest` and written from a `ChatAnswer`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embodied_rl.serving.agents.chat import (
    SAMPLING,
    SOME,
    AnswerStream,
    ChatAnswer,
    ChatRequest,
    Interface,
    Recall,
    bad,
    constraints,
    plain_call,
    plain_text,
    sampling,
    sse,
    stop_texts,
    whole_number,
)
from embodied_rl.serving.http_server import COUNT, FLAG, LIST, OBJECT, TEXT, TEXTS, HttpProblem

_FIELDS = {
    "model": TEXT,
    "messages": {**LIST, "description": "Texts, uses of tools and their results."},
    "system": {"description": "A text, or blocks of text."},
    "max_tokens": SOME,
    "stop_sequences": TEXTS,
    **SAMPLING,
    "top_k": COUNT,
    "tools": LIST,
    "tool_choice": {**OBJECT, "description": "auto, any, tool with its name, or none."},
    "output_config": {**OBJECT, "description": "format: json_schema with its schema."},
    "stream": FLAG,
}
_HARMLESS = frozenset({"metadata", "service_tier", "cache_control"})
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"thinking": ({"type": "disabled"},)}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class _MessageStream(AnswerStream):
    """``message_start``, a content block for the text and one for each tool call, ``message_delta``, ``message_stop``."""

    _blocks = 0
    _text_open = False

    def begin(self) -> Iterator[bytes]:
        usage = {"input_tokens": self.num_prompt_tokens, "output_tokens": 0}
        message = {**_head(self.completion_id, self.model), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=message)

    def piece(self, text: str) -> Iterator[bytes]:
        if not self._text_open:
            self._text_open = True
            yield _event("content_block_start", index=self._blocks, content_block={"type": "text", "text": ""})
        yield _event("content_block_delta", index=self._blocks, delta={"type": "text_delta", "text": text})

    def end(self, answer: ChatAnswer) -> Iterator[bytes]:
        if rest := self.rest(answer):
            yield from self.piece(rest)
        if self._text_open:
            yield self._close_block()
        for call in answer.calls:
            yield _event("content_block_start", index=self._blocks, content_block={**_call_block(call), "input": {}})
            delta = {"type": "input_json_delta", "partial_json": json.dumps(_arguments(call))}
            yield _event("content_block_delta", index=self._blocks, delta=delta)
            yield self._close_block()
        yield _event("message_delta", delta=_end(answer), usage={"output_tokens": answer.num_sampled_tokens})

    def done(self, answers: Sequence[ChatAnswer]) -> Iterator[bytes]:
        yield _event("message_stop")

    def _close_block(self) -> bytes:
        self._blocks, self._text_open = self._blocks + 1, False
        return _event("content_block_stop", index=self._blocks - 1)


class Messages(Interface):
    """Anthropic's ``/v1/messages``."""

    stream = _MessageStream
    id_prefix = "msg_"
    fields, harmless, neutral = _FIELDS, _HARMLESS, _NEUTRAL

    def read(self, body: Mapping[str, Any], recall: Recall) -> ChatRequest:
        if body.get("max_tokens") is None:
            raise bad("'max_tokens' is missing.")
        return self.read_prompt(body)

    def read_prompt(self, body: Mapping[str, Any]) -> ChatRequest:
        """As `read`, where nothing will be sampled: ``max_tokens`` may be missing. Raises HttpProblem 400."""
        self.check(body)
        choice = body.get("tool_choice") or {"type": "auto"}
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind not in (*_CHOICES, "tool"):
            raise HttpProblem(
                400, "invalid_request", f"'tool_choice' must be {{'type': …}}, got {choice!r:.80}.", choices=[*_CHOICES, "tool"]
            )
        tools = None if kind == "none" else _tools(body.get("tools"))
        asked = {"type": "function", "function": {"name": choice.get("name")}} if kind == "tool" else _CHOICES[kind]
        return ChatRequest(
            messages=_messages(body),
            tools=tools,
            top_k=whole_number(body, "top_k", 0, 2**20) or 0,
            stop=stop_texts(body, "stop_sequences"),
            **constraints(asked, tools, _schema(body.get("output_config")), not choice.get("disable_parallel_tool_use")),
            **sampling(body, "max_tokens"),
        )

    def whole(self, chat: ChatRequest, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        (answer,) = answers
        blocks: list[dict[str, Any]] = [{"type": "text", "text": answer.content}] if answer.content or not answer.calls else []
        blocks += [{**_call_block(call), "input": _arguments(call)} for call in answer.calls]
        usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_sampled_tokens}
        return {**_head(answer.completion_id, answer.model), "content": blocks, **_end(answer), "usage": usage}

    def refusal(self, problem: HttpProblem) -> dict[str, Any]:
        kind = _ERRORS.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": problem.message, "code": problem.kind, "choices": problem.choices}}

    def broken(self, problem: HttpProblem) -> bytes:
        return sse(self.refusal(problem), "error")


def _event(kind: str, **fields: object) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _head(completion_id: str, model: str) -> dict[str, Any]:
    return {"id": completion_id, "type": "message", "role": "assistant", "model": model}


def _end(answer: ChatAnswer) -> dict[str, Any]:
    stopped = answer.finish_reason == "stop" and answer.stop_text is not None
    return {
        "stop_reason": "stop_sequence" if stopped else _REASONS[answer.finish_reason],
        "stop_sequence": answer.stop_text if stopped else None,
    }


def _call_block(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """An object, as clients expect it; what a model gave instead is its only entry."""
    found = json.loads(call["function"]["arguments"])
    return found if isinstance(found, dict) else {"arguments": found}


def _tools(tools: object) -> tuple[dict[str, Any], ...] | None:
    """In the form of chat completions, which templates know."""
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and isinstance(tool.get("name"), str) for tool in tools):
        raise bad("'tools' must be a list of objects with a 'name' and an 'input_schema'.")
    for tool in tools:
        if tool.get("type", "custom") != "custom":
            raise HttpProblem(400, "unsupported_parameter", f"Tool {tool['name']!r:.80}: only tools of one's own are called here.")
    described = [
        {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool.get("input_schema") or {}} for tool in tools
    ]
    return tuple({"type": "function", "function": function} for function in described)


def _schema(config: object) -> object:
    """The JSON schema that ``output_config`` asks for; None: any text."""
    form = config.get("format") if isinstance(config, dict) else None
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise bad(f"'output_config.format' must be {{'type': 'json_schema', 'schema': …}}, got {form!r:.80}.")
    return form["schema"]


def _messages(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    found, messages = [], body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("'messages' must be a list of at least one message.")
    if body.get("system"):
        found.append({"role": "system", "content": plain_text(body["system"], "system")})
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
            raise bad(f"messages[{place}]: the role must be user or assistant.")
        found += _plain(message["role"], message.get("content"), f"messages[{place}]")
    return tuple(found)


def _plain(role: str, content: object, where: str) -> list[dict[str, Any]]:
    """A message as templates take it; results of tools come as messages of their own, before what the user says beside them."""
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not all(isinstance(block, dict) for block in blocks):
        raise bad(f"{where}: the content must be a text or a list of blocks.")
    texts, calls, results = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use" and role == "assistant":
            calls.append(plain_call(block.get("id"), block.get("name"), block.get("input")))
        elif kind == "tool_result" and role == "user":
            said = plain_text(block.get("content"), where)
            results.append({"role": "tool", "content": said, "tool_call_id": str(block.get("tool_use_id", ""))})
        elif kind == "text":
            texts.append(plain_text(block.get("text"), where))
        else:
            raise HttpProblem(400, "unsupported_content", f"{where}: blocks of type {kind!r:.40} are not taken here.")
    if calls:
        return [{"role": role, "content": "".join(texts), "tool_calls": calls}]
    return results + ([{"role": role, "content": "".join(texts)}] if texts or not results else [])
