"""The scheduler's calls about weights and pauses, with real sockets and fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import weights_pb2
from tests.scheduler.running_scheduler import run_scheduler, until


async def status_of(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), raised.value.details() or ""


def update(path: str = "/weights/one", **fields: Any) -> weights_pb2.UpdateWeightsRequest:
    return weights_pb2.UpdateWeightsRequest(path=path, **fields)


async def test_only_one_update_runs_and_it_fails_if_a_worker_is_lost() -> None:
    async with run_scheduler() as scheduler:
        assert (await status_of(scheduler.stub.UpdateWeights(update())))[0] is grpc.StatusCode.UNAVAILABLE
        worker = await scheduler.worker()  # it does not answer
        calls = [asyncio.ensure_future(scheduler.stub.UpdateWeights(update())) for _ in range(2)]
        done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        code, details = await status_of(done.pop())
        assert (code, "another update" in details) == (grpc.StatusCode.ABORTED, True)
        worker.kill()
        code, details = await status_of(pending.pop())
        assert (code, "was lost" in details) == (grpc.StatusCode.UNAVAILABLE, True)
        (cell,) = (await scheduler.stub.GetWeightsVersion(weights_pb2.GetWeightsVersionRequest())).cells
        assert cell.version.version == "default"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (update("relative"), "path"),
        (update("/a\0b"), "path"),
        (update(version="x" * 129), "version"),
        (update(version="a\nb"), "version"),
        (update(on_update=99), "on_update"),
    ],
)
async def test_wrong_fields_are_named(request_: weights_pb2.UpdateWeightsRequest, field: str) -> None:
    async with run_scheduler() as scheduler:
        code, details = await status_of(scheduler.stub.UpdateWeights(request_))
        assert (code, details.startswith(f"{field}: ")) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_pause_that_is_resumed_before_it_takes_effect_fails() -> None:
    async with run_scheduler() as scheduler:
        await scheduler.worker(hang_at_step=3)
        await scheduler.submit("a", [1, 2, 3], max_tokens=50, detached=True)
        core = scheduler.service.engine.core
        await until(lambda: len(core.lifecycle.requests["a"].sequences[0].output) > 1)
        mode = weights_pb2.PAUSE_MODE_FINISH
        pausing = asyncio.ensure_future(scheduler.stub.PauseGeneration(weights_pb2.PauseGenerationRequest(mode=mode)))
        await until(lambda: core.pauses.is_paused)
        await scheduler.stub.ResumeGeneration(weights_pb2.ResumeGenerationRequest())
        assert (await status_of(pausing))[0] is grpc.StatusCode.ABORTED
        wrong = weights_pb2.PauseGenerationRequest(mode=99)  # type: ignore[arg-type]
        assert (await status_of(scheduler.stub.PauseGeneration(wrong)))[0] is grpc.StatusCode.INVALID_ARGUMENT
