"""All peers, in the order of the first round."""

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

# Without native bf16 arithmetic, vLLM may be faster in float32, so both are tried and the better one is used.
_VLLM_DTYPES = ("bfloat16",) if "avx512_bf16" in cpu_flags() else ("bfloat16", "float32")

_ALL: tuple[Peer, ...] = (
    MidstreamService("midstream"),
    MidstreamService("midstream-bf16", weights="bf16"),
    # OpenVINO's int8 rounds inputs to 8 bits, too.
    MidstreamService("midstream-int8", activations="int8"),
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
# At least one peer of each engine except transformers, and our worker alone.
QUICK_PEERS = (
    *("midstream", "midstream-bf16", "midstream-engine", "llamacpp", "openvino-fp16", "openvino-int8"),
    *(VllmServer(dtype).name for dtype in _VLLM_DTYPES),
)
