"""Runs recorded requests on a candidate, such as other weights, another quantization or another build, and compares.

Two comparisons are made. The request is run again as it was, with its seed, and with the recorded answer as expected
output (see midstream/receipts/audit.py): where would the candidate have gone another way? And the recorded answer is
given as a prompt, for the log probability of each of its tokens: how far is the candidate from the reference?
"""

from __future__ import annotations

import uuid

from midstream.client import AsyncClient
from midstream.errors import InvalidArgumentError, MidstreamError, NotFoundError
from midstream.receipts.audit import ENDED, again, compute, first_difference
from midstream.receipts.evidence import Evidence
from midstream.record import record
from protos import generation_pb2 as pb
from protos import receipts_pb2


@record
class ShadowFinding:
    """The comparison of one request.

    Attributes:
        num_tokens: Number of recorded output tokens, of all sequences.
        sequence, token: Place of the first token that the candidate chose otherwise; None if there is none.
        expected: The recorded token there; None after the last one. found: The candidate's; None after its last one.
        log_probs: The candidate's log probability of each recorded token. Empty if it was not computed, because
            prompts and outputs were embeddings, or because of `reason`.
        reference: The same of the reference; empty without one.
        reason: Why the request could not be run; empty if it could.
    """

    request_id: str
    num_tokens: int = 0
    sequence: int | None = None
    token: int | None = None
    expected: int | None = None
    found: int | None = None
    log_probs: tuple[float, ...] = ()
    reference: tuple[float, ...] = ()
    reason: str = ""

    @property
    def distances(self) -> list[float]:
        """By how much the log probabilities of candidate and reference differ, for each token."""
        if not self.reference:
            return []
        return [abs(one - other) for one, other in zip(self.log_probs, self.reference, strict=True)]


class Shadow:
    """Compares a candidate with records, and with the log probabilities of a reference if there is one."""

    def __init__(self, candidate: AsyncClient, reference: AsyncClient | None = None) -> None:
        self._candidate, self._reference = candidate, reference

    async def compare(self, evidence: Evidence) -> ShadowFinding:
        """Run a request on the candidate. What keeps it from that is in the finding."""
        body = receipts_pb2.ReceiptBody.FromString(evidence.receipt.body)
        try:
            if not evidence.request or evidence.outputs is None:
                raise NotFoundError("request and output are unknown: a service stores them with `--receipts payload`")
            return await self._compare(evidence.request, body, evidence.outputs)
        except MidstreamError as error:
            return ShadowFinding(body.request_id, reason=str(error))

    async def _compare(
        self, contents: bytes, body: receipts_pb2.ReceiptBody, outputs: list[list[int]]
    ) -> ShadowFinding:
        result = await compute(self._candidate, _again(contents, body), outputs)
        ours = await _log_probs_of(self._candidate, contents, body, outputs)
        theirs: tuple[float, ...] = ()
        if self._reference is not None and ours:
            theirs = await _log_probs_of(self._reference, contents, body, outputs)
        head = body.request_id, sum(map(len, outputs))
        for index, (tokens, sequence) in enumerate(zip(outputs, body.sequences, strict=True)):
            found = result.sequences[index].token_ids if index < len(result.sequences) else []
            place = first_difference(tokens, found)
            if place is None and len(found) > len(tokens) and sequence.finish_reason in ENDED:
                place = len(tokens)
            if place is not None:
                expected = tokens[place] if place < len(tokens) else None
                other = found[place] if place < len(found) else None
                return ShadowFinding(*head, index, place, expected, other, ours, theirs)
        return ShadowFinding(*head, log_probs=ours, reference=theirs)


async def _log_probs_of(
    client: AsyncClient, contents: bytes, body: receipts_pb2.ReceiptBody, outputs: list[list[int]]
) -> tuple[float, ...]:
    """Return the log probability of each output token after those before it, without penalties or grammars; nothing if
    the prompt is not made of tokens.
    """
    request = _again(contents, body)
    if request.WhichOneof("input") != "token_ids" or request.HasField("prompt_tuning"):
        return ()
    found: list[float] = []
    prompt = request.token_ids.values[:]
    for tokens in outputs:
        if not tokens:
            continue
        scored = pb.GenerateRequest(
            request_id=f"shadow-{uuid.uuid4().hex}",
            token_ids=pb.TokenIds(values=[*prompt, *tokens]),
            max_tokens=0,
            priority=request.priority,
            output=pb.OutputConfig(prompt_log_probs=0, detokenize=False),
        )
        if request.HasField("lora"):
            scored.lora.CopyFrom(request.lora)
        extras = (await client.stream(scored).result()).sequences[0].extras
        rows = extras.prompt_log_probs if extras is not None else None
        if rows is None or len(rows.token_log_probs) < len(tokens):
            raise InvalidArgumentError("the service gave no log probabilities", field="prompt_log_probs")
        found += rows.token_log_probs[len(rows.token_log_probs) - len(tokens) :]
    return tuple(found)


def _again(contents: bytes, body: receipts_pb2.ReceiptBody) -> pb.GenerateRequest:
    request = again(contents, body.sequences)
    request.output.return_receipt = False
    return request
