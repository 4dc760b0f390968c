"""The journal holds each request and its output, so that a scheduler that comes after can go on.

Tokens are shown only once they are committed: `commit` calls back when the entries it was given, and all before them,
are safe. Entries are the core's effects. Outputs only grow, so a journal may read them later, up to the lengths that
the entries state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from midstream.errors import ExecutionError
from scheduler.core.effects import (
    Accepted,
    BeamsAdvanced,
    Effect,
    Emitted,
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
    """An adapter can be named from now on."""

    adapter: LoadedAdapter


@dataclass(frozen=True, slots=True)
class AdapterUnloaded:
    """It can be no more."""

    name: str


JournalEntry = (
    Accepted
    | Emitted
    | BeamsAdvanced
    | SequenceEnded
    | RequestEnded
    | RequestForgotten
    | AdapterLoaded
    | AdapterUnloaded
)


class JournalError(ExecutionError):
    """The journal cannot be written, or not be read; nothing more may be shown."""


class DeposedError(JournalError):
    """Another scheduler has taken the journal over."""


class LostError(JournalError):
    """What was written is gone: the journal was deleted or truncated while it was in use."""


def is_entry(effect: Effect) -> bool:
    """Whether an effect belongs into the journal."""
    if isinstance(effect, Accepted):
        return not effect.is_attached
    return isinstance(effect, Emitted | BeamsAdvanced | SequenceEnded | RequestEnded | RequestForgotten)


@dataclass(frozen=True, slots=True)
class JournalContents:
    """What an opened journal holds.

    Attributes:
        scheduler_epoch: For this incarnation; greater than any before.
        requests: Those that are kept: ended ones as they ended, then the others, oldest first.
        adapters: Those that are loaded.
    """

    scheduler_epoch: int
    requests: list[Recovered]
    adapters: tuple[LoadedAdapter, ...] = ()


class Journal(ABC):
    """Where requests and their tokens are kept.

    Attributes:
        num_commits: Transactions since it was opened.
        num_damaged: Records that could not be read then, and those that were dropped because they followed one.
        num_lost: How often it was gone in use, and begun anew with what is in memory.
        documents: What clients have the service keep; open while the journal is.
    """

    documents: Documents
    num_lost = 0
    num_commits = 0
    num_damaged = 0

    @abstractmethod
    async def open(self, on_failure: Callable[[JournalError], None]) -> JournalContents:
        """Takes the journal over from whoever had it before, and reads it.

        Args:
            on_failure: Called once, on the event loop, when entries can no longer be kept; then no commit calls back.

        Raises:
            ConfigError: It is of a newer version, or there is no such place.
            JournalError: It cannot be read or written.
        """

    @abstractmethod
    def commit(self, entries: list[JournalEntry], then: Callable[[], None]) -> None:
        """Keeps entries. Returns at once; calls `then` on the event loop, in order, when they are safe."""

    def know(self, requests: list[Request]) -> None:  # noqa: B027 (not all journals need it)
        """Tells which requests came of those that `open` gave, should they have to be written again."""

    @abstractmethod
    async def close(self) -> None:
        """Returns when all entries are safe, or cannot be kept."""
