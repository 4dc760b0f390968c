"""How blocks outside a pool are named and verified, in all tiers and transfers."""

from __future__ import annotations

import hashlib
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

# Header of a block: format, kind, hash and number of content bytes. In a file, a checksum of the header and the
# contents follows.
_HEADER = struct.Struct("<8s16sQQ")
_FORMAT = b"MSKVBLK1"
_CHECKSUM_BYTES = 16
HEADER_BYTES = _HEADER.size
HEAD_BYTES = HEADER_BYTES + _CHECKSUM_BYTES

Bytes = NDArray[np.uint8]


def kind_digest(kind: str) -> bytes:
    """Return a digest of everything, other than the tokens, that determines the contents of a block."""
    return hashlib.blake2b(kind.encode(), digest_size=16).digest()


def block_header(kind: bytes, value: int, num_bytes: int) -> bytes:
    """Return the header of a block with this kind, hash and size."""
    return _HEADER.pack(_FORMAT, kind, value, num_bytes)


def checksum(header: bytes, contents: Bytes) -> bytes:
    """Return a 128-bit BLAKE2b checksum of a block's header and contents."""
    digest = hashlib.blake2b(header, digest_size=_CHECKSUM_BYTES)
    digest.update(contents.data)
    return digest.digest()


def seal(header: bytes, value: int, contents: Bytes) -> int:
    """Return a short checksum of a block in a pool: CRC-32 of header and contents, and half of the block's hash.

    It fits in one word, so that a process that is killed cannot leave half of it, and takes a fifth of the time of
    `checksum`. It does not protect against a process that can write to the pool, since that process could compute it as
    well.
    """
    return half_hash(value) << 32 | zlib.crc32(contents.data, zlib.crc32(header))


def half_hash(value: int) -> int:
    """Return the half of a block's hash that its seal contains."""
    return value & 0xFFFFFFFF
