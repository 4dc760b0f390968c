from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels import KvScales
from kernels.attention import paged_attention
from kernels.flash_attention import load_flash_attention
from tests.kernels import exact
from tests.kernels.paged import paged_batch

HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)


@pytest.fixture(autouse=True)
def _forget_flash_attention() -> Iterator[None]:
    load_flash_attention.cache_clear()
    yield
    load_flash_attention.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def version_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    softcap: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
) -> Tensor:
    lens = cu_seqlens_k.diff()
    assert causal
    assert max_seqlen_k >= int(lens.max())
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    return paged_attention(q, k, v, block_table, cu_seqlens_q, lens, softmax_scale, _window(window_size), softcap)


def version_3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    softcap: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    assert causal
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    window = _window(window_size)
    return paged_attention(q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens, softmax_scale, window, softcap)


def version_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    softcap: float,
    causal: bool,
    window_size: tuple[int | None, int | None],
) -> tuple[Tensor, None]:
    assert causal == (window_size == (None, None))
    window = _window((-1 if window_size[0] is None else window_size[0], 0))
    return paged_attention(q, k, v, page_table, cu_seqlens_q, seqused_k, softmax_scale, window, softcap), None


def _window(sizes: tuple[int, int]) -> int | None:
    return None if sizes[0] < 0 else sizes[0] + 1


VERSIONS: dict[int, tuple[str, dict[str, Any]]] = {
    2: ("flash_attn", {"flash_attn_varlen_func": version_2}),
    3: ("flash_attn_interface", {"flash_attn_with_kvcache": version_3}),
    4: ("flash_attn.cute", {"flash_attn_varlen_func": version_4}),
}


def install_versions(monkeypatch: pytest.MonkeyPatch, *versions: int) -> None:
    for version, (name, functions) in VERSIONS.items():
        monkeypatch.setitem(sys.modules, name, None)
        if version in versions:
            install(monkeypatch, name, **functions)


@pytest.mark.parametrize(
    ("installed", "capability", "chosen"),
    [
        ((), HOPPER, None),
        ((2, 3, 4), HOPPER, 3),
        ((2, 4), HOPPER, 4),
        ((2,), HOPPER, 2),
        ((2, 3, 4), BLACKWELL, 4),
        ((3,), BLACKWELL, None),
        ((2, 3, 4), AMPERE, 2),
    ],
)
def test_the_flash_attention_that_suits_the_device(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[int, ...], capability: tuple[int, int], chosen: int | None
) -> None:
    install_versions(monkeypatch, *installed)
    found = load_flash_attention(capability)
    assert (found.version if found else None) == chosen


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("version", "capability"), [(2, AMPERE), (3, HOPPER), (4, BLACKWELL)])
def test_flash_attention_is_asked_for_the_same_thing(
    monkeypatch: pytest.MonkeyPatch, version: int, capability: tuple[int, int], window: int | None
) -> None:
    install_versions(monkeypatch, version)
    batch = paged_batch([40, 3, 12], [1, 3, 5], 16)
    q, cache = torch.randn(9, 4, 8), torch.randn(batch.num_blocks, 16, 2, 8)
    tables = (batch.block_tables, batch.query_starts, batch.context_lens)
    flash = load_flash_attention(capability)
    assert flash is not None
    expected = paged_attention(q, cache, cache, *tables, 0.3, window, 1.5)
    assert torch.equal(flash(q, cache, cache, *tables, 0.3, window, 1.5), expected)


@pytest.mark.parametrize(
    ("version", "capability", "block_size", "can_run"),
    [(2, AMPERE, 16, False), (2, AMPERE, 256, True), (3, HOPPER, 16, True), (4, BLACKWELL, 16, False)],
)
def test_flash_attention_takes_only_the_blocks_it_can(
    monkeypatch: pytest.MonkeyPatch, version: int, capability: tuple[int, int], block_size: int, can_run: bool
) -> None:
    install_versions(monkeypatch, version)
    flash = load_flash_attention(capability)
    assert flash is not None
    q, cache = torch.zeros(1, 4, 64).bfloat16(), torch.zeros(1, block_size, 2, 64).bfloat16()
    assert flash.can_run(q, cache) == can_run
    assert not flash.can_run(q, cache.char())
    assert not flash.can_run(q.float(), cache.float())
    assert not flash.can_run(q[..., :60], cache[..., :60])


def test_a_cpu_takes_the_references() -> None:
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
