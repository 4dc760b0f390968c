"""Extracts a rank's part of a LoRA adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpu_worker.lora.adapter import Adapter, LoraPair
from gpu_worker.parallel.shard import Shard


def adapter_part(adapter: Adapter, shard: Shard) -> Adapter:
    """Return the pairs for the layers, heads and features that a rank holds.

    Rows of b are sharded like the layer's output, columns of a like its input; in the latter case the LoRA outputs of
    the ranks are summed along with those of the layer.
    """
    layers = adapter.layers[shard.layers.start : shard.layers.stop]
    if shard.part.num_heads < shard.whole.num_heads:
        layers = tuple(_cut(pairs, shard) for pairs in layers)
    return replace(adapter, layers=layers)


def _cut(pairs: Mapping[str, LoraPair], shard: Shard) -> dict[str, LoraPair]:
    d, features = shard.whole, _span(shard.features, 1)
    kv_heads = _span(shard.kv_heads, d.head_dim)
    queries, attended = _span(shard.heads, d.query_dim), _span(shard.heads, d.value_dim)
    outputs = {"q": queries, "k": kv_heads, "v": kv_heads, "gate": features, "up": features}
    inputs = {"o": attended, "down": features}
    return {
        module: LoraPair(
            pair.a[:, inputs[module]] if module in inputs else pair.a,
            pair.b[outputs[module]] if module in outputs else pair.b,
            pair.scale,
        )
        for module, pair in pairs.items()
    }


def _span(parts: range, length: int) -> slice:
    """Return the slice of elements for a range of parts with `length` elements each."""
    return slice(parts.start * length, parts.stop * length)
