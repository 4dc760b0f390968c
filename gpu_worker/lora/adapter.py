"""An adapter in the form in which it is read from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.models.description import ChannelMamba, DecoderDescription, DeltaNet, ShortConv
from gpu_worker.models.families import family_of
from gpu_worker.models.families.family import DELTA_NET_INPUTS

_LEAST_RANK = 8
_SHARED = ("shared_gate", "shared_up", "shared_down")
_EXPERT_MODULES = ("experts_gate", "experts_up", "experts_down", *_SHARED)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """Adds scale * (x a^T) b^T to the output of a linear layer with input x: a [R, K], b [N, R].

    For a module of experts, a [E, R, K] and b [E, N, R] contain one pair for each expert.
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @property
    def is_of_experts(self) -> bool:
        """Whether every expert has its own pair."""
        return self.a.dim() == 3


@dataclass(frozen=True, slots=True)
class PackedPairs:
    """An adapter's pairs in the layout of the device, prepared before they are copied there.

    Attributes:
        values: One-dimensional; a [R, K] and scaled b [R, N] of each pair, with R padded.
        table: int64 [pairs of the model, 2]; the start of a in `values`, and R, which is 0 if the adapter lacks the
            pair.
    """

    values: Tensor
    table: Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """The contents of an adapter's folder, in host memory and in the data types of the file.

    Attributes:
        layers: For each layer, LoRA pairs by module; empty for a prompt adapter.
        prompt_table: Embeddings of a prompt adapter: float32 [num_virtual_tokens, hidden_size].
        packed: A packed copy of the pairs of this rank in pinned memory; None if they are packed when they are placed.
    """

    path: str
    fingerprint: str
    layers: tuple[Mapping[str, LoraPair], ...] = ()
    prompt_table: Tensor | None = None
    packed: PackedPairs | None = None

    @property
    def rank(self) -> int:
        """The largest rank of any pair; 0 for a prompt adapter."""
        return max((pair.rank for pairs in self.layers for pair in pairs.values()), default=0)

    @property
    def host_bytes(self) -> int:
        """Size of the adapter in host memory, in bytes."""
        tensors = [tensor for pairs in self.layers for pair in pairs.values() for tensor in (pair.a, pair.b)]
        if self.prompt_table is not None:
            tensors.append(self.prompt_table)
        if self.packed is not None:
            tensors.append(self.packed.values)
        return sum(tensor.nbytes for tensor in tensors)

    def device_bytes(self, element_bytes: int) -> int:
        """Return the size of the adapter's pairs on the device in bytes, at `element_bytes` per element."""
        pairs = [pair for layer in self.layers for pair in layer.values()]
        rows = (padded_rank(pair.rank) * (pair.a.numel() + pair.b.numel()) // pair.rank for pair in pairs)
        return sum(rows) * element_bytes

    @property
    def has_experts(self) -> bool:
        """Whether it adapts experts, including shared ones."""
        return any(module in _EXPERT_MODULES for pairs in self.layers for module in pairs)

    @property
    def adapts_routed_experts(self) -> bool:
        """Whether any of its pairs applies to the experts of a mixture."""
        return any(pair.is_of_experts for pairs in self.layers for pair in pairs.values())


def padded_rank(rank: int) -> int:
    """Return the rank to which pairs are padded so that several adapters can be batched: a power of two, at least 8.

    It depends only on the adapter, so that the order of summation does not depend on other adapters in the batch.
    """
    return max(_LEAST_RANK, 1 << (rank - 1).bit_length())


def module_shapes(description: DecoderDescription) -> dict[str, tuple[int, int]]:
    """Return the input and output sizes of each linear layer that supports LoRA."""
    shapes = {**_attention_shapes(description), **_recurrent_shapes(description)}
    held = set[str]().union(*(layer_modules(description, i) for i in range(description.num_layers)))
    return {module: shape for module, shape in shapes.items() if module in held}


def layer_modules(description: DecoderDescription, layer: int) -> set[str]:
    """Return the modules of a layer, without the experts of a mixture (`expert_shapes`), which are stacked tensors."""
    d, modules = description, set[str]()
    if d.recurrent[layer] is not None:
        # PEFT creates no adapters for the output projection of Mamba.
        modules |= {*_recurrent_shapes(d)}
    if d.has_attention(layer):
        factors = {"kv_a", "q_a"} if d.latent is not None and d.latent.q_rank else {"kv_a"}
        modules |= {"q", "o"} | ({"k", "v"} if d.latent is None else factors)
    if d.parts[layer] != "mixer" and d.mixtures[layer] is None:
        modules |= {"gate", "up", "down"} if d.has_gated_ffn else {"up", "down"}
    if (mixture := d.mixtures[layer]) is not None and mixture.shared_size:
        modules |= {*_SHARED} if d.has_gated_ffn else {*_SHARED[1:]}
    return modules


def expert_shapes(description: DecoderDescription) -> dict[str, tuple[int, int]]:
    """Return the input and output sizes of the matrices of each expert; empty if there are no experts."""
    d, mixture = description, next((mixture for mixture in description.mixtures if mixture is not None), None)
    if mixture is None:
        return {}
    inner = ("experts_gate", "experts_up") if d.has_gated_ffn else ("experts_up",)
    return {
        **dict.fromkeys(inner, (d.hidden_size, mixture.expert_size)),
        "experts_down": (mixture.expert_size, d.hidden_size),
    }


def _recurrent_shapes(d: DecoderDescription) -> dict[str, tuple[int, int]]:
    kind = next((kind for kind in d.recurrent if kind is not None), None)
    if kind is None:
        return {}
    if isinstance(kind, DeltaNet):
        values = kind.value_heads * kind.value_dim
        sizes = {"qkv": kind.channels, "z": values, "b": kind.value_heads, "a": kind.value_heads}
        if kind.is_in_turn:
            sizes = {"qkvz": kind.channels + values, "ba": 2 * kind.value_heads}
        return {
            **{module: (d.hidden_size, size) for module, size in sizes.items()},
            "mixer_out": (values, d.hidden_size),
        }
    if isinstance(kind, ShortConv):
        return {"in": (d.hidden_size, 3 * kind.size), "mixer_out": (kind.size, d.hidden_size)}
    if isinstance(kind, ChannelMamba):
        return {"in": (d.hidden_size, 2 * kind.size)}
    return {"in": (d.hidden_size, kind.size + kind.channels + kind.num_heads)}


def _attention_shapes(d: DecoderDescription) -> dict[str, tuple[int, int]]:
    ffn = {
        "gate": (d.hidden_size, d.intermediate_size),
        "up": (d.hidden_size, d.intermediate_size),
        "down": (d.intermediate_size, d.hidden_size),
    }
    mixture = next((mixture for mixture in d.mixtures if mixture is not None), None)
    if mixture is not None:
        ffn |= dict.fromkeys(_SHARED[:2], (d.hidden_size, mixture.shared_size))
        ffn["shared_down"] = (mixture.shared_size, d.hidden_size)
    attended = d.num_heads * d.value_dim
    if d.latent is not None:
        q_inputs = d.latent.q_rank or d.hidden_size
        factors = {} if d.latent.q_rank is None else {"q_a": (d.hidden_size, d.latent.q_rank)}
        return {
            **factors,
            "q": (q_inputs, d.num_heads * d.query_dim),
            "kv_a": (d.hidden_size, d.head_dim),
            "o": (attended, d.hidden_size),
            **ffn,
        }
    q_size, kv_size = d.num_heads * d.query_rows, d.num_kv_heads * d.head_dim
    return {
        "q": (d.hidden_size, q_size),
        "k": (d.hidden_size, kv_size),
        "v": (d.hidden_size, kv_size),
        "o": (attended, d.hidden_size),
        **ffn,
    }


def zero_adapter(description: DecoderDescription, *, of_experts: bool = False) -> Adapter:
    """Return an adapter that adds zero to the outputs of all linear layers outside experts or, if `of_experts`, of the
    experts of one layer; for the experts of all layers, it would take too much memory.
    """
    if of_experts:
        first, count = next(
            (i, mixture.num_experts) for i, mixture in enumerate(description.mixtures) if mixture is not None
        )
        pairs = {
            module: LoraPair(torch.zeros(count, 1, inputs), torch.zeros(count, outputs, 1), 1.0)
            for module, (inputs, outputs) in expert_shapes(description).items()
        }
        return Adapter("", "zero of experts", tuple(pairs if i == first else {} for i in range(description.num_layers)))
    layer = {
        module: LoraPair(torch.zeros(1, inputs), torch.zeros(outputs, 1), 1.0)
        for module, (inputs, outputs) in module_shapes(description).items()
        if module not in _SHARED
    }
    return Adapter("", "zero", (layer,) * description.num_layers)


def module_paths(description: DecoderDescription) -> dict[str, tuple[str, ...]]:
    """Return our module names for the path of each linear layer in the files; if a layer has several modules, their
    rows are concatenated.
    """
    names, latent = family_of(description.architecture).names, description.latent
    if latent is not None:
        attention: dict[str, tuple[str, ...]] = {names.latent_q: ("q",), names.latent_kv_down: ("kv_a",)}
        if latent.q_rank is not None:
            del attention[names.latent_q]
            attention |= {names.latent_q_down: ("q_a",), names.latent_q_up: ("q",)}
    else:
        attention = _paths(names.qkv, ("q", "k", "v"))
    ffn = {**_paths(names.gate_up, ("gate", "up") if description.has_gated_ffn else ("up",)), names.down: ("down",)}
    if any(mixture is not None and mixture.shared_size for mixture in description.mixtures):
        gate_up = names.shared_gate_up if description.has_gated_ffn else names.shared_gate_up[-1:]
        inner = _SHARED[:2] if description.has_gated_ffn else _SHARED[1:2]
        ffn |= _paths(tuple(names.shared_prefix + name for name in gate_up), inner)
        ffn[names.shared_prefix + names.shared_down] = _SHARED[2:]
    recurrent, prefix = {}, names.recurrent_prefix
    nets = [kind for kind in description.recurrent if isinstance(kind, DeltaNet)]
    if nets:
        inputs = [path for part in DELTA_NET_INPUTS[nets[0].is_in_turn] for path in part]
        recurrent = {prefix + path: (path.removeprefix("in_proj_"),) for path in inputs}
    elif any(description.recurrent):
        recurrent = {f"{prefix}in_proj": ("in",)}
    if recurrent:
        recurrent[f"{prefix}out_proj"] = ("mixer_out",)
    paths = {**attention, names.attention_output: ("o",), **ffn, **recurrent}
    held = module_shapes(description)
    return {path: modules for path, modules in paths.items() if held.keys() >= {*modules}}


def _paths(names: tuple[str, ...], modules: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {names[0]: modules} if len(names) == 1 else {name: (m,) for name, m in zip(names, modules, strict=True)}


def module_layer_elements(description: DecoderDescription) -> int:
    """Number of elements per unit of rank in the widest module of a layer: the unit of the module-layer cache sizes."""
    return max(sum(shape) for shape in module_shapes(description).values())
