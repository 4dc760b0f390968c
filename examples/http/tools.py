"""Tools over HTTP: let the model call a function, run it, and send back its result."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import openai

WEATHER = {"Paris": "rain, 11 degrees", "Rome": "sun, 24 degrees"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": sorted(WEATHER)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main(url: str = "http://127.0.0.1:8000") -> None:
    key = os.environ.get("MIDSTREAM_API_KEY", "none")
    messages: list[Any] = [{"role": "user", "content": "Is it raining in Paris?"}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        (model,) = [card.id for card in client.models.list().data][:1]
        # `required` makes the grammar enforce a call, which small models need; `auto` leaves the choice to the model.
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=[TOOL], tool_choice="required", max_tokens=64, temperature=0
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            assert call.type == "function"
            city = json.loads(call.function.arguments)["city"]
            print(f"{call.function.name}({city!r}) is {WEATHER[city]!r}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER[city]})
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32, temperature=0)
        print(f"answer: {answer.choices[0].message.content}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except openai.OpenAIError as error:
        sys.exit(f"{error} Is the service running, and is MIDSTREAM_API_KEY set if it needs a key?")
