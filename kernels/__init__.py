"""Model operations: the PyTorch reference of each, and the CPU kernels in C++."""

from kernels.attention import paged_attention
from kernels.kv_store import store_kv
from kernels.linear import linear
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import apply_rotary
from kernels.silu_mul import silu_mul

__all__ = ["add_rms_norm", "apply_rotary", "linear", "paged_attention", "rms_norm", "silu_mul", "store_kv"]
