"""Numbered items for any number of readers, each with its own cursor. Only the latest items are kept; slow readers miss
some.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Broadcast(Generic[ItemT]):
    """A bounded log of items with consecutive numbers."""

    def __init__(self, max_kept: int, last_number: int = 0) -> None:
        """Start without items; the number of the first one follows `last_number`."""
        self.last_number = last_number
        self._items: deque[ItemT] = deque(maxlen=max_kept)
        self._changed: set[asyncio.Event] = set()

    @property
    def first_number(self) -> int:
        """Number of the oldest kept item."""
        return self.last_number - len(self._items) + 1

    def append(self, item: ItemT) -> None:
        """Append an item and wake the readers."""
        self.last_number += 1
        self._items.append(item)
        for event in self._changed:
            event.set()

    async def follow(self, first: int) -> AsyncIterator[list[tuple[int, ItemT]]]:
        """Yield lists of (number, item) from `first` on; a gap in the numbers means that items were lost."""
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            cursor = first
            while True:
                changed.clear()
                cursor = max(cursor, self.first_number)
                if cursor > self.last_number:
                    await changed.wait()
                    continue
                skipped = cursor - self.first_number
                items = list(self._items)[skipped:]
                yield list(enumerate(items, start=cursor))
                cursor += len(items)
        finally:
            self._changed.discard(changed)
