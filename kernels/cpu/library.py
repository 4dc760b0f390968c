"""Loads the compiled kernels with ctypes: structures and function signatures."""

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import ClassVar


class LinearStruct(ctypes.Structure):
    """MidstreamLinear in csrc/api.h."""

    _fields_: ClassVar = [
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("input_order", c_void_p),
        ("next", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("format", c_int32),
        ("input", c_int32),
    ]


class MixtureStruct(ctypes.Structure):
    """MidstreamMixture in csrc/api.h."""

    _fields_: ClassVar = [
        ("router", LinearStruct),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        *((name, LinearStruct) for name in ("shared_gate_up", "shared_down", "shared_gate")),
        ("correction", c_void_p),
        *((name, c_int32) for name in ("num_experts", "num_active", "expert_size", "shared_size", "scoring")),
        *((name, c_int32) for name in ("num_groups", "num_active_groups", "is_normalized", "weighs_input")),
        ("scale", c_float),
    ]


class LayerStruct(ctypes.Structure):
    """MidstreamLayer in csrc/api.h."""

    _fields_: ClassVar = [
        *((name, LinearStruct) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "ffn_norm", "attention_output_norm", "ffn_output_norm")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "sinks", "mixture", "k_cache", "v_cache")),
        *((name, c_int32) for name in ("window", "chunk", "table", "rounding")),
        ("key_scale", c_float),
        ("value_scale", c_float),
    ]


class DimsStruct(ctypes.Structure):
    """MidstreamDims in csrc/api.h."""

    _fields_: ClassVar = [
        *((name, c_int32) for name in ("hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "num_layers")),
        *((name, c_int32) for name in ("num_blocks", "block_size", "num_positions", "cache_format")),
        ("eps", c_float),
        ("scale", c_float),
        *((name, c_int32) for name in ("rotary_dim", "is_interleaved", "has_layer_norm", "norms_qk_rows")),
        *((name, c_int32) for name in ("has_unit_qk_norm", "is_parallel", "activation")),
        *((name, c_float) for name in ("softcap", "residual_scale", "embedding_scale", "logits_scale")),
        ("logits_softcap", c_float),
        ("query_scales", c_void_p),
    ]


class LoraPairStruct(ctypes.Structure):
    """MidstreamLoraPair in csrc/api.h."""

    _fields_: ClassVar = [("a", c_void_p), ("b", c_void_p), ("rank", c_int32)]


class LoraLayerStruct(ctypes.Structure):
    """MidstreamLoraLayer in csrc/api.h."""

    _fields_: ClassVar = [(name, LoraPairStruct) for name in ("q", "k", "v", "o", "gate", "up", "down")]


class EmbeddingStruct(ctypes.Structure):
    """MidstreamEmbedding in csrc/api.h."""

    _fields_: ClassVar = [("rows", c_void_p), ("row_bytes", c_int64), ("num_rows", c_int32), ("format", c_int32)]


class BatchStruct(ctypes.Structure):
    """MidstreamBatch in csrc/api.h."""

    _fields_: ClassVar = [
        *((name, c_int32) for name in ("num_tokens", "num_sequences", "max_blocks")),
        *((name, c_void_p) for name in ("positions", "slot_mapping", "query_starts", "context_lens", "block_tables")),
        ("adapters", c_void_p),
        ("max_threads", c_int32),
    ]


class Library:
    """A loaded build of the kernels; `isa` is one of the instruction sets in kernels.build."""

    def __init__(self, path: Path, isa: str) -> None:
        """Load the library; raise OSError if that fails."""
        self.isa = isa
        self._dll = ctypes.CDLL(str(path))
        bind = self._bind
        self.panel = bind("midstream_panel", c_int32)
        self.packed_bytes = bind("midstream_packed_bytes", c_int64, c_int, c_int, c_int)
        self.has_integer_products = bind("midstream_has_integer_products", ctypes.c_bool, c_int, c_int)
        self.row_bytes = bind("midstream_row_bytes", c_int64, c_int, c_int)
        self.pack = bind("midstream_pack", None, c_int, ctypes.c_bool, c_void_p, c_int, c_int, c_void_p, c_void_p)
        self.pool_create = bind("midstream_pool_create", c_void_p, c_int)
        self.pool_use_tiles = bind("midstream_pool_use_tiles", ctypes.c_bool, c_void_p)
        self.pool_destroy = bind("midstream_pool_destroy", None, c_void_p)
        self.linear = bind("midstream_linear", None, c_void_p, POINTER(LinearStruct), c_int, c_void_p, c_void_p)
        self.draw = bind("midstream_draw", None, c_void_p, c_int, c_void_p, c_int, *(c_void_p,) * 4)
        self.decoder_create = bind(
            "midstream_decoder_create",
            c_void_p,
            c_void_p,
            POINTER(DimsStruct),
            POINTER(LayerStruct),
            c_void_p,
            c_void_p,
        )
        self.decoder_destroy = bind("midstream_decoder_destroy", None, c_void_p)
        self.decoder_forward = bind(
            "midstream_decoder_forward", c_char_p, c_void_p, POINTER(BatchStruct), c_void_p, c_int, c_int
        )
        self.decoder_choose = bind(
            "midstream_decoder_choose",
            c_char_p,
            c_void_p,
            POINTER(BatchStruct),
            POINTER(EmbeddingStruct),
            c_void_p,
            POINTER(LinearStruct),
            c_void_p,
            c_int32,
            *(c_void_p,) * 4,
        )
        self.decoder_logits = bind(
            "midstream_decoder_logits", None, c_void_p, POINTER(LinearStruct), c_void_p, c_int, c_void_p, c_void_p
        )

    def _bind(self, name: str, result: type | None, *arguments: type) -> "ctypes._NamedFuncPointer":
        function = getattr(self._dll, name)
        function.restype = result
        function.argtypes = arguments
        return function  # type: ignore[no-any-return]
