"""A request's output, as it gathers: filled by the executor's thread, read from any thread or event loop.

1. Chunks arrive in the executor's thread and wait in `_arrived`.
2. A reader takes them: an iteration merges what waits into the output of its sequence, `await_responses` makes
   responses of them. Each chunk goes to whoever comes first; `outputs` has everything that was taken.
3. After the final chunk there is nothing to wait for; an error that ended the request is raised to its readers.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from midstream.chunk import Chunk, PerfMetrics, Usage
from midstream.errors import MidstreamError
from midstream.executor.request import GenerationRequest
from midstream.extras import LogProbs, Tensor


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token, and its rank, 1 being the likeliest; 0: not known."""

    logprob: float
    rank: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One sequence so far.

    Attributes:
        index: Which sequence of the request.
        text: Everything so far.
        text_diff: What came since the iteration before.
        token_ids: Everything so far.
        token_ids_diff: What came since the iteration before.
        cumulative_logprob: Of the whole sequence, at its end, where asked for.
        logprobs: For each token, where asked for: its own log probability and those of the likeliest.
        finish_reason: `stop`, `length`, `abort`, `deadline` or `error`, at its end.
        stop_reason: The stop word or stop token that ended it.
        tensors: Pieces of logits and other outputs, where asked for.
    """

    index: int = 0
    text: str = ""
    text_diff: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_ids_diff: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    tensors: list[Tensor] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        """Takes in the next chunk; one with everything so far replaces what was there."""
        if chunk.token_ids and chunk.token_offset < len(self.token_ids):
            known = len(self.token_ids)
            self.text_diff += chunk.text.removeprefix(self.text)
            self.token_ids_diff += chunk.token_ids[known - chunk.token_offset :]
            self.text, self.token_ids = chunk.text, list(chunk.token_ids)
        else:
            self.text_diff += chunk.text
            self.token_ids_diff += chunk.token_ids
            self.text += chunk.text
            self.token_ids += chunk.token_ids
        if chunk.extras is not None:
            if chunk.extras.log_probs is not None:
                self.logprobs += logprobs_by_token(chunk.extras.log_probs, chunk.token_ids)
            self.tensors += chunk.extras.tensors
        if chunk.is_sequence_final:
            self.finish_reason = chunk.finish_reason.value if chunk.finish_reason else None
            self.stop_reason, self.cumulative_logprob = chunk.matched_stop, chunk.cumulative_log_prob


@dataclass(frozen=True, slots=True)
class ResponseResult:
    """What a response brings: the tokens and text of one sequence since the response before."""

    sequence_index: int
    output_token_ids: list[list[int]]
    text: str
    is_sequence_final: bool
    is_final: bool
    finish_reasons: list[str]
    cum_log_probs: list[float]
    log_probs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Response:
    """One response of a request: a result, or what went wrong."""

    request_id: int
    result: ResponseResult | None = None
    error: MidstreamError | None = None

    def has_error(self) -> bool:
        """Whether the request has failed; nothing follows then."""
        return self.error is not None

    @property
    def error_msg(self) -> str:
        """What went wrong."""
        return str(self.error) if self.error else ""

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return self.error is not None or (self.result is not None and self.result.is_final)


class GenerationResult:
    """Iterate over it (`for` or `async for`) for outputs as they grow, or wait for `result()`.

    Attributes:
        request: The request, with its id.
        outputs: One per sequence.
        usage: Token counts, at the end.
        perf_metrics: At the end, where asked for.
        prompt_logprobs: For each prompt token, where asked for.
    """

    def __init__(self, request: GenerationRequest, on_taken: Callable[[GenerationResult], None]) -> None:
        """`on_taken` is called when everything has been read."""
        self.request = request
        self.outputs: list[CompletionOutput] = [CompletionOutput()]
        self.usage: Usage | None = None
        self.perf_metrics: PerfMetrics | None = None
        self.prompt_logprobs: list[dict[int, Logprob]] = []
        self._on_taken = on_taken
        self._lock = threading.Lock()
        self._arrived: deque[Chunk] = deque()
        self._news: Future[None] = Future()
        self._ended = False
        self._was_read = False
        self._error: MidstreamError | None = None

    @property
    def finished(self) -> bool:
        """Whether the request has ended; what it brought may not have been read yet."""
        return self._ended

    def result(self, timeout: float | None = None) -> CompletionOutput:
        """The first sequence, once the request has ended; all of them are in `outputs`.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: It has not ended by then; it goes on.
            MidstreamError: It failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (news := self._unended()) is not None:
            news.result(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        return self._outcome()

    async def aresult(self, timeout: float | None = None) -> CompletionOutput:  # noqa: ASYNC109 (the name users know)
        """As `result`, for asynchronous code."""
        async with asyncio.timeout(timeout):
            while (news := self._unended()) is not None:
                await asyncio.shield(asyncio.wrap_future(news))
        return self._outcome()

    def __iter__(self) -> Iterator[CompletionOutput]:
        while (output := self._next_output()) is not None:
            if isinstance(output, Future):
                output.result()
            else:
                yield output

    async def __aiter__(self) -> AsyncIterator[CompletionOutput]:
        while (output := self._next_output()) is not None:
            if isinstance(output, Future):
                await asyncio.shield(asyncio.wrap_future(output))
            else:
                yield output

    def put(self, chunk: Chunk) -> None:
        """For the executor: more output."""
        with self._lock:
            self._arrived.append(chunk)
            self._wake()

    def end(self, error: MidstreamError | None) -> None:
        """For the executor: nothing more comes."""
        with self._lock:
            if not self._ended:
                self._ended, self._error = True, error
                self._wake()

    def take_responses(self) -> list[Response]:
        """For the executor: what nobody has read yet, each piece with its own response."""
        with self._lock:
            chunks = list(self._arrived)
            self._arrived.clear()
            for chunk in chunks:
                self._merge(chunk)
            is_read, is_news = self._ended, self._ended and not self._was_read
            self._was_read = is_read
        responses = [Response(self.request.id, _response_result(chunk)) for chunk in chunks]
        if is_news and self._error is not None:
            responses.append(Response(self.request.id, error=self._error))
        if is_news:
            self._on_taken(self)
        return responses

    def _unended(self) -> Future[None] | None:
        """What to wait for; None once the request has ended."""
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

    def _next_output(self) -> CompletionOutput | Future[None] | None:
        """The sequence that has grown, or what to wait for, or None at the end."""
        with self._lock:
            if not self._arrived and not self._ended:
                return self._news
            for output in self.outputs:
                output.text_diff, output.token_ids_diff = "", []
            grown = None
            # What follows for the same sequence comes along, so that a slow reader catches up.
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
        if chunk.is_final:
            self.usage, self.perf_metrics = chunk.usage, chunk.perf_metrics
        return output

    def _prompt_ids(self) -> list[int]:
        prompt = self.request.prompt
        return [] if isinstance(prompt, str) else list(prompt)[len(self.prompt_logprobs) :]

    def _wake(self) -> None:
        news, self._news = self._news, Future()
        news.set_result(None)


def logprobs_by_token(rows: LogProbs, token_ids: list[int] | tuple[int, ...] | object) -> list[dict[int, Logprob]]:
    """One mapping per row: the token's own log probability, where the token is known, and those of the likeliest."""
    ids = list(token_ids) if isinstance(token_ids, list | tuple) else []
    result = []
    for row, log_prob in enumerate(rows.token_log_probs):
        top = slice(row * rows.top_k, (row + 1) * rows.top_k)
        pairs = zip(rows.top_token_ids[top], rows.top_log_probs[top], strict=True)
        entry = {token: Logprob(value, rank + 1) for rank, (token, value) in enumerate(pairs)}
        if row < len(ids):
            rank = rows.token_ranks[row] if row < len(rows.token_ranks) else 0
            entry[ids[row]] = Logprob(log_prob, rank)
        result.append(entry)
    return result


def _response_result(chunk: Chunk) -> ResponseResult:
    log_probs = chunk.extras.log_probs if chunk.extras else None
    return ResponseResult(
        sequence_index=chunk.sequence_index,
        output_token_ids=[list(chunk.token_ids)],
        text=chunk.text,
        is_sequence_final=chunk.is_sequence_final,
        is_final=chunk.is_final,
        finish_reasons=[chunk.finish_reason.value] if chunk.finish_reason else [],
        cum_log_probs=[] if chunk.cumulative_log_prob is None else [chunk.cumulative_log_prob],
        log_probs=[list(log_probs.token_log_probs)] if log_probs else [],
    )
