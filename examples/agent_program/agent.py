"""An agent program: it asks a model for a colour and judges the answer itself. It knows OpenAI's client and nothing of training.

OPENAI_BASE_URL=… OPENAI_API_KEY=… OPENAI_MODEL=… python agent.py '{"colour": "red"}'
"""

import json
import os
import re
import sys
import urllib.request

from openai import OpenAI

COLOURS = re.compile("red|green|blue")
TRIES = 2


def play(client: OpenAI, task: dict[str, str]) -> float:
    """Ask for the task's colour, once more where the answer has none; 1 for the right one."""
    messages = [{"role": "user", "content": f"say {task['colour']}"}]
    for _ in range(TRIES):
        answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, max_tokens=8)
        text = answer.choices[0].message.content or ""
        found = COLOURS.search(text)
        if found:
            return 1.0 if found[0] == task["colour"] else 0.0
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "say one colour"}]
    return 0.0


def main() -> None:
    client = OpenAI(max_retries=2)  # address and key come from the environment
    report(play(client, json.loads(sys.argv[1])))


def report(reward: float) -> None:
    """Post the reward if the program runs in training; in production there is no such address."""
    session = os.environ.get("EMBODIED_RL_SESSION_URL")
    if session is None:
        return
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{session}/reward", json.dumps({"reward": reward}).encode(), headers)
    urllib.request.urlopen(request, timeout=30).close()


if __name__ == "__main__":
    main()
