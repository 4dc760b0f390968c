"""Schedulers, detokenizers, routers and links fail, restart, join and leave; clients disconnect."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from midstream.client import AsyncClient, Result, SamplingParams
from midstream.errors import AlreadyExistsError, DeadlineError
from midstream.model.folder import open_model_folder
from midstream.model.tokenizer import Tokenizer
from tests.faults.processes import ALL, Processes, Streams, until
from tests.faults.test_worker_faults import FIRSTS, a_worker_is_ready, all_blocks_are_back, no_workers_are_left


async def test_a_scheduler_killed_in_the_middle_costs_no_token(processes: Processes, client: AsyncClient) -> None:
    streams = Streams(client, FIRSTS, 100)
    await streams.reach(20)
    await processes.kill("scheduler")
    processes.start("scheduler")
    await streams.check()
    await all_blocks_are_back(processes)


async def test_a_journal_with_a_torn_tail_and_a_damaged_record_costs_no_token(
    processes: Processes, client: AsyncClient
) -> None:
    streams = Streams(client, FIRSTS, 250)
    await streams.reach(60)
    await processes.kill("scheduler")
    segment = max(processes.journal_path.glob("*.log"))
    content = segment.read_bytes()
    segment.write_bytes(content.rstrip(b"\0")[:-5].ljust(len(content), b"\0"))
    processes.start("scheduler")
    # Output received before the kill proves nothing: it may have been in transit to the client.
    await until(lambda: "the journal's last transaction was cut off" in processes.log("scheduler"))
    await streams.reach(120)
    await processes.kill("scheduler")
    segment = max(processes.journal_path.glob("*.log"))
    content = segment.read_bytes()
    middle = len(content.rstrip(b"\0")) // 2
    segment.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    log = processes.log("scheduler")
    processes.start("scheduler")
    await streams.check()
    assert f"the journal file {segment} is damaged at byte" in processes.log("scheduler")[len(log) :]
    await all_blocks_are_back(processes)


async def test_detokenizers_are_added_and_removed_under_load(processes: Processes, client: AsyncClient) -> None:
    await processes.kill("detokenizer-1")
    streams = Streams(client, FIRSTS, 200)
    await streams.reach(20)
    processes.start("detokenizer-1", "detokenizer-2", "detokenizer-3")
    while len(await _serving(client)) < 4:
        await Streams(client, [first + 500 for first in FIRSTS], 10).check()
    last = Streams(client, [first + 500 for first in FIRSTS], 200)
    await last.reach(20)
    # Kill the detokenizer that has all streams, then one that has some of them, and then send SIGTERM to one.
    for name in ("detokenizer-0", "detokenizer-2"):
        await processes.kill(name)
    processes.send("detokenizer-3", signal.SIGTERM)
    await streams.check()
    await last.check()
    assert await processes.wait("detokenizer-3") == 0


async def _serving(client: AsyncClient) -> list[str]:
    info = await client.server_info()
    return [item.detokenizer_id for item in info.detokenizers if item.num_attached_total]


async def test_a_detokenizer_killed_in_the_middle_of_a_character_leaves_the_text_whole(
    processes: Processes, client: AsyncClient
) -> None:
    tokenizer = Tokenizer(open_model_folder("smollm2").path)
    circle = tokenizer.encode("🫠日語")
    assert len(circle) == len(set(circle)) == 8
    is_inside = {place for place in range(8) if "\ufffd" in tokenizer.decode(circle[:place])}
    for name in ("worker-0", "worker-1"):
        await processes.kill(name)
    processes.worker_flags = ("--circle", ",".join(map(str, circle)), "--step-ms", "30")
    processes.start("worker-0")
    sampling = SamplingParams(max_tokens=160, ignore_eos=True, temperature=0.0)
    num_kills = 0
    while num_kills < 4:  # on a busy machine, a request may end before a process can be killed
        result, next_kill = Result(""), 10
        async for chunk in client.generate(token_ids=circle[-1:], sampling=sampling, timeout_s=150):
            assert chunk.token_offset == len(result.token_ids)
            result.add(chunk)
            num_tokens = len(result.token_ids)
            if num_tokens > next_kill and num_tokens % 8 in is_inside and num_kills < 4:
                assert result.text == ("🫠日語" * 20)[: len(result.text)]
                name = f"detokenizer-{num_kills % 2}"
                await processes.kill(name)
                processes.start(name)
                num_kills, next_kill = num_kills + 1, num_tokens + 30
        assert result.token_ids == circle * 20
        assert result.text == "🫠日語" * 20
    processes.worker_flags = ()
    await processes.kill("worker-0")


async def test_a_router_killed_in_the_middle_costs_no_token(processes: Processes, client: AsyncClient) -> None:
    num_resumes = 0
    # A router may take longer to start than a stream lasts, so each kill has its own streams.
    for number in range(2):
        streams = Streams(client, FIRSTS, 1000)
        await streams.reach(20)
        await processes.kill(f"router-{number}")
        await streams.check()
        num_resumes += sum(stream.num_resumes for stream in streams.streams)
        processes.start(f"router-{number}")
        await until(functools.partial(_answers, processes.routers[number]))
    assert num_resumes > 0
    await all_blocks_are_back(processes)


async def _answers(address: str) -> bool:
    async with AsyncClient(address) as client:
        return bool((await client.server_info()).worker_groups)


async def test_clients_that_leave_are_counted_once_wherever_their_request_is(
    processes: Processes, client: AsyncClient
) -> None:
    for name in ("worker-0", "worker-1"):
        await processes.kill(name)
    processes.worker_flags = ("--max-batch-size", "2", "--max-num-tokens", "16")
    processes.start("worker-0")
    aborted = (await processes.stats()).num_completed_requests
    sampling = SamplingParams(max_tokens=4000, ignore_eos=True)
    prompts = (
        [5],
        [6] * 4000,
        [7] * 4000,
    )  # the first request generates, the prompt of the second is computed, and the third waits
    streams = [client.generate(token_ids=prompt, sampling=sampling, timeout_s=100) for prompt in prompts]
    first = await anext(streams[0])
    reading = [asyncio.create_task(anext(stream)) for stream in streams]

    async def are_there() -> bool:
        stats = await processes.stats()
        return stats.num_queued_requests == 1 and stats.inflight_batching_stats.num_ctx_tokens > 0

    await until(are_there)
    for stream, task in zip(streams, reading, strict=True):
        task.cancel()
        stream.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    await all_blocks_are_back(processes)
    assert first.token_offset == 0
    assert (await processes.stats()).num_completed_requests == aborted + 3
    processes.worker_flags = ()
    await processes.kill("worker-0")


async def test_a_deadline_in_the_queue_and_one_in_generation(processes: Processes, client: AsyncClient) -> None:
    for name in ("worker-0", "worker-1"):
        await processes.kill(name)
    await no_workers_are_left(processes)
    processes.worker_flags = ("--max-batch-size", "1")
    processes.start("worker-0")
    await a_worker_is_ready(processes)
    sampling = SamplingParams(max_tokens=4000, ignore_eos=True)
    running = client.generate(token_ids=[5], sampling=sampling, timeout_s=8)
    await anext(running)
    with pytest.raises(DeadlineError):
        await client.generate(token_ids=[9], sampling=sampling, timeout_s=0.5).result()
    with pytest.raises(DeadlineError):
        await running.result()
    (group,) = (await client.server_info()).worker_groups
    assert group.num_placed_requests == 1
    await all_blocks_are_back(processes)
    processes.worker_flags = ()
    await processes.kill("worker-0")


@asynccontextmanager
async def unsteady_link(port: int) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """Run a delaying proxy in front of a port. It closes its connections each time the event is set."""
    cut, writers = asyncio.Event(), set[asyncio.StreamWriter]()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await asyncio.sleep(0.005)
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        pair = {writer, onward[1]}
        writers.update(pair)
        await asyncio.gather(relay(reader, onward[1]), relay(onward[0], writer), return_exceptions=True)
        writers.difference_update(pair)
        for item in pair:
            item.close()

    async def cut_when_told() -> None:
        while True:
            await cut.wait()
            cut.clear()
            for writer in writers:
                writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    cutting = asyncio.create_task(cut_when_told())
    try:
        yield server.sockets[0].getsockname()[1], cut
    finally:
        cutting.cancel()
        server.close()
        for writer in writers:
            writer.transport.abort()


async def test_a_faulty_link_neither_loses_nor_duplicates_messages(processes: Processes, client: AsyncClient) -> None:
    for name in ("worker-0", "worker-1"):
        await processes.kill(name)
    direct = processes.worker_port
    async with unsteady_link(direct) as (port, cut):
        processes.worker_flags = ("--scheduler", f"tcp://127.0.0.1:{port}", "--repeat-results")
        processes.start("worker-0", "worker-1")
        streams = Streams(client, FIRSTS, 100)
        for num_tokens in (10, 30, 50, 70):
            await streams.reach(num_tokens)
            cut.set()
        await streams.check()
        await all_blocks_are_back(processes)
        processes.worker_flags = ()
        for name in ("worker-0", "worker-1"):
            await processes.kill(name)


async def test_a_rolling_restart_of_every_part_fails_no_request(processes: Processes, client: AsyncClient) -> None:
    failed: list[BaseException] = []
    is_over = asyncio.Event()

    async def keep_asking(number: int) -> None:
        while not is_over.is_set():
            try:
                await Streams(client, [1000 * number + 7], 40).check()
            except BaseException as error:
                failed.append(error)
                raise

    asking = [asyncio.create_task(keep_asking(number)) for number in range(1, 5)]
    for name in ALL:
        processes.send(name, signal.SIGTERM)
        # A draining scheduler exits when its requests have ended; new requests wait for its successor.
        assert await processes.wait(name) == 0
        processes.start(name)
        kind = name.partition("-")[0]
        if kind == "router":
            address = processes.routers[int(name[-1])]
            await until(functools.partial(_answers, address))
        else:
            await until(functools.partial(_is_back, client, name))
    is_over.set()
    await asyncio.gather(*asking)
    assert failed == []


async def _is_back(client: AsyncClient, name: str) -> bool:
    info = await client.server_info()
    present = {group.group_id for group in info.worker_groups} | {item.detokenizer_id for item in info.detokenizers}
    return name == "scheduler" or name in present


async def test_the_same_request_id_twice_runs_once(processes: Processes, client: AsyncClient) -> None:
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    before = sum(group.num_placed_requests for group in (await client.server_info()).worker_groups)
    async with AsyncClient(processes.routers[0]) as one, AsyncClient(processes.routers[1]) as other:
        results = await asyncio.gather(
            *(item.generate(token_ids=[70], sampling=sampling, request_id="twice").result() for item in (one, other))
        )
        with pytest.raises(AlreadyExistsError):
            await other.generate(token_ids=[71], sampling=sampling, request_id="twice").result()
    assert [result.token_ids for result in results] == [list(range(71, 131))] * 2
    after = sum(group.num_placed_requests for group in (await client.server_info()).worker_groups)
    assert after == before + 1
