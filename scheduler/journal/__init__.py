"""The journal holds each request and its output, so that a scheduler that comes after can go on.

Tokens are shown only once they are committed: `commit` calls back when the entries it was given, and all before them,
are safe. Entries are the core's effects; a journal copies what it needs of them before `commit` returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.effects import Accepted, Effect, Emitted, RequestEnded, RequestForgotten, SequenceEnded
from scheduler.events import Recovered

JournalEntry = Accepted | Emitted | SequenceEnded | RequestEnded | RequestForgotten


def is_entry(effect: Effect) -> bool:
    """Whether an effect belongs into the journal."""
    if isinstance(effect, Accepted):
        return not effect.is_attached
    return isinstance(effect, Emitted | SequenceEnded | RequestEnded | RequestForgotten)


@dataclass(frozen=True, slots=True)
class JournalContents:
    """What an opened journal holds.

    Attributes:
        scheduler_epoch: For this incarnation; greater than any before.
        requests: Those that are kept, oldest first.
    """

    scheduler_epoch: int
    requests: list[Recovered]


class Journal(ABC):
    """Where requests and their tokens are kept."""

    @abstractmethod
    async def open(self) -> JournalContents:
        """Takes the journal over from whoever had it before, and reads it."""

    @abstractmethod
    def commit(self, entries: list[JournalEntry], then: Callable[[], None]) -> None:
        """Keeps entries. Returns at once; calls `then` on the event loop, in order, when they are safe."""

    @abstractmethod
    async def close(self) -> None:
        """Returns when all entries are safe."""
