"""OpenAI's chat completions and responses, and Anthropic's messages: each reads a `ChatRequest` and writes a `ChatAnswer`."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from embodied_rl.serving.agents.chat import (
    CALL,
    ChatRequest,
    StopTexts,
    bad,
    constraints,
    plain_call,
    plain_message,
    plain_text,
    sampled_calls,
    sampling,
    schema_of,
    stop_texts,
)
from embodied_rl.serving.http_server import COUNT, FLAG, LIST, NUMBER, OBJECT, TEXT, TEXTS, HttpProblem

_TOKENS = {"type": "integer", "minimum": 1, "maximum": 2**20}
_COMMON = {
    "model": TEXT,
    "tools": LIST,
    "temperature": {**NUMBER, "minimum": 0, "maximum": 100},
    "top_p": {**NUMBER, "minimum": 1e-6, "maximum": 1},
    "stream": FLAG,
}
"""Fields of all interfaces."""


def _without_effect(*names: str) -> dict[str, Any]:
    """Fields that clients send by habit; they do not affect the sampling."""
    return {name: {"description": "Without effect here."} for name in names}


_OPENAI = {
    **_COMMON,
    "tool_choice": {"description": "auto, none, required, or one function."},
    "parallel_tool_calls": FLAG,
    "top_logprobs": {**COUNT, "maximum": 20},
    **_without_effect("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
}
"""Fields of both of OpenAI's interfaces."""

Recall = Callable[[str], tuple[dict[str, Any], ...] | None]
"""Messages of an earlier answer by its id, itself included; None: unknown."""


# ---- answers --------------------------------------------------------------------------------------------------------


def answer_message(text: str, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Assistant's message for a sampled text; see `sampled_calls`."""
    content, calls = sampled_calls(text) if tools else (text, [])
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "tool_calls": calls} if calls else message


@dataclass(frozen=True)
class ChatAnswer:
    """Contents of one choice of an answer for the client."""

    completion_id: str
    model: str
    message: dict[str, Any]
    """Message in the form of chat completions."""
    finish_reason: str
    """Reason: stop, length or tool_calls."""
    num_prompt_tokens: int
    num_sampled_tokens: int
    logprobs: list[dict[str, Any]] | None = None
    index: int = 0
    stop_text: str | None = None
    """Stop text of the request that ended it."""

    @property
    def content(self) -> str:
        return self.message["content"] or ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls", [])

    def after(self, sent: str) -> str:
        """Content behind what was sent of it."""
        same = next((place for place, (a, b) in enumerate(zip(self.content, sent, strict=False)) if a != b), len(sent))
        return self.content[same:]


Item = str | ChatAnswer
"""Of an answer while it is sampled: a new piece of its content, or the whole choice at its end."""


class GrowingText:
    """The text of an answer while it is sampled, in pieces.

    It holds back what later tokens may change: partial characters, possible tool calls and the spaces before them, and possible stop texts.
    """

    def __init__(self, stop: StopTexts, has_tools: bool) -> None:
        self._stop, self._has_tools, self._sent = stop, has_tools, ""

    def grown(self, text: str) -> str:
        """New and final part of the text so far; "" if there is none."""
        certain = self._stop.certain(text).rstrip("\ufffd")
        if self._has_tools and (place := certain.find(CALL)) >= 0:
            certain = certain[:place].rstrip()
        elif self._has_tools:
            half = next((n for n in range(len(CALL) - 1, 0, -1) if certain.endswith(CALL[:n])), 0)
            certain = certain[: len(certain) - half].rstrip()
        if len(certain) <= len(self._sent) or not certain.startswith(self._sent):
            return ""
        new, self._sent = certain[len(self._sent) :], certain
        return new


def _require_utf8(body: Mapping[str, Any]) -> None:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise bad("The request contains half of a surrogate pair, which no tokenizer accepts.") from None


class Interface(ABC):
    """Reads and writes requests, answers and refusals of one interface."""

    id_prefix: str
    fields: ClassVar[Mapping[str, Any]]
    """{name: schema} of a request's body, which `embodied_rl.serving.http_server.Routes` checks."""

    @abstractmethod
    def read(self, body: Mapping[str, Any], recall: Recall) -> ChatRequest:
        """Request from its body. Raises HttpProblem 400."""

    def new_id(self) -> str:
        """New id of an answer, which rewards refer to."""
        return f"{self.id_prefix}{secrets.token_hex(12)}"

    @abstractmethod
    def whole(self, chat: ChatRequest, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        """An answer that is not streamed."""

    @abstractmethod
    def stream(self, chat: ChatRequest, completion_id: str, model: str, num_prompt_tokens: int, items: Iterable[Item]) -> Iterator[bytes]:
        """An answer as server-sent events, from what comes of its choices in turn. The first event waits for the first item."""

    def refusal(self, problem: HttpProblem) -> dict[str, Any]:
        """A refusal in OpenAI's form, with our kind as ``code``."""
        kind = _error_type(problem.status, "server_error")
        return {"error": {"message": problem.message, "type": kind, "param": None, "code": problem.kind, "choices": problem.choices}}

    def broken(self, problem: HttpProblem) -> bytes:
        """Last event of a stream whose answer failed."""
        return sse(self.refusal(problem))


def sse(data: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    named = b"" if event is None else b"event: " + event.encode() + b"\n"
    return named + b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def _error_type(status: int, of_server: str) -> str:
    """Word for a status in both companies' interfaces; `of_server`: the one for 500 and above."""
    known = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return known.get(status, "invalid_request_error" if status < 500 else of_server)


# ---- OpenAI's chat completions --------------------------------------------------------------------------------------


class ChatCompletions(Interface):
    """OpenAI's ``/v1/chat/completions``."""

    id_prefix = "chatcmpl-"
    fields: ClassVar[Mapping[str, Any]] = {
        **_OPENAI,
        "messages": {**LIST, "description": "Texts, tool calls and their results."},
        "response_format": {**OBJECT, "description": "text, json_object, or json_schema with its schema."},
        "max_tokens": _TOKENS,
        "max_completion_tokens": _TOKENS,
        "top_k": {"type": "integer", "minimum": -1, "maximum": 2**20},
        "seed": {**COUNT, "maximum": 2**63 - 1},
        "stop": {"description": "A text or several; the answer ends before the first."},
        "n": {"type": "integer", "minimum": 1, "maximum": 128},
        "logprobs": FLAG,
        "stream_options": OBJECT,
        "frequency_penalty": {"enum": [0]},
        "presence_penalty": {"enum": [0]},
        "logit_bias": {"enum": [{}]},
        "modalities": {"enum": [["text"]]},
    }

    def read(self, body: Mapping[str, Any], recall: Recall) -> ChatRequest:
        _require_utf8(body)
        messages, tools = body["messages"], self._tools(body)
        if not messages:
            raise bad("'messages' must be a list of at least one message.")
        options, top = body.get("stream_options") or {}, body.get("top_logprobs") or 0
        if top and not body.get("logprobs"):
            raise bad("'top_logprobs' needs 'logprobs': true.")
        return ChatRequest(
            messages=tuple(plain_message(message, place) for place, message in enumerate(messages)),
            tools=tools,
            top_k=max(body.get("top_k") or 0, 0),
            seed=body.get("seed"),
            stop=stop_texts(body, "stop"),
            include_usage=bool(options.get("include_usage")),
            logprobs=bool(body.get("logprobs")),
            top_logprobs=top,
            num_choices=body.get("n") or 1,
            **constraints(
                body.get("tool_choice"),
                tools,
                schema_of(body.get("response_format"), "response_format", "json_schema"),
                body.get("parallel_tool_calls") is not False,
            ),
            **sampling(body, "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"),
        )

    def whole(self, chat: ChatRequest, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        """``chat.completion`` with all choices of a request."""
        choices = [
            {"index": one.index, "message": one.message, "finish_reason": one.finish_reason, "logprobs": _logprobs_of(one)}
            for one in answers
        ]
        return _completion("chat.completion", answers[0].completion_id, answers[0].model, choices, usage=_usage(answers))

    def stream(self, chat: ChatRequest, completion_id: str, model: str, num_prompt_tokens: int, items: Iterable[Item]) -> Iterator[bytes]:
        """``chat.completion.chunk``: the role, pieces of the content, tool calls and the end of each choice; then the usage of all."""
        answers, sent = list[ChatAnswer](), list[str]()

        def event(delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None) -> bytes:
            choice = {"index": len(answers), "delta": delta, "finish_reason": reason, "logprobs": logprobs}
            return sse(_completion("chat.completion.chunk", completion_id, model, [choice]))

        for item in items:
            if not sent:
                sent.append("")
                yield event({"role": "assistant", "content": ""})
            if isinstance(item, str):
                sent.append(item)
                yield event({"content": item})
                continue
            delta: dict[str, Any] = {"content": rest} if (rest := item.after("".join(sent))) else {}
            if item.calls:
                delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(item.calls)]
            logprobs = _logprobs_of(item)
            if delta or logprobs is not None:
                yield event(delta, None, logprobs)
            yield event({}, item.finish_reason)
            answers.append(item)
            sent.clear()
        if chat.include_usage:
            yield sse(_completion("chat.completion.chunk", completion_id, model, [], usage=_usage(answers)))
        yield b"data: [DONE]\n\n"

    def _tools(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
        tools = body.get("tools")
        if not tools or body.get("tool_choice") == "none":
            return None
        functions = [tool.get("function") if isinstance(tool, dict) else None for tool in tools]
        if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
            raise bad("'tools' must be a list of objects with a 'function' that has a 'name'.")
        return tuple(tools)


def _usage(answers: Sequence[ChatAnswer]) -> dict[str, int]:
    prompt, sampled = answers[0].num_prompt_tokens, sum(answer.num_sampled_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs_of(answer: ChatAnswer) -> dict[str, Any] | None:
    return None if answer.logprobs is None else {"content": answer.logprobs}


def _completion(kind: str, completion_id: str, model: str, choices: Sequence[Mapping[str, Any]], **usage: object) -> dict[str, Any]:
    return {"id": completion_id, "object": kind, "created": int(time.time()), "model": model, "choices": choices, **usage}


# ---- OpenAI's responses ---------------------------------------------------------------------------------------------


_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = ("reasoning.encrypted_content", _LOGPROBS)


class Responses(Interface):
    """OpenAI's ``/v1/responses``."""

    id_prefix = "resp_"
    fields: ClassVar[Mapping[str, Any]] = {
        **_OPENAI,
        "input": {"description": "A text, or items: messages, function calls and their outputs."},
        "instructions": TEXT,
        "previous_response_id": TEXT,
        "text": {**OBJECT, "description": "format: text, json_object, or json_schema with its schema."},
        "include": TEXTS,
        "max_output_tokens": _TOKENS,
        "truncation": {"enum": ["disabled", "auto"]},
        "background": {"enum": [False]},
        **_without_effect("stream_options", "reasoning", "max_tool_calls"),
    }

    def read(self, body: Mapping[str, Any], recall: Recall) -> ChatRequest:
        _require_utf8(body)
        choice, form = body.get("tool_choice"), (body.get("text") or {}).get("format")
        tools = None if choice == "none" else self._tools(body.get("tools"))
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        include = body.get("include") or []
        if any(name not in _INCLUDED for name in include):
            raise bad(f"'include' asks for {include!r:.80}.", "unsupported_parameter", _INCLUDED)
        top = body.get("top_logprobs") or 0
        instructions, earlier = body.get("instructions"), self._earlier(body, recall)
        system = [] if instructions is None else [{"role": "system", "content": plain_text(instructions, "instructions")}]
        return ChatRequest(
            messages=(*system, *earlier, *self._messages(body.get("input"))),
            tools=tools,
            logprobs=_LOGPROBS in include or top > 0,
            top_logprobs=top,
            **constraints(choice, tools, schema_of(form, "text.format"), body.get("parallel_tool_calls") is not False),
            **sampling(body, "max_output_tokens"),
            recalled_from=len(system),
        )

    def whole(self, chat: ChatRequest, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        (answer,) = answers
        return _response(chat, answer.completion_id, answer.model, answer)

    def stream(self, chat: ChatRequest, completion_id: str, model: str, num_prompt_tokens: int, items: Iterable[Item]) -> Iterator[bytes]:
        """``response.created``, the items with their deltas, ``response.completed``."""
        numbers, place = itertools.count(), 0
        sent: str | None = None  # of the message; None: it has not begun

        def event(kind: str, **fields: object) -> bytes:
            where = {} if "response" in fields else {"output_index": place}
            return sse({"type": kind, "sequence_number": next(numbers), **where, **fields}, kind)

        def part(kind: str, **fields: object) -> bytes:
            return event(kind, item_id=_message_id(completion_id), content_index=0, **fields)

        for number, item in enumerate(items):
            if number == 0:
                begun = _response(chat, completion_id, model, None)
                yield event("response.created", response=begun)
                yield event("response.in_progress", response=begun)
            new = item if isinstance(item, str) else item.after(sent or "")
            if new or (sent is None and isinstance(item, ChatAnswer) and not item.calls):
                if sent is None:
                    yield event("response.output_item.added", item=_message_item(completion_id, None, "in_progress"))
                    yield part("response.content_part.added", part=_output_text("", None))
                sent = (sent or "") + new
                yield part("response.output_text.delta", delta=new, logprobs=[])
            if isinstance(item, str):
                continue
            if sent is not None:
                whole = _output_text(item.content, item.logprobs)
                yield part("response.output_text.done", text=item.content, logprobs=item.logprobs or [])
                yield part("response.content_part.done", part=whole)
                yield event("response.output_item.done", item=_message_item(completion_id, whole, _status(item)))
                place += 1
            for index, call in enumerate(item.calls):
                made = _call_item(completion_id, index, call)
                yield event("response.output_item.added", item={**made, "arguments": "", "status": "in_progress"})
                arguments = {"item_id": made["id"], "arguments": made["arguments"]}
                yield event("response.function_call_arguments.delta", item_id=made["id"], delta=made["arguments"])
                yield event("response.function_call_arguments.done", **arguments, name=made["name"])
                yield event("response.output_item.done", item=made)
                place += 1
            response = _response(chat, completion_id, model, item)
            yield event(f"response.{response['status']}", response=response)

    def broken(self, problem: HttpProblem) -> bytes:
        return sse({"type": "error", "code": problem.kind, "message": problem.message, "param": None, "sequence_number": 0}, "error")

    def _tools(self, tools: list[Any] | None) -> tuple[dict[str, Any], ...] | None:
        """Tools in the form of chat completions, which templates know."""
        if not tools:
            return None
        if not all(isinstance(tool, dict) for tool in tools):
            raise bad("'tools' must be a list of objects.")
        for tool in tools:
            if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
                raise bad(f"'tools' can only be functions with a name here, got type {tool.get('type')!r:.40}.", "unsupported_parameter")
        described = [{name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None} for tool in tools]
        return tuple({"type": "function", "function": function} for function in described)

    def _earlier(self, body: Mapping[str, Any], recall: Recall) -> tuple[dict[str, Any], ...]:
        """Conversation that ``previous_response_id`` ends, without its instructions."""
        name = body.get("previous_response_id")
        if name is None:
            return ()
        found = recall(str(name))
        if found is None:
            raise HttpProblem(404, "unknown_response", f"This session has no answer {name!r:.80} ('previous_response_id').")
        return found

    def _messages(self, items: object) -> list[dict[str, Any]]:
        """Items as messages; calls join the assistant's message before them."""
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
                raise bad(f"input[{place}]: items of type {kind!r:.40} are not taken here.", "unsupported_content")
        return found


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
            output.append(_message_item(completion_id, _output_text(answer.content, answer.logprobs), _status(answer)))
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


def _message_item(completion_id: str, part: Mapping[str, Any] | None, status: str) -> dict[str, Any]:
    content = [] if part is None else [part]
    return {"type": "message", "id": _message_id(completion_id), "role": "assistant", "status": status, "content": content}


def _output_text(text: str, logprobs: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs or [])}


def _call_item(completion_id: str, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    name = f"fc_{completion_id.removeprefix('resp_')}_{number}"
    return {"type": "function_call", "id": name, "call_id": call["id"], **call["function"], "status": "completed"}


# ---- Anthropic's messages -------------------------------------------------------------------------------------------


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages(Interface):
    """Anthropic's ``/v1/messages``."""

    id_prefix = "msg_"
    fields: ClassVar[Mapping[str, Any]] = {
        **_COMMON,
        "messages": {**LIST, "description": "Texts, uses of tools and their results."},
        "system": {"description": "A text, or blocks of text."},
        "max_tokens": _TOKENS,
        "stop_sequences": TEXTS,
        "top_k": {**COUNT, "maximum": 2**20},
        "tool_choice": {**OBJECT, "description": "auto, any, tool with its name, or none."},
        "output_config": {**OBJECT, "description": "format: json_schema with its schema."},
        "thinking": {"enum": [{"type": "disabled"}]},
        **_without_effect("metadata", "service_tier", "cache_control"),
    }

    def read(self, body: Mapping[str, Any], recall: Recall) -> ChatRequest:
        _require_utf8(body)
        choice, form = body.get("tool_choice") or {"type": "auto"}, (body.get("output_config") or {}).get("format")
        kind = choice.get("type")
        if kind not in (*_CHOICES, "tool"):
            raise bad(f"'tool_choice' must be {{'type': …}}, got {choice!r:.80}.", choices=[*_CHOICES, "tool"])
        tools = None if kind == "none" else self._tools(body.get("tools"))
        asked = {"type": "function", "function": {"name": choice.get("name")}} if kind == "tool" else _CHOICES[kind]
        return ChatRequest(
            messages=self._messages(body),
            tools=tools,
            top_k=body.get("top_k") or 0,
            stop=stop_texts(body, "stop_sequences"),
            **constraints(asked, tools, schema_of(form, "output_config.format"), not choice.get("disable_parallel_tool_use")),
            **sampling(body, "max_tokens"),
        )

    def whole(self, chat: ChatRequest, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        (answer,) = answers
        blocks: list[dict[str, Any]] = [{"type": "text", "text": answer.content}] if answer.content or not answer.calls else []
        blocks += [{**_call_block(call), "input": _arguments(call)} for call in answer.calls]
        usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_sampled_tokens}
        return {**_message_head(answer.completion_id, answer.model), "content": blocks, **_message_end(answer), "usage": usage}

    def stream(self, chat: ChatRequest, completion_id: str, model: str, num_prompt_tokens: int, items: Iterable[Item]) -> Iterator[bytes]:
        """``message_start``, a content block for the text and one for each tool call, ``message_delta``, ``message_stop``."""
        sent, place = "", 0
        for number, item in enumerate(items):
            if number == 0:
                usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
                empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
                yield _message_event("message_start", message={**_message_head(completion_id, model), **empty})
            new = item if isinstance(item, str) else item.after(sent)
            if new:
                if not sent:
                    yield _message_event("content_block_start", index=place, content_block={"type": "text", "text": ""})
                sent += new
                yield _message_event("content_block_delta", index=place, delta={"type": "text_delta", "text": new})
            if isinstance(item, str):
                continue
            if sent:
                yield _message_event("content_block_stop", index=place)
                place += 1
            for index, call in enumerate(item.calls, place):
                yield _message_event("content_block_start", index=index, content_block={**_call_block(call), "input": {}})
                delta = {"type": "input_json_delta", "partial_json": json.dumps(_arguments(call))}
                yield _message_event("content_block_delta", index=index, delta=delta)
                yield _message_event("content_block_stop", index=index)
            yield _message_event("message_delta", delta=_message_end(item), usage={"output_tokens": item.num_sampled_tokens})
            yield _message_event("message_stop")

    def refusal(self, problem: HttpProblem) -> dict[str, Any]:
        kind = "request_too_large" if problem.status == 413 else _error_type(problem.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": problem.message, "code": problem.kind, "choices": problem.choices}}

    def broken(self, problem: HttpProblem) -> bytes:
        return sse(self.refusal(problem), "error")

    def _tools(self, tools: list[Any] | None) -> tuple[dict[str, Any], ...] | None:
        """Tools in the form of chat completions, which templates know."""
        if not tools:
            return None
        if not all(isinstance(tool, dict) and isinstance(tool.get("name"), str) for tool in tools):
            raise bad("'tools' must be a list of objects with a 'name' and an 'input_schema'.")
        for tool in tools:
            if tool.get("type", "custom") != "custom":
                raise bad(f"Tool {tool['name']!r:.80}: only client-defined tools are supported.", "unsupported_parameter")
        described = [
            {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool.get("input_schema") or {}}
            for tool in tools
        ]
        return tuple({"type": "function", "function": function} for function in described)

    def _messages(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        found, messages = [], body["messages"]
        if not messages:
            raise bad("'messages' must be a list of at least one message.")
        if body.get("system"):
            found.append({"role": "system", "content": plain_text(body["system"], "system")})
        for place, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
                raise bad(f"messages[{place}]: the role must be user or assistant.")
            found += self._plain(message["role"], message.get("content"), f"messages[{place}]")
        return tuple(found)

    def _plain(self, role: str, content: object, where: str) -> list[dict[str, Any]]:
        """A message for templates; results of tools become separate messages before the user's own text."""
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
                raise bad(f"{where}: blocks of type {kind!r:.40} are not taken here.", "unsupported_content")
        if calls:
            return [{"role": role, "content": "".join(texts), "tool_calls": calls}]
        return results + ([{"role": role, "content": "".join(texts)}] if texts or not results else [])


def _message_event(kind: str, **fields: object) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _message_head(completion_id: str, model: str) -> dict[str, Any]:
    return {"id": completion_id, "type": "message", "role": "assistant", "model": model}


def _message_end(answer: ChatAnswer) -> dict[str, Any]:
    stopped = answer.finish_reason == "stop" and answer.stop_text is not None
    return {
        "stop_reason": "stop_sequence" if stopped else _REASONS[answer.finish_reason],
        "stop_sequence": answer.stop_text if stopped else None,
    }


def _call_block(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as an object, as clients expect; anything else becomes its only entry."""
    found = json.loads(call["function"]["arguments"])
    return found if isinstance(found, dict) else {"arguments": found}
