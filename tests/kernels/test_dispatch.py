from __future__ import annotations

import pytest
import torch

import kernels
from kernels import KvScales
from kernels.attention import paged_attention
from tests.kernels import exact
from tests.kernels.paged import paged_batch


def test_a_cpu_uses_the_reference_kernels() -> None:
    batch = paged_batch([20, 9], [4, 1], 4)
    q, cache = torch.randn(5, 4, 8), torch.randn(batch.num_blocks, 4, 2, 8)
    tables = (batch.block_tables, batch.query_starts, batch.context_lens)
    assert torch.equal(
        kernels.paged_attention(q, cache, cache, *tables, 0.3), paged_attention(q, cache, cache, *tables, 0.3)
    )
    with pytest.raises(RuntimeError, match="CUDA"):
        kernels.set_batch_invariant(True)


@pytest.mark.parametrize(("dtype", "error"), [(torch.int8, 0.02), (torch.float8_e4m3fn, 0.06)])
def test_a_quantized_cache_on_a_cpu(dtype: torch.dtype, error: float) -> None:
    batch = paged_batch([20, 9], [20, 9], 4)
    q, k, v = torch.randn(29, 4, 16), torch.randn(29, 2, 16), torch.randn(29, 2, 16)
    shape = (batch.num_blocks, 4, 2, 16)
    caches, scales = torch.zeros(2, *shape).to(dtype), KvScales(*torch.zeros(2, *shape[:-1]).unbind())
    kernels.store_kv(k, v, caches[0], caches[1], batch.slot_mapping, scales=scales)
    tables = (batch.block_tables, batch.query_starts, batch.context_lens)
    out = kernels.paged_attention(q, caches[0], caches[1], *tables, 0.25, scales=scales)
    floats = torch.zeros(2, *shape)
    kernels.store_kv(k, v, floats[0], floats[1], batch.slot_mapping)
    assert 0 < exact.error(out, exact.attention(q, floats[0], floats[1], batch, 0.25)) < error
