"""Parameters of KServe's requests and tensors, as Triton and KServe's clients send them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import kserve_pb2 as pb

_EMPTY_FINAL = "triton_enable_empty_final_response"
# Whether data is binary concerns only HTTP; over gRPC, outputs are always raw contents.
_ENCODINGS = frozenset(("binary_data", "binary_data_output"))
_SIZE = "binary_data_size"
_US_PER_S = 1_000_000
_LEAST_PRIORITY, _HIGHEST_PRIORITY = -100, 100


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a request.

    Attributes:
        wants_empty_final: Whether the last response of a stream is to be an empty one.
        timeout_s: Time limit; None if there is none.
        priority: Native priority.
    """

    wants_empty_final: bool = False
    timeout_s: float | None = None
    priority: int = 0

    def limit(self, left_s: float | None) -> float | None:
        """Return the earlier of this time limit and the call's."""
        limits = [limit for limit in (self.timeout_s, left_s) if limit is not None]
        return min(limits, default=None)


def read_parameters(request: pb.ModelInferRequest) -> Parameters:
    """Return the parameters of a request, and check those of its tensors.

    `timeout` is in microseconds, where 0 means none. Of `priority`, 1 is the highest and 0 the default; a request with
    any priority runs before those without.

    Raises:
        UnsupportedError: A parameter is unknown.
        InvalidArgumentError: A parameter has an invalid value.
    """
    wants_empty_final, timeout_us, priority = False, 0, 0
    for name, parameter in request.parameters.items():
        if name == _EMPTY_FINAL:
            wants_empty_final = _flag(name, parameter)
        elif name == "timeout":
            timeout_us = _number(name, parameter)
        elif name == "priority":
            priority = _number(name, parameter)
        elif name in _ENCODINGS:
            _flag(name, parameter)
        else:
            raise UnsupportedError(f"{name[:64]!r} is not supported", field="parameters")
    raw = request.raw_input_contents
    for index, item in enumerate(request.inputs):
        _check_encoding(item.name, item.parameters, len(raw[index]) if index < len(raw) else None)
    for output in request.outputs:
        _check_encoding(output.name, output.parameters, None)
    native = max(_HIGHEST_PRIORITY + 1 - priority, _LEAST_PRIORITY) if priority else 0
    return Parameters(wants_empty_final, timeout_us / _US_PER_S if timeout_us else None, native)


def _check_encoding(tensor: str, parameters: Mapping[str, pb.InferParameter], num_bytes: int | None) -> None:
    """Check the parameters of a tensor, whose raw contents have `num_bytes` bytes, if it has any."""
    for name, parameter in parameters.items():
        if name in _ENCODINGS:
            _flag(tensor, parameter)
        elif name == _SIZE and num_bytes is not None:
            if _number(tensor, parameter) != num_bytes:
                raise InvalidArgumentError(f"has {num_bytes} bytes; {_SIZE} is another number", field=tensor)
        else:
            raise UnsupportedError(f"the parameter {name[:64]!r} is not supported", field=tensor)


def _flag(field: str, parameter: pb.InferParameter) -> bool:
    if not parameter.HasField("bool_param"):
        raise InvalidArgumentError("must be a boolean", field=field)
    return parameter.bool_param


def _number(field: str, parameter: pb.InferParameter) -> int:
    kind = parameter.WhichOneof("parameter_choice")
    value = getattr(parameter, kind) if kind in ("int64_param", "uint64_param") else -1
    if value < 0:
        raise InvalidArgumentError("must be a whole number, not negative", field=field)
    return int(value)
