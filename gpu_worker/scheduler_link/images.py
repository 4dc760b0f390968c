"""Handles the scheduler's messages about images, which are encoded in a separate thread while steps run."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from gpu_worker.models.images import EncodedImage, ImageEncoder
from midstream.errors import ExecutionError, MidstreamError
from midstream.telemetry import Metrics
from protos import generation_pb2 as pb
from protos import worker_pb2

logger = logging.getLogger(__name__)

_PART_BYTES = 4 << 20
_DTYPES = {torch.float32: pb.Tensor.DTYPE_FLOAT32, torch.bfloat16: pb.Tensor.DTYPE_BFLOAT16}


class ImageMessages:
    """The image messages of the scheduler link.

    Attributes:
        answers: The messages to send, in order.
    """

    def __init__(self, encoder: ImageEncoder, wake: Callable[[], None], metrics: Metrics) -> None:
        """Create the handler; `wake` is called when an answer is ready."""
        self.answers: deque[worker_pb2.ImageEncoded] = deque()
        self._encoder, self._wake = encoder, wake
        self._encoded = metrics.counter("worker_images_encoded", "Images encoded.")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="image-encoder")

    def take(self, message: worker_pb2.SchedulerMessage, epoch: int) -> None:
        """Encode an image of this epoch and then answer; ignore other messages."""
        if message.HasField("encode_image") and message.encode_image.epoch == epoch:
            self._thread.submit(self._answer, message.encode_image)

    def close(self) -> None:
        """Drop the waiting images."""
        self._thread.shutdown(cancel_futures=True)
        self._encoder.close()

    def _answer(self, message: worker_pb2.EncodeImage) -> None:
        try:
            image = self._encoder.encode(message.data)
        except Exception as error:
            if not isinstance(error, MidstreamError):
                logger.exception("an image could not be encoded")
            known = error if isinstance(error, MidstreamError) else ExecutionError(f"encoding failed: {error!r}"[:500])
            self.answers.append(worker_pb2.ImageEncoded(epoch=message.epoch, id=message.id, error=known.to_proto()))
        else:
            self._encoded.inc()
            self.answers.extend(_parts(message, image))
        self._wake()


def _parts(message: worker_pb2.EncodeImage, image: EncodedImage) -> Iterator[worker_pb2.ImageEncoded]:
    table = image.embeddings
    num_rows = max(_PART_BYTES // (table.shape[1] * table.itemsize), 1)
    for start in range(0, len(table), num_rows):
        rows = table[start : start + num_rows]
        part = worker_pb2.ImageEncoded(epoch=message.epoch, id=message.id, text="" if start else image.text)
        part.embeddings.dtype = _DTYPES[table.dtype]
        part.embeddings.shape.extend(rows.shape)
        part.embeddings.data = rows.view(torch.uint8).numpy().tobytes()
        part.embeddings.data_offset = start * table.shape[1] * table.itemsize
        part.embeddings.is_last = start + len(rows) == len(table)
        yield part
