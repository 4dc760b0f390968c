"""Requests of the executor: each name maps to its native field, and invalid values are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from midstream.chunk import Chunk, FinishReason
from midstream.errors import InvalidArgumentError
from midstream.executor import (
    DraftTargetDecodingConfig,
    GenerationRequest,
    GenerationResult,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    Logprob,
    LoRARequest,
    MultimodalParams,
    NGramDecodingConfig,
    PromptAdapterRequest,
    SamplingParams,
    TokenRangeRetentionConfig,
)
from midstream.extras import Extras, LogProbs, Tensor
from protos import generation_pb2 as pb

TABLE = np.arange(6, dtype=np.float16).reshape(2, 3)
SAMPLING: list[tuple[SamplingParams, pb.SamplingConfig]] = [
    (SamplingParams(n=3, random_seed=5), pb.SamplingConfig(num_return_sequences=3, seed=5)),
    (SamplingParams(n=3, use_beam_search=True), pb.SamplingConfig(num_return_sequences=3, beam_width=3)),
    (
        SamplingParams(beam_width=4, length_penalty=0.5, early_stopping=2, beam_search_diversity_rate=0.1),
        pb.SamplingConfig(beam_width=4, length_penalty=0.5, early_stopping=2, beam_search_diversity_rate=0.1),
    ),
    (
        SamplingParams(top_k=5, top_p=0.9, top_p_decay=0.8, top_p_min=0.1, top_p_reset_id=7, min_p=0.05),
        pb.SamplingConfig(top_k=5, top_p=0.9, top_p_decay=0.8, top_p_min=0.1, top_p_reset_id=7, min_p=0.05),
    ),
    (
        SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, no_repeat_ngram_size=3),
        pb.SamplingConfig(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, no_repeat_ngram_size=3),
    ),
    (
        SamplingParams(temperature=0.0, min_tokens=4, embedding_bias={3: 1.5}),
        pb.SamplingConfig(temperature=0.0, min_tokens=4, embedding_bias={3: 1.5}),
    ),
]
STOPPING: list[tuple[SamplingParams, pb.StoppingConfig]] = [
    (SamplingParams(stop="end", bad="no"), pb.StoppingConfig(stop_words=["end"], bad_words=["no"])),
    (
        SamplingParams(stop=["a", "b"], bad=["c"], bad_words=["d"], include_stop_str_in_output=True),
        pb.StoppingConfig(stop_words=["a", "b"], bad_words=["d", "c"], include_stop_in_output=True),
    ),
    (
        SamplingParams(stop_token_ids=[4], bad_word_token_ids=[[5, 6]], end_id=2, pad_id=3, ignore_eos=True),
        pb.StoppingConfig(
            stop_token_ids=[4], bad_word_token_ids=[pb.TokenIds(values=[5, 6])], end_id=2, pad_id=3, ignore_eos=True
        ),
    ),
]
BAD_SAMPLING: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": -1}),
    ("random_seed", {"random_seed": -1}),
    ("logprobs", {"logprobs": True}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("bad", {"bad": 5}),
    ("stop", {"stop": [5]}),
    ("stop", {"stop": "\ud800"}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("bad_word_token_ids", {"bad_word_token_ids": [5]}),
    ("end_id", {"end_id": -2}),
    ("embedding_bias", {"embedding_bias": [1]}),
    ("embedding_bias", {"embedding_bias": {-1: 1.0}}),
    ("max_tokens", {"max_tokens": -1}),
    ("temperature", {"temperature": "hot"}),
    ("beam_width", {"beam_width": 2.5}),
    ("additional_outputs", {"additional_outputs": ["a"]}),
    ("additional_model_outputs", {"additional_model_outputs": [3]}),
    ("return_context_logits", {"return_context_logits": "x"}),
    ("logits_processor", {"logits_processor": 4}),
    ("guided_decoding", {"guided_decoding": GuidedDecodingParams()}),
    ("guided_decoding", {"guided_decoding": GuidedDecodingParams(regex="a", json_object=True)}),
    ("guided_decoding", {"guided_decoding": GuidedDecodingParams(json={"a": object()})}),
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
    ("priority", {"priority": 2**40}),
    ("client_id", {"client_id": 5}),
    ("cache_salt", {"cache_salt": b"\xff"}),
    ("arrival_time", {"arrival_time": 1e30}),
    ("lora_request", {"lora_request": LoRARequest(5)}),  # type: ignore[arg-type]
    ("kv_cache_retention_config", {"kv_cache_retention_config": KvCacheRetentionConfig(max_tokens=-1)}),
    ("num_draft_tokens", {"speculative_config": NGramDecodingConfig(max_draft_len=-1)}),
]


@pytest.mark.parametrize(("params", "expected"), SAMPLING)
def test_sampling_names(params: SamplingParams, expected: pb.SamplingConfig) -> None:
    assert GenerationRequest([1], params).to_proto().sampling == expected


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
        return_all_generated_tokens=True,
        additional_model_outputs=["topk_logits.3", ("hidden_states.1", True)],
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
        return_all_generated_tokens=True,
        skip_special_tokens=True,
        detokenize=True,
    )
    expected.additional_outputs.add(name="topk_logits.3")
    expected.additional_outputs.add(name="hidden_states.1", gather_context=True)
    assert request.output == expected
    assert request.max_tokens == 9


def test_request_names() -> None:
    retention = KvCacheRetentionConfig(
        token_range_retention_configs=[TokenRangeRetentionConfig(2, 5, 80, 100)], decode_retention_priority=3
    )
    request = GenerationRequest(
        "text",
        lora_request=LoRARequest("a", 1, "/adapters/a"),
        prompt_adapter_request=PromptAdapterRequest("p", 2, "/adapters/p"),
        streaming=True,
        kv_cache_retention_config=retention,
        arrival_time=2.0,
        priority=-3,
        client_id="me",
        cache_salt="mine",
        speculative_config=NGramDecodingConfig(5, 2),
    ).to_proto()
    expected = pb.GenerateRequest(
        prompt="text",
        streaming=True,
        priority=-3,
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


@pytest.mark.parametrize(("field", "fields"), BAD_SAMPLING)
def test_a_parameter_that_its_field_cannot_hold_is_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        GenerationRequest([1], SamplingParams(**fields)).to_proto()
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
    assert result.context_logits == extras.tensors[0]
    assert output.generation_logits == extras.tensors[1]
    assert result.additional_context_outputs == {"topk_logits.2": extras.tensors[2]}
    assert output.additional_generation_outputs == {"topk_logits.2": extras.tensors[3]}
