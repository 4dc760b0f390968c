"""Several outputs: independent sequences that share the prompt's blocks; a seed makes them reproducible."""

from __future__ import annotations

import sys

from midstream.errors import MidstreamError
from midstream.executor import GenerationExecutor, SamplingParams


def main(address: str = "127.0.0.1:50051") -> None:
    params = SamplingParams(n=3, seed=7, temperature=0.9, top_p=1.0, max_tokens=16)
    with GenerationExecutor.create(address=address) as executor:
        first, again = executor.generate(["My favourite color is"] * 2, params)
        for output in first.outputs:
            print(f"{output.index}: {output.text!r} ({output.finish_reason})")
        texts = [output.text for output in first.outputs]
        print("the same again:", texts == [output.text for output in again.outputs])


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
