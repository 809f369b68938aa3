"""A small real MCP server: two pages of tools, notifications and a ping in between, noise on its output, and ways to misbehave."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

TOOLS = [
    {"name": "add", "description": "Add two numbers.", "inputSchema": {"type": "object", "properties": {"a": {}, "b": {}}}},
    {"name": "files/env", "description": "A variable of the environment."},
    {"name": "sleep", "description": "Say nothing until there is a file."},
    {"name": "die", "description": "End."},
    {"name": "deaf", "description": "Answer, and read nothing more."},
]


def write(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name == "add":
        if not all(isinstance(arguments.get(key), (int, float)) for key in "ab"):
            return {"content": [{"type": "text", "text": "a and b must be numbers"}], "isError": True}
        return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}, {"type": "image", "data": ""}]}
    if name == "files/env":
        return {"content": [{"type": "text", "text": os.environ.get(arguments["name"], "not set")}]}
    if name == "sleep":
        while not os.path.exists(arguments["until"]):
            time.sleep(0.01)
        return {"content": [{"type": "text", "text": "awake"}]}
    sys.exit(3)


def main() -> None:
    greeted = ponged = False
    for line in sys.stdin:
        message = json.loads(line)
        method, number = message.get("method"), message.get("id")
        if method == "initialize":
            assert message["params"]["protocolVersion"]
            print("this line is no message", flush=True)
            write({"method": "notifications/message", "params": {"level": "info", "data": "hello"}})
            result = {"protocolVersion": "2025-03-26", "capabilities": {"tools": {}}, "serverInfo": {"name": "test", "version": "0"}}
            write({"id": number, "result": result})
        elif method == "notifications/initialized":
            greeted = True
            write({"id": "ping-1", "method": "ping"})
        elif number == "ping-1":
            ponged = message["result"] == {}
        elif method == "tools/list":
            assert greeted
            second = message["params"].get("cursor") == "2"
            write({"id": number, "result": {"tools": TOOLS[2:]} if second else {"tools": TOOLS[:2], "nextCursor": "2"}})
        elif method == "tools/call":
            assert ponged, "the ping was not answered"
            if message["params"]["name"] == "deaf":
                write({"id": number, "result": {"content": []}})
                time.sleep(600)
            write({"id": number, "result": called(**message["params"])})
        elif number is not None and method is not None:
            write({"id": number, "error": {"code": -32601, "message": f"no method {method}"}})


if __name__ == "__main__":
    main()
