"""The state in which a recorded sequence's next token was chosen.

It is computed again: the request is run once more with the recorded tokens before that token given as output
(GenerateRequest.continuation), and reports how its one token is chosen (`sampling.K`). The cost is that of a prompt of
as many tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from midstream.client import AsyncClient
from midstream.errors import InvalidArgumentError, NotFoundError, ReceiptError, UnsupportedError
from midstream.extras import SAMPLING_DRAW_WIDTH, Tensor
from midstream.receipts.audit import Verdict, again, check_offline, differing_leaves, explain, receipt_of
from midstream.receipts.evidence import Evidence
from midstream.receipts.jwk import ReceiptKey
from midstream.receipts.verify import Statement, check_receipt
from midstream.record import record
from protos import generation_pb2 as pb

MAX_TOP = 1024


@record
class Candidate:
    """A token that could have been chosen.

    Attributes:
        logit: The model's. steered: After bias, penalties and bans. masked: After the grammar.
        probability: With which it is drawn.
    """

    token: int
    logit: float
    steered: float
    masked: float
    probability: float


@record
class TokenState:
    """How a token was chosen.

    Attributes:
        position: The token's position in the sequence; its index is counted from the first output token.
        recorded: The recorded token; None after the last one.
        chosen: The computed one. top: The tokens with the highest logits.
        random_number: In [0, 1); None if the choice was greedy.
        begin, end: The chosen token's part of the cumulative distribution.
        least: The smallest probability that top_k, top_p and min_p leave.
        num_allowed: Number of tokens that the grammar allows; all without a grammar.
        num_drawable: Number of tokens that can be drawn.
        difference: Why the service does not compute it as the receipt says; empty if it does.
    """

    request_id: str
    sequence: int
    index: int
    position: int
    recorded: int | None
    chosen: Candidate
    top: tuple[Candidate, ...]
    temperature: float
    top_p: float
    least: float
    random_number: float | None
    begin: float
    end: float
    num_allowed: int
    num_drawable: int
    difference: str = ""

    @property
    def is_as_recorded(self) -> bool:
        """Whether the computed token is the recorded one; always after the last token."""
        return self.recorded is None or self.chosen.token == self.recorded


class Debugger:
    """Computes states with a service."""

    def __init__(self, client: AsyncClient, keys: Mapping[str, ReceiptKey] | None = None) -> None:
        """Use the service of `client`; `keys` are the trusted keys of the receipts, by default the service's own."""
        self._client, self._keys = client, keys

    async def find(self, request_id: str) -> Evidence:
        """Return what the service knows of a request. Raises NotFoundError if it has no receipt."""
        return await self._client.receipt(request_id, include_request=True, include_outputs=True)

    async def state(self, evidence: Evidence, index: int, *, sequence: int = 0, num_top: int = 10) -> TokenState:
        """Return the state at a token.

        Args:
            evidence: The receipt, with request and output.
            index: The token's index in the output; their number means what came after the last one.
            num_top: Number of tokens with the highest logits to report.

        Raises:
            ReceiptError: The receipt is not genuine, or is for something else.
            NotFoundError: Request or output is missing.
            InvalidArgumentError: There is no such sequence or token.
            UnsupportedError: It is a beam search, whose tokens depend on several sequences.
        """
        own = {key.key_id: key for key in await self._client.receipt_keys()}
        finding, statement = check_offline(evidence, own if self._keys is None else self._keys)
        if statement is None:
            assert finding.verdict is Verdict.INVALID
            raise ReceiptError(finding.reason)
        if not evidence.request or evidence.outputs is None:
            raise NotFoundError(
                "request and output are unknown: the service stores them only with `--receipts payload`; otherwise "
                "give a file with them (--evidence)",
                field="request_id",
            )
        if not 0 <= sequence < len(evidence.outputs):
            raise InvalidArgumentError(f"is {sequence}; there are {len(evidence.outputs)}", field="sequence")
        tokens = evidence.outputs[sequence]
        if not 0 <= index <= len(tokens):
            raise InvalidArgumentError(f"is {index}; the sequence has {len(tokens)} tokens", field="at_token")
        request = continued(evidence.request, statement, tokens[:index], sequence, num_top)
        result = await self._client.stream(request).result()
        found = result.sequences[0]
        ours = check_receipt(receipt_of(result), own)
        differing = differing_leaves(statement, ours)
        if found.extras is None or not found.tensors:
            raise InvalidArgumentError("no token was chosen there", field="at_token")
        return _state(
            statement.body.request_id,
            (sequence, index, len(request.token_ids.values)),
            tokens[index] if index < len(tokens) else None,
            {name: found.tensors[f"sampling.{num_top}{name}"] for name in ("", ".ids", ".draw")},
            explain(differing, statement, ours) if differing else "",
        )


def continued(
    contents: bytes, statement: Statement, before: list[int], sequence: int, num_top: int
) -> pb.GenerateRequest:
    """Return the request that computes the token after the output `before` of a sequence again.

    Args:
        contents: The canonical request.
    """
    request = again(contents, statement.body.sequences)
    if request.sampling.beam_width > 1:
        raise UnsupportedError("a beam search has no state at a single token", field="request_id")
    request.token_ids.values.extend(before)
    request.continuation.num_output_tokens += len(before)
    request.continuation.sequence_index += sequence
    request.sampling.num_return_sequences = 1
    request.max_tokens = 1
    # A token that ends the sequence is reported like any other one.
    request.stopping.include_stop_in_output = True
    for name in ("log_probs", "prompt_log_probs", "return_context_logits", "return_generation_logits"):
        request.output.ClearField(name)
    request.output.ClearField("additional_outputs")
    request.output.additional_outputs.add(name=f"sampling.{num_top}")
    return request


def _state(
    request_id: str,
    place: tuple[int, int, int],
    recorded: int | None,
    tensors: Mapping[str, Tensor],
    difference: str,
) -> TokenState:
    ids = struct.unpack(f"<{tensors['.ids'].shape[1]}i", tensors[".ids"].data)
    about = tensors[""].data
    number, begin, end, temperature, top_p, least, num_allowed, num_drawable = struct.unpack(
        "<3d3f2i", tensors[".draw"].data[: 4 * SAMPLING_DRAW_WIDTH]
    )
    candidates = [Candidate(token, *struct.unpack_from("<4f", about, 16 * i)) for i, token in enumerate(ids)]
    return TokenState(
        request_id=request_id,
        sequence=place[0],
        index=place[1],
        position=place[2],
        recorded=recorded,
        chosen=candidates[0],
        top=tuple(candidates[1:]),
        temperature=temperature,
        top_p=top_p,
        least=least,
        random_number=None if number != number else number,
        begin=begin,
        end=end,
        num_allowed=num_allowed,
        num_drawable=num_drawable,
        difference=difference,
    )
