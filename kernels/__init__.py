"""Model operations: the PyTorch reference of each, Triton kernels for GPUs, and C++ kernels for CPUs.

The names here choose by the tensors' device; see `kernels.dispatch`.
"""

from kernels.dispatch import (
    add_lora,
    add_rms_norm,
    apply_rotary,
    can_sample,
    describe,
    linear,
    paged_attention,
    quantized_linear,
    rms_norm,
    sample,
    set_batch_invariant,
    silu_mul,
    store_kv,
)
from kernels.quantized_kv import KvScales

__all__ = [
    "KvScales",
    "add_lora",
    "add_rms_norm",
    "apply_rotary",
    "can_sample",
    "describe",
    "linear",
    "paged_attention",
    "quantized_linear",
    "rms_norm",
    "sample",
    "set_batch_invariant",
    "silu_mul",
    "store_kv",
]
