"""Requests of the executor: each name maps to its native field, and invalid values are rejected."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from midstream.chunk import Chunk, FinishReason
from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.executor import (
    AdditionalModelOutput,
    DraftTargetDecodingConfig,
    EagleConfig,
    ExternalDraftTokensConfig,
    GenerationRequest,
    GenerationResult,
    GuidedDecodingParams,
    InferenceRequest,
    KvCacheRetentionConfig,
    KvCacheTransferMode,
    Logprob,
    LoRARequest,
    MultimodalParams,
    NGramDecodingConfig,
    OutputConfig,
    PromptAdapterRequest,
    PromptTuningConfig,
    Request,
    RequestType,
    Response,
    Result,
    SamplingConfig,
    SamplingParams,
)
from midstream.executor import FinishReason as Reason
from midstream.executor.response_stream import ResponseStream
from midstream.extras import Extras, LogProbs, Tensor
from protos import generation_pb2 as pb

TABLE = np.arange(6, dtype=np.float16).reshape(2, 3)
# All fields are set, since the service completes others from the model's generation_config.json.
BEAMS: dict[str, Any] = {
    "seed": 0, "min_tokens": 1, "temperature": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
}  # fmt: skip
DEFAULTS: dict[str, Any] = {"beam_width": 1, "top_k": 0, "top_p": 1.0, **BEAMS}
GREEDY: dict[str, Any] = {**DEFAULTS, "top_k": 1}
# TensorRT-LLM's parameters, and the service's fields for them.
SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, GREEDY),
    ({"top_k": 0}, GREEDY),
    ({"temperature": 0.7}, {**GREEDY, "temperature": 0.7}),
    ({"top_k": 5}, {**DEFAULTS, "top_k": 5}),
    ({"top_p": 0.5, "seed": 7}, {**DEFAULTS, "top_p": 0.5, "seed": 7}),
    (
        {"top_k": 5, "top_p": 0.5, "top_p_decay": 0.25, "top_p_min": 0.125, "top_p_reset_ids": 7, "min_p": 0.25},
        {**DEFAULTS, "top_k": 5, "top_p": 0.5, "top_p_decay": 0.25, "top_p_min": 0.125, "top_p_reset_id": 7,
         "min_p": 0.25},
    ),
    ({"repetition_penalty": 1.5, "min_tokens": 0}, {**GREEDY, "repetition_penalty": 1.5, "min_tokens": 0}),
    # Subtracted after the division by the temperature, so that the service must subtract twice or half of it before.
    (
        {"presence_penalty": 3.0, "frequency_penalty": -1.5, "temperature": 2.0},
        {**GREEDY, "presence_penalty": 6.0, "frequency_penalty": -3.0, "temperature": 2.0, "penalize_prompt": True},
    ),
    (
        {"presence_penalty": 3.0, "temperature": 0.5},
        {**GREEDY, "presence_penalty": 1.5, "temperature": 0.5, "penalize_prompt": True},
    ),
    ({"no_repeat_ngram_size": 3}, {**GREEDY, "no_repeat_ngram_size": 3}),
    ({"no_repeat_ngram_size": 1 << 30}, {**GREEDY, "no_repeat_ngram_size": 0}),
    ({"early_stopping": False, "length_penalty": 0.5}, {**GREEDY, "early_stopping": 0, "length_penalty": 0.5}),
    ({"early_stopping": True}, {**GREEDY, "early_stopping": 1}),
]  # fmt: skip
PARAMS: list[tuple[SamplingParams, pb.SamplingConfig]] = [
    (SamplingParams(n=3, top_p=0.5), pb.SamplingConfig(**DEFAULTS | {"top_p": 0.5, "num_return_sequences": 3})),
    (
        SamplingParams(n=2, best_of=3, top_p=0.5),
        pb.SamplingConfig(**DEFAULTS | {"top_p": 0.5, "num_return_sequences": 3}),
    ),
    (
        SamplingParams(n=3, use_beam_search=True),
        pb.SamplingConfig(num_return_sequences=3, beam_width=3, **BEAMS),
    ),
    (
        SamplingParams(n=2, best_of=4, use_beam_search=True, beam_search_diversity_rate=0.5),
        pb.SamplingConfig(num_return_sequences=2, beam_width=4, beam_search_diversity_rate=0.5, **BEAMS),
    ),
    (SamplingParams(embedding_bias={3: 1.5}), pb.SamplingConfig(embedding_bias={3: 1.5}, **GREEDY)),
    (SamplingParams(embedding_bias=[0.0, 2.0, 0.0]), pb.SamplingConfig(embedding_bias={1: 2.0}, **GREEDY)),
    (
        SamplingParams(embedding_bias=torch.tensor([0.0, float("-inf")])),
        pb.SamplingConfig(embedding_bias={1: -3.4028234663852886e38}, **GREEDY),
    ),
]
STOPPING: list[tuple[SamplingParams, pb.StoppingConfig]] = [
    (SamplingParams(stop="end", bad="no"), pb.StoppingConfig(stop_words=["end"], bad_words=["no"])),
    (SamplingParams(stop=None, stop_token_ids=None), pb.StoppingConfig()),
    (
        SamplingParams(stop=["a", "b"], bad=["c"], include_stop_str_in_output=True),
        pb.StoppingConfig(stop_words=["a", "b"], bad_words=["c"], include_stop_in_output=True),
    ),
    (
        SamplingParams(stop_token_ids=[4], bad_token_ids=[5], end_id=2, pad_id=3),
        pb.StoppingConfig(stop_token_ids=[4], bad_word_token_ids=[pb.TokenIds(values=[5])], end_id=2, pad_id=3),
    ),
    (SamplingParams(end_id=-1), pb.StoppingConfig(ignore_eos=True)),
    (SamplingParams(ignore_eos=True), pb.StoppingConfig(ignore_eos=True)),
]
# Parameters of SamplingParams that cannot be converted.
BAD_PARAMS: list[tuple[str, dict[str, Any]]] = [
    ("best_of", {"n": 3, "best_of": 2}),
    ("n", {"n": -1}),
    ("logprobs", {"logprobs": True}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("bad", {"bad": 5}),
    ("stop", {"stop": [5]}),
    ("stop", {"stop": "\ud800"}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("bad_token_ids", {"bad_token_ids": [[5]]}),
    ("end_id", {"end_id": -2}),
    ("embedding_bias", {"embedding_bias": 5}),
    ("embedding_bias", {"embedding_bias": {-1: 1.0}}),
    ("max_tokens", {"max_tokens": -1}),
    ("temperature", {"temperature": "hot"}),
    ("additional_model_outputs", {"additional_model_outputs": [3]}),
    ("return_context_logits", {"return_context_logits": "x"}),
    ("logits_processor", {"logits_processor": 4}),
    ("return_encoder_output", {"return_encoder_output": True}),
    ("add_special_tokens", {"add_special_tokens": False}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 2, "prompt": "text"}),
]
# Values out of TensorRT-LLM's ranges, which are refused where they are set.
OUT_OF_RANGE: list[dict[str, Any]] = [
    {"top_k": -1},
    {"top_p": 1.5},
    {"top_p_min": -0.5},
    {"top_p_decay": 0.0},
    {"temperature": -1.0},
    {"min_tokens": -1},
    {"seed": -1},
    {"repetition_penalty": 0.0},
    {"beam_search_diversity_rate": -1.0},
    {"early_stopping": -1},
    {"no_repeat_ngram_size": -1},
    {"min_p": 2.0},
]
BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt_token_ids", {"prompt_token_ids": [1, -2]}),
    ("prompt_token_ids", {"prompt_token_ids": 5}),
    ("prompt_token_ids", {"prompt_token_ids": None}),
    ("prompt_token_ids", {"prompt_embeddings": TABLE}),
    ("query_token_ids", {"query_token_ids": [-1]}),
    ("query_token_ids", {"query_token_ids": [1], "prompt_token_ids": "text"}),
    ("max_tokens", {"max_tokens": -1}),
    (
        "multimodal_params",
        {"multimodal_params": MultimodalParams({"multimodal_embedding": TABLE}), "prompt_tuning_table": TABLE},
    ),
    ("prompt_embeddings", {"prompt_token_ids": None, "prompt_embeddings": TABLE.astype(np.float64)}),
    ("prompt_tuning_table", {"prompt_tuning_table": [[1.0]]}),
    ("prompt_adapter_request", {"prompt_tuning_table": TABLE, "prompt_adapter_request": PromptAdapterRequest("a")}),
    ("priority", {"priority": 1.5}),
    ("client_id", {"client_id": 5}),
    ("cache_salt", {"cache_salt": b"\xff"}),
    ("arrival_time", {"arrival_time": 1e30}),
    ("lora_request", {"lora_request": LoRARequest(5)}),  # type: ignore[arg-type]
    ("num_draft_tokens", {"speculative_config": NGramDecodingConfig(max_draft_len=-1)}),
]


@pytest.mark.parametrize(("given", "expected"), SAMPLING)
def test_sampling(given: dict[str, Any], expected: dict[str, Any]) -> None:
    message = pb.SamplingConfig()
    SamplingConfig(**given).fill(message)
    assert message == pb.SamplingConfig(**expected)
    assert GenerationRequest([1], SamplingParams(**given)).to_proto().sampling == message


@pytest.mark.parametrize(("params", "expected"), PARAMS)
def test_sampling_names(params: SamplingParams, expected: pb.SamplingConfig) -> None:
    assert GenerationRequest([1], params).to_proto().sampling == expected


def test_beams() -> None:
    message = pb.SamplingConfig()
    config = SamplingConfig(4, num_return_sequences=2, temperature=0.5, beam_width_array=[4, 4])
    config.fill(message)
    assert message == pb.SamplingConfig(**BEAMS | {"beam_width": 4, "num_return_sequences": 2, "temperature": 0.5})
    assert (config.num_return_beams, SamplingConfig(4).num_return_beams) == (2, 4)
    with pytest.raises(InvalidArgumentError, match="num_return_sequences"):
        config.num_return_sequences = 5
    with pytest.raises(UnsupportedError, match="beam_width_array"):
        SamplingConfig(4, beam_width_array=[2, 4]).fill(message)


@pytest.mark.parametrize("given", OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_where_it_is_set(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    for kind in (SamplingConfig, SamplingParams):
        made = kind()
        with pytest.raises(InvalidArgumentError, match=name):
            setattr(made, name, value)
        with pytest.raises(InvalidArgumentError, match=name):
            kind(**given)


@pytest.mark.parametrize(("params", "expected"), STOPPING)
def test_stopping_names(params: SamplingParams, expected: pb.StoppingConfig) -> None:
    assert GenerationRequest([1], params).to_proto().stopping == expected


def test_output_names() -> None:
    params = SamplingParams(
        logprobs=2,
        prompt_logprobs=1,
        return_context_logits=True,
        return_generation_logits=True,
        exclude_input_from_output=False,
        return_perf_metrics=True,
        additional_model_outputs=[
            AdditionalModelOutput("topk_logits.3"),
            AdditionalModelOutput("hidden_states.1", True),
        ],
        max_tokens=9,
    )
    request = GenerationRequest([1], params).to_proto()
    expected = pb.OutputConfig(
        log_probs=2,
        prompt_log_probs=1,
        return_context_logits=True,
        return_generation_logits=True,
        exclude_input_from_output=False,
        return_perf_metrics=True,
        skip_special_tokens=True,
        detokenize=True,
    )
    expected.additional_outputs.add(name="topk_logits.3")
    expected.additional_outputs.add(name="hidden_states.1", gather_context=True)
    assert request.output == expected
    assert request.max_tokens == 9


def test_request_names() -> None:
    ranges = KvCacheRetentionConfig.TokenRangeRetentionConfig(2, 5, 80, timedelta(milliseconds=100))
    retention = KvCacheRetentionConfig([ranges], 3)
    request = GenerationRequest(
        "text",
        lora_request=LoRARequest("a", 1, "/adapters/a"),
        prompt_adapter_request=PromptAdapterRequest("p", 2, "/adapters/p"),
        streaming=True,
        kv_cache_retention_config=retention,
        arrival_time=2.0,
        priority=0.25,
        client_id="me",
        cache_salt="mine",
        speculative_config=NGramDecodingConfig(5, 2),
    ).to_proto()
    expected = pb.GenerateRequest(
        prompt="text",
        max_tokens=32,
        streaming=True,
        priority=-50,
        client_id="me",
        cache_salt="mine",
        arrival_time_unix_ns=2_000_000_000,
        lora=pb.LoraConfig(name="a", path="/adapters/a"),
        prompt_tuning=pb.PromptTuningConfig(name="p", path="/adapters/p"),
        kv_retention=pb.KvRetentionConfig(decode_priority=3),
        speculative=pb.SpeculativeConfig(
            method=pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP, num_draft_tokens=5, max_ngram_size=2
        ),
        output=request.output,
        stopping=pb.StoppingConfig(),
    )
    expected.kv_retention.token_ranges.add(start=2, end=5, priority=80, duration_ms=100)
    assert request.kv_retention == expected.kv_retention
    for name in ("sampling", "stopping"):
        request.ClearField(name)
        expected.ClearField(name)
    assert request == expected
    drafts = GenerationRequest([1], speculative_config=DraftTargetDecodingConfig(2)).to_proto().speculative
    assert drafts == pb.SpeculativeConfig(method=pb.SpeculativeConfig.METHOD_DRAFT_MODEL, num_draft_tokens=2)


def test_arrays() -> None:
    tensor = pb.Tensor(dtype=pb.Tensor.DTYPE_FLOAT16, shape=[2, 3], data=TABLE.tobytes())
    assert GenerationRequest([1], prompt_tuning_table=TABLE).to_proto().prompt_tuning.table == tensor
    embedding = MultimodalParams({"multimodal_embedding": TABLE})
    assert GenerationRequest([1], multimodal_params=embedding).to_proto().prompt_tuning.table == tensor
    assert GenerationRequest(None, prompt_embeddings=TABLE).to_proto().prompt_embeddings == tensor
    assert GenerationRequest(np.array([4, 5])).to_proto().token_ids.values == [4, 5]  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "fields"), BAD_PARAMS)
def test_a_parameter_that_its_field_cannot_hold_is_named(field: str, fields: dict[str, Any]) -> None:
    params = SamplingParams(**{name: value for name, value in fields.items() if name not in ("prompt", "n")})
    params.n = fields.get("n", 1)
    request = GenerationRequest(fields.get("prompt", [1]), params)
    with pytest.raises((InvalidArgumentError, UnsupportedError)) as raised:
        request.to_proto()
    assert raised.value.field == field


@pytest.mark.parametrize(("field", "fields"), BAD_REQUESTS)
def test_an_argument_that_its_field_cannot_hold_is_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        GenerationRequest(**{"prompt_token_ids": [1]} | fields).to_proto()
    assert raised.value.field == field


def test_log_probs_of_the_prompt_begin_with_its_second_token_and_tensors_come_by_name() -> None:
    result = GenerationResult(GenerationRequest([7, 8, 9]), lambda _: None)
    tensors = ("context_logits", "generation_logits", "context_topk_logits.2", "topk_logits.2")
    extras = Extras(
        prompt_log_probs=LogProbs((-1.0, -2.0), 1, (5, 9), (-0.5, -2.0), (3, 1)),
        tensors=tuple(Tensor(name, "float32", (1, 1), b"\0" * 4) for name in tensors),
    )
    ends = {"is_final": True, "is_sequence_final": True, "finish_reason": FinishReason.STOP}
    result.put(Chunk(token_ids=[4], extras=extras, **ends))  # type: ignore[arg-type]
    result.end(None)
    output = result.result()
    assert result.prompt_logprobs == [
        {5: Logprob(-0.5, 1), 8: Logprob(-1.0, 3)},
        {9: Logprob(-2.0, 1)},
    ]
    for found in (
        result.context_logits,
        output.generation_logits,
        result.additional_context_outputs["topk_logits.2"],
        output.additional_generation_outputs["topk_logits.2"],
    ):
        assert found is not None
        assert found.tolist() == [[0.0]]


def test_the_end_token_is_not_part_of_the_output_and_the_best_sequences_are_kept() -> None:
    params = SamplingParams(n=1, best_of=2, top_p=0.5)
    result = GenerationResult(GenerationRequest([7], params), lambda _: None)
    rows = LogProbs((-1.0, -2.0), 0, (), (), ())
    for index, total in enumerate((-3.0, -2.5)):
        result.put(
            Chunk(
                index, 0, [4, 9], "a", is_sequence_final=True, is_final=index == 1, finish_reason=FinishReason.STOP,
                matched_stop=9, cumulative_log_prob=total, extras=Extras(rows),
            )
        )  # fmt: skip
    result.end(None)
    assert result.result().token_ids == [4]
    assert len(result.outputs[0].logprobs) == 1
    assert [(output.index, output.cumulative_logprob) for output in result.outputs] == [(0, -2.5)]


REQUEST: dict[str, Any] = {"input_token_ids": [1, 2], "max_tokens": 9}


def test_requests_of_the_executor() -> None:
    output = OutputConfig(True, True, True, False, False, True, [AdditionalModelOutput("hidden_states.1", True)])
    request = Request(
        [1, 2], 9, True, SamplingConfig(2, seed=3), output, end_id=7, pad_id=-2, bad_words=[[4]], stop_words=[[5],
        [6, 7]], client_id=12, priority=0.75, allotted_time_ms=timedelta(seconds=2), cache_salt_id=8,
        external_draft_tokens_config=ExternalDraftTokensConfig([3, 4]), guided_decoding_params=GuidedDecodingParams(
            GuidedDecodingParams.GuideType.REGEX, "a*"
        ), prompt_tuning_config=PromptTuningConfig(torch.ones(2, 3, dtype=torch.bfloat16)),
    )  # fmt: skip
    request.logits_post_processor_name = "mine"
    message = request.to_proto()
    expected = pb.GenerateRequest(
        token_ids=pb.TokenIds(values=[1, 2]), max_tokens=9, streaming=True, timeout_ms=2000, cache_salt="8",
        client_id="12", priority=50, logits_post_processor_name="mine",
        sampling=pb.SamplingConfig(**BEAMS | {"beam_width": 2, "seed": 3}),
        stopping=pb.StoppingConfig(
            end_id=7, bad_word_token_ids=[pb.TokenIds(values=[4])], stop_token_ids=[5],
            stop_word_token_ids=[pb.TokenIds(values=[6, 7])],
        ),
        guided_decoding=pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_REGEX, guide="a*"),
        prompt_tuning=pb.PromptTuningConfig(
            table=pb.Tensor(dtype=pb.Tensor.DTYPE_BFLOAT16, shape=[2, 3], data=b"\x80\x3f" * 6)
        ),
        speculative=pb.SpeculativeConfig(
            method=pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP, num_draft_tokens=2, prediction_token_ids=[3, 4]
        ),
    )  # fmt: skip
    expected.output.log_probs = 0
    expected.output.return_context_logits = expected.output.return_generation_logits = True
    expected.output.return_perf_metrics = True
    expected.output.detokenize = False
    expected.output.additional_outputs.add(name="hidden_states.1", gather_context=True)
    assert message == expected


@pytest.mark.parametrize("end_id", [None, -1])
def test_without_an_end_id_nothing_ends_a_sequence(end_id: int | None) -> None:
    assert Request([1], 2, end_id=end_id).to_proto().stopping == pb.StoppingConfig(ignore_eos=True)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("return_encoder_output", {"output_config": OutputConfig(return_encoder_output=True)}),
        ("encoder_input_token_ids", {"encoder_input_token_ids": [1]}),
        ("position_ids", {"position_ids": [0, 2]}),
        ("eagle_config", {"eagle_config": EagleConfig()}),
        ("request_type", {"type": RequestType.REQUEST_TYPE_CONTEXT_ONLY, "num_return_sequences": 2}),
        ("transfer_mode", {"kv_cache_retention_config": KvCacheRetentionConfig(transfer_mode=KvCacheTransferMode.GDS)}),
        ("stop_words", {"stop_words": ["a"]}),
        ("max_tokens", {"max_tokens": 0}),
        ("priority", {"priority": 2.0}),
    ],
)
def test_what_the_service_lacks_is_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises((InvalidArgumentError, UnsupportedError)) as raised:
        Request(**REQUEST | fields).to_proto()
    assert raised.value.field == field


def test_retention_ranges_must_not_overlap() -> None:
    part = KvCacheRetentionConfig.TokenRangeRetentionConfig
    KvCacheRetentionConfig([part(0, 64, 10), part(64, 128, 50)])
    for ranges in ([part(0, 64, 10), part(32, 128, 50)], [part(0), part(32, 128)]):
        with pytest.raises(InvalidArgumentError, match="overlap"):
            KvCacheRetentionConfig(ranges, 50)
    with pytest.raises(InvalidArgumentError, match="priority"):
        part(0, 1, 101)


def test_guides() -> None:
    kinds = GuidedDecodingParams.GuideType
    assert GuidedDecodingParams(json={"a": 1}) == GuidedDecodingParams(kinds.JSON_SCHEMA, '{"a": 1}')
    assert GuidedDecodingParams(json_object=True) == GuidedDecodingParams(kinds.JSON)
    assert GuidedDecodingParams(grammar="root ::= [0-9]") == GuidedDecodingParams(kinds.EBNF_GRAMMAR, "root ::= [0-9]")
    for wrong in ({}, {"regex": "a", "json_object": True}, {"json": {"a": object()}}, {"guide_type": kinds.REGEX}):
        with pytest.raises(InvalidArgumentError, match="guide"):
            GuidedDecodingParams(**wrong)
    tag = GuidedDecodingParams(structural_tag={"format": {"type": "any_text"}})
    assert tag == GuidedDecodingParams(kinds.STRUCTURAL_TAG, '{"format": {"type": "any_text"}}')
    assert tag.to_proto() == pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_STRUCTURAL_TAG, guide=tag.guide or "")


def test_tensors_of_the_batch_manager() -> None:
    request = InferenceRequest(2**64 - 1)
    request.input_ids = np.array([[1, 2, 3]], np.int32)
    request.max_new_tokens = torch.tensor([[9]], dtype=torch.int32)
    request.end_id = np.array([[5]], np.int32)
    request.stop_words_list = np.array([[[7, 8, 9], [2, 3, -1]]], np.int32)
    request.runtime_top_k = np.array([[4]], np.int32)
    request.return_log_probs = np.array([[True]])
    request.is_streaming = True
    made = request.to_request()
    assert (made.input_token_ids, made.max_tokens, made.streaming) == ([1, 2, 3], 9, True)
    assert (made.end_id, made.stop_words, made.sampling_config) == (5, [[7, 8], [9]], SamplingConfig(top_k=4))
    assert made.output_config == OutputConfig(True)
    assert request.tensors.keys() >= {"input_ids", "request_output_len", "runtime_top_k"}
    assert request.beam_width is None
    assert InferenceRequest(1, {"request_output_len": np.array([[2]])}).max_new_tokens == np.array([[2]])
    for request_id, tensors in ((2**64, {}), (-1, {}), (1, {"x": 1})):
        with pytest.raises(InvalidArgumentError):
            InferenceRequest(request_id, tensors)
    with pytest.raises(InvalidArgumentError, match="request_output_len"):
        InferenceRequest(1).to_request()


def test_responses_have_a_result_or_an_error() -> None:
    failed = Response(3, "error", 7)
    assert (failed.request_id, failed.client_id, failed.has_error(), failed.error_msg) == (3, 7, True, "error")
    with pytest.raises(InvalidArgumentError):
        _ = failed.result
    result = Result()
    result.is_final, result.output_token_ids, result.context_logits = True, [[1, 2]], torch.ones(1, 2)
    response = Response(3, result)
    assert (response.client_id, response.has_error(), response.result.output_token_ids) == (None, False, [[1, 2]])
    with pytest.raises(InvalidArgumentError):
        _ = response.error_msg
    response.clear_context_logits()
    assert result.context_logits is None


def stream_of(*chunks: Chunk, **fields: Any) -> list[Result]:
    stream = ResponseStream(Request(**REQUEST | fields))
    return [result for chunk in chunks for result in stream.add(chunk)]


def last_chunk(tokens: list[int], reason: FinishReason, **fields: Any) -> Chunk:
    return Chunk(0, 0, tokens, is_sequence_final=True, is_final=True, finish_reason=reason, **fields)


def test_without_streaming_the_output_begins_with_the_prompt_unless_it_is_excluded() -> None:
    (result,) = stream_of(last_chunk([3, 4], FinishReason.LENGTH))
    assert (result.output_token_ids, result.finish_reason) == ([[1, 2, 3, 4]], Reason.LENGTH)
    assert (result.decoding_iter, result.is_final, result.log_probs, result.cum_log_probs) == (2, True, None, None)
    excluded = OutputConfig(exclude_input_from_output=True)
    (result,) = stream_of(last_chunk([3, 4], FinishReason.LENGTH), output_config=excluded)
    assert result.output_token_ids == [[3, 4]]


def test_each_streamed_token_is_a_result_and_the_end_token_an_empty_one() -> None:
    chunk = last_chunk([3, 4, 9], FinishReason.STOP, matched_stop=9)
    results = stream_of(Chunk(0, 0, [3, 4]), replace(chunk, token_ids=[9]), streaming=True, end_id=9)
    assert [result.output_token_ids for result in results] == [[[3]], [[4]], [[]]]
    assert [result.finish_reason for result in results] == [Reason.NOT_FINISHED] * 2 + [Reason.END_ID]
    whole = stream_of(chunk, streaming=True, return_all_generated_tokens=True, end_id=9)
    assert [result.output_token_ids for result in whole] == [[[3]], [[3, 4]], [[3, 4]]]
    (result,) = stream_of(chunk, end_id=8)
    assert (result.output_token_ids, result.finish_reason) == ([[1, 2, 3, 4, 9]], Reason.STOP_WORDS)


def test_log_probs_are_those_of_all_tokens_so_far_and_logits_those_of_the_new_ones() -> None:
    logits = Tensor("generation_logits", "float32", (2, 2), np.arange(4, dtype=np.float32).tobytes())
    extras = Extras(LogProbs((-1.0, -2.0), 0, (), (), ()), tensors=(logits,))
    results = stream_of(
        last_chunk([3, 4], FinishReason.LENGTH, extras=extras, cumulative_log_prob=-3.0),
        streaming=True,
        output_config=OutputConfig(True, False, True),
    )
    assert [result.log_probs for result in results] == [[[-1.0]], [[-1.0, -2.0]]]
    assert [result.cum_log_probs for result in results] == [[-1.0], [-3.0]]
    assert [result.generation_logits.tolist() for result in results] == [[[[0.0, 1.0]]], [[[2.0, 3.0]]]]  # type: ignore[union-attr]


def test_beams_are_one_result_and_the_best_is_streamed() -> None:
    beams = SamplingConfig(2)
    chunks = [Chunk(0, 0, [3]), Chunk(1, 0, [5, 6], is_sequence_final=True, finish_reason=FinishReason.LENGTH)]
    end = replace(last_chunk([4], FinishReason.LENGTH), token_offset=1)
    (result,) = stream_of(*chunks, end, sampling_config=beams)
    assert result.output_token_ids == [[1, 2, 3, 4], [1, 2, 5, 6]]
    results = stream_of(*chunks, end, sampling_config=beams, streaming=True)
    assert [result.output_token_ids for result in results] == [[[3], []], [[4], [5, 6]]]
    assert results[0].finish_reasons == [Reason.NOT_FINISHED] * 2


def test_the_prompts_logits_are_in_each_result() -> None:
    """The first sequence has them, and the second one ends before they have arrived."""
    logits = Tensor("context_logits", "float32", (2, 1), b"\0" * 8)
    second = Chunk(1, 0, [5], is_sequence_final=True, finish_reason=FinishReason.LENGTH)
    first = last_chunk([3], FinishReason.LENGTH, extras=Extras(tensors=(logits,)))
    config = SamplingConfig(num_return_sequences=2)
    stream = ResponseStream(Request([1, 2], 1, sampling_config=config, output_config=OutputConfig(False, True)))
    assert stream.add(second) == []
    results = stream.add(first)
    assert [result.sequence_index for result in results] == [1, 0]
    assert all(result.context_logits.shape == (2, 1) for result in results)  # type: ignore[union-attr]


def test_images_are_files_or_images_of_pillow() -> None:
    image = Image.new("RGB", (3, 2), (10, 20, 30))
    params = MultimodalParams({"image": [b"GIF89a", image]})
    request = GenerationRequest("<image> and <image>", multimodal_params=params).to_proto()
    assert request.prompt == "<image> and <image>"
    assert request.images[0].data == b"GIF89a"
    with Image.open(BytesIO(request.images[1].data)) as found:
        assert (found.format, found.size, found.getpixel((0, 0))) == ("PNG", (3, 2), (10, 20, 30))
    one = GenerationRequest("<image>", multimodal_params=MultimodalParams({"image": b"GIF89a"})).to_proto()
    assert [item.data for item in one.images] == [b"GIF89a"]
    for data in ({"image": "cat.png"}, {"image": [3]}):
        with pytest.raises(InvalidArgumentError, match="multimodal_params"):
            GenerationRequest("<image>", multimodal_params=MultimodalParams(data)).to_proto()
    with pytest.raises(UnsupportedError, match="audio"):
        GenerationRequest("<image>", multimodal_params=MultimodalParams({"audio": b""})).to_proto()
