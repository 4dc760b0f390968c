"""The routes of the Messages API."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import itemgetter
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from midstream.chunk import Chunk, Usage
from midstream.errors import InvalidArgumentError, MidstreamError, NotFoundError
from protos import generation_pb2 as pb
from router.pipeline.generation import FrontDoor, Output
from router.pipeline.idempotency import HEADER, check_key, make_repeatable, request_id_of
from router.pipeline.request_checks import check_model, check_name
from router.protocols.anthropic.endpoints import Endpoint, error_response, mapped
from router.protocols.anthropic.errors import error_body
from router.protocols.anthropic.models import serves_models
from router.protocols.anthropic.request import MessagesJob, read_messages
from router.protocols.anthropic.shapes import NO_CHANGE, PING, Fields, MessageWriter, usage_fields
from router.protocols.body_reader import BodyReader
from router.protocols.conversation import ChatModel, SequenceReader, keep_prefix
from router.protocols.fields import ignored_header, limit_without_effect
from router.protocols.openai import app as openai_app
from router.protocols.openai.models import Models
from router.protocols.own_fields import own_fields_of
from router.protocols.streaming import CompleteResponse, EventStream, StreamedResponse, dump

logger = logging.getLogger(__name__)

_PATH = "/v1/messages"
_VERSIONS = ("2026-10-21", "2023-06-01")
_OTHER_METHODS = ("GET", "PUT", "PATCH", "DELETE")


class MessagesApi:
    """Serves /v1/messages and /v1/messages/count_tokens."""

    def __init__(self, front: FrontDoor, bodies: BodyReader, chat: ChatModel) -> None:
        self._front = front
        self._folder = front.runner.model
        self._prompts = front.runner.prompts
        self._bodies = bodies
        self._chat = chat
        self._models = Models(self._folder, front.runner.cells)

    def routes(self) -> list[Route]:
        posts: dict[str, Endpoint] = {_PATH: self._create, f"{_PATH}/count_tokens": self._count}
        routes = [Route(path, mapped(endpoint), methods=["POST"]) for path, endpoint in posts.items()]
        routes += [Route(path, _wrong_method, methods=_OTHER_METHODS) for path in posts]
        return [*routes, Route(f"{_PATH}/{{rest:path}}", mapped(self._missing), methods=["GET", "POST", "DELETE"])]

    async def _create(self, request: Request, request_id: str) -> Response:
        with self._front.counting_failures("chat"):
            job = await self._job(request, needs_limit=True)
        native = job.conversation.request
        key = check_key(request.headers.get(HEADER))
        if key:
            make_repeatable(native, request_id_of(key, _PATH))
        check_name(native.request_id, "request_id")
        native.request_id = native.request_id or request_id
        await self._models.resolve([native])
        # If several breakpoints have the same duration, the last one covers the others.
        points = {point.duration_s: point for point in job.breakpoints}
        prefixes = {duration_s: job.prefix_of(point) for duration_s, point in points.items()}

        async def prepare() -> int:
            await job.conversation.prepare(self._prompts, self._folder, renders=True)
            return await self._keep(native, prefixes)

        return _Reply(self._front, job, key, prepare)

    async def _count(self, request: Request, request_id: str) -> Response:
        job = await self._job(request, needs_limit=False)
        native = job.conversation.request
        await self._models.resolve([native])
        check_model(native.model, self._folder)

        async def compute() -> Response:
            options = job.conversation.options
            ids = await self._front.run_unstarted(native, lambda: self._prompts.token_ids(native, options))
            return JSONResponse({"input_tokens": len(ids)}, headers=ignored_header(job.ignored))

        return CompleteResponse(compute, lambda error: error_response(error, request_id, job.names))

    async def _missing(self, request: Request, request_id: str) -> Response:
        raise NotFoundError(f"there is no endpoint {request.url.path[:128]} for {request.method}")

    async def _job(self, request: Request, *, needs_limit: bool) -> MessagesJob:
        version = request.headers.get("anthropic-version")
        if version not in _VERSIONS:
            what = f"{version[:32]!r} is not supported" if version else "must be set"
            raise InvalidArgumentError(f"{what}; use {_VERSIONS[0]}", field="anthropic-version")
        job = await self._bodies.read(request, lambda body: read_messages(body, self._chat, needs_limit=needs_limit))
        job.ignored.extend(limit_without_effect(job.conversation.request, self._folder))
        return job

    async def _keep(self, native: pb.GenerateRequest, prefixes: Mapping[int, pb.GenerateRequest | None]) -> int:
        """Retain each prefix for its duration in seconds, the key of `prefixes`; return the length of the longest in
        tokens.
        """
        kept = [0]
        # Where ranges overlap, the last one applies, so the one with the longest duration comes last.
        for duration_s, prefix in sorted(prefixes.items(), key=itemgetter(0)):
            size = len(native.token_ids.values)
            if prefix is not None:
                try:
                    size = _common(native.token_ids.values, await self._prompts.token_ids(prefix))
                except MidstreamError as error:
                    # The template cannot render a partial conversation; ignore the breakpoint, which is only a hint.
                    logger.debug("a prefix cannot be rendered: %s", error)
                    continue
            if size:
                keep_prefix(native, size if prefix is not None else None, duration_s)
            kept.append(size)
        return max(kept)


class _Reply(StreamedResponse):
    """The response to one job; a dropped connection aborts its request."""

    def __init__(self, front: FrontDoor, job: MessagesJob, key: str, prepare: Callable[[], Awaitable[int]]) -> None:
        """`prepare` completes the request, and returns how many tokens of its prompt are kept in the cache."""
        super().__init__(front.keep_alives, is_stream=job.is_stream)
        self._key = key
        self._front = front
        self._job = job
        self._prepare = prepare
        self._num_kept = 0
        self._has_begun = False  # whether the message has begun in the stream
        self._native = job.conversation.request
        self._id = self._native.request_id
        self._stop_words = list(self._native.stopping.stop_words)
        folder = front.runner.model
        self._writer = MessageWriter(
            self._id,
            job.model or folder.name,
            shows_thinking=job.shows_thinking,
            max_tokens=self._native.max_tokens,
            context_length=folder.max_sequence_length,
        )

    async def compute(self, events: EventStream) -> Response | None:
        async def prepare() -> None:
            self._num_kept = await self._prepare()

        opened = await self._front.start(self._native, None, self._key, prepare, self._job.conversation)
        reader = SequenceReader(self._job.conversation, self._id, 0)
        async with opened as output:
            if not self._job.is_stream:
                return JSONResponse(await self._whole(output, reader), headers=self.own_headers())
            await events.begin()
            await self._stream(output, reader, events)
        return None

    def own_headers(self) -> dict[str, str]:
        return {"request-id": quote(self._id, safe=""), **ignored_header(self._job.ignored)}

    def keep_alive(self) -> str:
        return _lines([NO_CHANGE if self._has_begun else PING])

    def refusal(self, error: MidstreamError) -> Response:
        """Return an error in Anthropic's format."""
        return error_response(error, self._id, self._job.names)

    def failure(self, error: MidstreamError) -> str:
        return _lines([error_body(error, self._id, self._job.names)])

    async def _whole(self, output: Output, reader: SequenceReader) -> Fields:
        while not output.is_final:
            for chunk in await output.take():
                self._writer.add(reader.read(chunk.text, is_final=chunk.is_sequence_final))
        output.raise_unfinished()
        self._writer.end(chunk, self._stop_words, {})
        message = self._writer.message(*self._writer.stop(chunk, self._stop_words), self._usage(chunk))
        return message | own_fields_of(chunk)

    async def _stream(self, output: Output, reader: SequenceReader, events: EventStream) -> None:
        await events.write(_lines(self._writer.begin(self._job.conversation.num_prompt_tokens)))
        self._has_begun = True
        while not output.is_final:
            for chunk in await output.take():
                written = self._writer.add(reader.read(chunk.text, is_final=chunk.is_sequence_final))
                if written:
                    await events.write(_lines(written))
        output.raise_unfinished()
        await events.write(_lines(self._writer.end(chunk, self._stop_words, self._usage(chunk))), more=False)

    def _usage(self, last: Chunk) -> Fields:
        return usage_fields(last.usage or Usage(), self._num_kept)


async def _wrong_method(request: Request) -> Response:
    body = error_body(InvalidArgumentError(f"{request.url.path} does not support {request.method}; use POST"))
    return JSONResponse(body, 405, headers={"allow": "POST"})


async def refuse(error: MidstreamError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send `error` for a request that does not reach an endpoint, in the format of the API for which it was meant."""
    if scope["path"].startswith(_PATH) or serves_models(scope):
        await error_response(error)(scope, receive, send)
    else:
        await openai_app.refuse(error, scope, receive, send)


def _lines(events: list[Fields]) -> str:
    return "".join(f"event: {event['type']}\ndata: {dump(event)}\n\n" for event in events)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists."""
    size = min(len(first), len(second))
    return next((i for i in range(size) if first[i] != second[i]), size)
