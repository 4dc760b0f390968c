"""The life-cycle states of a request, and its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from google.protobuf.json_format import MessageToDict

from protos import stats_pb2 as pb


class RequestState(StrEnum):
    """Life-cycle states, in order."""

    CREATED = "created"  # created, not submitted
    PENDING = "pending"  # waiting to be scheduled, initially or after being preempted
    SCHEDULED = "scheduled"  # holds KV blocks, but no step is planned yet
    CONTEXT_PHASE = "context_phase"  # its prompt is being computed
    PROCESSING = "processing"  # the last part of its prompt is being computed in a step in flight
    GENERATION_PHASE = "generation_phase"  # the prompt has been computed and the first token sampled
    GENERATING = "generating"
    FINISHED = "finished"  # ended normally, by its deadline or by an error
    ABORTED = "aborted"


_STATES: dict[int, RequestState] = {
    pb.RequestStats.STAGE_QUEUED: RequestState.PENDING,
    pb.RequestStats.STAGE_SCHEDULED: RequestState.SCHEDULED,
    pb.RequestStats.STAGE_CONTEXT_IN_PROGRESS: RequestState.CONTEXT_PHASE,
    pb.RequestStats.STAGE_GENERATION_IN_PROGRESS: RequestState.GENERATING,
    pb.RequestStats.STAGE_GENERATION_COMPLETE: RequestState.FINISHED,
}


@dataclass(frozen=True, slots=True)
class RequestStats:
    """A request's state and statistics as known to the scheduler.

    Attributes:
        id: Id that the executor gave the request.
        state: The request's life-cycle state.
        context_prefill_position: Number of prompt tokens that are computed or in a step in flight.
        num_generated_tokens: Number of generated tokens, over all sequences.
        fields: All fields, with TensorRT-LLM's JSON names.
    """

    id: int
    state: RequestState
    context_prefill_position: int
    num_generated_tokens: int
    fields: Mapping[str, object]

    @staticmethod
    def from_proto(request_id: int, stats: pb.RequestStats) -> RequestStats:
        """Build this from the protobuf message."""
        fields = MessageToDict(stats, always_print_fields_with_no_presence=True)
        return RequestStats(
            request_id,
            _state(stats),
            stats.context_prefill_position,
            stats.num_generated_tokens,
            {**fields, "id": request_id},
        )


def _state(stats: pb.RequestStats) -> RequestState:
    state = _STATES[stats.stage]
    if state is RequestState.FINISHED and stats.is_aborted:
        return RequestState.ABORTED
    if state is RequestState.CONTEXT_PHASE and stats.context_prefill_position >= stats.num_prompt_tokens:
        return RequestState.PROCESSING
    if state is RequestState.GENERATING and stats.num_generated_tokens <= stats.num_sequences:
        return RequestState.GENERATION_PHASE
    return state
