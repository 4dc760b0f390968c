"""Blocks to fill with what a dead worker of the same host left, or what tiers hold, in place of computing it.

A request that lost its worker starts elsewhere with blocks for all its known tokens. Where the pools of both workers
lie in the same memory, its full blocks are *adopted*: a step asks the worker to find them by their hashes, in the pools
of those that died. So are blocks of any request that the tiers below the worker's pool are said to hold. Until the
result of that step says which were found, the blocks are pending, as if another sequence were to compute them; those
that were not found are the sequence's own to compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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


class Adoptions:
    """What the next steps of a worker group ask for, at most so many blocks each, so that no step takes long by it."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._waiting: deque[Adoption] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, entry: AdoptedBlock) -> Adoption:
        """Add a block; return what it was added to."""
        if not self._waiting or len(self._waiting[-1].entries) >= self._max_blocks:
            self._waiting.append(Adoption())
        self._waiting[-1].entries.append(entry)
        return self._waiting[-1]

    def take(self) -> Adoption:
        """Remove and return what the next step asks for."""
        return self._waiting.popleft() if self._waiting else Adoption()

    def keep(self, is_wanted: Callable[[Adoption, AdoptedBlock], bool]) -> None:
        """Drop the blocks that are not wanted any more."""
        for adoption in self._waiting:
            adoption.entries = [entry for entry in adoption.entries if is_wanted(adoption, entry)]
        self._waiting = deque(adoption for adoption in self._waiting if adoption.entries)

    @property
    def requests(self) -> set[Request]:
        """Whose blocks wait."""
        return {request for adoption in self._waiting for request in adoption.requests}
