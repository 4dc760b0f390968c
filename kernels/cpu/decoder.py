"""All layers of a decoder in one call of the CPU kernels."""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.dims import DecoderDims
from kernels.cpu.library import BatchStruct, DimsStruct, EmbeddingStruct, LayerStruct
from kernels.cpu.linear import GGUF_BLOCK_BYTES, PackedLinear, WeightFormat
from kernels.cpu.lora import PackedLora, adapter_pointers
from kernels.cpu.threads import ThreadPool

MAX_HEAD_DIM = 256
_CACHE_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int16: 2, torch.int8: 3}  # numbers of csrc/api.h


def stored_head_dim(head_dim: int, cache_dtype: torch.dtype) -> int:
    """Numbers that a head of a token takes in a cache of this type: integers have a float32 scale with them."""
    return head_dim + (0 if cache_dtype.is_floating_point else 4 // cache_dtype.itemsize)


@dataclass(frozen=True)
class DecoderLayer:
    """Weights and cache of one layer.

    qkv [(Hq + 2 Hk) D, hidden], o [hidden, Hq D], gate_up (gated) [2 ffn, hidden], down [hidden, ffn]; norms float32
    [hidden], q_norm and k_norm [D] (Qwen3); caches in float32 or bfloat16, k_cache [num_blocks, Hk, D, block_size]
    and v_cache [num_blocks, Hk, block_size, D]; or in int16 or int8 with stored_head_dim for D, the numbers of a head
    of a block first, then block_size float32 scales. window is the number of keys that a query sees, itself included.
    """

    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    attention_norm: Tensor
    ffn_norm: Tensor
    k_cache: Tensor
    v_cache: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int | None = None


class Embedding:
    """A table of tokens' embeddings as the kernels read it."""

    def __init__(self, table: Tensor, weight_format: WeightFormat, width: int) -> None:
        """Refer to table [num_rows, width]: float32, bfloat16, or the uint8 rows of Q4_1 or Q8_0 blocks.

        Raises ValueError where format and table do not fit each other.
        """
        dtypes = {WeightFormat.F32: torch.float32, WeightFormat.BF16: torch.bfloat16}
        row_width = width // 32 * GGUF_BLOCK_BYTES[weight_format] if weight_format in GGUF_BLOCK_BYTES else width
        if weight_format not in dtypes.keys() | GGUF_BLOCK_BYTES.keys():
            raise ValueError(f"an embedding of {weight_format.name} rows is not known")
        _check("table", table, dtypes.get(weight_format, torch.uint8), (table.shape[0], row_width))
        self._table = table
        self.struct = EmbeddingStruct(
            table.data_ptr(), row_width * table.element_size(), table.shape[0], int(weight_format)
        )


def supports(dims: DecoderDims) -> str | None:
    """Return why the kernels cannot run such a decoder, or None when they can."""
    if dims.head_dim % 8 or not 0 < dims.head_dim <= MAX_HEAD_DIM:
        return f"head size {dims.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if dims.num_heads % dims.num_kv_heads:
        return f"{dims.num_heads} heads cannot share {dims.num_kv_heads} key-value heads"
    return None


class NativeDecoder:
    """The layers of a decoder, run by the CPU kernels. One caller at a time."""

    def __init__(
        self, threads: ThreadPool, dims: DecoderDims, layers: Sequence[DecoderLayer], cos: Tensor, sin: Tensor
    ) -> None:
        """Take cos and sin of the rotary angles [num_positions, D / 2], float32; raises ValueError for wrong sizes."""
        reason = supports(dims)
        if reason:
            raise ValueError(reason)
        for index, layer in enumerate(layers):
            _check_layer(dims, layer, index, layers[0].k_cache)
        _check("cos", cos, torch.float32, (cos.shape[0], dims.head_dim // 2))
        _check("sin", sin, torch.float32, tuple(cos.shape))
        self._threads, self._library, self.dims = threads, threads.library, dims
        self._held = (*layers, cos, sin)  # the kernels point into them
        self._num_layers = len(layers)
        structs = (LayerStruct * len(layers))(*map(_layer_struct, layers))
        dims_struct = _dims_struct(dims, layers, cos.shape[0])
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
        """Run layers first_layer..last_layer - 1 on hidden [M, hidden_size] float32, in place.

        int32: positions and slot_mapping (block * block_size + offset) [M]; query_starts [B + 1], the first row of each
        sequence and M; context_lens [B], its keys with this step's; block_tables [B, max_blocks]. adapters are the
        sequences' own. Raises ValueError for wrong shapes and for indices out of range; then nothing was written.
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
    ) -> tuple[Tensor, Tensor]:
        """Run a whole step, from embeddings to the greedy choice, in one call.

        token_ids [M] and sampled [S], indices of tokens, are int32; the others are those of forward_layers and logits.
        Return the likeliest next token of each sampled one, int32 [S], the first where several are, and its logit, NaN
        where one of the logits is. Raises ValueError as forward_layers does.
        """
        num_tokens, num_sampled = token_ids.shape[0], sampled.shape[0]
        _check("token_ids", token_ids, torch.int32, (num_tokens,))
        _check("sampled", sampled, torch.int32, (num_sampled,))
        _check("norm", norm, torch.float32, (self.dims.hidden_size,))
        batch, _keep = self._batch(
            num_tokens, positions, slot_mapping, query_starts, context_lens, block_tables, adapters
        )
        best, highest = torch.empty(num_sampled, dtype=torch.int32), torch.empty(num_sampled)
        problem = self._library.decoder_choose(
            self._handle,
            ctypes.byref(batch),
            ctypes.byref(embedding.struct),
            token_ids.data_ptr(),
            ctypes.byref(head.struct),
            norm.data_ptr(),
            num_sampled,
            sampled.data_ptr(),
            best.data_ptr(),
            highest.data_ptr(),
        )
        if problem:
            raise ValueError(problem.decode())
        return best, highest

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
        """Return the kernels' view of a batch, and what must live as long as it."""
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
        )
        return batch, pointers

    def logits(self, hidden: Tensor, norm: Tensor, head: PackedLinear) -> Tensor:
        """Return head(rms_norm(hidden [M, hidden_size])) with norm [hidden_size] -> [M, vocabulary], float32."""
        _check("hidden", hidden, torch.float32, (hidden.shape[0], self.dims.hidden_size))
        _check("norm", norm, torch.float32, (self.dims.hidden_size,))
        out = torch.empty(hidden.shape[0], head.num_outputs)
        self._library.decoder_logits(
            self._handle,
            ctypes.byref(head.struct),
            norm.data_ptr(),
            hidden.shape[0],
            hidden.data_ptr(),
            out.data_ptr(),
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
    expected = {
        "qkv": (q_size + 2 * kv_size, dims.hidden_size),
        "o": (dims.hidden_size, q_size),
        "gate_up": (2 * dims.ffn_size, dims.hidden_size),
        "down": (dims.hidden_size, dims.ffn_size),
    }
    for name, shape in expected.items():
        linear: PackedLinear = getattr(layer, name)
        if (linear.num_outputs, linear.num_inputs) != shape or linear.is_gated != (name == "gate_up"):
            raise ValueError(
                f"layer {index}: {name} is {[linear.num_outputs, linear.num_inputs]}: expected {list(shape)}"
            )
    for name in ("attention_norm", "ffn_norm"):
        _check(f"layer {index}: {name}", getattr(layer, name), torch.float32, (dims.hidden_size,))
    for name in ("q_norm", "k_norm"):
        if getattr(layer, name) is not None:
            _check(f"layer {index}: {name}", getattr(layer, name), torch.float32, (dims.head_dim,))
    if first_cache.dtype not in _CACHE_FORMATS:
        raise ValueError(f"k_cache is {first_cache.dtype}: expected float32, bfloat16, int16 or int8")
    num_blocks, block_size = first_cache.shape[0], first_cache.shape[-1]
    blocks, stored = (num_blocks, dims.num_kv_heads), stored_head_dim(dims.head_dim, first_cache.dtype)
    _check(f"layer {index}: k_cache", layer.k_cache, first_cache.dtype, (*blocks, stored, block_size))
    _check(f"layer {index}: v_cache", layer.v_cache, first_cache.dtype, (*blocks, block_size, stored))
    if layer.window is not None and layer.window < 1:
        raise ValueError(f"layer {index}: window is {layer.window}: expected at least 1")


def _layer_struct(layer: DecoderLayer) -> LayerStruct:
    tensors = (layer.attention_norm, layer.ffn_norm, layer.q_norm, layer.k_norm, layer.k_cache, layer.v_cache)
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    linears = (linear.struct for linear in (layer.qkv, layer.o, layer.gate_up, layer.down))
    return LayerStruct(*linears, *pointers, layer.window or 0)


def _dims_struct(dims: DecoderDims, layers: Sequence[DecoderLayer], num_positions: int) -> DimsStruct:
    num_blocks, block_size = layers[0].k_cache.shape[0], layers[0].k_cache.shape[-1]
    return DimsStruct(
        hidden=dims.hidden_size,
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        ffn=dims.ffn_size,
        num_layers=len(layers),
        num_blocks=num_blocks,
        block_size=block_size,
        num_positions=num_positions,
        cache_format=_CACHE_FORMATS[layers[0].k_cache.dtype],
        eps=dims.eps,
        scale=dims.scale,
    )
