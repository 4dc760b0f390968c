"""Receive the responses of several requests in one loop, abort a request, and read the scheduler's statistics."""

from __future__ import annotations

import sys

from midstream.errors import MidstreamError
from midstream.executor import GenerationExecutor, GenerationRequest, SamplingParams


def main(address: str = "127.0.0.1:50051") -> None:
    with GenerationExecutor.create(address=address) as executor:
        short = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        endless = SamplingParams(max_tokens=4000, ignore_eos=True)
        finite = executor.submit(GenerationRequest("A river is", short)).request.id
        other = executor.submit(GenerationRequest("On and on", endless, streaming=True)).request.id
        waiting = {finite: "the short one", other: "the endless one"}
        while waiting:
            for response in executor.await_responses(timeout=60):
                if response.request_id == other:
                    executor.abort_request(other)
                if response.error is not None:
                    raise response.error
                if response.is_final and response.result is not None:
                    print(f"{waiting.pop(response.request_id)}: {response.result.finish_reasons}")
        stats = executor.get_latest_stats()
        print(
            f"{stats.num_completed_requests} requests completed; at most {stats.max_num_active_requests} run at a time"
        )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
