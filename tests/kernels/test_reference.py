import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from kernels import activate, add_rms_norm, apply_rotary, linear, paged_attention, rms_norm, store_kv
from tests.kernels import exact
from tests.kernels.paged import paged_batch


def test_rms_norm_of_a_row_computed_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0]])  # mean square 12.5
    out = rms_norm(x, torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(out, torch.tensor([[3 / 12.5**0.5, 8 / 12.5**0.5]]))


def test_add_rms_norm_also_returns_the_sum() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, functional.rms_norm(total, (8,), weight, 1e-5))


def test_rotary_turns_a_quarter() -> None:
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    out, _ = apply_rotary(q, q, cos=torch.zeros(1, 2), sin=torch.ones(1, 2))
    assert out.tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]


def test_gated_activation() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    torch.testing.assert_close(activate(torch.cat((gate, up), dim=-1), "silu"), functional.silu(gate) * up)


def test_store_kv_writes_the_named_slots_only() -> None:
    k_cache = torch.zeros(3, 2, 1, 8)
    v_cache = torch.zeros(3, 2, 1, 8)
    store_kv(torch.ones(2, 1, 8), torch.full((2, 1, 8), 2.0), k_cache, v_cache, torch.tensor([5, 0]))
    assert k_cache[..., 0, 0].tolist() == [[1, 0], [0, 0], [0, 1]]
    assert v_cache[..., 0, 0].tolist() == [[2, 0], [0, 0], [0, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(576, 960), (1536, 576), (37, 53), (5, 1)])
def test_linear_rows_do_not_depend_on_the_batch(inner: int, outer: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(40, inner).to(dtype), torch.randn(outer, inner).to(dtype)
    whole = linear(x, weight)
    torch.testing.assert_close(whole, functional.linear(x, weight), rtol=2e-2, atol=1e-3 * inner**0.5)
    for num_rows in range(1, 20):
        assert torch.equal(linear(x[20 - num_rows : 20], weight), whole[20 - num_rows : 20])


def test_elementwise_rows_do_not_depend_on_the_batch() -> None:
    x, residual, weight = torch.randn(70, 1536) * 3, torch.randn(70, 1536), torch.randn(1536)
    normed, _ = add_rms_norm(x, residual, weight, 1e-5)
    gated = activate(x, "silu")
    for begin, end in [(0, 1), (69, 70), (3, 24), (1, 70)]:
        assert torch.equal(add_rms_norm(x[begin:end], residual[begin:end], weight, 1e-5)[0], normed[begin:end])
        assert torch.equal(activate(x[begin:end], "silu"), gated[begin:end])


def test_a_soft_cap_limits_scores() -> None:
    batch = paged_batch([20, 3], [4, 3], block_size=16)
    q, cache = torch.randn(7, 4, 8) * 3, torch.randn(batch.num_blocks, 16, 2, 8)
    tables = (batch.block_tables, batch.query_starts, batch.context_lens)
    out = paged_attention(q, cache, cache, *tables, 1.0, 9, 2.0)
    assert exact.error(out, exact.attention(q, cache, cache, batch, 1.0, 9, 2.0)) < 1e-6


@pytest.mark.parametrize("window", [None, 1, 50])
def test_attention_is_causal_softmax_attention(window: int | None) -> None:
    length, heads, kv_heads, dim = 150, 6, 2, 16
    batch = paged_batch([length], [length], block_size=16)
    q, k, v = torch.randn(length, heads, dim), torch.randn(length, kv_heads, dim), torch.randn(length, kv_heads, dim)
    k_cache = torch.full((batch.num_blocks, 16, kv_heads, dim), torch.nan)
    v_cache = k_cache.clone()
    store_kv(k, v, k_cache, v_cache, batch.slot_mapping)
    out = paged_attention(
        q, k_cache, v_cache, batch.block_tables, batch.query_starts, batch.context_lens, dim**-0.5, window
    )
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    expected = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 70])
def test_attention_does_not_depend_on_batch_or_chunks(window: int | None, dtype: torch.dtype) -> None:
    lengths, heads, kv_heads, dim, scale = [300, 7, 141], 9, 3, 64, 0.125
    whole = paged_batch(lengths, lengths, block_size=16)
    k_cache = torch.randn(whole.num_blocks, 16, kv_heads, dim).to(dtype)
    v_cache = torch.randn_like(k_cache)
    q = torch.randn(sum(lengths), heads, dim)
    together = paged_attention(
        q, k_cache, v_cache, whole.block_tables, whole.query_starts, whole.context_lens, scale, window
    )
    for i, length in enumerate(lengths):
        first = int(whole.query_starts[i])
        begin = 0
        while begin < length:
            end = min(length, begin + [1, 3, 30, 8, 129][begin % 5])
            part = paged_attention(
                q[first + begin : first + end],
                k_cache,
                v_cache,
                whole.block_tables[i : i + 1],
                torch.tensor([0, end - begin]),
                torch.tensor([end]),
                scale,
                window,
            )
            assert torch.equal(part, together[first + begin : first + end])
            begin = end


_COMPARE_ROWS = """
import torch, kernels
torch.manual_seed(1)
x, weight = torch.randn(40, 576), torch.randn(96, 576)
whole = kernels.linear(x, weight)
assert all(torch.equal(kernels.linear(x[20 - n : 20], weight), whole[20 - n : 20]) for n in range(1, 20))
"""


def test_linear_rows_do_not_depend_on_the_batch_without_avx_512() -> None:
    """PyTorch's BLAS then uses other code."""
    subprocess.run(
        [sys.executable, "-c", _COMPARE_ROWS], env={**os.environ, "MKL_ENABLE_INSTRUCTIONS": "AVX2"}, check=True
    )
