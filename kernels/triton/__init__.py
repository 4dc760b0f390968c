"""The model operations as Triton kernels, with the signatures of the PyTorch references.

Importing this package needs `triton`. Under `TRITON_INTERPRET=1`, set before Triton is first imported, the kernels run
on CPU tensors.
"""

from kernels.triton.activation import activate
from kernels.triton.attention import paged_attention, segment_keys_for
from kernels.triton.block_linear import block_linear, unpack
from kernels.triton.dependent_launch import set_dependent_launch
from kernels.triton.float8_rows import quantize_rows
from kernels.triton.grouped_linear import grouped_linear, weighted_sum
from kernels.triton.kv_store import store_kv
from kernels.triton.linear import gated_linear, linear, quantized_linear
from kernels.triton.lora import add_lora
from kernels.triton.rms_norm import add_rms_norm, rms_norm
from kernels.triton.rotary import apply_rotary
from kernels.triton.rotate_and_store import rotate_and_store
from kernels.triton.sampling import sample

__all__ = [
    "activate",
    "add_lora",
    "add_rms_norm",
    "apply_rotary",
    "block_linear",
    "gated_linear",
    "grouped_linear",
    "linear",
    "paged_attention",
    "quantize_rows",
    "quantized_linear",
    "rms_norm",
    "rotate_and_store",
    "sample",
    "segment_keys_for",
    "set_dependent_launch",
    "store_kv",
    "unpack",
    "weighted_sum",
]
