"""Steps that were sent to a worker group and whose results are awaited."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from midstream.record import record
from scheduler.core.adoption import Adoption
from scheduler.core.request import Request, Sequence


@record
class LastGeneration:
    """The generating rows that the worker would repeat, and their `generation_version`, which is -1 if there are
    none.
    """

    version: int = -1
    sequences: tuple[Sequence, ...] = ()
    rows: tuple[int, ...] = ()


class ContextChunk(NamedTuple):
    """Known tokens of a sequence that a step computes; the last chunk of a context also samples a token. `blocks` are
    the blocks that it fills, with the hashes of their contents.
    """

    row: int
    sequence: Sequence
    num_tokens: int
    is_last: bool
    blocks: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class InFlightStep:
    """A step that was sent to the worker and whose result is awaited.

    Attributes:
        ordinal: Number of the step, counted over all groups.
        generation: Sequences in ascending order of their rows.
        draft_limits: Maximum number of drafts to verify, by sequence; 0 for sequences that are missing.
        adoption: Blocks that the worker looks up in the pools of dead workers or in tiers.
        is_verified: Whether another group computes the step again before its result is applied.
    """

    step_id: int
    ordinal: int
    planned_ns: int
    context: list[ContextChunk]
    generation: tuple[Sequence, ...]
    generation_rows: tuple[int, ...]
    num_paused: int
    num_new_requests: int
    queue_latency_ns: int
    num_empty_slots: int
    draft_limits: dict[Sequence, int] = field(default_factory=dict)
    adoption: Adoption = field(default_factory=Adoption)
    is_verified: bool = False

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens in the step's context chunks."""
        return sum([chunk.num_tokens for chunk in self.context]) if self.context else 0

    @property
    def num_sampled(self) -> int:
        """Number of rows that sample a token."""
        num_generating = len(self.generation)
        return sum([chunk.is_last for chunk in self.context]) + num_generating if self.context else num_generating

    def sampled(self) -> list[Sequence]:
        """Return the sequences of the sampled rows, in the order of the step's result."""
        return [chunk.sequence for chunk in self.context if chunk.is_last] + list(self.generation)

    def requests(self) -> set[Request]:
        return {chunk.sequence.request for chunk in self.context} | {sequence.request for sequence in self.generation}
