"""Speculative decoding with prompt lookup: the same output in fewer steps."""

from __future__ import annotations

import sys

from midstream.errors import MidstreamError
from midstream.executor import GenerationExecutor, NGramDecodingConfig, SamplingParams

PROMPT = "One two three four five. One two three four five. One two"


def main(address: str = "127.0.0.1:50051") -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, return_perf_metrics=True)
    drafts = NGramDecodingConfig(max_draft_len=6)
    with GenerationExecutor.create(address=address) as executor:
        plain = executor.generate(PROMPT, params)
        drafted = executor.generate(PROMPT, params, speculative_config=drafts)
    print("the same output:", plain.outputs[0].token_ids == drafted.outputs[0].token_ids)
    for name, result in (("without", plain), ("with", drafted)):
        metrics = result.perf_metrics
        assert metrics is not None
        print(
            f"{name}: {metrics.num_steps} steps, {metrics.num_accepted_tokens} of {metrics.num_draft_tokens} accepted"
        )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
