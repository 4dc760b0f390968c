"""The routes of the Batches API. The batches that they create are run by runner.py."""

from __future__ import annotations

import hashlib
import json
import re
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from midstream.errors import InvalidArgumentError, NotFoundError
from router.authentication import current_caller
from router.pipeline.client_documents import ClientDocuments
from router.pipeline.idempotency import HEADER, check_key
from router.protocols.batches.batch import BATCH_PREFIX, ENDED, Batch, Batches
from router.protocols.batches.files import Files, check_after, new_id
from router.protocols.batches.files_api import checked_ttl, page
from router.protocols.batches.keys import claim
from router.protocols.batches.lease import Leases
from router.protocols.body_reader import BodyReader
from router.protocols.openai.body import Body
from router.protocols.openai.endpoints import Endpoint, mapped, page_limit

PATH = "/v1/batches"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([smh])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
# Maximum completion window. The requests of a batch's lines are kept for as long, so that none of them ever runs twice.
_MAX_WINDOW_S = 24 * 3600
_LISTED, _MAX_LISTED = 20, 100
_MAX_METADATA, _MAX_METADATA_KEY, _MAX_METADATA_VALUE = 16, 64, 512


class BatchesApi:
    """Serves /v1/batches."""

    def __init__(
        self,
        documents: ClientDocuments,
        files: Files,
        batches: Batches,
        leases: Leases,
        bodies: BodyReader,
        file_ttl_s: int,
    ) -> None:
        self._documents = documents
        self._files = files
        self._batches = batches
        self._leases = leases
        self._bodies = bodies
        self._file_ttl_s = file_ttl_s

    def routes(self) -> list[Route]:
        one = f"{PATH}/{{batch_id}}"
        endpoints: list[tuple[str, str, Endpoint, tuple[str, ...]]] = [
            ("POST", PATH, self._create, ()),
            ("GET", PATH, self._list, ("after", "limit")),
            ("GET", one, self._retrieve, ()),
            ("POST", f"{one}/cancel", self._cancel, ()),
        ]
        return [Route(path, mapped(endpoint, query), methods=[method]) for method, path, endpoint, query in endpoints]

    async def _create(self, request: Request) -> Response:
        owner = current_caller.get().owner
        body = await self._bodies.read(request, lambda body: body)
        batch = self._read(body)
        try:
            cell, _ = await self._files.get(owner, batch.input_file_id)
        except NotFoundError as error:
            raise NotFoundError(error.message, field="input_file_id") from None
        key = check_key(request.headers.get(HEADER))
        cell, batch.id = await claim(self._documents, cell, owner, key, PATH, batch.id)
        # Add the batch to the queue first, since a batch that is not in the queue would never run. A router that looked
        # for the batch before it was stored has removed its entry from the queue, so the entry is added again.
        await self._leases.add(cell, owner, batch.id)
        await self._batches.create(cell, owner, batch)
        await self._leases.add(cell, owner, batch.id)
        _, stored = await self._batches.get(owner, batch.id)
        if stored.digest != batch.digest:
            raise InvalidArgumentError("was used with another batch", field="Idempotency-Key")
        return JSONResponse(stored.view())

    def _read(self, body: Body) -> Batch:
        file_id, endpoint = body.text("input_file_id"), body.text("endpoint")
        window = body.text("completion_window")
        if not file_id:
            raise InvalidArgumentError("must be set", field="input_file_id")
        if endpoint not in ENDPOINTS:
            raise InvalidArgumentError(f"must be one of {', '.join(ENDPOINTS)}", field="endpoint")
        found = _WINDOW.fullmatch(window or "")
        seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
        if not 0 < seconds <= _MAX_WINDOW_S:
            raise InvalidArgumentError("must be 24h or shorter, such as 30m or 90s", field="completion_window")
        output_ttl_s = self._file_ttl_s
        lifetime = body.child("output_expires_after")
        if lifetime is not None:
            lifetime.choice("anchor", ("created_at",))
            asked = checked_ttl(lifetime.get("seconds"), "output_expires_after.seconds")
            output_ttl_s = min(asked, output_ttl_s)
        metadata = _metadata(body)
        unknown = next(body.unread(), None)
        if unknown is not None:
            raise InvalidArgumentError("is not a field of this endpoint; leave it out", field=unknown[0][:128])
        created_at = int(time.time())
        digest = hashlib.blake2b(json.dumps(body.fields, sort_keys=True).encode(), digest_size=16).hexdigest()
        return Batch(
            new_id(BATCH_PREFIX),
            endpoint,
            file_id,
            str(window),
            created_at,
            created_at + seconds,
            metadata,
            output_ttl_s=output_ttl_s,
            digest=digest,
        )

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        limit = page_limit(query, _LISTED, _MAX_LISTED)
        owner = current_caller.get().owner
        after = check_after(query.get("after", ""), BATCH_PREFIX)
        found = await self._batches.list(owner, after=after, limit=limit + 1)
        return JSONResponse(page([batch.view() for batch in found], limit))

    async def _retrieve(self, request: Request) -> Response:
        _, batch = await self._batches.get(current_caller.get().owner, request.path_params["batch_id"])
        return JSONResponse(batch.view())

    async def _cancel(self, request: Request) -> Response:
        def cancel(batch: Batch) -> None:
            if batch.status in ENDED:
                raise InvalidArgumentError(f"is {batch.status} and can no longer be cancelled", field="batch_id")
            if batch.status not in ("cancelling", "finalizing"):
                batch.enter("cancelling")

        batch = await self._batches.update(current_caller.get().owner, request.path_params["batch_id"], cancel)
        return JSONResponse(batch.view())


def _metadata(body: Body) -> dict[str, str] | None:
    found = body.child("metadata")
    if found is None:
        return None
    body.get("metadata")
    metadata: dict[str, str] = {}
    for name in found.fields:
        value = found.text(name) or ""
        if len(name) > _MAX_METADATA_KEY or len(value) > _MAX_METADATA_VALUE or len(metadata) >= _MAX_METADATA:
            message = (
                f"must have at most {_MAX_METADATA} entries, with names of at most {_MAX_METADATA_KEY} characters and "
                f"values of at most {_MAX_METADATA_VALUE}"
            )
            raise InvalidArgumentError(message, field="metadata")
        metadata[name] = value
    return metadata
