"""Converts between messages of the worker protocol and the core's events and effects."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

from google.protobuf.message import DecodeError

from protos import generation_pb2, worker_pb2
from scheduler.core.effects import AddedSequence, StepPlan
from scheduler.core.events import (
    BlocksFetched,
    StepDone,
    WeightsHashed,
    WorkerBeat,
    WorkerFailed,
    WorkerLeft,
    WorkerLost,
    WorkerRegistered,
)
from scheduler.core.failure import Failure
from scheduler.core.request_spec import RequestSpec
from scheduler.wire.kinds import kind_from_proto
from scheduler.wire.worker_checks import check_worker_message, is_plain_result

# The fields of StepBatch that have the same name and contents in StepPlan.
STEP_LISTS = (
    "released_rows", "context_rows", "context_starts", "context_lengths", "generation_rows", "idle_rows", "block_rows",
    "block_ids", "copy_source_blocks", "copy_target_blocks", "beam_rows", "beam_token_ids", "draft_rows",
    "draft_limits", "hashed_blocks", "block_hashes", "adopted_blocks", "adopted_hashes", "ahead_hashes",
    "retained_hashes", "retained_priorities", "retained_ms",
)  # fmt: skip
_lists_of = attrgetter(*STEP_LISTS)
# The fields that WorkerRegistered and Register have in common, except the kind, and the list fields among them.
REGISTRATION_FIELDS = tuple(
    item.name for item in fields(WorkerRegistered) if item.name not in ("time_ns", "connection", "kind")
)
_REGISTRATION_LISTS = tuple(item.name for item in fields(WorkerRegistered) if item.default == ())

WorkerEvent = (
    WorkerRegistered | WeightsHashed | WorkerBeat | WorkerLeft | WorkerLost | WorkerFailed | StepDone | BlocksFetched
)

# Messages that are not events of the core.
WorkerAnswer = worker_pb2.LoraResult | worker_pb2.StepOutputs | worker_pb2.ImageEncoded | worker_pb2.WeightsPrepared


def decode_worker_message(frame: bytes, connection: bytes, time_ns: int) -> WorkerEvent | WorkerAnswer:
    """Return the event for a worker's message.

    Raises:
        ValueError: The frame is not a WorkerMessage. If it is an invalid one, the error is a WrongMessageError.
    """
    message = worker_pb2.WorkerMessage()
    try:
        message.ParseFromString(frame)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    kind = message.WhichOneof("message")
    if kind == "step_result":
        return _step_done(message, connection, time_ns)
    check_worker_message(message)
    if kind == "heartbeat":
        beat = message.heartbeat
        memory = (beat.memory.cpu_bytes, beat.memory.gpu_bytes, beat.memory.pinned_bytes)
        stored, removed = tuple(beat.stored_hashes), tuple(beat.removed_hashes)
        return WorkerBeat(time_ns, connection, beat.epoch, beat.last_step_id, memory, stored, removed)
    if kind == "register":
        return _registered(message.register, connection, time_ns)
    if kind in ("weights_hashed", "leave", "blocks_fetched"):
        return _notice(message, connection, time_ns)
    if kind == "lora_result":
        return message.lora_result
    if kind == "image_encoded":
        return message.image_encoded
    if kind == "weights_prepared":
        return message.weights_prepared
    if kind == "step_outputs":
        return message.step_outputs
    raise ValueError("the message is empty")


def _notice(
    message: worker_pb2.WorkerMessage, connection: bytes, time_ns: int
) -> WeightsHashed | WorkerLeft | BlocksFetched:
    if message.HasField("leave"):
        leave = message.leave
        return WorkerLeft(time_ns, connection, leave.epoch, leave.reason, leave.leaves_blocks)
    if message.HasField("weights_hashed"):
        hashed = message.weights_hashed
        return WeightsHashed(time_ns, connection, hashed.epoch, hashed.weights_root, hashed.block_kind)
    fetched = message.blocks_fetched
    return BlocksFetched(
        time_ns, connection, fetched.epoch, tuple(fetched.fetched_hashes), tuple(fetched.missing_hashes)
    )


def _registered(message: worker_pb2.Register, connection: bytes, time_ns: int) -> WorkerRegistered:
    values = {name: getattr(message, name) for name in REGISTRATION_FIELDS}
    values |= {name: tuple(values[name]) for name in _REGISTRATION_LISTS}
    values["num_micro_batches"] = message.num_micro_batches or 1
    return WorkerRegistered(time_ns, connection, kind=kind_from_proto(message.kind), **values)


def _step_done(message: worker_pb2.WorkerMessage, connection: bytes, time_ns: int) -> StepDone:
    result = message.step_result
    if is_plain_result(result):
        epoch, step_id, tokens = result.epoch, result.step_id, result.token_ids[:]
        forward_us, waiting_us = result.forward_us, result.waiting_us
        return StepDone(time_ns, connection, epoch, step_id, tokens, forward_us=forward_us, waiting_us=waiting_us)
    check_worker_message(message)
    return StepDone(
        time_ns=time_ns,
        connection=connection,
        epoch=result.epoch,
        step_id=result.step_id,
        token_ids=list(result.token_ids),
        num_tokens=list(result.num_tokens),
        failures=tuple((item.row, _failure(item.error)) for item in result.errors),
        outputs=tuple((item.row, item.SerializeToString()) for item in result.outputs),
        forward_us=result.forward_us,
        waiting_us=result.waiting_us,
        num_draft_tokens=result.num_draft_tokens,
        num_accepted_tokens=result.num_accepted_tokens,
        candidate_log_probs=list(result.candidate_log_probs),
        candidate_stop_words=list(result.candidate_stop_words),
        num_drafts=list(result.num_drafts),
        missing_blocks=frozenset(result.missing_blocks),
        logit_digests=tuple(result.logit_digests),
    )


def _failure(error: generation_pb2.ErrorInfo) -> Failure:
    return Failure(error.code, error.message, error.field)


def encode_step(plan: StepPlan) -> bytes:
    """Return a serialized SchedulerMessage with the plan as a StepBatch."""
    message = worker_pb2.SchedulerMessage()
    batch = message.step_batch
    batch.epoch = plan.epoch
    batch.step_id = plan.step_id
    batch.repeat_generation = plan.repeats_generation
    batch.reports_digests = plan.reports_digests
    lists = _lists_of(plan)
    if any(lists):
        for name, values in zip(STEP_LISTS, lists, strict=True):
            if values:
                getattr(batch, name).extend(values)
    for fork in plan.forks:
        batch.forks.add(from_row=fork.from_row, to_row=fork.to_row, block_ids=fork.block_ids)
    for added in plan.added:
        _encode_added(added, batch.add_sequences.add())
    return message.SerializeToString()


def _set_stop_words(
    spec: RequestSpec, request: generation_pb2.GenerateRequest, message: worker_pb2.BeamStopWords
) -> None:
    output = request.output
    message.words.extend(spec.stop_words)
    message.min_tokens = spec.min_tokens
    message.follows_prompt = output.HasField("exclude_input_from_output") and not output.exclude_input_from_output
    message.skip_special_tokens = output.skip_special_tokens if output.HasField("skip_special_tokens") else True
    message.include_stop_in_output = request.stopping.include_stop_in_output


def _set_prompt_tuning(
    spec: RequestSpec, tuning: generation_pb2.PromptTuningConfig, message: worker_pb2.AddSequence
) -> None:
    if tuning.HasField("table"):
        message.prompt_table = spec.prompt_key
    elif tuning.WhichOneof("source") == "name":
        message.prompt_tuning.CopyFrom(tuning)


def _encode_added(added: AddedSequence, message: worker_pb2.AddSequence) -> None:
    sequence, spec = added.sequence, added.sequence.request.spec
    request = generation_pb2.GenerateRequest.FromString(spec.payload)
    continuation = request.continuation
    message.row = added.row
    message.request_id = spec.request_id
    # At most one sequence has a continuation, so that its index is 0 here.
    message.sequence_index = sequence.index + continuation.sequence_index
    message.token_ids.extend(spec.prompt)
    if added.num_output_tokens:
        message.token_ids.extend(sequence.output[: added.num_output_tokens])
    message.num_given_tokens = continuation.num_output_tokens
    message.num_prompt_tokens = len(spec.prompt) - continuation.num_output_tokens
    message.block_ids.extend(added.block_ids)
    message.sampling.CopyFrom(request.sampling)
    if spec.stop_token_ids:
        message.end_ids.extend(sorted(spec.stop_token_ids))
    if request.stopping.bad_word_token_ids:
        message.bad_words.extend(request.stopping.bad_word_token_ids)
    if request.HasField("output") and not sequence.request.is_check:
        message.output.CopyFrom(request.output)
    if spec.beam_width > 1 and (spec.stop_words or spec.stop_sequences):
        _set_stop_words(spec, request, message.beam_stop_words)
    for name in ("guided_decoding", "lora", "speculative"):
        if request.HasField(name):
            getattr(message, name).CopyFrom(getattr(request, name))
    if request.HasField("prompt_tuning"):
        _set_prompt_tuning(spec, request.prompt_tuning, message)
    message.logits_post_processor_name = request.logits_post_processor_name
    message.client_id = request.client_id
    message.trace_parent = request.trace_parent
