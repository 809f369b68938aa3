"""The game of examples/agent_program/agent.py by the standard library alone: it starts in a tenth of the time that importing openai takes.

With a task, it plays that and posts the reward; without, it stays and plays a line of its input after another.
"""

import json
import os
import re
import sys
import urllib.request
from typing import Any


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        return json.load(answer)


def play(key: str, colour: str) -> float:
    messages = [{"role": "user", "content": f"say {colour}"}]
    for _ in range(2):
        asked = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 8}
        told = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", key, asked)["choices"][0]["message"]["content"] or ""
        found = re.search("red|green|blue", told)
        if found:
            return float(found[0] == colour)
        messages += [{"role": "assistant", "content": told}, {"role": "user", "content": "say one colour"}]
    return 0.0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        own = os.environ["OPENAI_API_KEY"]
        post(os.environ["EMBODIED_RL_SESSION_URL"] + "/reward", own, {"reward": play(own, json.loads(sys.argv[1])["colour"])})
    else:
        for episode in map(json.loads, sys.stdin):
            print(json.dumps({"done": True, "reward": play(episode["api_key"], episode["task"]["colour"])}), flush=True)
