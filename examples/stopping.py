"""Stop conditions: stop words, stop tokens, a minimum length, and ignoring the end-of-sequence token."""

from __future__ import annotations

import sys

from midstream.errors import MidstreamError
from midstream.executor import GenerationExecutor, SamplingParams


def main(address: str = "127.0.0.1:50051") -> None:
    prompt = "Count: one, two, three,"
    ways = {
        "at a word": SamplingParams(stop="six", temperature=0, max_tokens=32),
        "with the word": SamplingParams(stop="six", include_stop_str_in_output=True, temperature=0, max_tokens=32),
        "at a comma": SamplingParams(stop_token_ids=[28], temperature=0, max_tokens=32),
        "at a comma, not before 6": SamplingParams(stop_token_ids=[28], min_tokens=6, temperature=0, max_tokens=32),
        "a comma as the end id": SamplingParams(end_id=28, temperature=0, max_tokens=32),
        "never": SamplingParams(ignore_eos=True, temperature=0, max_tokens=12),
    }
    with GenerationExecutor.create(address=address) as executor:
        for name, result in zip(ways, executor.generate([prompt] * len(ways), list(ways.values())), strict=True):
            output = result.outputs[0]
            print(f"{name}: {output.text!r} ({output.finish_reason}, {output.stop_reason!r})")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
