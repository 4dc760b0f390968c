"""A request's output, which the executor's thread writes, and any thread or event loop can read.

1. Chunks arrive in the executor's thread and wait in `_arrived`.
2. A reader takes them and merges them into the output of their sequence. Each chunk goes to the first reader; `outputs`
   has everything that was read.
3. After the final chunk, no reader waits any longer; if the request failed, its error is raised to its readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

from midstream.chunk import Chunk, FinishReason, PerfMetrics, Usage
from midstream.errors import MidstreamError
from midstream.executor.completion_output import CompletionOutput, Logprob, logprobs_by_token
from midstream.executor.generation_request import GenerationRequest
from midstream.executor.lifecycle import RequestState
from midstream.executor.tensors import AnyTensor, to_user
from midstream.extras import CONTEXT


class ResultQueue:
    """The outputs of a GenerationResult as a queue; iteration omits outputs that were taken from the queue."""

    def __init__(self, result: GenerationResult) -> None:
        self._result = result

    def get(self, block: bool = True, timeout: float | None = None) -> CompletionOutput:
        """Return the output that an iteration would return next.

        Args:
            block: Whether to wait.
            timeout: Maximum time to wait, in seconds.

        Raises:
            queue.Empty: No output arrived in time, or everything has been read.
            MidstreamError: The request failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while isinstance(output := self._result.next_output(), Future):
            left = None if deadline is None else deadline - time.monotonic()
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            with contextlib.suppress(TimeoutError):
                output.result(left)
        if output is None:
            raise queue.Empty
        return output

    async def get_async(self, timeout: float | None = None) -> CompletionOutput:  # noqa: ASYNC109 (the name users know)
        """Same as `get`, for asynchronous code."""
        try:
            async with asyncio.timeout(timeout):
                while isinstance(output := self._result.next_output(), Future):
                    await asyncio.shield(asyncio.wrap_future(output))
        except TimeoutError:
            raise queue.Empty from None
        if output is None:
            raise queue.Empty
        return output

    def empty(self) -> bool:
        """Return whether `get` would wait or raise."""
        return not self._result.has_arrived


class GenerationResult:
    """A request's output: iterate (`for` or `async for`) while it grows, or wait for `result()`.

    Attributes:
        request: The request, with its id.
        outputs: The output of each sequence.
        queue: The outputs one by one, as an alternative to iteration and `result()`.
        usage: Token counts, at the end.
        perf_metrics: Times and counters, at the end, if requested.
        prompt_logprobs: Log probabilities for each prompt token from the second on, if requested; they include the
            token's own if the prompt was given as tokens.
    """

    def __init__(
        self,
        request: GenerationRequest,
        on_taken: Callable[[GenerationResult], None],
        ask_state: Callable[[int], RequestState] | None = None,
    ) -> None:
        """Create a result without output.

        Args:
            request: The request, with its id.
            on_taken: Called when everything has been read.
            ask_state: Queries the service for the state of an unfinished request.
        """
        self.request = request
        self.outputs: list[CompletionOutput] = [CompletionOutput()]
        self.usage: Usage | None = None
        self.perf_metrics: PerfMetrics | None = None
        self.prompt_logprobs: list[dict[int, Logprob]] = []
        self.queue = ResultQueue(self)
        self._on_taken = on_taken
        self._ask_state = ask_state
        self._lock = threading.Lock()
        self._arrived: deque[Chunk] = deque()
        self._news: Future[None] = Future()
        self._ended = False
        self._end_state: RequestState | None = None
        self._error: MidstreamError | None = None

    @property
    def context_logits(self) -> AnyTensor | None:
        """The model's logits at each prompt token [tokens, vocabulary], if requested."""
        return to_user(self.outputs[0].whole_tensors().get("context_logits"))

    @property
    def additional_context_outputs(self) -> dict[str, AnyTensor]:
        """Additional outputs for the prompt's tokens, by name."""
        tensors = self.outputs[0].whole_tensors()
        names = [name for name in tensors if name.startswith(CONTEXT) and name != "context_logits"]
        return {name.removeprefix(CONTEXT): to_user(tensors[name]) for name in names}

    @property
    def streaming(self) -> bool:
        """Whether output is streamed."""
        return self.request.streaming

    @property
    def done(self) -> bool:
        """Whether the request has ended; its output may not have been read yet."""
        return self._ended

    @property
    def state(self) -> RequestState:
        """The request's life-cycle state; queries the service unless the request has ended."""
        with self._lock:
            end = self._end_state
        if end is not None:
            return end
        return RequestState.PENDING if self._ask_state is None else self._ask_state(self.request.id)

    def result(self, timeout: float | None = None) -> CompletionOutput:
        """Return the output of the first sequence once the request has ended; `outputs` has that of all sequences.

        Args:
            timeout: Maximum time to wait, in seconds.

        Raises:
            TimeoutError: The request has not ended; it continues.
            MidstreamError: The request failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (news := self._unended()) is not None:
            news.result(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        return self._outcome()

    async def aresult(self, timeout: float | None = None) -> CompletionOutput:  # noqa: ASYNC109 (the name users know)
        """Same as `result`, for asynchronous code."""
        async with asyncio.timeout(timeout):
            while (news := self._unended()) is not None:
                await asyncio.shield(asyncio.wrap_future(news))
        return self._outcome()

    def __iter__(self) -> Iterator[CompletionOutput]:
        while (output := self.next_output()) is not None:
            if isinstance(output, Future):
                output.result()
            else:
                yield output

    async def __aiter__(self) -> AsyncIterator[CompletionOutput]:
        while (output := self.next_output()) is not None:
            if isinstance(output, Future):
                await asyncio.shield(asyncio.wrap_future(output))
            else:
                yield output

    def put(self, chunk: Chunk) -> None:
        """Add output; called by the executor."""
        with self._lock:
            self._arrived.append(chunk)
            if chunk.is_final and chunk.finish_reason is FinishReason.ABORT:
                self._end_state = RequestState.ABORTED
            self._wake()

    def end(self, error: MidstreamError | None) -> None:
        """Mark the end of the output; called by the executor."""
        with self._lock:
            if not self._ended:
                self._ended, self._error = True, error
                self._end_state = RequestState.FINISHED if self._end_state is None else self._end_state
                self._wake()

    @property
    def has_arrived(self) -> bool:
        """Whether output is waiting; used by the queue."""
        return bool(self._arrived)

    def _unended(self) -> Future[None] | None:
        """Return a future that completes on the next update, or None if the request has ended."""
        with self._lock:
            return None if self._ended else self._news

    def _outcome(self) -> CompletionOutput:
        with self._lock:
            while self._arrived:
                self._merge(self._arrived.popleft())
        self._on_taken(self)
        if self._error is not None:
            raise self._error
        return self.outputs[0]

    def next_output(self) -> CompletionOutput | Future[None] | None:
        """Return the sequence that has grown, else a future to wait for, or None at the end; used by the queue."""
        with self._lock:
            if not self._arrived and not self._ended:
                return self._news
            for output in self.outputs:
                output.text_diff, output.token_ids_diff = "", []
            grown = None
            # Later chunks of the same sequence are merged too, so that a slow reader can catch up.
            while self._arrived and (grown is None or self._arrived[0].sequence_index == grown.index):
                grown = self._merge(self._arrived.popleft())
            is_read = self._ended and not self._arrived
        if is_read:
            self._on_taken(self)
        if grown is None and self._error is not None:
            raise self._error
        return None if grown is None else replace(grown)

    def _merge(self, chunk: Chunk) -> CompletionOutput:
        while len(self.outputs) <= chunk.sequence_index:
            self.outputs.append(CompletionOutput(len(self.outputs)))
        output = self.outputs[chunk.sequence_index]
        output.add(chunk)
        if chunk.extras is not None and chunk.extras.prompt_log_probs is not None:
            self.prompt_logprobs += logprobs_by_token(chunk.extras.prompt_log_probs, self._prompt_ids())
        params = self.request.sampling_params
        if isinstance(output.stop_reason, int) and chunk.is_sequence_final and not params.include_stop_str_in_output:
            output.drop_last_token()
        if chunk.is_final:
            self.usage, self.perf_metrics = chunk.usage, chunk.perf_metrics
            if params.num_beams == 1 and params.num_sequences > params.n:
                self._keep_best(params.n)
        return output

    def _keep_best(self, number: int) -> None:
        """Keep only the sequences with the highest probability, best first."""
        self.outputs.sort(key=lambda output: -(output.cumulative_logprob or 0.0))
        del self.outputs[number:]
        for index, output in enumerate(self.outputs):
            output.index = index

    def _prompt_ids(self) -> list[int]:
        """Return the prompt tokens whose log probabilities come next; empty if the prompt was text."""
        return self.request.known_token_ids[1 + len(self.prompt_logprobs) :]

    def _wake(self) -> None:
        news, self._news = self._news, Future()
        news.set_result(None)
