"""Log probabilities of the output tokens and their most likely alternatives, of the prompt, and of the whole output."""

from __future__ import annotations

import sys

from midstream.errors import MidstreamError
from midstream.executor import GenerationExecutor, SamplingParams

PROMPT = [504, 3575, 282, 4649, 314]  # The capital of France is


def main(address: str = "127.0.0.1:50051") -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=0)
    with GenerationExecutor.create(address=address) as executor:
        result = executor.generate(PROMPT, params)
    for token, known in zip(PROMPT[1:], result.prompt_logprobs, strict=True):
        print(f"prompt {token:6} {known[token].logprob:8.3f}, rank {known[token].rank}")
    output = result.outputs[0]
    for token, known in zip(output.token_ids, output.logprobs, strict=True):
        print(f"output {token:6}", {other: round(entry.logprob, 3) for other, entry in known.items()})
    print(f"all of {output.text!r}: {output.cumulative_logprob:.3f}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
