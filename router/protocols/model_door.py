"""Passes calls of the HTTP port to the APIs of the model that they name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import unquote

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midstream.errors import InvalidArgumentError, MidstreamError
from router.protocols.body_reader import BodyReader
from router.protocols.openai.body import Body
from router.protocols.served_models import MODEL_HEADER, ServedModels

# Paths of calls whose body names the model. Calls of other paths concern a stored object or all models, except for
# those with the model in their path.
BY_BODY = frozenset(
    (
        "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/messages",
        "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/input_tokens", "/v1/embeddings", "/classify",
        "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
    )
)  # fmt: skip
_BY_PATH = "/v2/models/"
_Refuse = Callable[[MidstreamError, Scope, Receive, Send], Awaitable[None]]


class ModelDoor:
    """ASGI application that passes each call to the one of its model; the first one serves calls without a model."""

    def __init__(self, models: ServedModels, apps: Mapping[str, ASGIApp], bodies: BodyReader, refuse: _Refuse) -> None:
        """`apps` are by the names of the models; `refuse` answers a call that names none of them."""
        self._models, self._apps, self._bodies, self._refuse = models, apps, bodies, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a call."""
        app = self._apps[self._models.first.name]
        if scope["type"] == "http":
            try:
                name, receive = await self._name(scope, receive)
                app = self._apps[await self._models.named(name)]
            except ClientDisconnect:
                return
            except MidstreamError as error:
                await self._refuse(error, scope, receive, send)
                return
        await app(scope, receive, send)

    async def _name(self, scope: Scope, receive: Receive) -> tuple[str, Receive]:
        """Return the name of the model of a call, empty if it has none, and what receives the call's messages."""
        path, name = scope["path"], _header(scope)
        if scope["method"] == "POST" and path in BY_BODY:
            found, receive = await self._read(scope, receive)
            return found or name, receive
        if path.startswith(_BY_PATH):
            return self._in_path(path.removeprefix(_BY_PATH)) or name, receive
        return name, receive

    def _in_path(self, rest: str) -> str:
        """Return the name at the beginning of a path; names may have slashes."""
        parts = unquote(rest).split("/")
        prefixes = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
        # The app of the first model refuses other names in the format of this API.
        return next(filter(None, map(self._models.known, prefixes)), "")

    async def _read(self, scope: Scope, receive: Receive) -> tuple[str, Receive]:
        request = Request(scope, receive)
        data, name = await self._bodies.read_data(request, lambda data: (data, _model_of(data)))
        is_read = False

        async def replay() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": data, "more_body": False}

        return name, replay


def _model_of(data: bytes) -> str:
    """Return the model in a body; empty if there is none, or the body is invalid, which the API refuses."""
    try:
        name = Body.parse(data).fields.get("model")
    except InvalidArgumentError:
        return ""
    return name if isinstance(name, str) else ""


def _header(scope: Scope) -> str:
    values = [value for name, value in scope["headers"] if name == MODEL_HEADER.encode()]
    return values[-1].decode("latin-1") if values else ""
