"""Model operations: a PyTorch reference for each, Triton kernels for GPUs, and C++ kernels for CPUs.

The functions here dispatch on the tensors' device; see `kernels.dispatch`.
"""

from kernels.activation import Activation, activate_plain
from kernels.attention_backend import AttentionCase
from kernels.block_weight import BlockWeight, block_weight
from kernels.dispatch import (
    activate,
    add_lora,
    add_rms_norm,
    apply_rotary,
    block_linear,
    can_group,
    can_record_attention,
    can_sample,
    choose_attention,
    describe,
    gated_linear,
    grouped_linear,
    head_linear,
    linear,
    paged_attention,
    quantized_linear,
    rms_norm,
    rotate_and_store,
    sample,
    set_batch_invariant,
    set_float8_inputs,
    store_kv,
    weighted_sum,
)
from kernels.layer_norm import layer_norm
from kernels.quantized_kv import KvScales

__all__ = [
    "Activation",
    "AttentionCase",
    "BlockWeight",
    "KvScales",
    "activate",
    "activate_plain",
    "add_lora",
    "add_rms_norm",
    "apply_rotary",
    "block_linear",
    "block_weight",
    "can_group",
    "can_record_attention",
    "can_sample",
    "choose_attention",
    "describe",
    "gated_linear",
    "grouped_linear",
    "head_linear",
    "layer_norm",
    "linear",
    "paged_attention",
    "quantized_linear",
    "rms_norm",
    "rotate_and_store",
    "sample",
    "set_batch_invariant",
    "set_float8_inputs",
    "store_kv",
    "weighted_sum",
]
