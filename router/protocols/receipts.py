"""Receipts over HTTP: `GET /v1/receipts/ID`, `GET /v1/receipts/keys`, and the field `receipt` of responses."""

from __future__ import annotations

import base64

from google.protobuf.json_format import MessageToDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from midstream.chunk import Chunk
from midstream.errors import NotFoundError
from midstream.receipts.jwk import ReceiptKey
from protos import receipts_pb2
from router.authentication import current_caller
from router.pipeline.receipts import Receipts
from router.protocols.openai.body import Body
from router.protocols.openai.endpoints import mapped

NAME = "return_receipt"
_PATH = "/v1/receipts"
_PARAMETERS = ("include_request", "include_outputs")
# Prefixes of the ids that clients see; the id of a response in /v1/responses is that of its request.
_PREFIXES = ("chatcmpl-", "cmpl-", "msg_")


def wants_receipt(body: Body) -> bool:
    """Return whether a body asks for a receipt."""
    return bool(body.flag(NAME))


def receipt_of(chunk: Chunk) -> dict[str, object]:
    """Return the JSON field, or nothing if the chunk has no receipt."""
    return {} if chunk.receipt is None else {"receipt": receipt_json(chunk.receipt)}


def receipt_json(receipt: receipts_pb2.Receipt) -> dict[str, object]:
    """Return a receipt in protobuf's JSON format, with the names of the protocol."""
    return MessageToDict(receipt, preserving_proto_field_name=True)


def receipt_routes(receipts: Receipts) -> list[Route]:
    """Return the routes for the HTTP port."""

    async def one(request: Request) -> Response:
        name = request.path_params["receipt_id"]
        asks_request, asks_outputs = (request.query_params.get(name) == "true" for name in _PARAMETERS)
        scope = current_caller.get().scope
        try:
            found = await receipts.get(scope(name), include_request=asks_request, include_outputs=asks_outputs)
        except NotFoundError:
            prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
            if prefix is None:
                raise
            found = await receipts.get(
                scope(name.removeprefix(prefix)), include_request=asks_request, include_outputs=asks_outputs
            )
        fields: dict[str, object] = {
            "object": "receipt",
            "receipt": receipt_json(found.receipt),
            "contents": _contents(found.receipt),
        }
        if found.request:
            fields["request"] = base64.b64encode(found.request).decode()
        if found.outputs:
            fields["outputs"] = [list(output.token_ids) for output in found.outputs]
        return JSONResponse(fields)

    async def keys(_: Request) -> Response:
        found = [ReceiptKey.from_proto(key).to_jwk() for key in await receipts.keys()]
        return JSONResponse({"keys": found}, media_type="application/jwk-set+json")

    return [
        Route(f"{_PATH}/keys", mapped(keys, ()), methods=["GET"]),
        Route(f"{_PATH}/{{receipt_id}}", mapped(one, _PARAMETERS), methods=["GET"]),
    ]


def _contents(receipt: receipts_pb2.Receipt) -> dict[str, object]:
    """Return what a receipt states, for people; the signature covers only the bytes of its body."""
    body = receipts_pb2.ReceiptBody.FromString(receipt.body)
    model = receipts_pb2.ModelIdentity.FromString(body.model)
    return MessageToDict(body, preserving_proto_field_name=True) | {
        "model": {
            "root": model.root.hex(),
            "arithmetic": model.arithmetic,
            "leaves": {leaf.name: leaf.digest for leaf in model.leaves},
        }
    }
