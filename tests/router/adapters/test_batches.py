"""Files and batches, with OpenAI's official client and a scripted model."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest

from midstream.errors import InvalidArgumentError
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from router.pipeline.cells import Cell
from router.pipeline.client_documents import ClientDocument, ClientDocuments
from router.protocols.batches import lease
from router.protocols.batches.batch import Batch, Batches
from router.protocols.batches.files import FileInfo, Files
from router.protocols.batches.files_api import checked_ttl
from router.protocols.batches.lease import Lease, Leases
from router.protocols.batches.lines import Line, Outcome, answered, check_lines, read_line
from router.protocols.batches.upload import Form
from tests.router.conftest import Cluster, Part

CHAT = "/v1/chat/completions"
TEXT = "The sky is blue."


@pytest.fixture
async def model(cluster: Cluster, tokenizer: Tokenizer) -> AsyncIterator[None]:
    """Answer every request with the same text."""
    ids, answered = tokenizer.encode(TEXT), set[str]()

    async def answer() -> None:
        while True:
            await cluster.scheduler.until(lambda: set(cluster.scheduler.requests) - answered)
            for request_id in set(cluster.scheduler.requests) - answered:
                answered.add(request_id)
                cluster.scheduler.emit(request_id, ids)
                cluster.scheduler.end(request_id, reason=pb.FINISH_REASON_STOP)

    task = asyncio.create_task(answer())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def line(name: str, **fields: Any) -> str:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": f"Say {name}."}], **fields}
    return json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body})


async def create(client: openai.AsyncOpenAI, lines: list[str], window: Any = "24h", **options: Any) -> Any:
    data = "\n".join(lines).encode()
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window=window, **options
    )


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    async with asyncio.timeout(240):
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.1)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def rows(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(row) for row in (await client.files.content(file_id)).text.splitlines()]


async def test_files_are_stored_listed_read_and_deleted(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    data = bytes(range(256)) * 10_000  # the file has more than one chunk
    first = await client.files.create(file=("a.bin", data), purpose="user_data")
    second = await client.files.create(
        file=("b.jsonl", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (first.filename, first.bytes, first.purpose, first.status) == ("a.bin", len(data), "user_data", "processed")
    assert second.expires_at == second.created_at + 3600
    assert (await client.files.content(first.id)).content == data
    assert [file.id async for file in client.files.list()] == [second.id, first.id]
    assert [file.id async for file in client.files.list(limit=1, order="asc")] == [first.id, second.id]
    assert [file.id async for file in client.files.list(purpose="batch")] == [second.id]
    assert (await client.files.delete(first.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(first.id)
    assert (await client.files.retrieve(second.id)).to_dict() == second.to_dict()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=b"x", purpose="vision")
    assert refused.value.param == "purpose"
    with pytest.raises(openai.BadRequestError):
        await client.files.create(file=b"x" * (5 << 20), purpose="batch")
    assert [file.id async for file in client.files.list()] == [second.id]
    cells = cluster.runners[0].cells
    chunks = await ClientDocuments(cells).waiting(cells.any(), "file_chunk", 100)
    assert [chunk.id.partition("/")[0] for chunk in chunks] == [second.id]  # no chunks of the refused files remain


@pytest.mark.usefixtures("model")
async def test_a_batch_runs_each_line_once_and_below_interactive_requests(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    names = [f"line {i}" for i in range(70)]
    lines = [line(name) for name in names]
    lines[3] = line("line 3", no_such_field=1)
    batch = await create(client, lines, metadata={"a": "b"})
    assert (batch.status, batch.metadata, batch.object) == ("validating", {"a": "b"}, "batch")
    batch = await ended(client, batch)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (70, 69, 1)
    output, errors = await rows(client, batch.output_file_id), await rows(client, batch.error_file_id)
    assert [row["custom_id"] for row in output] == [name for name in names if name != "line 3"]
    assert {row["response"]["body"]["choices"][0]["message"]["content"] for row in output} == {TEXT}
    assert {row["response"]["status_code"] for row in output} == {200}
    assert [(row["custom_id"], row["response"]["status_code"]) for row in errors] == [("line 3", 400)]
    assert len(cluster.scheduler.requests) == len(cluster.scheduler.submits) == 69
    assert {script.request.priority for script in cluster.scheduler.requests.values()} == {-75}
    used = [row["response"]["body"]["usage"] for row in output]
    assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in used)
    assert [item.id async for item in client.batches.list(limit=1)] == [batch.id]


@pytest.mark.usefixtures("model")
async def test_a_line_may_have_a_call_that_was_cut_off(client: openai.AsyncOpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Kö'}}
    result = {"role": "tool", "tool_call_id": "c", "content": "incomplete"}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}, result]
    batch = await ended(client, await create(client, [line("a", messages=messages)]))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 0)


async def test_a_wrong_input_fails_as_a_whole_and_names_its_lines(client: openai.AsyncOpenAI) -> None:
    lines = [line("a"), line("a"), "{", line("b", stream=True), line("c").replace("/chat", "")]
    batch = await ended(client, await create(client, lines))
    assert batch.status == "failed"
    found = [(error.line, error.param) for error in batch.errors.data]
    assert found == [(2, "custom_id"), (3, None), (4, "body.stream"), (5, "url")]
    batch = await ended(client, await create(client, [""]))
    assert [error.code for error in batch.errors.data] == ["empty_file"]


async def test_a_cancelled_batch_keeps_finished_results(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.protocols.batches.runner._CANCEL_GRACE_S", 0.0)
    is_answered = asyncio.Event()

    def noted(*arguments: Any) -> Outcome:
        is_answered.set()
        return answered(*arguments)

    monkeypatch.setattr("router.protocols.batches.runner.answered", noted)
    batch = await create(client, [line(f"line {i}") for i in range(3)])
    await cluster.scheduler.until(lambda: len(cluster.scheduler.requests) == 3)
    first = next(iter(cluster.scheduler.requests))
    cluster.scheduler.emit(first, tokenizer.encode(TEXT))
    cluster.scheduler.end(first, reason=pb.FINISH_REASON_STOP)
    await asyncio.wait_for(is_answered.wait(), 240)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    batch = await ended(client, batch)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("cancelled", 1, 2)
    assert len(await rows(client, batch.output_file_id)) == 1
    assert {row["error"]["code"] for row in await rows(client, batch.error_file_id)} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError):
        await client.batches.cancel(batch.id)


async def test_a_batch_ends_with_its_completion_window(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.protocols.batches.runner._CANCEL_GRACE_S", 0.0)
    batch = await ended(client, await create(client, [line("a")], window="1s"))
    assert batch.status == "expired"
    assert [row["error"]["code"] for row in await rows(client, batch.error_file_id)] == ["batch_expired"]
    for param, wrong in (("completion_window", {"window": "48h"}), ("tools", {"extra_body": {"tools": [1]}})):
        with pytest.raises(openai.BadRequestError) as raised:
            await create(client, [line("a")], **wrong)
        assert raised.value.param == param


async def test_a_batch_needs_an_input_file(client: openai.AsyncOpenAI) -> None:
    for file_id, status in ((None, 400), ("", 400), (5, 400), ("file-x", 404)):
        fields: Any = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        with pytest.raises(openai.APIStatusError) as raised:
            await client.batches.create(**fields)
        assert (raised.value.status_code, raised.value.param) == (status, "input_file_id")


async def test_a_list_continues_after_a_deleted_item_but_not_after_what_is_no_id(client: openai.AsyncOpenAI) -> None:
    files = [await client.files.create(file=b"{}", purpose="batch") for _ in range(3)]
    seen = []
    async for file in client.files.list(limit=1):
        seen.append(file.id)
        await client.files.delete(file.id)
    assert seen == [file.id for file in reversed(files)]
    for after in ("file-x", "x", f"batch_{'0' * 32}", files[0].id[:-1]):
        with pytest.raises(openai.BadRequestError) as raised:
            await client.files.list(after=after)
        assert raised.value.param == "after"
    with pytest.raises(openai.BadRequestError) as raised:
        await client.batches.list(after=files[0].id)
    assert raised.value.param == "after"


async def test_a_repeated_call_returns_the_object_created_by_the_first(client: openai.AsyncOpenAI) -> None:
    key: Any = {"Idempotency-Key": "k"}
    file = await client.files.create(file=b"1", purpose="batch", extra_headers=key)
    assert (await client.files.create(file=b"1", purpose="batch", extra_headers=key)).id == file.id
    with pytest.raises(openai.BadRequestError):
        await client.files.create(file=b"2", purpose="batch", extra_headers=key)
    body: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", "extra_headers": key}
    batch = await client.batches.create(**body)
    assert (await client.batches.create(**body)).id == batch.id
    with pytest.raises(openai.BadRequestError):
        await client.batches.create(**body, metadata={"other": "contents"})
    assert len((await client.files.list()).data) == 1


async def test_a_batch_whose_router_dies_is_taken_over(
    cluster: Cluster, router: Part, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_LEASE_S", 1.5)
    assert router.http is not None
    url = f"http://127.0.0.1:{router.http.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        batch = await create(client, [line(f"line {i}") for i in range(4)])
        await cluster.scheduler.until(lambda: len(cluster.scheduler.requests) == 4)
    other = await cluster.add_router(await cluster.add_detokenizer("e"))
    await router.kill()
    for request_id in list(cluster.scheduler.requests):
        cluster.scheduler.emit(request_id, tokenizer.encode(TEXT))
        cluster.scheduler.end(request_id, reason=pb.FINISH_REASON_STOP)
    assert other.http is not None
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{other.http.port}/v1", api_key="none") as client:
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert [row["custom_id"] for row in await rows(client, batch.output_file_id)] == [f"line {i}" for i in range(4)]
    assert len(cluster.scheduler.requests) == 4


def test_a_failed_response_is_an_error_although_its_status_is_200() -> None:
    batch, line = cast("Batch", SimpleNamespace(id="batch_a")), Line(0, "a", b"{}")
    failed: dict[str, object] = {"object": "response", "status": "failed", "error": {"message": "the deadline passed"}}
    assert answered(batch, line, 200, "resp_a", failed).is_error
    assert not answered(batch, line, 200, "resp_a", {"object": "response", "status": "incomplete"}).is_error


@pytest.mark.parametrize(
    "data",
    [b'{"\\ud800": 1}', b'{"custom_id": "\\uD83D"}', b'{"custom_id": "\xed\xa0\xbd"}', b'{"body": {"seed": 1e999}}'],
)
def test_a_line_with_half_a_surrogate_pair_or_an_infinite_number_is_not_json(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="is not JSON"):
        read_line(0, data, "/v1/completions")


async def test_a_line_longer_than_a_body_may_be_is_refused() -> None:
    long = line("b", user="x" * 40_000)

    async def lines() -> AsyncIterator[bytes]:
        for text in (line("a"), long, line("c")):
            yield text.encode()

    count, errors = await check_lines(lines(), CHAT, 40_000)
    assert (count, [(error["line"], error["message"]) for error in errors]) == (3, [(2, "has more than 40000 bytes")])
    assert await check_lines(lines(), CHAT, len(long)) == (3, [])


async def test_of_a_long_line_only_its_beginning_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"ab\n" + b"x" * 5000 + b"\n\ncd"

    async def contents(*_: object) -> AsyncIterator[bytes]:
        for start in range(0, len(data), 100):
            yield data[start : start + 100]

    files = Files(cast("ClientDocuments", None))
    monkeypatch.setattr(files, "contents", contents)
    found = [text async for text in files.lines(cast("Cell", None), "", FileInfo("f", len(data), 0, 0, "", ""), 1000)]
    assert [found[0], found[2]] == [b"ab", b"cd"]
    assert found[1].startswith(b"x" * 1001)
    assert len(found[1]) <= 1100


async def test_a_batch_whose_input_is_deleted_fails_and_keeps_finished_results(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the batch would end as completed, without the lines that were not read yet."""
    monkeypatch.setattr("router.protocols.batches.files._CHUNK_BYTES", 1 << 12)
    batch = await create(client, [line(f"line {i}") for i in range(300)])
    await cluster.scheduler.until(lambda: len(cluster.scheduler.requests) == 8)
    await client.files.delete(batch.input_file_id)
    done: set[str] = set()
    async with asyncio.timeout(240):
        while batch.status not in ("completed", "failed"):
            for request_id in set(cluster.scheduler.requests) - done:
                done.add(request_id)
                cluster.scheduler.emit(request_id, tokenizer.encode(TEXT))
                cluster.scheduler.end(request_id, reason=pb.FINISH_REASON_STOP)
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
    assert (batch.status, [error.code for error in batch.errors.data]) == ("failed", ["input_file_deleted"])
    assert len(await rows(client, batch.output_file_id)) == batch.request_counts.completed == len(done) > 0


async def test_the_lines_read_ahead_are_limited_by_their_size(
    cluster: Cluster, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.protocols.batches.runner._MAX_READ_BYTES", 1000)
    read: list[int] = []

    async def noted(number: int, *arguments: Any) -> Line:
        read.append(number)
        return read_line(number, *arguments)

    monkeypatch.setattr("router.protocols.batches.runner.read_line_soon", noted)
    batch = await create(client, [line(f"line {i:02}") for i in range(100)])
    await cluster.scheduler.until(lambda: len(cluster.scheduler.requests) == 8)
    assert read == list(range(32))
    await client.batches.cancel(batch.id)


async def test_the_number_of_fields_of_a_form_is_limited() -> None:
    """Empty fields count as well."""
    form = Form("multipart/form-data; boundary=x")

    async def parts() -> AsyncIterator[bytes]:
        for number in range(17):
            yield f'--x\r\nContent-Disposition: form-data; name="{number}"\r\n\r\n\r\n'.encode()

    with pytest.raises(InvalidArgumentError, match="more than 16 fields"):
        _ = [data async for data in form.file(parts())]


async def test_characters_of_a_line_do_not_become_longer(client: openai.AsyncOpenAI) -> None:
    """If its characters were escaped, the body would exceed the size limit."""
    text = "空" * 900_000
    body = {"messages": [{"role": "user", "content": text}]}
    long = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}, ensure_ascii=False)
    batch = await ended(client, await create(client, [long]))
    (row,) = await rows(client, batch.error_file_id)
    assert row["response"]["body"]["error"]["code"] == "context_length_exceeded"


async def test_a_line_whose_request_is_aborted_is_an_error(
    cluster: Cluster, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is not repeated forever, since its idempotency key always refers to the aborted request."""
    monkeypatch.setattr("router.protocols.batches.runner._FIRST_RETRY_S", 0.0)
    batch = await create(client, [line("a")])
    await cluster.scheduler.until(lambda: cluster.scheduler.requests)
    cluster.scheduler.end(next(iter(cluster.scheduler.requests)), reason=pb.FINISH_REASON_ABORT)
    batch = await ended(client, batch)
    assert (batch.status, batch.request_counts.failed) == ("completed", 1)
    assert [row["response"]["status_code"] for row in await rows(client, batch.error_file_id)] == [499]


@pytest.mark.parametrize("is_removed_first", [True, False])
async def test_a_batch_runs_even_if_a_router_has_looked_for_it_before_it_was_stored(
    client: openai.AsyncOpenAI, model: None, monkeypatch: pytest.MonkeyPatch, *, is_removed_first: bool
) -> None:
    """The router that handles the call may be slow to store the batch after it has added the entry to the queue."""
    create_now, add_now, remove_now = Batches.create, Leases.add, Leases.remove
    removing, removed, added_again = asyncio.Event(), asyncio.Event(), asyncio.Event()
    num_added = 0

    async def create_late(self: Batches, cell: Cell, owner: str, batch: Batch) -> None:
        await asyncio.wait_for((removed if is_removed_first else removing).wait(), 240)
        await create_now(self, cell, owner, batch)

    async def add(self: Leases, cell: Cell, owner: str, batch_id: str) -> None:
        nonlocal num_added
        await add_now(self, cell, owner, batch_id)
        num_added += 1
        if num_added == 2:
            added_again.set()

    async def remove(self: Leases, lease: Lease) -> None:
        removing.set()
        if not is_removed_first:
            await asyncio.wait_for(added_again.wait(), 240)
        await remove_now(self, lease)
        removed.set()

    monkeypatch.setattr(Batches, "create", create_late)
    monkeypatch.setattr(Leases, "add", add)
    monkeypatch.setattr(Leases, "remove", remove)
    batch = await ended(client, await create(client, [line("a")]))
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)


async def test_the_queue_of_a_scheduler_that_is_gone_is_forgotten() -> None:
    """Otherwise each takeover during a batch would keep the old scheduler's connection and prefix index in memory."""

    class Place:
        is_gone = False

    class Waiting:
        async def waiting(self, cell: Cell, kind: str, limit: int) -> list[ClientDocument]:
            return [ClientDocument(cell, "", "batch", b'{"holder": "another router"}', 1)]

    leases, old, new = Leases(cast("ClientDocuments", Waiting())), Place(), Place()
    assert await leases.take(cast("Cell", old), set(), 1) == []
    old.is_gone, known = True, weakref.ref(old)
    del old
    assert await leases.take(cast("Cell", new), set(), 1) == []
    assert known() is None


@pytest.mark.parametrize("seconds", ["3599", "2592001", "000086400" + "0" * 5000, "1e5", "", None])
def test_a_lifetime_is_a_whole_number_in_range(seconds: object) -> None:
    assert checked_ttl("86400", "seconds") == 86400
    with pytest.raises(InvalidArgumentError, match="must be in"):
        checked_ttl(seconds, "seconds")
