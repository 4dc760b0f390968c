"""The documentation of the Executor API: its statements about requests, responses and results, and its examples.

All listings except one are C++; the tests contain the closest Python equivalents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from midstream.executor import (
    AdditionalModelOutput,
    Executor,
    ExecutorConfig,
    FinishReason,
    GuidedDecodingConfig,
    GuidedDecodingParams,
    KvCacheConfig,
    ModelType,
    OutputConfig,
    ParallelConfig,
    Request,
    RequestStage,
    RequestState,
    Response,
    Result,
    SamplingConfig,
)
from tests.example_package import install
from tests.seeds.listings import run

EXAMPLE_PROBES = Path(__file__).parents[1] / "gpu_worker" / "example_probes"
PROMPT = [504, 2365, 282, 4649, 314]
LONG = 450

TOKENIZER = """
encoded_vocab = tokenizer.get_vocab()
encoded_vocab = [token for token, _ in sorted(encoded_vocab.items(), key=lambda x: x[1])]
tokenizer_str = tokenizer.backend_tokenizer.to_str()
stop_token_ids = [tokenizer.eos_token_id]
"""


@pytest.fixture(scope="module")
def guided(folders: Path) -> dict[str, Any]:
    """Run the documentation's guided decoding example with transformers' tokenizer, and return its names."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders / "llama-3-8b")
    return run(TOKENIZER, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def executor(folders: Path, guided: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """Return an executor with two tensor-parallel ranks.

    auto const executorConfig = ExecutorConfig{};
    std::vector<executor::AdditionalModelOutput> additionalOutputs{
        executor::AdditionalModelOutput{"TopKLogits", true}};
    executorConfig.setAdditionalModelOutputs(additionalOutputs);

    Here, requests select the additional outputs, so that the requests of other tests do not get them.
    """
    config = ExecutorConfig(
        max_beam_width=20,
        kv_cache_config=KvCacheConfig(True, 4096),
        parallel_config=ParallelConfig(tensor_parallel_size=2),
        guided_decoding_config=GuidedDecodingConfig(
            GuidedDecodingConfig.GuidedDecodingBackend.XGRAMMAR,
            encoded_vocab=guided["encoded_vocab"],
            tokenizer_str=guided["tokenizer_str"],
            stop_token_ids=guided["stop_token_ids"],
        ),
        request_stats_max_iterations=1000,
        settings={"max_batch_size": 32, "num_threads": 1, "kernels": "torch"},
    )
    site = install(EXAMPLE_PROBES, tmp_path_factory.mktemp("package"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))
        with Executor(str(folders / "model"), ModelType.DECODER_ONLY, config) as executor:
            yield executor


@pytest.fixture(scope="module")
def model(folders: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folders / "model", dtype=torch.float32).eval()


def finish(executor: Executor, request_id: int) -> list[Response]:
    """Return all responses to a request."""
    responses: list[Response] = []
    while not responses or not (responses[-1].has_error() or responses[-1].result.is_final):
        responses += executor.await_responses(request_id, timedelta(seconds=60))
    return responses


def outputs(result: Result) -> dict[str, Any]:
    return {item.name: item.output for item in result.additional_outputs}


def test_requests_run_on_ranks_and_any_response_is_awaited(executor: Executor, model: Any) -> None:
    assert executor.can_enqueue_requests()
    ids = executor.enqueue_requests([Request(PROMPT[:size], 6) for size in (3, 4, 5)])
    assert len(set(ids)) == 3
    found: dict[int, list[int]] = {}
    while len(found) < 3:
        for response in executor.await_responses(timedelta(seconds=60)):
            assert not response.has_error()
            assert response.result.is_final
            found[response.request_id] = response.result.output_token_ids[0]
    for request_id, size in zip(ids, (3, 4, 5), strict=True):
        tokens = torch.tensor([PROMPT[:size]])
        expected = model.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert found[request_id] == expected[0].tolist()


def test_additional_outputs(executor: Executor, model: Any) -> None:
    """The example's request, for the tensor `TopKLogits` of an installed package's output probe.

    executor::Request request{requestTokens, parameters.maxOutputLength, true, executor::SamplingConfig{},
        executor::OutputConfig{false, false, false, true, false, false, additionalOutputs}};
    executor.enqueueRequest(request);
    """
    wanted = [AdditionalModelOutput("TopKLogits", True)]
    config = OutputConfig(False, False, False, True, False, False, wanted)
    request_id = executor.enqueue_request(Request(PROMPT, 4, True, SamplingConfig(), config))
    found = [outputs(response.result) for response in finish(executor, request_id)]
    generated = [item["TopKLogits"] for item in found]
    context = [item["context_TopKLogits"] for item in found if "context_TopKLogits" in item]
    assert all(tensor.shape[0] == 1 and tensor.shape[2] == 3 for tensor in generated)
    assert sum(tensor.shape[1] for tensor in generated) == 4
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    np.testing.assert_allclose(np.concatenate(context), logits.topk(3, dim=1).values.numpy(), atol=1e-3)


def test_num_return_sequences(executor: Executor) -> None:
    """Each response has one sequence; isFinal is set only once, when all sequences have ended."""
    request = Request(PROMPT, 5, True, SamplingConfig(seed=1, top_p=1.0), num_return_sequences=3)
    results = [response.result for response in finish(executor, executor.enqueue_request(request))]
    assert {result.sequence_index for result in results} == {0, 1, 2}
    for index in range(3):
        own = [result for result in results if result.sequence_index == index]
        assert [result.is_sequence_final for result in own] == [False] * (len(own) - 1) + [True]
        assert sum(len(result.output_token_ids[0]) for result in own) == 5
    assert [result.is_final for result in results] == [False] * (len(results) - 1) + [True]


@pytest.mark.parametrize(("width", "returned", "count"), [(3, None, 3), (4, 2, 2), (20, None, 20)])
def test_all_beams_come_back_in_one_result(
    executor: Executor, model: Any, width: int, returned: int | None, count: int
) -> None:
    """The sequence index is 0, and num_return_sequences limits the number of beams."""
    output = OutputConfig(return_log_probs=True)
    config = SamplingConfig(beam_width=width, num_return_sequences=returned)
    (response,) = finish(executor, executor.enqueue_request(Request(PROMPT, 4, False, config, output)))
    result = response.result
    assert (result.sequence_index, result.is_sequence_final, result.is_final) == (0, True, True)
    tokens = torch.tensor([PROMPT])
    expected = model.generate(
        tokens, max_new_tokens=4, num_beams=width, num_return_sequences=count, do_sample=False, length_penalty=0.0,
        early_stopping=True, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert result.output_token_ids == expected.tolist()
    assert result.cum_log_probs is not None
    assert result.log_probs is not None
    assert len(result.cum_log_probs) == count
    for log_probs, total in zip(result.log_probs, result.cum_log_probs, strict=True):
        assert sum(log_probs) == pytest.approx(total, abs=1e-3)


def test_beams_wider_than_configured_are_refused(executor: Executor) -> None:
    (response,) = finish(executor, executor.enqueue_request(Request(PROMPT, 4, False, SamplingConfig(beam_width=21))))
    assert "beam_width" in response.error_msg


def test_cancel_and_statistics_while_it_runs(executor: Executor) -> None:
    executor.get_latest_iteration_stats()
    executor.get_latest_request_stats()
    request_id = executor.enqueue_request(Request(PROMPT, LONG, streaming=True, client_id=5))
    (first, *_) = executor.await_responses(request_id, timedelta(seconds=60))
    assert (first.request_id, first.client_id) == (request_id, 5)
    states: list[Any] = []
    while not (running := [stats for stats in states if stats.stage is RequestStage.GENERATION_IN_PROGRESS]):
        assert not any(it.has_error() or it.result.is_final for it in executor.await_responses(request_id))
        states += [stats for item in executor.get_latest_request_stats() for stats in item.request_stats]
    executor.cancel_request(request_id)
    last = finish(executor, request_id)[-1].result
    assert last.finish_reasons == [FinishReason.CANCELLED]
    assert executor.get_latest_iteration_stats()
    assert {stats.id for stats in states} == {request_id}
    assert all(stats.context_prefill_position == len(PROMPT) for stats in running)
    assert all(stats.alloc_total_blocks_per_request > 0 for stats in running)
    (gone,) = executor.await_responses(request_id)
    assert gone.error_msg == f"ReqId {request_id} has already been processed and was terminated."


def test_structured_output(executor: Executor, guided: dict[str, Any]) -> None:
    """All four guide types, decoded by transformers' tokenizer."""
    kinds = GuidedDecodingParams.GuideType
    guides = [
        GuidedDecodingParams(kinds.REGEX, "(so|the)( on){2}"),
        GuidedDecodingParams(kinds.EBNF_GRAMMAR, 'root ::= ("so" | "the") " on on"'),
        GuidedDecodingParams(kinds.JSON_SCHEMA, '{"enum": ["so on on", "the on on"]}'),
    ]
    for guide in guides:
        config = SamplingConfig(seed=2, top_p=1.0)
        output = OutputConfig(exclude_input_from_output=True)
        request = Request(
            PROMPT, 20, sampling_config=config, output_config=output, guided_decoding_params=guide,
            end_id=guided["stop_token_ids"][0],
        )  # fmt: skip
        (response,) = finish(executor, executor.enqueue_request(request))
        text = guided["tokenizer"].decode(response.result.output_token_ids[0])
        assert text.strip('"') in ("so on on", "the on on")
        assert response.result.finish_reasons == [FinishReason.END_ID]


def test_life_cycle(executor: Executor) -> None:
    from midstream.executor import GenerationExecutor, GenerationRequest, GenerationResult, SamplingParams

    with GenerationExecutor.create(address=executor._service.addresses if executor._service else []) as other:
        request = GenerationRequest(PROMPT, SamplingParams(max_tokens=LONG, end_id=-1), streaming=True)
        assert GenerationResult(request, lambda _: None).state is RequestState.PENDING
        result = other.submit(request)
        seen = [result.state]
        next(iter(result))
        seen.append(result.state)
        other.abort_request(request.id)
        result.result(timeout=240)
        seen.append(result.state)
    order = list(RequestState)
    assert [order.index(state) for state in seen] == sorted(order.index(state) for state in seen)
    assert seen[1] in (RequestState.GENERATION_PHASE, RequestState.GENERATING)
    assert seen[2] is RequestState.ABORTED
