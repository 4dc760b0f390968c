"""Runs batches.

1. A new batch joins a queue in the scheduler's documents; each router polls it and leases free batches (lease.py). When
   a router dies, another takes over its batches.
2. The input is checked as a whole. Then its lines run as calls to the router's own endpoint, each with an
   idempotency key: a line that any router repeats attaches to the first run of that line.
3. Lines are stored in parts, in the order of the input. A part's output is a function of its lines, so it does not
   matter if two routers store it. When a router dies, lines that are not stored yet are requested again, but not
   computed again.
4. When all parts are stored, the output and error files are created, and the batch ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial

from prometheus_client import Counter, Gauge
from starlette.types import ASGIApp

from midstream.errors import MidstreamError, NotFoundError
from midstream.telemetry import Metrics
from router.authentication import Caller, current_caller
from router.permissions import Role
from router.pipeline.background import Background, current_background
from router.pipeline.cells import CellSet
from router.pipeline.idempotency import HEADER
from router.protocols.batches.batch import ENDED, Batch, Batches
from router.protocols.batches.calls import post
from router.protocols.batches.files import FileInfo, Files
from router.protocols.batches.lease import Lease, Leases
from router.protocols.batches.lines import (
    Line,
    Outcome,
    answered,
    check_lines,
    has_failed,
    read_line_soon,
    unanswered,
)

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_MAX_BATCHES = 16
_PART_LINES = 32
# Maximum size of a line besides its body.
_MAX_HEAD_BYTES = 8 << 10
# Maximum number of parts that run concurrently while the first of them still has unfinished lines.
_PARTS_AT_ONCE = 4
# No further parts are read while the unfinished ones have this many bytes.
_MAX_READ_BYTES = 32 << 20
_CHUNK_CHARACTERS = 1 << 20
# Lower than the priority of all interactive requests, including `flex` (-50).
PRIORITY = -75
_ABORTED = 499
_RETRIED = frozenset({408, 429, _ABORTED, 503})
# Maximum number of times to repeat a line after its request, or a call to the scheduler, was aborted. If the request
# itself was aborted, repeating does not help, since the line's key always refers to that request.
_MAX_ABORTS = 2
_FIRST_RETRY_S, _LAST_RETRY_S = 0.2, 5.0
# Maximum time for running lines to finish when a batch is cancelled.
_CANCEL_GRACE_S = 10.0
# A line may time out this long before its batch expires, because the clock is read separately for the line and the
# batch.
_CLOCK_S = 0.5
_PIECES = {"cancelled": "the batch was cancelled", "expired": "the batch's completion window has ended"}


class BatchRunner:
    """Runs the batches that this router leases."""

    def __init__(
        self,
        app: ASGIApp,
        cells: CellSet,
        files: Files,
        batches: Batches,
        leases: Leases,
        leaving: asyncio.Event,
        metrics: Metrics,
        caller_of: Callable[[str], Caller | None],
        *,
        max_lines: int,
        max_body_bytes: int,
    ) -> None:
        """Prepare the runner; `run` runs the batches.

        Args:
            leaving: Set when this router should get no more work.
            caller_of: Returns a batch's owner by name; None if the owner is no longer authorized.
            max_lines: Maximum number of concurrent lines of all batches together.
            max_body_bytes: Maximum size of the body of a call.
        """
        self._app = app
        self._cells = cells
        self._files = files
        self._batches = batches
        self._leases = leases
        self._leaving = leaving
        self._caller_of = caller_of
        self._slots = asyncio.Semaphore(max_lines)
        self._max_line_bytes = max_body_bytes + _MAX_HEAD_BYTES
        self._running: dict[str, asyncio.Task[None]] = {}
        self._num_running: Gauge = metrics.gauge("num_running_batches", "Batches that this router runs.")
        self._num_running.set_function(lambda: len(self._running))
        self._lines: Counter = metrics.counter("batch_lines", "Batch lines answered.", ("status",))

    async def run(self) -> None:
        try:
            while not self._leaving.is_set():
                for cell in list(self._cells.cells.values()):
                    free = _MAX_BATCHES - len(self._running)
                    for lease in await self._leases.take(cell, set(self._running), free):
                        task = asyncio.create_task(self._hold(lease), name=f"batch {lease.batch_id}")
                        self._running[lease.batch_id] = task
                        task.add_done_callback(partial(self._forget, lease.batch_id))
                await self._leases.wait()
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.Event().wait()

    def _forget(self, batch_id: str, _: asyncio.Task[None]) -> None:
        self._running.pop(batch_id, None)

    async def _hold(self, lease: Lease) -> None:
        """Run a batch while this router holds its lease."""
        caller = self._caller_of(lease.owner)
        # If the client is no longer known, the batch is ended without running anything.
        current_caller.set(caller or Caller(lease.owner, is_authenticated=True, roles=frozenset()))
        working = asyncio.create_task(self._drive(lease))
        keeping = asyncio.create_task(self._leases.keep(lease))
        try:
            await asyncio.wait((working, keeping), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                logger.warning("another router has taken over batch %s", lease.batch_id)
                return
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            was_stored = await working
            await self._leases.remove(lease)
            if not was_stored and await self._is_stored(lease):
                await self._leases.add(lease.cell, lease.owner, lease.batch_id)
        except MidstreamError as error:
            # The lease expires by itself, and the router that takes it over tries again.
            logger.warning("batch %s cannot continue now: %s", lease.batch_id, error.message)
        except asyncio.CancelledError:
            keeping.cancel()
            working.cancel()
            await asyncio.gather(keeping, working, return_exceptions=True)
            await self._leases.give_back(lease)
            raise
        except Exception:
            logger.exception("batch %s failed unexpectedly; it will be retried", lease.batch_id)
        finally:
            for task in (working, keeping):
                task.cancel()
            await asyncio.gather(working, keeping, return_exceptions=True)

    async def _is_stored(self, lease: Lease) -> bool:
        try:
            await self._batches.get(lease.owner, lease.batch_id)
        except NotFoundError:
            return False
        return True

    async def _drive(self, lease: Lease) -> bool:
        """Run a batch to its end from any state; return False if the call that creates it has not stored it yet."""
        try:
            _, batch = await self._batches.get(lease.owner, lease.batch_id)
        except NotFoundError:
            return False
        if batch.status not in ENDED:
            await self._run_batch(lease, batch)
        return True

    async def _run_batch(self, lease: Lease, batch: Batch) -> None:
        try:
            input_cell, info = await self._files.get(lease.owner, batch.input_file_id)
            lines = partial(self._files.lines, input_cell, lease.owner, info, self._max_line_bytes)
            if batch.status == "validating":
                batch = await self._validate(lease, lines())
            if batch.status in ENDED:
                return
            if Role.GENERATE not in current_caller.get().roles:
                error = {"code": "permission_denied", "message": "the client is no longer allowed to run requests"}
                await self._fail(lease, [{**error, "param": None, "line": None}])
                return
            await _Run(self, lease, batch, lines).run()
        except NotFoundError:
            error = {"code": "input_file_deleted", "message": "no longer exists", "param": "input_file_id"}
            await self._fail(lease, [{**error, "line": None}])

    async def _validate(self, lease: Lease, lines: AsyncIterator[bytes]) -> Batch:
        _, batch = await self._batches.get(lease.owner, lease.batch_id)
        count, errors = await check_lines(lines, batch.endpoint, self._max_line_bytes)
        if errors:
            return await self._fail(lease, errors)

        def begin(batch: Batch) -> None:
            batch.request_counts["total"] = count
            if batch.status == "validating":
                batch.enter("in_progress")

        return await self._batches.update(lease.owner, lease.batch_id, begin)

    async def _fail(self, lease: Lease, errors: list[dict[str, object]]) -> Batch:
        """End a batch with errors; it keeps the results of the lines that have run."""

        def note(batch: Batch) -> None:
            if batch.status not in ENDED:
                batch.errors = {"object": "list", "data": errors}

        batch = await self._batches.update(lease.owner, lease.batch_id, note)
        return await self.finish(lease, batch, "failed")

    async def call(self, batch: Batch, line: Line, is_over: Callable[[], bool]) -> Outcome | None:
        """Run a line; return None if the batch ended before the line was started."""
        headers = {HEADER: f"{batch.id}/{line.number}"}
        delay, num_aborts = _FIRST_RETRY_S, 0
        while True:
            async with self._slots:
                if is_over():
                    return None
                current_background.set(Background(PRIORITY, batch.expires_at))
                answer = await post(self._app, batch.endpoint, line.body, headers)
            num_aborts += answer.status == _ABORTED
            if answer.status not in _RETRIED or num_aborts > _MAX_ABORTS:
                break
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_S)
        self._lines.labels(str(answer.status)).inc()
        found = json.loads(answer.body)
        if (answer.status == 504 or has_failed(found)) and time.time() >= batch.expires_at - _CLOCK_S:
            return None
        name = answer.headers.get("x-request-id", found.get("id", ""))
        return answered(batch, line, answer.status, name, found)

    async def store(self, lease: Lease, batch: Batch, number: int, outcomes: list[Outcome]) -> Batch:
        """Store the outcomes of a part of the batch, and add them to the batch's counts."""
        expires_at = int(time.time()) + batch.output_ttl_s
        sizes: dict[bool, int] = {}
        for is_error, file_id in ((False, batch.output_id), (True, batch.error_id)):
            data = "".join(outcome.text for outcome in outcomes if outcome.is_error is is_error).encode()
            sizes[is_error] = len(data)
            for place, start in enumerate(range(0, len(data), _CHUNK_CHARACTERS)):
                piece = data[start : start + _CHUNK_CHARACTERS]
                name = f"{number:08d}.{place:04d}"
                await self._files.put_chunk(lease.cell, lease.owner, file_id, name, piece, expires_at)
        num_failed = sum(outcome.is_error for outcome in outcomes)

        def count(batch: Batch) -> None:
            if batch.num_parts != number:
                return
            batch.num_parts = number + 1
            batch.num_output_bytes += sizes[False]
            batch.num_error_bytes += sizes[True]
            batch.request_counts["completed"] += len(outcomes) - num_failed
            batch.request_counts["failed"] += num_failed
            for outcome in outcomes:
                for name, value in outcome.usage.items():
                    batch.usage[name] += value

        return await self._batches.update(lease.owner, batch.id, count)

    async def current(self, lease: Lease) -> Batch:
        """Return the batch as stored now."""
        return (await self._batches.get(lease.owner, lease.batch_id))[1]

    async def finish(self, lease: Lease, batch: Batch, ended: str) -> Batch:
        """Create the output files of a batch once all its parts are stored, and end the batch; return it."""

        def finalize(batch: Batch) -> None:
            if batch.status == "in_progress" and ended == "completed":
                batch.enter("finalizing")

        batch = await self._batches.update(lease.owner, batch.id, finalize)
        now = int(time.time())
        sizes = {batch.output_id: batch.num_output_bytes, batch.error_id: batch.num_error_bytes}
        for file_id, num_bytes in sizes.items():
            if num_bytes:
                kind = "output" if file_id == batch.output_id else "error"
                name = f"{batch.id}_{kind}.jsonl"
                info = FileInfo(file_id, num_bytes, now, now + batch.output_ttl_s, name, "batch_output")
                await self._files.create(lease.cell, lease.owner, info)

        def end(batch: Batch) -> None:
            if batch.status not in ENDED:
                batch.output_file_id = batch.output_id if batch.num_output_bytes else None
                batch.error_file_id = batch.error_id if batch.num_error_bytes else None
                batch.enter("cancelled" if batch.status == "cancelling" else ended)

        return await self._batches.update(lease.owner, batch.id, end)


class _Run:
    """Runs the lines of one batch, starting at the first line that is not stored yet."""

    def __init__(
        self, runner: BatchRunner, lease: Lease, batch: Batch, lines: Callable[[], AsyncIterator[bytes]]
    ) -> None:
        self._runner = runner
        self._lease = lease
        self._batch = batch
        self._lines = lines
        self._ended = ""  # "cancelled" or "expired" once the batch is
        self._lost_input: NotFoundError | None = None  # raised once the lines that were read have run

    async def run(self) -> None:
        self._look()
        parts: deque[tuple[list[Line], list[asyncio.Task[Outcome | None]]]] = deque()
        watching, num_bytes = asyncio.create_task(self._watch()), 0
        try:
            async for lines in self._parts():
                parts.append((lines, [asyncio.create_task(self._call(line)) for line in lines]))
                num_bytes += sum(len(line.body) for line in lines)
                while parts and (len(parts) >= _PARTS_AT_ONCE or num_bytes > _MAX_READ_BYTES):
                    stored, tasks = parts.popleft()
                    await self._store(stored, tasks)
                    num_bytes -= sum(len(line.body) for line in stored)
            while parts:
                await self._store(*parts.popleft())
        finally:
            watching.cancel()
            tasks = [task for _, part in parts for task in part]
            for task in tasks:
                task.cancel()
            await asyncio.gather(watching, *tasks, return_exceptions=True)
        if self._lost_input is not None and not self._ended:
            raise self._lost_input
        await self._runner.finish(self._lease, self._batch, self._ended or "completed")

    async def _parts(self) -> AsyncIterator[list[Line]]:
        part: list[Line] = []
        number, first = 0, self._batch.num_parts * _PART_LINES
        try:
            async for data in self._lines():
                if number >= first:
                    part.append(await read_line_soon(number, data, self._batch.endpoint))
                number += 1
                if len(part) == _PART_LINES:
                    yield part
                    part = []
        except NotFoundError as error:
            self._lost_input = error
            return
        if part:
            yield part

    async def _call(self, line: Line) -> Outcome | None:
        return await self._runner.call(self._batch, line, lambda: bool(self._ended))

    async def _store(self, lines: list[Line], tasks: list[asyncio.Task[Outcome | None]]) -> None:
        try:
            await self._wait(tasks)
            outcomes = [
                (task.result() if task.done() and not task.cancelled() else None) or self._not_run(line)
                for line, task in zip(lines, tasks, strict=True)
            ]
        finally:
            for task in tasks:
                task.cancel()
        number = lines[0].number // _PART_LINES
        self._batch = await self._runner.store(self._lease, self._batch, number, outcomes)

    async def _wait(self, tasks: list[asyncio.Task[Outcome | None]]) -> None:
        """Wait for running lines; if the batch was cancelled or has expired, only for a limited time."""
        pending: set[asyncio.Task[Outcome | None]] = set(tasks)
        give_up_at = 0.0
        while pending:
            _, pending = await asyncio.wait(pending, timeout=_LOOK_S)
            if self._ended:
                now = asyncio.get_running_loop().time()
                give_up_at = give_up_at or now + _CANCEL_GRACE_S
                if now >= give_up_at:
                    break
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def _not_run(self, line: Line) -> Outcome:
        self._ended = self._ended or "expired"
        return unanswered(self._batch, line, f"batch_{self._ended}", _PIECES[self._ended])

    async def _watch(self) -> None:
        """Poll whether the batch was cancelled or has expired."""
        while not self._ended:
            await asyncio.sleep(_LOOK_S)
            try:
                self._batch = await self._runner.current(self._lease)
            except MidstreamError as error:
                logger.info("cannot read the status of batch %s now: %s", self._lease.batch_id, error.message)
            self._look()

    def _look(self) -> None:
        if self._batch.status == "cancelling":
            self._ended = "cancelled"
        elif time.time() >= self._batch.expires_at and not self._ended:
            self._ended = "expired"
