"""The program of a client container: it sends concurrent requests to the service and reports progress.

Prints one JSON object per line: {"num_tokens": N} as output arrives, and finally {"outputs": [...]} with one entry per
request.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys

from midstream.client import AsyncClient, Result, SamplingParams
from midstream.errors import MidstreamError

_TOPICS = ("the sea", "bread", "a lighthouse", "rain", "mountains", "a clock", "the moon", "paper")
_REPORT_EVERY = 100


class Progress:
    """Counts the tokens of all streams."""

    def __init__(self) -> None:
        self._num_tokens = 0

    def add(self, num_tokens: int) -> None:
        before = self._num_tokens
        self._num_tokens += num_tokens
        if before // _REPORT_EVERY != self._num_tokens // _REPORT_EVERY:
            print(json.dumps({"num_tokens": self._num_tokens}), flush=True)


async def run_one(client: AsyncClient, run: str, index: int, max_tokens: int, progress: Progress) -> dict[str, object]:
    """Send one request, greedy if `index` is even and seeded otherwise; check that each token arrives once and in
    order.
    """
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0 if index % 2 == 0 else 0.8, seed=index, ignore_eos=True
    )
    topic = _TOPICS[index % len(_TOPICS)]
    stream = client.generate(f"{index}. A story about {topic}:", sampling=sampling, request_id=f"{run}-{index}")
    result = Result(stream.request_id)
    try:
        async for chunk in stream:
            if chunk.token_offset != len(result.token_ids):
                return {"error": f"got offset {chunk.token_offset} after {len(result.token_ids)} tokens"}
            result.add(chunk)
            progress.add(len(chunk.token_ids))
    except MidstreamError as error:
        return {"error": f"{type(error).__name__}: {error} (after {len(result.token_ids)} tokens)"}
    return {
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": str(result.finish_reason),
        "num_resumes": stream.num_resumes,
    }


def addresses_of(name: str, port: int) -> list[str]:
    """Return all addresses of a headless Service, so that even the first requests are distributed."""
    return sorted({f"{info[4][0]}:{port}" for info in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)})


async def main(service: str, port: int, run: str, num_requests: int, max_tokens: int) -> None:
    progress = Progress()
    async with AsyncClient(addresses_of(service, port)) as client:
        runs = (run_one(client, run, index, max_tokens, progress) for index in range(num_requests))
        outputs = await asyncio.gather(*runs)
    print(json.dumps({"outputs": outputs}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
