"""The ledger over HTTP, for admins: `GET /ledger`."""

from __future__ import annotations

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from midstream.errors import InvalidArgumentError, MidstreamError
from midstream.rpc.errors import error_from_rpc
from protos import ledger_pb2
from router.pipeline.cells import CellSet
from router.protocols.openai.errors import error_body, http_status
from router.protocols.retries import retry_headers

_TIMEOUT_S = 10.0


def ledger_route(cells: CellSet) -> Route:
    """Return the route, which serves the ledger of a cell as JSON; the query parameter `after` continues a list."""

    async def answer(request: Request) -> Response:
        try:
            return JSONResponse(await _read(cells, request.query_params.get("cell"), request.query_params.get("after")))
        except MidstreamError as error:
            return JSONResponse(error_body(error), http_status(error), headers=retry_headers(error))

    return Route("/ledger", answer, methods=["GET"])


async def _read(cells: CellSet, name: str | None, after: str | None) -> dict[str, object]:
    if name is None and len(cells.cells) > 1:
        raise InvalidArgumentError(f"must be one of {', '.join(sorted(cells.cells))}", field="cell")
    cell = cells.any() if name is None else cells.cells.get(name)
    if cell is None:
        raise InvalidArgumentError("is not a cell of this router", field="cell")
    query = ledger_pb2.GetLedgerRequest(after=after or "")
    try:
        found = await cell.watch_stub.GetLedger(query, timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    entries = [
        MessageToDict(entry, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        for entry in found.entries
    ]
    return {"object": "list", "data": entries, "next_after": found.next_after or None}
