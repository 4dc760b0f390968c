"""Results as bytes, in the layout of TensorRT-LLM 1.0 (`serialization.cpp`): little-endian numbers without padding; a
list is its length and its items, an optional value is preceded by whether there is one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from midstream.client.request import tensor_of
from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.executor.enums import FinishReason
from midstream.executor.output_config import AdditionalOutput
from midstream.executor.request_parts import ContextPhaseParams
from midstream.executor.response import (
    KvCacheMetrics,
    RequestPerfMetrics,
    Result,
    SpeculativeDecodingFastLogitsInfo,
    SpeculativeDecodingMetrics,
    TimingMetrics,
)
from midstream.executor.tensors import to_user
from midstream.extras import Tensor

_CPU = 0
_MAX_AXES = 7
_DTYPES = {"bool": 0, "uint8": 1, "int8": 2, "int32": 3, "int64": 4, "bfloat16": 5, "float16": 7, "float32": 8}
_DTYPE_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "int32": 4, "int64": 8, "bfloat16": 2, "float16": 2, "float32": 4}
_MICROSECOND = timedelta(microseconds=1)


class _Input:
    """Bytes that are read from the start."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes. Raises InvalidArgumentError if there are too few."""
        if not 0 <= num_bytes <= len(self._data) - self._place:
            raise InvalidArgumentError(f"ends within a result, after {len(self._data)} bytes", field="data")
        self._place += num_bytes
        return self._data[self._place - num_bytes : self._place]

    @property
    def is_empty(self) -> bool:
        """Whether all bytes have been read."""
        return self._place == len(self._data)


class _Codec(Protocol):
    """How values of a type are written and read."""

    def write(self, out: bytearray, value: Any) -> None: ...

    def read(self, data: _Input) -> Any: ...


class _Plain:
    """A number or truth value, as in the `struct` module."""

    def __init__(self, code: str) -> None:
        self._struct = struct.Struct("<" + code)

    def write(self, out: bytearray, value: Any) -> None:
        out += self._struct.pack(value)

    def read(self, data: _Input) -> Any:
        return self._struct.unpack(data.take(self._struct.size))[0]


_BOOL, _I32, _I64, _U64, _F32 = map(_Plain, "?iqQf")


class _List:
    def __init__(self, item: _Codec) -> None:
        self._item = item

    def write(self, out: bytearray, value: Sequence[Any]) -> None:
        _U64.write(out, len(value))
        for item in value:
            self._item.write(out, item)

    def read(self, data: _Input) -> list[Any]:
        return [self._item.read(data) for _ in range(_U64.read(data))]


class _Optional:
    def __init__(self, item: _Codec) -> None:
        self._item = item

    def write(self, out: bytearray, value: Any) -> None:
        _BOOL.write(out, value is not None)
        if value is not None:
            self._item.write(out, value)

    def read(self, data: _Input) -> Any:
        return self._item.read(data) if _BOOL.read(data) else None


class _Text:
    def write(self, out: bytearray, value: str) -> None:
        encoded = value.encode()
        _U64.write(out, len(encoded))
        out += encoded

    def read(self, data: _Input) -> str:
        return data.take(_U64.read(data)).decode(errors="replace")


class _Duration:
    """A time in microseconds."""

    def write(self, out: bytearray, value: timedelta) -> None:
        _U64.write(out, value // _MICROSECOND)

    def read(self, data: _Input) -> timedelta:
        return timedelta(microseconds=_U64.read(data))


class _Reason:
    def write(self, out: bytearray, value: FinishReason) -> None:
        _I32.write(out, value.value)

    def read(self, data: _Input) -> FinishReason:
        number = _I32.read(data)
        if number not in FinishReason._value2member_map_:
            raise InvalidArgumentError(f"has an unknown finish reason, {number}", field="data")
        return FinishReason(number)


class _TensorCodec:
    """Number of the type, shape, kind of memory, number of bytes, and bytes."""

    def write(self, out: bytearray, value: Any) -> None:
        tensor = Tensor.from_proto(tensor_of(value, "tensor"))
        if tensor.dtype not in _DTYPES:
            raise UnsupportedError(f"cannot be of {tensor.dtype}", field="tensor")
        _I32.write(out, _DTYPES[tensor.dtype])
        _List(_I64).write(out, tensor.shape)
        _I32.write(out, _CPU)
        _U64.write(out, len(tensor.data))
        out += tensor.data

    def read(self, data: _Input) -> Any:
        number, num_axes = _I32.read(data), _U64.read(data)
        if num_axes > _MAX_AXES:
            raise InvalidArgumentError(f"has a tensor with {num_axes} axes; at most {_MAX_AXES}", field="data")
        shape = tuple(_I64.read(data) for _ in range(num_axes))
        _I32.read(data)  # the memory that it was in
        dtype = next((name for name, known in _DTYPES.items() if known == number), None)
        if dtype is None:
            raise UnsupportedError(f"has a tensor of type {number}", field="data")
        values = data.take(_U64.read(data))
        if min(shape, default=0) < 0 or len(values) != math.prod(shape) * _DTYPE_BYTES[dtype]:
            raise InvalidArgumentError(f"has a tensor {list(shape)} of {len(values)} bytes", field="data")
        return to_user(Tensor("", dtype, shape, values))


@dataclass(frozen=True)
class _Record:
    """An object of the class `kind` with these attributes, in their order."""

    kind: Any
    attributes: dict[str, _Codec]

    def write(self, out: bytearray, value: Any) -> None:
        for name, codec in self.attributes.items():
            codec.write(out, getattr(value, name))

    def read(self, data: _Input) -> Any:
        return self.kind(**{name: codec.read(data) for name, codec in self.attributes.items()})


class _ContextPhase:
    """The state of a request's first phase, without that of the cache's transfer."""

    def write(self, out: bytearray, value: ContextPhaseParams) -> None:
        if value.opaque_state is not None:
            raise UnsupportedError("must be None", field="opaque_state")
        _U64.write(out, value.req_id)
        _List(_I32).write(out, value.first_gen_tokens)
        _Optional(_List(_I32)).write(out, value.draft_tokens)
        _BOOL.write(out, False)

    def read(self, data: _Input) -> ContextPhaseParams:
        request_id, tokens, drafts = _U64.read(data), _List(_I32).read(data), _Optional(_List(_I32)).read(data)
        if _BOOL.read(data):
            raise UnsupportedError("has the state of a transfer of KV blocks", field="data")
        return ContextPhaseParams(tokens, request_id, draft_tokens=drafts)


_TENSOR = _Optional(_TensorCodec())
_METRICS = _Record(
    RequestPerfMetrics,
    {
        "timing_metrics": _Record(
            TimingMetrics,
            {
                "arrival_time": _Duration(),
                "first_scheduled_time": _Duration(),
                "first_token_time": _Duration(),
                "last_token_time": _Duration(),
                "kv_cache_transfer_start": _Duration(),
                "kv_cache_transfer_end": _Duration(),
                "kv_cache_size": _U64,
            },
        ),
        "kv_cache_metrics": _Record(
            KvCacheMetrics,
            {
                "num_total_allocated_blocks": _I32,
                "num_new_allocated_blocks": _I32,
                "num_reused_blocks": _I32,
                "num_missed_blocks": _I32,
                "kv_cache_hit_rate": _F32,
            },
        ),
        "speculative_decoding": _Record(
            SpeculativeDecodingMetrics,
            {"acceptance_rate": _F32, "total_accepted_draft_tokens": _I32, "total_draft_tokens": _I32},
        ),
        "first_iter": _Optional(_U64),
        "last_iter": _Optional(_U64),
        "iter": _Optional(_U64),
    },
)
_RESULT = _Record(
    Result,
    {
        "is_final": _BOOL,
        "output_token_ids": _List(_List(_I32)),
        "cum_log_probs": _Optional(_List(_F32)),
        "log_probs": _Optional(_List(_List(_F32))),
        "context_logits": _TENSOR,
        "generation_logits": _TENSOR,
        "spec_dec_fast_logits_info": _Optional(
            _Record(SpeculativeDecodingFastLogitsInfo, {"draft_request_id": _U64, "draft_participant_id": _I32})
        ),
        "encoder_output": _TENSOR,
        "finish_reasons": _List(_Reason()),
        "context_phase_params": _Optional(_ContextPhase()),
        "decoding_iter": _I32,
        "avg_decoded_tokens_per_iter": _F32,
        "sequence_index": _I32,
        "is_sequence_final": _BOOL,
        "request_perf_metrics": _Optional(_METRICS),
        "additional_outputs": _List(_Record(AdditionalOutput, {"name": _Text(), "output": _TensorCodec()})),
    },
)


def serialize_result(result: Result) -> bytes:
    """Return a result as bytes, without what TensorRT-LLM's results do not have.

    Raises:
        UnsupportedError: The layout has no such tensor.
    """
    out = bytearray()
    _RESULT.write(out, result)
    return bytes(out)


def deserialize_result(data: bytes) -> Result:
    """Return the result in these bytes.

    Raises:
        InvalidArgumentError: The bytes are not one result.
        UnsupportedError: It has a tensor of a type that the service lacks, or the state of a transfer of KV blocks.
    """
    given = _Input(bytes(data))
    result: Result = _RESULT.read(given)
    if not given.is_empty:
        raise InvalidArgumentError("has more bytes than a result", field="data")
    return result
