"""The batch manager's callbacks, which supply requests and stop signals, and receive responses and statistics."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence

import numpy as np

from midstream.errors import MidstreamError
from midstream.executor import (
    Executor,
    GptManager,
    InferenceRequest,
    NamedTensor,
    SchedulerConfig,
    TrtGptModelType,
)

RIVER = np.array([[49, 4626, 314]], np.int32)  # A river is


def request(request_id: int, max_new_tokens: int) -> InferenceRequest:
    made = InferenceRequest(request_id)
    made.input_ids = RIVER
    made.max_new_tokens = np.array([[max_new_tokens]], np.int32)
    made.is_streaming = max_new_tokens > 100
    return made


class Source:
    """Supplies two requests and stops the second once it has started."""

    def __init__(self) -> None:
        self._waiting = [request(1, 8), request(2, 4000)]
        self._num_running = 2
        self._to_stop: set[int] = set()
        self.done = threading.Event()

    def get_requests(self, max_num_requests: int) -> list[InferenceRequest]:
        given, self._waiting = self._waiting, []
        return given

    def send_response(self, request_id: int, tensors: Sequence[NamedTensor], is_final: bool, error: str) -> None:
        if request_id == 2:
            self._to_stop.add(request_id)
        if is_final:
            shapes = {item.name: tuple(item.tensor.shape) for item in tensors}
            print(f"request {request_id}: {error or 'output_ids of shape'} {shapes.get('output_ids', '')}")
            self._num_running -= 1
            if not self._num_running:
                self.done.set()

    def poll_stop_signals(self) -> set[int]:
        return self._to_stop


def main(address: str = "127.0.0.1:50051") -> None:
    source, stats = Source(), list[str]()
    with (
        Executor.connect(address) as executor,
        # With a model's path instead of an executor, it starts services of its own.
        GptManager(
            executor,
            TrtGptModelType.InflightFusedBatching,
            1,
            SchedulerConfig(),
            source.get_requests,
            source.send_response,
            source.poll_stop_signals,
            stats.append,
        ),
    ):
        source.done.wait(60)
    if not stats:
        sys.exit("no statistics; is the service running?")
    print("statistics:", sorted(json.loads(stats[-1]))[:4])


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
