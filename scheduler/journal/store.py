"""Storage of a journal: tables of requests, commits and adapters, and the interface of its writer.

A request has one row, with the accepted request and its output as of the last compaction. A commit has one row, with
the output of all requests since the previous commit. Compaction writes the output of changed requests into their rows
and deletes all commits, in one transaction. The size therefore stays proportional to the kept requests.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.journal import JournalError

_CHECKSUM_BYTES = 4


@dataclass(slots=True)
class Transaction:
    """Data that is written atomically.

    Attributes:
        accepted: (number, sealed JournalRequest) of new requests.
        commit: A sealed JournalCommit; empty if there is none.
        forgotten: Numbers of requests whose rows are deleted.
        compacted: (number, sealed JournalCommit of that request alone) of changed requests; commits are deleted. None
            means that commits are kept.
        adapters: (name, sealed JournalAdapter) of loaded adapters; an empty record means that the adapter was unloaded.
        rewritten: (number, sealed JournalRequest, sealed JournalCommit of that request alone) of requests as of
            `commit`, replacing all that is stored of them.
    """

    accepted: list[tuple[int, bytes]] = field(default_factory=list)
    commit: bytes = b""
    forgotten: list[int] = field(default_factory=list)
    compacted: list[tuple[int, bytes]] | None = None
    adapters: list[tuple[str, bytes]] = field(default_factory=list)
    rewritten: list[tuple[int, bytes, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class StoredJournal:
    """All rows as stored.

    Attributes:
        requests: (number, sealed JournalRequest, sealed output as of the last compaction or nothing), by number.
        commits: (number, sealed JournalCommit), oldest first. An empty record means that the commit is lost.
        first_commits: By request number: the first commit that its row does not include yet; default 0.
        adapters: (name, sealed JournalAdapter).
        num_damaged: Rows that the store itself could not read.
    """

    requests: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    commits: list[tuple[int, bytes]] = field(default_factory=list)
    adapters: list[tuple[str, bytes]] = field(default_factory=list)
    first_commits: dict[int, int] = field(default_factory=dict)
    num_damaged: int = 0


class Store(ABC):
    """The writer's interface to one journal. All methods run in one thread.

    Attributes:
        folds_commits: Whether the writer decides when commits are folded into rows (`Transaction.compacted`). Otherwise
            the store chooses the rows to rewrite (`stale`).
    """

    folds_commits = True

    @abstractmethod
    def take_over(self, least_epoch: int) -> int:
        """Become the writer of the journal, replacing any other.

        Args:
            least_epoch: Lower bound of the new epoch, which is also greater than the previous one.

        Returns:
            The new scheduler epoch.
        """

    @abstractmethod
    def read(self) -> StoredJournal:
        """Return all stored data that can be read."""

    @abstractmethod
    def write(self, transaction: Transaction) -> None:
        """Write the transaction atomically; return once it is durable. Raises DeposedError if there is another writer
        now, or LostError if earlier data was lost.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise any error that `write` would raise; called periodically when nothing is written."""

    def stale(self, live_bytes: int) -> Sequence[int]:
        """Return the requests that the next transaction should rewrite; all rows have about `live_bytes` bytes."""
        return ()

    def begin_anew(self) -> None:
        """Become the writer of a new, empty journal after a LostError. Raises DeposedError if another scheduler has
        done so, or JournalError if a journal of this kind cannot be recreated.
        """
        raise JournalError("it is lost, and a journal of this kind cannot be recreated")

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""


def seal(data: bytes) -> bytes:
    """Return `data` prefixed with its checksum."""
    return zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "little") + data


def unseal(sealed: bytes) -> bytes | None:
    """Return the data without its checksum; None if the checksum does not match."""
    data = sealed[_CHECKSUM_BYTES:]
    return data if len(sealed) >= _CHECKSUM_BYTES and seal(data) == sealed else None
