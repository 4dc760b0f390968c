"""JSON over HTTP: the answer matches a schema, whatever the model is."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import openai

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Italy", "Spain"]}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


def main(url: str = "http://127.0.0.1:8000") -> None:
    key = os.environ.get("MIDSTREAM_API_KEY", "none")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        (model,) = [card.id for card in client.models.list().data][:1]
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Which city has the Eiffel Tower?"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "place", "strict": True, "schema": SCHEMA},
            },
            max_tokens=64,
            temperature=0,
        )
        place = json.loads(answer.choices[0].message.content or "")
        print(f"city: {place['city']}, country: {place['country']}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except openai.OpenAIError as error:
        sys.exit(f"{error} Is the service running, and is MIDSTREAM_API_KEY set if it needs a key?")
