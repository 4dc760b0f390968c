"""All that is measured, in the order in which the processes take turns in the first round."""

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
# One of each engine, and what ours is compared with by itself.
QUICK_PEERS = (
    *("midstream", "midstream-bf16", "midstream-engine", "llamacpp", "openvino-fp16", "openvino-int8"),
    *(VllmServer(dtype).name for dtype in _VLLM_DTYPES),
)
