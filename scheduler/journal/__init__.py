"""The journal stores each request and its output, so that a successor can continue after a crash.

Tokens are sent to clients only once they are committed: `commit` calls back when its entries and all earlier ones are
durable. Entries are the core's effects. Outputs only grow, so a journal may read them later, up to the lengths given in
the entries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from midstream.errors import ExecutionError
from scheduler.core.effects import (
    Accepted,
    BeamsAdvanced,
    Effect,
    Emitted,
    KindSet,
    RequestEnded,
    RequestForgotten,
    SequenceEnded,
)
from scheduler.core.events import Recovered
from scheduler.core.request import Request
from scheduler.journal.documents import Documents


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """An adapter that requests can name; fields as in LoraInfo."""

    name: str
    path: str
    fingerprint: str
    num_bytes: int
    rank: int = 0
    num_virtual_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """An adapter can be named in requests from now on."""

    adapter: LoadedAdapter


@dataclass(frozen=True, slots=True)
class AdapterUnloaded:
    """An adapter can no longer be named in requests."""

    name: str


JournalEntry = (
    Accepted
    | Emitted
    | BeamsAdvanced
    | KindSet
    | SequenceEnded
    | RequestEnded
    | RequestForgotten
    | AdapterLoaded
    | AdapterUnloaded
)

# The effects that are written to the journal.
ENTRY_CLASSES = (Accepted, Emitted, BeamsAdvanced, KindSet, SequenceEnded, RequestEnded, RequestForgotten)


class JournalError(ExecutionError):
    """The journal cannot be written or read; nothing more may be sent to clients."""


class DeposedError(JournalError):
    """Another scheduler has taken over the journal."""


def superseded(epoch: int, other: int, path: object) -> str:
    """Return the error message for a scheduler whose files another scheduler has taken over."""
    return f"scheduler epoch {epoch} was superseded by epoch {other}, which now writes to {path}"


class LostError(JournalError):
    """Committed data is lost: the journal was deleted or truncated while it was in use."""


def is_entry(effect: Effect) -> TypeGuard[JournalEntry]:
    """Return whether an effect is written to the journal."""
    return isinstance(effect, ENTRY_CLASSES) and not (isinstance(effect, Accepted) and effect.is_attached)


@dataclass(frozen=True, slots=True)
class JournalContents:
    """The contents of a journal when it was opened.

    Attributes:
        scheduler_epoch: Epoch of this incarnation; greater than any before.
        requests: Kept requests: ended ones in the order of their ends, then the others, oldest first.
    """

    scheduler_epoch: int
    requests: list[Recovered]
    adapters: tuple[LoadedAdapter, ...] = ()


class Journal(ABC):
    """Storage of requests and their tokens.

    Attributes:
        num_damaged: Number of records that could not be read when it was opened, or were dropped because they followed
            such a record.
        num_lost: Number of times the journal was lost while in use, and was recreated from memory.
        documents: Documents that the service stores for clients; open as long as the journal is.
        after_commits: Called on the event loop after the callbacks of all commits that became durable together.
    """

    documents: Documents
    after_commits: Callable[[], None] = staticmethod(lambda: None)
    num_lost = 0
    num_commits = 0
    num_damaged = 0

    @abstractmethod
    async def open(self, on_failure: Callable[[JournalError], None]) -> JournalContents:
        """Take over the journal from its previous writer, and read it.

        Args:
            on_failure: Called once, on the event loop, when entries can no longer be stored; no commit calls back after
                that.

        Raises:
            ConfigError: The journal has a newer version, or its location does not exist.
            JournalError: It cannot be read or written.
        """

    @abstractmethod
    def commit(self, entries: list[JournalEntry], then: Callable[[], None]) -> None:
        """Store entries; return immediately. `then` is called on the event loop, in order, once they are durable."""

    def know(self, requests: list[Request]) -> None:  # noqa: B027 (not all journals need it)
        """Register the requests restored by `open`, in case they have to be written again."""

    @abstractmethod
    async def close(self) -> None:
        """Return once all entries are durable, or cannot be stored."""
