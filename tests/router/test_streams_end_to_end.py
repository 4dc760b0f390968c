"""Client, router and detokenizer over real sockets; each test scripts the token feed of the scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from midstream import errors
from midstream.client import FinishReason, SamplingParams
from midstream.model.tokenizer import Tokenizer
from midstream.rpc.channel import open_channel
from protos import generation_pb2 as pb
from protos import service_pb2_grpc
from tests.router.client_streams import PROMPT, OpenClient, collect
from tests.router.conftest import Cluster


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
        reading = asyncio.ensure_future(anext(client.generate("Hello there", request_id=request_id, timeout_s=300)))
        await cluster.scheduler.until(lambda: cluster.scheduler.submits)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    submitted = cluster.scheduler.submits[0]
    assert list(submitted.token_ids.values) == tokenizer.encode("Hello there")
    assert submitted.request_id == "a"
    assert submitted.model == "smollm2"
    assert submitted.max_tokens == 8192 - len(submitted.token_ids.values)
    assert submitted.sampling.HasField("seed")
    assert submitted.arrival_time_unix_ns > 0
    assert 200_000 < submitted.timeout_ms <= 300_000


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


async def test_a_stop_word_counts_even_if_the_scheduler_learns_of_it_late(
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


async def test_the_end_token_has_no_text(cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer) -> None:
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


async def test_several_sequences_stay_separate(cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer) -> None:
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
        # At some point, flow control makes the router pause; from then on, it buffers at most max_pending_bytes for the
        # stream.
        for _ in range(400):
            cluster.scheduler.emit("slow", [40_000] * 2_000)
            cluster.scheduler.emit("quick", [41])
            await asyncio.sleep(0.002)
            if cluster.scheduler.aborts:
                break
        await cluster.scheduler.until(lambda: cluster.scheduler.aborts)
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
    async with asyncio.timeout(240):
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


async def test_model_info_and_statistics(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    client = open_client(router)
    info = await client.model_info("smollm2")
    assert (info.vocab_size, info.max_sequence_length, info.has_chat_template) == (49_152, 8192, True)
    assert (await client.server_info()).scheduler_epoch == 7
    assert (await client.server_info()).router_id == "router-1"
    assert [load.cell for load in await client.loads()] == [cluster.scheduler_address]
    assert [item["iter"] async for item in client.iteration_stats(follow=True)] == ["0", "1", "2"]
    with pytest.raises(errors.NotFoundError, match="is not served here"):
        await client.model_info("gpt-5")
