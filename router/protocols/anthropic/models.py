"""The list of models for clients of Anthropic's API, which send the header `anthropic-version`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from midstream.errors import InvalidArgumentError
from router.protocols.anthropic.endpoints import mapped
from router.protocols.openai.endpoints import page_limit
from router.protocols.openai.models import Catalog

_PATH = "/v1/models"
_VERSION = b"anthropic-version"
_MAX_LISTED, _LISTED = 1000, 20
_LIFECYCLES = ("active", "deprecated", "retired")
Card = Mapping[str, Any]


def model_routes(models: Catalog) -> list[Route]:
    """Return the routes for requests with Anthropic's header; the others are left to OpenAI's routes."""

    async def list_models(request: Request, request_id: str) -> Response:
        return JSONResponse(model_page(await models.cards(), request.query_params))

    async def one_model(request: Request, request_id: str) -> Response:
        return JSONResponse(_fields(await models.card(request.path_params["name"])))

    return [
        _VersionedRoute(_PATH, mapped(list_models), methods=["GET"]),
        _VersionedRoute(f"{_PATH}/{{name:path}}", mapped(one_model), methods=["GET"]),
    ]


def serves_models(scope: Scope) -> bool:
    """Return whether a request asks for models in Anthropic's format."""
    return scope["path"].startswith(_PATH) and _has_version(scope)


def model_page(cards: Sequence[Card], query: QueryParams) -> dict[str, object]:
    """Return a page of a list of models, given in OpenAI's format. Raises InvalidArgumentError if a query parameter is
    invalid.
    """
    limit = page_limit(query, _LISTED, _MAX_LISTED)
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise InvalidArgumentError("must not be set together with after_id", field="before_id")
    found = [_fields(card) for card in cards] if "active" in _lifecycles(query) else []
    ids = [item["id"] for item in found]
    if before is not None:
        found = found[: _index(ids, before, "before_id")]
        page = found[-limit:]
    else:
        found = found[_index(ids, after, "after_id") + 1 if after is not None else 0 :]
        page = found[:limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"data": page, "has_more": len(found) > len(page), **ends}


def _lifecycles(query: QueryParams) -> Sequence[str]:
    """Return the stages whose models are listed; Anthropic's clients separate them by commas."""
    given = [*query.getlist("lifecycle"), *query.getlist("lifecycle[]")]
    stages = [stage for value in given for stage in value.split(",")]
    if not set(stages) <= set(_LIFECYCLES):
        raise InvalidArgumentError(f"must be one or more of {', '.join(_LIFECYCLES)}", field="lifecycle")
    return stages or _LIFECYCLES[:2]


def _index(ids: Sequence[object], wanted: str, field: str) -> int:
    if wanted not in ids:
        raise InvalidArgumentError(f"{wanted[:64]!r} is not the id of a listed model", field=field)
    return ids.index(wanted)


def _fields(card: Card) -> dict[str, object]:
    """Return Anthropic's description of a model, given OpenAI's."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


class _VersionedRoute(Route):
    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match only requests of clients of Anthropic's API."""
        if scope["type"] != "http" or not _has_version(scope):
            return Match.NONE, {}
        return super().matches(scope)


def _has_version(scope: Scope) -> bool:
    return any(name == _VERSION for name, _ in scope["headers"])
