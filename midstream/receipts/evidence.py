"""Evidence: receipts with what a client knows of their requests, as JSON.

One JSON object per request:

    receipt   a Receipt in protobuf's JSON format
    request   optional: the canonical request as it was hashed, in base64 (GetReceipt with include_request)
    outputs   optional: the token ids of each sequence
    log_probs optional: LogProbs of each sequence in protobuf's JSON format

A file contains one object, several on a line each, a list, or pages of the ledger (`data`).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import DecodeError

from midstream.errors import InvalidArgumentError
from midstream.extras import LogProbs
from protos import generation_pb2 as pb
from protos import receipts_pb2


@dataclass(frozen=True, slots=True)
class Evidence:
    """A receipt, and what is known of its request and answer.

    Attributes:
        request: The canonical request, serialized; empty if unknown.
        outputs: The token ids of each sequence; None if unknown.
        log_probs: The log probabilities of each sequence's tokens; empty if unknown.
    """

    receipt: receipts_pb2.Receipt
    request: bytes = b""
    outputs: list[list[int]] | None = None
    log_probs: list[LogProbs] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Return the object described above."""
        fields: dict[str, object] = {"receipt": MessageToDict(self.receipt, preserving_proto_field_name=True)}
        if self.request:
            fields["request"] = base64.b64encode(self.request).decode()
        if self.outputs is not None:
            fields["outputs"] = self.outputs
        if self.log_probs:
            rows = [MessageToDict(item.to_proto(), preserving_proto_field_name=True) for item in self.log_probs]
            fields["log_probs"] = rows
        return fields


def read_evidence(text: str, where: str) -> Iterator[Evidence]:
    """Yield the evidence in a file's contents; ledger entries without a receipt are left out.

    Raises:
        InvalidArgumentError: It is not valid; the error names `where`.
    """
    for place, item in _objects(text, where):
        if "receipt" in item:
            yield _evidence(item, place)


def _objects(text: str, where: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    try:
        values = [json.loads(text)]
    except ValueError:
        values = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    values.append(json.loads(line))
                except ValueError:
                    raise InvalidArgumentError("is not JSON", field=f"{where}, line {number}") from None
    for number, value in enumerate(values, 1):
        place = f"{where}, object {number}"
        items = value.get("data", [value]) if isinstance(value, dict) else value
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise InvalidArgumentError("is neither an object nor a list of objects", field=place)
        yield from ((place, item) for item in items)


def _evidence(item: Mapping[str, object], place: str) -> Evidence:
    outputs, request, rows = item.get("outputs"), item.get("request", ""), item.get("log_probs", [])
    try:
        receipt = ParseDict(_object(item["receipt"]), receipts_pb2.Receipt())
        contents = base64.b64decode(str(request), validate=True)
        pb.GenerateRequest.FromString(contents)
        log_probs = [LogProbs.from_proto(ParseDict(_object(row), pb.LogProbs())) for row in _list(rows)]
        tokens = None if outputs is None else [_token_ids(sequence) for sequence in _list(outputs)]
    except (ParseError, DecodeError, binascii.Error, ValueError) as error:
        raise InvalidArgumentError(f"is not valid evidence: {error}", field=place) from None
    return Evidence(receipt, contents, tokens, log_probs)


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError("receipt and log_probs must be objects")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError("outputs and log_probs must be lists")
    return value


def _token_ids(value: object) -> list[int]:
    return [item if isinstance(item, int) and 0 <= item < 1 << 32 else _refuse() for item in _list(value)]


def _refuse() -> int:
    raise ValueError("a token id is not a 32-bit number")
