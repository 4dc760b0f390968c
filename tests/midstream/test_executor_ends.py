"""An executor ends requests and shuts down, with a router that sends one token and then waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
from datetime import timedelta
from typing import Any

import pytest

from midstream.errors import AbortedError, InvalidArgumentError
from midstream.executor import Executor, GenerationExecutor, GenerationRequest, Request, Response
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
        for result in (first, second):
            assert (await result.aresult(60)).text == "midstream"
        await asyncio.to_thread(executor.shutdown)


async def test_responses_of_all_requests_one_or_several() -> None:
    """Each of the nine tokens is a response; a request that has been read completely gives an error."""
    async with serving() as (_, address):

        def use() -> None:
            with Executor.connect(address) as executor:
                first, second, third = executor.enqueue_requests([Request([1], 9, streaming=True)] * 3)
                assert (first, second, third) == (1, 2, 3)
                one: list[Response] = []
                while not one or not one[-1].result.is_final:
                    one += executor.await_responses(first, timedelta(seconds=60))
                assert len(one) == len("midstream")
                (gone,) = executor.await_responses(first)
                assert gone.error_msg == "ReqId 1 has already been processed and was terminated."
                found: dict[int, int] = {second: 0, third: 0}
                while min(found.values()) < len("midstream"):
                    for own in executor.await_responses([second, third], timedelta(milliseconds=1)):
                        for response in own:
                            found[response.request_id] += not response.has_error()
                assert executor.get_num_responses_ready() == 0
                assert executor.await_responses(timedelta(milliseconds=1)) == []
                assert executor.await_responses(timeout=0.001) == []
                with pytest.raises(InvalidArgumentError, match="no request 4"):
                    executor.await_responses(4)

        await asyncio.to_thread(use)


async def test_a_shutdown_ends_results_with_an_error() -> None:
    async with serving(kind=Silent) as (_, address):
        executor = await asyncio.to_thread(GenerationExecutor, [address])
        result = executor.generate_async([1])
        assert (await anext(aiter(result))).token_ids
        await asyncio.to_thread(executor.shutdown)
        with pytest.raises(AbortedError):
            await result.aresult(60)


async def test_a_shutdown_wakes_readers_and_refuses_calls() -> None:
    async with serving(kind=Silent) as (_, address):
        executor = await asyncio.to_thread(Executor.connect, address)
        request_id = executor.enqueue_request(Request([1], 5, streaming=True))
        assert executor.can_enqueue_requests()
        await asyncio.to_thread(executor.await_responses, request_id)
        waiting = asyncio.create_task(asyncio.to_thread(executor.await_responses, request_id))
        await asyncio.to_thread(executor.shutdown)
        # The thread may also have called only after the shutdown.
        with contextlib.suppress(InvalidArgumentError):
            assert all(response.has_error() for response in await asyncio.wait_for(waiting, 240))
        assert not executor.can_enqueue_requests()
        for call in (
            lambda: executor.enqueue_request(Request([1], 5)),
            executor.await_responses,
            executor.get_latest_iteration_stats,
            executor.get_latest_request_stats,
            executor.get_latest_debug_tensors,
            executor.get_num_responses_ready,
            lambda: executor.cancel_request(request_id),
        ):
            with pytest.raises(InvalidArgumentError, match="shut down"):
                call()


async def test_a_forked_process_does_not_stop_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (_, address):
        executor = await asyncio.to_thread(GenerationExecutor, [address])
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: 0)
            executor.shutdown()
        assert (await executor.generate_async([1]).aresult(60)).text == "midstream"
        await asyncio.to_thread(executor.shutdown)
