"""Checks of receipts that need neither the service nor the model."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from midstream.errors import ReceiptError
from midstream.extras import LogProbs
from midstream.merkle import MerklePath
from midstream.receipts.digests import (
    LINK_TOKENS,
    PROMPT,
    VERSION,
    body_leaf,
    links_of,
    log_probs_digest,
    model_root,
    request_digest,
)
from midstream.receipts.jwk import ReceiptKey
from midstream.receipts.keys import has_signed
from protos import receipts_pb2 as pb


@dataclass(frozen=True, slots=True)
class Statement:
    """A receipt whose signature was checked."""

    receipt: pb.Receipt
    body: pb.ReceiptBody
    model: pb.ModelIdentity
    later_models: tuple[pb.ModelIdentity, ...] = ()

    @property
    def leaves(self) -> dict[str, str]:
        """The leaves of the model's identity by name."""
        return {leaf.name: leaf.digest for leaf in self.model.leaves}


def check_receipt(receipt: pb.Receipt, keys: Mapping[str, ReceiptKey]) -> Statement:
    """Check the signature of a receipt, and that its parts belong together.

    Args:
        keys: The trusted public keys by id.

    Raises:
        ReceiptError: It was not signed with one of the keys, or is not valid.
    """
    key = keys.get(receipt.key_id)
    if key is None:
        raise ReceiptError(f"the receipt names the key {receipt.key_id!r}, which is not among the keys", field="key_id")
    root = MerklePath(tuple(receipt.path), receipt.left_siblings).root(body_leaf(receipt.body))
    if not has_signed(key, root, receipt.signature):
        raise ReceiptError("the receipt was not signed with the key that it names", field="signature")
    try:
        body = pb.ReceiptBody.FromString(receipt.body)
        model = pb.ModelIdentity.FromString(body.model)
        later = tuple(pb.ModelIdentity.FromString(item) for item in body.later_models)
    except DecodeError:
        raise ReceiptError("the signed contents are unreadable", field="body") from None
    if body.version != VERSION:
        raise ReceiptError(f"is {body.version}; this program reads version {VERSION}", field="version")
    if any(
        not item.leaves or model_root(item.leaves) != item.root for item in ([model] if body.model else []) + [*later]
    ):
        raise ReceiptError("the model's root does not belong to its leaves", field="model")
    for index, sequence in enumerate(body.sequences):
        if len(sequence.links) != -(-sequence.num_tokens // LINK_TOKENS):
            raise ReceiptError(
                f"sequence {index} has {len(sequence.links)} links for {sequence.num_tokens} tokens", field="links"
            )
        if len(sequence.kind_ends) != len(later) or sorted(sequence.kind_ends) != [*sequence.kind_ends]:
            raise ReceiptError(f"sequence {index} does not say which model computed which tokens", field="kind_ends")
    return Statement(receipt, body, model, later)


def check_request(statement: Statement, contents_digest: bytes) -> None:
    """Check the canonical request's SHA-256. Raises ReceiptError if the receipt is for another one, or has no nonce."""
    nonce = _nonce(statement)
    if request_digest(nonce, contents_digest) != statement.body.request_digest:
        raise ReceiptError("the receipt is for another request, or its nonce was changed", field="request")


def check_tokens(statement: Statement, outputs: Sequence[Sequence[int]], *, are_complete: bool = True) -> None:
    """Check the tokens of all sequences.

    Args:
        are_complete: Whether they are the whole answer. Otherwise only complete links are compared, and tokens beyond
            them are not checked.

    Raises:
        ReceiptError: The answer was another one; the error names the first link that differs.
    """
    nonce, sequences = _nonce(statement), statement.body.sequences
    if len(outputs) != len(sequences):
        raise ReceiptError(f"has {len(outputs)} sequences; the receipt has {len(sequences)}", field="outputs")
    for index, (tokens, sequence) in enumerate(zip(outputs, sequences, strict=True)):
        field = f"outputs[{index}]"
        if len(tokens) != sequence.num_tokens and (are_complete or len(tokens) > sequence.num_tokens):
            raise ReceiptError(f"has {len(tokens)} tokens; the receipt has {sequence.num_tokens}", field=field)
        found = links_of(nonce, index, array("I", tokens))
        is_whole = len(tokens) == sequence.num_tokens
        num_links = len(found) if is_whole else len(tokens) // LINK_TOKENS
        for number in range(num_links):
            if found[number] != sequence.links[number]:
                start = number * LINK_TOKENS
                end = min(start + LINK_TOKENS, len(tokens))
                raise ReceiptError(f"tokens {start} to {end - 1} are not those of the receipt", field=field)


def check_log_probs(statement: Statement, index: int, rows: LogProbs) -> None:
    """Check the log probabilities of a sequence's tokens, or of the prompt with the index PROMPT. Raises ReceiptError
    if they differ or were not requested.
    """
    body = statement.body
    expected = body.prompt_log_probs_digest if index == PROMPT else body.sequences[index].log_probs_digest
    field = "prompt_log_probs" if index == PROMPT else f"log_probs[{index}]"
    if not expected:
        raise ReceiptError("the receipt has no log probabilities, since the request did not ask for them", field=field)
    if log_probs_digest(_nonce(statement), index, rows) != expected:
        raise ReceiptError("are not those of the receipt", field=field)


def _nonce(statement: Statement) -> bytes:
    if not statement.receipt.nonce:
        raise ReceiptError(
            "is missing; without it, contents cannot be compared. It is given to the client with the answer",
            field="nonce",
        )
    return statement.receipt.nonce
