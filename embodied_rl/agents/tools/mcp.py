"""Tools of a Model Context Protocol server over its standard streams: JSON-RPC 2.0, one message per line."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from embodied_rl.agents.tools.base import Tool, ToolError
from embodied_rl.errors import UserError

PROTOCOL_VERSION = "2025-06-18"
"""Version that we request; a server answers with its own, and the calls used here are the same in all."""
_ENDED = object()
_GRACE_S = 2.0
_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "USER", "SHELL", "TERM")
"""Environment variables that a server inherits; keys are not among them."""


class McpServer:
    """A server's process. Thread-safe: runs one call at a time."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 30.0) -> None:
        """Start the server, initialise the protocol, and list its tools.

        Args:
            command: program and arguments.
            env: variables that it gets in addition to the usual ones.
            timeout_s: seconds for one call.

        Raises UserError: the program cannot be started, or violates the protocol.
        """
        self._command, self._timeout_s = list(command), timeout_s
        self._lock, self._number = threading.Lock(), 0
        self._writing = threading.Lock()
        """Held while its input is written or closed: a closed descriptor's number may be another file's."""
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ} | dict(env or {})
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
            )
        except OSError as error:
            raise UserError(f"MCP server '{self._command[0]}' cannot be started: {error.strerror or error}.") from error
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        os.set_blocking(self._stdin.fileno(), False)
        self._reader = threading.Thread(target=self._read, name="mcp", daemon=True)
        self._reader.start()
        try:
            hello = {"protocolVersion": PROTOCOL_VERSION, "capabilities": {}, "clientInfo": {"name": "embodied_rl", "version": "1"}}
            self.request("initialize", hello)
            self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})
            self.tools = self._list_tools()
            """The server's tools."""
        except (ToolError, KeyError, TypeError, ValueError) as error:
            self.close()
            raise UserError(f"MCP server '{' '.join(self._command)}' violates the protocol: {error}.") from error

    def _list_tools(self) -> list[McpTool]:
        found: list[McpTool] = []
        cursor: str | None = None
        while True:
            page = self.request("tools/list", {} if cursor is None else {"cursor": cursor})
            found += [McpTool(self, tool["name"], tool.get("description", ""), tool.get("inputSchema", {})) for tool in page["tools"]]
            cursor = page.get("nextCursor")
            if not cursor:
                return found

    def request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Result of a call. Raises ToolError: the server refuses, is gone, or does not read or answer in time."""
        with self._lock:
            self._number += 1
            number = self._number
            self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)})
            until = time.monotonic() + self._timeout_s
            while True:
                try:
                    message = self._inbox.get(timeout=max(until - time.monotonic(), 0.001))
                except queue.Empty:
                    with contextlib.suppress(ToolError):
                        self._send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": number}})
                    raise ToolError(f"the tool server did not answer '{method}' within {self._timeout_s:g} s") from None
                if message is _ENDED:
                    self._inbox.put(_ENDED)
                    raise ToolError("the tool server has ended")
                if message.get("id") == number and "method" not in message:
                    return _result(message)
                self._answer(message)

    def _answer(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the server: answer a ping, refuse other requests, ignore notifications and late answers."""
        if "method" in message and "id" in message:
            reply: dict[str, Any] = {"result": {}}
            if message["method"] != "ping":
                reply = {"error": {"code": -32601, "message": "this client offers nothing"}}
            self._send({"jsonrpc": "2.0", "id": message["id"], **reply})

    def close(self) -> None:
        """End the server: close its input, then terminate, then kill it. May be called twice."""
        stdout = self._process.stdout
        with contextlib.suppress(OSError), self._writing:
            self._stdin.close()
        for further in (self._process.terminate, self._process.kill, None):
            try:
                self._process.wait(_GRACE_S)
                break
            except subprocess.TimeoutExpired:
                if further is not None:
                    further()
        self._reader.join(_GRACE_S)
        if stdout is not None and not self._reader.is_alive():
            stdout.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        data, until, poll = memoryview(json.dumps(message).encode() + b"\n"), time.monotonic() + self._timeout_s, select.poll()
        try:
            poll.register(self._stdin, select.POLLOUT)
            while data:
                if not poll.poll(1000 * max(until - time.monotonic(), 0.0)):
                    self._process.kill()  # it would take the next message for the rest of this one
                    raise ToolError(f"the tool server did not read a message within {self._timeout_s:g} s, and was ended")
                with self._writing:
                    data = data[os.write(self._stdin.fileno(), data) :]
        except (OSError, ValueError):  # its input is broken, or closed
            raise ToolError("the tool server has ended") from None

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in stdout:
                with contextlib.suppress(ValueError, RecursionError):  # not a message: some servers print to the wrong stream
                    message = json.loads(line)
                    if isinstance(message, dict):
                        self._inbox.put(message)
        self._inbox.put(_ENDED)


class McpTool(Tool):
    """One tool of a server."""

    def __init__(self, server: McpServer, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self._server = server
        self._called = name
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", name)
        """Name without characters that agents may not use."""
        self.description, self.parameters = description, dict(parameters) or {"type": "object", "properties": {}}

    def run(self, arguments: Mapping[str, Any]) -> str:
        """See `Tool.run`: texts of the result; an error of the server is a ToolError."""
        result = self._server.request("tools/call", {"name": self._called, "arguments": dict(arguments)})
        parts = result.get("content")
        texts = [_text(part) for part in parts] if isinstance(parts, list) else []
        text = "\n".join(texts) or json.dumps(result.get("structuredContent", ""))
        if result.get("isError"):
            raise ToolError(text)
        return text

    def close(self) -> None:
        """End the server and all its tools."""
        self._server.close()


def _text(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    return str(part["text"]) if part.get("type") == "text" and "text" in part else f"[{part.get('type', 'something')} that is no text]"


def _result(message: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in message:
        error = message["error"]
        raise ToolError(str(error.get("message", error)) if isinstance(error, dict) else str(error))
    result = message.get("result")
    if not isinstance(result, dict):
        raise ToolError("the tool server's answer has no result")
    return result
