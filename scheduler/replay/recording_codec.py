"""Converts the core's events and effects to records of a recording, and back."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence as TypingSequence

from protos import recording_pb2 as pb
from protos import worker_pb2
from scheduler.core.beams import BeamStep
from scheduler.core.config import CoreConfig
from scheduler.core.effects import Effect, RequestEnded, StepPlan
from scheduler.core.events import (
    AbortRequested,
    Attached,
    BlocksFetched,
    Detached,
    DrainStarted,
    Event,
    GenerationPaused,
    GenerationResumed,
    Recovered,
    SleepSet,
    StepDone,
    StopWordFound,
    Submitted,
    Turn,
    WeightsChanged,
    WeightsHashed,
    WorkerBeat,
    WorkerFailed,
    WorkerLeft,
    WorkerLost,
    WorkerRegistered,
)
from scheduler.core.pause_mode import PauseMode
from scheduler.core.request import Finish, FinishReason, RequestTimes, SequenceEnd
from scheduler.core.request_spec import RequestSpec, RetentionRange
from scheduler.wire.kinds import earlier_from_proto, earlier_to_proto, kind_from_proto, kind_to_proto
from scheduler.wire.worker_messages import REGISTRATION_FIELDS, STEP_LISTS, WorkerAnswer, decode_worker_message

_OTHER_SPEC_FIELDS = {
    "prompt", "stop_token_ids", "stop_sequences", "stop_words", "retention", "deadline_ns", "decode_duration_ns"
}  # fmt: skip
_UNRECORDED_SPEC_FIELDS = {
    "keep_ns", "wants_log_probs", "tokenizer_fingerprint", "receipt_nonce", "contents_digest", "payload"
}  # fmt: skip
_SPEC_FIELDS = tuple(
    item.name
    for item in dataclasses.fields(RequestSpec)
    if item.name not in _OTHER_SPEC_FIELDS | _UNRECORDED_SPEC_FIELDS
)
_WITH_ONE_FIELD: dict[type[AbortRequested | Attached | Detached | WorkerLost], str] = {
    AbortRequested: "abort_requested",
    Attached: "attached",
    Detached: "detached",
    WorkerLost: "worker_lost",
}
# The recorded list fields: all except block hashes, which follow from tables and tokens, and retention.
_PLAN_LISTS = tuple(name for name in STEP_LISTS if name in pb.RecordedPlan.DESCRIPTOR.fields_by_name)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The part of an event's effects that is recorded: plans, and the ends of ended requests' sequences by index.

    A stop word may change an end later, so an outcome must be taken before the next event.
    """

    plans: list[StepPlan]
    ends: list[tuple[str, list[tuple[int, SequenceEnd]]]]

    @classmethod
    def of(cls, effects: TypingSequence[Effect]) -> Outcome:
        """Return the outcome of an event with these effects."""
        outcome = cls([], [])
        for effect in effects:
            if isinstance(effect, StepPlan):
                outcome.plans.append(effect)
            elif isinstance(effect, RequestEnded):
                ends = [(sequence.index, sequence.end) for sequence in effect.sequences if sequence.end is not None]
                outcome.ends.append((effect.request.request_id, ends))
        return outcome


def encode_record(event: Event, outcome: Outcome) -> pb.Record:
    """Return the record of an event with this outcome."""
    record = pb.Record(time_ns=event.time_ns)
    if isinstance(event, Turn):
        record.turn = True
    elif isinstance(event, StepDone | WeightsHashed | WorkerBeat | WorkerRegistered | WorkerLeft | BlocksFetched):
        record.worker_message.connection = event.connection
        record.worker_message.frame = _encode_worker_event(event)
    elif isinstance(event, WorkerFailed):
        record.worker_failed.connection, record.worker_failed.reason = event.connection, event.reason
    elif isinstance(event, Submitted):
        _encode_spec(event.spec, record.submitted)
    elif isinstance(event, Recovered):
        _encode_recovered(event, record.recovered)
    elif isinstance(event, AbortRequested | Attached | Detached | WorkerLost):
        value = event.connection if isinstance(event, WorkerLost) else event.request_id
        setattr(record, _WITH_ONE_FIELD[type(event)], value)
    elif isinstance(event, StopWordFound):
        for name in ("request_id", "sequence_index", "num_tokens", "stop_word"):
            setattr(record.stop_word_found, name, getattr(event, name))
    else:
        _encode_administration(event, record)
    encode_outcome(outcome, record)
    return record


def encode_outcome(outcome: Outcome, record: pb.Record) -> None:
    """Add an outcome to a record."""
    for plan in outcome.plans:
        _encode_plan(plan, record.plans.add())
    for request_id, ends in outcome.ends:
        message = record.ends.add(request_id=request_id)
        for index, end in ends:
            _encode_end(index, end, message.sequences.add())


def decode_event(record: pb.Record) -> Event:
    """Return the event in a record other than a start record. Raises ValueError if it has no known event."""
    kind, time_ns = record.WhichOneof("event"), record.time_ns
    if kind == "turn":
        return Turn(time_ns)
    if kind == "worker_message":
        message = record.worker_message
        event = decode_worker_message(message.frame, message.connection, time_ns)
        assert not isinstance(event, WorkerAnswer)
        return event
    if kind == "worker_failed":
        return WorkerFailed(time_ns, record.worker_failed.connection, record.worker_failed.reason)
    if kind == "submitted":
        return Submitted(time_ns, _decode_spec(record.submitted))
    if kind == "recovered":
        return _decode_recovered(record.recovered, time_ns)
    if kind == "stop_word_found":
        found = record.stop_word_found
        return StopWordFound(time_ns, found.request_id, found.sequence_index, found.num_tokens, found.stop_word)
    for event_type, name in _WITH_ONE_FIELD.items():
        if kind == name:
            return event_type(time_ns, getattr(record, name))
    return _decode_administration(record)


def _encode_administration(
    event: DrainStarted | WeightsChanged | GenerationPaused | GenerationResumed | SleepSet, record: pb.Record
) -> None:
    if isinstance(event, WeightsChanged):
        record.weights_changed.model_fingerprint = event.model_fingerprint
        record.weights_changed.weights_root = event.weights_root
        record.weights_changed.weights_version = event.weights_version
    elif isinstance(event, GenerationPaused):
        record.generation_paused = event.mode
    elif isinstance(event, GenerationResumed):
        record.generation_resumed = True
    elif isinstance(event, SleepSet):
        record.sleep_set.level, record.sleep_set.is_held = event.level, event.is_held
    else:
        record.drain_started = True


def _decode_administration(record: pb.Record) -> Event:
    kind, time_ns = record.WhichOneof("event"), record.time_ns
    if kind == "drain_started":
        return DrainStarted(time_ns)
    if kind == "weights_changed":
        changed = record.weights_changed
        return WeightsChanged(time_ns, changed.model_fingerprint, changed.weights_root, changed.weights_version)
    if kind == "generation_paused":
        return GenerationPaused(time_ns, PauseMode(record.generation_paused))
    if kind == "generation_resumed":
        return GenerationResumed(time_ns)
    if kind == "sleep_set":
        return SleepSet(time_ns, record.sleep_set.level, record.sleep_set.is_held)
    raise ValueError(f"unknown event kind in a record: {kind or 'none'}")


def encode_config(config: CoreConfig) -> pb.RecordedCoreConfig:
    """Convert the core's settings to a message."""
    return pb.RecordedCoreConfig(**{item.name: getattr(config, item.name) for item in dataclasses.fields(config)})


def decode_config(config: pb.RecordedCoreConfig) -> CoreConfig:
    """Convert the core's settings from a message."""
    return CoreConfig(**{item.name: getattr(config, item.name) for item in dataclasses.fields(CoreConfig)})


def _encode_recovered(event: Recovered, message: pb.RecordedRecovery) -> None:
    _encode_spec(event.spec, message.request)
    for output in event.outputs:
        message.outputs.add(token_ids=output)
    for index, end in event.ends:
        _encode_end(index, end, message.ends.add())
    for step in event.beam_steps:
        message.beam_steps.add(
            parents=step.parents, token_ids=step.token_ids, log_probs=step.log_probs, stop_words=step.stop_words
        )
    if event.finish is not None:
        message.finished_ns = event.finish.times.finished_ns
    if event.kind is not None:
        message.kind.CopyFrom(kind_to_proto(event.kind))
    message.kind_changed_at.extend(event.kind_changed_at)
    message.earlier_kinds.extend(earlier_to_proto(event.earlier_kinds))


def _decode_recovered(message: pb.RecordedRecovery, time_ns: int) -> Recovered:
    return Recovered(
        time_ns,
        _decode_spec(message.request),
        tuple(array("I", output.token_ids) for output in message.outputs),
        tuple(
            (end.sequence_index, SequenceEnd(FinishReason(end.reason), end.num_tokens, end.stop_word))
            for end in message.ends
        ),
        finish=Finish(RequestTimes(finished_ns=message.finished_ns)) if message.HasField("finished_ns") else None,
        beam_steps=tuple(
            BeamStep(
                tuple(step.parents), tuple(step.token_ids), tuple(step.log_probs), stop_words=tuple(step.stop_words)
            )
            for step in message.beam_steps
        ),
        kind=kind_from_proto(message.kind) if message.HasField("kind") else None,
        kind_changed_at=tuple(message.kind_changed_at),
        earlier_kinds=earlier_from_proto(message.earlier_kinds),
    )


def _encode_end(index: int, end: SequenceEnd, message: pb.RecordedSequenceEnd) -> None:
    message.sequence_index, message.reason = index, end.reason
    message.num_tokens, message.stop_word = end.num_tokens, end.stop_word


def _encode_spec(spec: RequestSpec, message: pb.RecordedRequest) -> None:
    for name in _SPEC_FIELDS:
        setattr(message, name, getattr(spec, name))
    message.prompt.extend(spec.prompt)
    message.stop_token_ids.extend(sorted(spec.stop_token_ids))
    message.stop_sequences.extend(pb.RecordedTokens(token_ids=ids) for ids in spec.stop_sequences)
    message.stop_words.extend(spec.stop_words)
    if spec.deadline_ns is not None:
        message.deadline_ns = spec.deadline_ns
    if spec.decode_duration_ns is not None:
        message.decode_duration_ns = spec.decode_duration_ns
    for item in spec.retention:
        message.retention.add(start=item.start, end=item.end, priority=item.priority, duration_ns=item.duration_ns)


def _decode_spec(message: pb.RecordedRequest) -> RequestSpec:
    return RequestSpec(
        **{name: getattr(message, name) for name in _SPEC_FIELDS},
        prompt=array("I", message.prompt),
        stop_token_ids=frozenset(message.stop_token_ids),
        stop_sequences=tuple(tuple(item.token_ids) for item in message.stop_sequences),
        stop_words=tuple(message.stop_words),
        deadline_ns=message.deadline_ns if message.HasField("deadline_ns") else None,
        decode_duration_ns=message.decode_duration_ns if message.HasField("decode_duration_ns") else None,
        retention=tuple(
            RetentionRange(
                start=item.start,
                end=item.end if item.HasField("end") else None,
                priority=item.priority,
                duration_ns=item.duration_ns if item.HasField("duration_ns") else None,
            )
            for item in message.retention
        ),
    )


def _encode_worker_event(
    event: StepDone | WeightsHashed | WorkerBeat | WorkerLeft | WorkerRegistered | BlocksFetched,
) -> bytes:
    message = worker_pb2.WorkerMessage()
    if isinstance(event, StepDone):
        result = message.step_result
        for name in ("epoch", "step_id", "forward_us", "waiting_us", "num_draft_tokens", "num_accepted_tokens"):
            setattr(result, name, getattr(event, name))
        result.token_ids.extend(event.token_ids)
        result.num_tokens.extend(event.num_tokens)
        result.candidate_log_probs.extend(event.candidate_log_probs)
        result.candidate_stop_words.extend(event.candidate_stop_words)
        result.num_drafts.extend(event.num_drafts)
        result.missing_blocks.extend(sorted(event.missing_blocks))
        result.logit_digests.extend(event.logit_digests)
        for row, failure in event.failures:
            error = result.errors.add(row=row).error
            error.code, error.message, error.field = failure.code, failure.message, failure.field
    elif isinstance(event, WorkerBeat):
        message.heartbeat.epoch, message.heartbeat.last_step_id = event.epoch, event.last_step_id
        memory = message.heartbeat.memory
        memory.cpu_bytes, memory.gpu_bytes, memory.pinned_bytes = event.memory
        message.heartbeat.stored_hashes.extend(event.stored_hashes)
        message.heartbeat.removed_hashes.extend(event.removed_hashes)
    elif isinstance(event, BlocksFetched):
        fetched = message.blocks_fetched
        fetched.epoch = event.epoch
        fetched.fetched_hashes.extend(event.fetched_hashes)
        fetched.missing_hashes.extend(event.missing_hashes)
    elif isinstance(event, WeightsHashed):
        hashed = message.weights_hashed
        hashed.epoch, hashed.weights_root, hashed.block_kind = event.epoch, event.weights_root, event.block_kind
    elif isinstance(event, WorkerLeft):
        message.leave.epoch, message.leave.reason = event.epoch, event.reason
        message.leave.leaves_blocks = event.leaves_blocks
    else:
        message.register.kind.CopyFrom(kind_to_proto(event.kind))
        for name in REGISTRATION_FIELDS:
            value = getattr(event, name)
            if isinstance(value, tuple):
                getattr(message.register, name).extend(value)
            else:
                setattr(message.register, name, value)
    return message.SerializeToString()


def _encode_plan(plan: StepPlan, message: pb.RecordedPlan) -> None:
    message.group_id, message.epoch, message.step_id = plan.group_id, plan.epoch, plan.step_id
    message.repeats_generation = plan.repeats_generation
    message.reports_digests = plan.reports_digests
    for name in _PLAN_LISTS:
        values = getattr(plan, name)
        if values:
            getattr(message, name).extend(values)
    for fork in plan.forks:
        message.forks.add(from_row=fork.from_row, to_row=fork.to_row, block_ids=fork.block_ids)
    for added in plan.added:
        message.added.add(
            row=added.row,
            request_id=added.sequence.request.request_id,
            sequence_index=added.sequence.index,
            num_output_tokens=added.num_output_tokens,
            block_ids=added.block_ids,
        )
