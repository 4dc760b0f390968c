"""Conversion of the JSON bodies of KServe's HTTP protocol to and from the messages of its gRPC protocol.

A tensor's elements are either in the JSON (`data`) or, in Triton's extension for binary data, after it: the header
`Inference-Header-Content-Length` then has the length of the JSON, and `binary_data_size` that of each tensor's part.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import kserve_pb2 as pb
from router.protocols.kserve.ensemble import INPUTS
from router.protocols.kserve.tensors import ARRAY_CODES, FINAL, unpack
from router.protocols.openai.body import Body

_SIZE, _IS_BINARY = "binary_data_size", "binary_data"
_MAX_INT64, _MAX_UINT64 = (1 << 63) - 1, (1 << 64) - 1
_FLOATS = ("FP32", "FP64")
_LARGEST = {"FP32": 3.4028234663852886e38, "FP64": sys.float_info.max}


@dataclass(slots=True)
class BinaryOutputs:
    """Which outputs the client wants as binary data.

    Attributes:
        is_default: Whether outputs are, unless they say otherwise.
        by_name: What outputs say.
    """

    is_default: bool = False
    by_name: dict[str, bool] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return self.by_name.get(name, self.is_default)


def read_infer(
    data: bytes, num_json_bytes: int, model: str, version: str
) -> tuple[pb.ModelInferRequest, BinaryOutputs]:
    """Return the request in a body of `/infer`, and the form of its outputs. Raises InvalidArgumentError or
    UnsupportedError, with the tensor's name or the field, if it is invalid.
    """
    if num_json_bytes > len(data):
        raise InvalidArgumentError(
            f"is more than the {len(data)} bytes of the body", field="Inference-Header-Content-Length"
        )
    body = Body.parse(data[:num_json_bytes])
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=body.text("id") or "")
    if (body.text("model_name") or model) != model:
        raise InvalidArgumentError("is not the model of the path", field="model_name")
    _fill_parameters(body, request.parameters)
    _fill_inputs(body, request, data[num_json_bytes:])
    binary = BinaryOutputs()
    for item in body.objects("outputs"):
        name = item.text("name") or ""
        output = request.outputs.add(name=name)
        _fill_parameters(item, output.parameters, name)
        if _IS_BINARY in output.parameters:
            binary.by_name[name] = output.parameters[_IS_BINARY].bool_param
    if f"{_IS_BINARY}_output" in request.parameters:
        binary.is_default = request.parameters[f"{_IS_BINARY}_output"].bool_param
    for path, _ in body.unread():
        raise InvalidArgumentError("is not a field of this endpoint", field=path[:128])
    return request, binary


def _fill_inputs(body: Body, request: pb.ModelInferRequest, binary: bytes) -> None:
    """Add the inputs of a body, whose binary data are in `binary`, one after the other."""
    position = 0
    for item in body.objects("inputs"):
        name, datatype = item.text("name") or "", item.text("datatype") or ""
        tensor = request.inputs.add(name=name, datatype=datatype, shape=_shape(item, name))
        _fill_parameters(item, tensor.parameters, name)
        if _SIZE not in tensor.parameters:
            request.raw_input_contents.append(pack(name, datatype, item.get("data")))
            continue
        if item.has("data"):
            raise InvalidArgumentError(f"must not have both data and {_SIZE}", field=name)
        # A size that is wrong differs from that of the part, which is checked with the other parameters.
        end = position + max(tensor.parameters[_SIZE].int64_param, 0)
        request.raw_input_contents.append(binary[position:end])
        position = end
    if position < len(binary):
        raise InvalidArgumentError(f"has {len(binary) - position} bytes after the last tensor", field="inputs")


def read_generate(body: Body, model: str, version: str, *, is_stream: bool) -> pb.ModelInferRequest:
    """Return the request in a body of `/generate` or `/generate_stream`, whose fields are tensors: a value is one row,
    and a list of values is one row, too. Raises InvalidArgumentError, with the field, if it is invalid.
    """
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=body.text("id") or "")
    given = body.get("parameters")
    if given is not None and not isinstance(given, dict):
        raise InvalidArgumentError("must be an object", field="parameters")
    parameters = cast("Mapping[str, object]", given or {})
    tensors = {name: value for name, value in parameters.items() if name in INPUTS}
    tensors |= {name: value for name, value in body.fields.items() if name not in ("id", "parameters")}
    if is_stream and tensors.get("stream") is None:
        tensors["stream"] = True
    for name, value in parameters.items():
        if name not in INPUTS:
            _set_parameter(request.parameters[name], value, name)
    for name, value in tensors.items():
        if value is None:
            continue
        if name not in INPUTS:
            raise InvalidArgumentError("unknown input", field=name[:128])
        datatype = INPUTS[name].datatype
        request.inputs.add(name=name, datatype=datatype, shape=(1, *(_sizes(value) or (1,))))
        request.raw_input_contents.append(pack(name, datatype, value))
    return request


def pack(name: str, datatype: str, data: object) -> bytes:
    """Return the raw contents of a tensor, given its elements in row-major order, nested or flat. Raises, with the
    tensor's name, InvalidArgumentError if one has another type, or UnsupportedError for types that JSON lacks.
    """
    values = list(_flat(data))
    try:
        if datatype == "BYTES":
            parts = [value.encode() for value in values if isinstance(value, str)]
            if len(parts) == len(values):
                return b"".join(struct.pack("<I", len(part)) + part for part in parts)
        elif datatype == "BOOL":
            if all(isinstance(value, bool) for value in values):
                return bytes(map(bool, values))
        elif datatype in ARRAY_CODES:
            kinds = (int, float) if datatype in _FLOATS else (int,)
            if all(isinstance(value, kinds) and not isinstance(value, bool) for value in values):
                packed = array(ARRAY_CODES[datatype], cast("list[int]", values))
                if sys.byteorder == "big":
                    packed.byteswap()
                return packed.tobytes()
        else:
            raise UnsupportedError(f"must be sent as binary data: {datatype[:16]!r} has no form in JSON", field=name)
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidArgumentError(f"has an element that is not {datatype}: {error}", field=name) from None
    raise InvalidArgumentError(f"has an element that is not {datatype}", field=name)


def render_infer(response: pb.ModelInferResponse, binary: BinaryOutputs) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON if binary data follow."""
    head: dict[str, object] = _head(response)
    outputs: list[dict[str, object]] = []
    parts: list[bytes] = []
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        shown: dict[str, object] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if binary.has(output.name):
            shown["parameters"] = {_SIZE: len(raw)}
            parts.append(raw)
        else:
            shown["data"] = _values(output.datatype, raw)
        outputs.append(shown)
    text = json.dumps({**head, "outputs": outputs}).encode()
    return b"".join((text, *parts)), len(text) if parts else None


def render_generate(response: pb.ModelInferResponse) -> dict[str, object]:
    """Return the body of a response of `/generate`, or an event of `/generate_stream`: a tensor of one element is the
    element itself.
    """
    head = _head(response)
    parameters = head.pop("parameters", {})
    assert isinstance(parameters, dict)
    parameters.pop(FINAL, None)
    shown: dict[str, object] = {**head, **parameters}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        values = _values(output.datatype, raw)
        shown[output.name] = values[0] if len(values) == 1 else values
    return shown


def as_json(message: Message) -> dict[str, object]:
    """Return a message as the JSON of Triton's HTTP protocol: with the fields' own names, and with integers as
    numbers, unlike protobuf's JSON.
    """

    def shown(descriptor: FieldDescriptor, value: object) -> object:
        if isinstance(value, Message):
            return as_json(value)
        if descriptor.enum_type is not None:
            return descriptor.enum_type.values_by_number[cast("int", value)].name
        return value

    return {
        descriptor.name: [shown(descriptor, item) for item in value]
        if descriptor.is_repeated
        else shown(descriptor, value)
        for descriptor, value in message.ListFields()
    }


def _head(response: pb.ModelInferResponse) -> dict[str, object]:
    head: dict[str, object] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        head["id"] = response.id
    if response.parameters:
        head["parameters"] = {
            name: getattr(parameter, parameter.WhichOneof("parameter_choice") or "string_param")
            for name, parameter in response.parameters.items()
        }
    return head


def _values(datatype: str, raw: bytes) -> list[object]:
    """Return the elements of an output in the types of JSON, which has no infinity."""
    values = unpack(datatype, raw)
    if datatype == "BYTES":
        return [value.decode(errors="replace") for value in values if isinstance(value, bytes)]
    if datatype in _LARGEST:
        most = _LARGEST[datatype]
        return [min(max(float(value), -most), most) for value in values]
    return list(values)


def _shape(item: Body, name: str) -> list[int]:
    sizes = [size for size in item.array("shape") if isinstance(size, int) and not isinstance(size, bool)]
    if len(sizes) < len(item.array("shape")) or any(not 0 <= size <= _MAX_INT64 for size in sizes):
        raise InvalidArgumentError("has a shape with a size that is not a whole number", field=name)
    return sizes


def _fill_parameters(item: Body, parameters: MutableMapping[str, pb.InferParameter], name: str = "") -> None:
    """Set the parameters of a request, or of the tensor `name`."""
    given = item.get("parameters")
    if given is None:
        return
    if not isinstance(given, dict):
        raise InvalidArgumentError("must be an object", field=name or "parameters")
    for key, value in given.items():
        _set_parameter(parameters[key], value, name or key)


def _set_parameter(parameter: pb.InferParameter, value: object, field: str) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and -_MAX_INT64 <= value <= _MAX_INT64:
        parameter.int64_param = value
    elif isinstance(value, int) and 0 <= value <= _MAX_UINT64:
        parameter.uint64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    elif isinstance(value, str) and value.isprintable():
        parameter.string_param = value
    else:
        raise InvalidArgumentError("must be a boolean, a number or a text", field=field[:128])


def _flat(data: object) -> Iterator[object]:
    """Yield the elements of nested lists, each in the same time however deep it is."""
    open_lists = [iter((data,))]
    while open_lists:
        for item in open_lists[-1]:
            if isinstance(item, list):
                open_lists.append(iter(item))
                break
            if item is not None:
                yield item
        else:
            open_lists.pop()


def _sizes(data: object) -> tuple[int, ...]:
    """Return the shape of nested lists, as far as their first items tell; the number of elements is checked later."""
    if not isinstance(data, list):
        return ()
    return (len(data), *(_sizes(data[0]) if data else ()))
