"""A small random decoder and its reference implementation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import activate, apply_rotary, linear, paged_attention, rms_norm, store_kv
from kernels.cpu import (
    DecoderDims,
    DecoderLayer,
    NativeDecoder,
    PackedLinear,
    ThreadPool,
    WeightFormat,
    stored_head_dim,
)
from tests.kernels.libraries import library, threads
from tests.kernels.paged import PagedBatch

NUM_POSITIONS = 1024


@dataclass(frozen=True)
class RandomLayer:
    linears: dict[str, Tensor]
    norms: dict[str, Tensor]
    qkv_bias: Tensor | None
    window: int | None


@dataclass(frozen=True)
class RandomDecoder:
    """A decoder with float weights, for the reference and for the kernels."""

    dims: DecoderDims
    layers: Sequence[RandomLayer]
    cos: Tensor
    sin: Tensor

    def caches(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> Tensor:
        """Return empty caches for the reference, filled with NaN: [layers, 2, num_blocks, block_size, Hk, D].

        Integer types are filled with -1 and have additional space in D, in which the kernels store scales.
        """
        dim = stored_head_dim(self.dims.head_dim, dtype)
        shape = (len(self.layers), 2, num_blocks, block_size, self.dims.num_kv_heads, dim)
        return torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype)

    def native(self, name: str, caches: Tensor, num_threads: int = 2, pool: ThreadPool | None = None) -> NativeDecoder:
        """Return the native decoder, which uses these caches; they are in the layout of `in_kernel_order`.

        If no pool is given, the decoder shares one with the other tests.
        """
        layers = [
            _native_layer(name, layer, *_kernel_views(*cache)) for layer, cache in zip(self.layers, caches, strict=True)
        ]
        return NativeDecoder(pool or threads(name, num_threads), self.dims, layers, self.cos, self.sin)

    def reference(self, hidden: Tensor, batch: PagedBatch, caches: Tensor) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = _reference_layer(self, layer, hidden, batch, cache)
        return hidden


def in_kernel_order(caches: Tensor) -> Tensor:
    """Return the caches of the reference with the elements of each block in the order used by the CPU kernels."""
    ordered = torch.empty_like(caches)
    for source, target in zip(caches, ordered, strict=True):
        keys, values = _kernel_views(*target)
        keys.copy_(source[0].permute(0, 2, 3, 1))
        values.copy_(source[1].transpose(1, 2))
    return ordered


def _kernel_views(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    num_blocks, block_size, num_heads, dim = keys.shape
    return keys.view(num_blocks, num_heads, dim, block_size), values.view(num_blocks, num_heads, block_size, dim)


def random_decoder(
    dims: DecoderDims, num_layers: int, has_bias: bool = False, has_head_norms: bool = False, window: int | None = None
) -> RandomDecoder:
    angles = torch.randn(NUM_POSITIONS, dims.head_dim // 2)
    layers = [_random_layer(dims, has_bias, has_head_norms, window) for _ in range(num_layers)]
    return RandomDecoder(dims, layers, angles.cos(), angles.sin())


def _random_layer(dims: DecoderDims, has_bias: bool, has_head_norms: bool, window: int | None) -> RandomLayer:
    q_size, kv_size, hidden = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim, dims.hidden_size
    shapes = {
        "qkv": (q_size + 2 * kv_size, hidden),
        "o": (hidden, q_size),
        "gate_up": (2 * dims.ffn_size, hidden),
        "down": (hidden, dims.ffn_size),
    }
    norms = {"attention_norm": torch.randn(hidden), "ffn_norm": torch.randn(hidden)}
    if has_head_norms:
        norms |= {"q_norm": torch.randn(dims.head_dim), "k_norm": torch.randn(dims.head_dim)}
    linears = {key: torch.randn(*shape) * shape[1] ** -0.5 for key, shape in shapes.items()}
    return RandomLayer(linears, norms, torch.randn(q_size + 2 * kv_size) if has_bias else None, window)


def _native_layer(name: str, layer: RandomLayer, k_cache: Tensor, v_cache: Tensor) -> DecoderLayer:
    def pack(key: str, bias: Tensor | None = None) -> PackedLinear:
        return PackedLinear(library(name), [layer.linears[key]], WeightFormat.F32, bias)

    gate_up = PackedLinear(library(name), layer.linears["gate_up"].chunk(2), WeightFormat.F32, is_gated=True)
    return DecoderLayer(
        qkv=pack("qkv", layer.qkv_bias),
        o=pack("o"),
        gate_up=gate_up,
        down=pack("down"),
        attention_norm=layer.norms["attention_norm"],
        ffn_norm=layer.norms["ffn_norm"],
        q_norm=layer.norms.get("q_norm"),
        k_norm=layer.norms.get("k_norm"),
        k_cache=k_cache,
        v_cache=v_cache,
        window=layer.window,
    )


def _reference_layer(
    decoder: RandomDecoder, layer: RandomLayer, hidden: Tensor, batch: PagedBatch, cache: Tensor
) -> Tensor:
    dims, norms = decoder.dims, layer.norms
    normed = rms_norm(hidden, norms["attention_norm"], dims.eps)
    heads = linear(normed, layer.linears["qkv"], layer.qkv_bias).view(len(hidden), -1, dims.head_dim)
    q, k, v = torch.split(heads, [dims.num_heads, dims.num_kv_heads, dims.num_kv_heads], dim=1)
    if "q_norm" in norms:
        q, k = rms_norm(q, norms["q_norm"], dims.eps), rms_norm(k, norms["k_norm"], dims.eps)
    q, k = apply_rotary(q, k, decoder.cos[batch.positions], decoder.sin[batch.positions])
    store_kv(k, v, cache[0], cache[1], batch.slot_mapping)
    attended = paged_attention(
        q, cache[0], cache[1], batch.block_tables, batch.query_starts, batch.context_lens, dims.scale, layer.window
    )
    hidden = hidden + linear(attended.flatten(1), layer.linears["o"])
    gate_up = linear(rms_norm(hidden, norms["ffn_norm"], dims.eps), layer.linears["gate_up"])
    return hidden + linear(activate(gate_up, "silu"), layer.linears["down"])
