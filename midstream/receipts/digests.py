"""The digests in receipts, as specified in protos/receipts.proto."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence

from midstream.extras import LogProbs
from midstream.merkle import merkle_root
from protos import generation_pb2 as pb
from protos import receipts_pb2

VERSION = 1  # of ReceiptBody
LINK_TOKENS = 64
NONCE_BYTES = 16
PROMPT = (1 << 32) - 1  # in place of a sequence index
_REQUEST, _TOKENS, _LOG_PROBS = b"midstream request 1\0", b"midstream tokens 1\0", b"midstream log probs 1\0"
_LEAF, _MODEL_LEAF = b"\0", b"\3"


def canonical_request(request: pb.GenerateRequest) -> bytes:
    """Return the request as it is hashed."""
    contents = pb.GenerateRequest()
    contents.CopyFrom(request)
    # These do not decide the answer, or are a part of the model's identity.
    contents.ClearField("attachment")
    contents.ClearField("arrival_time_unix_ns")
    contents.ClearField("timeout_ms")
    contents.ClearField("trace_parent")
    contents.ClearField("receipt_nonce")
    contents.ClearField("tokenizer_fingerprint")
    contents.ClearField("template_fingerprint")
    if contents.HasField("lora"):
        contents.lora.ClearField("resolved")
    if contents.HasField("prompt_tuning"):
        contents.prompt_tuning.ClearField("resolved")
    return contents.SerializeToString(deterministic=True)


def request_digest(nonce: bytes, contents_digest: bytes) -> bytes:
    """Return the salted digest of a request; `contents_digest` is the SHA-256 of the canonical request."""
    return hashlib.sha256(_REQUEST + nonce + contents_digest).digest()


def before_links(nonce: bytes, index: int) -> bytes:
    """Return what takes the place of a previous link for the first link of a sequence."""
    return _TOKENS + nonce + index.to_bytes(4, "little")


def next_link(link: bytes, tokens: array[int]) -> bytes:
    """Return the link after `link`; `tokens` are the next LINK_TOKENS tokens, or the last ones."""
    return hashlib.sha256(link + _bytes(tokens)).digest()


def links_of(nonce: bytes, index: int, tokens: array[int]) -> list[bytes]:
    """Return the chain over the tokens (array type 'I') of a sequence."""
    link, links = before_links(nonce, index), []
    if len(tokens) <= LINK_TOKENS:
        return [next_link(link, tokens)] if tokens else []
    for start in range(0, len(tokens), LINK_TOKENS):
        link = next_link(link, tokens[start : start + LINK_TOKENS])
        links.append(link)
    return links


def num_confirmed(nonce: bytes, index: int, tokens: array[int], links: Sequence[bytes]) -> int:
    """Compare complete links of a sequence's chain; return the number of leading tokens that they confirm: all, if no
    complete link is missing or differs.
    """
    link = before_links(nonce, index)
    for number in range(len(tokens) // LINK_TOKENS):
        start = number * LINK_TOKENS
        link = next_link(link, tokens[start : start + LINK_TOKENS])
        if number >= len(links) or links[number] != link:
            return start
    return len(tokens)


def log_probs_digest(nonce: bytes, index: int, rows: LogProbs) -> bytes:
    """Return the digest of the log probabilities of a sequence, or of the prompt with the index PROMPT."""
    numbers = index, len(rows.token_log_probs), rows.top_k
    parts = [
        _LOG_PROBS + nonce,
        _bytes(array("I", numbers)),
        _bytes(array("f", rows.token_log_probs)),
        _bytes(array("I", rows.token_ranks)),
        _bytes(array("I", rows.top_token_ids)),
        _bytes(array("f", rows.top_log_probs)),
    ]
    return hashlib.sha256(b"".join(parts)).digest()


def body_leaf(body: bytes) -> bytes:
    """Return the leaf of a serialized ReceiptBody in the signed tree."""
    return hashlib.sha256(_LEAF + body).digest()


def model_root(leaves: Iterable[receipts_pb2.ModelLeaf]) -> bytes:
    """Return the root of a model's identity. Precondition: there is a leaf."""
    return merkle_root([_model_leaf(leaf.name, leaf.digest) for leaf in leaves])


def model_identity(leaves: Sequence[tuple[str, str]], arithmetic: str) -> receipts_pb2.ModelIdentity:
    """Return the identity with these leaves (name, digest)."""
    identity = receipts_pb2.ModelIdentity(arithmetic=arithmetic)
    for name, digest in leaves:
        identity.leaves.add(name=name, digest=digest)
    identity.root = model_root(identity.leaves)
    return identity


def _model_leaf(name: str, digest: str) -> bytes:
    encoded = name.encode()
    return hashlib.sha256(_MODEL_LEAF + len(encoded).to_bytes(4, "little") + encoded + digest.encode()).digest()


def _bytes(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()
