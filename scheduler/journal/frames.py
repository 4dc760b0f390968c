"""Frames of a log: the format in which records are stored in a segment.

protos/journal.proto describes the format. Sequence numbers show whether a record is missing.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = b"MSJL"
_HEADER = struct.Struct("<4sIQI")
_CHECKED = struct.Struct("<IQ")
# Number of bytes that a frame adds to its payload.
FRAME_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class Frame:
    """A complete record. `start` and `end` delimit its bytes in the segment."""

    sequence: int
    payload: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes that are not a record. `is_tail` means that no complete record follows in this segment."""

    start: int
    end: int
    is_tail: bool


def frame(sequence: int, payload: bytes) -> bytes:
    """Return a record as a frame of the segment format."""
    return _HEADER.pack(_MAGIC, len(payload), sequence, _checksum(sequence, payload)) + payload


def frames(data: bytes, end: int) -> Iterator[Frame | Gap]:
    """Yield the records in `data[:end]`, and the gaps between and after them; trailing zeros are ignored."""
    start = 0
    while start < end:
        found = _frame_at(data, start, end)
        if found is None:
            found = _next_frame(data, start + 1, end)
            if found is None:
                if data.count(0, start, end) != end - start:
                    yield Gap(start, end, is_tail=True)
                return
            yield Gap(start, found.start, is_tail=False)
        yield found
        start = found.end


def _frame_at(data: bytes, start: int, end: int) -> Frame | None:
    if start + _HEADER.size > end:
        return None
    magic, length, sequence, checksum = _HEADER.unpack_from(data, start)
    stop = start + _HEADER.size + length
    if magic != _MAGIC or stop > end:
        return None
    payload = data[start + _HEADER.size : stop]
    return Frame(sequence, payload, start, stop) if _checksum(sequence, payload) == checksum else None


def _next_frame(data: bytes, start: int, end: int) -> Frame | None:
    while (start := data.find(_MAGIC, start, end)) >= 0:
        found = _frame_at(data, start, end)
        if found is not None:
            return found
        start += 1
    return None


def _checksum(sequence: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_CHECKED.pack(len(payload), sequence)))
