"""The routes of the Responses API.

A response is a request that its scheduler keeps (`keep_s`), together with the client's body (`attachment`). Its events
are a function of these two and of the request's tokens (writer.py), so nothing else is stored: any router can recreate
a response from its request, which is in a scheduler's journal, and resume the stream after any event.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from midstream.chunk import Chunk, Usage
from midstream.errors import (
    InvalidArgumentError,
    MidstreamError,
    NotFoundError,
    OutOfRangeError,
    OverloadedError,
    UnavailableError,
)
from protos import generation_pb2 as pb
from protos import scheduler_pb2
from router.pipeline.generation import FrontDoor, Output
from router.pipeline.idempotency import HEADER, check_key, keep, request_id_of
from router.pipeline.kept_requests import KeptRequests
from router.pipeline.prompt import PromptOptions
from router.pipeline.request_checks import check_model
from router.protocols.body_reader import BodyReader
from router.protocols.conversation import ChatModel, SequenceReader
from router.protocols.fields import ignored_header, limit_without_effect
from router.protocols.openai.body import Body
from router.protocols.openai.endpoints import (
    Endpoint,
    error_response,
    flag,
    id_header,
    integer,
    mapped,
)
from router.protocols.openai.errors import error_body
from router.protocols.openai.models import Models
from router.protocols.responses.conversations import Conversations, StoredConversation
from router.protocols.responses.items import Item, item_page, listed, owner_of, references
from router.protocols.responses.log_probs import TokenLogProbs
from router.protocols.responses.request import ResponseJob, conversation_id_of, previous_id, read_response
from router.protocols.responses.stored import read_stored
from router.protocols.responses.writer import Fields, ResponseWriter, Status
from router.protocols.streaming import CompleteResponse, EventStream, StreamedResponse, dump

_PATH = "/v1/responses"
_PREFIX = "resp_"
_NS_PER_S = 1_000_000_000
_INCLUDE = ("include", "include[]")  # has no effect: there is no output of server tools


@dataclass(slots=True)
class StoredResponse:
    """A response, new or stored, with everything that is needed to write its events.

    Attributes:
        owner: The API of its model.
        response_id: The id that the client sees.
        context: Input and output items of the responses that it continues.
        key: Idempotency key with which it is created; empty if there is none.
        conversation_id: The conversation to which its items are added; empty if there is none.
        conversation_version: Version of the conversation from which `context` is.
    """

    owner: ResponsesApi
    response_id: str
    job: ResponseJob
    context: list[Item]
    created_at: int
    model: str
    key: str = ""
    conversation_id: str = ""
    conversation_version: int = 0
    has_started: bool = True
    has_finished: bool = False

    def writer(self, log_probs: TokenLogProbs | None = None) -> ResponseWriter:
        """Return a writer of the response, which reports these log probabilities."""
        head = {"created_at": self.created_at, "model": self.model, **self.job.echo}
        job = self.job
        return ResponseWriter(
            self.response_id,
            head,
            is_background=job.is_background,
            custom_tools=job.custom_tools,
            namespaces=job.namespaces,
            shows_hidden=job.shows_hidden,
            log_probs=log_probs,
        )


class ResponsesApi:
    """Serves /v1/responses.

    Attributes:
        peers: The APIs of all models of the router, by name, since a response may continue one of another model.
    """

    def __init__(
        self,
        front: FrontDoor,
        bodies: BodyReader,
        chat: ChatModel,
        kept: KeptRequests,
        conversations: Conversations,
        ttl_s: int,
    ) -> None:
        """`ttl_s` is how long a response is stored."""
        self.peers: Mapping[str, ResponsesApi] = {front.runner.model.name: self}
        self.conversations = conversations
        self.keep_alives = front.keep_alives
        self._front = front
        self._folder = front.runner.model
        self._prompts = front.runner.prompts
        self._bodies = bodies
        self._chat = chat
        self._kept = kept
        self._ttl_s = ttl_s
        self._models = Models(self._folder, front.runner.cells)

    def routes(self) -> list[Route]:
        """Return the routes for the HTTP port."""
        one = f"{_PATH}/{{response_id}}"
        endpoints: list[tuple[str, str, Endpoint, tuple[str, ...]]] = [
            ("POST", _PATH, self._create, ()),
            ("POST", f"{_PATH}/input_tokens", self._count, ()),
            ("GET", one, self._retrieve, (*_INCLUDE, "stream", "starting_after", "include_obfuscation")),
            ("DELETE", one, self._delete, ()),
            ("POST", f"{one}/cancel", self._cancel, ()),
            ("GET", f"{one}/input_items", self._list_items, (*_INCLUDE, "after", "limit", "order")),
        ]
        return [Route(path, mapped(endpoint, query), methods=[method]) for method, path, endpoint, query in endpoints]

    async def _create(self, request: Request) -> Response:
        with self._front.counting_failures("chat"):
            return await self._create_reply(request)

    async def _create_reply(self, request: Request) -> Response:
        body = await self._with_references(await self._bodies.read(request, lambda body: body))
        key = check_key(request.headers.get(HEADER))
        response_id = _PREFIX + (request_id_of(key, _PATH) if key else uuid.uuid4().hex)
        context, conversation_id, version = await self._preceding(body, response_id)
        job = read_response(body, self._chat, context)
        native = job.conversation.request
        job.ignored.extend(limit_without_effect(native, self._folder, "max_output_tokens"))
        native.request_id = response_id
        await self._models.resolve([native])
        if job.is_stored:
            native.keep_s = self._ttl_s
            attachment = {"body": body.fields, "context": context, "conversation": conversation_id}
            native.attachment = json.dumps(attachment).encode()
        if key:
            keep(native)
        model = native.model or self._folder.name
        stored = StoredResponse(self, response_id, job, context, 0, model, key, conversation_id, version)
        return _Reply(self, stored, native)

    async def _count(self, request: Request) -> Response:
        body = await self._with_references(await self._bodies.read(request, lambda body: body))
        context, _, _ = await self._preceding(body)
        job = read_response(body, self._chat, context)
        native = job.conversation.request
        await self._models.resolve([native])
        check_model(native.model, self._folder)

        async def compute() -> Response:
            ids = await self._front.run_unstarted(native, lambda: self._prompts.token_ids(native))
            counted = {"object": "response.input_tokens", "input_tokens": len(ids)}
            return JSONResponse(counted, headers=ignored_header(job.ignored))

        return CompleteResponse(compute, lambda error: error_response(error, job.names))

    async def _retrieve(self, request: Request) -> Response:
        query = request.query_params
        is_stream = flag(query, "stream")
        after = integer(query, "starting_after")
        if after is not None and not is_stream:
            raise InvalidArgumentError("requires stream=true", field="starting_after")
        stored = await self._stored(request.path_params["response_id"])
        if is_stream:
            stored.job.is_stream = True
            return _Reply(stored.owner, stored, None, -1 if after is None else after)
        return JSONResponse(await stored.owner.now(stored))

    async def _delete(self, request: Request) -> Response:
        stored = await self._stored(request.path_params["response_id"])
        if stored.conversation_id:  # its items remain there
            with contextlib.suppress(NotFoundError):
                await self.settled(stored.conversation_id, must_store=True)
        await self._kept.delete(stored.response_id)
        return JSONResponse({"id": stored.response_id, "object": "response", "deleted": True})

    async def _cancel(self, request: Request) -> Response:
        stored = await self._stored(request.path_params["response_id"])
        if not stored.job.is_background:
            raise InvalidArgumentError("only background responses can be cancelled", field="background")
        if not stored.has_finished:
            await self._front.abort(stored.response_id)
            stored.has_finished = True
        return JSONResponse(await stored.owner.now(stored))

    async def _list_items(self, request: Request) -> Response:
        stored = await self._stored(request.path_params["response_id"])
        return JSONResponse(item_page(_input_of(stored), request.query_params))

    async def settled(self, conversation_id: str, *, must_store: bool = False) -> tuple[StoredConversation, int]:
        """Return a conversation, in which the responses that have ended are replaced by their items, and its version.
        Raises NotFoundError if there is none with this id, or, if `must_store`, OverloadedError if the client stores
        too much to store the items there.
        """
        found, version = await self.conversations.get(conversation_id)
        items: dict[str, list[Item]] = {}
        for entry in found.waiting:
            try:
                stored = await self._stored(entry.response_id)
            except NotFoundError:
                if self.conversations.is_lost(entry, time.time()):
                    items[entry.response_id] = []
                continue
            if stored.has_finished:
                writer = await self.replay(stored)
                items[entry.response_id] = [*_input_of(stored), *writer.items]
        if not items:
            return found, version
        try:
            await self.conversations.update(conversation_id, lambda conversation: conversation.settle(items))
        except OverloadedError:
            if must_store:
                raise
            found.settle(items)
            return found, version
        return await self.conversations.get(conversation_id)

    async def _preceding(self, body: Body, response_id: str = "") -> tuple[list[Item], str, int]:
        """Return the items that precede the input of a body, and its conversation, if any, with the version that was
        read. `response_id` is the response that the body creates.
        """
        conversation_id = conversation_id_of(body)
        if not conversation_id:
            return await self._context(previous_id(body)), "", 0
        found, version = await self.settled(conversation_id)
        return found.before(response_id), conversation_id, version

    async def _context(self, response_id: str) -> list[Item]:
        """Return the input and output items of a response and of all before it; empty if there is no response."""
        if not response_id:
            return []
        try:
            stored = await self._stored(response_id)
        except NotFoundError as error:
            raise NotFoundError(error.message, field="previous_response_id") from None
        if not stored.has_finished:
            raise InvalidArgumentError("has not ended yet", field="previous_response_id")
        writer = await self.replay(stored)
        return [*stored.context, *stored.job.items, *writer.items]

    async def _with_references(self, body: Body) -> Body:
        """Return a body in which the referenced items replace the references to them, so that the new response does not
        depend on the responses that have these items.
        """
        found = list(references(body))
        if not found:
            return body
        items = body.array("input").copy()
        known: dict[str, dict[object, Item]] = {}
        for index, item_id, path in found:
            owner = owner_of(item_id)
            if owner not in known:
                known[owner] = await self._items_of(_PREFIX + owner, path)
            if item_id not in known[owner]:
                raise NotFoundError(f"no item {item_id[:64]!r} was found; only stored responses have items", field=path)
            items[index] = known[owner][item_id]
        return Body({**body.fields, "input": items})

    async def _items_of(self, response_id: str, field: str) -> dict[object, Item]:
        """Return the input and output items of a response, by id; none if the response is not stored. Raises
        InvalidArgumentError, with `field`, if the response has not ended.
        """
        try:
            stored = await self._stored(response_id)
        except NotFoundError:
            return {}
        if not stored.has_finished:
            raise InvalidArgumentError("is an item of a response that has not ended yet", field=field)
        writer = await self.replay(stored)
        return {item["id"]: item for item in (*_input_of(stored), *writer.items)}

    async def _stored(self, response_id: str) -> StoredResponse:
        """Return a response that the caller has stored. Raises NotFoundError if there is none with this id."""
        missing = NotFoundError(f"no response {response_id[:64]!r} was found")
        if not response_id.startswith(_PREFIX):
            raise missing
        try:
            found = await self._kept.get(response_id)
        except NotFoundError:
            raise missing from None
        stored = self.peers.get(found.request.model, self).read(response_id, found)
        if stored is None:
            raise missing
        return stored

    def read(self, response_id: str, found: scheduler_pb2.GetRequestResponse) -> StoredResponse | None:
        """Return a response of this API's model, given its request; None if the request is of another API."""
        native = found.request
        if not native.attachment:
            return None
        attachment = json.loads(native.attachment)
        job = read_stored(attachment["body"], self._chat, attachment["context"])
        job.conversation.note_prompt(native.token_ids.values, self._prompts.tokenizer)
        created_at = native.arrival_time_unix_ns // _NS_PER_S
        return StoredResponse(
            self,
            response_id,
            job,
            attachment["context"],
            created_at,
            job.conversation.request.model or self._folder.name,
            conversation_id=attachment["conversation"],
            has_started=found.has_started,
            has_finished=found.has_finished,
        )

    async def now(self, stored: StoredResponse) -> Fields:
        """Return a response in its current state, with its output once it has ended."""
        if stored.has_finished:
            writer = self.writer(stored)
            return await self.whole(stored, writer, self.resume(stored))
        status: Status = "in_progress" if stored.has_started or not stored.job.is_background else "queued"
        return stored.writer().response(status)

    def writer(self, stored: StoredResponse) -> ResponseWriter:
        """Return a writer for a client's copy of a response."""
        job = stored.job
        if job.num_top_log_probs is None:
            return stored.writer()
        tokenizer = self._prompts.tokenizer
        output = job.conversation.request.output
        skips = output.skip_special_tokens or not output.HasField("skip_special_tokens")
        skipped = tokenizer.special_ids if skips else frozenset[int]()
        return stored.writer(TokenLogProbs(tokenizer.token_bytes, skipped, job.num_top_log_probs))

    async def replay(self, stored: StoredResponse) -> ResponseWriter:
        """Rebuild a response that has ended, without log probabilities."""
        writer = stored.writer()
        await stored.owner.whole(stored, writer, stored.owner.resume(stored))
        return writer

    def resume(self, stored: StoredResponse) -> Output:
        """Return the output of a stored response, from the beginning."""
        return self._front.resume(stored.response_id, 0, (), None, stored.job.conversation)

    async def whole(self, stored: StoredResponse, writer: ResponseWriter, output: Output) -> Fields:
        """Return the complete response after it has ended."""
        reader = SequenceReader(stored.job.conversation, stored.response_id, 0)
        writer.begin()
        async with output:
            while not output.is_final:
                for chunk in await output.take():
                    writer.add(chunk, reader.read(chunk.text, is_final=chunk.is_sequence_final))
        last = writer.end(chunk, await self.usage(chunk, writer))[-1]["response"]
        assert isinstance(last, dict)
        return last

    async def usage(self, chunk: Chunk, writer: ResponseWriter) -> Fields:
        """Return the usage of a response that ended with `chunk`."""
        usage = chunk.usage or Usage()
        num_reasoning = 0
        if writer.reasoning:
            text = pb.GenerateRequest(prompt=writer.reasoning)
            num_reasoning = len(await self._prompts.token_ids(text, PromptOptions(adds_special_tokens=False)))
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(num_reasoning, usage.completion_tokens)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    async def open(self, stored: StoredResponse, native: pb.GenerateRequest | None) -> Output:
        """Start a new response, or read a stored one."""
        if native is None:
            return self.resume(stored)

        async def prepare() -> None:
            await stored.job.conversation.prepare(self._prompts, self._folder, renders=True)

        conversation_id, is_new = stored.conversation_id, False
        if conversation_id:
            # It is entered first: a response that runs, but is not in its conversation, would be lost there.
            is_new = await self.conversations.enter(conversation_id, stored.response_id, stored.conversation_version)
        try:
            output = await self._front.start(native, None, stored.key, prepare, stored.job.conversation)
        except MidstreamError as error:
            if is_new and not isinstance(error, UnavailableError):  # otherwise it may have been accepted
                await self.conversations.update(conversation_id, lambda found: found.settle({stored.response_id: []}))
            if not isinstance(error, InvalidArgumentError):
                raise
            if error.field == "attachment":
                raise InvalidArgumentError(f"{error.message}; store=false makes it smaller", field="input") from None
            raise
        if stored.key:
            stored.created_at = await self._kept.arrival_time(stored.response_id)
        else:
            stored.created_at = native.arrival_time_unix_ns // _NS_PER_S
        return output


class _Reply(StreamedResponse):
    """The HTTP reply to a request for a response object. A dropped connection aborts the request, unless it is in the
    background.
    """

    def __init__(
        self, api: ResponsesApi, stored: StoredResponse, native: pb.GenerateRequest | None, after: int = -1
    ) -> None:
        """`native` is the request to start, None for a stored response; `after` is the last event that was received."""
        super().__init__(api.keep_alives, is_stream=stored.job.is_stream)
        self._api = api
        self._stored = stored
        self._native = native
        self._after = after
        self._last = after

    async def compute(self, events: EventStream) -> Response | None:
        output = await self._api.open(self._stored, self._native)
        if not self._stored.job.is_stream:
            return JSONResponse(await self._whole(output), headers=self.own_headers())
        async with output:
            if not self._stored.has_finished:  # otherwise a position beyond the end is refused before the first event
                await events.begin()
            await self._stream(output, events)
        return None

    def own_headers(self) -> dict[str, str]:
        return id_header(self._stored.response_id) | ignored_header(self._stored.job.ignored)

    def keep_alive(self) -> str:
        """Return an event that repeats the number of the last one, so that it does not change where to resume."""
        event = {"type": "keepalive", "sequence_number": self._last}
        return f"event: keepalive\ndata: {dump(event)}\n\n" if self._last >= 0 else super().keep_alive()

    def refusal(self, error: MidstreamError) -> Response:
        return error_response(error, self._stored.job.names, self._stored.response_id)

    def failure(self, error: MidstreamError) -> str:
        """Return the error as an event of this stream, with the number of the last event, so that a resume skips no
        event.
        """
        found = error_body(error, self._stored.job.names)["error"]
        assert isinstance(found, dict)
        fields = {name: found[name] for name in ("code", "message", "param")}
        return f"event: error\ndata: {dump({'type': 'error', 'sequence_number': self._last, **fields})}\n\n"

    async def _whole(self, output: Output) -> Fields:
        writer = self._api.writer(self._stored)
        if not self._stored.job.is_background:
            return await self._api.whole(self._stored, writer, output)
        async with output:  # the request is detached, so it continues
            return writer.response("queued")

    async def _stream(self, output: Output, events: EventStream) -> None:
        stored = self._stored
        writer, reader = self._api.writer(stored), SequenceReader(stored.job.conversation, stored.response_id, 0)
        await self._write(events, writer.begin())
        while not output.is_final:
            for chunk in await output.take():
                parsed = reader.read(chunk.text, is_final=chunk.is_sequence_final)
                await self._write(events, writer.add(chunk, parsed))
        last = writer.end(chunk, await self._api.usage(chunk, writer))
        if self._after > int(str(last[-1]["sequence_number"])):
            raise OutOfRangeError(f"is {self._after}, beyond the last event", field="starting_after")
        await self._write(events, last)
        await events.begin()
        await events.write("", more=False)

    async def _write(self, events: EventStream, written: list[Fields]) -> None:
        """Write the events that the client does not have yet, all at once."""
        new = [event for event in written if int(str(event["sequence_number"])) > self._after]
        if new:
            self._last = int(str(new[-1]["sequence_number"]))
            await events.begin()
            await events.write("".join(f"event: {event['type']}\ndata: {dump(event)}\n\n" for event in new))


def _input_of(stored: StoredResponse) -> list[Item]:
    """Return the input items of a response as they appear in lists."""
    own = stored.response_id.removeprefix(_PREFIX)
    items: list[Item] = []
    known: set[object] = set()
    for index, item in enumerate(stored.job.items):
        # A client may send an item twice with the same id, but ids must be unique for paging.
        item_id = item.get("id")
        item_id = item_id if item_id and item_id not in known else f"msg_{own}_in_{index}"
        known.add(item_id)
        items.append(listed(item, item_id))
    return items
