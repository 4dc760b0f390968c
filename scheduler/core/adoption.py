"""Blocks to fill with what a dead worker of the same host left, in place of computing it again.

A request that lost its worker starts elsewhere with blocks for all its known tokens. Where the pools of both workers
lie in the same memory, its full blocks are *adopted*: the next step asks the worker to find them by their hashes, in
the pools of those that died. Until the result of that step says which were found, the blocks are pending, as if another
sequence were to compute them; those that were not found are the sequence's own to compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.core.request import Request, Sequence


@dataclass(frozen=True, slots=True)
class AdoptedBlock:
    """The block at `index` of a sequence's table."""

    sequence: Sequence
    index: int
    block: int

    @property
    def is_held(self) -> bool:
        """Whether the sequence still has it."""
        return self.sequence.table[self.index : self.index + 1] == [self.block]


@dataclass(eq=False, slots=True)
class Adoption:
    """What one step asks for."""

    entries: list[AdoptedBlock] = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        """The blocks to fill."""
        return [entry.block for entry in self.entries]

    @property
    def hashes(self) -> list[int]:
        """What each of them is to hold."""
        return [entry.sequence.block_hashes[entry.index] for entry in self.entries]

    @property
    def requests(self) -> set[Request]:
        """Whose blocks they are."""
        return {entry.sequence.request for entry in self.entries}
