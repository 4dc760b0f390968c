"""Messages over HTTP with Anthropic's client (pip install anthropic), streamed, and a count of tokens."""

from __future__ import annotations

import os
import sys

import anthropic


def main(url: str = "http://127.0.0.1:8000") -> None:
    key = os.environ.get("MIDSTREAM_API_KEY", "none")
    with anthropic.Anthropic(base_url=url, api_key=key) as client:
        (model,) = [card.id for card in client.models.list().data][:1]
        question: anthropic.types.MessageParam = {"role": "user", "content": "What is the capital of France?"}
        count = client.messages.count_tokens(model=model, messages=[question])
        print(f"{count.input_tokens} tokens of input")
        with client.messages.stream(
            model=model, max_tokens=32, messages=[question], extra_body={"temperature": 0}
        ) as stream:
            for text in stream.text_stream:
                print(text, end="", flush=True)
            message = stream.get_final_message()
        print(f"\n{message.stop_reason} after {message.usage.output_tokens} tokens")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except anthropic.AnthropicError as error:
        sys.exit(f"{error} Is the service running, and is MIDSTREAM_API_KEY set if it needs a key?")
