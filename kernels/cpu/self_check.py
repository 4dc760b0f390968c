"""Checks that a build of the kernels matches the reference on this machine, before it is used.

`python -m kernels.cpu.self_check LIBRARY ISA` checks in a separate process, so that an unsupported instruction kills
only that process; if results differ, it prints which and exits with 1.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from kernels.activation import activate
from kernels.attention import paged_attention
from kernels.cpu.blocks import dequantize_blocks, random_blocks, round_to_int16
from kernels.cpu.decoder import DecoderLayer, NativeDecoder, stored_head_dim
from kernels.cpu.dims import DecoderDims
from kernels.cpu.library import Library
from kernels.cpu.linear import InputFormat, PackedLinear, WeightFormat
from kernels.cpu.threads import ThreadPool
from kernels.kv_store import store_kv
from kernels.linear import linear
from kernels.rms_norm import rms_norm
from kernels.rotary import apply_rotary

NUM_INPUTS, NUM_OUTPUTS, NUM_ROWS = 256, 70, (19, 9, 5, 1)
DIMS = DecoderDims(hidden_size=40, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=72, eps=1e-5, scale=0.25)
# Tolerance by cache dtype: a value near the midpoint of two representable values may be rounded either way.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.int16: 1e-3, torch.int8: 1e-1}
BLOCK_SIZE, CONTEXT_LENS, QUERY_LENS, WINDOW = 4, [37, 5], [35, 1], 30


def find_difference(library: Library) -> str | None:
    """Return which of the library's results differ from the reference, or None if they match."""
    generator = torch.Generator().manual_seed(0)
    try:
        threads = ThreadPool(library, 2)
    except RuntimeError as error:
        return str(error)
    for weight_format in WeightFormat:
        parts, weight = _weights(weight_format, generator)
        # The inputs are integers of eight bits times a power of two, so that rounding them to bytes is exact, and to 16
        # bits nearly so.
        x = torch.randint(-127, 128, (NUM_ROWS[0], NUM_INPUTS), generator=generator) / 64
        x[:, ::32] = 127 / 64
        for input_format in InputFormat:
            packed = PackedLinear(library, [parts], weight_format, input_format=input_format)
            outputs = [packed(x[:count], threads) for count in NUM_ROWS]
            if not _is_close(outputs[0], linear(x, weight)):
                return f"its {weight_format.name} linear layer differs from the reference"
            # The kernels have a separate code path for each number of rows; all must give the same sums.
            if not all(torch.equal(output, outputs[0][: len(output)]) for output in outputs):
                return f"its {weight_format.name} linear layer gives different results for different numbers of rows"
    for cache_dtype in TOLERANCES:
        if not _is_decoder_right(library, threads, cache_dtype, generator):
            return f"its decoder with a {cache_dtype} cache differs from the reference"
    return None


def _is_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> bool:
    return bool(torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())))


def _weights(weight_format: WeightFormat, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random weights in PackedLinear's format, and their values as floats."""
    if not weight_format.has_blocks:
        weight = torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=generator)
        if weight_format == WeightFormat.BF16:
            return weight, weight.bfloat16().float()
        if weight_format == WeightFormat.INT16:
            return weight, round_to_int16(weight)
        if weight_format == WeightFormat.INT8:
            scales = weight.abs().amax(dim=1, keepdim=True) / 127
            return weight, (weight / scales).round() * scales
        return weight, weight
    rows = random_blocks(weight_format, NUM_OUTPUTS, NUM_INPUTS, generator)
    return rows, dequantize_blocks(rows, weight_format, NUM_INPUTS)


def _is_decoder_right(
    library: Library, threads: ThreadPool, cache_dtype: torch.dtype, generator: torch.Generator
) -> bool:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q_size, kv_size = DIMS.num_heads * DIMS.head_dim, DIMS.num_kv_heads * DIMS.head_dim
    shapes = {
        "qkv": (q_size + 2 * kv_size, DIMS.hidden_size),
        "o": (DIMS.hidden_size, q_size),
        "gate_up": (2 * DIMS.ffn_size, DIMS.hidden_size),
        "down": (DIMS.hidden_size, DIMS.ffn_size),
    }
    weights = {name: random(*shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    norms = {name: random(DIMS.hidden_size) for name in ("attention_norm", "ffn_norm")}
    norms |= {name: random(DIMS.head_dim) for name in ("q_norm", "k_norm")}
    # Earlier keys and values are copied from the reference to a float cache; integer caches are written only by the
    # kernels.
    has_floats = cache_dtype.is_floating_point
    query_lens = QUERY_LENS if has_floats else CONTEXT_LENS
    tables = torch.arange(20, dtype=torch.int32).flip(0).view(2, 10).contiguous()
    positions = torch.cat([torch.arange(c - q, c) for c, q in zip(CONTEXT_LENS, query_lens, strict=True)]).int()
    sequence = torch.arange(2).repeat_interleave(torch.tensor(query_lens))
    slots = (tables[sequence, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).int()
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lengths = torch.tensor(CONTEXT_LENS, dtype=torch.int32)
    cos, sin = random(40, DIMS.head_dim // 2), random(40, DIMS.head_dim // 2)
    caches = random(2, 20, BLOCK_SIZE, DIMS.num_kv_heads, DIMS.head_dim).to(
        cache_dtype if has_floats else torch.float32
    )
    hidden = random(len(positions), DIMS.hidden_size)

    expected_caches, step = caches.clone(), (positions, slots, starts, lengths, tables)
    expected = _reference_layer(hidden, weights | norms, expected_caches, cos, sin, step)
    k_cache, v_cache = caches[0].permute(0, 2, 3, 1).contiguous(), caches[1].transpose(1, 2).contiguous()
    if not has_floats:
        stored_dim = stored_head_dim(DIMS.head_dim, cache_dtype)
        k_cache = torch.zeros(20, DIMS.num_kv_heads, stored_dim, BLOCK_SIZE, dtype=cache_dtype)
        v_cache = torch.zeros(20, DIMS.num_kv_heads, BLOCK_SIZE, stored_dim, dtype=cache_dtype)
    layer = DecoderLayer(
        qkv=PackedLinear(library, [weights["qkv"]], WeightFormat.F32),
        o=PackedLinear(library, [weights["o"]], WeightFormat.F32),
        gate_up=PackedLinear(library, weights["gate_up"].chunk(2), WeightFormat.F32, is_gated=True),
        down=PackedLinear(library, [weights["down"]], WeightFormat.F32),
        attention_norm=norms["attention_norm"],
        ffn_norm=norms["ffn_norm"],
        q_norm=norms["q_norm"],
        k_norm=norms["k_norm"],
        k_cache=k_cache,
        v_cache=v_cache,
        window=WINDOW,
    )
    NativeDecoder(threads, DIMS, [layer], cos, sin).forward_layers(hidden, *step)
    tolerance = TOLERANCES[cache_dtype]
    if not has_floats:
        return _is_close(hidden, expected, tolerance)
    stored = torch.stack((k_cache.permute(0, 3, 1, 2), v_cache.transpose(1, 2)))
    return _is_close(hidden, expected, tolerance) and _is_close(stored.float(), expected_caches.float(), tolerance)


def _reference_layer(
    hidden: Tensor, weights: dict[str, Tensor], caches: Tensor, cos: Tensor, sin: Tensor, step: tuple[Tensor, ...]
) -> Tensor:
    positions, slots, starts, lengths, tables = step
    normed = rms_norm(hidden, weights["attention_norm"], DIMS.eps)
    heads = linear(normed, weights["qkv"]).view(len(hidden), -1, DIMS.head_dim)
    q, k, v = torch.split(heads, [DIMS.num_heads, DIMS.num_kv_heads, DIMS.num_kv_heads], dim=1)
    q, k = rms_norm(q, weights["q_norm"], DIMS.eps), rms_norm(k, weights["k_norm"], DIMS.eps)
    q, k = apply_rotary(q, k, cos[positions], sin[positions])
    store_kv(k, v, caches[0], caches[1], slots)
    attended = paged_attention(q, caches[0], caches[1], tables, starts, lengths, DIMS.scale, WINDOW)
    hidden = hidden + linear(attended.flatten(1), weights["o"])
    gate_up = linear(rms_norm(hidden, weights["ffn_norm"], DIMS.eps), weights["gate_up"])
    return hidden + linear(activate(gate_up, "silu"), weights["down"])


if __name__ == "__main__":
    difference = find_difference(Library(Path(sys.argv[1]), sys.argv[2]))
    if difference is not None:
        print(difference)
    sys.exit(difference is not None)
