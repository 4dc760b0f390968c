"""If a bug ends a loop, the process exits and is restarted, instead of continuing without the loop."""

from __future__ import annotations

import asyncio

import pytest

from detokenizer import __main__ as detokenizer
from detokenizer.feed import FeedPool
from midstream.config import DetokenizerConfig, RouterConfig
from midstream.errors import ExecutionError
from midstream.rpc.discovery import Discovery
from midstream.rpc.frame_link import LinkSettings
from midstream.rpc.health import Progress
from midstream.rpc.serving import Server
from router import __main__ as router
from router.pipeline import cells
from router.pipeline.cells import Cell, Cells
from router.pipeline.detokenizer_pool import DetokenizerLink, DetokenizerPool
from router.protocols.batches.runner import BatchRunner
from router.status.feed import StatusFeed
from tests.ports import free_port


class DefectError(Exception):
    """An unexpected error."""


async def fail(*_: object, **__: object) -> None:
    await asyncio.sleep(0)
    raise DefectError


async def test_a_server_ends_with_a_loop_that_it_depends_on() -> None:
    server = Server("midstream.v1.Midstream", "127.0.0.1", 0, Progress())
    await server.start()
    server.depend_on(asyncio.create_task(fail(), name="the loop of something"))
    with pytest.raises(ExecutionError, match="the loop of something ended"):
        await asyncio.wait_for(server.run_until_signal(), 240)


async def test_a_detokenizer_ends_with_its_feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FeedPool, "run", fail)
    with pytest.raises(ExecutionError, match="the loop of token feeds ended"):
        await asyncio.wait_for(detokenizer.serve(DetokenizerConfig(port=0)), 240)


@pytest.mark.parametrize(
    ("owner", "method", "name"),
    [
        (Cells, "run", "schedulers"),
        (DetokenizerPool, "run", "detokenizers"),
        (StatusFeed, "run", "status"),
        (BatchRunner, "run", "batches"),
        (router, "watch_reach", "health"),
    ],
)
async def test_a_router_ends_with_each_of_its_loops(
    owner: object, method: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    http_port = free_port()
    monkeypatch.setattr(owner, method, fail)
    with pytest.raises(ExecutionError, match=f"the loop of {name} ended"):
        await asyncio.wait_for(router.serve(RouterConfig(port=0, http_port=http_port)), 240)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", http_port)


async def test_a_router_that_cannot_start_closes_its_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    http_port = free_port()
    monkeypatch.setattr(Server, "start", fail)
    with pytest.raises(DefectError):
        await asyncio.wait_for(router.serve(RouterConfig(port=0, http_port=http_port)), 240)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", http_port)


async def test_a_loop_that_ends_during_draining_is_not_a_failure() -> None:
    server = Server("midstream.v1.Midstream", "127.0.0.1", 0, Progress())
    await server.start()
    serving = asyncio.create_task(asyncio.Event().wait())
    server.depend_on(asyncio.create_task(asyncio.wait_for(serving, 240), name="a port"))  # type: ignore[arg-type]
    await server.stop()
    serving.cancel()
    await asyncio.sleep(0)
    assert server._failure is None


@pytest.mark.parametrize("method", ["poll", "_discover"])
async def test_the_scheduler_loop_ends_if_one_of_its_tasks_ends(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(cells, "_POLL_S", 0.01)
    if method == "poll":
        monkeypatch.setattr(Cell, "poll", fail)
    else:
        monkeypatch.setattr(Discovery, "run", fail)
    with pytest.raises(DefectError):
        await asyncio.wait_for(Cells("127.0.0.1:1", LinkSettings(1 << 20)).run(), 240)


async def test_the_detokenizer_loop_ends_if_one_of_its_links_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DetokenizerLink, "run", fail)
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(DetokenizerPool("127.0.0.1:1,127.0.0.1:2", LinkSettings(1 << 20), "own").run(), 240)
    assert raised.group_contains(DefectError)
