"""What a journal is stored in: tables of requests, commits and adapters, and who may write.

A request has one row: what was accepted, and its output as of the last compaction. A commit has one row, with what all
requests put out since the commit before. Compaction writes the output of those that changed into their rows and deletes
all commits, in one transaction. So what is kept stays in proportion to the requests that are kept.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

SCHEMA_VERSION = 1
_CHECKSUM_BYTES = 4


@dataclass(slots=True)
class Transaction:
    """What is to be written at once.

    Attributes:
        accepted: (number, sealed JournalRequest) of new requests.
        commit: A sealed JournalCommit; empty for none.
        forgotten: Numbers of requests whose rows go.
        compacted: (number, sealed JournalCommit of that request alone) of requests that changed; commits go. None: they
            stay.
        adapters: (name, sealed JournalAdapter) of adapters that were loaded; nothing sealed: it was unloaded.
        rewritten: (number, sealed JournalRequest, sealed JournalCommit of that request alone) of requests as they are
            behind `commit`, in place of all that is stored of them.
    """

    accepted: list[tuple[int, bytes]] = field(default_factory=list)
    commit: bytes = b""
    forgotten: list[int] = field(default_factory=list)
    compacted: list[tuple[int, bytes]] | None = None
    adapters: list[tuple[str, bytes]] = field(default_factory=list)
    rewritten: list[tuple[int, bytes, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class StoredJournal:
    """All rows as they are stored.

    Attributes:
        requests: (number, sealed JournalRequest, sealed output as of the last compaction or nothing), by number.
        commits: (number, sealed JournalCommit), oldest first. Nothing sealed: what was there is lost.
        first_commits: By a request's number: that of the first commit which its row does not contain yet; default 0.
        adapters: (name, sealed JournalAdapter).
        num_damaged: Rows that the store itself could not read.
    """

    requests: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    commits: list[tuple[int, bytes]] = field(default_factory=list)
    adapters: list[tuple[str, bytes]] = field(default_factory=list)
    first_commits: dict[int, int] = field(default_factory=dict)
    num_damaged: int = 0


class Store(ABC):
    """One journal, as its writer sees it. All methods run in one thread.

    Attributes:
        folds_commits: The writer decides when commits are folded into rows (`Transaction.compacted`). Else the store
            says which rows it wants again (`stale`).
    """

    folds_commits = True

    @abstractmethod
    def take_over(self, least_epoch: int) -> int:
        """Becomes the writer, in place of any other.

        Args:
            least_epoch: The new epoch is at least this, and greater than the one before.

        Returns:
            The new scheduler epoch.
        """

    @abstractmethod
    def read(self) -> StoredJournal:
        """Everything that is stored, as far as it can be read."""

    @abstractmethod
    def write(self, transaction: Transaction) -> None:
        """Writes all of it, or nothing; returns when it is safe.

        Raises:
            DeposedError: Another one is the writer now.
            LostError: What was written before is gone.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises what `write` would; called now and then while nothing is written."""

    def stale(self, live_bytes: int) -> Sequence[int]:
        """Return the requests that the next transaction is to rewrite; `live_bytes`: about the size of all rows."""
        return ()

    def begin_anew(self) -> None:
        """After a LostError: becomes the writer of an empty journal in its place.

        Raises:
            DeposedError: Another one has done so.
        """
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Lets go."""


def seal(data: bytes) -> bytes:
    """`data` behind its checksum."""
    return zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "little") + data


def unseal(sealed: bytes) -> bytes | None:
    """What was sealed; None when it is damaged."""
    data = sealed[_CHECKSUM_BYTES:]
    return data if len(sealed) >= _CHECKSUM_BYTES and seal(data) == sealed else None
