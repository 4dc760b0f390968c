"""Client, router and detokenizer over real sockets; the scheduler feeds what each test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from midstream import errors
from midstream.client import AsyncClient, Chunk, FinishReason, Result, SamplingParams
from midstream.serving import open_channel
from midstream.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from protos import service_pb2_grpc
from tests.router.conftest import Cluster

OpenClient = Callable[..., AsyncClient]
PROMPT = [10, 11, 12]


async def collect(client: AsyncClient, **arguments: object) -> tuple[Result, list[Chunk]]:
    stream = client.generate(token_ids=PROMPT, **arguments)  # type: ignore[arg-type]
    chunks = [chunk async for chunk in stream]
    result = Result(stream.request_id)
    for chunk in chunks:
        result.add(chunk)
    return result, chunks


async def drain(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_text_streams_with_offsets_usage_and_reason(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    ids = tokenizer.encode("Grüße aus 東京 🫠!")
    stream = open_client(router).generate(token_ids=PROMPT, request_id="r", sampling=SamplingParams(max_tokens=99))
    reading = asyncio.ensure_future(stream.__anext__())
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    cluster.scheduler.emit("r", ids[:1])
    first = await reading
    assert (first.token_offset, first.token_ids, first.text) == (0, ids[:1], "Gr")
    for token_id in ids[1:]:
        cluster.scheduler.emit("r", [token_id])
    cluster.scheduler.end("r")
    rest = [chunk async for chunk in stream]
    assert [token_id for chunk in rest for token_id in chunk.token_ids] == ids[1:]
    offset = 1
    for chunk in rest:
        assert chunk.token_offset == offset
        offset = chunk.next_offset
        assert "\ufffd" not in chunk.text
    assert "Gr" + "".join(chunk.text for chunk in rest) == "Grüße aus 東京 🫠!"
    final = rest[-1]
    assert final.is_final
    assert final.is_sequence_final
    assert final.finish_reason is FinishReason.LENGTH
    assert final.usage is not None
    assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (3, len(ids))


async def test_the_scheduler_gets_a_checked_and_filled_request(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    client = open_client(router)
    for request_id in ("a", "a"):
        reading = asyncio.ensure_future(anext(client.generate("Hello there", request_id=request_id, timeout_s=30)))
        await cluster.scheduler.until(lambda: cluster.scheduler.submits)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    submitted = cluster.scheduler.submits[0].request
    assert list(submitted.token_ids.values) == tokenizer.encode("Hello there")
    assert submitted.request_id == "a"
    assert submitted.model == "smollm2"
    assert submitted.max_tokens == 8192 - len(submitted.token_ids.values)
    assert submitted.sampling.HasField("seed")
    assert submitted.arrival_time_unix_ns > 0
    assert 25_000 < submitted.timeout_ms <= 30_000


async def test_unary_gives_one_chunk_with_everything(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    ids = tokenizer.encode("one two three")
    collecting = asyncio.create_task(collect(open_client(router), request_id="r", streaming=False))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    for token_id in ids:
        cluster.scheduler.emit("r", [token_id])
        await asyncio.sleep(0.01)
    cluster.scheduler.end("r")
    result, chunks = await collecting
    assert len(chunks) == 1
    assert (result.text, result.token_ids) == ("one two three", ids)


async def test_a_stop_word_across_tokens_ends_the_sequence(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    ids = tokenizer.encode("Answer: yes\n\nQuestion: what")
    words = [tokenizer.decode(ids[: i + 1]) for i in range(len(ids))]
    num_tokens = next(i for i, text in enumerate(words, 1) if "\n\nQuestion" in text)
    sampling = SamplingParams(stop=("\n\nQuestion",))
    collecting = asyncio.create_task(collect(open_client(router), request_id="r", sampling=sampling))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    cluster.scheduler.emit("r", ids)
    await cluster.scheduler.until(lambda: cluster.scheduler.stops)
    assert cluster.scheduler.stops == [("r", 0, num_tokens, "\n\nQuestion")]
    cluster.scheduler.end("r", pb.FINISH_REASON_STOP, num_tokens=num_tokens, matched_stop_word="\n\nQuestion")
    result, _ = await collecting
    assert result.text == "Answer: yes"
    assert result.token_ids == ids[:num_tokens]
    assert result.finish_reason is FinishReason.STOP
    assert result.sequences[0].matched_stop == "\n\nQuestion"


async def test_a_stop_word_stands_where_the_scheduler_heard_too_late(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    ids = tokenizer.encode("a b c d e")
    collecting = asyncio.create_task(
        collect(open_client(router), request_id="r", sampling=SamplingParams(stop=(" c",)))
    )
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    cluster.scheduler.emit("r", ids)
    cluster.scheduler.end("r", pb.FINISH_REASON_LENGTH)
    result, _ = await collecting
    assert (result.text, result.token_ids, result.finish_reason) == ("a b", ids[:3], FinishReason.STOP)
    assert result.usage is not None
    assert result.usage.completion_tokens == 3


async def test_the_end_token_is_a_token_and_no_text(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    ids = [*tokenizer.encode("Done."), 500]
    sampling = SamplingParams(stop_token_ids=(500,))
    collecting = asyncio.create_task(collect(open_client(router), request_id="r", sampling=sampling))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    for token_id in ids:
        cluster.scheduler.emit("r", [token_id])
    cluster.scheduler.end("r", pb.FINISH_REASON_STOP, matched_stop_token_id=500)
    result, _ = await collecting
    assert (result.text, result.token_ids, result.sequences[0].matched_stop) == ("Done.", ids, 500)


async def test_several_sequences_keep_apart(cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    texts = ["first one", "the second"]
    sampling = SamplingParams(num_return_sequences=2)
    collecting = asyncio.create_task(collect(open_client(router), request_id="r", sampling=sampling))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    for index, text in enumerate(texts):
        cluster.scheduler.emit("r", tokenizer.encode(text), index)
    cluster.scheduler.end("r", sequences=(1,))
    cluster.scheduler.end("r", sequences=(0,))
    result, chunks = await collecting
    assert [sequence.text for sequence in result.sequences] == texts
    assert sum(chunk.is_sequence_final for chunk in chunks) == 2
    assert [chunk.is_final for chunk in chunks].count(True) == 1
    assert chunks[-1].is_final


async def test_all_generated_tokens_and_the_prompt_in_the_output(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    prompt, ids = tokenizer.encode("Once upon"), tokenizer.encode(" a time")
    sampling = SamplingParams(return_all_generated_tokens=True, exclude_input_from_output=False)
    stream = open_client(router).generate(token_ids=prompt, request_id="r", sampling=sampling)
    reading = asyncio.create_task(anext(stream))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    first = await reading
    assert (first.token_offset, first.token_ids, first.text) == (0, prompt, "Once upon")
    cluster.scheduler.emit("r", ids)
    second = await anext(stream)
    assert (second.token_offset, second.token_ids, second.text) == (0, prompt + ids, "Once upon a time")
    cluster.scheduler.end("r")
    last = await anext(stream)
    assert last.is_final
    assert last.text == "Once upon a time"


async def test_a_client_that_leaves_aborts_at_once_unless_detached(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    client = open_client(router)
    for request_id, detached in (("kept", True), ("left", False)):
        stream = client.generate(token_ids=PROMPT, request_id=request_id, detached=detached)
        reading = asyncio.create_task(anext(stream))
        await cluster.scheduler.until(lambda request_id=request_id: request_id in cluster.scheduler.requests)
        cluster.scheduler.emit(request_id, [20])
        await reading
        stream.cancel()
    await cluster.scheduler.until(lambda: cluster.scheduler.aborts)
    assert cluster.scheduler.aborts == ["left"]
    await cluster.scheduler.until(lambda: not any(feed.attached for feed in cluster.scheduler.feeds))


async def test_abort_from_elsewhere_ends_the_stream(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    client = open_client(router)
    collecting = asyncio.create_task(collect(client, request_id="r"))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    assert await client.abort("r")
    result, _ = await collecting
    assert result.finish_reason is FinishReason.ABORT
    assert not await client.abort("r")


async def test_a_lost_detokenizer_changes_nothing(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    detokenizers = [await cluster.add_detokenizer(f"d{i}") for i in range(2)]
    router = await cluster.add_router(*detokenizers)
    text = "emoji 👩‍👩‍👧‍👦 and 日本語 in one line"
    ids = tokenizer.encode(text)
    for cut in range(0, len(ids), 3):
        request_id = f"r{cut}"
        collecting = asyncio.create_task(collect(open_client(router), request_id=request_id))
        await cluster.scheduler.until(lambda request_id=request_id: request_id in cluster.scheduler.requests)
        cluster.scheduler.emit(request_id, ids[:cut])
        await cluster.scheduler.until(lambda: any(feed.attached for feed in cluster.scheduler.feeds))
        serving = next(part for part in detokenizers if part.servicer.num_attached)  # type: ignore[attr-defined]
        await serving.kill()
        detokenizers.remove(serving)
        cluster.scheduler.emit(request_id, ids[cut:])
        cluster.scheduler.end(request_id)
        result, _ = await collecting
        assert (result.text, result.token_ids) == (text, ids)
        detokenizers.append(await cluster.add_detokenizer("again"))
        router = await cluster.add_router(*detokenizers)


async def test_a_lost_router_changes_nothing(cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer) -> None:
    detokenizer = await cluster.add_detokenizer()
    routers = [await cluster.add_router(detokenizer) for _ in range(2)]
    ids = tokenizer.encode("What was lost is found 🫠 again.")
    stream = open_client(*routers).generate(token_ids=PROMPT, request_id="r")
    reading = asyncio.create_task(anext(stream))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    cluster.scheduler.emit("r", ids[:8])
    result = Result("r")
    result.add(await reading)
    busy = next(r for r in routers if r.servicer.runner.pool.links[detokenizer.address].streams)  # type: ignore[attr-defined]
    await busy.kill()
    cluster.scheduler.emit("r", ids[8:10])
    cluster.scheduler.emit("r", ids[10:])
    cluster.scheduler.end("r")
    async for chunk in stream:
        result.add(chunk)
    assert stream.num_resumes >= 1
    assert (result.text, result.token_ids) == ("What was lost is found 🫠 again.", ids)
    assert cluster.scheduler.aborts == []


async def test_a_feed_that_breaks_is_opened_again(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    ids = tokenizer.encode("before and after")
    collecting = asyncio.create_task(collect(open_client(router), request_id="r"))
    await cluster.scheduler.until(lambda: any(feed.attached for feed in cluster.scheduler.feeds))
    cluster.scheduler.emit("r", ids[:2])
    port = int(cluster.scheduler_address.rpartition(":")[2])
    await cluster.scheduler.stop()
    await cluster.scheduler.start(port)
    cluster.scheduler.emit("r", ids[2:])
    cluster.scheduler.end("r")
    result, _ = await collecting
    assert (result.text, result.token_ids) == ("before and after", ids)


async def test_a_forgotten_request_is_submitted_again(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    ids = tokenizer.encode("the same again, to the letter")
    collecting = asyncio.create_task(collect(open_client(router), request_id="r"))
    await cluster.scheduler.until(lambda: any(feed.attached for feed in cluster.scheduler.feeds))
    cluster.scheduler.emit("r", ids[:3])
    port = int(cluster.scheduler_address.rpartition(":")[2])
    await cluster.scheduler.stop()
    cluster.scheduler.requests.clear()
    await cluster.scheduler.start(port)
    await cluster.scheduler.until(lambda: len(cluster.scheduler.submits) == 2)
    first, second = (submit.request for submit in cluster.scheduler.submits)
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    cluster.scheduler.emit("r", ids)
    cluster.scheduler.end("r")
    result, _ = await collecting
    assert (result.text, result.token_ids) == ("the same again, to the letter", ids)


async def test_submit_is_tried_again_while_the_scheduler_is_away(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    cluster.scheduler.submit_errors = [errors.UnavailableError("starting"), errors.UnavailableError("starting")]
    collecting = asyncio.create_task(collect(open_client(router), request_id="r"))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    cluster.scheduler.emit("r", [30])
    cluster.scheduler.end("r")
    assert (await collecting)[0].token_ids == [30]
    assert [submit.attempt for submit in cluster.scheduler.submits] == [1, 2, 3]


@pytest.mark.parametrize(
    "error",
    [
        errors.OverloadedError("the queue is full", retry_after_ms=70),
        errors.AlreadyExistsError("taken", field="request_id"),
    ],
)
async def test_a_refusal_comes_back_as_it_is(
    cluster: Cluster, open_client: OpenClient, error: errors.MidstreamError
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    cluster.scheduler.submit_errors = [error]
    with pytest.raises(type(error), match=error.message) as raised:
        await collect(open_client(router))
    assert raised.value.field == error.field
    assert getattr(raised.value, "retry_after_ms", 0) == getattr(error, "retry_after_ms", 0)


async def test_no_detokenizer_is_unavailable(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(unavailable_timeout_s=0.2)
    with pytest.raises(errors.UnavailableError, match="detokenizer"):
        await collect(open_client(router, wait_s=0.1))


async def test_deadline_and_failure_end_the_call_with_their_status(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    client = open_client(router)
    for request_id, reason, code, expected in (
        ("late", pb.FINISH_REASON_DEADLINE, 4, errors.DeadlineError),
        ("broken", pb.FINISH_REASON_ERROR, 13, errors.ExecutionError),
    ):
        stream = client.generate(token_ids=PROMPT, request_id=request_id)
        reading = asyncio.create_task(anext(stream))
        await cluster.scheduler.until(lambda request_id=request_id: request_id in cluster.scheduler.requests)
        cluster.scheduler.emit(request_id, [20])
        await reading
        cluster.scheduler.end(request_id, reason, error=pb.ErrorInfo(code=code, message="it is so"))
        final = await anext(stream)
        assert final.is_final
        with pytest.raises(expected):
            await anext(stream)


async def test_resume_of_an_unknown_request_is_not_found(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    with pytest.raises(errors.NotFoundError):
        await open_client(router).resume("nobody").result()


async def test_resume_reads_a_finished_request_from_any_offset(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    client = open_client(router)
    ids = tokenizer.encode("naïve 🫠 text, END of it")
    cluster.scheduler.add("r", stopping=pb.StoppingConfig(stop_words=["END"]))
    cluster.scheduler.emit("r", ids)
    cluster.scheduler.end("r")
    whole = await client.resume("r").result()
    assert whole.text == "naïve 🫠 text, "
    for offset in range(len(whole.token_ids) + 1):
        rest = await client.resume("r", offset).result()
        assert rest.token_ids == whole.token_ids[offset:]
        assert whole.text.endswith(rest.text)
        assert rest.finish_reason is FinishReason.STOP


async def test_a_slow_reader_is_cut_and_its_neighbour_is_not(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer(), max_pending_bytes=100_000)
    async with open_channel(router.address) as channel:
        slow: Any = service_pb2_grpc.MidstreamStub(channel).Generate(
            pb.GenerateRequest(request_id="slow", token_ids=pb.TokenIds(values=PROMPT))
        )
        neighbour = open_client(router).generate(token_ids=PROMPT, request_id="quick")
        reading = asyncio.create_task(anext(neighbour))
        await cluster.scheduler.until(lambda: {"slow", "quick"} <= cluster.scheduler.requests.keys())
        cluster.scheduler.emit("slow", [40])
        assert (await slow.read()).token_ids == [40]
        # Flow control stops the router at some point; from there on at most max_pending_bytes wait.
        for _ in range(400):
            cluster.scheduler.emit("slow", [40_000] * 2_000)
            cluster.scheduler.emit("quick", [41])
            await asyncio.sleep(0.002)
            if cluster.scheduler.aborts:
                break
        assert cluster.scheduler.aborts == ["slow"]
        num_read = len((await reading).token_ids)
        num_emitted = len(cluster.scheduler.requests["quick"].tokens[0])
        while num_read < num_emitted:
            num_read += len((await anext(neighbour)).token_ids)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await drain(slow)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_streams_spread_over_detokenizers(cluster: Cluster, open_client: OpenClient) -> None:
    detokenizers = [await cluster.add_detokenizer(f"d{i}") for i in range(3)]
    router = await cluster.add_router(*detokenizers)
    pool = router.servicer.runner.pool  # type: ignore[attr-defined]
    async with asyncio.timeout(5):
        while pool.num_live < 3:  # noqa: ASYNC110 (the pool has no event for "all")
            await asyncio.sleep(0.01)
    client = open_client(router)
    reading = [
        asyncio.create_task(anext(client.generate(token_ids=PROMPT, request_id=str(number)))) for number in range(9)
    ]
    await cluster.scheduler.until(lambda: sum(len(feed.attached) for feed in cluster.scheduler.feeds) == 9)
    assert [part.servicer.num_attached for part in detokenizers] == [3, 3, 3]  # type: ignore[attr-defined]
    for number in range(9):
        cluster.scheduler.emit(str(number), [20])
    await asyncio.gather(*reading)


async def test_what_the_service_says_of_itself(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    client = open_client(router)
    info = await client.model_info("smollm2")
    assert (info.vocab_size, info.max_sequence_length, info.has_chat_template) == (49_152, 8192, True)
    assert (await client.server_info()).scheduler_epoch == 7
    assert (await client.server_info()).router_id == "r"
    assert [load.cell for load in await client.loads()] == [cluster.scheduler_address]
    assert [item["iter"] async for item in client.iteration_stats(follow=True)] == ["0", "1", "2"]
    with pytest.raises(errors.NotFoundError, match="no model"):
        await client.model_info("gpt-5")
