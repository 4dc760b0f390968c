"""The routes of the Files API."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from midstream.errors import InvalidArgumentError, MidstreamError, NotFoundError
from router.authentication import current_caller
from router.pipeline.client_documents import ClientDocuments
from router.pipeline.idempotency import HEADER, check_key
from router.protocols.batches.files import FILE_PREFIX, FileInfo, Files, check_after, new_id
from router.protocols.batches.keys import claim
from router.protocols.openai.endpoints import Endpoint, is_ascending, mapped, page_limit

PATH = "/v1/files"
_PURPOSES = ("batch", "user_data")
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = frozenset({"purpose", _ANCHOR, _SECONDS})
MIN_TTL_S, MAX_TTL_S = 3600, 30 * 24 * 3600
_MAX_LISTED = 1000


class FilesApi:
    """Serves /v1/files."""

    def __init__(self, documents: ClientDocuments, files: Files, *, max_file_bytes: int, ttl_s: int) -> None:
        """`ttl_s` is how long a file is stored, unless its upload sets a shorter time."""
        self._documents = documents
        self._files = files
        self._max_file_bytes = max_file_bytes
        self._ttl_s = ttl_s

    def routes(self) -> list[Route]:
        one = f"{PATH}/{{file_id}}"
        endpoints: list[tuple[str, str, Endpoint, tuple[str, ...]]] = [
            ("POST", PATH, self._upload, ()),
            ("GET", PATH, self._list, ("after", "limit", "order", "purpose")),
            ("GET", one, self._retrieve, ()),
            ("DELETE", one, self._delete, ()),
            ("GET", f"{one}/content", self._content, ()),
        ]
        return [Route(path, mapped(endpoint, query), methods=[method]) for method, path, endpoint, query in endpoints]

    async def _upload(self, request: Request) -> Response:
        from router.protocols.batches.upload import Form

        owner, created_at = current_caller.get().owner, int(time.time())
        form = Form(request.headers.get("content-type", ""))
        contents = form.file(request.stream())
        key = check_key(request.headers.get(HEADER))
        cell, file_id = await claim(self._documents, self._documents.cells.any(), owner, key, PATH, new_id(FILE_PREFIX))
        known = None
        if key:
            try:
                _, known = await self._files.get(owner, file_id)
            except NotFoundError:
                pass
            else:
                file_id = new_id(FILE_PREFIX)  # a temporary file, to compare its contents with the known file
        try:
            num_bytes, digest = await self._files.write(
                cell, owner, file_id, contents, expires_at=created_at + self._ttl_s, limit=self._max_file_bytes
            )
        except (MidstreamError, ClientDisconnect):
            # Otherwise the chunks would be stored until the expiry of the file. With a key, another call with that key
            # may be writing them.
            if not key or known is not None:
                await self._files.delete(cell, owner, file_id)
            raise
        purpose = form.fields.get("purpose", "")
        if known is not None:
            await self._files.delete(cell, owner, file_id)
            if (known.digest, known.purpose) != (digest, purpose):
                raise InvalidArgumentError("was used with another file", field="Idempotency-Key")
            return JSONResponse(known.view())
        try:
            expires_at = created_at + self._lifetime_s(form.fields)
        except InvalidArgumentError:
            await self._files.delete(cell, owner, file_id)
            raise
        info = FileInfo(file_id, num_bytes, created_at, expires_at, form.filename, purpose, digest)
        await self._files.create(cell, owner, info)
        return JSONResponse(info.view())

    def _lifetime_s(self, fields: dict[str, str]) -> int:
        """Check the fields of a form; return for how long the file is stored."""
        unknown = sorted(fields.keys() - _FIELDS)
        if unknown:
            raise InvalidArgumentError("is not a field of this endpoint; leave it out", field=unknown[0][:128])
        if fields.get("purpose") not in _PURPOSES:
            raise InvalidArgumentError(f"must be one of {', '.join(_PURPOSES)}", field="purpose")
        if _ANCHOR not in fields and _SECONDS not in fields:
            return self._ttl_s
        if fields.get(_ANCHOR) != "created_at":
            raise InvalidArgumentError("must be created_at", field="expires_after.anchor")
        return min(checked_ttl(fields.get(_SECONDS, ""), "expires_after.seconds"), self._ttl_s)

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        limit = page_limit(query, _MAX_LISTED, _MAX_LISTED)
        found = await self._files.list(
            current_caller.get().owner,
            after=check_after(query.get("after", ""), FILE_PREFIX),
            limit=limit + 1,
            ascending=is_ascending(query),
            purpose=query.get("purpose", ""),
        )
        return JSONResponse(page([info.view() for info in found], limit))

    async def _retrieve(self, request: Request) -> Response:
        _, info = await self._files.get(current_caller.get().owner, request.path_params["file_id"])
        return JSONResponse(info.view())

    async def _delete(self, request: Request) -> Response:
        owner = current_caller.get().owner
        cell, info = await self._files.get(owner, request.path_params["file_id"])
        await self._files.delete(cell, owner, info.id)
        return JSONResponse({"id": info.id, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        owner = current_caller.get().owner
        cell, info = await self._files.get(owner, request.path_params["file_id"])
        contents: AsyncIterator[bytes] = self._files.contents(cell, owner, info.id)
        headers = {"content-length": str(info.bytes)}
        return StreamingResponse(contents, media_type="application/octet-stream", headers=headers)


def checked_ttl(value: object, field: str) -> int:
    """Parse a lifetime in seconds. Raises InvalidArgumentError if it is not in the range that OpenAI allows."""
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) < 10 and MIN_TTL_S <= int(text) <= MAX_TTL_S):
        raise InvalidArgumentError(f"must be in {MIN_TTL_S}..{MAX_TTL_S}", field=field)
    return int(text)


def page(views: list[dict[str, object]], limit: int) -> dict[str, object]:
    """Return a page of a list; `views` has one item more than fits on the page if there is a next page."""
    shown = views[:limit]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"object": "list", "data": shown, **ends, "has_more": len(views) > limit}
