"""An executor ends requests and shuts down, with a router that sends one token and then waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import wait
from typing import Any

import pytest

from midstream.errors import AbortedError, InvalidArgumentError
from midstream.executor import GenerationExecutor, GenerationRequest, Response
from protos import generation_pb2 as pb
from protos import loads_pb2
from tests.midstream.test_client import Router, Silent, serving


class Overtaken(Router):
    """A router that receives aborts before the request that they refer to."""

    def __init__(self, breaks: list[int]) -> None:
        super().__init__(breaks)
        self.num_aborts = 0
        self.aborted = asyncio.Event()

    async def _spell(self, start: int, context: Any) -> Any:
        await self.aborted.wait()
        yield pb.GenerateResponse(is_final=True, is_sequence_final=True, finish_reason=pb.FINISH_REASON_ABORT)

    async def Abort(self, request: loads_pb2.AbortRequest, context: Any) -> loads_pb2.AbortResponse:  # noqa: N802
        self.num_aborts += 1
        if self.num_aborts == 3:
            self.aborted.set()
        return loads_pb2.AbortResponse(was_running=self.num_aborts == 3)


async def test_an_abort_that_overtakes_its_request_is_repeated() -> None:
    def use(address: str) -> str | None:
        with GenerationExecutor.create(address=address) as executor:
            result = executor.generate_async([1])
            executor.abort_request(result.request.id)
            return result.result(60).finish_reason

    async with serving(kind=Overtaken) as (_, address):
        assert await asyncio.to_thread(use, address) == "abort"


async def test_a_request_may_be_submitted_again() -> None:
    async with serving() as (_, address):
        executor = await asyncio.to_thread(GenerationExecutor, [address])
        request = GenerationRequest([1])
        first, second = executor.submit(request), executor.submit(request)
        assert (first.request.id, second.request.id, request.id) == (1, 2, 2)
        responses: list[Response] = []
        while len(responses) < 2 * len("midstream"):
            responses += await asyncio.to_thread(executor.await_responses, None, 60)
        for result in (first, second):
            own = [item.result for item in responses if item.request_id == result.request.id]
            assert "".join(item.text for item in own if item is not None) == "midstream"
        assert executor.get_latest_request_stats([]) == []
        # A request is forgotten after its last response has arrived.
        await asyncio.to_thread(wait, list(executor._running.values()), 60)
        assert not executor._running
        await asyncio.to_thread(executor.shutdown)


async def test_a_shutdown_ends_results_with_an_error_and_wakes_readers() -> None:
    async with serving(kind=Silent) as (_, address):
        executor = await asyncio.to_thread(GenerationExecutor, [address])
        result = executor.generate_async([1])
        assert (await anext(aiter(result))).token_ids
        waiting = asyncio.create_task(asyncio.to_thread(executor.await_responses))
        await asyncio.to_thread(executor.shutdown)
        with pytest.raises(AbortedError):
            await result.aresult(60)
        # The waiting thread receives the request's error as a response or, if the result's reader has taken it, raises
        # InvalidArgumentError.
        with contextlib.suppress(InvalidArgumentError):
            await asyncio.wait_for(waiting, 60)
        with pytest.raises(InvalidArgumentError, match="shut down"):
            executor.await_responses()


async def test_a_forked_process_does_not_stop_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (_, address):
        executor = await asyncio.to_thread(GenerationExecutor, [address])
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: 0)
            executor.shutdown()
        assert (await executor.generate_async([1]).aresult(60)).text == "midstream"
        await asyncio.to_thread(executor.shutdown)
