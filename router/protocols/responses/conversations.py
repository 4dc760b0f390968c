"""Conversations as they are stored: one document each, of the client that created it.

A response of a conversation is entered before it runs, as a reference, and replaced by its items once it has ended: by
whoever reads the conversation next. So no router has to outlive the response.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from midstream.errors import InvalidArgumentError, NotFoundError
from router.authentication import current_caller
from router.pipeline.cells import Cell
from router.pipeline.client_documents import ClientDocuments
from router.protocols.responses.items import Item

PREFIX = "conv_"
_KIND = "conversation"
_NS_PER_S = 1_000_000_000
# A response that is not found this long after it was entered has never run, unless calls are repeated for longer.
_MISSING_S = 60


@dataclass(slots=True)
class Entry:
    """An item, or a response that has not been replaced by its items.

    Attributes:
        item: The item; None for a response.
        response_id: The response, or that from which the item is; empty for an item that a client added.
        added_at: Unix time.
    """

    item: Item | None
    response_id: str = ""
    added_at: float = 0.0


@dataclass(slots=True)
class StoredConversation:
    """A conversation."""

    id: str
    created_at: int
    metadata: Mapping[str, object] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    def view(self) -> dict[str, object]:
        """Return the conversation in the format that clients see."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": dict(self.metadata),
        }

    @property
    def items(self) -> list[Item]:
        return [entry.item for entry in self.entries if entry.item is not None]

    @property
    def waiting(self) -> list[Entry]:
        """The responses that have not been replaced."""
        return [entry for entry in self.entries if entry.item is None]

    def has(self, response_id: str) -> bool:
        """Return whether a response, or an item of it, is in the conversation."""
        return any(entry.response_id == response_id for entry in self.entries)

    def before(self, response_id: str) -> list[Item]:
        """Return the items that precede a response; all items if it is empty, or not in the conversation.

        Raises:
            InvalidArgumentError: An earlier response has not ended.
        """
        found: list[Item] = []
        for entry in self.entries:
            if response_id and entry.response_id == response_id:
                break
            if entry.item is None:
                raise InvalidArgumentError("has a response that has not ended yet", field="conversation")
            found.append(entry.item)
        return found

    def settle(self, items: Mapping[str, list[Item]]) -> None:
        """Replace responses by their items, given by the response's id."""
        entries: list[Entry] = []
        known = {item["id"] for item in self.items}
        for entry in self.entries:
            if entry.item is not None or entry.response_id not in items:
                entries.append(entry)
                continue
            for index, item in enumerate(items[entry.response_id]):
                # A client may send an item of the conversation again, but ids must be unique for paging.
                new = f"msg_{entry.response_id.removeprefix('resp_')}_again_{index}"
                unique = {**item, "id": new} if item["id"] in known else item
                known.add(unique["id"])
                entries.append(Entry(unique, entry.response_id, entry.added_at))
        self.entries = entries


class Conversations:
    """The conversations of the caller."""

    def __init__(
        self, documents: ClientDocuments, ttl_s: int, max_bytes: int, unavailable_timeout_s: float = 0.0
    ) -> None:
        """A conversation is stored for `ttl_s` after its last change. Nothing is added to one that would then have more
        than `max_bytes` of JSON, except the items of responses that were entered before. Calls of schedulers are
        repeated for `unavailable_timeout_s`.
        """
        self._missing_s = max(_MISSING_S, 2 * unavailable_timeout_s)
        self.documents = documents
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes

    def is_lost(self, entry: Entry, now: float) -> bool:
        """Return whether a response that does not exist at a time (Unix) will never exist."""
        return now - entry.added_at > self._missing_s

    async def create(self, cell: Cell, conversation: StoredConversation) -> None:
        """Store a new conversation, unless one with its id exists. Raises InvalidArgumentError if it is too large."""
        await self._put(cell, conversation.id, self._limited(_encode(conversation)), 0)

    async def get(self, conversation_id: str) -> tuple[StoredConversation, int]:
        """Return a conversation and its version. Raises NotFoundError if there is none with this id."""
        _, found, version = await self._get(conversation_id)
        return found, version

    async def update(
        self, conversation_id: str, change: Callable[[StoredConversation], None], *, is_limited: bool = False
    ) -> StoredConversation:
        """Apply `change`, and return the conversation. `change` must be idempotent: it is called again if another
        change was stored first. Raises the errors of `get` and of `change`, or, if `is_limited`, InvalidArgumentError
        if the conversation would be too large.
        """
        while True:
            cell, found, version = await self._get(conversation_id)
            before = _encode(found)
            change(found)
            data = _encode(found)
            if data == before:
                return found
            if await self._put(cell, conversation_id, self._limited(data) if is_limited else data, version):
                return found

    async def enter(self, conversation_id: str, response_id: str, version: int) -> bool:
        """Add a response to a conversation; return whether it was not there.

        Raises:
            InvalidArgumentError: The conversation has changed since `version`, or is too large to be continued.
        """
        cell, found, current = await self._get(conversation_id)
        if found.has(response_id):
            return False
        found.entries.append(Entry(None, response_id, time.time()))
        data = self._limited(_encode(found))
        # A put whose answer was lost is repeated, and then returns 0 although it was stored.
        if current == version and (
            await self._put(cell, conversation_id, data, version)
            or (await self.get(conversation_id))[0].has(response_id)
        ):
            return True
        raise InvalidArgumentError("was changed at the same time; make the call again", field="conversation")

    async def delete(self, conversation_id: str) -> None:
        """Delete a conversation; raises the errors of `get`."""
        cell, _, _ = await self._get(conversation_id)
        await self.documents.delete(cell, _KIND, current_caller.get().owner, conversation_id)

    async def _get(self, conversation_id: str) -> tuple[Cell, StoredConversation, int]:
        missing = NotFoundError(f"no conversation {conversation_id[:64]!r} was found", field="conversation")
        if not conversation_id.startswith(PREFIX):
            raise missing
        try:
            found = await self.documents.get(_KIND, current_caller.get().owner, conversation_id)
        except NotFoundError:
            raise missing from None
        fields = json.loads(found.data)
        entries = [Entry(**entry) for entry in fields.pop("entries")]
        return found.cell, StoredConversation(**fields, entries=entries), found.version

    async def _put(self, cell: Cell, conversation_id: str, data: bytes, version: int) -> int:
        owner, expires_ns = current_caller.get().owner, time.time_ns() + self._ttl_s * _NS_PER_S
        return await self.documents.put(
            cell, _KIND, owner, conversation_id, data, expires_ns=expires_ns, if_version=version
        )

    def _limited(self, data: bytes) -> bytes:
        """Return the JSON of a conversation to which a client adds. Raises InvalidArgumentError if it is too large."""
        if len(data) > self._max_bytes:
            reason = f"would have {len(data)} bytes; must have at most {self._max_bytes}: begin another one"
            raise InvalidArgumentError(reason, field="conversation")
        return data


def _encode(conversation: StoredConversation) -> bytes:
    entries = [
        {"item": entry.item, "response_id": entry.response_id, "added_at": entry.added_at}
        for entry in conversation.entries
    ]
    fields = {"id": conversation.id, "created_at": conversation.created_at, "metadata": dict(conversation.metadata)}
    return json.dumps({**fields, "entries": entries}).encode()
