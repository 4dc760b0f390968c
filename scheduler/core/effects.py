"""What the core wants done. The edges carry it out in order; none of it is awaited by the core."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.core.failure import Failure
from scheduler.core.prefix_cache import KvChange
from scheduler.core.request import Request, Sequence
from scheduler.core.stats import IterationStats


@dataclass(frozen=True, slots=True)
class Accepted:
    """Answer to Submitted: the request is in, or was already."""

    request: Request
    is_attached: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer to Submitted: it is not taken. `retry_after_ms` is set where trying again may help."""

    request_id: str
    failure: Failure
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Emitted:
    """New tokens, to be committed and then shown: sequence i has `lengths[i]` output tokens now."""

    sequences: list[Sequence]
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class BeamsAdvanced:
    """A beam search has taken steps, to be committed: `num_steps` of them now.

    Attributes:
        num_outputs: Extra outputs of its first sequence to be committed: what is said of the prompt.
    """

    request: Request
    num_steps: int
    num_outputs: int


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """`sequence.end` is set, or was amended because a stop word lies further ahead."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """All its sequences have ended. Comes once for each accepted request."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestForgotten:
    """A finished request is not kept any longer."""

    request: Request


@dataclass(frozen=True, slots=True)
class GroupJoined:
    """Answer to WorkerRegistered: the group is in, under a new epoch."""

    connection: bytes
    group_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class GroupRefused:
    """Answer to WorkerRegistered: the worker does not fit; `field` of its registration is at fault."""

    connection: bytes
    reason: str
    field: str


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """The worker there is to drop all state and register again."""

    connection: bytes
    epoch: int
    reason: str = ""


@dataclass(slots=True)
class StepPlan:
    """One step of one worker group, as parallel lists; fields are those of StepBatch in the worker protocol.

    `added` sequences get their rows and tables in this step. `generation_rows` is what joins those of the step before
    when `repeats_generation`, else all.
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


@dataclass(frozen=True, slots=True)
class Fork:
    """`to_row` becomes a copy of `from_row`, with `block_ids` as its table."""

    from_row: int
    to_row: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AddedSequence:
    """A sequence as it is when its row is filled; it changes afterwards."""

    row: int
    sequence: Sequence
    num_output_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IterationDone:
    """A step's result was taken in; see SchedulerCore.report_iterations."""

    stats: IterationStats


@dataclass(frozen=True, slots=True)
class KvChanged:
    """What became findable or not in a group's prefix cache."""

    group_id: str
    changes: list[KvChange]


Effect = (
    Accepted
    | Refused
    | Emitted
    | BeamsAdvanced
    | SequenceEnded
    | RequestEnded
    | RequestForgotten
    | GroupJoined
    | GroupRefused
    | EpochEnded
    | StepPlan
    | IterationDone
    | KvChanged
)
