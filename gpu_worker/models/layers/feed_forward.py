"""Feed-forward networks: dense, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from gpu_worker.models.description import Mixture
from gpu_worker.models.layers.linear import AddExpertLora, AddLora, Linear
from kernels import Activation


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Two matrix multiplications with an activation between them; without a gate, gate_up is just the first matrix.

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

    def __init__(self, experts: list[FeedForward], held: range | None = None) -> None:
        """Use the experts of a rank: those whose numbers are in `held`, or all."""
        self._experts, self._held = experts, held
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

    def __call__(
        self, x: Tensor, chosen: Tensor, weights: Tensor, *, weighs_input: bool, add_lora: AddExpertLora | None = None
    ) -> Tensor:
        """Return the weighted sum [M, hidden_size] of the outputs of the chosen experts that this rank holds.

        Args:
            x: [M, hidden_size].
            chosen: int64 [M, num_active].
            weights: Float32 [M, num_active].
            weighs_input: Whether a weight multiplies its expert's input instead of the output.
        """
        num_active, experts, first = chosen.shape[1], chosen.flatten().int(), self._experts[0]
        if self._held is not None:
            experts, weights = self._of_rank(experts, weights)
        if weighs_input:
            x = (x[:, None] * weights[..., None]).to(x.dtype).flatten(0, 1)
        num_repeats = 1 if weighs_input else num_active
        if self._stacks is not None:
            gate_up, down = self._stacks
            fused = first.activation if first.is_gated and add_lora is None else None
            inner = kernels.grouped_linear(
                x, gate_up.weight, experts, gate_up.bias, activation=fused, num_repeats=num_repeats
            )
            if fused is None:
                inner = self._activated(x, inner, experts, num_repeats, add_lora)
            out = kernels.grouped_linear(inner, down.weight, experts, down.bias, is_partial=self._held is not None)
        elif add_lora is None:
            out = _by_expert(self._experts, x, experts, num_repeats)
        else:
            inner = _by_expert([expert.gate_up for expert in self._experts], x, experts, num_repeats)
            inner = self._activated(x, inner, experts, num_repeats, add_lora)
            out = _by_expert([expert.down for expert in self._experts], inner, experts)
        if add_lora is not None:
            add_lora("experts_down", experts, inner, out)
        return kernels.weighted_sum(out.view(*chosen.shape, -1), None if weighs_input else weights)

    def _of_rank(self, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indexes of chosen experts among this rank's experts, and their weights.

        Experts of other ranks get the index after the last one, and the weight 0.
        """
        assert self._held is not None
        numbers = experts - self._held.start
        is_held = (numbers >= 0) & (numbers < len(self._held))
        return torch.where(is_held, numbers, len(self._held)), weights * is_held.view_as(weights)

    def _activated(
        self, x: Tensor, inner: Tensor, experts: Tensor, num_repeats: int, add_lora: AddExpertLora | None
    ) -> Tensor:
        """Add the adapters' outputs to `inner`, the outputs of the first multiplication; return the inputs of the
        second.
        """
        first = self._experts[0]
        if add_lora is not None:
            inputs = x.repeat_interleave(num_repeats, dim=0)
            parts = zip(("gate", "up"), inner.chunk(2, dim=-1), strict=True) if first.is_gated else (("up", inner),)
            for module, part in parts:
                add_lora(f"experts_{module}", experts, inputs, part)
        return first.activate(inner)


def _by_expert(
    experts: Sequence[Callable[[Tensor], Tensor]], x: Tensor, chosen: Tensor, num_repeats: int = 1
) -> Tensor:
    """Return the output of expert chosen[i] for row i // num_repeats of x; 0 if there is no such expert."""
    out: Tensor | None = None
    for number, expert in enumerate(experts):
        rows = torch.nonzero(chosen == number).flatten()
        if len(rows):
            made = expert(x[rows // num_repeats])
            if out is None:
                out = made.new_zeros(len(chosen), made.shape[1])
            out[rows] = made
    if out is None:  # compute one row to determine the number of outputs
        made = experts[0](x[:1])
        out = made.new_zeros(len(chosen), made.shape[1])
    return out


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
        shared_gate: [1, hidden_size]; the sigmoid of its output scales the shared expert's output.
    """

    description: Mixture
    router: Linear
    correction: Tensor | None
    experts: Experts
    shared: FeedForward | None
    shared_gate: Linear | None

    def __call__(
        self, x: Tensor, add_lora: AddLora | None = None, add_expert_lora: AddExpertLora | None = None
    ) -> Tensor:
        """Compute x [M, hidden_size] -> [M, hidden_size]."""
        d = self.description
        chosen, weights = choose_experts(self.router(x.float()), d, self.correction)
        out = self.experts(x, chosen, weights, weighs_input=d.weighs_input, add_lora=add_expert_lora)
        if self.shared is not None:
            shared = self.shared(x, None if add_lora is None else _of_shared(add_lora))
            if self.shared_gate is not None:
                shared = (torch.sigmoid(self.shared_gate(x).double()) * shared).to(x.dtype)
            out = out + shared
        return out


def _of_shared(add_lora: AddLora) -> AddLora:
    """Return `add_lora` for the modules of the shared expert, whose names have a prefix."""
    return lambda module, x, y: add_lora(f"shared_{module}", x, y)


def choose_experts(logits: Tensor, d: Mixture, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the experts that the router chooses, int64 [M, num_active], and their float32 weights.

    Scores are computed in float64, so that vector and scalar functions yield the same float32 numbers.

    Args:
        logits: Float32 [M, num_experts].
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
