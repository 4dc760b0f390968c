"""The executor with a real service: the usage shown in TensorRT-LLM's documentation, and the batch manager's
callbacks.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta

import numpy as np
import pytest

from midstream.client import Client
from midstream.client import SamplingParams as ClientParams
from midstream.errors import ConfigError, InvalidArgumentError
from midstream.executor import (
    CapacitySchedulerPolicy,
    Executor,
    ExecutorConfig,
    FinishReason,
    GenerationExecutor,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    KvCacheRetentionConfig,
    NamedTensor,
    Request,
    SamplingParams,
    SchedulerConfig,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from tests.integration.service import Service

PROMPT = [504, 2365, 282, 4649, 314]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

# TensorRT-LLM's names for iteration statistics.
STATS = {
    "": {
        "timestamp", "iter", "iterLatencyMS", "newActiveRequestsQueueLatencyMS", "numNewActiveRequests",
        "numActiveRequests",
        "numQueuedRequests", "numCompletedRequests", "maxNumActiveRequests", "cpuMemUsage", "gpuMemUsage",
        "pinnedMemUsage",
    },
    "kvCacheStats": {
        "maxNumBlocks", "freeNumBlocks", "usedNumBlocks", "tokensPerBlock", "allocTotalBlocks", "allocNewBlocks",
        "reusedBlocks",
    },
    "inflightBatchingStats": {
        "numScheduledRequests", "numContextRequests", "numGenRequests", "numPausedRequests", "numCtxTokens",
        "microBatchId", "avgNumDecodedTokensPerIter",
    },
}  # fmt: skip


# The same statistics under the names of TensorRT-LLM's batch manager.
LABELS = {
    "Timestamp", "Iteration Counter", "Active Request Count", "Max Request Count", "Max KV cache blocks",
    "Free KV cache blocks", "Used KV cache blocks", "Tokens per KV cache block", "Scheduled Requests",
    "Context Requests", "Generation Requests", "Total Context Tokens", "MicroBatch ID", "Total Generation Tokens",
    "Empty Generation Slots",
}  # fmt: skip


@pytest.fixture(scope="module")
def executor(service: Service) -> Iterator[GenerationExecutor]:
    with GenerationExecutor.create(address=service.routers()) as executor:
        yield executor


@pytest.fixture(scope="module")
def api(service: Service) -> Iterator[Executor]:
    with Executor.connect(service.routers()) as executor:
        yield executor


@pytest.fixture(scope="module")
def expected(service: Service) -> tuple[str, list[int]]:
    """Return the output for PROMPT that the client receives."""
    with Client(service.routers()[0]) as client:
        params = ClientParams(max_tokens=12, temperature=0, ignore_eos=True)
        result = client.generate(token_ids=PROMPT, sampling=params).result()
    return result.text, result.token_ids


def test_asynchronous_generation(executor: GenerationExecutor, expected: tuple[str, list[int]]) -> None:
    result = executor.generate_async(prompt_token_ids=PROMPT, sampling_params=GREEDY)
    output = result.result(timeout=240)
    assert (output.text, output.token_ids, output.finish_reason) == (*expected, "length")
    assert result.done
    assert result.result() is output


def test_streaming(executor: GenerationExecutor, expected: tuple[str, list[int]]) -> None:
    result = executor.generate_async(PROMPT, GREEDY, streaming=True)
    outputs = list(result)
    assert len(outputs) > 1
    assert "".join(output.text_diff for output in outputs) == expected[0]
    assert [token for output in outputs for token in output.token_ids_diff] == expected[1]
    assert outputs[-1].text == expected[0]
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]


async def test_asynchronous_streaming_and_result(executor: GenerationExecutor, expected: tuple[str, list[int]]) -> None:
    result = executor.generate_async(PROMPT, GREEDY, streaming=True)
    assert "".join([output.text_diff async for output in result]) == expected[0]
    assert (await executor.generate_async(PROMPT, GREEDY).aresult(timeout=240)).text == expected[0]


def test_a_batch_with_separate_parameters(executor: GenerationExecutor) -> None:
    params = [SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in (2, 5, 3)]
    results = executor.generate([PROMPT, "One, two, three,", PROMPT[:2]], params)
    assert [len(result.result().token_ids) for result in results] == [2, 5, 3]
    assert executor.generate(PROMPT, params[0]).outputs[0].token_ids == results[0].outputs[0].token_ids
    with pytest.raises(InvalidArgumentError, match="sampling_params"):
        executor.generate([PROMPT], params)


def test_several_sequences_and_log_probs(executor: GenerationExecutor) -> None:
    params = SamplingParams(max_tokens=4, temperature=1.0, top_p=1.0, seed=3, n=3, logprobs=2, ignore_eos=True)
    result = executor.generate(PROMPT, params)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in result.outputs}) > 1
    for output in result.outputs:
        assert len(output.logprobs) == len(output.token_ids) == 4
        assert all(token in entry for token, entry in zip(output.token_ids, output.logprobs, strict=True))
        total = sum(entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True))
        assert output.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_a_request_that_takes_too_long_is_aborted(executor: GenerationExecutor) -> None:
    endless = SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True)
    result = executor.generate_async(PROMPT, endless, kv_cache_retention_config=KvCacheRetentionConfig(max_tokens=1024))
    with pytest.raises(TimeoutError):
        result.result(timeout=0.2)
    executor.abort_request(result.request.id)
    assert result.result(timeout=240).finish_reason == "abort"
    executor.abort_request(result.request.id)  # has no effect, since the request has ended


def test_the_result_raises_the_services_error(executor: GenerationExecutor) -> None:
    result = executor.generate_async(PROMPT, SamplingParams(temperature=101.0))
    with pytest.raises(InvalidArgumentError, match="temperature"):
        result.result(timeout=240)
    with pytest.raises(InvalidArgumentError, match="temperature"):
        list(executor.generate_async(PROMPT, SamplingParams(temperature=101.0), streaming=True))


def test_responses_of_one_request_and_of_any(api: Executor, expected: tuple[str, list[int]]) -> None:
    first, second = api.enqueue_requests([Request(PROMPT, 12, streaming=True), Request(PROMPT, 12)])
    (alone,) = api.await_responses(second, timedelta(seconds=60))
    assert alone.result.output_token_ids == [PROMPT + expected[1]]
    assert alone.result.is_final
    tokens: list[int] = []
    while len(tokens) < len(expected[1]):
        for response in api.await_responses(timedelta(seconds=60)):
            assert response.request_id == first
            tokens += response.result.output_token_ids[0]
    assert tokens == expected[1]
    assert api.await_responses(timedelta(milliseconds=1)) == []


def test_a_failed_request_gives_one_response_with_its_error(api: Executor) -> None:
    request_id = api.enqueue_request(Request([], 12))
    (response,) = api.await_responses(request_id, timedelta(seconds=60))
    assert response.has_error()
    assert "token_ids" in response.error_msg


def test_lists_of_tokens_end_a_sequence_where_the_last_of_them_is(
    api: Executor, expected: tuple[str, list[int]]
) -> None:
    """They stay in the output, may begin in the prompt, and end each sequence at its own token."""
    tokens = expected[1]
    ways = [([tokens[2:4]], 4), ([[PROMPT[-1], tokens[0]]], 1), ([tokens[5:6], [1, 2]], tokens.index(tokens[5]) + 1)]
    for stop_words, length in ways:
        request_id = api.enqueue_request(Request(PROMPT, 12, stop_words=stop_words))
        (response,) = api.await_responses(request_id, timedelta(seconds=60))
        assert response.result.output_token_ids == [PROMPT + tokens[:length]]
        assert response.result.finish_reasons == [FinishReason.STOP_WORDS]


def test_statistics(executor: GenerationExecutor) -> None:
    stats = executor.get_latest_stats()
    assert (stats.num_active_requests, stats.num_queued_requests) == (0, 0)
    assert stats.num_completed_requests > 0
    fields = json.loads(stats.to_json_str())
    for part, names in STATS.items():
        assert names <= (fields[part] if part else fields).keys()
    assert stats.cpu_mem_usage > 0


def test_the_batch_managers_callbacks(api: Executor, expected: tuple[str, list[int]]) -> None:
    """Two requests finish, one is stopped, and one has an id that is in use; statistics arrive while requests run."""

    def request(request_id: int, length: int, *, streaming: bool = False) -> InferenceRequest:
        made = InferenceRequest(
            request_id, {"input_ids": np.array([PROMPT]), "request_output_len": np.array([[length]])}
        )
        made.is_streaming = streaming
        return made

    waiting = [request(1, 12), request(2, 12, streaming=True), request(3, 4000, streaming=True), request(3, 12)]
    tokens: dict[int, list[int]] = {1: [], 2: [], 3: []}
    lengths: dict[int, int] = {}
    finals: list[tuple[int, str]] = []
    stats: list[str] = []
    done = threading.Event()

    def get_requests(max_num_requests: int) -> list[InferenceRequest]:
        assert max_num_requests > 0
        return [waiting.pop(0) for _ in range(min(max_num_requests, len(waiting)))]

    def send_response(request_id: int, tensors: Sequence[NamedTensor], is_final: bool, error: str) -> None:
        by_name = {item.name: item.tensor for item in tensors}
        if "output_ids" in by_name:
            ids, length = by_name["output_ids"], by_name["sequence_length"]
            tokens[request_id] += ids.flatten().tolist()
            lengths[request_id] = length.item()
            assert (ids.shape[:2], length.shape) == ((1, 1), (1, 1))
        if is_final:
            finals.append((request_id, error))
            if len(finals) == 4:
                done.set()
        if request_id == 1:
            raise RuntimeError("a defect of the caller's own")

    def poll_stop_signals() -> set[int]:
        return {3} if tokens[3] else set()

    with GptManager(
        api, TrtGptModelType.InflightFusedBatching, 1, SchedulerConfig(), get_requests, send_response,
        poll_stop_signals, stats.append, TrtGptModelOptionalParams(max_num_requests=8),
    ):  # fmt: skip
        assert done.wait(240)
    assert sorted(finals) == [(1, ""), (2, ""), (3, ""), (3, "request_id: the id is in use")]
    # Without streaming, the response contains the whole sequence including the prompt; with streaming, each response
    # contains the new tokens.
    assert tokens[1] == PROMPT + tokens[2] == PROMPT + expected[1]
    assert lengths[1] == lengths[2] == len(tokens[1])
    # There is an entry for every iteration, in order, with both sets of names.
    by_group: dict[str, list[int]] = {}
    for text in stats:
        entry = json.loads(text)
        assert entry.keys() >= LABELS
        assert entry["Iteration Counter"] == entry["iter"]
        assert re.fullmatch(r"\d\d-\d\d-\d{4} \d\d:\d\d:\d\d", entry["Timestamp"])
        by_group.setdefault(entry["groupId"], []).append(int(entry["iter"]))
    iterations = sorted(number for numbers in by_group.values() for number in numbers)
    assert iterations == list(range(iterations[0], iterations[0] + len(iterations)))
    assert len(iterations) >= len(tokens[3])


def test_it_starts_and_stops_its_own_services(expected: tuple[str, list[int]]) -> None:
    config = ExecutorConfig(
        max_batch_size=4,
        scheduler_config=SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=KvCacheConfig(max_tokens=512),
    )
    with GenerationExecutor.create(engine_dir="smollm2", tokenizer_dir="smollm2", executor_config=config) as executor:
        assert executor.generate_async(PROMPT, GREEDY).result(timeout=240).text == expected[0]
        cache = executor.get_latest_stats().kv_cache_stats
        assert cache is not None
        assert cache.max_num_blocks * cache.tokens_per_block <= 512
    with pytest.raises(InvalidArgumentError, match="shut down"):
        executor.generate_async(PROMPT, GREEDY)


def test_conflicting_arguments() -> None:
    with pytest.raises(ConfigError, match="elsewhere"):
        GenerationExecutor.create("smollm2", tokenizer_dir="elsewhere")
    with pytest.raises(InvalidArgumentError, match="executor_config"):
        GenerationExecutor.create(address="127.0.0.1:1", executor_config=ExecutorConfig())
    config = ExecutorConfig(kv_cache_config=KvCacheConfig(sink_token_length=4))
    with pytest.raises(InvalidArgumentError, match="kv_cache_config"):
        GenerationExecutor.create("smollm2", executor_config=config)
