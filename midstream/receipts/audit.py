"""Checks receipts: alone, or by computing their answers again.

An answer is computed again by running its request once more, with the answer as the expected output: the worker then
verifies up to 16 of its tokens in a step, with the same sampling, penalties and masks as the first time. The result is
that of an ordinary run, whatever the expectation, so every kind of request can be audited. Requests whose tokens depend
on more than the tokens before (beams, grammars, post-processors) are run without an expectation, in the same way.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from midstream.chunk import finish_reason_from_proto
from midstream.client import AsyncClient
from midstream.client.result import Result
from midstream.errors import MidstreamError, ReceiptError, UnavailableError, UnsupportedError
from midstream.extras import LogProbs
from midstream.receipts.digests import PROMPT, log_probs_digest
from midstream.receipts.evidence import Evidence
from midstream.receipts.jwk import ReceiptKey
from midstream.receipts.verify import Statement, check_log_probs, check_receipt, check_request, check_tokens
from protos import generation_pb2 as pb
from protos import receipts_pb2

_NUM_DRAFTS = 16
_NUM_TOP = 20
_LOWEST_PRIORITY = -100
# How often an audit waits for weights to be hashed, and for how long each time.
_MAX_WAITS, _WAIT_S = 60, 1.0
# Finish reasons of sequences that came to their end; others were aborted, failed or ran out of time.
ENDED = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)


class Verdict(enum.StrEnum):
    """What an audit found."""

    VERIFIED = "verified"  # the receipt is genuine, and what was given with it belongs to it
    PROVED = "proved"  # and the answer was computed again
    DIFFERS = "differs"
    INVALID = "invalid"
    UNCHECKED = "cannot be checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one request.

    Attributes:
        checked: What was compared: signature, request, tokens, log probs, recomputation.
        reason: Why the answer was not proved.
        token: Place of the first token that differs. expected: The receipt's token there. found: The computed one; None
            if the answer ends earlier.
        margin: By how much the computed token's log probability exceeds that of the receipt's token; None if the latter
            is not among the 20 most likely tokens.
    """

    request_id: str
    verdict: Verdict
    finished_unix_ns: int = 0
    error_code: int = 0
    checked: tuple[str, ...] = ()
    reason: str = ""
    sequence: int | None = None
    token: int | None = None
    expected: int | None = None
    found: int | None = None
    margin: float | None = None


def check_offline(evidence: Evidence, keys: Mapping[str, ReceiptKey]) -> tuple[Finding, Statement | None]:
    """Check a receipt and what was given with it, without the service."""
    checked: list[str] = []
    request_id, finished_unix_ns, error_code, statement = "", 0, 0, None
    try:
        statement = check_receipt(evidence.receipt, keys)
        body = statement.body
        request_id, finished_unix_ns, error_code = body.request_id, body.finished_unix_ns, body.error_code
        checked.append("signature")
        if evidence.request:
            check_request(statement, hashlib.sha256(evidence.request).digest())
            checked.append("request")
        if evidence.outputs is not None:
            check_tokens(statement, evidence.outputs)
            checked.append("tokens")
        if evidence.log_probs:
            _check_log_probs(statement, evidence.log_probs)
            checked.append("log probs")
    except ReceiptError as error:
        finding = Finding(request_id, Verdict.INVALID, finished_unix_ns, error_code, tuple(checked), str(error))
        return finding, None
    return Finding(request_id, Verdict.VERIFIED, finished_unix_ns, error_code, tuple(checked)), statement


def _check_log_probs(statement: Statement, rows: list[LogProbs]) -> None:
    if len(rows) != len(statement.body.sequences):
        raise ReceiptError(
            f"are of {len(rows)} sequences; the receipt has {len(statement.body.sequences)}", field="log_probs"
        )
    for index, item in enumerate(rows):
        check_log_probs(statement, index, item)


class Auditor:
    """Computes answers again with a service that the auditor trusts."""

    def __init__(self, client: AsyncClient, keys: Mapping[str, ReceiptKey]) -> None:
        """Audit with the service of `client`; `keys` are the trusted keys of the receipts, by id."""
        self._client, self._keys = client, keys
        self._own_keys: dict[str, ReceiptKey] = {}
        self._template = ""
        self._num_waits = 0  # for hashed weights

    async def open(self) -> None:
        """Ask for the service's own keys, with which it signs what it computes for the audit, and its template."""
        self._own_keys = {key.key_id: key for key in await self._client.receipt_keys()}
        self._template = (await self._client.model_info()).template_fingerprint

    async def audit(self, evidence: Evidence) -> Finding:
        """Check a receipt, and compute its answer again."""
        finding, statement = check_offline(evidence, self._keys)
        if statement is not None:
            evidence = await self._completed(evidence, statement)
            finding, statement = check_offline(evidence, self._keys)
        if statement is None:
            return finding
        checked = finding.checked

        def unchecked(reason: str) -> Finding:
            body = finding.finished_unix_ns, finding.error_code
            return Finding(finding.request_id, Verdict.UNCHECKED, *body, checked, reason)

        if not evidence.request or evidence.outputs is None:
            return unchecked("request and output are needed; the receipt alone has only their digests")
        if statement.leaves.get("template", self._template) != self._template:
            return unchecked("the prompt was rendered with another chat template than the service has")
        if not statement.body.model or not any(evidence.outputs):
            return unchecked("no token was computed")
        try:
            result, ours = await self._run_hashed(evidence, statement)
        except MidstreamError as error:
            return unchecked(f"the service cannot run the request: {error}")
        return await self._judge(evidence, statement, result, ours, unchecked)

    async def _judge(
        self,
        evidence: Evidence,
        statement: Statement,
        result: Result,
        ours: Statement,
        unchecked: Callable[[str], Finding],
    ) -> Finding:
        """Compare an answer with what the service computed, if it computes in the same way."""
        differing = differing_leaves(statement, ours)
        if differing and (place := place_of(statement, ours)) is not None:
            return await self._compare_part(evidence, statement, place, unchecked)
        if differing:
            return unchecked(f"the service computes it differently: {explain(differing, statement, ours)}")
        if any(sequence.HasField("kind_changed_at") for sequence in ours.body.sequences):
            return unchecked("the service changed the kind of its workers meanwhile; try again")
        return await self._compare(evidence, statement, result, unchecked)

    async def _completed(self, evidence: Evidence, statement: Statement) -> Evidence:
        """Return the evidence with what is missing from the service, if that has stored it."""
        if evidence.request and evidence.outputs is not None:
            return evidence
        try:
            known = await self._client.receipt(statement.body.request_id, include_request=True, include_outputs=True)
        except MidstreamError:
            return evidence
        return known if known.receipt.body == evidence.receipt.body else evidence

    async def _run_hashed(self, evidence: Evidence, statement: Statement) -> tuple[Result, Statement]:
        """Compute an answer again, and once more as long as only the complete identity of the weights is missing: a
        worker hashes them after its start. Raises UnavailableError if that takes too long.
        """
        while True:
            request = again(evidence.request, statement.body.sequences)
            result = await compute(self._client, request, evidence.outputs or [])
            ours = check_receipt(receipt_of(result), self._own_keys)
            if "weights" in ours.leaves or differing_leaves(statement, ours) != ["weights"]:
                return result, ours
            if self._num_waits >= _MAX_WAITS:
                raise UnavailableError("its weights are not hashed yet; try again later")
            self._num_waits += 1
            await asyncio.sleep(_WAIT_S)

    async def _compare(
        self, evidence: Evidence, statement: Statement, result: Result, unchecked: Callable[[str], Finding]
    ) -> Finding:
        body, outputs = statement.body, evidence.outputs or []
        head = body.request_id, Verdict.DIFFERS, body.finished_unix_ns, body.error_code
        base = *unchecked("").checked, "recomputation"
        for index, (tokens, sequence) in enumerate(zip(outputs, body.sequences, strict=True)):
            found = result.sequences[index].token_ids if index < len(result.sequences) else []
            end = sequence.kind_changed_at if sequence.HasField("kind_changed_at") else len(tokens)
            place = first_difference(tokens[:end], found)
            if place is None and end == len(tokens) and sequence.finish_reason in ENDED and len(found) > len(tokens):
                place = len(tokens)
            if place is not None:
                expected = tokens[place] if place < len(tokens) else None
                other = found[place] if place < len(found) else None
                margin = await self._margin(evidence.request, statement, tokens[:place], expected, other)
                return Finding(*head, base, "", index, place, expected, other, margin)
        reason = _ends_differ(statement, result) or self._log_probs_differ(statement, result)
        if reason:
            return Finding(*head, base, reason)
        if any(sequence.HasField("kind_changed_at") for sequence in body.sequences):
            return unchecked(_REST_IS_PROVED)
        return Finding(body.request_id, Verdict.PROVED, body.finished_unix_ns, body.error_code, base)

    async def _compare_part(
        self, evidence: Evidence, statement: Statement, place: int, unchecked: Callable[[str], Finding]
    ) -> Finding:
        """Compute the tokens of the later model `place` again, each sequence from the tokens before them."""
        body = statement.body
        request = again(evidence.request, statement.body.sequences)
        if request.sampling.beam_width > 1 or request.HasField("prompt_tuning"):
            return unchecked("the service has the weights of only a part of it, which cannot be computed alone")
        for index, (tokens, sequence) in enumerate(zip(evidence.outputs or [], body.sequences, strict=True)):
            ends = [*sequence.kind_ends[place + 1 :], len(tokens)]
            start, end = sequence.kind_ends[place], ends[0]
            if start >= end:
                continue
            request = again(evidence.request, statement.body.sequences)
            request.token_ids.values.extend(tokens[:start])
            request.sampling.num_return_sequences = 1
            request.continuation.num_output_tokens, request.continuation.sequence_index = start, index
            request.max_tokens = end - start
            try:
                result = await self._client.stream(request).result()
            except MidstreamError as error:
                return unchecked(f"the service cannot compute a part of it: {error}")
            found = result.sequences[0].token_ids
            different = first_difference(tokens[start:end], found)
            if different is not None:
                head = body.request_id, Verdict.DIFFERS, body.finished_unix_ns, body.error_code
                checked = *unchecked("").checked, "recomputation"
                other = found[different] if different < len(found) else None
                return Finding(*head, checked, "", index, start + different, tokens[start + different], other)
        finding = unchecked(_REST_IS_PROVED)
        return replace(finding, checked=(*finding.checked, "recomputation"))

    def _log_probs_differ(self, statement: Statement, result: Result) -> str:
        nonce = statement.receipt.nonce
        for index, sequence in enumerate(statement.body.sequences):
            extras = result.sequences[index].extras
            if sequence.log_probs_digest:
                rows = extras.log_probs if extras is not None else None
                rows = (rows or _NO_ROWS).first(sequence.num_tokens)
                if log_probs_digest(nonce, index, rows) != sequence.log_probs_digest:
                    return f"the log probabilities of sequence {index} differ"
        if statement.body.prompt_log_probs_digest:
            extras = result.sequences[0].extras
            rows = (extras.prompt_log_probs if extras is not None else None) or _NO_ROWS
            if log_probs_digest(nonce, PROMPT, rows) != statement.body.prompt_log_probs_digest:
                return "the log probabilities of the prompt differ"
        return ""

    async def _margin(
        self, contents: bytes, statement: Statement, before: list[int], expected: int | None, found: int | None
    ) -> float | None:
        """Return by how much `found` is more likely than `expected` after these tokens."""
        if expected is None or found is None:
            return None
        request = again(contents, statement.body.sequences)
        if request.sampling.beam_width > 1 or request.HasField("prompt_tuning"):
            return None
        request.token_ids.values.extend(before)
        request.max_tokens = 1
        request.sampling.num_return_sequences = 1
        request.ClearField("stopping")
        request.ClearField("guided_decoding")
        request.output.log_probs = _NUM_TOP
        try:
            result = await self._client.stream(request).result()
        except MidstreamError:
            return None
        extras = result.sequences[0].extras
        rows = extras.log_probs if extras is not None else None
        likely = dict(zip(rows.top_token_ids, rows.top_log_probs, strict=True)) if rows is not None else {}
        return likely[found] - likely[expected] if found in likely and expected in likely else None


_REST_IS_PROVED = "other weights, or workers of another kind, computed a part of it; the rest is proved"
_NO_ROWS = LogProbs((), 0, (), (), ())


def again(contents: bytes, sequences: Sequence[receipts_pb2.ReceiptSequence]) -> pb.GenerateRequest:
    """Return the request that computes an answer again, from the canonical request and the receipt's sequences."""
    request = pb.GenerateRequest.FromString(contents)
    request.ClearField("client_id")
    request.ClearField("detached")
    request.ClearField("keep_s")
    request.ClearField("kv_retention")
    request.ClearField("model")
    request.ClearField("speculative")
    request.request_id = f"audit-{uuid.uuid4().hex}"
    # Cached blocks of the first run must not be used, since they may be what is wrong.
    request.cache_salt = request.request_id
    request.priority = _LOWEST_PRIORITY
    request.streaming = False
    request.output.return_receipt = True
    request.output.exclude_input_from_output = True
    request.output.return_all_generated_tokens = False
    request.output.return_perf_metrics = False
    reasons = {sequence.finish_reason for sequence in sequences}
    if not reasons <= set(ENDED):
        request.max_tokens = max(sequence.num_tokens for sequence in sequences)
    return request


async def compute(client: AsyncClient, request: pb.GenerateRequest, outputs: list[list[int]]) -> Result:
    """Run a request, and let the workers verify these outputs if they can, instead of generating one token after the
    other. The result is the same.
    """
    if _can_expect(request):
        _expect(request, outputs)
        try:
            return await client.stream(request).result()
        except UnsupportedError:
            request.ClearField("speculative")
            request.request_id = f"audit-{uuid.uuid4().hex}"
    return await client.stream(request).result()


def _expect(request: pb.GenerateRequest, outputs: list[list[int]]) -> None:
    speculative = request.speculative
    speculative.method = pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP
    speculative.num_draft_tokens = _NUM_DRAFTS
    for tokens in outputs:
        speculative.prediction_token_ids.extend(tokens)


def _ends_differ(statement: Statement, result: Result) -> str:
    sequences = statement.body.sequences
    if any(sequence.finish_reason not in ENDED for sequence in sequences):
        return ""  # the request was not run to its end again
    for index, (sequence, found) in enumerate(zip(sequences, result.sequences, strict=True)):
        expected = finish_reason_from_proto(sequence.finish_reason)
        if found.finish_reason is not expected:
            return f"sequence {index} ends with {found.finish_reason} instead of {expected}"
    return ""


def _can_expect(request: pb.GenerateRequest) -> bool:
    output = request.output
    return not (
        request.sampling.beam_width > 1
        or request.HasField("guided_decoding")
        or request.logits_post_processor_name
        or output.return_generation_logits
        or output.additional_outputs
    )


def first_difference(expected: list[int], found: list[int]) -> int | None:
    for place, token in enumerate(expected):
        if place >= len(found) or found[place] != token:
            return place
    return None


def differing_leaves(expected: Statement, found: Statement) -> list[str]:
    """Return the names of the leaves in which what computed a request again differs from the receipt.

    The template is none of them, since the prompt was not rendered again, and the weights' complete identity may have
    become known only since.
    """
    ours, theirs = found.leaves, expected.leaves
    names = [name for name, digest in theirs.items() if name != "template" and ours.get(name) != digest]
    return [*names, *(name for name in ours if name not in theirs and name != "weights")]


def place_of(expected: Statement, found: Statement) -> int | None:
    """Return which of the later models of a receipt computed a request again; None if it was none of them."""
    for place, model in enumerate(expected.later_models):
        if not differing_leaves(replace(expected, model=model), found):
            return place
    return None


def explain(differing: list[str], expected: Statement, found: Statement) -> str:
    """Return what differs, in words."""
    if "arithmetic" in differing:
        return f"arithmetic {found.model.arithmetic!r} instead of {expected.model.arithmetic!r}"
    return f"its {', '.join(differing)} differs"


def receipt_of(result: Result) -> receipts_pb2.Receipt:
    """Return the receipt of a recomputed answer. Raises ReceiptError if the service gave none."""
    if result.receipt is None:
        raise ReceiptError("the service gave no receipt for the recomputed answer")
    return result.receipt
