"""Prompt tuning and prompt embeddings: virtual tokens sent with a request, and a prompt made only of embeddings."""

from __future__ import annotations

import sys

import numpy as np

from midstream.client import Client
from midstream.errors import MidstreamError
from midstream.executor import GenerationExecutor, SamplingParams

PROMPT = [49, 4626, 314]  # A river is


def main(address: str = "127.0.0.1:50051") -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    with Client(address) as client:
        info = client.model_info()
    # Trained embeddings come from a file; `prompt_adapter_request` specifies a PEFT folder.
    table = np.random.default_rng(1).normal(0, 0.1, (4, info.hidden_size)).astype(np.float16)
    with GenerationExecutor.create(address=address) as executor:
        results = {
            "plain": executor.generate_async(PROMPT, params),
            "all rows first": executor.generate_async(PROMPT, params, prompt_tuning_table=table),
            "rows 1 and 0 within": executor.generate_async(
                [49, info.vocab_size + 1, info.vocab_size, 4626, 314], params, prompt_tuning_table=table
            ),
            "embeddings alone": executor.generate_async(None, params, prompt_embeddings=table),
        }
        for name, result in results.items():
            print(
                f"{name}: {result.result().text!r}, {result.usage.prompt_tokens if result.usage else 0} prompt tokens"
            )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
