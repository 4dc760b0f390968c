"""The routes of the router's HTTP port."""

from __future__ import annotations

import contextvars
import json
from collections.abc import Awaitable, Callable

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from midstream.errors import InvalidArgumentError, MidstreamError
from midstream.telemetry import Metrics
from protos import generation_pb2 as pb
from router.pipeline.generation import FrontDoor
from router.pipeline.idempotency import HEADER, check_key, check_no_id
from router.pipeline.kept_requests import KeptRequests
from router.pipeline.prompt import PromptOptions
from router.pipeline.request_checks import check_model
from router.protocols.anthropic.models import model_routes
from router.protocols.body_reader import BodyReader
from router.protocols.conversation import ChatModel
from router.protocols.fields import CHAT, COMPLETIONS, TOKENIZE, ignored_fields, ignored_header, limit_without_effect
from router.protocols.long_json import render_long_json
from router.protocols.openai.body import Body
from router.protocols.openai.endpoints import Endpoint, error_response, mapped
from router.protocols.openai.errors import Names, error_body, http_status
from router.protocols.openai.jobs import Job, Vocabulary, chat_job, completion_job
from router.protocols.openai.models import Catalog, Models
from router.protocols.openai.openapi import document
from router.protocols.openai.reply import Reply
from router.protocols.retries import retry_headers
from router.protocols.streaming import CompleteResponse

# A response with more tokens than this is rendered in a thread.
_MAX_INLINE_TOKENS = 2000
# Fields of a conversation that determine its prompt; /tokenize ignores the others.
_RENDERED = frozenset(
    (
        "model", "messages", "tools", "tool_choice", "add_special_tokens", "add_generation_prompt",
        "continue_final_message", "chat_template_kwargs", "reasoning_effort", "truncate_prompt_tokens",
    )
)  # fmt: skip
_LIMITS = frozenset(("max_tokens", "max_completion_tokens"))  # the room that truncation of a prompt leaves for output


class OpenAiApi:
    """Serves OpenAI's endpoints, /health and /metrics."""

    def __init__(
        self,
        front: FrontDoor,
        metrics: Metrics,
        problems: Callable[[], list[str]],
        bodies: BodyReader,
        chat: ChatModel,
        kept: KeptRequests,
        stalled: Callable[[], list[str]] = list,
        catalog: Catalog | None = None,
        ready: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        """`catalog` has all models of the router, by default the only one; `ready` returns whether one of them, given
        by one of its names or an adapter's, is ready, by default if there are no `problems`.
        """
        self._front = front
        self._model = front.runner.model
        self._prompts = front.runner.prompts
        self._metrics = metrics
        self._problems = problems
        self._stalled = stalled
        self._bodies = bodies
        self._kept = kept
        self._models = Models(self._model, front.runner.cells)
        self._catalog = catalog or Catalog([self._models])
        self._ready = ready or self._has_no_problems
        tokenizer = self._prompts.tokenizer
        self._vocabulary = Vocabulary(tokenizer.token_bytes, chat, tokenizer.special_ids)
        self._document = JSONResponse(document(self._model))

    def app(self) -> Starlette:
        posts: dict[str, Endpoint] = {
            "/v1/completions": lambda request: self._generate(request, completion_job),
            "/v1/chat/completions": lambda request: self._generate(request, chat_job),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        gets: dict[str, Endpoint] = {
            "/v1/models": self._list_models,
            "/v1/models/{name:path}": self._one_model,
            "/health": self._health,
            "/live": self._live,
            "/metrics": self._show_metrics,
            "/openapi.json": self._describe,
        }
        routes = model_routes(self._catalog)  # routes of Anthropic's API
        routes += [Route(path, mapped(endpoint, ()), methods=["POST"]) for path, endpoint in posts.items()]
        # Probes, scrapers and Anthropic's clients send their own parameters.
        routes += [Route(path, mapped(endpoint), methods=["GET"]) for path, endpoint in gets.items()]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    async def _generate(self, request: Request, make: Callable[[Body, Vocabulary], Job]) -> Response:
        key = check_key(request.headers.get(HEADER))
        context = contextvars.copy_context()  # large bodies are read in a thread

        def make_job(body: Body) -> Job:
            job = make(body, self._vocabulary)
            if key:
                context.run(check_no_id, body.text("request_id") or "")
                job.make_repeatable(key, request.url.path)
            job.ignored += ignored_fields(body, CHAT if make is chat_job else COMPLETIONS)
            name = job.names.get("max_tokens", "max_tokens")
            job.ignored += limit_without_effect(job.requests[0], self._model, name)
            return job

        with self._front.counting_failures("chat" if make is chat_job else "text_completion"):
            job = await self._bodies.read(request, make_job)
            await self._models.resolve(job.requests)
        return Reply(self._front, job, request.headers.get("last-event-id"), self._kept)

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await self._catalog.cards()})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        card = await self._catalog.card(name)
        # Clients of KServe's v1 protocol ask here whether the model is ready.
        return JSONResponse({**card, "name": card["id"], "ready": await self._ready(name)})

    async def _has_no_problems(self, name: str) -> bool:
        return not self._problems()

    async def _tokenize(self, request: Request) -> Response:
        body = await self._bodies.read(request, lambda body: body)
        check_model(body.text("model") or "", self._model)
        names: Names = {}
        ignored: list[str] = []
        if body.fields.get("messages") is not None:  # not marked as read, since their parts are read one by one
            job = chat_job(body, self._vocabulary)
            native, options, names = job.requests[0], job.options, job.names
            used = _RENDERED | _LIMITS if options.max_tokens == -1 else _RENDERED
            unused = [name for name, value in body.fields.items() if value and name in CHAT and name not in used]
            ignored = [*job.ignored, *unused]
        else:
            native = pb.GenerateRequest(prompt=body.text("prompt") or "")
            options = PromptOptions(adds_special_tokens=body.flag("add_special_tokens"))
        returns_texts = body.flag("return_token_strs")
        ignored += [name for name in ignored_fields(body, TOKENIZE) if name not in ignored]

        async def compute() -> Response:
            ids = await self._front.run_unstarted(native, lambda: self._prompts.token_ids(native, options))

            def render() -> bytes:
                answer = {"tokens": ids, "count": len(ids), "max_model_len": self._model.max_sequence_length}
                if returns_texts:
                    answer["token_strs"] = [self._prompts.tokenizer.token(token) or "" for token in ids]
                return render_long_json(answer)

            content = await self._bodies.render(render) if len(ids) > _MAX_INLINE_TOKENS else render()
            return Response(content, media_type="application/json", headers=ignored_header(ignored))

        return CompleteResponse(compute, lambda error: error_response(error, names))

    async def _detokenize(self, request: Request) -> Response:
        body = await self._bodies.read(request, lambda body: body)
        check_model(body.text("model") or "", self._model)
        ids = body.token_ids("tokens")
        if len(ids) > self._model.max_sequence_length:
            raise InvalidArgumentError(
                f"has {len(ids)} token ids; must have at most {self._model.max_sequence_length}", field="tokens"
            )
        if max(ids, default=0) >= self._model.vocab_size:
            raise InvalidArgumentError(f"must be in 0..{self._model.vocab_size - 1}", field="tokens")
        text = self._prompts.tokenizer.decode(ids, skip_special_tokens=False)
        return JSONResponse({"prompt": text}, headers=ignored_header(ignored_fields(body, TOKENIZE)))

    async def _health(self, request: Request) -> Response:
        return _health_answer(self._problems())

    async def _live(self, request: Request) -> Response:
        return _health_answer(self._stalled())

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _describe(self, request: Request) -> Response:
        return self._document


def _health_answer(problems: list[str]) -> Response:
    body = {"status": "NOT_SERVING" if problems else "SERVING", "stalled": problems}
    return JSONResponse(body, 503 if problems else 200)


async def refuse(error: MidstreamError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send `error` for a request that does not reach an endpoint."""
    body = {"error": str(error)} if _is_kserve(scope["path"]) else error_body(error)
    await JSONResponse(body, http_status(error), headers=retry_headers(error))(scope, receive, send)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "internal error"
    given = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if status == 404:
        detail = f"there is no endpoint {request.url.path[:128]}; {_advice(request)}"
    elif status == 405:
        # The error's own header names the methods of only one of the path's routes.
        given["Allow"] = ", ".join(sorted(_methods(request, request.url.path)))
        detail = f"{request.url.path[:128]} does not support {request.method}; use {given['Allow']}"
    shown = {"message": detail, "type": "invalid_request_error", "param": None, "code": None}
    body = {"error": detail if _is_kserve(request.url.path) else shown}
    return Response(json.dumps(body), status, given, media_type="application/json")


def _is_kserve(path: str) -> bool:
    """Return whether a path is one of KServe's protocol v2, whose clients print an error as a text."""
    return path.startswith("/v2") and not path.startswith("/v2/rerank")


def _advice(request: Request) -> str:
    """Return what to do about a path that does not exist; often /v1 is missing from a client's base URL or repeated."""
    path = request.url.path
    likely = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    if request.method in _methods(request, likely):
        return f"use {likely[:128]} (check the client's base URL)"
    return "/openapi.json lists all endpoints"


def _methods(request: Request, path: str) -> set[str]:
    """Return the methods that a path supports."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    scope = {**request.scope, "path": path}
    found = [route.methods or () for route in routes if route.matches(scope)[0] is not Match.NONE]
    return {method for methods in found for method in methods}
