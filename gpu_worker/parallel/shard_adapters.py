"""The part of a LoRA adapter that belongs to a rank's part of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpu_worker.lora.adapter import Adapter, LoraPair
from gpu_worker.parallel.shard import Shard


def adapter_part(adapter: Adapter, shard: Shard) -> Adapter:
    """Its pairs for the layers, heads and features that a rank holds.

    Where a layer's output is divided, so are the rows of b. Where its input is, so are the columns of a, and what the
    ranks add sums up as their outputs do.
    """
    layers = adapter.layers[shard.layers.start : shard.layers.stop]
    if shard.part.num_heads < shard.whole.num_heads:
        layers = tuple(_cut(pairs, shard) for pairs in layers)
    return replace(adapter, layers=layers)


def _cut(pairs: Mapping[str, LoraPair], shard: Shard) -> dict[str, LoraPair]:
    dim, features = shard.whole.head_dim, slice(shard.features.start, shard.features.stop)
    heads = slice(shard.heads.start * dim, shard.heads.stop * dim)
    kv_heads = slice(shard.kv_heads.start * dim, shard.kv_heads.stop * dim)
    outputs = {"q": heads, "k": kv_heads, "v": kv_heads, "gate": features, "up": features}
    inputs = {"o": heads, "down": features}
    return {
        module: LoraPair(
            pair.a[:, inputs[module]] if module in inputs else pair.a,
            pair.b[outputs[module]] if module in outputs else pair.b,
            pair.scale,
        )
        for module, pair in pairs.items()
    }
