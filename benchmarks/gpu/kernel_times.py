"""Time each kernel at the shapes of an 8B model, to show where a step spends its time.

The times are only reported, not compared with limits. Attention and linear kernels are listed next to their
alternatives, to check the choice between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.model import TOKENS_PER_BLOCK, step_inputs
from benchmarks.gpu.report import Report
from benchmarks.gpu.timing import graph_seconds, seconds
from kernels import AttentionCase, BlockWeight, KvScales, attention_choice
from kernels import triton as operations
from kernels.scaled_linear import scaled_linear

CUDA = torch.device("cuda")
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FEED_FORWARD, VOCAB = 32, 8, 128, 4096, 14336, 128256
ROWS = 64
# Cycle through the weights of this many layers, so that no weights are in the GPU's cache.
NUM_COPIES = 4
# Block size in tokens that every package supports.
_LARGE_BLOCK = 256


def measure_attention(report: Report) -> None:
    """Measure decode as a fraction of the memory bandwidth, and prefill as a fraction of the matrix-product rate."""
    for batch_size, context in ((1, 1024), (1, 32768), (64, 1024), (64, 4096)):
        _measure_decode_attention(report, batch_size, context)
    _measure_uneven_attention(report)
    _measure_prefill_attention(report, 8, 2048)


def _measure_prefill_attention(report: Report, batch_size: int, length: int) -> None:
    q, keys, values, tables = _attention_case(batch_size, length, length)
    variants: dict[str, Callable[[], object]] = {
        "Triton": lambda: operations.paged_attention(q, keys, values, *tables, 0.1)
    }
    for backend in attention_choice.installed(torch.cuda.get_device_capability()).values():
        # A package that needs larger blocks copies small blocks.
        for size in (TOKENS_PER_BLOCK, _LARGE_BLOCK):
            case = AttentionCase(q.dtype, q.dtype, HEADS, KV_HEADS, HEAD_DIM, size)
            if backend.refusal(case) is None:
                cache, others = _in_blocks(size, keys, values, tables)
                attend = functools.partial(backend, q, *cache, *others, 0.1, None, 0.0, length)
                variants[f"{backend.name}, blocks of {size}"] = attend
    for name, run in variants.items():
        took = seconds(run)
        rate = 2 * batch_size * length * (length + 1) * HEADS * HEAD_DIM / took
        report.note(
            f"prefill attention, {batch_size} × {length}, {name}",
            f"{took * 1e6:.0f} µs, {rate / report.figures['matmul']:.0%} of the matrix-product rate",
        )


def _in_blocks(
    size: int, keys: Tensor, values: Tensor, tables: tuple[Tensor, Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return the caches in blocks of `size` tokens, and block tables for these; they refer to arbitrary blocks, which
    does not affect times.
    """
    shape, every = (-1, size, KV_HEADS, HEAD_DIM), size // TOKENS_PER_BLOCK
    return (keys.view(shape), values.view(shape)), (tables[0][:, ::every].contiguous() // every, *tables[1:])


def _attention_case(
    batch_size: int, num_queries: int, context: int
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return the queries, key and value caches, and block tables of a step."""
    inputs = step_inputs(batch_size, num_queries, context, 1)
    num_blocks = inputs.block_tables.numel()
    keys, values = (
        torch.randn(num_blocks, TOKENS_PER_BLOCK, KV_HEADS, HEAD_DIM, device=CUDA, dtype=torch.bfloat16)
        for _ in range(2)
    )
    q = torch.randn(batch_size * num_queries, HEADS, HEAD_DIM, device=CUDA, dtype=torch.bfloat16)
    tables = (inputs.block_tables.to(CUDA), inputs.query_starts.to(CUDA), inputs.context_lens.to(CUDA))
    return q, keys, values, tables


def _measure_decode_attention(report: Report, batch_size: int, context: int) -> None:
    q, keys, values, tables = _attention_case(batch_size, 1, context)
    units = (keys * 30).to(torch.int8), (values * 30).to(torch.int8)
    floats = keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)
    scales = KvScales(*torch.ones(2, *keys.shape[:3], device=CUDA).unbind())
    variants: dict[str, Callable[[], object]] = {
        "Triton": lambda: operations.paged_attention(q, keys, values, *tables, 0.1),
        "batch-invariant": lambda: operations.paged_attention(q, keys, values, *tables, 0.1, is_batch_invariant=True),
        "int8 KV": lambda: operations.paged_attention(q, *units, *tables, 0.1, scales=scales),
        "float8 KV": lambda: operations.paged_attention(q, *floats, *tables, 0.1, scales=scales),
    }
    large, others = _in_blocks(_LARGE_BLOCK, keys, values, tables)
    case = AttentionCase(q.dtype, q.dtype, HEADS, KV_HEADS, HEAD_DIM, _LARGE_BLOCK, has_single_queries=True)
    for backend in attention_choice.installed(torch.cuda.get_device_capability()).values():
        if backend.refusal(case) is None:
            variants[backend.name] = functools.partial(backend, q, *large, *others, 0.1, None, 0.0, 1)
    for name, run in variants.items():
        took = graph_seconds(run)
        moved = 2 * batch_size * context * KV_HEADS * HEAD_DIM * (1 if name in ("int8 KV", "float8 KV") else 2)
        report.note(
            f"decode attention, batch {batch_size}, context {context}, {name}",
            f"{took * 1e6:.0f} µs, {moved / took / report.figures['bandwidth']:.0%} of the bandwidth",
        )


def _measure_uneven_attention(report: Report) -> None:
    """Measure decode attention for one long sequence among many short ones."""
    longest, others, context = 100_000, 63, 1024
    q, keys, values, (tables, starts, lens) = _attention_case(1, 1, longest + others * context)
    blocks, each = tables[0], context // TOKENS_PER_BLOCK
    tables = torch.zeros(1 + others, longest // TOKENS_PER_BLOCK, dtype=torch.int32, device=CUDA)
    tables[0] = blocks[: tables.shape[1]]
    tables[1:, :each] = blocks[tables.shape[1] :].view(others, each)
    starts = torch.arange(2 + others, dtype=torch.int32, device=CUDA)
    lens = torch.tensor([longest] + [context] * others, dtype=torch.int32, device=CUDA)
    q = q.expand(1 + others, -1, -1).contiguous()
    took = graph_seconds(lambda: operations.paged_attention(q, keys, values, tables, starts, lens, 0.1))
    moved = 4 * (longest + others * context) * KV_HEADS * HEAD_DIM
    report.note(
        f"decode attention, one sequence of {longest} tokens and {others} of {context}, Triton",
        f"{took * 1e6:.0f} µs, {moved / took / report.figures['bandwidth']:.0%} of the bandwidth",
    )


def measure_linear(report: Report) -> None:
    """Measure each matrix of a layer as a fraction of the memory bandwidth."""
    for outer, inner in ((6144, HIDDEN), (HIDDEN, HIDDEN), (2 * FEED_FORWARD, HIDDEN), (HIDDEN, FEED_FORWARD)):
        for num_rows in (1, 16, ROWS, 2048):
            _measure_linear_shape(report, outer, inner, num_rows)
    for num_tokens in (1, ROWS, 2048):
        _measure_experts(report, num_tokens)


def _measure_linear_shape(report: Report, outer: int, inner: int, num_rows: int) -> None:
    weights = [torch.randn(outer, inner, device=CUDA, dtype=torch.bfloat16) for _ in range(NUM_COPIES)]
    units = [torch.randint(-127, 128, (outer, inner), dtype=torch.int8, device=CUDA) for _ in range(NUM_COPIES)]
    scale = torch.rand(outer, device=CUDA)
    ones = torch.ones(outer, inner // 128, device=CUDA)
    floats = [
        BlockWeight("float8", weight.to(torch.float8_e4m3fn).view(torch.uint8), ones, None, 128, inner, scale)
        for weight in weights
    ]
    x = torch.randn(num_rows, inner, device=CUDA, dtype=torch.bfloat16)
    variants: dict[str, Callable[[], object]] = {
        "cuBLAS": lambda: [torch.nn.functional.linear(x, weight) for weight in weights],
        "Triton": lambda: [operations.linear(x, weight) for weight in weights],
        "int8": lambda: [operations.quantized_linear(x, one, scale) for one in units],
        "float8": lambda: [operations.block_linear(x, one) for one in floats],
        "float8, scaled": lambda: [scaled_linear(x, one, None, operations.quantize_rows) for one in floats],
    }
    if outer == 2 * FEED_FORWARD:
        variants |= {
            "cuBLAS, then SiLU-mul": lambda: [
                operations.activate(torch.nn.functional.linear(x, weight), "silu") for weight in weights
            ],
            "gate, up and SiLU": lambda: [operations.gated_linear(x, weight, "silu") for weight in weights],
        }
    for name, run in variants.items():
        took = graph_seconds(run) / NUM_COPIES
        share = outer * inner * (1 if name.startswith(("int8", "float8")) else 2) / took / report.figures["bandwidth"]
        report.note(
            f"linear {inner} → {outer}, {num_rows} rows, {name}", f"{took * 1e6:.1f} µs, {share:.0%} of the bandwidth"
        )


def _measure_experts(report: Report, num_tokens: int) -> None:
    """Measure the gate and up projections of 8 of 128 experts, with intermediate size 768 and hidden size 2,048."""
    num_experts, num_active, hidden, size = 128, 8, 2048, 768
    weight = torch.randn(num_experts, 2 * size, hidden, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(num_tokens, hidden, device=CUDA, dtype=torch.bfloat16)
    # Use several choices of experts, so that with one token not all of their weights are in the GPU's cache.
    chosen = [
        torch.rand(num_tokens, num_experts, device=CUDA).topk(num_active).indices.flatten().int()
        for _ in range(NUM_COPIES)
    ]
    multiply = functools.partial(operations.grouped_linear, x, weight, num_repeats=num_active)
    variants: dict[str, Callable[[], object]] = {
        "then SiLU-mul": lambda: [operations.activate(multiply(experts), "silu") for experts in chosen],
        "and SiLU": lambda: [multiply(experts, activation="silu") for experts in chosen],
    }
    for name, run in variants.items():
        took = graph_seconds(run) / NUM_COPIES
        report.note(f"experts' gates, ups {name}, {num_tokens} tokens", f"{took * 1e6:.1f} µs")


def measure_others(report: Report) -> None:
    """Measure the small kernels of a decode step with 64 rows."""
    x = torch.randn(ROWS, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    gate_up = torch.randn(ROWS, 2 * FEED_FORWARD, device=CUDA, dtype=torch.bfloat16)
    weight = torch.ones(HIDDEN, device=CUDA, dtype=torch.bfloat16)
    head = torch.ones(HEAD_DIM, device=CUDA, dtype=torch.bfloat16)
    q, k = (torch.randn(ROWS, heads, HEAD_DIM, device=CUDA, dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS))
    angles = torch.randn(ROWS, HEAD_DIM // 2, device=CUDA)
    cos, sin = angles.cos(), angles.sin()
    cache = torch.zeros(2, ROWS, TOKENS_PER_BLOCK, KV_HEADS, HEAD_DIM, device=CUDA, dtype=torch.bfloat16)
    integers = torch.arange(ROWS, dtype=torch.int32, device=CUDA)
    logits = torch.randn(ROWS, VOCAB, device=CUDA) * 4
    ones, zeros = torch.ones(ROWS, device=CUDA), torch.zeros(ROWS, device=CUDA)
    keyed = (integers.long(), integers, integers)
    pairs = torch.randn(8 * 2 * 16 * HIDDEN, device=CUDA, dtype=torch.bfloat16)
    table = torch.tensor([[i * 2 * 16 * HIDDEN, 16] for i in range(8)], device=CUDA)
    y = torch.zeros_like(x)
    runs: dict[str, Callable[[], object]] = {
        "norm with residual": lambda: operations.add_rms_norm(x, x, weight, 1e-5),
        "SiLU-mul": lambda: operations.activate(gate_up, "silu"),
        "rotary": lambda: operations.apply_rotary(q, k, cos, sin),
        "norm, rotary and KV write": lambda: operations.rotate_and_store(
            q, k, k, cos, sin, cache[0], cache[1], integers * TOKENS_PER_BLOCK, q_norm=head, k_norm=head, eps=1e-5
        ),
        "KV write": lambda: operations.store_kv(k, k, cache[0], cache[1], integers * TOKENS_PER_BLOCK),
        "LoRA rank 16, 8 adapters": lambda: operations.add_lora(y, x, pairs, table, integers % 8, 64),
        "argmax": lambda: logits.argmax(dim=1),
        "sampling, temperature": lambda: operations.sample(logits, ones, integers * 0, ones, zeros, *keyed),
        "sampling, top-k 50, top-p 0.9": lambda: operations.sample(
            logits, ones, integers * 0 + 50, ones * 0.9, zeros, *keyed
        ),
    }
    for name, run in runs.items():
        report.note(f"{name}, {ROWS} rows", f"{graph_seconds(run) * 1e6:.1f} µs")
