"""Information about the service as plain types. The fields are documented in protos/loads.proto."""

from __future__ import annotations

from dataclasses import dataclass

from protos import loads_pb2 as pb


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

    @staticmethod
    def from_proto(info: pb.ModelInfo) -> ModelInfo:
        """Build this from the protobuf message."""
        return ModelInfo(
            info.model,
            info.architecture,
            info.vocab_size,
            info.max_sequence_length,
            tuple(info.end_ids),
            info.pad_id if info.HasField("pad_id") else None,
            info.fingerprint,
            info.has_chat_template,
            frozenset(info.features),
            info.hidden_size,
            info.num_layers,
        )


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
        groups = (
            WorkerGroupInfo(
                group.group_id,
                group.epoch,
                group.num_blocks,
                group.world_size,
                group.device,
                group.dtype,
                group.num_active_sequences,
                group.num_placed_requests,
                group.num_steps,
            )
            for group in info.worker_groups
        )
        detokenizers = (
            DetokenizerInfo(item.detokenizer_id, item.num_attached, item.num_attached_total)
            for item in info.detokenizers
        )
        return ServerInfo(
            info.version,
            info.scheduler_epoch,
            info.started_unix_ns,
            tuple(groups),
            tuple(detokenizers),
            info.tokens_per_block,
            info.capacity_policy,
            info.batching_type,
            info.journal,
            info.router_id,
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
        return CellLoad(
            load.cell,
            load.scheduler_epoch,
            load.num_running_requests,
            load.num_queued_requests,
            load.max_num_queued_requests,
            load.num_blocks,
            load.num_free_blocks,
            load.num_queued_tokens,
        )


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
        return LoraInfo(info.name, info.path, info.rank, info.num_virtual_tokens, info.num_bytes)
