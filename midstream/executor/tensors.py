"""Tensors of the user's program: arrays of numpy or torch, and their values."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from midstream.client.request import naming
from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.extras import Tensor

_MAX_FLOAT = 3.4028234663852886e38

# Any tensor that a user may pass: of torch, of numpy, or nested lists.
AnyTensor = Any


def to_user(tensor: Tensor | None) -> AnyTensor | None:
    """Return the tensor as a torch.Tensor if torch is installed, otherwise as a numpy array."""
    if tensor is None:
        return None
    torch, numpy = _module("torch"), _module("numpy")
    if torch is not None:
        if not tensor.data:
            return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        return torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype)).reshape(tensor.shape)
    if numpy is not None:
        return numpy.frombuffer(bytearray(tensor.data), dtype=tensor.dtype).reshape(tensor.shape)
    raise UnsupportedError("tensors require torch or numpy; install one of them", field="output_config")


def values_of(tensor: AnyTensor, field: str) -> Any:
    """Return the tensor's values as nested lists or, if it has no axes, as one value.

    Raises:
        InvalidArgumentError: It is not a tensor.
    """
    if hasattr(tensor, "tolist"):
        return tensor.tolist()
    if isinstance(tensor, Iterable) and not isinstance(tensor, str | bytes):
        return [values_of(item, field) if isinstance(item, Iterable) else item for item in tensor]
    raise InvalidArgumentError(f"must be a tensor, not a {type(tensor).__name__}", field=field)


def bias_of(bias: Mapping[int, float] | AnyTensor, field: str = "embedding_bias") -> dict[int, float]:
    """Return the logits' bias by token id, given as such or as a vector [vocab_size].

    Raises:
        InvalidArgumentError: It is neither.
    """
    if isinstance(bias, Mapping):
        return dict(bias)
    values = values_of(bias, field)
    with naming(field):
        while len(values) == 1 and isinstance(values[0], list):
            values = values[0]
        # The service takes finite values only; the largest ones decide like infinity.
        return {index: max(-_MAX_FLOAT, min(_MAX_FLOAT, value)) for index, value in enumerate(values) if value}


def length_of(bias: Mapping[int, float] | AnyTensor) -> int | None:
    """Return the length of a vector; None for a mapping."""
    if isinstance(bias, Mapping):
        return None
    shape = getattr(bias, "shape", None)
    return int(shape[-1]) if shape else len(bias)


def first_rows(tensor: Tensor, end: int, start: int = 0) -> Tensor:
    """Return the rows [start, end) of a tensor, as far as there are any."""
    num_rows = tensor.shape[0]
    row_bytes = len(tensor.data) // num_rows if num_rows else 0
    count = max(min(end, num_rows) - start, 0)
    data = tensor.data[start * row_bytes : (start + count) * row_bytes]
    return replace(tensor, shape=(count, *tensor.shape[1:]), data=data)


def _module(name: str) -> Any:
    """Return a module of the user's program, which services do not need, or None if it is not installed."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None
