"""Converts responses to the batch manager's tensors."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from midstream.executor.request import GenerationRequest
from midstream.executor.response import ResponseResult
from midstream.extras import Tensor


class RequestLengths:
    """Current lengths of a request's sequences, in tokens."""

    def __init__(self, request: GenerationRequest) -> None:
        params = request.sampling_params
        self.prompt = request.known_token_ids
        self.is_streaming = request.streaming
        self.fill = params.pad_id if params.pad_id is not None else params.end_id or 0
        self.includes_prompt = not params.exclude_input_from_output
        self.repeats = params.return_all_generated_tokens
        self._num_tokens: dict[int, int] = {}

    def note(self, result: ResponseResult) -> int:
        """Update the lengths from a response; return the length of its longest beam, including the prompt."""
        num_tokens = max(len(ids) for ids in result.output_token_ids)
        if not self.repeats:
            num_tokens += self._num_tokens.get(result.sequence_index, 0)
        self._num_tokens[result.sequence_index] = num_tokens
        return num_tokens + (0 if self.includes_prompt else len(self.prompt))


def response_tensors(result: ResponseResult, lengths: RequestLengths) -> list[Tensor]:
    """Return the tensors of a response, little endian.

    - `output_ids` int32 [1, beams, longest]: prompt and output; for a streaming request only the new tokens. A prompt
      given as text is not included. Shorter beams are padded with the pad or end id.
    - `sequence_length` int32 [1, 1]: length of the prompt and the longest beam so far.
    - `context_logits` float32 [1, prompt tokens, vocabulary], or [1, 1, 1] if not requested.
    - `generation_logits` float32 [1, beams, tokens, vocabulary], or [1, 1, 1, 1] if not requested.
    - `log_probs` float32 [1, beams, tokens] and `cum_log_probs` float32 [1, beams], if requested; shorter beams are
      padded with zeros.
    """
    sequence_length = lengths.note(result)
    rows = [list(ids) for ids in result.output_token_ids]
    if not lengths.is_streaming and not lengths.includes_prompt:
        rows = [[*lengths.prompt, *ids] for ids in rows]
    tensors = [
        _tensor("output_ids", "int32", rows, lengths.fill),
        Tensor("sequence_length", "int32", (1, 1), struct.pack("<i", sequence_length)),
        _batched("context_logits", result.context_logits, 3),
        _batched("generation_logits", result.generation_logits, 4),
    ]
    if result.log_probs:
        tensors.append(_tensor("log_probs", "float32", result.log_probs, 0.0))
    if result.cum_log_probs:
        data = struct.pack(f"<{len(result.cum_log_probs)}f", *result.cum_log_probs)
        tensors.append(Tensor("cum_log_probs", "float32", (1, len(result.cum_log_probs)), data))
    return tensors


def _tensor(name: str, dtype: str, rows: Sequence[Sequence[float]], fill: float) -> Tensor:
    longest = max(len(row) for row in rows)
    values = [value for row in rows for value in (*row, *[fill] * (longest - len(row)))]
    data = struct.pack(f"<{len(values)}{'i' if dtype == 'int32' else 'f'}", *values)
    return Tensor(name, dtype, (1, len(rows), longest), data)


def _batched(name: str, tensor: Tensor | None, num_axes: int) -> Tensor:
    if tensor is None:
        return Tensor(name, "float32", (1,) * num_axes, bytes(4))
    return Tensor(name, tensor.dtype, (1, *tensor.shape), tensor.data)
