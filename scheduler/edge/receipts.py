"""Receipts of ended requests (protos/receipts.proto).

A receipt's body is a function of the request, its output and its times, which are in the journal, so that every
incarnation of the scheduler makes the same body. It is signed when somebody asks for it, and together with all others
on a page when the ledger stores it, since a signature takes longer than everything else.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from midstream.clock import SteadyClock
from midstream.errors import ConfigError, NotFoundError, UnavailableError
from midstream.extras import LogProbs
from midstream.merkle import merkle_root
from midstream.receipts.digests import (
    NONCE_BYTES,
    PROMPT,
    VERSION,
    body_leaf,
    canonical_request,
    links_of,
    log_probs_digest,
    model_identity,
    request_digest,
)
from midstream.receipts.jwk import ReceiptKey
from midstream.receipts.keys import (
    PUBLIC_SUFFIX,
    SECRET_SUFFIX,
    SigningKey,
    read_public_key,
    read_signing_key,
)
from midstream.security.file_signature import Signature, signature_of
from protos import generation_pb2, receipts_pb2, worker_pb2
from scheduler.core.request import ExtraOutput, Request
from scheduler.edge.engine import Engine
from scheduler.edge.kept_requests import KeptRequests
from scheduler.journal.documents import DocumentKey, Documents

logger = logging.getLogger(__name__)

_KEY_KIND = "receipt_key"
_MAX_KEYS = 10_000
# How long the scheduler may take to learn of a stop word that a detokenizer has found.
_END_TIMEOUT_S = 5.0


class KeyFolder:
    """The folder with the keys of this scheduler, which is read again when it changes.

    Attributes:
        public: All public keys.
    """

    def __init__(self, folder: Path, *, is_default: bool) -> None:
        """Read the folder.

        Args:
            is_default: Whether the folder was not configured. It then gets a key if it has none; a key that cannot be
                written lasts as long as this process.

        Raises:
            ConfigError: A file is not a key, or a configured folder has no key pair.
        """
        self._folder, self._is_default = folder, is_default
        self._files = _signatures(folder)
        self._signing, self.public = self._read()

    @property
    def signing(self) -> SigningKey:
        """The pair that was created last; the previous one while the folder cannot be used."""
        files = _signatures(self._folder)
        if files != self._files:
            self._files = files
            try:
                self._signing, self.public = self._read()
            except ConfigError as error:
                logger.error("the keys that sign receipts cannot be read, and remain as they were: %s", error)
        return self._signing

    def _read(self) -> tuple[SigningKey, list[ReceiptKey]]:
        pairs = [read_signing_key(path) for path in sorted(self._folder.glob(f"*{SECRET_SUFFIX}"))]
        public = [read_public_key(path) for path in sorted(self._folder.glob(f"*{PUBLIC_SUFFIX}"))]
        if not pairs and not self._is_default:
            raise ConfigError(
                f"{self._folder} has no NAME{SECRET_SUFFIX}; make one with `midstream keys --kind receipts`",
                field="receipt_keys",
            )
        if not pairs:
            pairs = [self._make()]
        newest = max(pairs, key=lambda pair: (pair.public.created_unix_s, pair.public.key_id))
        return newest, list({key.key_id: key for key in (*public, *(pair.public for pair in pairs))}.values())

    def _make(self) -> SigningKey:
        pair = SigningKey.new()
        try:
            pair.write(self._folder, f"scheduler-{pair.public.key_id[:8]}")
        except (ConfigError, OSError) as error:
            logger.warning("the key that signs receipts is kept only in memory: %s", error)
        else:
            self._files = _signatures(self._folder)
        return pair


def _signatures(folder: Path) -> list[Signature]:
    try:
        return [signature_of(path.stat()) for path in (folder, *sorted(folder.glob(f"*{PUBLIC_SUFFIX}*")))]
    except OSError:
        return []


class Receipts:
    """Makes and signs the receipts of a scheduler."""

    def __init__(self, keys: KeyFolder, documents: Documents, engine: Engine, kept: KeptRequests) -> None:
        """Make receipts of the engine's requests, and of those that are kept."""
        self._keys, self._documents, self._engine, self._kept = keys, documents, engine, kept
        self._published: set[str] = set()
        self._nonces: list[bytes] = []
        self._waiting: dict[str, list[asyncio.Event]] = {}
        engine.on_ended.append(self._note_end)

    def new_nonce(self) -> bytes:
        """Return random bytes for a request. The system is asked for many at a time, since each call takes a while."""
        if not self._nonces:
            pool = os.urandom(256 * NONCE_BYTES)
            self._nonces = [pool[start : start + NONCE_BYTES] for start in range(0, len(pool), NONCE_BYTES)]
        return self._nonces.pop()

    def body(self, request: Request, accepted: generation_pb2.GenerateRequest) -> bytes:
        """Return the receipt's body of an ended request; nothing if it was accepted while receipts were off."""
        return receipt_body(request, accepted, self._engine.clock) if request.spec.receipt_nonce else b""

    async def sign(self, bodies: Sequence[bytes]) -> tuple[str, bytes]:
        """Return the id of the newest key, and its signature of the tree of at least one body. Raises UnavailableError
        if a new key cannot be published.
        """
        key = self._keys.signing
        await self._publish()
        return key.key_id, key.sign(merkle_root(list(map(body_leaf, bodies))))

    async def find(self, query: receipts_pb2.GetReceiptRequest) -> receipts_pb2.GetReceiptResponse | None:
        """Return the receipt of an ended request that is still known; None if it is not known.

        Raises:
            NotFoundError: It has not ended, or has no receipt.
            UnavailableError: It has not ended with the given lengths.
        """
        request = await self._kept.find(query.request_id)
        if request is None or request.request_id not in self._engine.hub.logs:
            return None
        await self._wait_for_end(request, list(query.num_tokens))
        accepted = generation_pb2.GenerateRequest.FromString(request.spec.payload)
        body = self.body(request, accepted)
        if not body:
            raise NotFoundError("has no receipt, since receipts were off when it was accepted", field="request_id")
        key_id, signature = await self.sign([body])
        receipt = receipts_pb2.Receipt(body=body, nonce=request.spec.receipt_nonce, key_id=key_id, signature=signature)
        response = receipts_pb2.GetReceiptResponse(receipt=receipt)
        if query.include_request:
            response.request = canonical_request(accepted)
        if query.include_outputs:
            for sequence in request.sequences:
                assert sequence.end is not None
                response.outputs.add(token_ids=sequence.output[: sequence.end.num_tokens])
        return response

    async def keys(self) -> list[receipts_pb2.ReceiptKey]:
        """Return all keys that signed receipts, also of other schedulers with the same journal."""
        found = {key.key_id: key.to_proto() for key in self._keys.public}
        for document in await self._documents.list(_KEY_KIND, owner="", limit=_MAX_KEYS):
            found.setdefault(document.key.id, receipts_pb2.ReceiptKey.FromString(document.data))
        return sorted(found.values(), key=lambda key: (key.created_unix_s, key.key_id))

    async def _publish(self) -> None:
        """Store the public keys before they are used, so that receipts can be verified after the scheduler's folder is
        gone.
        """
        for key in self._keys.public:
            if key.key_id not in self._published:
                place = DocumentKey("", _KEY_KIND, key.key_id)
                await self._documents.put(place, key.to_proto().SerializeToString(), if_version=0)
                self._published.add(key.key_id)

    async def _wait_for_end(self, request: Request, lengths: list[int]) -> None:
        if self._has_ended(request, lengths):
            return
        if not lengths:
            raise NotFoundError("the request has not ended yet", field="request_id")
        changed = asyncio.Event()
        waiting = self._waiting.setdefault(request.request_id, [])
        waiting.append(changed)
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                while not self._has_ended(request, lengths):
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            raise UnavailableError("the request has not ended with these lengths", field="num_tokens") from None
        finally:
            waiting.remove(changed)
            if not waiting:
                self._waiting.pop(request.request_id, None)

    def _has_ended(self, request: Request, lengths: list[int]) -> bool:
        if not self._engine.hub.is_over(request.request_id):
            return False
        found = [sequence.end.num_tokens for sequence in request.sequences if sequence.end is not None]
        return not lengths or found == lengths

    def _note_end(self, request: Request, _: bool) -> None:
        for changed in self._waiting.get(request.request_id, ()):
            changed.set()


def receipt_body(request: Request, accepted: generation_pb2.GenerateRequest, clock: SteadyClock) -> bytes:
    """Return the receipt's body of an ended request; `accepted` is its payload."""
    spec, nonce = request.spec, request.spec.receipt_nonce
    models = _models(request, accepted.template_fingerprint)
    body = receipts_pb2.ReceiptBody(
        version=VERSION,
        request_id=spec.request_id,
        request_digest=request_digest(nonce, spec.contents_digest),
        model=models[0] if models else b"",
        seed=accepted.sampling.seed,
        prompt_tokens=len(spec.prompt),
        finished_unix_ns=clock.to_unix_ns(request.times.finished_ns),
    )
    if len(models) > 1:
        body.later_models.extend(models[1:])
    if request.failure is not None:
        body.error_code = request.failure.code
    for index, sequence in enumerate(request.sequences):
        end = sequence.end
        assert end is not None
        tokens = sequence.output if len(sequence.output) == end.num_tokens else sequence.output[: end.num_tokens]
        links = links_of(nonce, index, tokens)
        item = body.sequences.add(finish_reason=end.reason, num_tokens=end.num_tokens, links=links)
        if request.kind_changed_at:
            item.kind_changed_at = request.kind_changed_at[index]
        if len(models) > 1:
            item.kind_ends.extend(min(earlier.ends[index], end.num_tokens) for earlier in request.earlier_kinds)
        if spec.wants_log_probs:
            item.log_probs_digest = log_probs_digest(nonce, index, _log_probs(sequence.outputs, end.num_tokens))
    if accepted.HasField("output") and accepted.output.HasField("prompt_log_probs"):
        rows = _prompt_log_probs(request.sequences[0].outputs)
        body.prompt_log_probs_digest = log_probs_digest(nonce, PROMPT, rows)
    return body.SerializeToString()


def _models(request: Request, template: str) -> list[bytes]:
    """Return the identities of what computed a request, in order; the last one alone if the order is not certain."""
    spec, parts = request.spec, request.kind_parts
    kinds = [request.kind] if parts is None else [*(earlier.kind for earlier in parts[0]), parts[1]]
    tokenizer = spec.tokenizer_fingerprint
    return [
        _identity(
            kind.description, kind.model_fingerprint, kind.weights_root, kind.arithmetic, tokenizer, template,
            spec.lora_key, spec.prompt_key,
        )
        for kind in kinds
        if kind is not None
    ]  # fmt: skip


_LEAVES = ("model", "weights", "arithmetic", "tokenizer", "template", "adapter", "prompt")


@lru_cache(maxsize=1024)
def _identity(arithmetic: str, *digests: str) -> bytes:
    """Return a serialized ModelIdentity with these leaves, in the order of _LEAVES."""
    leaves = [(name, digest) for name, digest in zip(_LEAVES, digests, strict=True) if digest]
    return model_identity(leaves, arithmetic).SerializeToString() if leaves else b""


_NO_LOG_PROBS = LogProbs((), 0, (), (), ())


def _log_probs(outputs: Iterable[ExtraOutput], num_tokens: int) -> LogProbs:
    """Return the log probabilities of the first tokens of a sequence."""
    rows = _NO_LOG_PROBS
    for extra in outputs:
        if extra.token_offset < num_tokens:
            row = worker_pb2.RowOutputs.FromString(extra.data)
            if row.HasField("log_probs"):
                rows += LogProbs.from_proto(row.log_probs).first(num_tokens - extra.token_offset)
    return rows


def _prompt_log_probs(outputs: Iterable[ExtraOutput]) -> LogProbs:
    rows = _NO_LOG_PROBS
    for extra in outputs:
        row = worker_pb2.RowOutputs.FromString(extra.data)
        if row.HasField("prompt_log_probs"):
            rows += LogProbs.from_proto(row.prompt_log_probs)
    return rows
