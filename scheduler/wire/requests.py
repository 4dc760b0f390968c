"""Converts GenerateRequest to the core's RequestSpec. This is the only place that fills in defaults."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import TypedDict

from midstream.extras import tensor_bytes
from midstream.receipts.digests import canonical_request
from protos import generation_pb2 as pb
from scheduler.core.request_spec import RequestSpec, RetentionRange

DEFAULT_MAX_TOKENS = 16_384
_NS_PER_MS, _NS_PER_S = 1_000_000, 1_000_000_000
_MAX_TIMEOUT_MS = 1 << 40  # the deadline in nanoseconds still fits into 64 bits


class _Retention(TypedDict, total=False):
    """The fields of RequestSpec that come from KvRetentionConfig; those that are not set keep their defaults."""

    retention: tuple[RetentionRange, ...]
    decode_priority: int
    decode_duration_ns: int


class _Adapters(TypedDict, total=False):
    """The fields of RequestSpec that come from LoraConfig and PromptTuningConfig."""

    lora_name: str
    lora_key: str
    lora_bytes: int
    prompt_key: str
    num_virtual_tokens: int


class _Beams(TypedDict, total=False):
    """The fields of RequestSpec that only beam search uses."""

    stop_words: tuple[str, ...]
    beam_width: int
    beam_diversity_rate: float
    length_penalty: float
    early_stopping: int


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Properties of the model that the conversion needs."""

    max_sequence_length: int
    end_ids: tuple[int, ...]
    vocab_size: int = 0
    hidden_size: int = 0


def spec_from_proto(
    request: pb.GenerateRequest, limits: ModelLimits, now_ns: int, arrival_ns: int | None = None
) -> RequestSpec:
    """Return the core's form of a request.

    Args:
        request: The request, checked by a router: token ids, request id and seed are set.
        now_ns: Arrival time at the scheduler, where the timeout starts.
        arrival_ns: Arrival time at the router by the scheduler's clock; by default, the request's own arrival time, by
            the wall clock.
    """
    named = _named_tokens(request.prompt_tuning.resolved) if request.HasField("prompt_tuning") else range(0)
    prompt = array("I", request.token_ids.values[:])
    if named:
        prompt = array("I", named) + prompt
    sampling, stopping, has_output = request.sampling, request.stopping, request.HasField("output")
    room = limits.max_sequence_length - len(prompt)
    max_tokens = request.max_tokens if request.HasField("max_tokens") else min(room, DEFAULT_MAX_TOKENS)
    if named:  # the router did not know the number of virtual tokens
        max_tokens = min(max_tokens, max(1, room))
    # Few requests have these fields, so the others skip their conversion.
    retention: _Retention = _retention(request.kv_retention) if request.HasField("kv_retention") else {}
    adapters: _Adapters = {}
    contents_digest = hashlib.sha256(canonical_request(request)).digest()
    if request.HasField("lora") or request.HasField("prompt_tuning"):
        adapters = _adapters(request, len(named))
    return RequestSpec(
        request_id=request.request_id,
        prompt=prompt,
        max_tokens=max_tokens,
        num_sequences=sampling.num_return_sequences or 1,
        stop_token_ids=stop_ids(stopping, limits),
        stop_sequences=tuple([tuple(word.values) for word in words]) if (words := stopping.stop_word_token_ids) else (),
        # A completed grammar overrides min_tokens, so that a stop token then ends the sequence.
        min_tokens=0
        if request.HasField("guided_decoding")
        else max(min_tokens - request.continuation.num_output_tokens, 0)
        if (min_tokens := sampling.min_tokens)
        else 0,
        num_draft_tokens=_num_draft_tokens(request) if request.HasField("speculative") else 0,
        client_id=request.client_id,
        priority=request.priority,
        cache_salt=request.cache_salt,
        is_detached=request.detached,
        is_cacheable=not has_output or _is_cacheable(request),
        tensor_bytes=tensor_bytes(request, len(prompt), limits.vocab_size, limits.hidden_size) if has_output else 0,
        attached_bytes=_attached_bytes(request),
        arrival_ns=request.arrival_time_unix_ns if arrival_ns is None else arrival_ns,
        deadline_ns=now_ns + min(request.timeout_ms, _MAX_TIMEOUT_MS) * _NS_PER_MS
        if request.HasField("timeout_ms")
        else None,
        digest=_digest(contents_digest, request.attachment),
        contents_digest=contents_digest,
        keep_ns=request.keep_s * _NS_PER_S,
        wants_log_probs=has_output and request.output.HasField("log_probs"),
        tokenizer_fingerprint=request.tokenizer_fingerprint,
        receipt_nonce=request.receipt_nonce,
        payload=request.SerializeToString(),
        **(_beams(request) if sampling.beam_width > 1 else {}),
        **retention,
        **adapters,
    )


def _beams(request: pb.GenerateRequest) -> _Beams:
    sampling = request.sampling
    return {
        "stop_words": tuple(request.stopping.stop_words),
        "beam_width": sampling.beam_width,
        "beam_diversity_rate": sampling.beam_search_diversity_rate,
        "length_penalty": sampling.length_penalty,
        "early_stopping": sampling.early_stopping if sampling.HasField("early_stopping") else 1,
    }


def _named_tokens(virtual: pb.ResolvedAdapter) -> range:
    """Return the ids of a prompt adapter's virtual tokens."""
    return range(virtual.first_virtual_token, virtual.first_virtual_token + virtual.num_virtual_tokens)


def _adapters(request: pb.GenerateRequest, num_named: int) -> _Adapters:
    lora, tuning = request.lora, request.prompt_tuning
    return {
        "lora_name": lora.name,
        "lora_key": lora.resolved.fingerprint,
        "lora_bytes": lora.resolved.num_bytes,
        "prompt_key": _prompt_key(tuning),
        "num_virtual_tokens": num_named or (tuning.table.shape[:1] or [0])[0],
    }


def stop_ids(stopping: pb.StoppingConfig, limits: ModelLimits) -> frozenset[int]:
    """Return the tokens that end a sequence: the end ids unless they are ignored, and the stop tokens."""
    ends: tuple[int, ...] = ()
    if not stopping.ignore_eos:
        ends = (stopping.end_id,) if stopping.HasField("end_id") else limits.end_ids
    return frozenset([*ends, *tokens]) if (tokens := stopping.stop_token_ids) else frozenset(ends)


def _num_draft_tokens(request: pb.GenerateRequest) -> int:
    """Return the number of draft tokens per step; 0 if the request uses features that need one token at a time."""
    output = request.output
    has_tensors = output.return_generation_logits or len(output.additional_outputs) > 0
    is_stepwise = request.HasField("guided_decoding") or bool(request.logits_post_processor_name)
    if request.sampling.beam_width > 1 or has_tensors or is_stepwise:
        return 0
    return request.speculative.num_draft_tokens


def _is_cacheable(request: pb.GenerateRequest) -> bool:
    """Return whether cached blocks can be used, which is not the case for requests that need logits of the prompt."""
    output = request.output
    wants_prompt = output.HasField("prompt_log_probs") or output.return_context_logits
    wants_prompt = wants_prompt or any(item.gather_context for item in output.additional_outputs)
    return not wants_prompt


def _attached_bytes(request: pb.GenerateRequest) -> int:
    num_bytes = len(request.attachment)
    if request.HasField("prompt_tuning"):
        num_bytes += len(request.prompt_tuning.table.data)
    return num_bytes


def _prompt_key(tuning: pb.PromptTuningConfig) -> str:
    """Return a key for the embeddings of virtual tokens, which are not identified by their ids."""
    if not tuning.HasField("table"):
        return tuning.resolved.fingerprint
    table = tuning.table
    digest = hashlib.blake2b(f"{table.dtype} {list(table.shape)} ".encode(), digest_size=16)
    digest.update(table.data)
    return digest.hexdigest()


def _retention(config: pb.KvRetentionConfig) -> _Retention:
    found: _Retention = {"retention": tuple(map(_retention_range, config.token_ranges))}
    if config.HasField("decode_priority"):
        found["decode_priority"] = config.decode_priority
    if config.HasField("decode_duration_ms"):
        found["decode_duration_ns"] = config.decode_duration_ms * _NS_PER_MS
    return found


def _retention_range(item: pb.KvRetentionConfig.TokenRange) -> RetentionRange:
    return RetentionRange(
        start=item.start,
        end=item.end if item.HasField("end") else None,
        priority=item.priority,
        duration_ns=item.duration_ms * _NS_PER_MS if item.HasField("duration_ms") else None,
    )


def _digest(contents_digest: bytes, attachment: bytes) -> bytes:
    """Return a hash of a request without the fields that differ in a repeated Submit, none of which is in the canonical
    request.
    """
    return (hashlib.sha256(contents_digest + attachment).digest() if attachment else contents_digest)[:16]
