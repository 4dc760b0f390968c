"""Reads the LoRA pairs of experts from PEFT's tensors.

PEFT has two forms: `target_parameters` adapts the parameters in which transformers stacks all experts, with one pair of
tensors for all of them, and older files have a pair for each expert's linear layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.lora.adapter import LoraPair, expert_shapes
from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families import family_of

# Given the path of a module or parameter, returns its rank and the scale of its pair.
Settings = Callable[[str], tuple[int, float]]


class WrongTensorError(ValueError):
    """A tensor is missing or has the wrong shape; the message names it."""


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Reads the pairs of experts from an adapter's tensors."""

    description: DecoderDescription
    tensors: Mapping[str, Tensor]
    prefix: str
    settings: Settings

    def pairs(self, layer: str) -> tuple[dict[str, LoraPair], set[str]]:
        """Return the pairs of the experts of a layer, given its path, and the names of their tensors. Raises
        WrongTensorError if a tensor is missing or has the wrong shape.
        """
        start = re.escape(self.prefix + layer)
        stacked = re.compile(start + r"(\w+\.)?experts(\.base_layer)*\.lora_A\.weight")
        pairs: dict[str, LoraPair] = {}
        names: set[str] = set()
        for name in filter(stacked.fullmatch, self.tensors):
            name_b = name.replace(".lora_A.", ".lora_B.")
            path = name.removeprefix(self.prefix).removesuffix(".lora_A.weight").replace(".base_layer", "")
            pairs |= self._stacked(path, name, name_b)
            names |= {name, name_b}
        if not names and family_of(self.description.architecture).names.experts == "separate":
            return self._separate(layer)
        return pairs, names

    def _stacked(self, path: str, name_a: str, name_b: str) -> dict[str, LoraPair]:
        """Return the pairs for one parameter. The rows of a are sorted by expert, and the columns of b by rank."""
        d = self.description
        a, b = self._tensor(name_a), self._tensor(name_b)
        shapes, order = expert_shapes(d), family_of(d.architecture).names.experts
        hidden, size, count = d.hidden_size, shapes["experts_down"][0], _num_experts(d)
        inner = len(shapes) - 1  # number of matrices before the activation
        kinds = {(hidden, inner * size): "gate_up" if inner == 2 else "up", (size, hidden): "down"}
        is_swapped = order == "stacked"  # in this form, PEFT swaps inputs and outputs
        sizes = (b.shape[0], a.shape[-1]) if is_swapped else (a.shape[-1], b.shape[0])
        if a.dim() != 2 or b.dim() != 2 or sizes not in kinds:
            raise WrongTensorError(
                f"{name_a} is {list(a.shape)} and {name_b} {list(b.shape)}: no parameter has this shape"
            )
        kind = kinds[sizes]
        rank, scale = self.settings(f"{path}.{kind}_proj")
        for name, found in ((name_a, a.shape[0]), (name_b, b.shape[1])):
            if found != count * rank:
                raise WrongTensorError(f"{name} is for rank {found / count:g} of {count} experts, not for rank {rank}")
        a = a.view(count, rank, -1)
        b = b.view(-1, rank, count).permute(2, 0, 1)
        if is_swapped:
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        if kind != "gate_up":
            return {f"experts_{kind}": LoraPair(a, b, scale)}
        gate, up = (b[:, ::2], b[:, 1::2]) if order == "stacked_in_turn" else b.chunk(2, dim=1)
        return {"experts_gate": LoraPair(a, gate, scale), "experts_up": LoraPair(a, up, scale)}

    def _separate(self, layer: str) -> tuple[dict[str, LoraPair], set[str]]:
        """Return the pairs of experts that have linear layers of their own; experts without a pair get zeros."""
        pairs: dict[str, LoraPair] = {}
        names: set[str] = set()
        for module, (num_inputs, num_outputs) in expert_shapes(self.description).items():
            found: dict[int, tuple[Tensor, Tensor]] = {}
            for expert in range(_num_experts(self.description)):
                path = layer + expert_path(self.description, module, expert)
                name_a, name_b = (f"{self.prefix}{path}.lora_{part}.weight" for part in "AB")
                if name_a not in self.tensors and name_b not in self.tensors:
                    continue
                rank, scale = self.settings(path)
                a, b = self._tensor(name_a), self._tensor(name_b)
                for name, tensor, shape in ((name_a, a, (rank, num_inputs)), (name_b, b, (num_outputs, rank))):
                    if tensor.shape != shape:
                        raise WrongTensorError(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
                found[expert] = a, b.float() * scale
                names |= {name_a, name_b}
            if found:
                rank = max(len(a) for a, _ in found.values())
                all_a = torch.zeros(_num_experts(self.description), rank, num_inputs)
                all_b = torch.zeros(_num_experts(self.description), num_outputs, rank)
                for expert, (a, b) in found.items():
                    all_a[expert, : len(a)], all_b[expert, :, : len(a)] = a, b
                pairs[module] = LoraPair(all_a, all_b, 1.0)
        return pairs, names

    def _tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise WrongTensorError(f"{name} is missing")
        return self.tensors[name]


def expert_path(description: DecoderDescription, module: str, expert: int) -> str:
    """Return the path of an expert's linear layer within its layer, in files with a tensor for each expert."""
    names = family_of(description.architecture).names
    path = {"experts_gate": names.expert_gate_up[0], "experts_up": names.expert_gate_up[-1]}.get(module)
    return (path or names.expert_down).format(expert)


def _num_experts(description: DecoderDescription) -> int:
    return next(mixture.num_experts for mixture in description.mixtures if mixture is not None)
