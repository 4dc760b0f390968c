"""Activation functions of feed-forward networks in plain PyTorch."""

from typing import Literal

import torch
from torch import Tensor

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_swiglu"]
# Constants of gpt-oss's clamped SwiGLU.
SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up for x [M, 2F], gate first -> [M, F].

    clamped_swiglu is gate * sigmoid(1.702 gate) * (up + 1), with gate clamped to at most 7 and `up` clamped to -7..7.

    Computed in float64 on a CPU: PyTorch's vector and scalar float32 functions differ in the last bit, and which of
    them processes an element depends on its position in the tensor. Computed in float32 on other devices.
    """
    wide = x.double() if x.device.type == "cpu" else x.float()
    gate, up = wide.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
    return (_of(gate, activation) * up).to(x.dtype)


def activate_plain(x: Tensor, activation: Activation) -> Tensor:
    """Return activation(x), computed as `activate` does; relu2 is the square of relu."""
    return _of(x.double() if x.device.type == "cpu" else x.float(), activation).to(x.dtype)


def _of(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return x / (1.0 + torch.exp(-x))
    if activation == "clamped_swiglu":
        return x / (1.0 + torch.exp(-SWIGLU_SLOPE * x))
    if activation == "relu":
        return torch.relu(x)
    if activation == "relu2":
        return torch.relu(x).square()
    return torch.nn.functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
