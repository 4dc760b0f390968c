"""Writes keys and values into the paged cache, in plain PyTorch."""

from torch import Tensor

from kernels.quantized_kv import KvScales, store_quantized_kv


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, scales: KvScales | None = None
) -> None:
    """Write row i of k and v [M, Hk, D] to slot slot_mapping[i] of the caches [num_blocks, block_size, Hk, D].

    A slot is block * block_size + offset. With `scales`, the cache is quantized and the scales are written as well;
    without them, a row with slot -1 is not written.
    """
    if scales is not None:
        store_quantized_kv(k, v, k_cache, v_cache, slot_mapping, scales)
        return
    slots = slot_mapping.long()
    is_kept = slots >= 0
    if not is_kept.all():
        k, v, slots = k[is_kept], v[is_kept], slots[is_kept]
    k_cache.flatten(0, 1).index_copy_(0, slots, k.to(k_cache.dtype))
    v_cache.flatten(0, 1).index_copy_(0, slots, v.to(v_cache.dtype))
