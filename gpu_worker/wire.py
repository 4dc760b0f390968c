"""Translates between the wire's messages and the worker's plain types."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gpu_worker.step import Fork, IntArray, NewSequence, RowLogProbs, SamplingParams, Step, StepOutput
from midstream.errors import MidstreamError, UnsupportedError
from protos import generation_pb2, worker_pb2

PROTOCOL_VERSION = 1
# Optional features that this worker has; what a request asks beyond them fails that request alone.
FEATURES = (
    "bad_words",
    "embedding_bias",
    "log_probs",
    "min_tokens",
    "no_repeat_ngram",
    "penalties",
    "top_p_decay",
)


def decode_step(message: worker_pb2.StepBatch) -> Step:
    """The step that `message` describes.

    Raises:
        ValueError: Parallel arrays differ in length, or a number does not fit.
    """
    step = Step(
        epoch=message.epoch,
        step_id=message.step_id,
        released_rows=_ints(message.released_rows),
        new_sequences=tuple(_sequence(item) for item in message.add_sequences),
        forks=tuple(Fork(item.from_row, item.to_row, _ints(item.block_ids)) for item in message.forks),
        block_rows=_ints(message.block_rows),
        block_ids=_ints(message.block_ids),
        copy_sources=_ints(message.copy_source_blocks),
        copy_targets=_ints(message.copy_target_blocks),
        context_rows=_ints(message.context_rows),
        context_starts=_ints(message.context_starts),
        context_lengths=_ints(message.context_lengths),
        context_without_sample=_ints(message.context_without_sample),
        repeat_generation=message.repeat_generation,
        generation_rows=_ints(message.generation_rows),
        idle_rows=_ints(message.idle_rows),
    )
    if not len(step.context_rows) == len(step.context_starts) == len(step.context_lengths):
        raise ValueError("context arrays differ in length")
    if len(step.block_rows) != len(step.block_ids) or len(step.copy_sources) != len(step.copy_targets):
        raise ValueError("block arrays differ in length")
    return step


def encode_result(epoch: int, step_id: int, output: StepOutput, waiting_s: float) -> worker_pb2.StepResult:
    """The message that carries `output`."""
    return worker_pb2.StepResult(
        epoch=epoch,
        step_id=step_id,
        token_ids=output.token_ids.tolist(),
        outputs=[_row_outputs(item) for item in output.log_probs],
        errors=[worker_pb2.RowError(row=row, error=error.to_proto()) for row, error in output.errors],
        forward_us=int(output.forward_s * 1e6),
        waiting_us=int(waiting_s * 1e6),
    )


def _sequence(message: worker_pb2.AddSequence) -> NewSequence:
    return NewSequence(
        row=message.row,
        token_ids=_ints(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        block_ids=_ints(message.block_ids),
        sampling=_sampling(message),
        sequence_index=message.sequence_index,
        request_id=message.request_id,
        error=_unsupported(message),
    )


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
        embedding_bias=tuple(sorted(sampling.embedding_bias.items())),
        bad_words=tuple(tuple(word.values) for word in message.bad_words),
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        top_p_decay=sampling.top_p_decay if sampling.HasField("top_p_decay") else 1.0,
        top_p_min=sampling.top_p_min if sampling.HasField("top_p_min") else 1e-6,
        top_p_reset_id=sampling.top_p_reset_id if sampling.HasField("top_p_reset_id") else -1,
        end_ids=tuple(message.end_ids),
        log_probs=output.log_probs if output.HasField("log_probs") else None,
    )


def _unsupported(message: worker_pb2.AddSequence) -> MidstreamError | None:
    sampling, output = message.sampling, message.output
    wanted = {
        "sampling.beam_width": sampling.beam_width > 1,
        "output.prompt_log_probs": output.HasField("prompt_log_probs"),
        "output.return_context_logits": output.return_context_logits,
        "output.return_generation_logits": output.return_generation_logits,
        "output.additional_outputs": len(output.additional_outputs) > 0,
        "guided_decoding": message.HasField("guided_decoding"),
        "lora": message.HasField("lora"),
        "prompt_tuning": message.HasField("prompt_tuning"),
        "prompt_tuning.table": bool(message.prompt_table),
        "logits_post_processor_name": bool(message.logits_post_processor_name),
    }
    for field, is_wanted in wanted.items():
        if is_wanted:
            return UnsupportedError("this worker does not support it", field=field)
    return None


def _row_outputs(item: RowLogProbs) -> worker_pb2.RowOutputs:
    log_probs = generation_pb2.LogProbs(
        token_log_probs=[item.token_log_prob],
        top_k=len(item.top_token_ids),
        top_token_ids=item.top_token_ids,
        top_log_probs=item.top_log_probs,
        token_ranks=[item.token_rank],
    )
    return worker_pb2.RowOutputs(row=item.row, log_probs=log_probs)


def _ints(values: Iterable[int]) -> IntArray:
    try:
        return np.array(list(values), dtype=np.int32)
    except OverflowError as error:
        raise ValueError(str(error)) from error
