"""Recurrences over a sequence's tokens in plain PyTorch: gated delta rule, selective scan and causal convolution.

Each function takes the state before the first token and returns the state after the last one. Tokens are processed one
by one and sums over a dimension are reduced pairwise, so results depend only on the sequence's tokens, and neither on
how the sequence was split into calls nor on other sequences. All tensors are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def wide(x: Tensor) -> Tensor:
    """Convert x to float64 on a CPU, where vectorized and scalar float32 functions differ; elsewhere to float32."""
    return x.double() if x.device.type == "cpu" else x.float()


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), float32."""
    x = wide(x)
    return (x / (1.0 + torch.exp(-x))).float()


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), float32."""
    return (1.0 / (1.0 + torch.exp(-wide(x)))).float()


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), float32."""
    return functional.softplus(wide(x)).float()


def fold(x: Tensor, dim: int) -> Tensor:
    """Return the sum over a dimension, by repeatedly adding one half to the other until one element is left."""
    while (size := x.shape[dim]) > 1:
        half = size // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat((folded, x.narrow(dim, size - 1, 1)), dim) if size % 2 else folded
    return x.squeeze(dim)


def unit_rows(x: Tensor) -> Tensor:
    """Divide each row of x [..., D] by its L2 norm; 1e-6 is added to the sum of squares."""
    return x * torch.rsqrt(fold(x * x, -1) + 1e-6)[..., None]


def causal_conv(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolve each channel over the tokens; return the outputs, and the inputs that the next tokens need.

    x [n, T, C], before [n, K - 1, C] (the inputs of the preceding tokens), weight [C, K], bias [C] -> [n, T, C] and [n,
    K - 1, C].
    """
    num_tokens, size = x.shape[1], weight.shape[1]
    inputs = torch.cat((before, x), dim=1)
    out = inputs[:, :num_tokens] * weight[:, 0]
    for place in range(1, size):
        out = out + inputs[:, place : place + num_tokens] * weight[:, place]
    if bias is not None:
        out = out + bias
    return out, inputs[:, num_tokens:]


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """For each token, decay the state, move the value it stores for k towards v by the factor beta, and contract it
    with q.

    q and k [n, T, H, Dk], v [n, T, H, Dv], decay and beta [n, T, H], state [n, H, Dk, Dv] -> [n, T, H, Dv] and the
    state after the last token.
    """
    outs = []
    for t in range(q.shape[1]):
        key = k[:, t, :, :, None]
        state = state * decay[:, t, :, None, None]
        missing = (v[:, t] - fold(state * key, -2)) * beta[:, t, :, None]
        state = state + key * missing[:, :, None]
        outs.append(fold(state * q[:, t, :, :, None], -2))
    return torch.stack(outs, dim=1), state


def channel_scan(x: Tensor, step: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """For each token, decay the state of a channel by exp(step * rates), add step * x times b, and contract it with c.

    x and step [n, T, C], rates [C, N], b and c [n, T, N], state [n, C, N] -> [n, T, C] and the state after the last
    token.
    """
    added, outs = x * step, []
    for t in range(x.shape[1]):
        decay = torch.exp(wide(step[:, t, :, None] * rates)).float()
        state = state * decay + added[:, t, :, None] * b[:, t, None]
        outs.append(fold(state * c[:, t, None], -1))
    return torch.stack(outs, dim=1), state


def selective_scan(
    x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """For each token, decay the state, add the outer product of step * x and b, and contract it with c.

    x [n, T, H, P], step and decay [n, T, H], b and c [n, T, G, N] for groups of H / G heads, state [n, H, P, N] -> [n,
    T, H, P] and the state after the last token.
    """
    heads_each = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(heads_each, dim=2), c.repeat_interleave(heads_each, dim=2)
    added = x * step[..., None]
    outs = []
    for t in range(x.shape[1]):
        state = state * decay[:, t, :, None, None] + added[:, t, :, :, None] * b[:, t, :, None]
        outs.append(fold(state * c[:, t, :, None], -1))
    return torch.stack(outs, dim=1), state
