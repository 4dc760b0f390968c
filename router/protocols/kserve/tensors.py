"""Conversion of the KServe protocol's tensors to Python values, and back."""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from midstream.chunk import Validation
from midstream.errors import InvalidArgumentError
from protos import kserve_pb2 as pb
from router.protocols.kind_change import NAME
from router.protocols.validation import ERRORS, IS_VALID

Value = bool | int | float | bytes
FINAL = "triton_final_response"  # the parameter that marks a request's last response

ARRAY_CODES = {
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}
_CONTENTS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_RAW_ONLY = {"FP16": 2, "BF16": 2}
# The product of thousands of sizes would take minutes.
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input tensor; for 16-bit float types, `data` is set instead of `values`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Value]
    data: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Approximate size."""
        if self.datatype == "BYTES":
            return sum(len(value) for value in self.values if isinstance(value, bytes))
        return len(self.data) + 4 * len(self.values)

    def row(self, index: int, num_rows: int) -> InputTensor:
        """Return one row of the batch; a tensor without a batch dimension, or with only one row, applies to all rows.

        Raises:
            InvalidArgumentError: The number of rows does not match.
        """
        if len(self.shape) < 2 or self.shape[0] == 1:
            return self
        if self.shape[0] != num_rows:
            raise InvalidArgumentError(f"has {self.shape[0]} rows for a batch of {num_rows}", field=self.name)
        size, num_bytes = len(self.values) // num_rows, len(self.data) // num_rows
        values, data = self.values[index * size :][:size], self.data[index * num_bytes :][:num_bytes]
        return InputTensor(self.name, self.datatype, self.shape[1:], values, data)


def parse_inputs(request: pb.ModelInferRequest) -> dict[str, InputTensor]:
    """Return all inputs by name.

    Raises:
        InvalidArgumentError: A name is duplicated, a type is unknown, or contents do not match the type and shape.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidArgumentError(f"{len(raw)} for {len(request.inputs)} inputs", field="raw_input_contents")
    tensors: dict[str, InputTensor] = {}
    for index, item in enumerate(request.inputs):
        if item.name in tensors:
            raise InvalidArgumentError("given twice", field=item.name)
        try:
            tensors[item.name] = _parse(item, raw[index] if raw else None)
        except (struct.error, ValueError) as error:
            raise InvalidArgumentError(str(error), field=item.name) from None
    return tensors


def _parse(item: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> InputTensor:
    if len(item.shape) > _MAX_DIMENSIONS:
        raise ValueError(f"has {len(item.shape)} dimensions; must have at most {_MAX_DIMENSIONS}")
    shape, datatype = tuple(item.shape), item.datatype
    if any(size < 0 for size in shape):
        raise ValueError("a size in its shape is negative")
    values: Sequence[Value] = ()
    data = b""
    if datatype in _RAW_ONLY:
        data = raw or b""
        num_values = len(data) // _RAW_ONLY[datatype]
    elif datatype not in _CONTENTS:
        raise ValueError(f"has the unknown type {datatype!r}")
    else:
        values = unpack(datatype, raw) if raw is not None else getattr(item.contents, _CONTENTS[datatype])[:]
        num_values = len(values)
    if num_values != prod(shape):
        raise ValueError(f"has {num_values} elements; its shape {list(shape)} requires {prod(shape)} elements")
    return InputTensor(item.name, datatype, shape, values, data)


def unpack(datatype: str, raw: bytes) -> Sequence[Value]:
    """Return the elements in raw contents. Raises ValueError or struct.error if they are incomplete."""
    if datatype == "BYTES":
        return _unpack_bytes(raw)
    if datatype == "BOOL":
        return [value != 0 for value in raw]
    values = array(ARRAY_CODES[datatype])
    values.frombytes(raw)  # raises ValueError if a partial element is left over
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _unpack_bytes(raw: bytes) -> list[bytes]:
    values, position = list[bytes](), 0
    while position < len(raw):
        (size,) = struct.unpack_from("<I", raw, position)
        position += 4
        if position + size > len(raw):
            raise ValueError("an element is longer than the contents")
        values.append(raw[position : position + size])
        position += size
    return values


class OutputTensor(NamedTuple):
    """An output tensor; `data` is little-endian."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of_texts(name: str, texts: Sequence[str]) -> OutputTensor:
        parts = [text.encode() for text in texts]
        return OutputTensor(name, "BYTES", (len(parts),), b"".join(struct.pack("<I", len(p)) + p for p in parts))

    @staticmethod
    def of_floats(name: str, shape: Sequence[int], values: Iterable[float]) -> OutputTensor:
        return OutputTensor(name, "FP32", tuple(shape), struct.pack(f"<{prod(shape)}f", *values))

    @staticmethod
    def of_ints(name: str, values: Sequence[int]) -> OutputTensor:
        """Return a vector of 32-bit integers."""
        return OutputTensor(name, "INT32", (len(values),), struct.pack(f"<{len(values)}i", *values))

    @staticmethod
    @lru_cache(1024)
    def of_index(name: str, index: int) -> OutputTensor:
        """Return an index as a vector of one 32-bit integer; cached, since a stream's responses repeat a few."""
        return OutputTensor.of_ints(name, [index])


def fill_outputs(response: pb.ModelInferResponse, tensors: Iterable[OutputTensor]) -> None:
    """Add outputs to a response, as raw contents."""
    for tensor in tensors:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(tensor.data)


def note_kind_change(response: pb.ModelInferResponse, offsets: Iterable[int | None]) -> None:
    """Add the first offset at which the kind of workers changed, if any, as a parameter."""
    known = [offset for offset in offsets if offset is not None]
    if known:
        response.parameters[NAME].int64_param = min(known)


def note_validation(response: pb.ModelInferResponse, results: Iterable[Validation | None]) -> None:
    """Add whether all sequences match schemas that were not fully enforced, if there are any, as a parameter, and why
    they do not as another one, as JSON.
    """
    known = [(index, result) for index, result in enumerate(results) if result is not None]
    if known:
        errors = [f"sequence {index}: {error}" for index, result in known for error in result.errors]
        response.parameters[IS_VALID].bool_param = not errors
        response.parameters[ERRORS].string_param = json.dumps(errors)


class StreamResponses:
    """Makes the responses of one request of a stream.

    Consecutive chunks usually have tensors of the same names, types and shapes, so these are converted only when they
    change.
    """

    def __init__(self, head: pb.ModelInferResponse) -> None:
        self._head = head
        self._described: list[tuple[str, str, tuple[int, ...]]] | None = None
        self._template = pb.ModelStreamInferResponse()

    def make(self, tensors: Sequence[OutputTensor], *, is_final: bool) -> pb.ModelStreamInferResponse:
        """Return a response with these outputs, as raw contents."""
        described = [tensor[:3] for tensor in tensors]
        if described != self._described:
            self._described = described
            self._template = pb.ModelStreamInferResponse(infer_response=self._head)
            for name, datatype, shape in described:
                self._template.infer_response.outputs.add(name=name, datatype=datatype, shape=shape)
            self._template.infer_response.parameters[FINAL].bool_param = False
        response = pb.ModelStreamInferResponse()
        response.CopyFrom(self._template)
        response.infer_response.raw_output_contents.extend([tensor.data for tensor in tensors])
        if is_final:
            response.infer_response.parameters[FINAL].bool_param = True
        return response
