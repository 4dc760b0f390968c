"""The part of a decoder that one rank holds.

Layers are split across pipeline stages; within a stage each tensor rank has some KV heads with all their query heads,
some features of each feed-forward network and each expert, and some of the vocabulary. None of these needs to divide
evenly. With expert parallelism, a rank has some whole experts instead of features of each. With more tensor ranks than
KV heads, several ranks hold the same KV head and divide its query heads among themselves. Recurrent layers are not
sharded: each tensor rank computes all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from gpu_worker.models.description import DecoderDescription, Mixture
from gpu_worker.parallel.ranks import Ranks
from midstream.errors import ConfigError

# Feature ranges are aligned to this where possible; quantized blocks and kernel tiles have this size.
_FEATURE_UNIT = 32


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part.

    Attributes:
        whole: Description of the model.
        part: Description of this rank's part, as a separate model.
        layers, heads, kv_heads: Ranges that the rank holds, in the numbering of the model.
        tokens: Rows of the vocabulary; those past the last token are padding, so that all ranks have equally many rows.
        is_first: Whether the rank is in the first stage, which has the embeddings, final norm and head.
        is_last: Whether its last layer is the last one of the model.
    """

    whole: DecoderDescription
    part: DecoderDescription
    layers: range
    heads: range
    kv_heads: range
    tokens: range
    is_first: bool
    is_last: bool
    tensor_rank: int = 0
    tensor_size: int = 1

    @property
    def features(self) -> range:
        """The features of plain feed-forward networks that this rank holds."""
        return self.features_of(self.whole.intermediate_size)

    def features_of(self, size: int) -> range:
        """Return the range of a feed-forward network's `size` features that this rank holds."""
        return _features(size, self.tensor_rank, self.tensor_size)


def whole_shard(description: DecoderDescription) -> Shard:
    return shard_of(description, Ranks())


def shard_of(description: DecoderDescription, ranks: Ranks, *, expert_parallel: bool = False) -> Shard:
    """Return the part of `description` that a rank holds.

    Args:
        expert_parallel: Whether tensor ranks hold whole experts instead of some features of each.

    Raises:
        ConfigError: A rank would hold nothing.
    """
    d, rank, size = description, ranks.tensor_rank, ranks.tensor_size
    mixtures = [mixture for mixture in d.mixtures if mixture is not None]
    if expert_parallel and not mixtures:
        raise ConfigError("the model has no experts", field="expert_parallel")
    if expert_parallel and size > min(mixture.num_experts for mixture in mixtures):
        raise ConfigError(f"the experts cannot be divided among {size} ranks", field="expert_parallel")
    if ranks.pipeline_size > d.num_layers:
        raise ConfigError(
            f"{d.num_layers} layers cannot be split across {ranks.pipeline_size} pipeline stages",
            field="pipeline_parallel",
        )
    expert_sizes = () if expert_parallel else (mixture.expert_size for mixture in mixtures)
    sizes = (d.num_heads, d.intermediate_size, *expert_sizes)
    if size > min(filter(None, sizes)):
        raise ConfigError(f"{d.num_heads} heads cannot be sharded across {size} ranks", field="tensor_parallel")
    layers = stage_layers(d, ranks.pipeline_size)[ranks.stage]
    heads, kv_heads = _heads(d, rank, size)
    if d.qk_norm == "row" and size > d.num_kv_heads:
        raise ConfigError(
            f"{d.num_kv_heads} KV heads that are normed together cannot be sharded across {size} ranks",
            field="tensor_parallel",
        )
    num_tokens = -(-d.vocab_size // size)
    return Shard(
        whole=d,
        part=replace(
            d.of_layers(layers),
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            intermediate_size=len(_features(d.intermediate_size, rank, size)),
            mixtures=tuple(_mixture(d.mixtures[i], rank, size, expert_parallel=expert_parallel) for i in layers),
        ),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        tokens=range(rank * num_tokens, (rank + 1) * num_tokens),
        is_first=ranks.stage == 0,
        is_last=ranks.stage == ranks.pipeline_size - 1,
        tensor_rank=rank,
        tensor_size=size,
    )


def _features(count: int, rank: int, size: int) -> range:
    unit = _FEATURE_UNIT if count % _FEATURE_UNIT == 0 and count // _FEATURE_UNIT >= size else 1
    units = _span(count // unit, rank, size)
    return range(units.start * unit, units.stop * unit)


def _mixture(mixture: Mixture | None, rank: int, size: int, *, expert_parallel: bool) -> Mixture | None:
    """Return the mixture of experts with only this rank's experts, or features of each expert."""
    if mixture is None:
        return None
    mixture = replace(mixture, shared_size=len(_features(mixture.shared_size, rank, size)))
    if not expert_parallel:
        return replace(mixture, expert_size=len(_features(mixture.expert_size, rank, size)))
    return mixture if size == 1 else replace(mixture, held=_span(mixture.num_experts, rank, size))


def stage_layers(description: DecoderDescription, num_stages: int) -> list[range]:
    """Return the range of layers of each stage.

    The first stage also computes the head, so it has fewer layers: a pipeline is as fast as its slowest stage.
    """
    num_layers, head = description.num_layers, round(_head_cost(description))
    cuts = [stage * (num_layers + head) // num_stages - head for stage in range(1, num_stages)]
    # Each stage has at least one layer.
    cuts = [min(max(cut, stage), num_layers - num_stages + stage) for stage, cut in enumerate(cuts, 1)]
    return [range(*ends) for ends in pairwise([0, *cuts, num_layers])]


def _head_cost(d: DecoderDescription) -> float:
    """Return how many layers take as many multiplications per token as the head."""
    attention = d.num_heads * (d.query_rows + d.value_dim) + 2 * d.num_kv_heads * d.head_dim
    widths = [
        d.intermediate_size if mixture is None else mixture.num_active * mixture.expert_size + mixture.shared_size
        for mixture in d.mixtures
    ]
    feed_forward = (3 if d.has_gated_ffn else 2) * sum(widths) / len(widths)
    return d.vocab_size / (attention + feed_forward)


def _heads(d: DecoderDescription, rank: int, size: int) -> tuple[range, range]:
    """Return a rank's query heads and KV heads: each of its KV heads comes with an equal number of query heads."""
    queries = d.num_heads // d.num_kv_heads
    if size <= d.num_kv_heads:
        kv_heads = _span(d.num_kv_heads, rank, size)
        return range(kv_heads.start * queries, kv_heads.stop * queries), kv_heads
    kv_head = rank * d.num_kv_heads // size
    sharing = [other for other in range(size) if other * d.num_kv_heads // size == kv_head]
    if len(sharing) > queries:
        raise ConfigError(
            f"{d.num_heads} heads, {queries} per KV head, cannot be sharded across {size} ranks",
            field="tensor_parallel",
        )
    own = _span(queries, sharing.index(rank), len(sharing))
    first = kv_head * queries
    return range(first + own.start, first + own.stop), range(kv_head, kv_head + 1)


def _span(count: int, part: int, num_parts: int) -> range:
    """Return the range of part `part` when `count` items are divided into parts whose sizes differ by at most one."""
    return range(part * count // num_parts, (part + 1) * count // num_parts)
