"""Only a few calls of one client, apart from generation requests, are processed at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from midstream.rpc.channel import open_channel
from midstream.rpc.health import Progress
from midstream.rpc.serving import Server
from protos import loads_pb2, service_pb2, service_pb2_grpc
from router.authentication import Caller, current_caller
from router.pipeline import call_turns
from router.pipeline.call_turns import CallTurns


class Servicer(service_pb2_grpc.MidstreamServicer):
    """Holds its calls until `go` is set, and reports the client of each call that has begun."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.go = asyncio.Event()

    async def _hold(self) -> None:
        self.begun.put_nowait(current_caller.get().name)
        await self.go.wait()

    async def ListLoras(self, request: object, context: object) -> loads_pb2.ListLorasResponse:  # noqa: N802
        await self._hold()
        return loads_pb2.ListLorasResponse()

    async def Abort(self, request: object, context: object) -> loads_pb2.AbortResponse:  # noqa: N802
        await self._hold()
        return loads_pb2.AbortResponse()


def admit(method: str, context: Any) -> None:
    current_caller.set(Caller(dict(context.invocation_metadata())["client"]))


@pytest.fixture(autouse=True)
def long_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_turns, "_QUERY_S", 60.0)


async def test_queries_of_a_client_wait_for_its_others_and_aborts_do_not() -> None:
    servicer: Any = Servicer()  # type: ignore[abstract]
    server = Server("midstream.v1.Midstream", "127.0.0.1", 0, Progress(), admit=admit, turn_of=CallTurns().of_method)
    service_pb2_grpc.add_MidstreamServicer_to_server(servicer, server.grpc)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = service_pb2_grpc.MidstreamStub(channel)
        calls = [stub.ListLoras(loads_pb2.ListLorasRequest(), metadata=(("client", "a"),)) for _ in range(5)]
        begun = [await servicer.begun.get(), await servicer.begun.get()]
        # Calls of one channel are processed in order, so the remaining queries have arrived before the next two calls.
        calls.append(stub.Abort(loads_pb2.AbortRequest(), metadata=(("client", "a"),)))
        calls.append(stub.ListLoras(loads_pb2.ListLorasRequest(), metadata=(("client", "b"),)))
        begun += [await servicer.begun.get(), await servicer.begun.get()]
        assert sorted(begun) == ["a", "a", "a", "b"]
        assert servicer.begun.empty()
        servicer.go.set()
        await asyncio.gather(*calls)
        assert servicer.begun.qsize() == 3
    await server.stop()


async def test_pages_wait_and_probes_and_posted_requests_do_not() -> None:
    begun: list[str] = []
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])
        await go.wait()

    pages: Any = CallTurns().for_pages(app)
    paths = ["/metrics"] * 4 + ["/live", "/health", "/v1/completions"]
    methods = ["GET"] * 6 + ["POST"]
    scopes = [
        {"type": "http", "method": method, "path": path, "client": ("10.0.0.1", 9)}
        for method, path in zip(methods, paths, strict=True)
    ]
    async with asyncio.TaskGroup() as group:
        for scope in scopes:
            group.create_task(pages(scope, None, None))
        for _ in range(5):
            await asyncio.sleep(0)
        assert begun == ["/metrics"] * 2 + ["/live", "/health", "/v1/completions"]
        go.set()
    assert sorted(begun) == sorted(paths)


def test_requests_and_streams_have_limits_of_their_own() -> None:
    turns = CallTurns()
    service = service_pb2.DESCRIPTOR.services_by_name["Midstream"]
    waiting = {method.name for method in service.methods if turns.of_method(f"/{service.full_name}/{method.name}")}
    assert waiting.isdisjoint({"Generate", "Abort", "Embed"})
    assert turns.of_method("/grpc.health.v1.Health/Check") is None
    assert {"Resume", "GetStatus", "GetLoads", "GetRequestStats", "ListLoras"} <= waiting
