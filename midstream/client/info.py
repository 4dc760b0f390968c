"""Information about the service as plain types. The fields are documented in protos/loads.proto."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from protos import loads_pb2 as pb

T = TypeVar("T")


def _convert(kind: type[T], message: Message, **converted: Any) -> T:
    """Build a dataclass from a message with the same fields; `converted` has the values of fields of other types."""
    values = {item.name: getattr(message, item.name) for item in fields(kind)}  # type: ignore[arg-type]
    return kind(**{**values, **converted})


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Information about the served model."""

    model: str
    architecture: str
    vocab_size: int
    max_sequence_length: int
    end_ids: tuple[int, ...]
    pad_id: int | None
    fingerprint: str
    has_chat_template: bool
    features: frozenset[str]
    hidden_size: int
    num_layers: int
    template_fingerprint: str = ""

    @staticmethod
    def from_proto(info: pb.ModelInfo) -> ModelInfo:
        """Build this from the protobuf message."""
        pad_id = info.pad_id if info.HasField("pad_id") else None
        return _convert(ModelInfo, info, end_ids=tuple(info.end_ids), pad_id=pad_id, features=frozenset(info.features))


@dataclass(frozen=True, slots=True)
class WorkerGroupInfo:
    """Information about a worker group."""

    group_id: str
    epoch: int
    num_blocks: int
    world_size: int
    device: str
    dtype: str
    num_active_sequences: int
    num_placed_requests: int
    num_steps: int
    held_off: str = ""
    block_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DetokenizerInfo:
    """Information about a detokenizer, as its scheduler sees it."""

    detokenizer_id: str
    num_attached: int
    num_attached_total: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Information about the running system."""

    version: str
    scheduler_epoch: int
    started_unix_ns: int
    worker_groups: tuple[WorkerGroupInfo, ...]
    detokenizers: tuple[DetokenizerInfo, ...]
    tokens_per_block: int
    capacity_policy: str
    batching_type: str
    journal: str
    router_id: str

    @staticmethod
    def from_proto(info: pb.ServerInfo) -> ServerInfo:
        """Build this from the protobuf message."""
        return _convert(
            ServerInfo,
            info,
            worker_groups=tuple(_convert(WorkerGroupInfo, group) for group in info.worker_groups),
            detokenizers=tuple(_convert(DetokenizerInfo, item) for item in info.detokenizers),
        )


@dataclass(frozen=True, slots=True)
class CellLoad:
    """The load of one cell."""

    cell: str
    scheduler_epoch: int
    num_running_requests: int
    num_queued_requests: int
    max_num_queued_requests: int
    num_blocks: int
    num_free_blocks: int
    num_queued_tokens: int

    @staticmethod
    def from_proto(load: pb.CellLoad) -> CellLoad:
        """Build this from the protobuf message."""
        return _convert(CellLoad, load)


@dataclass(frozen=True, slots=True)
class LoraInfo:
    """A loaded adapter; rank is 0 for prompt adapters, num_virtual_tokens for LoRA adapters."""

    name: str
    path: str
    rank: int
    num_virtual_tokens: int
    num_bytes: int

    @staticmethod
    def from_proto(info: pb.LoraInfo) -> LoraInfo:
        """Build this from the protobuf message."""
        return _convert(LoraInfo, info)
