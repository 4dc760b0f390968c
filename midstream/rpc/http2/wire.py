"""HTTP/2 frames and header blocks as bytes (RFC 9113 and RFC 7541)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = struct.Struct(">HBBBL")
HEAD_BYTES = 9
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME = 16_384
MAX_WINDOW = (1 << 31) - 1
MAX_STREAM = (1 << 31) - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

# Sets the size of HPACK's dynamic table, which this server does not use, to 0 (RFC 7541, section 6.3). Without it, a
# client that reduces the maximum size expects the next block to begin with such an update, and rejects other blocks.
EMPTY_TABLE = b"\x20"

_PREFIXED_DATA = struct.Struct(">HBBBLBL")
_NUMBER = struct.Struct(">L")
_TWO_NUMBERS = struct.Struct(">LL")
_SETTING = struct.Struct(">HL")


class Setting(IntEnum):
    """The settings that this server sends or obeys."""

    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """The error codes that this server sends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ProtocolError(Exception):
    """The peer violated the protocol or a limit, so the connection ends."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class StreamError(Exception):
    """The peer violated the protocol in one stream, which ends."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    size = len(body)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + body


def message_head(stream: int, size: int) -> bytes:
    """Return the head of a DATA frame with one whole message of `size` bytes, and the message's own head."""
    total = size + 5
    return _PREFIXED_DATA.pack(total >> 8, total & 0xFF, DATA, 0, stream, 0, size)


def header_frames(stream: int, block: bytes, max_frame: int, *, end_stream: bool) -> bytes:
    """Return a HEADERS frame, followed by CONTINUATION frames if the block is larger than a frame may be."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= max_frame:
        return frame(HEADERS, flags | END_HEADERS, stream, block)
    frames = [frame(HEADERS, flags, stream, block[:max_frame])]
    for at in range(max_frame, len(block), max_frame):
        is_last = at + max_frame >= len(block)
        frames.append(frame(CONTINUATION, END_HEADERS if is_last else 0, stream, block[at : at + max_frame]))
    return b"".join(frames)


def settings(values: Iterable[tuple[Setting, int]]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in values))


def read_settings(body: bytes) -> list[tuple[int, int]]:
    """Return the names and values in a SETTINGS frame. Raises ProtocolError if the frame has an invalid length."""
    if len(body) % _SETTING.size:
        raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "invalid length of SETTINGS")
    return list(_SETTING.iter_unpack(body))


def window_update(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(size))


def rst_stream(stream: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def goaway(last_stream: int, code: ErrorCode, reason: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, _TWO_NUMBERS.pack(last_stream, code) + reason)


def read_number(body: bytes) -> int:
    """Return the only number in a frame, without its first bit. Raises ProtocolError if the length is invalid."""
    if len(body) != _NUMBER.size:
        raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "invalid length of a frame")
    return int(_NUMBER.unpack(body)[0]) & MAX_WINDOW


def header_block(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return headers as literals that are not indexed, so that blocks do not depend on each other."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)


def _text(text: bytes) -> bytes:
    size = len(text)
    if size < 0x7F:
        return bytes((size,)) + text
    head, rest = bytearray((0x7F,)), size - 0x7F
    while rest >= 0x80:
        head.append(rest & 0x7F | 0x80)
        rest >>= 7
    head.append(rest)
    return bytes(head) + text
