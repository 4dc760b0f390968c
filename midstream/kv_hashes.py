"""Identifiers of KV blocks: a hash chain over full blocks of tokens, which is the same in the scheduler and in routers.

A block's hash covers its tokens and all tokens before them. The chain starts with a seed derived from everything that
must be equal for requests to share blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable


def chain_seed(parts: Iterable[str]) -> int:
    """Return the seed of a hash chain; 0 if all parts are empty."""
    parts = tuple(parts)
    if not any(parts):
        return 0
    text = b"".join(len(part).to_bytes(4, "little") + part for part in map(str.encode, parts))
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"chain seed").digest(), "little")


def chain_hash(parent: int, tokens: array[int]) -> int:
    """Return a full block's hash, given its parent's: 64 bits of BLAKE2b, so that collisions cannot be forced."""
    data = parent.to_bytes(8, "little") + tokens.tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
