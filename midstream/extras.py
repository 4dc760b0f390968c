"""Outputs in addition to tokens and text: log probabilities and tensors.

A tensor is sent in pieces. Each piece carries its byte offset in the whole tensor. Pieces may be repeated after the
loss of a process; readers drop those that they already have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from midstream.record import record
from protos import generation_pb2 as pb
from protos import scheduler_pb2


@record
class LogProbs:
    """Log probabilities of consecutive tokens: row i belongs to token i and has the `top_k` most likely entries."""

    token_log_probs: tuple[float, ...]
    top_k: int
    top_token_ids: tuple[int, ...]
    top_log_probs: tuple[float, ...]
    token_ranks: tuple[int, ...]

    @staticmethod
    def from_proto(message: pb.LogProbs) -> LogProbs:
        """Build this from the protobuf message."""
        return LogProbs(
            tuple(message.token_log_probs),
            message.top_k,
            tuple(message.top_token_ids),
            tuple(message.top_log_probs),
            tuple(message.token_ranks),
        )

    def to_proto(self) -> pb.LogProbs:
        """Return the message."""
        return pb.LogProbs(
            token_log_probs=self.token_log_probs,
            top_k=self.top_k,
            top_token_ids=self.top_token_ids,
            top_log_probs=self.top_log_probs,
            token_ranks=self.token_ranks,
        )

    def without(self, num_rows: int) -> LogProbs:
        """Return these log probabilities without the first rows."""
        first = num_rows * self.top_k
        return LogProbs(
            self.token_log_probs[num_rows:],
            self.top_k,
            self.top_token_ids[first:],
            self.top_log_probs[first:],
            self.token_ranks[num_rows:],
        )

    def first(self, num_rows: int) -> LogProbs:
        """Return only the first rows."""
        last = num_rows * self.top_k
        return LogProbs(
            self.token_log_probs[:num_rows],
            self.top_k,
            self.top_token_ids[:last],
            self.top_log_probs[:last],
            self.token_ranks[:num_rows],
        )

    def __add__(self, other: LogProbs) -> LogProbs:
        return LogProbs(
            self.token_log_probs + other.token_log_probs,
            max(self.top_k, other.top_k),
            self.top_token_ids + other.top_token_ids,
            self.top_log_probs + other.top_log_probs,
            self.token_ranks + other.token_ranks,
        )


# Prefix of the names of tensors with a row for each prompt token; other tensors have a row for each output token.
CONTEXT = "context_"


@record
class Tensor:
    """A piece of a dense, row-major, little-endian tensor: some of its rows.

    Attributes:
        dtype: A name such as `float32`.
        shape: Shape of this piece; pieces are consecutive along the first axis.
        data_offset: Byte offset of `data` in the whole tensor.
        is_last: Whether this is the last piece; never set for tensors that grow with each token.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    data_offset: int = 0
    is_last: bool = True

    @staticmethod
    def from_proto(message: pb.Tensor) -> Tensor:
        """Build this from the protobuf message."""
        dtype = pb.Tensor.Dtype.Name(message.dtype).removeprefix("DTYPE_").lower()
        shape = tuple(message.shape)
        return Tensor(message.name, dtype, shape, message.data, message.data_offset, message.is_last)

    def before(self, num_rows: int) -> Tensor | None:
        """Return the part of this piece within the first `num_rows` rows of the tensor; None if there is none."""
        row_bytes = len(self.data) // self.shape[0]
        count = num_rows - self.data_offset // row_bytes
        if count >= self.shape[0]:
            return self
        if count <= 0:
            return None
        return replace(self, shape=(count, *self.shape[1:]), data=self.data[: count * row_bytes])

    def to_proto(self) -> pb.Tensor:
        """Return the message."""
        return pb.Tensor(
            name=self.name,
            dtype=pb.Tensor.Dtype.Value(f"DTYPE_{self.dtype.upper()}"),
            shape=self.shape,
            data=self.data,
            data_offset=self.data_offset,
            is_last=self.is_last,
        )


@record
class Extras:
    """Additional outputs of a chunk."""

    log_probs: LogProbs | None = None
    prompt_log_probs: LogProbs | None = None
    tensors: tuple[Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory without tensors, whose bytes are limited per request."""
        rows = [item for item in (self.log_probs, self.prompt_log_probs) if item is not None]
        return sum(64 + 16 * (len(item.token_log_probs) + len(item.top_log_probs)) for item in rows)

    @property
    def num_tensor_bytes(self) -> int:
        """Total bytes of the tensors."""
        return sum(len(tensor.data) for tensor in self.tensors)

    def cut(self, max_tensor_bytes: int) -> tuple[Extras, Extras | None]:
        """Split into extras with at most `max_tensor_bytes` of tensors, but at least one piece, and the rest."""
        num_bytes = 0
        for count, tensor in enumerate(self.tensors):
            num_bytes += len(tensor.data)
            if count and num_bytes > max_tensor_bytes:
                return replace(self, tensors=self.tensors[:count]), Extras(tensors=self.tensors[count:])
        return self, None

    def __add__(self, other: Extras) -> Extras:
        return Extras(
            _join(self.log_probs, other.log_probs),
            _join(self.prompt_log_probs, other.prompt_log_probs),
            self.tensors + other.tensors,
        )


def _join(first: LogProbs | None, second: LogProbs | None) -> LogProbs | None:
    return first + second if first and second else first or second


def extras_from_proto(message: pb.GenerateResponse | scheduler_pb2.FeedOutputs) -> Extras:
    """Build this from the protobuf message."""
    return Extras(
        LogProbs.from_proto(message.log_probs) if message.HasField("log_probs") else None,
        LogProbs.from_proto(message.prompt_log_probs) if message.HasField("prompt_log_probs") else None,
        tuple(Tensor.from_proto(tensor) for tensor in message.tensors),
    )


class TensorCursor:
    """Tracks a reader's progress in each tensor of one sequence."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}

    def new(self, extras: Extras) -> Extras | None:
        """Return the part that the reader does not have yet; None if the reader has everything."""
        if not extras.tensors:
            return extras
        kept = []
        for tensor in extras.tensors:
            if tensor.data_offset == self._ends.get(tensor.name, 0):
                self._ends[tensor.name] = tensor.data_offset + len(tensor.data)
                kept.append(tensor)
        extras = replace(extras, tensors=tuple(kept))
        return extras if extras != Extras() else None


def join_tensors(pieces: Iterable[Tensor]) -> dict[str, Tensor]:
    """Assemble complete tensors, by name, from consecutive pieces."""
    by_name: dict[str, list[Tensor]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    return {
        name: replace(
            parts[0],
            shape=(sum(part.shape[0] for part in parts), *parts[0].shape[1:]),
            data=b"".join(part.data for part in parts),
            is_last=parts[-1].is_last,
        )
        for name, parts in by_name.items()
    }


_VALUE_BYTES = 4
# Number of values of `sampling.K.draw` per token.
SAMPLING_DRAW_WIDTH = 11


def tensor_bytes(request: pb.GenerateRequest, num_prompt_tokens: int, vocab_size: int, hidden_size: int) -> int:
    """Return the maximum total size of all tensors that a request asks for, if each sequence has max_tokens tokens."""
    output = request.output
    num_output_tokens = request.max_tokens * max(request.sampling.num_return_sequences, request.sampling.beam_width, 1)
    num_values = output.return_context_logits * num_prompt_tokens * vocab_size
    num_values += output.return_generation_logits * num_output_tokens * vocab_size
    for item in output.additional_outputs:
        width = item.probe_width
        if not item.HasField("probe_width"):
            kind, _, number = item.name.partition(".")
            if kind == "token_logits":
                width = 1 + number.count(".")
            elif kind == "sampling":
                width = 5 * (1 + int(number)) + SAMPLING_DRAW_WIDTH
            else:
                width = hidden_size if kind == "hidden_states" else 2 * int(number)
        num_values += width * (num_output_tokens + item.gather_context * num_prompt_tokens)
    return _VALUE_BYTES * num_values
