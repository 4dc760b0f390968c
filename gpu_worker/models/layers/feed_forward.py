"""Feed-forward networks: dense, and mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from gpu_worker.models.description import Mixture
from gpu_worker.models.layers.linear import AddLora, Linear
from kernels import Activation


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Two matrix products with an activation between them; without a gate, gate_up is just the first matrix.

    Attributes:
        gate_scale, output_scale: Factors of the gates before the activation, and of the output.
    """

    gate_up: Linear
    down: Linear
    activation: Activation
    is_gated: bool = True
    gate_scale: float = 1.0
    output_scale: float = 1.0

    def __call__(self, x: Tensor, add_lora: AddLora | None = None) -> Tensor:
        """Compute x [M, hidden_size] -> [M, hidden_size]."""
        inner = self._inner(x, add_lora)
        out = self.down(inner)
        if add_lora is not None:
            add_lora("down", inner, out)
        return out if self.output_scale == 1.0 else out * self.output_scale

    def _inner(self, x: Tensor, add_lora: AddLora | None) -> Tensor:
        """Return the input of the second product."""
        if self.is_gated and add_lora is None and self.gate_scale == 1.0:
            return self.gate_up.gated(x, self.activation)
        inner = self.gate_up(x)
        if add_lora is not None:
            parts = zip(("gate", "up"), inner.chunk(2, dim=-1), strict=True) if self.is_gated else (("up", inner),)
            for module, part in parts:
                add_lora(module, x, part)
        if self.gate_scale != 1.0:
            inner.chunk(2, dim=-1)[0].mul_(self.gate_scale)
        return self.activate(inner)

    def activate(self, inner: Tensor) -> Tensor:
        """Return the input of the second product, given the output of the first."""
        return (kernels.activate if self.is_gated else kernels.activate_plain)(inner, self.activation)


class Experts:
    """The experts of one layer. Each row is processed by the experts that were chosen for it. Float weights on a GPU
    are stacked, so that one launch computes all experts without reading anything back from the device.
    """

    def __init__(self, experts: list[FeedForward]) -> None:
        self._experts = experts
        self._stacks: tuple[_Stack, _Stack] | None = None
        first = experts[0].gate_up
        if kernels.can_group(first.weight) and first.scale is None:
            self._stacks = _stack([e.gate_up for e in experts]), _stack([e.down for e in experts])
            for i, expert in enumerate(experts):
                # Use views to avoid a copy.
                views = (
                    Linear(stack.weight[i], None if stack.bias is None else stack.bias[i]) for stack in self._stacks
                )
                experts[i] = FeedForward(next(views), next(views), expert.activation, is_gated=expert.is_gated)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, *, weighs_input: bool) -> Tensor:
        """Return the weighted sum [M, hidden_size] of the chosen experts' outputs.

        Args:
            x: [M, hidden_size].
            chosen: int64 [M, num_active].
            weights: Float32 [M, num_active].
            weighs_input: Whether a weight multiplies its expert's input instead of the output.
        """
        num_active = chosen.shape[1]
        if weighs_input:
            x = (x[:, None] * weights[..., None]).to(x.dtype).flatten(0, 1)
        num_repeats = 1 if weighs_input else num_active
        if self._stacks is not None:
            gate_up, down = self._stacks
            experts = chosen.flatten().int()
            first = self._experts[0]
            inner = kernels.grouped_linear(
                x,
                gate_up.weight,
                experts,
                gate_up.bias,
                activation=first.activation if first.is_gated else None,
                num_repeats=num_repeats,
            )
            if not first.is_gated:
                inner = first.activate(inner)
            out = kernels.grouped_linear(inner, down.weight, experts, down.bias)
        else:
            out = torch.empty(chosen.numel(), x.shape[1], dtype=x.dtype, device=x.device)
            flat = chosen.flatten()
            for number, expert in enumerate(self._experts):
                rows = torch.nonzero(flat == number).flatten()
                if len(rows):
                    out[rows] = expert(x[rows // num_repeats])
        # Add them one by one, so that the summation order does not depend on the number of rows.
        parts = out.view(*chosen.shape, -1).float()
        total = torch.zeros_like(parts[:, 0])
        for place in range(num_active):
            total += parts[:, place] if weighs_input else parts[:, place] * weights[:, place, None]
        return total.to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Stack:
    weight: Tensor
    bias: Tensor | None


def _stack(layers: list[Linear]) -> _Stack:
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return _Stack(torch.stack([layer.weight for layer in layers]), torch.stack(biases) if biases else None)


@dataclass(frozen=True, slots=True)
class MixtureLayer:
    """A mixture of experts.

    Attributes:
        router: Float32 router, computed in float32.
        correction: Float32 [num_experts], added to the scores when choosing experts.
        shared: The shared expert, applied to every row.
        shared_gate: [1, hidden_size]; the sigmoid of its output scales the shared expert's output.
    """

    description: Mixture
    router: Linear
    correction: Tensor | None
    experts: Experts
    shared: FeedForward | None
    shared_gate: Linear | None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [M, hidden_size] -> [M, hidden_size]."""
        d = self.description
        chosen, weights = choose_experts(self.router(x.float()), d, self.correction)
        out = self.experts(x, chosen, weights, weighs_input=d.weighs_input)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = (torch.sigmoid(self.shared_gate(x).double()) * shared).to(x.dtype)
            out = out + shared
        return out


def choose_experts(logits: Tensor, d: Mixture, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the experts that the router chooses, int64 [M, num_active], and their float32 weights.

    Scores are computed in float64, so that vector and scalar functions yield the same float32 numbers.

    Args:
        logits: Float32 [M, num_experts].
        d: Description of the router.
        correction: Float32 [num_experts], added to the scores only to choose the experts.
    """
    wide = logits.double()
    if d.scoring == "softmax":
        scores = torch.softmax(wide, dim=-1)
    elif d.scoring == "sigmoid":
        scores = 1.0 / (1.0 + torch.exp(-wide))
    else:
        scores = wide
    rated = scores if correction is None else scores + correction.double()
    if d.num_active_groups < d.num_groups:
        groups = rated.view(len(rated), d.num_groups, -1)
        best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(d.num_active_groups, dim=-1).indices
        is_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=rated.device).scatter_(1, best, value=False)
        rated = groups.masked_fill(is_out[..., None], -torch.inf).flatten(1)
    chosen = rated.topk(d.num_active, dim=-1).indices
    weights = scores.gather(1, chosen)
    if d.scoring == "softmax_of_chosen":
        weights = torch.softmax(weights, dim=-1)
    if d.is_normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + d.sum_offset)
    return chosen, (weights * d.scale).float()
