"""Logits processing: banned words, biases, penalties, no-repeat n-grams, and top-p decay."""

from __future__ import annotations

import sys

from midstream.errors import MidstreamError
from midstream.executor import GenerationExecutor, SamplingParams


def main(address: str = "127.0.0.1:50051") -> None:
    prompt = "The best color is blue. The best color is"
    ways = {
        "as it is": SamplingParams(temperature=0, max_tokens=12),
        "not blue": SamplingParams(temperature=0, max_tokens=12, bad=["blue"]),
        "a bias": SamplingParams(temperature=0, max_tokens=12, embedding_bias={4461: -100.0, 2382: 5.0}),
        "penalties": SamplingParams(
            temperature=0, max_tokens=12, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5
        ),
        "no bigram twice": SamplingParams(temperature=0, max_tokens=12, no_repeat_ngram_size=2),
        "top-p decays": SamplingParams(
            seed=1, temperature=1.0, max_tokens=12, top_p=0.95, top_p_decay=0.7, top_p_min=0.1
        ),
    }
    with GenerationExecutor.create(address=address) as executor:
        for name, result in zip(ways, executor.generate([prompt] * len(ways), list(ways.values())), strict=True):
            print(f"{name}: {result.outputs[0].text!r}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
