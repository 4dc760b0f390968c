"""The parts of a call run concurrently, and the memory of a failed call is freed at once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.errors import InvalidArgumentError, MidstreamError
from protos import generation_pb2 as pb
from router.pipeline.concurrent import run_all
from router.pipeline.embedder import Embedder, EmbedInput, VectorShape
from router.protocols.kserve.servicer import KserveServicer
from tests.router.adapters.test_kserve import infer_request
from tests.router.conftest import Cluster

CONTEXT: Any = SimpleNamespace(invocation_metadata=tuple, time_remaining=lambda: None)


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def error_of(call: Awaitable[object]) -> weakref.ref[BaseException]:
    try:
        await call
    except MidstreamError as error:
        return weakref.ref(error)
    raise AssertionError("the call did not fail")


async def is_freed(call: Awaitable[object]) -> bool:
    """Return whether the error of a failed call is freed at once, together with everything that its traceback
    references.
    """
    error = await error_of(call)
    await asyncio.sleep(0)
    return error() is None


async def later(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def failing() -> int:
    raise InvalidArgumentError("no")


async def test_results_are_in_order() -> None:
    assert await run_all(later(value) for value in range(3)) == [0, 1, 2]
    assert await run_all([]) == []


@pytest.mark.usefixtures("_no_collection")
async def test_an_error_cancels_the_other_parts_and_is_freed() -> None:
    ended = asyncio.Event()

    async def waiting() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 0

    assert await is_freed(run_all([waiting(), later(1), failing(), failing()]))
    assert ended.is_set()


async def test_cancelling_the_call_cancels_its_parts() -> None:
    parts = [asyncio.get_running_loop().create_future() for _ in range(2)]

    async def wait_for(part: asyncio.Future[None]) -> None:
        await part

    call = asyncio.create_task(run_all(wait_for(part) for part in parts))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert all(part.cancelled() for part in parts)


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("num_inputs", [1, 3])
async def test_embeddings_that_fail_are_freed(cluster: Cluster, num_inputs: int) -> None:
    router: Any = await cluster.add_router(await cluster.add_detokenizer())
    inputs = [EmbedInput("input", "x")] * num_inputs
    base = pb.GenerateRequest(priority=1000)
    assert await is_freed(Embedder(router.servicer).embed(base, inputs, VectorShape()))


@pytest.mark.usefixtures("_no_collection")
async def test_a_kserve_request_that_fails_is_freed(cluster: Cluster) -> None:
    router: Any = await cluster.add_router(await cluster.add_detokenizer())
    servicer = KserveServicer(router.servicer, {})
    request = infer_request("text_output", min_length=("INT32", 1 << 30))
    assert await is_freed(servicer.ModelInfer(request, CONTEXT))
