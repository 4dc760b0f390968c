"""Chat over HTTP with OpenAI's client (pip install openai): a whole answer, then a streamed one."""

from __future__ import annotations

import os
import sys

import openai


def main(url: str = "http://127.0.0.1:8000") -> None:
    key = os.environ.get("MIDSTREAM_API_KEY", "none")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        (model,) = [card.id for card in client.models.list().data][:1]
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=32,
            temperature=0,
        )
        print(f"{model}: {answer.choices[0].message.content}")
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Name three colours."}],
            max_tokens=32,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            elif chunk.usage is not None:
                print(f"\n{chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except openai.OpenAIError as error:
        sys.exit(f"{error} Is the service running, and is MIDSTREAM_API_KEY set if it needs a key?")
