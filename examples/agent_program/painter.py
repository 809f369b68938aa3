"""The same task for an agent of OpenAI's Agents SDK: its answer has a type, so that the model can only name a colour.

pip install openai-agents; OPENAI_BASE_URL=… OPENAI_API_KEY=… OPENAI_MODEL=… python painter.py '{"colour": "red"}'
"""

import json
import os
import sys
from typing import Literal

from agents import Agent, ModelBehaviorError, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Paint(BaseModel):
    colour: Literal["red", "green", "blue"]


def play(client: OpenAI, task: dict[str, str]) -> float:
    """Ask for the task's colour; 1 for the right one."""
    model = OpenAIChatCompletionsModel(os.environ["OPENAI_MODEL"], AsyncOpenAI(base_url=client.base_url, api_key=client.api_key))
    agent = Agent(name="Painter", model=model, output_type=Paint)
    try:
        answer = Runner.run_sync(agent, f"say {task['colour']}", max_turns=1).final_output
    except ModelBehaviorError:  # cut before its end: no colour
        return 0.0
    return 1.0 if answer.colour == task["colour"] else 0.0


if __name__ == "__main__":
    print(play(OpenAI(), json.loads(sys.argv[1])))
