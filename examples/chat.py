"""Chat: render the turns with the model's template and append each answer as the next turn."""

from __future__ import annotations

import sys

from midstream.client import Client, SamplingParams
from midstream.errors import MidstreamError


def main(address: str = "127.0.0.1:50051") -> None:
    turns = [{"role": "system", "content": "You answer in one short sentence."}]
    with Client(address) as client:
        for question in ("What is the capital of France?", "And of Italy?"):
            turns.append({"role": "user", "content": question})
            answer = client.generate(messages=turns, sampling=SamplingParams(temperature=0, max_tokens=32)).text()
            turns.append({"role": "assistant", "content": answer})
            print(f"user: {question}\nassistant: {answer}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
