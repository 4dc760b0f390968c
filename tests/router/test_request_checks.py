"""The range of every field: values at its limits are accepted, and values beyond are rejected with the name of the
field.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from midstream.errors import InvalidArgumentError, NotFoundError, UnavailableError, UnsupportedError
from midstream.model.folder import ModelFolder
from protos import generation_pb2 as pb
from router.pipeline.request_checks import (
    FEATURES,
    check_request,
    check_supported,
    check_tensors,
    fit_to_context,
    fit_to_tensors,
)

VOCAB = 49_152


def sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(sampling=pb.SamplingConfig(**fields))


def stopping(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(stopping=pb.StoppingConfig(**fields))


def output(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(output=pb.OutputConfig(**fields))


def guided(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(guided_decoding=pb.GuidedDecodingConfig(**fields))


def drafts(**fields: Any) -> pb.GenerateRequest:
    method = pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP
    return pb.GenerateRequest(speculative=pb.SpeculativeConfig(method=method, num_draft_tokens=2, **fields))


BAD: list[tuple[str, pb.GenerateRequest]] = [
    ("request_id", pb.GenerateRequest(request_id="x" * 129)),
    ("client_id", pb.GenerateRequest(client_id="x" * 129)),
    ("priority", pb.GenerateRequest(priority=101)),
    ("timeout_ms", pb.GenerateRequest(timeout_ms=2**64 - 1)),
    ("timeout_ms", pb.GenerateRequest(timeout_ms=2**40 + 1)),
    ("arrival_time_unix_ns", pb.GenerateRequest(arrival_time_unix_ns=-1)),
    ("arrival_time_unix_ns", pb.GenerateRequest(arrival_time_unix_ns=2**63 - 1)),
    ("speculative.max_ngram_size", drafts(max_ngram_size=0)),
    ("speculative.max_ngram_size", drafts(max_ngram_size=65)),
    ("kv_retention.decode_priority", pb.GenerateRequest(kv_retention=pb.KvRetentionConfig(decode_priority=101))),
    (
        "kv_retention.decode_duration_ms",
        pb.GenerateRequest(kv_retention=pb.KvRetentionConfig(decode_duration_ms=2**64 - 1)),
    ),
    (
        "kv_retention.token_ranges.duration_ms",
        pb.GenerateRequest(
            kv_retention=pb.KvRetentionConfig(token_ranges=[pb.KvRetentionConfig.TokenRange(duration_ms=2**41)])
        ),
    ),
    ("cache_salt", pb.GenerateRequest(cache_salt="x" * 129)),
    ("logits_post_processor_name", pb.GenerateRequest(logits_post_processor_name="x" * 129)),
    ("sampling.beam_search_diversity_rate", sampling(beam_search_diversity_rate=-0.1)),
    ("sampling.frequency_penalty", sampling(frequency_penalty=math.nan)),
    ("sampling.presence_penalty", sampling(presence_penalty=-2.1)),
    ("prompt_tuning.name", pb.GenerateRequest(prompt_tuning=pb.PromptTuningConfig(name="x" * 129))),
    ("prompt_tuning", pb.GenerateRequest(prompt_tuning=pb.PromptTuningConfig())),
    ("lora.name", pb.GenerateRequest(lora=pb.LoraConfig(name="x" * 129))),
    ("lora.resolved", pb.GenerateRequest(lora=pb.LoraConfig(name="a", resolved=pb.ResolvedAdapter(path="/")))),
    ("priority", pb.GenerateRequest(priority=-101)),
    ("max_tokens", pb.GenerateRequest(max_tokens=0)),
    ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(values=[5, VOCAB]))),
    ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(values=[2**32 - 1]))),
    ("sampling.temperature", sampling(temperature=math.nan)),
    ("sampling.temperature", sampling(temperature=-0.1)),
    ("sampling.temperature", sampling(temperature=math.inf)),
    ("sampling.temperature", sampling(temperature=100.1)),
    ("sampling.top_p", sampling(top_p=0.0)),
    ("sampling.top_p", sampling(top_p=1.01)),
    ("sampling.top_p", sampling(top_p=math.nan)),
    ("sampling.min_p", sampling(min_p=-0.01)),
    ("sampling.min_p", sampling(min_p=1.5)),
    ("sampling.repetition_penalty", sampling(repetition_penalty=0.0)),
    ("sampling.repetition_penalty", sampling(repetition_penalty=math.inf)),
    ("sampling.presence_penalty", sampling(presence_penalty=2.1)),
    ("sampling.frequency_penalty", sampling(frequency_penalty=-2.1)),
    ("sampling.length_penalty", sampling(length_penalty=math.nan)),
    ("sampling.beam_width", sampling(beam_width=0)),
    ("sampling.beam_width", sampling(beam_width=17)),
    ("sampling.num_return_sequences", sampling(num_return_sequences=0)),
    ("sampling.num_return_sequences", sampling(num_return_sequences=129)),
    ("sampling.num_return_sequences", sampling(num_return_sequences=4_000_000_000)),
    ("sampling.num_return_sequences", sampling(num_return_sequences=3, beam_width=2)),
    ("sampling.min_tokens", sampling(min_tokens=8193)),
    ("sampling.embedding_bias", sampling(embedding_bias={VOCAB: 1.0})),
    ("sampling.embedding_bias", sampling(embedding_bias={1: math.nan})),
    ("sampling.allowed_token_ids", sampling(allowed_token_ids=[1, VOCAB])),
    ("sampling.allowed_token_ids", sampling(allowed_token_ids=[1] * (VOCAB + 1))),
    ("stopping.stop_words", stopping(stop_words=["x"] * 65)),
    ("stopping.stop_words", stopping(stop_words=["x"] * 100_000)),
    ("stopping.stop_words", stopping(stop_words=["x" * 257])),
    ("stopping.stop_words", stopping(stop_words=["fine", ""])),
    ("stopping.stop_token_ids", stopping(stop_token_ids=[VOCAB])),
    ("stopping.stop_token_ids", stopping(stop_token_ids=range(65))),
    ("stopping.bad_words", stopping(bad_words=[""])),
    ("stopping.bad_word_token_ids", stopping(bad_word_token_ids=[pb.TokenIds()])),
    ("stopping.bad_word_token_ids", stopping(bad_word_token_ids=[pb.TokenIds(values=[VOCAB])])),
    ("stopping.end_id", stopping(end_id=VOCAB)),
    ("output.log_probs", output(log_probs=21)),
    ("output.prompt_log_probs", output(prompt_log_probs=21)),
    ("output.additional_outputs.name", output(additional_outputs=[pb.AdditionalOutput(name="hidden_states.31")])),
    ("output.additional_outputs.name", output(additional_outputs=[pb.AdditionalOutput(name="topk_logits.1025")])),
    ("output.additional_outputs.name", output(additional_outputs=[pb.AdditionalOutput(name="token_logits.0.49152")])),
    ("output.additional_outputs.name", output(additional_outputs=[pb.AdditionalOutput(name="sampling.1025")])),
    (
        "output.additional_outputs.name",
        output(additional_outputs=[pb.AdditionalOutput(name="sampling.2", gather_context=True)]),
    ),
    ("continuation", pb.GenerateRequest(prompt="x", continuation=pb.Continuation(num_output_tokens=1))),
    (
        "continuation.num_output_tokens",
        pb.GenerateRequest(token_ids=pb.TokenIds(values=[1, 2]), continuation=pb.Continuation(num_output_tokens=2)),
    ),
    (
        "continuation.sequence_index",
        pb.GenerateRequest(token_ids=pb.TokenIds(values=[1, 2]), continuation=pb.Continuation(sequence_index=128)),
    ),
    ("output.additional_outputs.name", output(additional_outputs=[pb.AdditionalOutput(name="topk_logits.5")] * 2)),
    ("output.additional_outputs", output(additional_outputs=[pb.AdditionalOutput(name="topk_logits.5")] * 17)),
    ("sampling.top_p_decay", sampling(top_p_decay=0.0)),
    ("sampling.top_p_decay", sampling(top_p_decay=1.1)),
    ("sampling.top_p_min", sampling(top_p_min=0.0)),
    ("sampling.top_p_reset_id", sampling(top_p_reset_id=VOCAB)),
    ("sampling.no_repeat_ngram_size", sampling(no_repeat_ngram_size=8193)),
    ("stopping.bad_words", stopping(bad_words=["x"] * 65)),
    ("stopping.bad_words", stopping(bad_words=["x" * 257])),
    ("stopping.bad_word_token_ids", stopping(bad_word_token_ids=[pb.TokenIds(values=[1])] * 65)),
    ("stopping.bad_word_token_ids", stopping(bad_word_token_ids=[pb.TokenIds(values=[1] * 257)])),
    ("stopping.pad_id", stopping(pad_id=VOCAB)),
    ("guided_decoding.guide_type", guided(guide="x")),
    ("guided_decoding.guide", guided(guide_type=pb.GUIDE_TYPE_REGEX)),
    ("lora.name", pb.GenerateRequest(lora=pb.LoraConfig())),
    ("speculative.method", pb.GenerateRequest(speculative=pb.SpeculativeConfig(num_draft_tokens=2))),
    (
        "speculative.num_draft_tokens",
        pb.GenerateRequest(speculative=pb.SpeculativeConfig(method=pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP)),
    ),
    (
        "kv_retention.token_ranges.priority",
        pb.GenerateRequest(
            kv_retention=pb.KvRetentionConfig(token_ranges=[pb.KvRetentionConfig.TokenRange(priority=101)])
        ),
    ),
    (
        "kv_retention.token_ranges.end",
        pb.GenerateRequest(
            kv_retention=pb.KvRetentionConfig(token_ranges=[pb.KvRetentionConfig.TokenRange(start=5, end=5)])
        ),
    ),
]
GOOD: list[pb.GenerateRequest] = [
    pb.GenerateRequest(),
    pb.GenerateRequest(request_id="x" * 128, priority=-100, max_tokens=1, model="smollm2"),
    pb.GenerateRequest(token_ids=pb.TokenIds(values=[0, VOCAB - 1])),
    sampling(temperature=0.0, top_p=1.0, min_p=0.0, top_k=0, presence_penalty=-2, frequency_penalty=2),
    sampling(temperature=100.0, top_p=1e-6, min_p=1.0, seed=2**64 - 1, num_return_sequences=128),
    sampling(beam_width=16, num_return_sequences=16),
    sampling(allowed_token_ids=range(VOCAB)),
    stopping(stop_words=["x" * 256] * 64, stop_token_ids=[VOCAB - 1] * 64, end_id=0),
    output(log_probs=20, additional_outputs=[pb.AdditionalOutput(name="hidden_states.30")]),
    guided(guide_type=pb.GUIDE_TYPE_JSON),
    drafts(max_ngram_size=64),
    pb.GenerateRequest(timeout_ms=2**40, arrival_time_unix_ns=2**62),
]


@pytest.mark.parametrize(("field", "request_"), BAD)
def test_a_value_out_of_range_is_refused_by_name(folder: ModelFolder, field: str, request_: pb.GenerateRequest) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        check_request(request_, folder)
    assert raised.value.field == field
    assert len(raised.value.message) < 200


@pytest.mark.parametrize("request_", GOOD)
def test_a_value_at_the_end_of_its_range_passes(folder: ModelFolder, request_: pb.GenerateRequest) -> None:
    check_request(request_, folder)


def test_the_widest_search_is_a_setting(folder: ModelFolder) -> None:
    request = sampling(beam_width=40, num_return_sequences=40)
    check_request(request, folder, max_beam_width=40)
    with pytest.raises(InvalidArgumentError, match=r"sampling\.beam_width: is 40; must be in \[1, 39\]"):
        check_request(request, folder, max_beam_width=39)


@pytest.mark.parametrize(
    "output",
    [
        pb.OutputConfig(exclude_input_from_output=False),
        pb.OutputConfig(prompt_log_probs=0),
        pb.OutputConfig(return_context_logits=True),
        pb.OutputConfig(additional_outputs=[pb.AdditionalOutput(name="topk_logits.1", gather_context=True)]),
    ],
    ids=str,
)
def test_prompt_outputs_do_not_require_generation(folder: ModelFolder, output: pb.OutputConfig) -> None:
    request = pb.GenerateRequest(max_tokens=0, output=output)
    check_request(request, folder)
    request.sampling.beam_width = 2
    with pytest.raises(InvalidArgumentError, match="max_tokens"):
        check_request(request, folder)


def test_tensors_are_limited_by_their_size(folder: ModelFolder) -> None:
    """A request with 10 prompt tokens and 2 sequences of 5 tokens has 30 rows of logits or hidden states."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(values=[1] * 10), max_tokens=5)
    request.sampling.num_return_sequences = 2
    request.output.return_generation_logits = True
    limit = 10 * VOCAB * 4
    check_tensors(request, folder, limit)
    with pytest.raises(InvalidArgumentError) as raised:
        check_tensors(request, folder, limit - 1)
    assert raised.value.field == "output"
    request.output.return_context_logits = True
    check_tensors(request, folder, 2 * limit)
    request.output.additional_outputs.add(name="hidden_states.1", gather_context=True)
    check_tensors(request, folder, 2 * limit + 20 * 576 * 4)
    request.output.additional_outputs.add(name="topk_logits.3")
    with pytest.raises(InvalidArgumentError):
        check_tensors(request, folder, 2 * limit + 20 * 576 * 4 + 10 * 3 * 8 - 1)


def test_a_default_length_is_lowered_until_the_tensors_fit(folder: ModelFolder) -> None:
    """Logits of 10 prompt tokens and of 2 sequences: 60 rows leave room for 25 tokens each."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(values=[1] * 10), max_tokens=8000)
    request.sampling.num_return_sequences = 2
    request.output.return_generation_logits = request.output.return_context_logits = True
    limit = 60 * VOCAB * 4
    fit_to_tensors(request, folder, limit + 1)
    assert request.max_tokens == 25
    check_tensors(request, folder, limit)
    fit_to_tensors(request, folder, 1 << 40)
    assert request.max_tokens == 25  # it is only lowered
    request.sampling.min_tokens = 24
    fit_to_tensors(request, folder, limit // 2)
    assert request.max_tokens == 24
    with pytest.raises(InvalidArgumentError):
        check_tensors(request, folder, limit // 2)
    plain = pb.GenerateRequest(token_ids=pb.TokenIds(values=[1] * 10), max_tokens=8000)
    fit_to_tensors(plain, folder, 1)
    assert plain.max_tokens == 8000


def test_an_unknown_model_is_not_found(folder: ModelFolder) -> None:
    with pytest.raises(NotFoundError, match="smollm2") as raised:
        check_request(pb.GenerateRequest(model="another"), folder)
    assert raised.value.field == "model"


def test_the_length_of_a_prompt_is_checked_before_its_ids(folder: ModelFolder) -> None:
    """Otherwise millions of ids would be checked on the event loop."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(values=[VOCAB] * 8192))
    with pytest.raises(InvalidArgumentError, match="has 8192 tokens") as caught:
        check_request(request, folder)
    assert caught.value.field == "token_ids"


def test_output_fits_the_context(folder: ModelFolder) -> None:
    assert fit_to_context(100, None, folder) == 8092
    assert fit_to_context(100, 10, folder) == 10
    assert fit_to_context(100, 2**32 - 1, folder) == 8092
    assert fit_to_context(8191, None, folder) == 1
    with pytest.raises(InvalidArgumentError, match="8192") as raised:
        fit_to_context(8192, 1, folder)
    assert raised.value.field == "prompt"


def test_a_model_without_a_head_has_only_hidden_states(folder: ModelFolder) -> None:
    headless = replace(folder, has_head=False)
    states = pb.AdditionalOutput(name="hidden_states.3")
    check_request(output(detokenize=False, additional_outputs=[states]), headless)
    logits = pb.AdditionalOutput(name="token_logits.1")
    for refused in (
        pb.GenerateRequest(prompt="a"),
        output(detokenize=False),
        output(additional_outputs=[states]),
        output(detokenize=False, additional_outputs=[states, logits]),
        output(detokenize=False, additional_outputs=[states], return_context_logits=True),
        output(detokenize=False, additional_outputs=[states], log_probs=1),
    ):
        check_request(refused, folder)
        with pytest.raises(UnsupportedError, match="has no head and generates no text; use embeddings"):
            check_request(refused, headless)


def test_a_feature_that_the_workers_lack_is_unsupported() -> None:
    request = pb.GenerateRequest(lora=pb.LoraConfig(name="a"), sampling=pb.SamplingConfig(min_tokens=3))
    check_supported(request, frozenset(FEATURES))
    with pytest.raises(UnsupportedError, match="lora"):
        check_supported(request, frozenset(FEATURES) - {"lora"})
    with pytest.raises(UnsupportedError) as raised:
        check_supported(request, frozenset({"lora"}))
    assert raised.value.field == "sampling.min_tokens"
    check_supported(pb.GenerateRequest(), frozenset())
    check_supported(request, None)


def test_workers_of_the_previous_version_get_no_request_for_outputs_they_lack() -> None:
    request = output(additional_outputs=[pb.AdditionalOutput(name="token_logits.1.2")])
    check_supported(request, frozenset(FEATURES))
    with pytest.raises(UnsupportedError, match="lack token logits") as raised:
        check_supported(request, frozenset(FEATURES) - {"token_logits"})
    assert raised.value.field == "output.additional_outputs"


def test_a_post_processor_that_the_workers_lack_is_refused() -> None:
    request = pb.GenerateRequest(logits_post_processor_name="a")
    check_supported(request, frozenset(FEATURES) | {"logits_post_processor.a"})
    with pytest.raises(InvalidArgumentError) as raised:
        check_supported(request, frozenset(FEATURES))
    assert raised.value.field == "logits_post_processor_name"


def test_no_more_logits_than_a_small_vocabulary_has_are_returned(folder: ModelFolder) -> None:
    small = replace(folder, vocab_size=331)
    check_request(output(additional_outputs=[pb.AdditionalOutput(name="topk_logits.331")]), small)
    with pytest.raises(InvalidArgumentError, match="is 332; must be at most 331"):
        check_request(output(additional_outputs=[pb.AdditionalOutput(name="topk_logits.332")]), small)


def test_a_probe_gets_the_width_that_the_workers_have() -> None:
    request = output(additional_outputs=[pb.AdditionalOutput(name="topk_logits.5"), pb.AdditionalOutput(name="Own")])
    check_supported(request, frozenset(FEATURES) | {"output_probe.7.Own", "output_probe.2.Another"})
    assert [item.probe_width for item in request.output.additional_outputs] == [0, 7]


@pytest.mark.parametrize("name", ["weights.1", "hidden_states.03", "topk_logits.0", "token_logits.", "Own"])
def test_a_probe_that_the_workers_lack_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        check_supported(
            output(additional_outputs=[pb.AdditionalOutput(name=name)]), frozenset(FEATURES) | {"output_probe.7.own"}
        )
    assert raised.value.field == "output.additional_outputs.name"


def test_a_probe_is_unavailable_until_a_worker_has_registered() -> None:
    with pytest.raises(UnavailableError, match="'Own'"):
        check_supported(output(additional_outputs=[pb.AdditionalOutput(name="Own")]), None)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(max_tokens=2), "max_tokens"),
        (sampling(num_return_sequences=2), "sampling.num_return_sequences"),
        (output(additional_outputs=[pb.AdditionalOutput(name="pooled_states.cls", gather_context=True)]), "output."),
        (output(log_probs=1), "model"),
        (output(detokenize=True), "model"),
    ],
)
def test_an_encoder_gives_one_output_for_the_whole_prompt(
    folder: ModelFolder, request_: pb.GenerateRequest, field: str
) -> None:
    encoder = replace(folder, architecture="bert", has_head=False)
    plain = pb.GenerateRequest(max_tokens=1, output=pb.OutputConfig(detokenize=False))
    plain.output.additional_outputs.add(name="pooled_states.mean")
    check_request(plain, encoder)
    plain.MergeFrom(request_)
    with pytest.raises((InvalidArgumentError, UnsupportedError)) as raised:
        check_request(plain, encoder)
    assert raised.value.field.startswith(field)
