"""Reads the header of a safetensors file: the tensors' types and shapes, without the library and without the data."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream.errors import ConfigError

_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class TensorHead:
    """A tensor's type, under its name in the safetensors format (such as BF16), and its shape."""

    dtype: str
    shape: tuple[int, ...]


def read_safetensors_head(path: Path) -> dict[str, TensorHead]:
    """Return the tensors of `path` by name. Raises ConfigError if it is damaged or cannot be read."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {size} bytes")
            header: dict[str, Any] = json.loads(file.read(size))
            return {
                name: TensorHead(str(entry["dtype"]), tuple(map(int, entry["shape"])))
                for name, entry in header.items()
                if name != "__metadata__"
            }
    except (OSError, struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}", field="model") from error
