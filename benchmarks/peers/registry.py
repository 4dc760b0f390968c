"""All that is measured, in the order in which the processes take turns. Ours come first."""

from __future__ import annotations

from .llamacpp import LlamaCpp
from .midstream_engine import MidstreamEngine
from .midstream_service import MidstreamService
from .openvino import OpenVino
from .peer import Peer
from .reference import Transformers
from .vllm_engine import VllmEngine
from .vllm_server import VllmServer

# A workload of this name is run and not counted.
WARM_UP = "warm-up"

_ALL: tuple[Peer, ...] = (
    MidstreamService("midstream", weights="auto"),
    MidstreamService("midstream-bf16", weights="bf16"),
    MidstreamEngine(),
    LlamaCpp(),
    OpenVino("fp16"),
    OpenVino("int8"),
    OpenVino("int4"),
    VllmEngine("bfloat16"),
    VllmServer("bfloat16"),
    Transformers("bfloat16"),
)
PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}
