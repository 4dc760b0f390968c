"""Steps that were sent to a worker group and whose results are awaited."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.core.adoption import Adoption
from scheduler.core.request import Request, Sequence


@dataclass(frozen=True, slots=True)
class LastGeneration:
    """The generating rows that the worker would repeat, and their `generation_version`, which is -1 if there are
    none.
    """

    version: int = -1
    sequences: tuple[Sequence, ...] = ()
    rows: tuple[int, ...] = ()


@dataclass(slots=True)
class InFlightStep:
    """A step that was sent to the worker and whose result is awaited.

    Attributes:
        ordinal: Number of the step, counted over all groups.
        context: (row, sequence, tokens, samples) of each chunk.
        generation: Sequences in ascending order of their rows.
        draft_limits: Maximum number of drafts to verify, by sequence; 0 for sequences that are missing.
        adoption: Blocks that the worker looks up in the pools of dead workers or in tiers.
    """

    step_id: int
    ordinal: int
    planned_ns: int
    context: list[tuple[int, Sequence, int, bool]]
    generation: tuple[Sequence, ...]
    generation_rows: tuple[int, ...]
    num_paused: int
    queue_latency_ns: int
    num_empty_slots: int
    draft_limits: dict[Sequence, int] = field(default_factory=dict)
    adoption: Adoption = field(default_factory=Adoption)

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens in the step's context chunks."""
        return sum([chunk[2] for chunk in self.context]) if self.context else 0

    @property
    def num_sampled(self) -> int:
        """Number of rows that sample a token."""
        num_generating = len(self.generation)
        return sum([chunk[3] for chunk in self.context]) + num_generating if self.context else num_generating

    def sampled(self) -> list[Sequence]:
        """Return the sequences of the sampled rows, in the order of the step's result."""
        return [chunk[1] for chunk in self.context if chunk[3]] + list(self.generation)

    def requests(self) -> set[Request]:
        return {chunk[1].request for chunk in self.context} | {sequence.request for sequence in self.generation}
