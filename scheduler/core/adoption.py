"""Adoption: fills blocks from the pool of a dead worker on the same host, or from tiers, instead of computing them.

A request that lost its worker starts on another one, with blocks for all its known tokens. If the pools of both workers
are in the same memory, its full blocks are *adopted*: a step asks the worker to find them by their hashes, in the pools
of dead workers. Blocks of any request that are known to be in the tiers below the worker's pool are adopted too. Until
the result of that step reports which were found, the blocks are pending, as if another sequence were to compute them;
the sequence itself computes those that were not found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from midstream.record import record
from scheduler.core.request import Request, Sequence


@record
class AdoptedBlock:
    """A block to adopt, at `index` in a sequence's block table, and its content hash."""

    sequence: Sequence
    index: int
    block: int
    value: int

    @property
    def is_held(self) -> bool:
        """Whether the sequence still holds the block."""
        return self.sequence.table[self.index : self.index + 1] == [self.block]


@dataclass(eq=False, slots=True)
class Adoption:
    """The blocks that one step adopts."""

    entries: list[AdoptedBlock] = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        """The blocks to fill."""
        return [entry.block for entry in self.entries]

    @property
    def hashes(self) -> list[int]:
        """The content hash of each block."""
        return [entry.value for entry in self.entries]

    @property
    def requests(self) -> set[Request]:
        """The requests that own the blocks."""
        return {entry.sequence.request for entry in self.entries}


class Adoptions:
    """Adoptions queued for the next steps of a worker group, with a limit on blocks per step to bound the step's
    duration.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._waiting: deque[Adoption] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, entry: AdoptedBlock) -> Adoption:
        """Queue a block, and return the adoption (of one step) to which it was added."""
        if not self._waiting or len(self._waiting[-1].entries) >= self._max_blocks:
            self._waiting.append(Adoption())
        self._waiting[-1].entries.append(entry)
        return self._waiting[-1]

    def take(self) -> Adoption:
        """Remove and return the adoptions of the next step."""
        return self._waiting.popleft() if self._waiting else Adoption()

    @property
    def next_hashes(self) -> list[int]:
        """The content hashes of the blocks that the next step adopts."""
        return self._waiting[0].hashes if self._waiting else []

    def keep(self, is_wanted: Callable[[Adoption, AdoptedBlock], bool]) -> None:
        """Drop queued blocks that are no longer wanted."""
        for adoption in self._waiting:
            adoption.entries = [entry for entry in adoption.entries if is_wanted(adoption, entry)]
        self._waiting = deque(adoption for adoption in self._waiting if adoption.entries)

    @property
    def requests(self) -> set[Request]:
        """Return the requests with queued blocks."""
        return {request for adoption in self._waiting for request in adoption.requests}
