"""Check each kernel against float64: at real sizes on a GPU, elsewhere at tiny sizes in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.against_transformers import Request, drive, mixed_workload
from benchmarks.gpu.model import TINY, random_decoder, random_runner
from benchmarks.gpu.report import Report
from kernels import AttentionCase, BlockWeight, KvScales, attention_choice
from kernels import triton as operations
from kernels.block_weight import KINDS
from tests.kernels import exact
from tests.kernels.paged import PagedBatch, paged_batch

# Maximum relative error of the norm; with 16-bit types, results and attention weights are rounded.
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
INT8_LIMIT, FLOAT8_LIMIT = 1.5e-2, 6e-2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the checks.

    Attributes:
        lengths: (context, queries) of each sequence.
        heads: (query heads, KV heads, head size) of each attention check.
        rows, hidden: Number of rows and hidden size in the checks of all other kernels.
        vocab_size: Vocabulary size in the check of sampling.
        query_dtype: Data type of the queries in the checks of quantized caches.
    """

    device: torch.device
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[tuple[int, int, int], ...]
    rows: int
    hidden: int
    vocab_size: int
    query_dtype: torch.dtype


def sizes_for(device: torch.device) -> Sizes:
    """Return real sizes on a GPU; on a CPU, tiny sizes without bfloat16, which the interpreter cannot multiply."""
    if device.type == "cuda":
        return Sizes(
            device,
            ((1500, 1), (1024, 1), (700, 700), (65, 3), (1, 1), (2100, 130)),
            ((32, 8, 128), (9, 3, 64), (8, 8, 80), (14, 2, 256), (71, 1, 64)),
            rows=300,
            hidden=4096,
            vocab_size=128256,
            query_dtype=torch.bfloat16,
        )
    return Sizes(
        device,
        ((40, 1), (33, 5), (3, 3), (1, 1)),
        ((4, 2, 16), (3, 1, 24)),
        rows=3,
        hidden=48,
        vocab_size=700,
        query_dtype=torch.float32,
    )


def check_runner_and_sampling(report: Report) -> None:
    """Check the basics: the worker's runner and the sampler."""
    sizes = _sizes()
    _check_runner(report, sizes.device)
    _check_sampling(report, sizes)


def check_bfloat16(report: Report) -> None:
    """Check every kernel in bfloat16."""
    _check_dtype(report, torch.bfloat16)


def check_float16(report: Report) -> None:
    """Check every kernel in float16."""
    _check_dtype(report, torch.float16)


def check_float32(report: Report) -> None:
    """Check every kernel in float32."""
    _check_dtype(report, torch.float32)


def check_quantized(report: Report) -> None:
    """Check attention over quantized caches."""
    sizes = _sizes()
    _check_quantized_attention(report, sizes, torch.int8, INT8_LIMIT)
    _check_quantized_attention(report, sizes, torch.float8_e4m3fn, FLOAT8_LIMIT)


def check_invariance(report: Report) -> None:
    """Check that the results of the batch-invariant kernels are bit-identical."""
    _check_invariance(report, _sizes())


def _sizes() -> Sizes:
    torch.manual_seed(0)
    return sizes_for(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))


def _check_dtype(report: Report, dtype: torch.dtype) -> None:
    sizes = _sizes()
    for heads in sizes.heads:
        _check_attention(report, sizes, heads, dtype)
        for is_single in (True, False):
            _check_other_attention(report, sizes, heads, dtype, is_single=is_single)
    _check_row_kernels(report, sizes, dtype)
    _check_matrix_kernels(report, sizes, dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cache(batch: PagedBatch, heads: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values that are NaN wherever no sequence has tokens."""
    caches = torch.full((2, batch.num_blocks, 16, *heads[1:]), torch.nan, dtype=dtype)
    for i, length in enumerate(batch.context_lens.tolist()):
        positions = torch.arange(length)
        blocks = batch.block_tables[i, positions // 16].long()
        caches[:, blocks, positions % 16] = torch.randn(2, length, *heads[1:]).to(dtype)
    return caches[0], caches[1]


def _tables(batch: PagedBatch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return batch.block_tables.to(device), batch.query_starts.to(device), batch.context_lens.to(device)


def _check_attention(report: Report, sizes: Sizes, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    batch = paged_batch([c for c, _ in sizes.lengths], [q for _, q in sizes.lengths], 16)
    k, v = _cache(batch, heads, dtype)
    q = torch.randn(int(batch.query_starts[-1]), heads[0], heads[2]).to(dtype)
    scale = heads[2] ** -0.5
    for window, softcap in ((None, 0.0), (100, 0.0), (None, 2.0)):
        name = f"attention {heads[0]}/{heads[1]} heads of {heads[2]}, {_name(dtype)}"
        name += ", window" if window else ", soft cap" if softcap else ""
        expected = exact.attention(q, k, v, batch, scale, window, softcap)
        tables = _tables(batch, sizes.device)
        args = (q.to(sizes.device), k.to(sizes.device), v.to(sizes.device), *tables, scale, window, softcap)
        report.error(name, exact.error(operations.paged_attention(*args).cpu(), expected), LIMITS[dtype])
        split = operations.paged_attention(*args, num_shares=4)
        report.error(f"{name}, 4 splits", exact.error(split.cpu(), expected), LIMITS[dtype])
        # Which program merges the splits varies between runs, since on a device the splits run concurrently.
        num_runs = 50 if sizes.device.type == "cuda" else 1
        again = [operations.paged_attention(*args, num_shares=4) for _ in range(num_runs)]
        num_different = sum(not torch.equal(one, split) for one in again)
        report.error(f"{name}, 4 splits, differing runs of {num_runs}", num_different, 0)


def _check_other_attention(
    report: Report, sizes: Sizes, heads: tuple[int, int, int], dtype: torch.dtype, *, is_single: bool
) -> None:
    """Check the attention of other installed packages with blocks of 256 tokens, for decode steps or other steps."""
    if sizes.device.type != "cuda":
        return
    contexts = [c for c, _ in sizes.lengths]
    batch = paged_batch(contexts, [1 if is_single else q for _, q in sizes.lengths], 256)
    k, v = torch.randn(2, batch.num_blocks, 256, *heads[1:]).to(dtype).unbind()
    q = torch.randn(int(batch.query_starts[-1]), heads[0], heads[2]).to(dtype)
    tables = (batch.block_tables.clamp(min=0).to(sizes.device), *_tables(batch, sizes.device)[1:])
    case = AttentionCase(dtype, dtype, *heads, 256, has_single_queries=is_single)
    for backend in attention_choice.installed(torch.cuda.get_device_capability(sizes.device)).values():
        if backend.refusal(case) is not None:
            continue
        for window in (None, 100):
            args = (q.to(sizes.device), k.to(sizes.device), v.to(sizes.device), *tables, 0.1, window, 0.0, None)
            expected = exact.attention(q, k, v, batch, 0.1, window)
            name = f"{backend.name}, {'single queries' if is_single else 'prompts'}, {_name(dtype)}, window {window}"
            report.error(name, exact.error(backend(*args).cpu(), expected), LIMITS[dtype])


def _check_row_kernels(report: Report, sizes: Sizes, dtype: torch.dtype) -> None:
    rows, hidden, device = sizes.rows, sizes.hidden, sizes.device
    x, residual, weight = (torch.randn(s).to(device, dtype) for s in ((rows, hidden), (rows, hidden), (hidden,)))
    normed, total = operations.add_rms_norm(x, residual, weight, 1e-5)
    report.error(f"residual sum, {_name(dtype)}", exact.error(total, x.double() + residual.double()), LIMITS[dtype])
    report.error(f"norm, {_name(dtype)}", exact.error(normed, exact.rms_norm(total, weight, 1e-5)), LIMITS[dtype])
    gated = operations.activate(x, "silu")
    report.error(f"SiLU-mul, {_name(dtype)}", exact.error(gated, exact.activate(x, "silu")), LIMITS[dtype])
    q = torch.randn(rows, 5, 24).to(device, dtype)
    angles = torch.randn(rows, 12, device=device)
    turned, _ = operations.apply_rotary(q, q[:, :2], angles.cos(), angles.sin())
    report.error(
        f"rotary, {_name(dtype)}", exact.error(turned, exact.rotate(q, angles.cos(), angles.sin())), LIMITS[dtype]
    )
    caches = torch.zeros(2, rows, 1, 2, 24, device=device, dtype=dtype)
    slots, heads = torch.arange(rows, dtype=torch.int32, device=device), q[:, :2]
    norm = torch.randn(24).to(device, dtype)
    turned = operations.rotate_and_store(
        q[:, :4],
        heads,
        heads,
        angles.cos(),
        angles.sin(),
        caches[0],
        caches[1],
        slots,
        q_norm=norm,
        k_norm=norm,
        eps=1e-5,
    )
    wanted = exact.rotate(exact.rms_norm(q[:, :4], norm, 1e-5), angles.cos(), angles.sin())
    name = f"norm, rotary and KV write, {_name(dtype)}"
    report.error(name, exact.error(turned, wanted), LIMITS[dtype])
    report.error(f"{name}, keys", exact.error(caches[0, :, 0], wanted[:, :2]), LIMITS[dtype])
    report.error(f"{name}, values", exact.error(caches[1, :, 0], heads), LIMITS[dtype])


def _check_matrix_kernels(report: Report, sizes: Sizes, dtype: torch.dtype) -> None:
    rows, inner, device = sizes.rows, sizes.hidden, sizes.device
    outer, rank, num_adapters = inner + 7, 12, 4
    x, weight, bias = (torch.randn(s).to(device, dtype) for s in ((rows, inner), (outer, inner), (outer,)))
    expected = exact.linear(x, weight, bias)
    report.error(f"linear, {_name(dtype)}", exact.error(operations.linear(x, weight, bias), expected), LIMITS[dtype])
    units, scale = torch.randint(-127, 128, (outer, inner), dtype=torch.int8, device=device), torch.rand(outer)
    scale = scale.to(device)
    expected = exact.linear(x, units.double() * scale.double()[:, None], bias)
    for count in sorted({1, min(rows, 40), rows}):
        out = operations.quantized_linear(x[:count], units, scale, bias)
        report.error(f"int8 linear, {count} rows, {_name(dtype)}", exact.error(out, expected[:count]), LIMITS[dtype])
    _check_blocks(report, x, outer, dtype)
    _check_experts(report, x, dtype)
    half = outer // 2 * 2
    gated = operations.gated_linear(x, weight[:half], "silu")
    expected = exact.activate(exact.linear(x, weight[:half], None), "silu")
    report.error(f"gate, up and SiLU, {_name(dtype)}", exact.error(gated, expected), 2 * LIMITS[dtype])
    pairs = exact.lora_pairs([rank] * num_adapters, inner, outer, dtype)
    values, table = exact.lora_arena(pairs, device)
    adapters = torch.randint(-1, num_adapters, (rows,), dtype=torch.int32, device=device)
    y = torch.randn(rows, outer).to(device, dtype)
    expected = exact.lora(y, x, [(a.to(device), b.to(device)) for a, b in pairs], adapters)
    operations.add_lora(y, x, values, table, adapters, 16)
    report.error(f"LoRA, {_name(dtype)}", exact.error(y, expected), LIMITS[dtype])


def _check_blocks(report: Report, x: Tensor, outer: int, dtype: torch.dtype) -> None:
    """Check matrix multiplication with each kind of weight blocks, and unpacking these blocks."""
    rows, inner = x.shape
    for kind, group, has_minimum in (
        ("int4", 32, True),
        ("float4", 32, False),
        ("int8", 16, False),
        ("float8", 128, False),
    ):
        num_columns = -(-inner // max(group, 32)) * max(group, 32)
        num_groups, num_codes = num_columns // group, num_columns // (2 if kind in KINDS[:2] else 1)
        codes = torch.randint(0, 120, (outer, num_codes), dtype=torch.uint8, device=x.device)
        scale = torch.rand(outer, num_groups, device=x.device) / 64
        weight = BlockWeight(kind, codes, scale, -8 * scale if has_minimum else None, group, inner)
        dense = weight.dense().to(dtype)
        name = f"{kind} blocks, {_name(dtype)}"
        report.error(f"{name}, unpacked", exact.error(operations.unpack(weight, dtype), dense.double()), LIMITS[dtype])
        for count in sorted({1, min(rows, 40), rows}):
            expected = exact.linear(x[:count], dense, None)
            found = operations.block_linear(x[:count], weight)
            report.error(f"{name}, {count} rows", exact.error(found, expected), LIMITS[dtype])


def _check_experts(report: Report, x: Tensor, dtype: torch.dtype) -> None:
    """Check multiplication of each row by two of five experts' matrices, and weighted sums of the products."""
    rows, inner = x.shape
    weight = torch.randn(5, 72, inner).to(x.device, dtype)
    experts = torch.randint(0, 5, (2 * rows,), dtype=torch.int32, device=x.device)
    experts[experts == 3] = 1  # no row uses this one
    product = operations.grouped_linear(x, weight, experts, num_repeats=2)
    error = exact.error(product, exact.grouped_linear(x, weight, experts, None, 2))
    report.error(f"experts, {_name(dtype)}", error, LIMITS[dtype])
    parts, weights = product.view(rows, 2, -1), torch.rand(rows, 2).to(x.device)
    total = operations.weighted_sum(parts, weights)
    error = exact.error(total, (parts.double() * weights.double()[..., None]).sum(1))
    report.error(f"weighted sum, {_name(dtype)}", error, LIMITS[dtype])


def _check_quantized_attention(report: Report, sizes: Sizes, kv: torch.dtype, limit: float) -> None:
    """Check attention over a quantized cache; the error includes the quantization error."""
    device, heads = sizes.device, sizes.heads[0]
    dtype = sizes.query_dtype
    lengths = [c for c, _ in sizes.lengths]
    whole = paged_batch(lengths, lengths, 16)
    batch = PagedBatch(
        query_starts=torch.tensor([0, *(q for _, q in sizes.lengths)]).cumsum(0).int(),
        context_lens=whole.context_lens,
        block_tables=whole.block_tables,
        slot_mapping=whole.slot_mapping,
        positions=whole.positions,
        num_blocks=whole.num_blocks,
    )
    k, v = torch.randn(2, sum(lengths), *heads[1:]).to(dtype).unbind()
    floats = torch.zeros(2, whole.num_blocks, 16, *heads[1:], dtype=dtype)
    operations_cache = torch.zeros(floats.shape, device=device).to(kv)
    scales = KvScales(*torch.zeros(2, whole.num_blocks, 16, heads[1], device=device).unbind())
    slots = whole.slot_mapping
    for source, cache in ((k, floats[0]), (v, floats[1])):
        cache.flatten(0, 1)[slots.long()] = source
    operations.store_kv(
        k.to(device), v.to(device), operations_cache[0], operations_cache[1], slots.to(device), scales=scales
    )
    q = torch.randn(int(batch.query_starts[-1]), heads[0], heads[2]).to(dtype)
    tables = _tables(batch, device)
    scale = heads[2] ** -0.5
    out = operations.paged_attention(
        q.to(device), operations_cache[0], operations_cache[1], *tables, scale, scales=scales
    )
    expected = exact.attention(q, floats[0], floats[1], batch, scale)
    report.error(f"attention over {_name(kv)} KV, {_name(dtype)}", exact.error(out.cpu(), expected), limit)


def _check_invariance(report: Report, sizes: Sizes) -> None:
    """Compare the results of batch-invariant attention and linear layers alone and in a batch."""
    device, heads = sizes.device, sizes.heads[0]
    batch = paged_batch([1500, 700], [1500, 700], 16)
    k, v = (cache.to(device) for cache in _cache(batch, heads, torch.bfloat16))
    q = torch.randn(2200, heads[0], heads[2]).to(device, torch.bfloat16)
    tables = _tables(batch, device)
    together = operations.paged_attention(q, k, v, *tables, 0.1, is_batch_invariant=True)
    num_different = 0
    for begin, end in ((1499, 1500), (1400, 1500), (512, 513), (3, 900)):
        starts, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, end - begin], [end]))
        alone = operations.paged_attention(
            q[begin:end], k, v, tables[0][:1], starts, lens, 0.1, is_batch_invariant=True
        )
        num_different += int((alone != together[begin:end]).sum())
    report.error("batch-invariant attention, differing elements", num_different, 0)
    x, weight = (torch.randn(n, sizes.hidden, device=device, dtype=torch.bfloat16) for n in (300, 1000))
    whole = operations.linear(x, weight)
    num_different = sum(
        int((operations.linear(x[i : i + n], weight) != whole[i : i + n]).sum()) for i, n in [(7, 1), (9, 90)]
    )
    report.error("batch-invariant linear, differing elements", num_different, 0)


def _check_sampling(report: Report, sizes: Sizes) -> None:
    """Compare sampled tokens with those that the same rules select from a sorted float64 distribution with the same
    uniform numbers.
    """
    from gpu_worker.sampling.uniforms import uniforms

    rows, device = 8, sizes.device
    logits = torch.randn(rows, sizes.vocab_size) * 4
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0, 2.0, 1.0, 1.0, 0.5])
    top_k = torch.tensor([0, 0, 40, 0, 5, 50, 0, 1], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.9, 1.0, 0.8, 0.5, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.02, 0.0])
    seeds = np.random.default_rng(0).integers(0, 2**63, rows).astype(np.uint64)
    places = torch.arange(rows, dtype=torch.int32)
    drawn = operations.sample(
        logits.to(device),
        temperature.to(device),
        top_k.to(device),
        top_p.to(device),
        min_p.to(device),
        torch.from_numpy(seeds.view(np.int64)).to(device),
        places.to(device),
        (places + 5).to(device),
    )
    numbers = uniforms(seeds, places.numpy(), (places + 5).numpy())
    params = zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), numbers.tolist(), strict=True)
    expected = [_draw(logits[i], *values) for i, values in enumerate(params)]
    num_different = sum(a != b for a, b in zip(drawn.tolist(), expected, strict=True))
    report.error("sampling, differing tokens of 8", num_different, 0)


def _check_runner(report: Report, device: torch.device) -> None:
    """Check that a batched runner that launches CUDA graphs ahead produces the same tokens as running each sequence
    alone, one step at a time.
    """
    requests = [Request(request.prompt, 12) for request in mixed_workload(6, TINY["vocab_size"], longest_prompt=60)]
    decoder = random_decoder(TINY, device, torch.float32)
    settings: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 32, "max_kv_tokens": 1024, "num_threads": 1}
    ahead = random_runner(TINY, decoder, device, dtype=torch.float32, runs_ahead=True, **settings)
    tokens = drive(ahead, requests, 4, 32)
    in_turn = random_runner(TINY, decoder, device, dtype=torch.float32, runs_ahead=False, cuda_graphs=False, **settings)
    expected = [drive(in_turn, [request], 4, 32)[0] for request in requests]
    num_different = sum(a != b for a, b in zip(tokens, expected, strict=True))
    report.error("launching ahead over recorded steps, differing sequences of 6", num_different, 0)


def _draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, number: float) -> int:
    if temperature == 0:
        return int(logits.argmax())
    p = torch.softmax(logits.double() / temperature, 0)
    likeliest = p.sort(descending=True).values[: top_k or None]
    num_kept = int((likeliest.cumsum(0) < top_p * likeliest.sum()).sum()) + 1 if top_p < 1 else len(likeliest)
    least = max(float(likeliest[num_kept - 1]), min_p * float(likeliest[0]))
    sums = torch.where(p >= least, p, 0).cumsum(0)
    return int((sums <= number * sums[-1]).sum())
