"""The executor, as in TensorRT-LLM's documentation: several prompts at once, a future, and synchronous and asynchronous
streams.

Without an address `GenerationExecutor.create("smollm2")` starts its own service.
"""

from __future__ import annotations

import asyncio
import sys

from midstream.errors import MidstreamError
from midstream.executor import GenerationExecutor, SamplingParams


async def stream(executor: GenerationExecutor, params: SamplingParams) -> None:
    async for output in executor.generate_async("Birds can", params, streaming=True):
        print(output.text_diff, end="", flush=True)
    print()


def main(address: str = "127.0.0.1:50051") -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    with GenerationExecutor.create(address=address) as executor:
        for result in executor.generate(["The sky is", "Two and two is", "Water boils at"], params):
            print(f"{result.request.prompt_token_ids}{result.outputs[0].text}")

        future = executor.generate_async("The sea is", params)
        print(f"The sea is{future.result(timeout=60).text}")

        for output in executor.generate_async("Fish can", params, streaming=True):
            print(output.text_diff, end="", flush=True)
        print()
        asyncio.run(stream(executor, params))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
