"""Reads the header of a GGUF file: its metadata and the locations of its tensors. Reading must be fast, because
vocabularies have some 100,000 strings, and safe for hostile files: every count is checked against the file size before
memory is allocated for it.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from midstream.errors import ConfigError
from midstream.model.git_lfs import refuse_pointer

MetadataValue = str | int | float | bool | list[str] | list[int] | list[float] | list[bool]
Metadata = Mapping[str, MetadataValue]

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_ALIGNMENT = 32
_PART_NAME = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_MAX_PARTS = 1000
_F32, _MAX_VECTOR = 0, 1 << 16
_STRING, _ARRAY = 8, 9
# GGUF value type -> format character of `struct`.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The location of a tensor.

    Attributes:
        shape: Sizes with the fastest dimension first: (columns, rows).
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHead:
    """Metadata and tensor table of a GGUF file."""

    metadata: Metadata
    tensors: dict[str, TensorEntry]


def read_vector(path: Path, entry: TensorEntry) -> list[float]:
    """Return the values of a small tensor of float32. Raises ConfigError if it has another type or is truncated."""
    count = math.prod(entry.shape)
    if entry.type != _F32 or count > _MAX_VECTOR:
        raise ConfigError(f"the tensor {entry.name} must be a short vector of float32", field="model")
    with path.open("rb") as file:
        file.seek(entry.offset)
        data = file.read(4 * count)
    if len(data) < 4 * count:
        raise ConfigError(f"the tensor {entry.name} is truncated", field="model")
    return list(struct.unpack(f"<{count}f", data))


def gguf_parts(file: Path) -> tuple[Path, ...]:
    """Return all files of the model of which `file` is a part, in order: NAME-00001-of-00003.gguf and so on; only
    `file` if it has another name. Raises ConfigError if a part is missing.
    """
    parts = tuple(file.with_name(name) for name in part_names(file.name))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ConfigError(f"{file} is one of {len(parts)} parts, and {missing[0]} is missing", field="model")
    return parts


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the file `name`, which may be a path; only `name` if it is not a part."""
    match = _PART_NAME.fullmatch(name)
    if match is None:
        return [name]
    count = int(match[2])
    if not 0 < count <= _MAX_PARTS:
        raise ConfigError(f"{name} must be one of 1 to {_MAX_PARTS} parts", field="model")
    return [f"{match[1]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def gguf_name(file: Path) -> str:
    """Return the name of the model in a file, without the number of its part."""
    match = _PART_NAME.fullmatch(file.name)
    return match[1] if match else file.stem


def read_gguf_head(path: Path) -> GgufHead:
    """Read the metadata and tensor table of `path`. Raises ConfigError if it is damaged, or not a known GGUF."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).read()
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        refuse_pointer(path)
        raise ConfigError(f"{path} is not a readable GGUF file: {error}", field="model") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._place, self._size = data, 0, len(data)

    def read(self) -> GgufHead:
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_values = self._number("I"), self._number("Q"), self._number("Q")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {_VERSIONS}")
        # 13 and 24 are the sizes of the smallest entries: an empty key with a one-byte value, and an empty name without
        # dimensions.
        self._check_count(num_values, 13)
        metadata = {self._string(): self._value() for _ in range(num_values)}
        self._check_count(num_tensors, 24)
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16:
            raise ValueError(f"general.alignment must be in 1..{1 << 16}; got {alignment}")
        start = -(-self._place // alignment) * alignment
        tensors = {
            entry.name: TensorEntry(entry.name, entry.shape, entry.type, start + entry.offset) for entry in entries
        }
        return GgufHead(metadata, tensors)

    def _tensor(self) -> TensorEntry:
        name, num_dims = self._string(), self._number("I")
        if not 0 < num_dims <= _MAX_DIMS:
            raise ValueError(f"the tensor {name} must have 1 to {_MAX_DIMS} dimensions; got {num_dims}")
        shape = tuple(self._number("Q") for _ in range(num_dims))
        kind, offset = self._number("I"), self._number("Q")
        if offset > self._size:
            raise ValueError(f"the tensor {name} lies beyond the end of the file")
        return TensorEntry(name, shape, kind, offset)

    def _value(self) -> MetadataValue:
        kind = self._number("I")
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._number(self._format(kind))

    def _array(self) -> list[str] | list[int]:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._check_count(count, 8)
            return self._strings(count)
        number = self._format(kind)
        self._check_count(count, struct.calcsize(number))
        return list(struct.unpack(f"<{count}{number}", self._bytes(count * struct.calcsize(number))))

    def _strings(self, count: int) -> list[str]:
        # A vocabulary has 100,000 strings; calling _string for each takes three times as long.
        data, place, size, read_length = self._data, self._place, self._size, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            begin = place + 8
            place = begin + read_length(data, place)[0]
            if place > size:
                raise ValueError("it ends too early")
            strings.append(data[begin:place].decode())
        self._place = place
        return strings

    def _format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"a value has the unknown type {kind}")
        return _NUMBERS[kind]

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode()

    def _number(self, number: str) -> int:
        value: int
        (value,) = struct.unpack_from("<" + number, self._data, self._place)
        self._place += struct.calcsize("<" + number)
        return value

    def _bytes(self, count: int) -> bytes:
        self._check_count(count, 1)
        begin, self._place = self._place, self._place + count
        return self._data[begin : self._place]

    def _check_count(self, count: int, size: int) -> None:
        if count * size > self._size - self._place:
            raise ValueError("it ends too early")
