"""All that is measured, in the order in which the processes take turns. Ours come first."""

from __future__ import annotations

from .llamacpp import LlamaCpp
from .machine import cpu_flags
from .midstream_engine import MidstreamEngine
from .midstream_service import MidstreamService
from .openvino import OpenVino
from .peer import Peer
from .reference import Transformers
from .vllm_engine import VllmEngine
from .vllm_server import VllmServer

# A workload of this name is run and not counted.
WARM_UP = "warm-up"

# Where the processor multiplies no bf16 by itself, vLLM may be faster without: both are tried, and the better counts.
_VLLM_DTYPES = ("bfloat16",) if "avx512_bf16" in cpu_flags() else ("bfloat16", "float32")

_ALL: tuple[Peer, ...] = (
    MidstreamService("midstream", weights="auto"),
    MidstreamService("midstream-bf16", weights="bf16"),
    MidstreamEngine(),
    LlamaCpp(),
    OpenVino("fp16"),
    OpenVino("int8"),
    OpenVino("int4"),
    *(VllmEngine(dtype) for dtype in _VLLM_DTYPES),
    *(VllmServer(dtype) for dtype in _VLLM_DTYPES),
    Transformers("bfloat16"),
)
PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}
