"""Has workers encode images for routers, and caches the results by the images' contents.

A worker encodes one image at a time, so that an image that ends a worker's process is the only one to be blamed. If a
worker is lost, another one encodes the image; after `max_deaths` losses, the image is refused. A worker that returns an
invalid answer is itself at fault: it is held off as for an invalid result, and the image is not blamed. A worker that
does not answer in time is held off as well, but the image may be the cause, so this also counts as a loss. The core
does not know about images: the request that a router submits contains the embeddings.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from midstream.errors import (
    ExecutionError,
    InvalidArgumentError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
    from_proto,
)
from protos import scheduler_pb2, worker_pb2
from scheduler.core.worker_group import WorkerGroup
from scheduler.wire.worker_checks import WrongMessageError

logger = logging.getLogger(__name__)

MAX_IMAGE_BYTES = 16 << 20
# The embeddings of an image must fit into a message to the router.
MAX_TABLE_BYTES = 48 << 20
# Bytes of images that may wait for workers or be encoded.
_MAX_PENDING_BYTES = 256 << 20
_LOOK_INTERVAL_S = 0.25
# Maximum number of workers that are asked to encode an image.
_MAX_TRIES = 8

Response = scheduler_pb2.EncodeImageResponse


class ImageSender(Protocol):
    """Sends images to workers."""

    def send_image(self, connection: bytes, epoch: int, image_id: int, data: bytes) -> None:
        """Ask a worker to encode an image; it answers with ImageEncoded."""

    def fail_worker(self, connection: bytes, reason: str) -> None:
        """End the epoch of a worker that does not answer."""


@dataclass(slots=True)
class _Asked:
    """An image that a worker encodes; the parts of the answer are collected in `response`."""

    done: asyncio.Future[Response]
    response: Response = field(default_factory=Response)


class Images:
    """The images of one scheduler.

    Attributes:
        num_cached: Number of calls answered from the cache, or by an encoding that was in progress.
    """

    def __init__(
        self,
        *,
        groups: Callable[[], list[WorkerGroup]],
        sender: ImageSender,
        hidden_size: int,
        max_deaths: int,
        no_worker_timeout_s: float,
        answer_timeout_s: float,
        cache_bytes: int,
    ) -> None:
        """Start with an empty cache.

        Args:
            max_deaths: An image is refused once this number of workers has been lost while encoding it.
            no_worker_timeout_s: How long an image waits if there is no worker.
            answer_timeout_s: Time within which a worker must encode an image.
        """
        self.num_encoded = self.num_cached = 0
        self._groups, self._sender, self._hidden_size = groups, sender, hidden_size
        self._max_deaths, self._no_worker_timeout_s = max_deaths, no_worker_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._cache_bytes, self._num_cache_bytes = cache_bytes, 0
        self._cache: OrderedDict[bytes, Response] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[Response]] = {}
        self._num_pending_bytes = 0
        self._asked: dict[tuple[int, int], _Asked] = {}  # by epoch and id
        self._busy: set[int] = set()  # epochs
        self._freed = asyncio.Event()
        self._last_id = 0

    @property
    def num_running(self) -> int:
        """Number of images that workers are encoding."""
        return len(self._asked)

    async def encode(self, data: bytes) -> Response:
        """Return the embeddings of an image. Raises MidstreamError if the image is invalid, there is no worker for it,
        or too many images are waiting.
        """
        if not 0 < len(data) <= MAX_IMAGE_BYTES:
            raise InvalidArgumentError(f"has {len(data)} bytes; must have 1 to {MAX_IMAGE_BYTES}", field="data")
        digest = hashlib.sha256(data).digest()
        found = self._cache.get(digest)
        if found is not None:
            self.num_cached += 1
            self._cache.move_to_end(digest)
            return found
        running = self._running.get(digest)
        if running is None:
            if self._num_pending_bytes + len(data) > _MAX_PENDING_BYTES:
                raise OverloadedError("too many images are waiting to be encoded")
            self._num_pending_bytes += len(data)
            running = self._running[digest] = asyncio.create_task(self._encode(data))
            running.add_done_callback(lambda task: self._finish(digest, len(data), task))
        else:
            self.num_cached += 1
        return await asyncio.shield(running)

    def on_result(self, result: worker_pb2.ImageEncoded) -> None:
        """Process one message of a worker's answer.

        Raises:
            WrongMessageError: The answer is invalid; the caller ends the worker's epoch.
        """
        asked = self._asked.get((result.epoch, result.id))
        if asked is None or asked.done.done():
            return
        if result.HasField("error"):
            asked.done.set_exception(from_proto(result.error))
            return
        part, whole = result.embeddings, asked.response
        problem = self._problem(asked, result)
        if problem:
            raise WrongMessageError(f"image_encoded: {problem}")
        if not whole.HasField("embeddings"):
            whole.text = result.text
            whole.embeddings.dtype = part.dtype
            whole.embeddings.shape[:] = (0, self._hidden_size)
        whole.embeddings.shape[0] += part.shape[0]
        whole.embeddings.data += part.data
        if part.is_last:
            asked.done.set_result(whole)

    def _problem(self, asked: _Asked, result: worker_pb2.ImageEncoded) -> str:
        part, whole = result.embeddings, asked.response.embeddings
        if len(part.shape) != 2 or part.shape[1] != self._hidden_size or not part.shape[0]:
            return f"the shape is {list(part.shape)}; must be [number of tokens, {self._hidden_size}]"
        if part.data_offset != len(whole.data) or (whole.data and part.dtype != whole.dtype):
            return "its parts do not fit together"
        if len(whole.data) + len(part.data) > MAX_TABLE_BYTES:
            return f"it has more than {MAX_TABLE_BYTES} bytes"
        return ""

    def _finish(self, digest: bytes, num_bytes: int, task: asyncio.Task[Response]) -> None:
        self._num_pending_bytes -= num_bytes
        del self._running[digest]
        if task.cancelled() or task.exception() is not None:
            return
        self.num_encoded += 1
        response = task.result()
        self._cache[digest] = response
        self._num_cache_bytes += len(response.embeddings.data)
        while self._num_cache_bytes > self._cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._num_cache_bytes -= len(oldest.embeddings.data)

    async def _encode(self, data: bytes) -> Response:
        num_deaths = 0
        for _ in range(_MAX_TRIES):
            async with self._free_group() as group:
                num_faults, response, is_late = group.standing.num_faults, None, False
                try:
                    response = await self._ask(group, data)
                except TimeoutError:
                    is_late = True
                    self._sender.fail_worker(group.connection, "it did not encode an image in time")
            if response is not None:
                return response
            logger.warning("a worker was lost while it encoded an image", extra={"epoch": group.epoch})
            num_deaths += is_late or group.standing.num_faults == num_faults
            if num_deaths >= self._max_deaths:
                raise ExecutionError(f"{num_deaths} workers were lost while they encoded the image")
        raise ExecutionError("no worker returned a valid answer for the image")

    @contextlib.asynccontextmanager
    async def _free_group(self) -> AsyncIterator[WorkerGroup]:
        """Wait for a worker that encodes no image, and yield the one with the most free rows. Workers that are held off
        are not asked, and those on trial only if there are no others. Raises UnavailableError if there is no worker, or
        UnsupportedError if the workers encode no images.
        """
        loop = asyncio.get_running_loop()
        give_up_at = math.inf
        while True:
            groups = self._groups()
            able = [group for group in groups if "vision" in group.registration.features]
            free = [group for group in able if group.epoch not in self._busy and not group.is_held_off]
            if free:
                break
            if groups and not able:
                raise UnsupportedError("the workers encode no images", field="data")
            if groups:
                give_up_at = math.inf
            elif give_up_at == math.inf:
                give_up_at = loop.time() + self._no_worker_timeout_s
            if loop.time() >= give_up_at:
                raise UnavailableError("no worker has joined")
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), _LOOK_INTERVAL_S)
        group = max(free, key=lambda group: (not group.standing.is_on_trial, group.num_free_rows))
        self._busy.add(group.epoch)
        try:
            yield group
        finally:
            self._busy.discard(group.epoch)
            self._freed.set()

    async def _ask(self, group: WorkerGroup, data: bytes) -> Response | None:
        """Return a worker's answer, or None if the worker is lost first. Raises TimeoutError if it is too slow."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._answer_timeout_s
        self._last_id += 1
        key = (group.epoch, self._last_id)
        asked = self._asked[key] = _Asked(loop.create_future())
        try:
            self._sender.send_image(group.connection, group.epoch, self._last_id, data)
            while not asked.done.done():
                await asyncio.wait((asked.done,), timeout=_LOOK_INTERVAL_S)
                if not asked.done.done() and all(other.epoch != group.epoch for other in self._groups()):
                    return None
                if not asked.done.done() and loop.time() >= give_up_at:
                    raise TimeoutError
            return asked.done.result()
        finally:
            del self._asked[key]
