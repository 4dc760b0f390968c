"""Effects: actions that the edge executes for the core, in order; the core does not wait for any of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from midstream.record import record
from scheduler.core.failure import Failure
from scheduler.core.kind import EarlierKind, Kind
from scheduler.core.prefix_cache import KvChange
from scheduler.core.request import Request, Sequence
from scheduler.core.stats import IterationStats


@record
class Accepted:
    """Answer to Submitted: the request is accepted, or is already known."""

    request: Request
    is_attached: bool


@record
class Refused:
    """Answer to Submitted: the request is rejected. `retry_after_ms` is set if a retry may succeed."""

    request_id: str
    failure: Failure
    retry_after_ms: int = 0


@record
class Emitted:
    """New tokens, to be committed and then published: sequence i has `lengths[i]` output tokens."""

    sequences: list[Sequence]
    lengths: list[int]


@record
class BeamsAdvanced:
    """A beam search has completed `num_steps` steps, which are to be committed.

    Attributes:
        num_outputs: Number of extra outputs of its first sequence that are to be committed; all of them are for the
            prompt.
        num_reported: Number of tokens of its first sequence whose extra outputs were attached after earlier steps.
    """

    request: Request
    num_steps: int
    num_outputs: int
    num_reported: int


@record
class KindSet:
    """The kind of the groups that compute a request from now on, to be committed.

    Attributes:
        changed_at: As in Request.kind_changed_at. earlier: As in Request.earlier_kinds.
        has_changed: Whether it replaces another kind.
    """

    request: Request
    kind: Kind
    changed_at: tuple[int, ...] = ()
    has_changed: bool = False
    earlier: tuple[EarlierKind, ...] = ()


@record
class SequenceEnded:
    """A sequence's end was set, or was changed because a stop word was found at an earlier position."""

    sequence: Sequence


@record
class RequestEnded:
    """All sequences of a request have ended; emitted once for each accepted request.

    Attributes:
        sequences: The request's sequences; the request drops them once it is forgotten.
    """

    request: Request
    sequences: list[Sequence]


@record
class RequestForgotten:
    """An ended request was dropped; it can no longer be resumed."""

    request: Request


@record
class GroupJoined:
    """Answer to WorkerRegistered: the group has joined, under a new epoch."""

    connection: bytes
    group_id: str
    epoch: int


@record
class GroupRefused:
    """Answer to WorkerRegistered: the worker is incompatible, because of `field` in its registration."""

    connection: bytes
    reason: str
    field: str


@record
class EpochEnded:
    """Tell a worker to drop all state and register again."""

    connection: bytes
    epoch: int
    reason: str = ""


@record
class FetchBlocks:
    """Ask a group to fetch blocks from the group with this store and source; answered by BlocksFetched."""

    connection: bytes
    epoch: int
    hashes: tuple[int, ...]
    kv_store: str
    kv_source: str


@dataclass(slots=True)
class StepPlan:
    """One step of a worker group, as parallel lists; the fields are those of StepBatch in the worker protocol.

    `added` sequences get their rows and tables in this step. With `repeats_generation`, `generation_rows` are added to
    those of the previous step; otherwise they are all generating rows.
    """

    connection: bytes
    group_id: str
    epoch: int
    step_id: int
    released_rows: list[int] = field(default_factory=list)
    added: list[AddedSequence] = field(default_factory=list)
    context_rows: list[int] = field(default_factory=list)
    context_starts: list[int] = field(default_factory=list)
    context_lengths: list[int] = field(default_factory=list)
    repeats_generation: bool = False
    generation_rows: list[int] = field(default_factory=list)
    idle_rows: list[int] = field(default_factory=list)
    block_rows: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    copy_source_blocks: list[int] = field(default_factory=list)
    copy_target_blocks: list[int] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    beam_rows: list[int] = field(default_factory=list)
    beam_token_ids: list[int] = field(default_factory=list)
    draft_rows: list[int] = field(default_factory=list)
    draft_limits: list[int] = field(default_factory=list)
    hashed_blocks: list[int] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)
    adopted_blocks: list[int] = field(default_factory=list)
    adopted_hashes: list[int] = field(default_factory=list)
    ahead_hashes: list[int] = field(default_factory=list)
    retained_hashes: list[int] = field(default_factory=list)
    retained_priorities: list[int] = field(default_factory=list)
    retained_ms: list[int] = field(default_factory=list)
    reports_digests: bool = False


@record
class Fork:
    """Makes `to_row` a copy of `from_row`, with the block table `block_ids`."""

    from_row: int
    to_row: int
    block_ids: tuple[int, ...]


@record
class AddedSequence:
    """A snapshot of a sequence, taken when it is placed in a row."""

    row: int
    sequence: Sequence
    num_output_tokens: int
    block_ids: tuple[int, ...]


@record
class IterationDone:
    """A step's result was applied; see SchedulerCore.report_iterations."""

    stats: IterationStats


@record
class KvChanged:
    """Blocks were stored in or removed from a group's prefix cache."""

    group_id: str
    changes: list[KvChange]


@record
class WorkerWrong:
    """A group's results differ from those of other groups; it is held off until its process restarts.

    Attributes:
        num_unproved_tokens: Number of tokens that were committed since its last step that was found right.
        unproved_requests: Ids of the requests with such tokens.
    """

    group_id: str
    reason: str
    num_unproved_tokens: int
    unproved_requests: tuple[str, ...]


@record
class SleepOrdered:
    """A group is told to sleep at a level, or to wake up (level 0)."""

    connection: bytes
    epoch: int
    level: int


@record
class PolicyFailed:
    """A scheduling policy raised an exception in one of its methods, for the first time with this message."""

    method: str
    error: Exception


Effect = (
    Accepted
    | Refused
    | Emitted
    | BeamsAdvanced
    | KindSet
    | SequenceEnded
    | RequestEnded
    | RequestForgotten
    | GroupJoined
    | GroupRefused
    | EpochEnded
    | FetchBlocks
    | StepPlan
    | IterationDone
    | KvChanged
    | WorkerWrong
    | SleepOrdered
    | PolicyFailed
)
