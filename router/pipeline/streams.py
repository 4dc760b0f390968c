"""Pending output for one client, merged into one message.

There is no queue. While a client is slow, its next message grows, with one chunk per sequence. Once more than
`max_pending_bytes` are pending, the stream is ended, without effect on other streams.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

from midstream.chunk import Chunk, SequenceEnds
from midstream.errors import MidstreamError, OverloadedError, UnavailableError
from midstream.extras import TensorCursor
from router.pipeline.wakeups import Waiter, wake_now


class ClientStream:
    """Pending output of one request for one client.

    Attributes:
        is_final: Whether the final chunk has arrived (it may still be pending).
        overflowed: Whether the stream was ended because the client reads too slowly.
        scheduler: Address of the scheduler that has the request; empty if unknown.
        num_ahead: Number of tokens that were counted before their output was taken.
        foreign_tokenizers: Tokenizers that are known not to be the request's.
    """

    __slots__ = (
        "_begun", "_ends", "_error", "_from_token", "_max_pending_bytes", "_num_bytes", "_offsets", "_on_overflow",
        "_pending", "_tensors", "_waiter", "_waker", "foreign_tokenizers", "is_final", "num_ahead", "overflowed",
        "request_id", "scheduler",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        max_pending_bytes: int,
        *,
        from_token: int = 0,
        from_token_by_sequence: Sequence[int] = (),
        on_overflow: Callable[[], None] = lambda: None,
        waker: Callable[[Waiter], None] = wake_now,
    ) -> None:
        """The client already has the first `from_token` tokens of each sequence, or as many as `from_token_by_sequence`
        states for it. `waker` wakes the task that waits for output.
        """
        self.request_id = request_id
        self.is_final = False
        self.overflowed = False
        self.scheduler = ""
        self.num_ahead = 0
        self.foreign_tokenizers: set[str] = set()
        self._from_token = from_token
        self._max_pending_bytes = max_pending_bytes
        self._on_overflow = on_overflow
        self._waker = waker
        self._offsets: dict[int, int] = dict(enumerate(from_token_by_sequence))
        self._ends = SequenceEnds()
        self._begun: set[int] = set()
        self._pending: dict[int, Chunk] = {}
        self._tensors: defaultdict[int, TensorCursor] = defaultdict(TensorCursor)
        self._num_bytes = 0
        self._error: MidstreamError | None = None
        self._waiter: Waiter | None = None

    @property
    def from_token(self) -> int:
        """Start offset of sequences that have no output yet."""
        return self._from_token

    @property
    def offsets(self) -> list[int]:
        """Next offset of each sequence, up to the last sequence with output; empty if there is no output yet."""
        size = max(self._offsets, default=-1) + 1
        return [self._offsets.get(index, self._from_token) for index in range(size)]

    def push(self, chunk: Chunk) -> None:
        """Add output and drop duplicates; a gap is a failure of the source, so that the stream is reattached."""
        index = chunk.sequence_index
        if chunk.extras is not None:
            chunk.extras = self._tensors[index].new(chunk.extras)
        expected, next_offset = self._offsets.get(index, self._from_token), chunk.next_offset
        if self.is_final or self.overflowed or (next_offset <= expected and not chunk.adds_to(expected)):
            return
        if chunk.token_offset > expected:
            self.fail(UnavailableError(f"a chunk skipped tokens {expected} to {chunk.token_offset}"))
            return
        if self._ends.repeats(chunk):
            return
        is_first = index not in self._begun
        if is_first:
            self._begun.add(index)
        self._offsets[index] = max(next_offset, expected)
        self.is_final = chunk.is_final
        pending = self._pending.get(index)
        if pending is None:
            self._pending[index] = chunk
            self._num_bytes += chunk.num_bytes
        else:
            self._num_bytes -= pending.num_bytes
            pending.append(chunk)
            self._num_bytes += pending.num_bytes
        # If a sequence is sent only at its end, or is sent again, its output arrives as one chunk, even if the client
        # reads fast.
        if self._num_bytes > self._max_pending_bytes and not (is_first or chunk.is_sequence_final):
            self.overflowed = True
            self._pending.clear()
            self.fail(OverloadedError("the client reads too slowly"))
            self._on_overflow()
        else:
            self._wake()

    def count_held(self, num_held: int) -> int:
        """Return how many of the tokens that the detokenizer holds have not been counted yet, and count them.

        After the loss of a detokenizer, the next one gets the same tokens again.
        """
        num_new = max(num_held - self.num_ahead, 0)
        self.num_ahead += num_new
        return num_new

    def count_taken(self, num_tokens: int) -> int:
        """Return how many tokens of output that was taken have not been counted yet."""
        num_known = min(self.num_ahead, num_tokens)
        self.num_ahead -= num_known
        return num_tokens - num_known

    def fail(self, error: MidstreamError) -> None:
        """Record a failure of the source; `take` raises it once all pending output has been taken."""
        self._error = error
        self._wake()

    async def take(self) -> list[Chunk]:
        """Return all pending output, at least one chunk; the final one comes last.

        Raises:
            MidstreamError: The error given to `fail`. After UnavailableError, another source may continue the output.
        """
        while not self._pending:
            if self._error is not None:
                raise self._take_error()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        chunks = list(self._pending.values())
        self._pending = {}
        self._num_bytes = 0
        if len(chunks) > 1:
            chunks.sort(key=lambda chunk: chunk.is_final)
        return chunks

    def _take_error(self) -> MidstreamError:
        # A local variable would form a reference cycle with the traceback and thus keep the call alive.
        try:
            return self._error or UnavailableError("the source is gone")
        finally:
            self._error = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            self._waker(waiter)
