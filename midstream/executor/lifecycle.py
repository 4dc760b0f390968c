"""The life-cycle states of a request."""

from __future__ import annotations

from enum import StrEnum

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


def state_of(stats: pb.RequestStats) -> RequestState:
    """Return a request's state from its statistics."""
    state = _STATES[stats.stage]
    if state is RequestState.FINISHED and stats.is_aborted:
        return RequestState.ABORTED
    if state is RequestState.CONTEXT_PHASE and stats.context_prefill_position >= stats.num_prompt_tokens:
        return RequestState.PROCESSING
    if state is RequestState.GENERATING and stats.num_generated_tokens <= stats.num_sequences:
        return RequestState.GENERATION_PHASE
    return state
