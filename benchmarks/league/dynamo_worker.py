"""A worker of NVIDIA Dynamo that runs vLLM's CPU build, by Dynamo's Python API: `python dynamo_worker.py MODEL NAME`.

Dynamo's own vLLM worker requires torchvision and CUDA. This one serves the same endpoint with the same messages: token
ids and sampling options in, token ids out.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm import ModelInput, ModelType, WorkerType, register_model  # type: ignore[import-not-found]
from dynamo.runtime import DistributedRuntime, dynamo_worker  # type: ignore[import-not-found]
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

_SAMPLING = ("n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")


def sampling_of(request: dict[str, Any]) -> SamplingParams:
    """Return vLLM's form of a request's options."""
    options, stops = request["sampling_options"], request["stop_conditions"]
    params = SamplingParams(
        **{name: options[name] for name in _SAMPLING if options.get(name) is not None},
        max_tokens=stops.get("max_tokens"),
        ignore_eos=bool(stops.get("ignore_eos")),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    guide = options.get("guided_decoding") or {}
    if guide.get("regex"):
        params.structured_outputs = StructuredOutputsParams(regex=guide["regex"])
    return params


@dynamo_worker()  # type: ignore[untyped-decorator]
async def work(runtime: DistributedRuntime) -> None:
    """Serve the endpoint until the process is terminated."""
    model, name = sys.argv[1:]
    arguments = AsyncEngineArgs(model=model, dtype="bfloat16", max_model_len=2048, max_num_seqs=64, enforce_eager=True)
    engine = AsyncLLM.from_engine_args(arguments)

    async def generate(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        prompt = {"prompt_token_ids": request["token_ids"]}
        async for output in engine.generate(prompt, sampling_of(request), context.id()):
            for sequence in output.outputs:
                yield {
                    "index": sequence.index,
                    "token_ids": list(sequence.token_ids),
                    "finish_reason": sequence.finish_reason,
                }

    endpoint = runtime.endpoint("league.backend.generate")
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        model,
        name,
        worker_type=WorkerType.Aggregated,
    )
    runtime.set_health_status(True)
    await endpoint.serve_endpoint(generate, graceful_shutdown=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    asyncio.run(work())
