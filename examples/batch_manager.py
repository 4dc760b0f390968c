"""The batch manager's callbacks, which supply requests and stop signals, and receive responses and statistics."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence

from midstream.errors import MidstreamError
from midstream.executor import (
    BatchManager,
    GenerationExecutor,
    GenerationRequest,
    InferenceRequest,
    SamplingParams,
)
from midstream.extras import Tensor


class Source:
    """Supplies two requests and stops the second once it has started."""

    def __init__(self) -> None:
        short, endless = SamplingParams(max_tokens=8), SamplingParams(max_tokens=4000, ignore_eos=True)
        self._waiting = [
            InferenceRequest(1, GenerationRequest("A river is", short)),
            InferenceRequest(2, GenerationRequest("On and on", endless, streaming=True)),
        ]
        self._num_running = 2
        self._to_stop: set[int] = set()
        self.done = threading.Event()

    def get_requests(self, max_num_requests: int) -> list[InferenceRequest]:
        given, self._waiting = self._waiting, []
        return given

    def send_response(self, request_id: int, tensors: Sequence[Tensor], is_final: bool, error: str) -> None:
        if request_id == 2:
            self._to_stop.add(request_id)
        if is_final:
            shapes = {tensor.name: tensor.shape for tensor in tensors}
            print(f"request {request_id}: {error or 'output_ids of shape'} {shapes.get('output_ids', '')}")
            self._num_running -= 1
            if not self._num_running:
                self.done.set()

    def poll_stop_signals(self) -> set[int]:
        return self._to_stop


def main(address: str = "127.0.0.1:50051") -> None:
    source, stats = Source(), list[str]()
    with (
        GenerationExecutor.create(address=address) as executor,
        BatchManager(executor, source.get_requests, source.send_response, source.poll_stop_signals, stats.append),
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
