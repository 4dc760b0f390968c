"""Beam search: the most likely continuations, best first, in one batch with requests of other beam widths."""

from __future__ import annotations

import sys

from midstream.errors import MidstreamError
from midstream.executor import GenerationExecutor, SamplingParams


def main(address: str = "127.0.0.1:50051") -> None:
    narrow = SamplingParams(use_beam_search=True, best_of=2, n=1, max_tokens=12, logprobs=0)
    wide = SamplingParams(use_beam_search=True, n=4, length_penalty=1.0, early_stopping=0, max_tokens=12, logprobs=0)
    with GenerationExecutor.create(address=address) as executor:
        for result in executor.generate(["The capital of France is"] * 2, [narrow, wide]):
            for output in result.outputs:
                score = output.cumulative_logprob or 0.0
                print(f"{score:8.3f} {score / len(output.token_ids):8.3f} a token  {output.text!r}")
            print()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
