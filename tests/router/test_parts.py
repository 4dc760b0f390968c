"""Components of the router: the client's stream, the choice of a cell, and discovery."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.chunk import Chunk, FinishReason, PerfMetrics, Usage
from midstream.errors import ConfigError, OverloadedError, UnavailableError
from midstream.extras import Extras, LogProbs, Tensor
from midstream.rpc import discovery
from midstream.rpc.discovery import Discovery
from midstream.rpc.frame_link import LinkSettings
from midstream.telemetry import Metrics
from protos import generation_pb2 as pb
from protos.loads_pb2 import CellLoad
from router.pipeline.cell_metrics import CellMetrics
from router.pipeline.cells import Cell, Cells
from router.pipeline.client_documents import ClientDocuments
from router.pipeline.streams import ClientStream
from tests.detokenizer.scripted_scheduler import scripted_scheduler


def cut(text: str, bounds: list[int]) -> list[Chunk]:
    edges = [0, *sorted(bounds), len(text)]
    spans = [(a, b, b == len(text)) for a, b in itertools.pairwise(edges) if a < b]
    return [
        Chunk(0, a, [ord(letter) for letter in text[a:b]], text[a:b], is_sequence_final=last, is_final=last)
        for a, b, last in spans
    ]


TEXT = "abcdefghij"


@given(
    bounds=st.lists(st.integers(1, 9), max_size=6, unique=True),
    taken=st.sets(st.integers(0, 6)),
    repeated=st.lists(st.integers(0, 6), max_size=3),
)
async def test_merging_and_repeats_change_nothing(bounds: list[int], taken: set[int], repeated: list[int]) -> None:
    stream = ClientStream("r", 1 << 20)
    chunks = cut(TEXT, bounds)
    out: list[Chunk] = []
    for number, chunk in enumerate(chunks):
        for again in repeated:
            if again < number:
                stream.push(cut(TEXT, bounds)[again])
        stream.push(chunk)
        if number in taken:
            out += await stream.take()
    if not out or not out[-1].is_final:
        out += await stream.take()
    assert "".join(chunk.text for chunk in out) == TEXT
    assert [token for chunk in out for token in chunk.token_ids] == [ord(letter) for letter in TEXT]
    assert [chunk.is_final for chunk in out].count(True) == 1
    assert stream.offsets == [len(TEXT)]


async def test_a_gap_counts_as_a_lost_source() -> None:
    stream = ClientStream("r", 1 << 20, from_token=3)
    stream.push(Chunk(0, 5, [1], "x"))
    with pytest.raises(UnavailableError):
        await stream.take()
    stream.push(Chunk(0, 3, [1], "x"))
    assert (await stream.take())[0].token_offset == 3


async def test_output_before_a_loss_is_delivered_before_the_error() -> None:
    stream = ClientStream("r", 1 << 20)
    stream.push(Chunk(0, 0, [1], "x"))
    stream.fail(UnavailableError("lost"))
    assert (await stream.take())[0].text == "x"
    with pytest.raises(UnavailableError):
        await stream.take()


async def test_a_chunk_that_is_a_whole_sequence_may_be_larger_than_what_a_slow_client_may_leave() -> None:
    stream = ClientStream("r", 2_000)
    stream.push(Chunk(0, 0, [1] * 1000, is_sequence_final=True))
    stream.push(Chunk(1, 0, [1] * 1000))  # starts at the first token, as in a resumed stream
    assert [len(chunk.token_ids) for chunk in await stream.take()] == [1000, 1000]
    stream.push(Chunk(1, 1000, [1]))
    stream.push(Chunk(1, 1001, [1] * 1000))
    assert stream.overflowed


async def test_too_much_unread_output_ends_the_stream() -> None:
    cuts: list[str] = []
    stream = ClientStream("r", 2_000, on_overflow=lambda: cuts.append("cut"))
    for offset in range(0, 2_000, 10):
        stream.push(Chunk(0, offset, [7] * 10, "seven"))
    assert cuts == ["cut"]
    with pytest.raises(OverloadedError):
        await stream.take()


@pytest.mark.parametrize(
    "other",
    [
        {"extras": Extras(LogProbs((-1.0, -2.0), 0, (), (), (1, 2)))},
        {"kind_changed_at": 0},
        {"is_sequence_final": True, "finish_reason": FinishReason.STOP},
        {"is_final": True},
    ],
)
def test_only_a_chunk_without_other_fields_is_read_as_plain(other: dict[str, Any]) -> None:
    message = pb.GenerateResponse()
    chunk = Chunk(2, 7, [1, 2], "né")
    assert chunk.fill(message)
    assert Chunk.from_proto(message, is_plain=True) == chunk
    assert not replace(chunk, **other).fill(pb.GenerateResponse())


def test_a_chunk_survives_the_wire() -> None:
    chunk = Chunk(
        sequence_index=2,
        token_offset=7,
        token_ids=[1, 2],
        text="né",
        is_sequence_final=True,
        is_final=True,
        finish_reason=FinishReason.STOP,
        matched_stop=0,
        usage=Usage(3, 2, 1),
        extras=Extras(
            LogProbs((-0.5, -1.0), 1, (5, 6), (-0.25, -0.75), (1, 2)),
            LogProbs((-2.0,), 0, (), (), (3,)),
            (Tensor("t", "float32", (1, 2), b"12345678"),),
        ),
        cumulative_log_prob=-1.5,
        perf_metrics=PerfMetrics(arrival_unix_ns=1, num_steps=9),
    )
    message = pb.GenerateResponse.FromString(chunk.to_proto("r").SerializeToString())
    assert message.request_id == "r"
    assert Chunk.from_proto(message) == chunk
    word = Chunk(token_ids=[], is_sequence_final=True, matched_stop="END", finish_reason=FinishReason.LENGTH)
    assert Chunk.from_proto(word.to_proto("r")) == word


async def make_cells(*names: str) -> Cells:
    cells = Cells(",".join(names), LinkSettings(1 << 20))
    for name in names:
        cells.cells[name] = Cell(name, name, LinkSettings(1 << 20))
        cells.cells[name].is_up = True
    return cells


async def test_the_load_of_cells_that_are_up_is_exported_under_the_names_that_gateways_read() -> None:
    cells = await make_cells("a:1", "b:1", "c:1")
    loads = (
        CellLoad(
            num_running_requests=3, num_queued_requests=4, num_blocks=100, num_free_blocks=30, tokens_per_block=16,
            running_loras=["b", "c"], waiting_loras=["d"], max_loras=2,
        ),
        CellLoad(
            num_running_requests=5, num_queued_requests=0, num_blocks=100, num_free_blocks=80, tokens_per_block=16,
            running_loras=["a", "b"], max_loras=2,
        ),
        CellLoad(
            num_running_requests=7, num_queued_requests=9, num_blocks=100, num_free_blocks=0, tokens_per_block=16,
            running_loras=["z"], max_loras=2,
        ),
    )  # fmt: skip
    for cell, load in zip(cells.cells.values(), loads, strict=True):
        cell.reports = [load]
    cells.cells["c:1"].is_up = False
    metrics = Metrics()
    metrics.registry.register(CellMetrics("m", cells.reports))
    lines = set(metrics.render().decode().splitlines())
    assert {
        'vllm:num_requests_running{model_name="m"} 8.0',
        'vllm:num_requests_waiting{model_name="m"} 4.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.45',
        'vllm:cache_config_info{block_size="16",model_name="m",num_gpu_blocks="200"} 1.0',
    } <= lines
    (adapters,) = [line for line in lines if line.startswith("vllm:lora_requests_info{")]
    labels, _, value = adapters.rpartition(" ")
    assert labels == (
        'vllm:lora_requests_info{max_lora="4",model_name="m",running_lora_adapters="a,b,c",waiting_lora_adapters="d"}'
    )
    assert time.time() - 60 < float(value) <= time.time()
    assert not any(line.startswith("midstream:num_requests") for line in lines)
    for cell in cells.cells.values():
        await cell.close()


async def test_prompts_with_a_common_prefix_go_to_one_cell_unless_it_is_busy() -> None:
    cells = await make_cells("a:1", "b:1", "c:1")
    prompts = [[number] * 64 for number in range(30)]
    first = [cells.choose(prompt, "").name for prompt in prompts]
    assert {*first} == {"a:1", "b:1", "c:1"}
    assert [cells.choose([*prompt, 9, 9], "").name for prompt in prompts] == first
    busy = cells.choose(prompts[0], "")
    busy.load = 9
    assert cells.choose(prompts[0], "") is not busy
    busy.load = 8
    assert cells.choose(prompts[0], "") is busy
    busy.is_up = False
    assert cells.choose(prompts[0], "") is not busy
    for cell in cells.cells.values():
        await cell.close()


async def test_a_repeated_request_goes_to_one_cell_though_it_is_busy_or_down() -> None:
    cells = await make_cells("a:1", "b:1", "c:1")
    names = [f"request {number}" for number in range(30)]
    first = [cells.home(name) for name in names]
    assert {cell.name for cell in first} == {"a:1", "b:1", "c:1"}
    first[0].is_up, first[0].load = False, 99
    other = await make_cells("c:1", "a:1", "b:1")
    assert [other.home(name).name for name in names] == [cells.home(name).name for name in names]
    assert [cells.home(name) for name in names] == first
    for cell in (*cells.cells.values(), *other.cells.values()):
        await cell.close()


async def test_no_cell_is_unavailable() -> None:
    with pytest.raises(UnavailableError):
        Cells("a:1", LinkSettings(1 << 20)).choose([1], "")


async def test_discovery_follows_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.rpc.discovery._INTERVAL_S", 0.01)
    answers: list[list[str]] = [["10.0.0.2", "10.0.0.1"], [], ["10.0.0.1", "10.0.0.3"]]
    changes: list[list[str]] = []
    done = asyncio.Event()

    async def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert host == "parts"
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if not found:
            raise socket.gaierror("nothing")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    def note(addresses: list[str]) -> None:
        changes.append(addresses)
        if len(changes) == 2:
            done.set()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    running = asyncio.create_task(Discovery("dns:///parts:99,x:1", field="f", on_change=note).run())
    await asyncio.wait_for(done.wait(), 240)
    running.cancel()
    # A single failed name resolution has no effect.
    assert changes == [["10.0.0.1:99", "10.0.0.2:99", "x:1"], ["10.0.0.1:99", "10.0.0.3:99", "x:1"]]


async def test_the_active_scheduler_of_several_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second scheduler takes over while the first still responds; the first is not used again until it has a higher
    epoch. Before any scheduler is active, a standby is used.
    """
    rounds: list[dict[str, int]] = [
        {"a:1": 0, "b:1": 0},
        {"a:1": 1, "b:1": 0},
        {"a:1": 1, "b:1": 2},
        {"a:1": 1, "b:1": 0},
        {"a:1": 0, "b:1": 2},
        {"a:1": 3, "b:1": 2},
    ]
    asked, changes, done = dict.fromkeys("ab", 0), list[list[str]](), asyncio.Event()

    async def get_epoch(address: str, name: str) -> int:
        assert name == ""
        asked[address[0]] += 1
        return rounds[min(asked[address[0]], len(rounds)) - 1][address]

    def note(addresses: list[str]) -> None:
        changes.append(addresses)
        assert found.target_of(addresses[0]) in ("one-of:a:1|b:1", "c:1")
        if len(changes) == 3:
            done.set()
            running.cancel()  # at once, before the discovery asks again

    monkeypatch.setattr(discovery, "_INTERVAL_S", 0.001)
    found = Discovery("one-of:a:1|b:1,c:1", field="schedulers", on_change=note, get_epoch=get_epoch)
    running = asyncio.create_task(found.run())
    await asyncio.wait_for(done.wait(), 240)
    assert changes == [["a:1", "c:1"], ["b:1", "c:1"], ["a:1", "c:1"]]
    assert asked["a"] == len(rounds)


def test_detokenizers_have_no_standbys() -> None:
    with pytest.raises(ConfigError, match="cannot contain one-of"):
        Discovery("one-of:a:1|b:1", field="detokenizers", on_change=lambda _: None)


@pytest.mark.parametrize("targets", ["", " , ", "host", "host:port", "one-of:a:1|host"])
def test_a_setting_without_addresses_is_refused(targets: str) -> None:
    async def get_epoch(address: str, name: str) -> int:
        return 0

    with pytest.raises(ConfigError) as raised:
        Discovery(targets, field="schedulers", on_change=lambda _: None, get_epoch=get_epoch)
    assert raised.value.field == "schedulers"


async def test_a_cell_stays_the_same_when_its_standby_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated request therefore goes to the successor, which has recovered the original request."""
    epochs = {"a:1": 1, "b:1": 0, "c:1": 0, "d:1": 1}

    async def epoch_of(settings: LinkSettings, address: str, name: str) -> int:
        return epochs[address]

    monkeypatch.setattr("router.pipeline.cells.scheduler_epoch", epoch_of)
    monkeypatch.setattr(discovery, "_INTERVAL_S", 0.001)
    cells = Cells("one-of:a:1|b:1,one-of:c:1|d:1", LinkSettings(1 << 20))
    running = asyncio.create_task(cells.run())
    async with asyncio.timeout(240):
        while set(cells.cells) != {"a:1", "d:1"}:  # noqa: ASYNC110 (set by another task)
            await asyncio.sleep(0.001)
        first = cells.cells["a:1"]
        homes = [cells.home(f"r{number}").name for number in range(20)]
        epochs["b:1"] = 2
        while set(cells.cells) != {"b:1", "d:1"}:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert cells.successor_of(first) is cells.cells["b:1"]
    assert [cells.home(f"r{number}").name for number in range(20)] == homes
    assert len(set(homes)) == 2
    running.cancel()
    await asyncio.wait([running])


async def test_a_call_that_waits_for_a_cell_continues_at_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scripted_scheduler()
    address = await scheduler.start()
    epochs = {"127.0.0.1:1": 1, address: 0}

    async def epoch_of(settings: LinkSettings, address: str, name: str) -> int:
        return epochs[address]

    monkeypatch.setattr("router.pipeline.cells.scheduler_epoch", epoch_of)
    monkeypatch.setattr(discovery, "_INTERVAL_S", 0.001)
    cells = Cells(f"one-of:127.0.0.1:1|{address}", LinkSettings(1 << 20), 1000)
    running = asyncio.create_task(cells.run())
    async with asyncio.timeout(240):
        while not cells.cells:  # noqa: ASYNC110 (set by another task)
            await asyncio.sleep(0.001)
    documents = ClientDocuments(cells)
    writing = asyncio.create_task(documents.put(cells.cells["127.0.0.1:1"], "kind", "", "id", b"data"))
    epochs[address] = 2
    assert await asyncio.wait_for(writing, 240) == 1
    assert (await documents.get("kind", "", "id")).data == b"data"
    running.cancel()
    await asyncio.wait([running])
    await scheduler.stop()


async def test_a_cell_of_which_no_scheduler_is_active_yet_counts_as_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise, a router that starts during a takeover would report what this cell stores as missing, and send calls
    with an idempotency key to another cell, where they would run again.
    """
    scheduler = scripted_scheduler()
    address = await scheduler.start()
    standbys = "one-of:127.0.0.1:1|127.0.0.1:2"

    async def epoch_of(*_: object) -> int:
        return 0

    monkeypatch.setattr("router.pipeline.cells.scheduler_epoch", epoch_of)
    cells = Cells(f"{standbys},{address}", LinkSettings(1 << 20), 0)
    running = asyncio.create_task(cells.run())
    async with asyncio.timeout(240):
        while not cells.cells:  # noqa: ASYNC110 (set by another task)
            await asyncio.sleep(0.001)
    with pytest.raises(UnavailableError):
        await ClientDocuments(cells).get("kind", "", "id")
    assert {cells.home(f"r{number}").name for number in range(20)} == {standbys, address}
    running.cancel()
    await asyncio.wait([running])
    await scheduler.stop()


async def test_an_abort_fails_if_the_cell_that_may_have_the_request_does_not_respond() -> None:
    """Otherwise a client would take the answer of another cell to mean that its request had ended."""
    scheduler = scripted_scheduler()
    cells = await make_cells(await scheduler.start(), "127.0.0.1:1")
    scheduler.add("here")
    assert await cells.abort("here")
    with pytest.raises(UnavailableError):
        await cells.abort("elsewhere")
    for cell in cells.cells.values():
        await cell.close()
    await scheduler.stop()
