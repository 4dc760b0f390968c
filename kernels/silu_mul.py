"""The gated activation of the feed-forward layer in plain PyTorch."""

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for gate_up [M, 2F], gate first -> [M, F].

    On CPU the sigmoid is taken in float64: PyTorch's vector and scalar float32 `exp` differ in the last bit, and which
    of them an element meets depends on its place in the tensor.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.device.type != "cpu":
        return torch.nn.functional.silu(gate) * up
    wide = gate.double()
    return (wide / (1.0 + torch.exp(-wide)) * up).to(gate_up.dtype)
