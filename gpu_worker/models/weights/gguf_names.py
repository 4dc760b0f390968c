"""Names of tensors in GGUF files, from those in the safetensors files of a family."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from gpu_worker.models.families.family import Names

# Newer files have this matrix in two parts, `attn_k_b` and `attn_v_b`.
LATENT_KV_UP = "attn_kv_b"
_EXPERT = re.compile(r"\d+")
_SEPARATE = Names()


def separate_experts(names: Names) -> Names:
    """Return the names that stand for the tensors of a GGUF file, in which the gate and up matrices of experts are
    never joined.
    """
    if names.experts != "separate":
        gate_up, down = _SEPARATE.expert_gate_up, _SEPARATE.expert_down
        names = replace(names, experts="separate", expert_gate_up=gate_up, expert_down=down)
    if len(names.shared_gate_up) == 1:
        names = replace(names, shared_gate_up=_SEPARATE.shared_gate_up)
    return names


class GgufNames:
    """The names of one file's tensors."""

    def __init__(self, names: Names, tensors: Collection[str]) -> None:
        """`names` are those of the family, with separate experts; `tensors` are the file's."""
        final = "output_norm" if "output_norm.weight" in tensors else "token_embd_norm"  # of LFM2
        self._top = {names.embedding: "token_embd", names.final_norm: final, names.head: "output"}
        self._prefix = names.layer.partition("{}")[0]
        # With norms around both sublayers, the one before the feed-forward network has a name of its own.
        has_ffn_norm = any(name.endswith(".ffn_norm.weight") for name in tensors)
        is_around = names.ffn_norm != names.attention_output_norm
        layer = {
            names.input_norm: "attn_norm",
            names.ffn_norm: "ffn_norm" if has_ffn_norm else "post_attention_norm",
            names.q_norm: "attn_q_norm",
            names.k_norm: "attn_k_norm",
            names.attention_output: "attn_output",
            names.down: "ffn_down",
            names.ffn_output_norm: "post_ffw_norm",
            names.router: "ffn_gate_inp",
            names.shared_prefix + names.shared_down: "ffn_down_shexp",
            names.shared_gate: "ffn_gate_inp_shexp",
            names.latent_q: "attn_q",
            names.latent_q_down: "attn_q_a",
            names.latent_q_norm: "attn_q_a_norm",
            names.latent_q_up: "attn_q_b",
            names.latent_kv_down: "attn_kv_a_mqa",
            names.latent_kv_norm: "attn_kv_a_norm",
            names.latent_kv_up: LATENT_KV_UP,
            **{names.recurrent_prefix + name: f"shortconv.{name}" for name in ("conv", "in_proj", "out_proj")},
        }
        if is_around:
            layer[names.attention_output_norm] = "post_attention_norm"
        layer |= zip(names.qkv, ("attn_qkv",) if len(names.qkv) == 1 else ("attn_q", "attn_k", "attn_v"), strict=True)
        layer |= zip(names.gate_up, ("ffn_up",) if len(names.gate_up) == 1 else ("ffn_gate", "ffn_up"), strict=True)
        shared = [names.shared_prefix + name for name in names.shared_gate_up]
        layer |= zip(shared, ("ffn_gate_shexp", "ffn_up_shexp"), strict=True)
        self._layer = layer
        self._experts = dict(zip(names.expert_gate_up, ("ffn_gate_exps", "ffn_up_exps"), strict=True))
        self._experts[names.expert_down] = "ffn_down_exps"
        # Tensors whose names do not end in `weight` or `bias` in safetensors files.
        self._whole = {names.sinks: "attn_sinks.weight", names.correction: "exp_probs_b.bias"}

    def find(self, name: str) -> tuple[str, int | None]:
        """Return the name in the file, and the expert's number if the tensor is one expert's part."""
        layer = re.match(re.escape(self._prefix) + r"(\d+)\.(.+)$", name)
        if layer is None:
            module, _, kind = name.rpartition(".")
            return f"{self._top.get(module, module)}.{kind}", None
        number, rest = layer[1], layer[2]
        if rest in self._whole:
            return f"blk.{number}.{self._whole[rest]}", None
        module, _, kind = rest.rpartition(".")
        expert = _EXPERT.search(module)
        if expert is not None and (found := self._experts.get(_EXPERT.sub("{}", module, count=1))):
            return f"blk.{number}.{found}.{kind}", int(expert[0])
        return f"blk.{number}.{self._layer.get(module, module)}.{kind}", None

    def names_of(self, name: str, num_experts: int) -> list[str]:
        """Return the names in safetensors files of a tensor of the GGUF file: one, or one for each expert."""
        layer = re.match(r"blk\.(\d+)\.(.+)$", name)
        if layer is None:
            module, _, kind = name.rpartition(".")
            return [f"{next((ours for ours, theirs in self._top.items() if theirs == module), module)}.{kind}"]
        prefix, rest = f"{self._prefix}{layer[1]}.", layer[2]
        whole = next((ours for ours, theirs in self._whole.items() if theirs == rest), None)
        if whole is not None:
            return [prefix + whole]
        module, _, kind = rest.rpartition(".")
        expert = next((ours for ours, theirs in self._experts.items() if theirs == module), None)
        if expert is not None:
            return [f"{prefix}{expert.format(i)}.{kind}" for i in range(num_experts)]
        return [f"{prefix}{next((ours for ours, theirs in self._layer.items() if theirs == module), module)}.{kind}"]
