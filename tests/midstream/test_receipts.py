"""Receipts verify with their keys, and nothing that was changed passes."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from midstream.errors import ConfigError, ReceiptError
from midstream.extras import LogProbs
from midstream.merkle import merkle_paths, merkle_root
from midstream.receipts.digests import (
    LINK_TOKENS,
    PROMPT,
    before_links,
    body_leaf,
    canonical_request,
    links_of,
    log_probs_digest,
    model_identity,
    num_confirmed,
    request_digest,
)
from midstream.receipts.jwk import ReceiptKey
from midstream.receipts.keys import SigningKey, read_public_key, read_signing_key
from midstream.receipts.verify import Statement, check_log_probs, check_receipt, check_request, check_tokens
from protos import generation_pb2 as pb
from protos import receipts_pb2

KEY, OTHER = SigningKey.new(), SigningKey.new()
KEYS = {KEY.public.key_id: KEY.public}
NONCE = bytes(range(16))
REQUEST = pb.GenerateRequest(
    request_id="r", token_ids=pb.TokenIds(values=[1, 2, 3]), sampling=pb.SamplingConfig(seed=5, temperature=0.5)
)
OUTPUTS = [list(range(100, 250)), [7]]
ROWS = LogProbs((-0.5,), 2, (7, 8), (-0.5, -1.5), (1,))
PROMPT_ROWS = LogProbs((-1.0, -2.0), 0, (), (), (3, 4))
LEAVES = [("model", "m"), ("weights", "w"), ("tokenizer", "t")]


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def contents_digest(request: pb.GenerateRequest) -> bytes:
    return hashlib.sha256(canonical_request(request)).digest()


def body() -> receipts_pb2.ReceiptBody:
    made = receipts_pb2.ReceiptBody(
        version=1,
        request_id="r",
        request_digest=request_digest(NONCE, contents_digest(REQUEST)),
        model=model_identity(LEAVES, "avx2").SerializeToString(),
        seed=5,
        prompt_log_probs_digest=log_probs_digest(NONCE, PROMPT, PROMPT_ROWS),
    )
    for index, tokens in enumerate(OUTPUTS):
        made.sequences.add(finish_reason=1, num_tokens=len(tokens), links=links_of(NONCE, index, array("I", tokens)))
    made.sequences[1].log_probs_digest = log_probs_digest(NONCE, 1, ROWS)
    return made


def receipt(key: SigningKey = KEY, num_others: int = 0) -> receipts_pb2.Receipt:
    """Return a receipt that was signed together with others."""
    bodies = [body().SerializeToString(), *(bytes([number]) for number in range(num_others))]
    root, paths = merkle_paths([body_leaf(item) for item in bodies])
    return receipts_pb2.Receipt(
        body=bodies[0],
        path=paths[0].siblings,
        left_siblings=paths[0].left_siblings,
        key_id=KEY.public.key_id,
        signature=key.sign(root),
        nonce=NONCE,
    )


def check(made: receipts_pb2.Receipt) -> Statement:
    """Check all that a receipt states."""
    statement = check_receipt(made, KEYS)
    check_request(statement, contents_digest(REQUEST))
    check_tokens(statement, OUTPUTS)
    check_log_probs(statement, 1, ROWS)
    check_log_probs(statement, PROMPT, PROMPT_ROWS)
    return statement


@pytest.mark.parametrize("num_others", [0, 1, 4])
def test_a_receipt_verifies(num_others: int) -> None:
    statement = check(receipt(num_others=num_others))
    assert statement.leaves == dict(LEAVES)
    assert statement.model.arithmetic == "avx2"


def test_the_digests_are_those_of_the_specification() -> None:
    four = [number.to_bytes(4, "little") for number in range(256)]
    first = sha256(b"midstream tokens 1\0", NONCE, four[0], *four[100:164])
    second = sha256(first, *four[164:228])
    third = sha256(second, *four[228:250])
    assert links_of(NONCE, 0, array("I", OUTPUTS[0])) == [first, second, third]
    assert links_of(NONCE, 0, array("I")) == []
    contents = pb.GenerateRequest()
    contents.CopyFrom(REQUEST)
    assert request_digest(NONCE, sha256(contents.SerializeToString(deterministic=True))) == sha256(
        b"midstream request 1\0", NONCE, sha256(canonical_request(REQUEST))
    )
    left, right = sha256(b"\3", four[5], b"model", b"m"), sha256(b"\3", four[7], b"weights", b"w")
    assert model_identity(LEAVES[:2], "").root == sha256(b"\1", left, right)
    Ed25519PublicKey.from_public_bytes(KEY.public.data).verify(
        receipt().signature, b"midstream receipt 1\0" + sha256(b"\0", body().SerializeToString())
    )


def test_what_does_not_decide_the_answer_is_not_hashed() -> None:
    request = pb.GenerateRequest()
    request.CopyFrom(REQUEST)
    request.arrival_time_unix_ns = request.timeout_ms = 5
    request.attachment = request.receipt_nonce = b"x"
    request.trace_parent = request.tokenizer_fingerprint = request.template_fingerprint = "x"
    assert canonical_request(request) == canonical_request(REQUEST)
    request.sampling.seed = 6
    assert canonical_request(request) != canonical_request(REQUEST)


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("field", ["body", "signature", "nonce"])
def test_one_flipped_bit_of_a_receipt_is_found(field: str) -> None:
    made = receipt(num_others=3)
    data = getattr(made, field)
    for bit in random.Random(1).sample(range(8 * len(data)), 100):
        setattr(made, field, flip(data, bit))
        with pytest.raises(ReceiptError):
            check(made)


def test_one_flipped_bit_of_the_path_is_found() -> None:
    made = receipt(num_others=3)
    for bit in random.Random(2).sample(range(256), 100):
        changed = receipts_pb2.Receipt()
        changed.CopyFrom(made)
        changed.path[bit % 2] = flip(made.path[bit % 2], bit)
        with pytest.raises(ReceiptError, match="signature"):
            check(changed)


def test_one_changed_token_is_found() -> None:
    statement, source = check_receipt(receipt(), KEYS), random.Random(3)
    for _ in range(100):
        outputs = [list(tokens) for tokens in OUTPUTS]
        place = source.randrange(len(outputs[0]))
        outputs[0][place] ^= 1 << source.randrange(16)
        first = place - place % LINK_TOKENS
        with pytest.raises(ReceiptError, match=f"tokens {first} to"):
            check_tokens(statement, outputs)


def test_one_changed_log_prob_is_found() -> None:
    statement, source = check_receipt(receipt(), KEYS), random.Random(4)
    for _ in range(100):
        values = array("f", ROWS.top_log_probs)
        changed = array("f", flip(values.tobytes(), source.randrange(64)))
        rows = LogProbs(ROWS.token_log_probs, 2, ROWS.top_token_ids, tuple(changed), ROWS.token_ranks)
        with pytest.raises(ReceiptError, match=r"log_probs\[1\]"):
            check_log_probs(statement, 1, rows)


def drop_link(made: receipts_pb2.ReceiptBody) -> None:
    del made.sequences[0].links[-1]


def swap_links(made: receipts_pb2.ReceiptBody) -> None:
    links = made.sequences[0].links
    links[0], links[1] = links[1], links[0]


def shorten(made: receipts_pb2.ReceiptBody) -> None:
    del made.sequences[0].links[1:]
    made.sequences[0].num_tokens = LINK_TOKENS


def swap_adapter(made: receipts_pb2.ReceiptBody) -> None:
    model = receipts_pb2.ModelIdentity.FromString(made.model)
    model.leaves[1].digest = "other"
    made.model = model.SerializeToString()


@pytest.mark.parametrize("change", [drop_link, swap_links, shorten, swap_adapter])
@pytest.mark.parametrize("key", [KEY, OTHER], ids=["signed again by the operator", "forged"])
def test_a_changed_chain_or_leaf_is_found(change: Callable[[receipts_pb2.ReceiptBody], None], key: SigningKey) -> None:
    """Even with the right key, parts that do not belong together are found; consistent lies of the signer are not."""
    changed = body()
    change(changed)
    made = receipts_pb2.Receipt(body=changed.SerializeToString(), key_id=KEY.public.key_id, nonce=NONCE)
    made.signature = key.sign(body_leaf(made.body))
    with pytest.raises(ReceiptError):
        check(made)


def test_a_part_of_an_answer_is_checked_up_to_its_last_complete_link() -> None:
    statement = check_receipt(receipt(), KEYS)
    check_tokens(statement, [OUTPUTS[0][:100], OUTPUTS[1]], are_complete=False)
    changed = [*OUTPUTS[0][:63], 5, *OUTPUTS[0][64:100]]
    with pytest.raises(ReceiptError, match="tokens 0 to 63"):
        check_tokens(statement, [changed, OUTPUTS[1]], are_complete=False)
    with pytest.raises(ReceiptError, match="has 100 tokens"):
        check_tokens(statement, [OUTPUTS[0][:100], OUTPUTS[1]])


def test_contents_are_compared_only_with_the_nonce() -> None:
    made = receipt()
    made.nonce = b""
    with pytest.raises(ReceiptError, match="nonce: is missing"):
        check(made)


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(ReceiptError, match=KEY.public.key_id):
        check_receipt(receipt(), {})


@pytest.mark.parametrize("count", range(1, 10))
def test_every_leaf_has_a_path_to_the_root(count: int) -> None:
    leaves = [bytes([number]) * 32 for number in range(count)]
    root, paths = merkle_paths(leaves)
    assert root == merkle_root(leaves)
    assert [path.root(leaf) for leaf, path in zip(leaves, paths, strict=True)] == [root] * count
    assert {path.root(b"x" * 32) == root for path in paths} == {False}


@pytest.mark.parametrize(
    ("num_tokens", "links", "confirmed"),
    [(63, [], 63), (64, [], 0), (130, [0, 1], 130), (130, [0], 64), (130, [1, 0], 0), (130, [0, 0], 64)],
)
def test_complete_links_confirm_tokens(num_tokens: int, links: list[int], confirmed: int) -> None:
    tokens = array("I", range(num_tokens))
    whole = links_of(NONCE, 0, tokens)
    assert num_confirmed(NONCE, 0, tokens, [whole[number] for number in links]) == confirmed
    assert before_links(NONCE, 0) != before_links(NONCE, 1)


def test_keys_are_read_back_and_secret_ones_are_private(tmp_path: Path) -> None:
    public, secret = KEY.write(tmp_path, "k")
    assert (public.name, secret.name) == ("k.jwk", "k.jwk_secret")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert read_public_key(public) == read_public_key(secret) == KEY.public
    assert read_signing_key(secret).sign(b"root") == KEY.sign(b"root")
    with pytest.raises(ConfigError, match="exists"):
        KEY.write(tmp_path, "k")
    with pytest.raises(ConfigError, match="no key of 32 bytes"):
        read_signing_key(public)
    secret.write_text(secret.read_text().replace(str(KEY.public.to_jwk()["x"]), str(OTHER.public.to_jwk()["x"])))
    with pytest.raises(ConfigError, match="do not match"):
        read_signing_key(secret)


def test_the_thumbprint_is_that_of_rfc_8037() -> None:
    """Appendix A.2 and A.3."""
    jwk = {"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}
    assert ReceiptKey.from_jwk(jwk, "it").key_id == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"
