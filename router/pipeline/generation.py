"""The processing of a request in the router, shared by all APIs.

1. `start` checks the request, tokenizes its prompt, fills unset fields, and chooses a cell.
2. The cell's scheduler accepts it (Submit, retried within the deadline while the scheduler is unreachable).
3. It is attached to a live detokenizer, whose output is collected in a ClientStream.
4. The API takes chunks. If the detokenizer is lost, the next `take` attaches to another at the offset reached. If
   the scheduler has lost the request, it is submitted again, and since its output is a function of its contents and
   seed, the stream continues from the same offset.
5. When the client disconnects before the end and does not soon return, the request is aborted, unless it is detached.

The router holds no state that cannot be recovered: `resume` enters at step 3 with a request id and an offset.

    async with await front.start(request, timeout_s) as output:
        while not output.is_final:
            for chunk in await output.take():
                await write(chunk)

While a write waits for the client, output is merged in the ClientStream; when the output exceeds its limit, the task
that opened it is cancelled, to interrupt the blocked write.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from midstream.chunk import Chunk, FinishReason
from midstream.config import RouterConfig
from midstream.errors import (
    AbortedError,
    DeadlineError,
    ExecutionError,
    InvalidArgumentError,
    MidstreamError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from midstream.model.folder import ModelFolder
from midstream.telemetry import Metrics, current_request_id
from protos import generation_pb2 as pb
from router.authentication import Caller, current_caller
from router.pipeline.background import current_background
from router.pipeline.cells import Cell, Cells, CellSet
from router.pipeline.deadlines import until
from router.pipeline.detokenizer_pool import Attachment, DetokenizerPool
from router.pipeline.generation_defaults import GenerationDefaults, generation_defaults
from router.pipeline.grammar_check import GrammarChecker
from router.pipeline.idempotency import naming_key
from router.pipeline.images import images_of
from router.pipeline.keep_alives import KeepAlives
from router.pipeline.kept_requests import KeptRequests
from router.pipeline.metrics import RouterMetrics
from router.pipeline.output_checks import Constraints, Divide, Inspection, OutputValidator, divide_native
from router.pipeline.prompt import PromptBuilder
from router.pipeline.quotas import Admission, Quotas
from router.pipeline.receipts import Receipts
from router.pipeline.request_checks import (
    MAX_DURATION_MS,
    check_adapter_path,
    check_name,
    check_request,
    check_supported,
    check_tensors,
    fit_to_context,
    fit_to_tensors,
)
from router.pipeline.request_traces import RequestSpan, RequestTraces
from router.pipeline.start_slots import StartSlots
from router.pipeline.stream_limits import StreamLimits
from router.pipeline.streams import ClientStream
from router.pipeline.virtual_tokens import put_table_first, take_embeddings
from router.pipeline.wakeups import Waiter, Wakeups
from router.pipeline.weights import WeightsAdmin

logger = logging.getLogger(__name__)

Prepare = Callable[[], Awaitable[None]]
_T = TypeVar("_T")
# Maximum number of requests of a client that start at the same time. It is higher while no other client starts any:
# the journal then commits more of them together, and fewer wait for a slot. A new client's first request waits for one
# step of each.
_MAX_STARTS, _MAX_STARTS_ALONE = 4, 64
_NUM_NEW_IDS = 64
_REATTACH_S = 0.05
# The scheduler ends a request at its deadline; if the scheduler hangs, the router ends the request this much later.
_LATE_S = 1.0
# Time for which a disconnected client may reconnect.
_RETURN_S = 0.5


class Readers:
    """Counts the clients of each request, since a client may reconnect before its first stream is closed."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._counts

    def enter(self, request_id: str) -> None:
        """Add a client."""
        self._counts[request_id] += 1

    def leave(self, request_id: str) -> None:
        """Remove a client."""
        self._counts[request_id] -= 1
        if not self._counts[request_id]:
            del self._counts[request_id]


class Generation:
    """A running request, or a finished one whose output is read again.

    Attributes:
        request_id: The request's id.
        stream: Its output.
    """

    def __init__(
        self,
        runner: Runner,
        stream: ClientStream,
        deadline: float | None,
        cell: Cell | None = None,
        request: pb.GenerateRequest | None = None,
        *,
        is_keyed: bool = False,
    ) -> None:
        self.request_id = stream.request_id
        self.stream = stream
        self._runner = runner
        self._deadline = deadline
        self._cell = cell
        self._request = request
        self._is_keyed = is_keyed
        self._attachment: Attachment | None = None
        self._is_reading = request is not None
        self._num_failures = 0  # since the last output
        self._timer: asyncio.TimerHandle | None = None

    @property
    def may_continue(self) -> bool:
        """Whether the request may continue while nobody reads it."""
        return self._request is None or self._request.detached

    async def take(self) -> list[Chunk]:
        """Return the next output, at least one chunk; must not be called after the final chunk.

        Raises:
            MidstreamError: The stream cannot continue.
        """
        if not self._is_reading:
            self._is_reading = True
            self._runner.readers.enter(self.request_id)
        if self._attachment is None:
            if self._deadline is not None:
                late_at = self._deadline + _LATE_S
                self._timer = asyncio.get_running_loop().call_at(late_at, self.stream.fail, _deadline_error())
            await self._attach()
        while True:
            try:
                chunks = await self.stream.take()
            except (UnavailableError, NotFoundError) as error:
                await self._recover(error)
            else:
                self._num_failures = 0
                if chunks[-1].receipt_lengths:
                    await self._runner.add_receipt(self.request_id, chunks[-1])
                return chunks

    async def _attach(self, avoid: Attachment | None = None) -> None:
        """Attach the stream to a detokenizer at its current offset."""
        pool, link = self._runner.pool, avoid.link if avoid else None
        cells = self._runner.cells
        if cells.are_several:
            is_known = self._cell is not None and not self._cell.is_gone
            cell = self._cell if is_known else await cells.holder_of(self.request_id)
            self.stream.scheduler = cell.address if cell is not None else ""
        self._attachment = pool.attach_now(self.stream, avoid=link)
        if self._attachment is not None:
            return
        try:
            async with asyncio.timeout_at(self._runner.give_up_at(self._deadline)):
                self._attachment = await pool.attach(self.stream, avoid=link)
        except TimeoutError:
            has_other = " with the tokenizer of this request" if self.stream.foreign_tokenizers else ""
            raise self._failure(UnavailableError(f"no detokenizer{has_other} is reachable")) from None

    def _failure(self, error: MidstreamError) -> MidstreamError:
        """Return the error that ends the stream, which could not continue because of `error`."""
        is_late = self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline
        return _deadline_error() if is_late else error

    async def _recover(self, error: UnavailableError | NotFoundError) -> None:
        """Attach to another detokenizer, and resubmit the request if its scheduler lost it."""
        now = asyncio.get_running_loop().time()
        if not self._num_failures:
            self._give_up_at = self._runner.give_up_at(self._deadline)
        is_forgotten = isinstance(error, NotFoundError)
        if now >= self._give_up_at or (is_forgotten and self._request is None):
            raise self._failure(error)
        logger.info("reattaching: %s", error.message)
        lost, self._attachment = self._attachment, None
        if lost is not None:
            lost.detach()
        if self._num_failures:
            await asyncio.sleep(min(_REATTACH_S * 2 ** min(self._num_failures, 10), 1.0))
        self._num_failures += 1
        if is_forgotten and self._request is not None and self._cell is not None:
            self._cell = await self._runner.submit(self._cell, self._request, self._deadline, is_keyed=self._is_keyed)
        await self._attach(avoid=lost)

    def close(self, *, abort: bool) -> None:
        """Release the stream; with `abort`, abort the request unless it is detached."""
        if self._timer is not None:
            self._timer.cancel()
        if self._attachment is not None:
            self._attachment.detach()
        if self._is_reading:
            self._is_reading = False
            self._runner.readers.leave(self.request_id)
        # After the deadline no abort is needed: the scheduler itself ends the request.
        is_late = self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline
        if abort and not is_late and not self.stream.is_final and self._request and not self._request.detached:
            self._runner.abort_soon(self.request_id)


class Runner:
    """Runs requests on the cells and detokenizers of this router.

    Attributes:
        prompts: Converts requests' inputs to token ids.
        receipts: Looks up receipts.
        readers: Counts the clients that wait for a request's output, or for a scheduler to accept it.
        adapter_root: Folder from which adapters may be loaded by path; empty if that is disabled.
        weights: Administration of the weights.
        everywhere: The cells of all models, for calls that name a request but no model.
    """

    def __init__(
        self,
        config: RouterConfig,
        model: ModelFolder,
        prompts: PromptBuilder,
        cells: Cells,
        pool: DetokenizerPool,
        everywhere: CellSet | None = None,
    ) -> None:
        """Prepare to run requests for one model; `everywhere` is by default the model's cells. Raises ConfigError if
        the sampling parameters that the model recommends are invalid.
        """
        self.everywhere = everywhere or cells
        self.model = model
        self.cells = cells
        self.pool = pool
        self.prompts = prompts
        self.adapter_root = config.adapter_root
        self.weights = WeightsAdmin(cells, config.update_root, str(model.path))
        self._config = config
        is_auto = config.generation_config == "auto"
        self._defaults = generation_defaults(model) if is_auto else GenerationDefaults()
        self._grammars = GrammarChecker(model)
        self._validator = OutputValidator()
        self._kept = KeptRequests(cells)
        self._aborting: set[asyncio.Task[None]] = set()
        self._wakeups = Wakeups()
        self.readers = Readers()
        self.receipts = Receipts(self.everywhere)
        self._template_fingerprint = model.template_fingerprint
        self._ids: list[str] = []

    async def start(
        self,
        request: pb.GenerateRequest,
        deadline: float | None,
        on_overflow: Callable[[], None],
        *,
        is_named: bool,
        is_keyed: bool,
        prepare: Prepare | None,
        constraints: Constraints | None,
    ) -> Generation:
        """Start a request; `request` is normalized in place, to the form sent to the scheduler.

        Args:
            request: The request as received from the client.
            deadline: Its deadline, as event-loop time.
            on_overflow: Called when the client reads too slowly; the next `take` raises the error.
            is_named: Whether the client chose the request's id, so that a cell may already have the request.
            is_keyed: Whether the request's id was derived from an idempotency key.
            prepare: Completes the request.
            constraints: What the API demands of the output.

        Raises:
            MidstreamError: The request is rejected.
        """
        await self._check(request)
        for path, field in ((request.lora.path, "lora.path"), (request.prompt_tuning.path, "prompt_tuning.path")):
            if path:
                check_adapter_path(path, self.adapter_root, field)
        has_limit = request.HasField("max_tokens") or self._defaults.max_tokens is not None
        try:
            async with until(deadline):  # images may wait for a worker
                await self._normalize(request, prepare)
        except TimeoutError:
            raise DeadlineError("the deadline passed while the prompt was prepared") from None
        holder = await self.cells.holder_of(request.request_id) if is_named and not is_keyed else None
        cell = holder or self._choose_cell(request, is_keyed=is_keyed)
        try:
            check_supported(request, cell.features)
        except (InvalidArgumentError, UnavailableError, UnsupportedError):
            # A worker with the feature may have registered since the last poll.
            await cell.poll()
            check_supported(request, cell.features)
        if not has_limit:
            fit_to_tensors(request, self.model, self._config.max_tensor_bytes)
        check_tensors(request, self.model, self._config.max_tensor_bytes)
        if request.HasField("guided_decoding"):
            await self._grammars.check(request.guided_decoding, constraints)
        self.readers.enter(request.request_id)
        try:
            cell = await self.submit(cell, request, deadline, is_keyed=is_keyed)
        except BaseException as error:
            self.readers.leave(request.request_id)
            # If the client disconnected, the scheduler may already have received the request.
            if isinstance(error, asyncio.CancelledError) and not request.detached:
                self.abort_soon(request.request_id)
            raise
        stream = ClientStream(
            request.request_id, self._config.max_pending_bytes, on_overflow=on_overflow, waker=self._waker()
        )
        return Generation(self, stream, deadline, cell, request, is_keyed=is_keyed)

    def resume(
        self,
        request_id: str,
        from_token: int,
        from_token_by_sequence: Sequence[int],
        timeout_s: float | None,
        on_overflow: Callable[[], None] = lambda: None,
    ) -> Generation:
        """Attach to a running or recently finished request.

        Raises:
            InvalidArgumentError: The request id is missing or invalid.
        """
        if not request_id:
            raise InvalidArgumentError("must be set", field="request_id")
        check_name(request_id, "request_id")
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        stream = ClientStream(
            current_caller.get().scope(request_id),
            self._config.max_pending_bytes,
            from_token=from_token,
            from_token_by_sequence=from_token_by_sequence,
            on_overflow=on_overflow,
            waker=self._waker(),
        )
        return Generation(self, stream, deadline)

    def inspection(self, request: pb.GenerateRequest, constraints: Constraints | None) -> Inspection | None:
        """Return the validation of a new request's output; None if its grammar enforces everything."""
        if constraints is not None:
            divide = constraints.divide
        elif request.HasField("guided_decoding"):
            divide = divide_native(request, partial(self._prompt_text, request))
        else:
            return None
        return None if divide is None else Inspection(self._validator, _known(divide), None)

    def inspection_of_rest(
        self, request_id: str, constraints: Constraints | None, *, is_whole: bool
    ) -> Inspection | None:
        """Return the validation of the output of a stream that resumes a request, which is looked up unless its
        `constraints` are given; None if its grammar enforces everything.

        Args:
            is_whole: Whether the stream begins with the first token.
        """
        find: Callable[[], Awaitable[Divide | None]] = partial(self._divide_of, request_id)
        if constraints is not None:
            if constraints.divide is None:
                return None
            find = _known(constraints.divide)
        read = None if is_whole and constraints is not None else partial(self._whole_text, request_id)
        return Inspection(self._validator, find, read)

    async def _divide_of(self, request_id: str) -> Divide | None:
        request = (await self._kept.get(request_id)).request
        return divide_native(request, partial(self._prompt_text, request))

    async def _whole_text(self, request_id: str, index: int) -> str:
        """Return the text of a sequence that has ended."""
        generation = self.resume(request_id, 0, (), None)
        text = ""
        try:
            while True:
                for chunk in await generation.take():
                    if chunk.sequence_index == index:
                        text += chunk.text
                        if chunk.is_sequence_final:
                            return text
        finally:
            generation.close(abort=False)

    def _prompt_text(self, request: pb.GenerateRequest) -> str:
        skips = not request.output.HasField("skip_special_tokens") or request.output.skip_special_tokens
        return self.prompts.tokenizer.decode(request.token_ids.values[:], skip_special_tokens=skips)

    def close(self) -> None:
        """Stop the processes that check grammars and outputs."""
        self._grammars.close()
        self._validator.close()

    async def submit(self, cell: Cell, request: pb.GenerateRequest, deadline: float | None, *, is_keyed: bool) -> Cell:
        """Submit the request to its cell, or to another one if that cell is gone; return the cell that accepted it."""
        give_up_at = self.give_up_at(deadline)
        while True:
            try:
                await cell.submit(request, give_up_at, deadline)
            except UnavailableError:
                if not cell.is_gone or asyncio.get_running_loop().time() >= give_up_at:
                    raise
                # The successor may have recovered the request.
                cell = self.cells.successor_of(cell) or self._choose_cell(request, is_keyed=is_keyed)
            else:
                return cell

    def _choose_cell(self, request: pb.GenerateRequest, *, is_keyed: bool) -> Cell:
        if is_keyed:
            return self.cells.home(request.request_id)
        return self.cells.choose(request.token_ids.values, request.cache_salt)

    def new_id(self) -> str:
        """Return a random request id. The system is asked for many at a time, since each call takes a while."""
        if not self._ids:
            digits = f"{secrets.randbits(128 * _NUM_NEW_IDS):0{32 * _NUM_NEW_IDS}x}"
            self._ids = [digits[start : start + 32] for start in range(0, len(digits), 32)]
        return self._ids.pop()

    def give_up_at(self, deadline: float | None) -> float:
        """Return the event-loop time until which to wait for an unreachable component."""
        limit = asyncio.get_running_loop().time() + self._config.unavailable_timeout_s
        return limit if deadline is None else min(limit, deadline)

    def abort_soon(self, request_id: str) -> None:
        """Abort a request whose client disconnected, in the background.

        A client whose connection broke may reconnect soon, so the request is aborted after a delay, and only if no
        client reads it by then.
        """
        task = asyncio.create_task(self._abort(request_id))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort(self, request_id: str) -> None:
        await asyncio.sleep(_RETURN_S)
        if request_id in self.readers:
            return
        try:
            await self.cells.abort(request_id, only_if_unread=True)
        except MidstreamError as error:
            # The scheduler ends the request itself if no client is attached for a while.
            logger.warning("abort failed: %s", error, extra={"request_id": request_id})

    async def add_receipt(self, request_id: str, final: Chunk) -> None:
        """Add the request's receipt to its final chunk. If no scheduler answers, the chunk gets none, since the output
        is complete without it; the client can still get the receipt later.
        """
        try:
            final.receipt = (await self.receipts.get(request_id, final.receipt_lengths)).receipt
        except MidstreamError as error:
            logger.warning("cannot get the receipt: %s", error, extra={"request_id": request_id})
        final.receipt_lengths = ()

    def _waker(self) -> Callable[[Waiter], None]:
        """Return the function that wakes a task that waits for output of the current caller."""
        return partial(self._wakeups.wake, current_caller.get().name)

    async def _check(self, request: pb.GenerateRequest) -> None:
        await self.prompts.look_through(
            request, lambda: check_request(request, self.model, self._config.max_beam_width)
        )

    async def _normalize(self, request: pb.GenerateRequest, prepare: Prepare | None = None) -> None:
        """Complete the request, tokenize its input and fill unset fields, deterministically."""
        request.template_fingerprint = self._template_fingerprint if request.WhichOneof("input") == "chat" else ""
        if prepare is not None:
            await prepare()
            await self._check(request)
        kind = request.WhichOneof("input") or "input"
        take_embeddings(request, self.model)
        token_ids = put_table_first(request, await self.prompts.token_ids(request), self.model)
        asked = request.max_tokens if request.HasField("max_tokens") else self._defaults.max_tokens
        max_tokens = fit_to_context(len(token_ids), asked, self.model, kind)  # before too many ids are copied
        if request.WhichOneof("input") != "token_ids" or len(request.token_ids.values) != len(token_ids):
            request.token_ids.values[:] = token_ids
        request.max_tokens = max_tokens
        if request.sampling.beam_width > 1 and not request.sampling.HasField("num_return_sequences"):
            request.sampling.num_return_sequences = request.sampling.beam_width
        bad_words = request.stopping.bad_words
        if bad_words:
            for ids in await self.prompts.bad_word_ids(list(bad_words)):
                request.stopping.bad_word_token_ids.add(values=ids)
        request.request_id = current_caller.get().scope(request.request_id or self.new_id())
        if not self._config.share_prefix_cache:
            request.cache_salt = current_caller.get().salt(request.cache_salt)
        request.model = self.model.name
        request.tokenizer_fingerprint = self.model.tokenizer_fingerprint
        self._defaults.fill(request)
        if not request.sampling.HasField("seed"):
            # The seed is derived from the id, so that any router gives the same request the same contents.
            digest = hashlib.blake2b(request.request_id.encode(), digest_size=8).digest()
            request.sampling.seed = int.from_bytes(digest, "little")
        if not request.arrival_time_unix_ns:
            request.arrival_time_unix_ns = time.time_ns()


class Output:
    """A request's output to one client, as a context manager; leaving it before the final chunk means that the client
    disconnected.

    Attributes:
        request_id: The request's id.
        is_final: Whether the final chunk has been taken.
    """

    def __init__(
        self,
        request_id: str,
        generation: Generation,
        metrics: RouterMetrics,
        draining: asyncio.Event,
        release: Callable[[], None],
        admission: Admission,
        arrival: float | None = None,
        span: RequestSpan | None = None,
        operation: str = "",
        inspection: Inspection | None = None,
    ) -> None:
        """`release` is called on exit; `admission` is charged for the tokens that are read; `operation` is what was
        requested, empty if the output of another call is resumed; `inspection` validates the output.
        """
        self.request_id = request_id
        self.is_final = False
        self._generation = generation
        self._metrics = metrics
        self._draining = draining
        self._release = release
        self._arrival = time.monotonic() if arrival is None else arrival
        self._first: float | None = None
        self._last: float | None = None
        self._num_tokens = self._num_first = 0
        self._end: Chunk | None = None
        self._reasons: dict[int, str] = {}
        self._span = span
        self._operation = operation
        self._admission = admission
        self._inspection = inspection

    async def take(self) -> list[Chunk]:
        """Return the next output, at least one chunk; the final one comes last.

        Raises:
            MidstreamError: The stream failed and cannot continue.
        """
        chunks = await self._generation.take()
        now = time.monotonic()
        for chunk in chunks:
            self._observe(chunk, now)
            self._admission.charge_output(self.request_id, chunk)
            if self._inspection is not None:
                await self._inspection.note(chunk)
        if chunks[-1].is_final:
            self.is_final, self._end = True, chunks[-1]
        return chunks

    def raise_failure(self) -> None:
        """Raise the request's error, if any; to be called after the final chunk."""
        if self._end is None:
            return
        if self._end.finish_reason is FinishReason.DEADLINE:
            raise _deadline_error()
        if self._end.finish_reason is FinishReason.ERROR:
            raise self._end.error or ExecutionError("the request failed")

    def raise_unfinished(self) -> None:
        """Raise the request's error, or AbortedError if it was aborted; to be called after the final chunk."""
        self.raise_failure()
        if self._end is not None and self._end.finish_reason is FinishReason.ABORT:
            raise AbortedError("the request was aborted")

    async def __aenter__(self) -> Output:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._release()
        self._admission.release(is_left=not self.is_final and self._generation.may_continue)
        if self._span is not None:
            self._span.end(self._end, error, [reason for _, reason in sorted(self._reasons.items())])
        cancelled = isinstance(error, asyncio.CancelledError)
        self._generation.close(abort=cancelled and not self._draining.is_set())
        if cancelled and self._generation.stream.overflowed:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            raise OverloadedError("the client reads too slowly") from None
        if self._end is not None:
            reason = str(self._end.finish_reason)
        else:
            has_left = error is None or isinstance(error, (asyncio.CancelledError, GeneratorExit))
            reason = "disconnected" if has_left else f"failed: {error}"
        duration_s = time.monotonic() - self._arrival
        first_s = None if self._first is None else self._first - self._arrival
        self._metrics.log_end(reason, duration_s, first_s, self._num_tokens)
        if error is None and self._end is not None:
            self._metrics.request.observe(duration_s)
            self._metrics.num_succeeded[self._end.finish_reason or ""] += 1
        if self._metrics.gen_ai is not None and self._operation and reason != "disconnected":
            self._metrics.gen_ai.record(self._operation, duration_s, first_s, self._per_token_s(), self._failure(error))

    def _per_token_s(self) -> float | None:
        """Return the time per token after the first output; None if there were no further tokens."""
        if self._first is None or self._last is None or self._num_tokens <= self._num_first:
            return None
        return (self._last - self._first) / (self._num_tokens - self._num_first)

    def _failure(self, error: BaseException | None) -> str:
        """Return the kind of failure with which the request ended; empty if it succeeded."""
        if error is not None:
            return type(error).__name__
        is_failed = self._end is not None and self._end.finish_reason in (FinishReason.DEADLINE, FinishReason.ERROR)
        return str(self._end.finish_reason) if self._end is not None and is_failed else ""

    def _observe(self, chunk: Chunk, now: float) -> None:
        num_tokens, metrics = len(chunk.token_ids), self._metrics
        if chunk.finish_reason is not None and self._span is not None:
            self._reasons[chunk.sequence_index] = str(chunk.finish_reason)
        if self._last is None:
            self._first, self._num_first = now, num_tokens
            metrics.first_token.observe(now - self._arrival)
            if self._span is not None:
                self._span.note("first output")
        elif num_tokens:
            metrics.inter_token.observe((now - self._last) / num_tokens)
        stream = self._generation.stream
        metrics.num_tokens += stream.count_taken(num_tokens) if stream.num_ahead else num_tokens
        self._num_tokens += num_tokens
        self._last = now


class FrontDoor:
    """Starts and resumes requests for all APIs.

    Attributes:
        runner: Runs the requests of all APIs.
        leaving: Set when the router should get no more requests; those that arrive are still served.
        draining: Set when the router is draining: running requests finish, and no new ones are accepted.
        keep_alives: Keeps the streams of all APIs open while they have no output.
    """

    def __init__(
        self,
        runner: Runner,
        metrics: RouterMetrics,
        draining: asyncio.Event,
        limits: StreamLimits | None = None,
        traces: RequestTraces | None = None,
        quotas: Quotas | None = None,
        keep_alives: KeepAlives | None = None,
        *,
        leaving: asyncio.Event | None = None,
    ) -> None:
        self.keep_alives = keep_alives or KeepAlives(0)
        self._quotas = quotas or Quotas(Metrics())
        self.runner = runner
        self.draining, self.leaving = draining, leaving or draining
        self._metrics = metrics
        self._limits = limits or StreamLimits()
        self._starts = StartSlots(_MAX_STARTS, _MAX_STARTS_ALONE)
        self._traces = traces

    async def start(
        self,
        request: pb.GenerateRequest,
        timeout_s: float | None,
        key: str = "",
        prepare: Prepare | None = None,
        constraints: Constraints | None = None,
        *,
        operation: str = "",
    ) -> Output:
        """Start a request, or attach to the one that was started with the same idempotency key.

        Args:
            request: The request as received from the client; it is modified.
            timeout_s: Time left until the call's deadline.
            key: The idempotency key from which the request's id was derived; empty if there is none.
            prepare: Completes the request; called once the client's quotas and limits admit it, within its deadline.
            constraints: What the API demands of the output, beyond the request's guide.
            operation: OpenTelemetry's name of the operation; by default, `chat` or `text_completion`.

        Raises:
            MidstreamError: The request is rejected.
        """
        operation = operation or ("chat" if request.WhichOneof("input") == "chat" else "text_completion")
        arrival, caller = time.monotonic(), current_caller.get()
        is_named, request_id = bool(request.request_id), request.request_id or self.runner.new_id()
        current_request_id.set(request_id)
        request.request_id = request_id
        if caller.is_authenticated:
            request.client_id = caller.name
        if caller.quota.priority is not None:
            request.priority = max(caller.quota.priority + min(request.priority, 0), -100)
        background = current_background.get()
        if background is not None:
            request.priority = min(request.priority, background.priority)
            timeout_s = max(background.until - time.time(), 0.0)
        try:
            admission, release = self._admit(caller, caller.scope(request_id))
        except MidstreamError as error:
            self._count_failure(operation, arrival, error)
            raise
        span = self._traces.begin(operation, request) if self._traces is not None else None
        request.trace_parent = str(span.span) if span is not None else ""
        try:
            deadline = _deadline(request, timeout_s)
            async with self._starts.hold(caller.name, deadline):
                with naming_key(key):
                    generation = await self.runner.start(
                        request,
                        deadline,
                        _canceller(),
                        is_named=is_named,
                        is_keyed=bool(key),
                        prepare=prepare,
                        constraints=constraints,
                    )
        except BaseException as error:
            release()
            admission.release()
            if span is not None:
                span.end(None, error)
            self._count_failure(operation, arrival, error)
            raise
        if span is not None:
            span.note("submitted")
        admission.charge_prompt(request_id, len(request.token_ids.values))
        return Output(
            request_id,
            generation,
            self._metrics,
            self.draining,
            release,
            admission,
            arrival,
            span,
            operation,
            self.runner.inspection(request, constraints),
        )

    @contextlib.contextmanager
    def counting_failures(self, operation: str) -> Iterator[None]:
        """Count a failure in this context, which comes before the start of a request, as one of the operation."""
        arrival = time.monotonic()
        try:
            yield
        except MidstreamError as error:
            self._count_failure(operation, arrival, error)
            raise

    def _count_failure(self, operation: str, arrival: float, error: BaseException) -> None:
        if self._metrics.gen_ai is not None and not isinstance(error, asyncio.CancelledError):
            duration_s = time.monotonic() - arrival
            self._metrics.gen_ai.record(operation, duration_s, None, None, type(error).__name__)

    async def run_unstarted(self, request: pb.GenerateRequest, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run `work`, which processes a prompt without starting its request, and return the result.

        If the prompt has images, which workers must encode, the call counts against the caller's limits like a request.

        Raises:
            MidstreamError: A quota or limit is reached, the deadline passed, or `work` failed.
        """
        if not images_of(request):
            return await work()
        caller = current_caller.get()
        timeout_s = request.timeout_ms / 1000 if request.HasField("timeout_ms") else None
        admission, release = self._admit(caller)
        try:
            async with asyncio.timeout(timeout_s), self._starts.hold(caller.name):
                return await work()
        except TimeoutError:
            raise DeadlineError("the deadline passed while the prompt was prepared") from None
        finally:
            release()
            admission.release()

    def _admit(self, caller: Caller, request_id: str = "") -> tuple[Admission, Callable[[], None]]:
        """Count a request against the caller's quotas and the limits on streams. Return the admission and a callable,
        which end the counting.

        Raises:
            OverloadedError: A quota or a limit is reached.
        """
        admission = self._quotas.admit(caller, request_id)
        try:
            return admission, self._limits.take(caller.name)
        except OverloadedError:
            admission.release()
            raise

    def resume(
        self,
        request_id: str,
        from_token: int,
        from_token_by_sequence: Sequence[int],
        timeout_s: float | None,
        constraints: Constraints | None = None,
    ) -> Output:
        """Resume a request's output; without `constraints`, those of the native request are looked up.

        Raises:
            InvalidArgumentError: The request id is empty or invalid.
            OverloadedError: The client has too many streams.
        """
        current_request_id.set(request_id)
        generation = self.runner.resume(request_id, from_token, from_token_by_sequence, timeout_s, _canceller())
        caller = current_caller.get()
        release, admission = self._limits.take(caller.name), self._quotas.resume(caller, generation.request_id)
        span = self._traces.resume(request_id) if self._traces is not None else None
        is_whole = not from_token and not any(from_token_by_sequence)
        inspection = self.runner.inspection_of_rest(request_id, constraints, is_whole=is_whole)
        return Output(
            request_id,
            generation,
            self._metrics,
            self.draining,
            release,
            admission,
            span=span,
            inspection=inspection,
        )

    async def abort(self, request_id: str) -> bool:
        """Abort a request of the caller; return whether it was running."""
        current_request_id.set(request_id)
        return await self.runner.everywhere.abort(current_caller.get().scope(request_id))

    def abort_soon(self, request_id: str) -> None:
        """Abort a request of the caller in the background."""
        self.runner.abort_soon(current_caller.get().scope(request_id))


def _known(divide: Divide) -> Callable[[], Awaitable[Divide | None]]:
    async def find() -> Divide | None:
        return divide

    return find


def _deadline_error() -> DeadlineError:
    return DeadlineError("the request's deadline passed")


def _deadline(request: pb.GenerateRequest, timeout_s: float | None) -> float | None:
    """Return the event-loop time of a request's deadline: the call's or the request's own, whichever is earlier; None
    if there is neither.

    Raises:
        DeadlineError: The deadline has passed.
    """
    limits_s = [] if timeout_s is None else [timeout_s]
    if request.HasField("timeout_ms"):
        limits_s.append(request.timeout_ms / 1000)
    if not limits_s:
        return None
    left_s = min(*limits_s, MAX_DURATION_MS / 1000)  # gRPC's deadlines are not limited
    if left_s <= 0:
        raise DeadlineError("the deadline passed before the request arrived")
    return asyncio.get_running_loop().time() + left_s


def _canceller() -> Callable[[], None]:
    task = asyncio.current_task()
    # The traceback of an error that ends the task holds this function, so this must not hold the task.
    known: Callable[[], asyncio.Task[Any] | None] = weakref.ref(task) if task is not None else lambda: None

    def cancel() -> None:
        running = known()
        if running is not None:
            running.cancel()

    return cancel
