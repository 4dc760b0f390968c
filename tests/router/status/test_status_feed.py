"""The status feed over real sockets, with a scheduler whose status is set by each test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import sys
import termios
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import router.dashboard
from midstream.cli.top.board import Board
from midstream.cli.top.command import follow
from midstream.client import AsyncClient
from midstream.errors import UnavailableError
from midstream.rpc.frame_link import LinkSettings
from protos import status_pb2
from router.authentication import AuthenticatedApp, Authenticator, TokenFile
from router.pipeline.cells import Cells
from router.protocols.http_server import HttpPort
from router.protocols.openai.app import refuse
from router.status import StatusFeed
from tests.detokenizer.scripted_scheduler import scripted_scheduler
from tests.router.conftest import MAX_MESSAGE, Cluster, Part

STATIC = Path(router.dashboard.__file__).with_name("static")
HOSTILE = "</script><img src=x onerror=alert(1)>"
OpenClient = Callable[..., AsyncClient]


@pytest.fixture
async def part(cluster: Cluster) -> Part:
    cluster.scheduler.status.CopyFrom(
        status_pb2.CellStatus(
            cell=HOSTILE,
            requests=status_pb2.RequestCounts(num_queued=5, max_num_queued=9),
            groups=[status_pb2.GroupStatus(group_id="w", num_blocks=4, num_held_blocks=1)],
            counts=status_pb2.CountsSinceStart(num_finished_by_reason={"stop": 2}),
        )
    )
    return await cluster.add_router()


def read(port: int, path: str, num_events: int = 0, **headers: str) -> tuple[int, dict[str, str], str]:
    """Return status, headers and body; for a stream, the body consists of the first events."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=240) as response:
            body = b"".join(response.readline() for _ in range(2 * num_events)) if num_events else response.read()
            return response.status, dict(response.headers), body.decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)


def port_of(part: Part) -> int:
    assert part.http is not None
    return part.http.port


async def get(part: Part, path: str, num_events: int = 0, **headers: str) -> tuple[int, dict[str, str], str]:
    return await asyncio.to_thread(read, port_of(part), path, num_events, **headers)


async def test_a_watcher_gets_the_state_and_then_each_new_sample_once(
    part: Part, cluster: Cluster, open_client: OpenClient
) -> None:
    times: list[int] = []
    async for status in open_client(part).status(follow=True):
        times += [sample.time_unix_ms for sample in status.samples]
        if len(times) >= 4:
            break
    assert times == sorted(set(times))
    assert (status.requests.num_queued, status.counts.num_finished_by_reason["stop"]) == (5, 2)
    assert [(group.group_id, group.HasField("block_map")) for group in status.groups] == [("w", True)]
    assert {part.kind: part.name for part in status.parts} == {
        "router": "router-1",
        "scheduler": HOSTILE,
        "worker": "w",
    }


async def test_schedulers_draw_maps_only_while_somebody_watches(
    part: Part, cluster: Cluster, open_client: OpenClient
) -> None:
    asked = cluster.scheduler.status_requests
    await until(lambda: bool(asked))
    assert asked[-1].max_map_cells == 0
    async for _ in open_client(part).status():
        pass
    assert max(request.max_map_cells for request in asked) > 0
    await until(lambda: not asked[-1].max_map_cells)


async def test_the_feed_over_http_has_the_same_contents(part: Part) -> None:
    status, headers, body = await get(part, "/dashboard/feed", num_events=2)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events: list[dict[str, Any]] = [json.loads(event.removeprefix("data: ")) for event in body.split("\n\n") if event]
    assert len(events) == 2
    assert all(event["samples"] for event in events)
    assert events[1]["requests"]["numQueued"] == 5
    assert events[1]["groups"][0]["blockMap"]["blocksPerCell"] == 1


async def test_the_page_loads_only_existing_files_of_its_own_site(part: Part) -> None:
    pages = ["/dashboard", *(f"/dashboard/static/{path.name}" for path in STATIC.iterdir())]
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    named = set[str]()
    for page in pages:
        status, headers, body = await get(part, page)
        assert status == 200, page
        assert headers["content-type"].startswith(types[Path(page).suffix or ".html"])
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.findall(r"https?://(?!www\.w3\.org/)|innerHTML|insertAdjacentHTML|document\.write", body), page
        named |= set(re.findall(r"/dashboard/\w[\w/.]*", body))
        named |= {f"/dashboard/static/{name}" for name in re.findall(r'from "\./([\w.]+)"', body)}
    assert named == {*pages, "/dashboard/feed"} - {"/dashboard", "/dashboard/static/index.html"}


async def test_the_page_is_open_and_its_feed_asks_for_the_token(part: Part, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("a-token-of-somebody somebody\n")
    assert part.pages is not None
    authenticator = Authenticator(tokens=TokenFile(str(tmp_path / "tokens")))
    http = HttpPort(AuthenticatedApp(part.pages, authenticator, refuse), "127.0.0.1", 0)
    http.start()
    statuses = {}
    for path in ("/dashboard", "/dashboard/static/app.js", "/dashboard/feed", "/dashboard/static/../feed"):
        statuses[path], _, _ = await asyncio.to_thread(read, http.port, path)
    token = {"Authorization": "Bearer a-token-of-somebody"}
    status, _, body = await asyncio.to_thread(lambda: read(http.port, "/dashboard/feed", 1, **token))
    await http.stop(0)
    assert list(statuses.values()) == [200, 200, 401, 404]
    assert status == 200
    assert body.startswith("data: ")


async def test_a_scheduler_is_shown_as_lost_and_as_serving_after_its_return(
    part: Part, cluster: Cluster, open_client: OpenClient
) -> None:
    port = int(cluster.scheduler_address.rpartition(":")[2])
    steps = iter([status_pb2.PartStatus.SERVING, status_pb2.PartStatus.LOST, status_pb2.PartStatus.SERVING])
    expected = next(steps)
    async with asyncio.timeout(240):
        async for status in open_client(part).status(follow=True):
            states = [item.state for item in status.parts if item.name == HOSTILE]
            if states != [expected]:
                continue
            reached = expected
            following = next(steps, None)
            if following is None:
                break
            expected = following
            if reached == status_pb2.PartStatus.SERVING:
                await cluster.scheduler.stop()
            else:
                await cluster.scheduler.start(port)


async def test_cells_are_added_up_and_their_groups_told_apart() -> None:
    schedulers = {name: scripted_scheduler() for name in ("one", "two")}
    for name, scheduler in schedulers.items():
        group = status_pb2.GroupStatus(group_id="w", num_blocks=4, num_held_blocks=1)
        scheduler.status.CopyFrom(status_pb2.CellStatus(cell=name, groups=[group]))
        scheduler.status.requests.num_queued = 5
        scheduler.status.counts.num_finished_by_reason["stop"] = 2
    addresses = [await scheduler.start() for scheduler in schedulers.values()]
    cells = Cells(",".join(addresses), LinkSettings(MAX_MESSAGE))
    feed = StatusFeed(cells, "model", lambda: status_pb2.RouterStatus(router_id="r"), asyncio.Event(), 0.05)
    tasks = [asyncio.create_task(cells.run()), asyncio.create_task(feed.run())]
    names = list[list[str]]()
    async with asyncio.timeout(240), contextlib.aclosing(feed.watch()) as states:
        async for state in states:
            names.append([group.group_id for group in state.groups])
            if names[-1] == ["one/w", "two/w"] and len(schedulers) == 2:
                assert (state.requests.num_queued, state.counts.num_finished_by_reason["stop"]) == (10, 4)
                assert state.samples[-1].kv_usage == 0.25
                await schedulers.pop("two").stop()
            elif names[-1] == ["one/w"] and len(schedulers) == 1:
                break
    lost = {part.name: part.state for part in state.parts}
    assert lost["one"] == lost["one/w"] == status_pb2.PartStatus.SERVING
    assert (lost["two"], lost["two/w"]) == (status_pb2.PartStatus.LOST, status_pb2.PartStatus.UNKNOWN)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await schedulers["one"].stop()


async def test_the_board_reports_a_lost_router_and_follows_its_replacement(
    part: Part, cluster: Cluster, open_client: OpenClient
) -> None:
    board, port = Board(), part.server.port
    following = asyncio.create_task(follow(open_client(part), board))
    await until(lambda: not board.problem)
    await part.kill()
    await until(lambda: "No router answers" in board.problem)
    await cluster.add_router(port=port)
    await until(lambda: not board.problem)
    following.cancel()


async def test_a_draining_router_disconnects_its_watchers(part: Part, open_client: OpenClient) -> None:
    async def watch() -> None:
        async for _ in open_client(part).status(follow=True):
            part.server.draining.set()

    with pytest.raises(UnavailableError, match="draining"):
        await asyncio.wait_for(watch(), 240)


async def test_a_draining_router_ends_the_dashboards_feed(part: Part, cluster: Cluster) -> None:
    reading = asyncio.create_task(get(part, "/dashboard/feed"))
    await until(lambda: any(request.max_map_cells for request in cluster.scheduler.status_requests))
    part.server.draining.set()
    status, _, _ = await asyncio.wait_for(reading, 240)
    assert status in (200, 503)  # 503 if the stream is rejected before its first event


async def test_top_shows_itself_on_a_terminal_and_q_quits(part: Part) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    settings = termios.tcgetattr(theirs)
    command = (sys.executable, "-m", "midstream.cli", "top", "--address", part.address)
    # A size that is set in the environment would take precedence over that of the terminal.
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    environment["TERM"] = "xterm-256color"
    process = await asyncio.create_subprocess_exec(
        *command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    written = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):
            written.extend(os.read(ours, 65536))

    asyncio.get_running_loop().add_reader(ours, read)
    try:
        await until(lambda: "scheduler" in written.decode(errors="ignore"))
        assert termios.tcgetattr(theirs)[3] & termios.ECHO == 0
        os.write(ours, b"p")
        await until(lambda: "paused  q quit" in written.decode(errors="ignore"))
        os.write(ours, b"q")
        assert await asyncio.wait_for(process.wait(), 240) == 0
        assert termios.tcgetattr(theirs) == settings
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)
        os.close(theirs)
