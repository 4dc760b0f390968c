"""Conversion of a request's output to the ensemble's tensors."""

from __future__ import annotations

from midstream.chunk import Chunk
from midstream.client.result import Result
from router.protocols.kserve.tensors import OutputTensor


def whole_outputs(results: list[Result]) -> list[OutputTensor]:
    """Return the output tensors of all sequences of all rows, in order."""
    numbered = [(row, index, item) for row, result in enumerate(results) for index, item in enumerate(result.sequences)]
    sequences = [item for _, _, item in numbered]
    tensors = [
        OutputTensor.of_texts("text_output", [item.text for item in sequences]),
        OutputTensor.of_ints("batch_index", [row for row, _, _ in numbered]),
        OutputTensor.of_ints("sequence_index", [index for _, index, _ in numbered]),
    ]
    if any(item.cumulative_log_prob is not None for item in sequences):
        sums = [item.cumulative_log_prob or 0.0 for item in sequences]
        tensors.append(OutputTensor.of_floats("cum_log_probs", [len(sums)], sums))
    rows = [
        item.extras.log_probs.token_log_probs if item.extras and item.extras.log_probs else () for item in sequences
    ]
    longest = max(map(len, rows))
    if longest:
        flat = [value for row in rows for value in (*row, *[0.0] * (longest - len(row)))]
        tensors.append(OutputTensor.of_floats("output_log_probs", [len(rows), longest], flat))
    for name in ("context_logits", "generation_logits"):
        parts = [item.tensors[name] for item in sequences if name in item.tensors]
        if len(parts) == 1:
            tensors.append(OutputTensor(name, "FP32", parts[0].shape, parts[0].data))
        elif parts:
            longest = max(part.shape[0] for part in parts)
            size = 4 * parts[0].shape[1]
            data = b"".join(part.data + bytes(size * (longest - part.shape[0])) for part in parts)
            tensors.append(OutputTensor(name, "FP32", (len(parts), longest, parts[0].shape[1]), data))
    return tensors


def piece_outputs(chunk: Chunk, batch_index: int) -> list[OutputTensor]:
    """Return the output tensors of one chunk."""
    tensors = [
        OutputTensor.of_texts("text_output", [chunk.text]),
        OutputTensor.of_ints("batch_index", [batch_index]),
        OutputTensor.of_ints("sequence_index", [chunk.sequence_index]),
    ]
    if chunk.cumulative_log_prob is not None:
        tensors.append(OutputTensor.of_floats("cum_log_probs", [1], [chunk.cumulative_log_prob]))
    if chunk.extras is not None:
        if chunk.extras.log_probs is not None:
            values = chunk.extras.log_probs.token_log_probs
            tensors.append(OutputTensor.of_floats("output_log_probs", [1, len(values)], values))
        tensors += [OutputTensor(item.name, "FP32", item.shape, item.data) for item in chunk.extras.tensors]
    return tensors
