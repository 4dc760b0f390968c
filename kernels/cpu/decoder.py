"""Runs all layers of a decoder in one call of the CPU kernels."""

import ctypes
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.activation import Activation
from kernels.cpu.dims import DecoderDims
from kernels.cpu.library import BatchStruct, DimsStruct, EmbeddingStruct, LayerStruct, LinearStruct, MixtureStruct
from kernels.cpu.linear import GGUF_BLOCK_BYTES, PackedLinear, WeightFormat
from kernels.cpu.lora import PackedLora, adapter_pointers
from kernels.cpu.sampling import Draws, pointer_to
from kernels.cpu.threads import StepThreads, ThreadPool
from kernels.kv_rounding import KvRounding

MAX_HEAD_DIM = 256
MAX_EXPERTS = 1024
Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid"]
# The numbers are those of csrc/api.h.
_SCORINGS: dict[Scoring, int] = {"softmax": 0, "softmax_of_chosen": 1, "sigmoid": 2}
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "clamped_swiglu": 4}
_CACHE_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int16: 2, torch.int8: 3}  # as in csrc/api.h


def stored_head_dim(head_dim: int, cache_dtype: torch.dtype) -> int:
    """Return the number of elements per head and token in a cache of this type; integer types add a float32 scale."""
    return head_dim + (0 if cache_dtype.is_floating_point else 4 // cache_dtype.itemsize)


@dataclass(frozen=True)
class PackedExpert:
    """The two matrices of a feed-forward network, as in DecoderLayer."""

    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True)
class PackedMixture:
    """A mixture of experts, which replaces gate_up and down.

    router [num_experts, hidden]; correction float32 [num_experts] is added to the scores only to choose the experts;
    shared_gate [1, hidden] scales the shared expert by a sigmoid. The other fields are as in the description of a
    model.
    """

    router: PackedLinear
    experts: Sequence[PackedExpert]
    num_active: int
    scoring: Scoring
    is_normalized: bool
    scale: float = 1.0
    num_groups: int = 1
    num_active_groups: int = 1
    weighs_input: bool = False
    correction: Tensor | None = None
    shared: PackedExpert | None = None
    shared_gate: PackedLinear | None = None


@dataclass(frozen=True)
class DecoderLayer:
    """The weights and the cache of one layer.

    qkv [(Hq + 2 Hk) D, hidden], o [hidden, Hq D], gate_up (gated) [2 ffn, hidden], down [hidden, ffn], or a mixture in
    place of the two; norms float32 [hidden], q_norm and k_norm [D] or of all heads, sinks [Hq]; caches in float32 or
    bfloat16, k_cache [num_blocks, Hk, D, block_size] and v_cache [num_blocks, Hk, block_size, D]; or in int16 or int8
    with stored_head_dim in place of D: for each block and head first the elements, then block_size float32 scales.
    window is the number of keys that a query sees, including its own; it sees none before the last multiple of chunk.
    table is the index of the layer's table of rotary angles; None means that the layer has no rotary embedding.
    kv_rounding rounds keys and values before they are stored.
    """

    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear | None
    down: PackedLinear | None
    attention_norm: Tensor | None
    ffn_norm: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int | None = None
    attention_output_norm: Tensor | None = None
    ffn_output_norm: Tensor | None = None
    sinks: Tensor | None = None
    mixture: PackedMixture | None = None
    chunk: int | None = None
    table: int | None = 0
    kv_rounding: KvRounding | None = None


class Embedding:
    """A table of token embeddings in a format that the kernels read."""

    def __init__(self, table: Tensor, weight_format: WeightFormat, width: int) -> None:
        """Wrap a table [num_rows, width] of float32, bfloat16, or uint8 rows of Q4_1 or Q8_0 blocks.

        Raises ValueError if the table does not match the format.
        """
        dtypes = {WeightFormat.F32: torch.float32, WeightFormat.BF16: torch.bfloat16}
        row_width = width // 32 * GGUF_BLOCK_BYTES[weight_format] if weight_format in GGUF_BLOCK_BYTES else width
        if weight_format not in dtypes.keys() | GGUF_BLOCK_BYTES.keys():
            raise ValueError(f"embeddings in the format {weight_format.name} are not supported")
        _check("table", table, dtypes.get(weight_format, torch.uint8), (table.shape[0], row_width))
        self._table = table
        self.struct = EmbeddingStruct(
            table.data_ptr(), row_width * table.element_size(), table.shape[0], int(weight_format)
        )


def supports(dims: DecoderDims) -> str | None:
    """Return why the kernels cannot run a decoder with these sizes, or None if they can."""
    if dims.head_dim % 8 or not 0 < dims.head_dim <= MAX_HEAD_DIM:
        return f"head size {dims.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if dims.activation not in _ACTIVATIONS:
        return f"the activation is {dims.activation}"
    if dims.num_heads % dims.num_kv_heads:
        return f"{dims.num_heads} heads are not a multiple of {dims.num_kv_heads} key-value heads"
    return None


class NativeDecoder:
    """The layers of a decoder, run by the CPU kernels. Must not be called concurrently."""

    def __init__(
        self,
        threads: ThreadPool,
        dims: DecoderDims,
        layers: Sequence[DecoderLayer],
        cos: Tensor,
        sin: Tensor,
        query_scales: Tensor | None = None,
    ) -> None:
        """Prepare the layers; cos and sin of the rotary angles are float32 [num_positions, rotary_dim / 2], or several
        such tables.

        query_scales float32 [num_positions] multiplies the queries of layers without rotary embedding. Raises
        ValueError for wrong sizes.
        """
        reason = supports(dims)
        if reason:
            raise ValueError(reason)
        for index, layer in enumerate(layers):
            _check_layer(dims, layer, index, layers[0].k_cache)
        num_positions, num_tables = cos.shape[-2], cos.shape[0] if cos.dim() == 3 else 1
        _check("cos", cos, torch.float32, (*cos.shape[:-1], dims.num_angles))
        _check("sin", sin, torch.float32, tuple(cos.shape))
        if any(layer.table is not None and not 0 <= layer.table < num_tables for layer in layers):
            raise ValueError(f"a layer's rotary table must be in 0..{num_tables - 1}")
        if query_scales is not None:
            _check("query_scales", query_scales, torch.float32, (num_positions,))
        self._threads, self._library, self.dims = threads, threads.library, dims
        mixtures = [_mixture_struct(layer.mixture) for layer in layers]
        self._held = (*layers, cos, sin, query_scales, mixtures)  # the kernels hold pointers to them
        self._num_layers = len(layers)
        self._step_threads = StepThreads(threads.num_threads)
        structs = (LayerStruct * len(layers))(*map(_layer_struct, layers, mixtures))
        dims_struct = _dims_struct(dims, layers, num_positions, query_scales)
        self._handle: int = self._library.decoder_create(
            threads.handle, ctypes.byref(dims_struct), structs, cos.data_ptr(), sin.data_ptr()
        )
        weakref.finalize(self, self._library.decoder_destroy, self._handle)

    def forward_layers(
        self,
        hidden: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        first_layer: int = 0,
        last_layer: int | None = None,
        adapters: Sequence[PackedLora | None] | None = None,
    ) -> None:
        """Run layers first_layer..last_layer - 1 on hidden [M, hidden_size], float32, in place.

        The inputs are int32: positions and slot_mapping (block * block_size + offset) [M]; query_starts [B + 1], the
        first row of each sequence, then M; context_lens [B], the number of keys of each sequence including this step's;
        block_tables [B, max_blocks]. adapters has one adapter per sequence. Raises ValueError for wrong shapes and for
        indices out of range; in that case nothing has been written.
        """
        _check("hidden", hidden, torch.float32, (hidden.shape[0], self.dims.hidden_size))
        batch, _keep = self._batch(
            hidden.shape[0], positions, slot_mapping, query_starts, context_lens, block_tables, adapters
        )
        last = self._num_layers if last_layer is None else last_layer
        problem = self._library.decoder_forward(self._handle, ctypes.byref(batch), hidden.data_ptr(), first_layer, last)
        if problem:
            raise ValueError(problem.decode())

    def choose(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        sampled: Tensor,
        embedding: Embedding,
        norm: Tensor,
        head: PackedLinear,
        adapters: Sequence[PackedLora | None] | None = None,
        draws: Draws | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a whole step in one call, from the embeddings to the chosen tokens.

        token_ids [M] and sampled [S], indices of tokens, are int32; the other arguments are those of forward_layers and
        logits. Return the next token for each sampled position, int32 [S], and its highest logit, as `draw` does;
        without draws [S] all rows are greedy. Raises ValueError as forward_layers does.
        """
        num_tokens, num_sampled = token_ids.shape[0], sampled.shape[0]
        _check("token_ids", token_ids, torch.int32, (num_tokens,))
        _check("sampled", sampled, torch.int32, (num_sampled,))
        _check("norm", norm, torch.float32, (self.dims.hidden_size,))
        batch, _keep = self._batch(
            num_tokens, positions, slot_mapping, query_starts, context_lens, block_tables, adapters
        )
        chosen, highest = torch.empty(num_sampled, dtype=torch.int32), torch.empty(num_sampled)
        batch.max_threads = self._step_threads.number(num_tokens)
        began = time.perf_counter()
        problem = self._library.decoder_choose(
            self._handle,
            ctypes.byref(batch),
            ctypes.byref(embedding.struct),
            token_ids.data_ptr(),
            ctypes.byref(head.struct),
            norm.data_ptr(),
            num_sampled,
            sampled.data_ptr(),
            None if draws is None else pointer_to(draws, num_sampled),
            chosen.data_ptr(),
            highest.data_ptr(),
        )
        if problem:
            raise ValueError(problem.decode())
        self._step_threads.note(num_tokens, batch.max_threads, time.perf_counter() - began)
        return chosen, highest

    def _batch(
        self,
        num_tokens: int,
        positions: Tensor,
        slot_mapping: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        adapters: Sequence[PackedLora | None] | None,
    ) -> tuple[BatchStruct, object]:
        """Return the batch as a C struct for the kernels, and the objects that must outlive it."""
        num_sequences = context_lens.shape[0]
        _check("positions", positions, torch.int32, (num_tokens,))
        _check("slot_mapping", slot_mapping, torch.int32, (num_tokens,))
        _check("query_starts", query_starts, torch.int32, (num_sequences + 1,))
        _check("context_lens", context_lens, torch.int32, (num_sequences,))
        _check("block_tables", block_tables, torch.int32, (num_sequences, block_tables.shape[1]))
        pointers = adapter_pointers(adapters, num_sequences, self.dims, self._num_layers)
        batch = BatchStruct(
            num_tokens,
            num_sequences,
            block_tables.shape[1],
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            query_starts.data_ptr(),
            context_lens.data_ptr(),
            block_tables.data_ptr(),
            None if pointers is None else ctypes.addressof(pointers),
            self._threads.num_threads,
        )
        return batch, pointers

    def logits(self, hidden: Tensor, norm: Tensor, head: PackedLinear) -> Tensor:
        """Return float32 logits [M, vocabulary] of hidden [M, hidden_size], given the final norm and the head."""
        _check("hidden", hidden, torch.float32, (hidden.shape[0], self.dims.hidden_size))
        _check("norm", norm, torch.float32, (self.dims.hidden_size,))
        out = torch.empty(hidden.shape[0], head.num_outputs)
        self._library.decoder_logits(
            self._handle, ctypes.byref(head.struct), norm.data_ptr(), hidden.shape[0], hidden.data_ptr(), out.data_ptr()
        )
        return out


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: "
            f"expected contiguous {dtype} {list(shape)} on cpu"
        )


def _check_layer(dims: DecoderDims, layer: DecoderLayer, index: int, first_cache: Tensor) -> None:
    q_size, kv_size = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    _check_linear(f"layer {index}: qkv", layer.qkv, (q_size + 2 * kv_size, dims.hidden_size))
    _check_linear(f"layer {index}: o", layer.o, (dims.hidden_size, q_size))
    if layer.mixture is not None:
        _check_mixture(dims, layer.mixture, index)
    elif layer.gate_up is None or layer.down is None:
        raise ValueError(f"layer {index}: requires gate_up and down, or a mixture of experts")
    else:
        _check_expert(dims, PackedExpert(layer.gate_up, layer.down), dims.ffn_size, f"layer {index}")
    _check_norms(dims, layer, index)
    if first_cache.dtype not in _CACHE_FORMATS:
        raise ValueError(f"k_cache is {first_cache.dtype}: expected float32, bfloat16, int16 or int8")
    num_blocks, block_size = first_cache.shape[0], first_cache.shape[-1]
    blocks, stored = (num_blocks, dims.num_kv_heads), stored_head_dim(dims.head_dim, first_cache.dtype)
    _check(f"layer {index}: k_cache", layer.k_cache, first_cache.dtype, (*blocks, stored, block_size))
    _check(f"layer {index}: v_cache", layer.v_cache, first_cache.dtype, (*blocks, block_size, stored))
    for name in ("window", "chunk"):
        if getattr(layer, name) is not None and getattr(layer, name) < 1:
            raise ValueError(f"layer {index}: {name} is {getattr(layer, name)}: expected at least 1")


def _check_norms(dims: DecoderDims, layer: DecoderLayer, index: int) -> None:
    q_size, kv_size = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    for name in ("attention_norm", "ffn_norm", "attention_output_norm", "ffn_output_norm"):
        if getattr(layer, name) is not None:
            _check(f"layer {index}: {name}", getattr(layer, name), torch.float32, (dims.hidden_size,))
    for name, size in (("q_norm", q_size), ("k_norm", kv_size)):
        norm = getattr(layer, name)
        if norm is not None:
            _check(f"layer {index}: {name}", norm, torch.float32, (size if dims.norms_qk_rows else dims.head_dim,))
        elif dims.norms_qk_rows:
            raise ValueError(f"layer {index}: {name} is missing")
    if layer.sinks is not None:
        _check(f"layer {index}: sinks", layer.sinks, torch.float32, (dims.num_heads,))


def _check_linear(name: str, linear: PackedLinear, shape: tuple[int, int], *, is_gated: bool = False) -> None:
    if (linear.num_outputs, linear.num_inputs) != shape or linear.is_gated != is_gated:
        raise ValueError(f"{name} is {[linear.num_outputs, linear.num_inputs]}: expected {list(shape)}")


def _check_expert(dims: DecoderDims, expert: PackedExpert, size: int, name: str) -> None:
    is_gated = dims.activation == "silu"
    _check_linear(f"{name}: gate_up", expert.gate_up, (2 * size, dims.hidden_size), is_gated=is_gated)
    _check_linear(f"{name}: down", expert.down, (dims.hidden_size, size))


def _check_mixture(dims: DecoderDims, mixture: PackedMixture, index: int) -> None:
    num_experts, first = len(mixture.experts), mixture.experts[0]
    if not 1 <= mixture.num_active <= num_experts <= MAX_EXPERTS:
        raise ValueError(
            f"layer {index}: {mixture.num_active} active of {num_experts} experts; there must be at most {MAX_EXPERTS}"
        )
    if num_experts % mixture.num_groups or not 1 <= mixture.num_active_groups <= mixture.num_groups:
        raise ValueError(
            f"layer {index}: {mixture.num_active_groups} active of {mixture.num_groups} groups; the groups must divide "
            f"{num_experts} experts evenly"
        )
    if mixture.num_active > mixture.num_active_groups * num_experts // mixture.num_groups:
        raise ValueError(f"layer {index}: the active groups must have at least {mixture.num_active} experts")
    _check_linear(f"layer {index}: router", mixture.router, (num_experts, dims.hidden_size))
    for number, expert in enumerate(mixture.experts):
        _check_expert(dims, expert, first.down.num_inputs, f"layer {index}: expert {number}")
        for name in ("gate_up", "down"):
            one, other = getattr(expert, name).struct, getattr(first, name).struct
            if (one.format, one.input) != (other.format, other.input):
                raise ValueError(f"layer {index}: all experts must have the same weight format")
    if mixture.correction is not None:
        _check(f"layer {index}: correction", mixture.correction, torch.float32, (num_experts,))
    if mixture.shared is not None:
        _check_expert(dims, mixture.shared, mixture.shared.down.num_inputs, f"layer {index}: shared expert")
    if mixture.shared_gate is not None:
        _check_linear(f"layer {index}: shared_gate", mixture.shared_gate, (1, dims.hidden_size))


def _mixture_struct(mixture: PackedMixture | None) -> tuple[MixtureStruct, object] | None:
    """Return the mixture of experts as a C struct, and the arrays that must outlive it; None if there is none."""
    if mixture is None:
        return None
    kind = LinearStruct * len(mixture.experts)
    gate_up, down = kind(*(e.gate_up.struct for e in mixture.experts)), kind(*(e.down.struct for e in mixture.experts))
    shared, none = mixture.shared, LinearStruct()
    struct = MixtureStruct(
        router=mixture.router.struct,
        gate_up=ctypes.addressof(gate_up),
        down=ctypes.addressof(down),
        shared_gate_up=none if shared is None else shared.gate_up.struct,
        shared_down=none if shared is None else shared.down.struct,
        shared_gate=none if mixture.shared_gate is None else mixture.shared_gate.struct,
        correction=_pointer(mixture.correction),
        num_experts=len(mixture.experts),
        num_active=mixture.num_active,
        expert_size=mixture.experts[0].down.num_inputs,
        shared_size=0 if shared is None else shared.down.num_inputs,
        scoring=_SCORINGS[mixture.scoring],
        num_groups=mixture.num_groups,
        num_active_groups=mixture.num_active_groups,
        is_normalized=mixture.is_normalized,
        weighs_input=mixture.weighs_input,
        scale=mixture.scale,
    )
    return struct, (gate_up, down)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _layer_struct(layer: DecoderLayer, mixture: tuple[MixtureStruct, object] | None) -> LayerStruct:
    none, rounding = LinearStruct(), layer.kv_rounding
    return LayerStruct(
        qkv=layer.qkv.struct,
        o=layer.o.struct,
        gate_up=none if layer.gate_up is None else layer.gate_up.struct,
        down=none if layer.down is None else layer.down.struct,
        attention_norm=_pointer(layer.attention_norm),
        ffn_norm=_pointer(layer.ffn_norm),
        attention_output_norm=_pointer(layer.attention_output_norm),
        ffn_output_norm=_pointer(layer.ffn_output_norm),
        q_norm=_pointer(layer.q_norm),
        k_norm=_pointer(layer.k_norm),
        sinks=_pointer(layer.sinks),
        mixture=None if mixture is None else ctypes.addressof(mixture[0]),
        k_cache=layer.k_cache.data_ptr(),
        v_cache=layer.v_cache.data_ptr(),
        window=layer.window or 0,
        chunk=layer.chunk or 0,
        table=-1 if layer.table is None else layer.table,
        rounding=0 if rounding is None else 2 if rounding.is_integer else 1,
        key_scale=0.0 if rounding is None else rounding.key_scale,
        value_scale=0.0 if rounding is None else rounding.value_scale,
    )


def _dims_struct(
    dims: DecoderDims, layers: Sequence[DecoderLayer], num_positions: int, query_scales: Tensor | None
) -> DimsStruct:
    num_blocks, block_size = layers[0].k_cache.shape[0], layers[0].k_cache.shape[-1]
    same = {item[0]: getattr(dims, item[0]) for item in DimsStruct._fields_ if hasattr(dims, item[0])}
    return DimsStruct(
        **same | {"activation": _ACTIVATIONS[dims.activation], "rotary_dim": 2 * dims.num_angles},
        hidden=dims.hidden_size,
        ffn=dims.ffn_size,
        num_layers=len(layers),
        num_blocks=num_blocks,
        block_size=block_size,
        num_positions=num_positions,
        cache_format=_CACHE_FORMATS[layers[0].k_cache.dtype],
        query_scales=_pointer(query_scales),
    )
