"""The Python client: `AsyncClient` and `Client` stream from any router, and fail over to another if it is lost."""

from __future__ import annotations

from midstream.chunk import Chunk, FinishReason, PerfMetrics, Usage
from midstream.client.async_client import AsyncClient
from midstream.client.features import Drafts, Guide, KvRetention, TokenRange
from midstream.client.info import CellLoad, DetokenizerInfo, ModelInfo, ServerInfo, WorkerGroupInfo
from midstream.client.request import SamplingParams
from midstream.client.result import Embeddings, Result, SequenceResult
from midstream.client.stream import AsyncStream
from midstream.client.sync_client import Client, Stream
from midstream.extras import LogProbs, Tensor
from midstream.security.tls import Tls

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "CellLoad",
    "Chunk",
    "Client",
    "DetokenizerInfo",
    "Drafts",
    "Embeddings",
    "FinishReason",
    "Guide",
    "KvRetention",
    "LogProbs",
    "ModelInfo",
    "PerfMetrics",
    "Result",
    "SamplingParams",
    "SequenceResult",
    "ServerInfo",
    "Stream",
    "Tensor",
    "Tls",
    "TokenRange",
    "Usage",
    "WorkerGroupInfo",
]
