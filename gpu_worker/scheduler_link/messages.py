"""Converts between protobuf messages and the worker's plain types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from gpu_worker.batch.step import (
    AdapterRef,
    BeamStop,
    Fork,
    HashArray,
    IntArray,
    NewSequence,
    SamplingParams,
    Step,
    StepOutput,
)
from gpu_worker.scheduler_link.outputs import encode_tensors, output_params, prompt_outputs, row_outputs
from midstream.errors import MidstreamError, UnsupportedError
from midstream.grammar.process import guide_of, is_available
from protos import generation_pb2, worker_pb2

PROTOCOL_VERSION = 1
# Optional features of this worker; requests that need others fail individually.
FEATURES = (
    "additional_outputs",
    "allowed_tokens",
    "bad_words",
    "beam_search",
    "context_logits",
    "continuation",
    "embedding_bias",
    "generation_logits",
    "log_probs",
    "min_tokens",
    "no_repeat_ngram",
    "penalties",
    "prompt_log_probs",
    "prompt_tuning",
    "sampling_outputs",
    "speculative",
    "token_logits",
    "top_p_decay",
)
# Those of encoders. With `whole_prompts`, steps must contain whole prompts, and no cached prefix can be used.
ENCODER_FEATURES = ("additional_outputs", "token_logits", "whole_prompts")


def decode_step(message: worker_pb2.StepBatch) -> Step:
    """Convert `message` to a step.

    Raises:
        ValueError: Parallel arrays differ in length, or a number is out of range.
    """
    # Most steps set a few fields only, and each lookup of a field that is not set would create an object.
    fields: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        found = _STEP_FIELDS.get(descriptor.name)
        if found is not None:
            name, convert = found
            fields[name] = convert(value)
    step = Step(**fields)
    if not len(step.context_rows) == len(step.context_starts) == len(step.context_lengths):
        raise ValueError("context arrays differ in length")
    if len(step.block_rows) != len(step.block_ids) or len(step.copy_sources) != len(step.copy_targets):
        raise ValueError("block arrays differ in length")
    if len(step.beam_rows) != len(step.beam_tokens) or len(step.draft_rows) != len(step.draft_limits):
        raise ValueError("beam or draft arrays differ in length")
    if len(step.adopted_blocks) != len(step.adopted_hashes):
        raise ValueError("adoption arrays differ in length")
    if not len(message.retained_hashes) == len(message.retained_priorities) == len(message.retained_ms):
        raise ValueError("retention arrays differ in length")
    return step


def encode_result(epoch: int, step_id: int, output: StepOutput, waiting_s: float) -> Iterator[worker_pb2.WorkerMessage]:
    """Yield the messages that carry `output`: those with tensors, then the result itself."""
    for outputs in encode_tensors(output.tensors):
        yield worker_pb2.WorkerMessage(
            step_outputs=worker_pb2.StepOutputs(epoch=epoch, step_id=step_id, outputs=outputs)
        )
    result = worker_pb2.StepResult(
        epoch=epoch,
        step_id=step_id,
        token_ids=output.token_ids.tolist(),
        forward_us=int(output.forward_s * 1e6),
        waiting_us=int(waiting_s * 1e6),
    )
    if output.num_tokens or output.num_drafts:
        result.num_tokens.extend(output.num_tokens)
        result.num_drafts.extend(output.num_drafts)
        result.num_draft_tokens = sum(output.num_drafts)
        result.num_accepted_tokens = sum(
            count - 1 for count, drafts in zip(output.num_tokens, output.num_drafts, strict=False) if drafts
        )
    if output.prompt_log_probs or output.log_probs:
        result.outputs.extend(map(prompt_outputs, output.prompt_log_probs))
        result.outputs.extend(map(row_outputs, output.log_probs))
    if output.candidate_log_probs:
        result.candidate_log_probs.extend(output.candidate_log_probs)
        result.candidate_stop_words.extend(output.candidate_stop_words)
    if output.logit_digests:
        result.logit_digests.extend(output.logit_digests)
    if output.missing_blocks:
        result.missing_blocks.extend(output.missing_blocks)
    for row, error in output.errors:
        result.errors.add(row=row, error=error.to_proto())
    yield worker_pb2.WorkerMessage(step_result=result)


def _sequence(message: worker_pb2.AddSequence) -> NewSequence:
    return NewSequence(
        row=message.row,
        token_ids=_ints(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_given_tokens=message.num_given_tokens,
        block_ids=_ints(message.block_ids),
        sampling=_sampling(message),
        outputs=output_params(message.output),
        post_processor=message.logits_post_processor_name,
        client_id=message.client_id,
        guide=guide_of(message.guided_decoding) if message.HasField("guided_decoding") else None,
        sequence_index=message.sequence_index,
        request_id=message.request_id,
        lora=_adapter(message.lora) if message.HasField("lora") else None,
        prompt=_adapter(message.prompt_tuning) if message.HasField("prompt_tuning") else None,
        prompt_table_key=message.prompt_table,
        trace_parent=message.trace_parent,
        error=_unsupported(message),
    )


def _adapter(config: generation_pb2.LoraConfig | generation_pb2.PromptTuningConfig) -> AdapterRef:
    return AdapterRef(config.name, config.resolved.path, config.resolved.fingerprint)


def _sampling(message: worker_pb2.AddSequence) -> SamplingParams:
    sampling, output = message.sampling, message.output
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        penalize_prompt=sampling.penalize_prompt,
        embedding_bias=tuple(sorted(sampling.embedding_bias.items())),
        bad_words=tuple(tuple(word.values) for word in message.bad_words),
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        top_p_decay=sampling.top_p_decay if sampling.HasField("top_p_decay") else 1.0,
        top_p_min=sampling.top_p_min if sampling.HasField("top_p_min") else 1e-6,
        top_p_reset_id=sampling.top_p_reset_id if sampling.HasField("top_p_reset_id") else -1,
        end_ids=tuple(message.end_ids),
        log_probs=output.log_probs if output.HasField("log_probs") else None,
        beam_width=sampling.beam_width or 1,
        beam_stop=_beam_stop(message.beam_stop_words) if message.HasField("beam_stop_words") else None,
        num_draft_tokens=message.speculative.num_draft_tokens,
        max_ngram_size=_max_ngram_size(message.speculative),
        prediction=tuple(message.speculative.prediction_token_ids),
    )


def _beam_stop(message: worker_pb2.BeamStopWords) -> BeamStop:
    return BeamStop(
        words=tuple(message.words),
        min_tokens=message.min_tokens,
        follows_prompt=message.follows_prompt,
        skip_special_tokens=message.skip_special_tokens,
        include_stop=message.include_stop_in_output,
    )


def _max_ngram_size(config: generation_pb2.SpeculativeConfig) -> int:
    if config.method == generation_pb2.SpeculativeConfig.METHOD_DRAFT_MODEL:
        return 0
    return config.max_ngram_size if config.HasField("max_ngram_size") else 3


def _unsupported(message: worker_pb2.AddSequence) -> MidstreamError | None:
    if message.HasField("guided_decoding") and not is_available():
        return UnsupportedError("this worker lacks the library for grammars", field="guided_decoding")
    return None


def _ints(values: Iterable[int]) -> IntArray:
    try:
        return np.array(list(values), dtype=np.int32)
    except OverflowError as error:
        raise ValueError(str(error)) from error


def _sequences(messages: Iterable[worker_pb2.AddSequence]) -> tuple[NewSequence, ...]:
    return tuple(map(_sequence, messages))


def _forks(messages: Iterable[worker_pb2.ForkRow]) -> tuple[Fork, ...]:
    return tuple(Fork(item.from_row, item.to_row, _ints(item.block_ids)) for item in messages)


def _hashes(values: Iterable[int]) -> HashArray:
    return np.array(list(values), dtype=np.uint64)


# For each field of StepBatch, the field of Step and its conversion. The other fields are read by KeptBlocks and
# KvTiers.
_STEP_FIELDS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "epoch": ("epoch", int),
    "step_id": ("step_id", int),
    "released_rows": ("released_rows", _ints),
    "add_sequences": ("new_sequences", _sequences),
    "forks": ("forks", _forks),
    "block_rows": ("block_rows", _ints),
    "block_ids": ("block_ids", _ints),
    "copy_source_blocks": ("copy_sources", _ints),
    "copy_target_blocks": ("copy_targets", _ints),
    "context_rows": ("context_rows", _ints),
    "context_starts": ("context_starts", _ints),
    "context_lengths": ("context_lengths", _ints),
    "repeat_generation": ("repeat_generation", bool),
    "generation_rows": ("generation_rows", _ints),
    "idle_rows": ("idle_rows", _ints),
    "beam_rows": ("beam_rows", _ints),
    "beam_token_ids": ("beam_tokens", _ints),
    "draft_rows": ("draft_rows", _ints),
    "draft_limits": ("draft_limits", _ints),
    "adopted_blocks": ("adopted_blocks", _ints),
    "adopted_hashes": ("adopted_hashes", _hashes),
    "reports_digests": ("reports_digests", bool),
}
