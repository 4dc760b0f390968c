"""The routes of the Conversations API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from midstream.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from router.authentication import current_caller
from router.pipeline.idempotency import HEADER, check_key, request_id_of
from router.protocols.batches.files import new_id
from router.protocols.batches.keys import claim
from router.protocols.body_reader import BodyReader
from router.protocols.fields import RESPONSES, RESPONSES_OPAQUE, RESPONSES_TYPES, check_fields, ignored_header
from router.protocols.openai.body import Body
from router.protocols.openai.endpoints import Endpoint, mapped
from router.protocols.responses.app import ResponsesApi
from router.protocols.responses.conversations import PREFIX, Entry, StoredConversation
from router.protocols.responses.items import Item, Turns, item_page, listed
from router.protocols.responses.request import check_metadata

PATH = "/v1/conversations"
_MAX_NEW_ITEMS = 20  # as in OpenAI's API
_INCLUDE = ("include", "include[]")  # has no effect: there is no output of server tools
# Prefixes of the ids of items that clients add.
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class ConversationsApi:
    """Serves /v1/conversations."""

    def __init__(self, responses: ResponsesApi, bodies: BodyReader) -> None:
        self._responses = responses
        self._conversations = responses.conversations
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """Return the routes for the HTTP port."""
        one = f"{PATH}/{{conversation_id}}"
        item = f"{one}/items/{{item_id}}"
        endpoints: list[tuple[str, str, Endpoint, tuple[str, ...]]] = [
            ("POST", PATH, self._create, ()),
            ("GET", one, self._retrieve, ()),
            ("POST", one, self._update, ()),
            ("DELETE", one, self._delete, ()),
            ("POST", f"{one}/items", self._add, _INCLUDE),
            ("GET", f"{one}/items", self._list, (*_INCLUDE, "after", "limit", "order")),
            ("GET", item, self._retrieve_item, _INCLUDE),
            ("DELETE", item, self._delete_item, ()),
        ]
        return [Route(path, mapped(endpoint, query), methods=[method]) for method, path, endpoint, query in endpoints]

    async def _create(self, request: Request) -> Response:
        items, metadata, ignored = await self._bodies.read(request, lambda body: _read(body, "items", "metadata"))
        documents, owner = self._conversations.documents, current_caller.get().owner
        key = check_key(request.headers.get(HEADER))
        cell, found_id = await claim(documents, documents.cells.any(), owner, key, PATH, new_id(PREFIX))
        entries = [Entry(item) for item in items]
        await self._conversations.create(cell, StoredConversation(found_id, int(time.time()), metadata, entries))
        stored, _ = await self._conversations.get(found_id)
        return JSONResponse(stored.view(), headers=ignored_header(ignored))

    async def _retrieve(self, request: Request) -> Response:
        found, _ = await self._conversations.get(request.path_params["conversation_id"])
        return JSONResponse(found.view())

    async def _update(self, request: Request) -> Response:
        def read(body: Body) -> Mapping[str, object]:
            if "metadata" not in body.fields:
                raise InvalidArgumentError("must be set; null removes it", field="metadata")
            return _read(body, "metadata")[1]

        metadata = await self._bodies.read(request, read)

        def change(conversation: StoredConversation) -> None:
            conversation.metadata = metadata

        found = await self._conversations.update(request.path_params["conversation_id"], change)
        return JSONResponse(found.view())

    async def _delete(self, request: Request) -> Response:
        conversation_id = request.path_params["conversation_id"]
        await self._conversations.delete(conversation_id)
        return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def _add(self, request: Request) -> Response:
        conversation_id = request.path_params["conversation_id"]
        key = check_key(request.headers.get(HEADER))
        # So that they follow the items of responses that have ended, and may be the outputs of their calls.
        known, _ = await self._responses.settled(conversation_id)
        items, _, ignored = await self._bodies.read(
            request, lambda body: _read(body, "items", earlier=known.items, key=key and f"{conversation_id} {key}")
        )
        if not items:
            raise InvalidArgumentError("must not be empty", field="items")

        def change(conversation: StoredConversation) -> None:
            stored = {_own(item): item for item in conversation.items}
            if any(stored.get(_own(item), item) != item for item in items):
                raise InvalidArgumentError("was used with other items", field="Idempotency-Key")
            if not any(_own(item) in stored for item in items):
                conversation.entries += [Entry(item) for item in items]

        await self._conversations.update(conversation_id, change, is_limited=True)
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": items, **ends}, headers=ignored_header(ignored))

    async def _list(self, request: Request) -> Response:
        found, _ = await self._responses.settled(request.path_params["conversation_id"])
        return JSONResponse(item_page(found.items, request.query_params))

    async def _retrieve_item(self, request: Request) -> Response:
        found, _ = await self._responses.settled(request.path_params["conversation_id"])
        return JSONResponse(_item(found, request.path_params["item_id"]))

    async def _delete_item(self, request: Request) -> Response:
        conversation_id, item_id = request.path_params["conversation_id"], request.path_params["item_id"]
        found, _ = await self._responses.settled(conversation_id, must_store=True)
        _item(found, item_id)

        def change(conversation: StoredConversation) -> None:
            conversation.entries = [
                entry for entry in conversation.entries if entry.item is None or entry.item["id"] != item_id
            ]

        return JSONResponse((await self._conversations.update(conversation_id, change)).view())


def _read(
    body: Body, *known: str, earlier: Sequence[Item] = (), key: str = ""
) -> tuple[list[Item], Mapping[str, object], list[str]]:
    """Return the items and the metadata of a body, and the fields that have no effect. The items may be outputs of
    calls in `earlier` ones; their ids follow from `key` if there is one. Raises InvalidArgumentError or
    UnsupportedError if a field is not `known`, or invalid.
    """
    for name in body.fields:
        if name not in known:
            raise InvalidArgumentError("is not a field of this endpoint; leave it out", field=name[:128])
    metadata = check_metadata(body)
    values = body.array("items")
    if len(values) > _MAX_NEW_ITEMS:
        raise InvalidArgumentError(f"has {len(values)} items; must have at most {_MAX_NEW_ITEMS}", field="items")
    ignored: list[str] = []
    items: list[Item] = []
    for index, item in enumerate(body.objects("items")):
        # Items are those of the input of responses.
        try:
            ignored += check_fields(Body({"input": [item.fields]}), RESPONSES, RESPONSES_TYPES, RESPONSES_OPAQUE)
        except (InvalidArgumentError, UnsupportedError) as error:
            raise type(error)(error.message, field=error.field.replace("input[0]", f"items[{index}]", 1)) from None
        items.append(_new(item.fields, request_id_of(f"{key} {index}", PATH) if key else uuid.uuid4().hex))
    turns = Turns(True)
    turns.expect(earlier)
    turns.add(body.objects("items"))
    return items, metadata, [name.replace("input", "items", 1) for name in dict.fromkeys(ignored)]


def _new(item: Item, own: str) -> Item:
    """Return an item as it is stored, with an id that ends with `own`."""
    kind = str(item.get("type") or "message")
    new = listed(item, f"{_PREFIXES.get(kind, 'item')}_{own}")
    return {**new, "status": "completed"} if kind != "reasoning" else new


def _own(item: Item) -> str:
    """Return an item's id without the prefix for its type."""
    return str(item["id"]).rpartition("_")[2]


def _item(conversation: StoredConversation, item_id: str) -> Item:
    for item in conversation.items:
        if item["id"] == item_id:
            return item
    raise NotFoundError(f"no item {item_id[:64]!r} was found in this conversation")
