"""Converts results to the batch manager's tensors."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from midstream.executor.inference_request import NamedTensor
from midstream.executor.request import Request
from midstream.executor.response import Result
from midstream.executor.tensors import AnyTensor, to_user
from midstream.extras import Tensor


class RequestLengths:
    """Current lengths of a request's sequences, in tokens."""

    def __init__(self, request: Request) -> None:
        self.num_prompt = len(request.input_token_ids)
        self.is_streaming = request.streaming
        pad = request.pad_id if request.pad_id is not None else request.end_id
        self.fill = pad if pad is not None and pad >= 0 else 0
        self.num_tokens = 0

    def note(self, result: Result) -> int:
        """Update the lengths from a result; return the length of its longest beam, including the prompt."""
        longest = max(len(ids) for ids in result.output_token_ids)
        self.num_tokens = self.num_tokens + longest if self.is_streaming else longest - self.num_prompt
        return self.num_prompt + self.num_tokens


def response_tensors(result: Result, lengths: RequestLengths) -> list[NamedTensor]:
    """Return the tensors of a response.

    - `output_ids` int32 [1, beams, longest]: prompt and output; for a streaming request only the new tokens. Shorter
      beams are padded with the pad or end id.
    - `sequence_length` int32 [1, 1]: length of the prompt and the longest beam so far.
    - `context_logits` float32 [1, prompt tokens, vocabulary], or [1, 1, 1] if not requested.
    - `generation_logits` float32 [1, beams, tokens, vocabulary], or [1, 1, 1, 1] if not requested.
    - `output_log_probs` float32 [1, beams, tokens] and `cum_log_probs` float32 [1, beams], if requested; shorter beams
      are padded with zeros.
    """
    sequence_length = lengths.note(result)
    logits = result.generation_logits
    if logits is not None and lengths.is_streaming:
        logits = logits.swapaxes(0, 1)
    tensors = [
        NamedTensor(_tensor("int32", result.output_token_ids, lengths.fill), "output_ids"),
        NamedTensor(to_user(Tensor("", "int32", (1, 1), struct.pack("<i", sequence_length))), "sequence_length"),
        NamedTensor(_batched(result.context_logits, 3), "context_logits"),
        NamedTensor(_batched(logits, 4), "generation_logits"),
    ]
    if result.log_probs is not None:
        tensors.append(NamedTensor(_tensor("float32", result.log_probs, 0.0), "output_log_probs"))
    if result.cum_log_probs is not None:
        data = struct.pack(f"<{len(result.cum_log_probs)}f", *result.cum_log_probs)
        tensors.append(
            NamedTensor(to_user(Tensor("", "float32", (1, len(result.cum_log_probs)), data)), "cum_log_probs")
        )
    return tensors


def _tensor(dtype: str, rows: Sequence[Sequence[float]], fill: float) -> AnyTensor:
    longest = max(len(row) for row in rows)
    values = [value for row in rows for value in (*row, *[fill] * (longest - len(row)))]
    data = struct.pack(f"<{len(values)}{'i' if dtype == 'int32' else 'f'}", *values)
    return to_user(Tensor("", dtype, (1, len(rows), longest), data))


def _batched(tensor: AnyTensor | None, num_axes: int) -> AnyTensor:
    return to_user(Tensor("", "float32", (1,) * num_axes, bytes(4))) if tensor is None else tensor[None]
