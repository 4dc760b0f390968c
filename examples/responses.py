"""Receive the responses of several requests in one loop, cancel a request, and read the scheduler's statistics."""

from __future__ import annotations

import sys
from datetime import timedelta

from midstream.errors import MidstreamError
from midstream.executor import Executor, Request

RIVER = [49, 4626, 314]  # A river is


def main(address: str = "127.0.0.1:50051") -> None:
    with Executor.connect(address) as executor:
        finite = executor.enqueue_request(Request(RIVER, max_tokens=8))
        other = executor.enqueue_request(Request(RIVER, max_tokens=4000, streaming=True))
        waiting = {finite: "the short one", other: "the endless one"}
        while waiting:
            for response in executor.await_responses(timedelta(seconds=60)):
                if response.has_error():
                    sys.exit(response.error_msg)
                if response.request_id == other and not response.result.is_final:
                    executor.cancel_request(other)
                if response.result.is_final:
                    reasons = [reason.name for reason in response.result.finish_reasons]
                    print(f"{waiting.pop(response.request_id)}: {reasons}")
        stats = executor.get_latest_iteration_stats()[-1]
        print(
            f"{stats.num_completed_requests} requests completed; at most {stats.max_num_active_requests} run at a time"
        )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
