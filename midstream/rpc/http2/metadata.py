"""Encodes and decodes gRPC's HTTP/2 headers: methods, timeouts, metadata and statuses."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import grpc

from midstream.rpc.http2.wire import ErrorCode, StreamError, header_block

Metadata = tuple[tuple[str, str | bytes], ...]

# Message encodings that this server supports.
ENCODINGS = (b"identity", b"deflate", b"gzip")

_HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_REQUIRED = frozenset((b":method", b":scheme", b":path"))
# Headers that gRPC handles itself. Methods see neither these nor any other headers that begin with grpc-.
_SPECIAL = frozenset((b"te", b"content-type", b"content-length", b"host", b"grpc-timeout", b"grpc-encoding"))
_CONTENT_TYPE = re.compile(rb"application/grpc([+;].*)?")
# Overhead that HTTP/2 adds to the size of each header.
_ENTRY_BYTES = 32
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_NAME = re.compile(rb"[0-9a-z!#$%&'*+.^_`|~-]+")
_KEY = re.compile(rb"[0-9a-z_.-]+")
_VALUE = re.compile(rb"[\x20-\x7e]*")
# These bytes make a request malformed (RFC 9113, section 8.2.1).
_BREAKS = re.compile(rb"[\0\r\n]")

_RESPONSE = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_ACCEPTS = (b"grpc-accept-encoding", b"identity, deflate, gzip")
RESPONSE_BLOCK = header_block((*_RESPONSE, _ACCEPTS))
_ONLY_BLOCK = header_block(_RESPONSE)
_OK_BLOCK = header_block([(b"grpc-status", b"0")])


@dataclass(frozen=True, slots=True)
class Head:
    """The headers of a call.

    Attributes:
        timeout_s: Time until the deadline; None if there is none.
        encoding: Encoding of compressed messages.
        problem: Status and description of the error that prevents the call; None if there is no error.
        http_status: HTTP status of a request that is not gRPC; otherwise empty.
    """

    method: str
    metadata: Metadata
    timeout_s: float | None = None
    encoding: bytes = b"identity"
    problem: tuple[grpc.StatusCode, str] | None = None
    http_status: bytes = b""


def read_head(headers: Sequence[tuple[bytes, bytes]], max_bytes: int) -> Head:
    """Return a call's headers, which may have at most `max_bytes`. Raises StreamError if the headers are malformed."""
    pseudo: dict[bytes, bytes] = {}
    special: dict[bytes, bytes] = {}
    metadata: list[tuple[str, str | bytes]] = []
    problem: tuple[grpc.StatusCode, str] | None = None
    for name, value in headers:
        if _BREAKS.search(value):
            raise StreamError(ErrorCode.PROTOCOL_ERROR, "invalid header value")
        if name in _SPECIAL:
            special[name] = value
        elif name in _PSEUDO and name not in pseudo and not metadata and not special:
            pseudo[name] = value
        elif name in _HOP_BY_HOP or not _NAME.fullmatch(name):
            raise StreamError(ErrorCode.PROTOCOL_ERROR, "invalid header")
        elif not name.startswith(b"grpc-") or name.endswith(b"-bin"):
            items = _read_item(name, value)
            metadata += items
            problem = problem if items else (grpc.StatusCode.INTERNAL, "invalid metadata")
    if not pseudo.keys() >= _REQUIRED or not pseudo[b":path"] or special.get(b"te", b"trailers") != b"trailers":
        raise StreamError(ErrorCode.PROTOCOL_ERROR, "missing or invalid header")
    if sum(len(name) + len(value) + _ENTRY_BYTES for name, value in headers) > max_bytes:
        problem = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the metadata is too large")
    return Head(
        pseudo[b":path"].decode("utf-8", "replace"),
        tuple(metadata),
        _read_timeout(special.get(b"grpc-timeout", b"")),
        special.get(b"grpc-encoding", ENCODINGS[0]),
        problem or _problem(special),
        _http_status(pseudo[b":method"], special),
    )


def _problem(special: Mapping[bytes, bytes]) -> tuple[grpc.StatusCode, str] | None:
    encoding, timeout = special.get(b"grpc-encoding", ENCODINGS[0]), special.get(b"grpc-timeout")
    if encoding not in ENCODINGS:
        text = encoding.decode("ascii", "replace")[:64]
        return (grpc.StatusCode.UNIMPLEMENTED, f"the encoding {text!r} is not supported")
    if timeout is not None and _read_timeout(timeout) is None:
        return (grpc.StatusCode.INTERNAL, "grpc-timeout is invalid")
    return None


def _http_status(method: bytes, special: Mapping[bytes, bytes]) -> bytes:
    if method != b"POST":
        return b"405"
    return b"" if _CONTENT_TYPE.fullmatch(special.get(b"content-type", b"")) else b"415"


def _read_timeout(value: bytes) -> float | None:
    match = _TIMEOUT.fullmatch(value)
    return None if match is None else int(match[1]) * _UNITS[match[2]]


def _read_item(name: bytes, value: bytes) -> list[tuple[str, str | bytes]]:
    """Return the metadata of a header; none if it is invalid."""
    key = name.decode("ascii")
    try:
        if not name.endswith(b"-bin"):
            return [(key, value.decode("ascii"))]
        return [(key, base64.b64decode(part + b"=" * (-len(part) % 4), validate=True)) for part in value.split(b",")]
    except ValueError:
        return []


def encode_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> list[tuple[bytes, bytes]]:
    """Return metadata as headers. Raises ValueError if a key or a value is not valid."""
    headers = []
    for key, value in metadata:
        name = key.encode()
        if name.endswith(b"-bin"):
            data = value.encode() if isinstance(value, str) else value
            encoded = binascii.b2a_base64(data, newline=False).rstrip(b"=")
        else:
            encoded = value.encode() if isinstance(value, str) else value
        if not _KEY.fullmatch(name) or not _VALUE.fullmatch(encoded):
            raise ValueError(f"invalid metadata: {key!r}")
        headers.append((name, encoded))
    return headers


def response_block(metadata: Sequence[tuple[str, str | bytes]]) -> bytes:
    return RESPONSE_BLOCK + header_block(encode_metadata(metadata)) if metadata else RESPONSE_BLOCK


def status_block(
    code: grpc.StatusCode, details: str, metadata: Sequence[tuple[str, str | bytes]], *, is_only: bool
) -> bytes:
    """Return the headers that end a response, which are also its first ones if `is_only`."""
    begin = _ONLY_BLOCK if is_only else b""
    if code is grpc.StatusCode.OK and not details and not metadata:
        return begin + _OK_BLOCK
    headers = [(b"grpc-status", b"%d" % code.value[0])]
    if code is grpc.StatusCode.UNIMPLEMENTED and is_only:
        headers.append(_ACCEPTS)
    if details:
        headers.append((b"grpc-message", percent_encode(details)))
    return begin + header_block(headers + encode_metadata(metadata))


def http_status_block(status: bytes) -> bytes:
    """Return the only headers of the response to a request that is not gRPC."""
    return header_block([(b":status", status)])


def percent_encode(text: str) -> bytes:
    """Return a status message as a header's value."""
    data = text.encode("utf-8", "replace")
    if _VALUE.fullmatch(data) and b"%" not in data:
        return data
    return b"".join(b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in data)
