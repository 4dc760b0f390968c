"""TensorRT-LLM's enumerations."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Self


class ModelType(StrEnum):
    """Model architecture; an Executor runs decoder-only models."""

    DECODER_ONLY = "decoder_only"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class BatchingType(StrEnum):
    """Batching type; see docs/scheduler.md."""

    STATIC = "static"
    INFLIGHT = "inflight_fused"


class TrtGptModelType(StrEnum):
    """The batch manager's batching types; see docs/scheduler.md."""

    V1 = "static"
    InflightBatching = "inflight"
    InflightFusedBatching = "inflight_fused"


class CapacitySchedulerPolicy(StrEnum):
    """Policy for which requests may hold KV blocks; see docs/scheduler.md."""

    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    STATIC_BATCH = "static_batch"


class ContextChunkingPolicy(StrEnum):
    """How long prompts are split when chunked context is enabled; the service has only FIRST_COME_FIRST_SERVED."""

    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


class CommunicationType(StrEnum):
    """How ranks communicate; without effect, since the service starts its ranks itself."""

    MPI = "mpi"


class CommunicationMode(StrEnum):
    """Which process the client is; without effect, since it is never a rank."""

    LEADER = "leader"
    ORCHESTRATOR = "orchestrator"


class KvCacheTransferMode(StrEnum):
    """Where offloaded KV blocks go; only DRAM is supported."""

    DRAM = "dram"
    GDS = "gds"
    POSIX_DEBUG_FALLBACK = "posix_debug_fallback"


class CacheTransceiverBackendType(StrEnum):
    """How KV blocks move between executors; without effect, since they do not."""

    DEFAULT = "default"
    MPI = "mpi"
    UCX = "ucx"
    NIXL = "nixl"

    @classmethod
    def from_string(cls, name: str) -> Self:
        """Return the type of this name, in upper or lower case.

        Raises:
            ValueError: There is none.
        """
        return cls(name.lower())


class RequestType(StrEnum):
    """Which phase of a request an executor runs: both, only its prompt and first token, or the rest."""

    REQUEST_TYPE_CONTEXT_AND_GENERATION = "context_and_generation"
    REQUEST_TYPE_CONTEXT_ONLY = "context_only"
    REQUEST_TYPE_GENERATION_ONLY = "generation_only"


class FinishReason(Enum):
    """Why a sequence ended."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class RequestStage(StrEnum):
    """Stage of a request in its statistics."""

    QUEUED = "QUEUED"
    ENCODER_IN_PROGRESS = "ENCODER_IN_PROGRESS"
    CONTEXT_IN_PROGRESS = "CONTEXT_IN_PROGRESS"
    GENERATION_IN_PROGRESS = "GENERATION_IN_PROGRESS"
    GENERATION_COMPLETE = "GENERATION_COMPLETE"


@dataclass(frozen=True, slots=True)
class DecodingMode:
    """How tokens are chosen. The service decides this for each request, so that modes of sampling and of beam search
    have no effect, Lookahead means prompt lookup, and the others are refused.
    """

    name: str

    @staticmethod
    def Auto() -> DecodingMode:  # noqa: N802 (TensorRT-LLM's name)
        """Return the mode."""
        return DecodingMode("Auto")

    @staticmethod
    def TopK() -> DecodingMode:  # noqa: N802 (TensorRT-LLM's name)
        """Return the mode."""
        return DecodingMode("TopK")

    @staticmethod
    def TopP() -> DecodingMode:  # noqa: N802 (TensorRT-LLM's name)
        """Return the mode."""
        return DecodingMode("TopP")

    @staticmethod
    def TopKTopP() -> DecodingMode:  # noqa: N802 (TensorRT-LLM's name)
        """Return the mode."""
        return DecodingMode("TopKTopP")

    @staticmethod
    def BeamSearch() -> DecodingMode:  # noqa: N802 (TensorRT-LLM's name)
        """Return the mode."""
        return DecodingMode("BeamSearch")

    @staticmethod
    def Medusa() -> DecodingMode:  # noqa: N802 (TensorRT-LLM's name)
        """Return the mode."""
        return DecodingMode("Medusa")

    @staticmethod
    def Lookahead() -> DecodingMode:  # noqa: N802 (TensorRT-LLM's name)
        """Return the mode."""
        return DecodingMode("Lookahead")

    @staticmethod
    def ExplicitDraftTokens() -> DecodingMode:  # noqa: N802 (TensorRT-LLM's name)
        """Return the mode."""
        return DecodingMode("ExplicitDraftTokens")

    @staticmethod
    def Eagle() -> DecodingMode:  # noqa: N802 (TensorRT-LLM's name)
        """Return the mode."""
        return DecodingMode("Eagle")

    def isAuto(self) -> bool:  # noqa: N802
        """Return whether the mode is Auto."""
        return self.name == "Auto"

    def isTopK(self) -> bool:  # noqa: N802
        """Return whether the mode samples from the most likely k tokens."""
        return self.name in ("TopK", "TopKTopP")

    def isTopP(self) -> bool:  # noqa: N802
        """Return whether the mode samples from the most likely tokens up to a probability."""
        return self.name in ("TopP", "TopKTopP")

    def isTopKorTopP(self) -> bool:  # noqa: N802
        """Return whether the mode samples."""
        return self.isTopK() or self.isTopP()

    def isTopKandTopP(self) -> bool:  # noqa: N802
        """Return whether the mode combines both limits."""
        return self.name == "TopKTopP"

    def isBeamSearch(self) -> bool:  # noqa: N802
        """Return whether the mode is BeamSearch."""
        return self.name == "BeamSearch"

    def isMedusa(self) -> bool:  # noqa: N802
        """Return whether the mode is Medusa."""
        return self.name == "Medusa"

    def isLookahead(self) -> bool:  # noqa: N802
        """Return whether the mode is Lookahead."""
        return self.name == "Lookahead"

    def isExplicitDraftTokens(self) -> bool:  # noqa: N802
        """Return whether the mode is ExplicitDraftTokens."""
        return self.name == "ExplicitDraftTokens"

    def isEagle(self) -> bool:  # noqa: N802
        """Return whether the mode is Eagle."""
        return self.name == "Eagle"

    def useVariableBeamWidthSearch(self) -> bool:  # noqa: N802
        """Return False: beam widths do not vary."""
        return False
