"""Plain streaming: print text as it is generated."""

from __future__ import annotations

import sys

from midstream.client import Client, SamplingParams
from midstream.errors import MidstreamError


def main(address: str = "127.0.0.1:50051") -> None:
    with Client(address) as client:
        stream = client.generate("The largest planet is", sampling=SamplingParams(temperature=0, max_tokens=24))
        for chunk in stream:
            print(chunk.text, end="", flush=True)
            if chunk.usage is not None:  # the last chunk
                print(f"\n{chunk.usage.completion_tokens} tokens, then: {chunk.finish_reason}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
