"""What the agent proxy's routes take and give; of OpenAI's and Anthropic's own, what is taken of them here."""

from __future__ import annotations

from typing import Any

from embodied_rl.serving.openapi import COUNT, FLAG, NUMBER, OBJECT, TEXT, TEXTS, Paths, document, route

_LIST = {"type": "array", "items": OBJECT}
_SOME = {"type": "integer", "minimum": 1}
_SAMPLING = {"temperature": {**NUMBER, "minimum": 0}, "top_p": {**NUMBER, "maximum": 1}}
_CHAT = {
    "model": TEXT,
    "messages": {**_LIST, "description": "Texts, tool calls and their results."},
    "tools": _LIST,
    "tool_choice": {"description": "auto, none, required, or one function."},
    "parallel_tool_calls": FLAG,
    "response_format": {**OBJECT, "description": "text, json_object, or json_schema with its schema."},
    "max_tokens": _SOME,
    "max_completion_tokens": _SOME,
    **_SAMPLING,
    "top_k": {"type": "integer"},
    "seed": COUNT,
    "stop": {"description": "A text or several; the answer ends before the first."},
    "n": _SOME,
    "logprobs": FLAG,
    "top_logprobs": {**COUNT, "maximum": 20},
    "stream": FLAG,
    "stream_options": OBJECT,
}
_RESPONSES = {
    "model": TEXT,
    "input": {"description": "A text, or items: messages, function calls and their outputs."},
    "instructions": TEXT,
    "previous_response_id": TEXT,
    "tools": _LIST,
    "tool_choice": _CHAT["tool_choice"],
    "parallel_tool_calls": FLAG,
    "text": {**OBJECT, "description": "format: text, json_object, or json_schema with its schema."},
    "include": TEXTS,
    "max_output_tokens": _SOME,
    **_SAMPLING,
    "top_logprobs": _CHAT["top_logprobs"],
    "stream": FLAG,
}
_MESSAGES = {
    "model": TEXT,
    "messages": {**_LIST, "description": "Texts, uses of tools and their results."},
    "system": {"description": "A text, or blocks of text."},
    "max_tokens": _SOME,
    "stop_sequences": TEXTS,
    **_SAMPLING,
    "top_k": COUNT,
    "tools": _LIST,
    "tool_choice": {**OBJECT, "description": "auto, any, tool with its name, or none."},
    "output_config": {**OBJECT, "description": "format: json_schema with its schema."},
    "stream": FLAG,
}
_REWARD = {
    "reward": NUMBER,
    "turn": {**TEXT, "description": "The id of the answer that it is for; without it, the session."},
    "reward_id": {**TEXT, "description": "The same one again adds nothing."},
}
_SESSION = {"id": TEXT, "turns": COUNT, "reward": NUMBER}


def described() -> dict[str, Any]:
    """The whole document."""
    model = [{"name": "model", "in": "path", "required": True, "schema": TEXT}]
    one = [{"name": "id", "in": "path", "required": True, "schema": TEXT}]
    answer = "The answer; what was sampled is kept."
    paths: Paths = {
        "/v1/chat/completions": {
            "post": route("OpenAI's chat completions.", answer, body=(_CHAT, ["messages"]), streams=True),
        },
        "/v1/responses": {"post": route("OpenAI's responses.", answer, body=(_RESPONSES, ["input"]), streams=True)},
        "/v1/messages": {"post": route("Anthropic's messages.", answer, body=(_MESSAGES, ["messages", "max_tokens"]), streams=True)},
        "/v1/messages/count_tokens": {
            "post": route("How long a prompt is.", "Its tokens.", {"input_tokens": COUNT}, body=(_MESSAGES, ["messages"]))
        },
        "/v1/models": {"get": route("Which model is served.", "The one model.", {"data": _LIST})},
        "/v1/models/{model}": {"parameters": model, "get": route("The model, by its name.", "The model.", {"id": TEXT})},
        "/v1/sessions": {
            "get": route("Which sessions are open.", "Each of them.", {"sessions": _LIST}),
            "post": route(
                "Open a session.",
                "Its name and its key.",
                {"id": TEXT, "api_key": TEXT},
                body=({"id": TEXT, "metadata": OBJECT}, []),
                status="201",
            ),
        },
        "/v1/sessions/{id}": {"parameters": one, "get": route("What a session has captured so far.", "Its turns.")},
        "/v1/sessions/{id}/reward": {
            "parameters": one,
            "post": route("Reward a session, or one of its answers.", "All rewards so far.", _SESSION, body=(_REWARD, ["reward"])),
        },
        "/v1/sessions/{id}/end": {"parameters": one, "post": route("End a session.", "All rewards.", _SESSION, body=(_REWARD, []))},
    }
    error = {
        "type": "object",
        "properties": {"message": TEXT, "type": TEXT, "code": TEXT, "choices": TEXTS},
        "required": ["message", "type"],
    }
    return document("embodied_rl agent proxy", paths, {"type": "object", "properties": {"error": error}, "required": ["error"]})
