"""Converts between row outputs and protobuf messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from gpu_worker.batch.step import NOTHING, OutputParams, PromptLogProbs, RowLogProbs, RowTensor
from protos import generation_pb2, worker_pb2

# Maximum size of a piece of a tensor (at least one row), and maximum number of pieces per message.
_PIECE_BYTES, _MESSAGE_BYTES = 1 << 20, 8 << 20


def output_params(config: generation_pb2.OutputConfig) -> OutputParams:
    """Convert a request's output config."""
    additional = [
        (*item.name.partition(".")[::2], item.gather_context)
        for item in config.additional_outputs
        if not item.HasField("probe_width")
    ]
    params = OutputParams(
        prompt_log_probs=config.prompt_log_probs if config.HasField("prompt_log_probs") else None,
        context_logits=config.return_context_logits,
        generation_logits=config.return_generation_logits,
        hidden_states=_named(additional, "hidden_states"),
        topk_logits=_named(additional, "topk_logits"),
        sampling=tuple(int(number) for name, number, _ in additional if name == "sampling"),
        token_logits=tuple(
            (tuple(map(int, ids.split("."))), gathers) for name, ids, gathers in additional if name == "token_logits"
        ),
        probes=tuple(
            (item.name, item.gather_context) for item in config.additional_outputs if item.HasField("probe_width")
        ),
    )
    return NOTHING if params == NOTHING else params


def _named(additional: list[tuple[str, str, bool]], kind: str) -> tuple[tuple[int, bool], ...]:
    found = {int(number): gathers for name, number, gathers in additional if name == kind}
    return tuple(found.items())


def row_outputs(item: RowLogProbs) -> worker_pb2.RowOutputs:
    """Convert the log probabilities of a new token."""
    log_probs = generation_pb2.LogProbs(
        token_log_probs=[item.token_log_prob],
        top_k=len(item.top_token_ids),
        top_token_ids=item.top_token_ids,
        top_log_probs=item.top_log_probs,
        token_ranks=[item.token_rank],
    )
    return worker_pb2.RowOutputs(row=item.row, log_probs=log_probs)


def prompt_outputs(item: PromptLogProbs) -> worker_pb2.RowOutputs:
    """Convert the log probabilities of prompt tokens."""
    log_probs = generation_pb2.LogProbs(
        token_log_probs=item.token_log_probs,
        top_k=item.top_k,
        top_token_ids=item.top_token_ids,
        top_log_probs=item.top_log_probs,
        token_ranks=item.token_ranks,
    )
    return worker_pb2.RowOutputs(row=item.row, prompt_log_probs=log_probs)


def encode_tensors(tensors: Iterable[RowTensor]) -> Iterator[list[worker_pb2.RowOutputs]]:
    """Yield tensors in pieces, grouped by message."""
    batch: list[worker_pb2.RowOutputs] = []
    num_bytes = 0
    for tensor in tensors:
        for piece in _pieces(tensor):
            batch.append(worker_pb2.RowOutputs(row=tensor.row, tensors=[piece]))
            num_bytes += len(piece.data)
            if num_bytes >= _MESSAGE_BYTES:
                yield batch
                batch, num_bytes = [], 0
    if batch:
        yield batch


def _pieces(tensor: RowTensor) -> Iterator[generation_pb2.Tensor]:
    values = tensor.values
    row_bytes = values.nbytes // len(values)
    is_int = values.dtype == np.int32
    num_rows = max(_PIECE_BYTES // row_bytes, 1)
    for start in range(0, len(values), num_rows):
        part = values[start : start + num_rows]
        yield generation_pb2.Tensor(
            name=tensor.name,
            dtype=generation_pb2.Tensor.DTYPE_INT32 if is_int else generation_pb2.Tensor.DTYPE_FLOAT32,
            shape=part.shape,
            data=part.tobytes(),
            data_offset=(tensor.first_row + start) * row_bytes,
            is_last=tensor.is_last and start + num_rows >= len(values),
        )
