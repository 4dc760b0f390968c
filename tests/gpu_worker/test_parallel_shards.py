"""Sharding of weights: each part is on exactly one rank, and query heads are on the same rank as the KV heads that they
use.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.models.description import DecoderDescription, Mixture
from gpu_worker.models.families import describe
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.shard import shard_of, stage_layers, whole_shard
from midstream.config import WorkerConfig
from midstream.errors import ConfigError
from midstream.model.folder import open_model_folder

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def grid(tensor: int, stages: int) -> list[Ranks]:
    size = tensor * stages
    return [Ranks(rank, size, tensor_size=tensor, pipeline_size=stages) for rank in range(size)]


@pytest.fixture(scope="module")
def embedded() -> DecoderDescription:
    """Return the embedded model: 30 layers, 9 heads, 3 KV heads."""
    return describe(open_model_folder("smollm2").config)


def test_the_variables_of_torchrun_define_the_rank() -> None:
    ranks = Ranks.from_environment(WorkerConfig(pipeline_parallel=2), TORCHRUN)
    assert (ranks.tensor_size, ranks.tensor_rank, ranks.stage, ranks.local_rank) == (4, 1, 1, 1)
    assert Ranks.from_environment(WorkerConfig(), {}).is_alone


@pytest.mark.parametrize(
    ("settings", "variables", "field"),
    [
        ({"tensor_parallel": 3}, {}, "tensor_parallel"),
        ({"tensor_parallel": 2}, {"WORLD_SIZE": "1"}, "tensor_parallel"),
        ({"pipeline_parallel": 0}, {}, "pipeline_parallel"),
        ({}, {"RANK": "8"}, "RANK"),
        ({}, {"RANK": ""}, "RANK"),
        ({}, {"RANK": "-1"}, "RANK"),
        ({}, {"MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({}, {"WORLD_SIZE": "two"}, "WORLD_SIZE"),
    ],
)
def test_a_contradiction_is_named(settings: dict[str, int], variables: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Ranks.from_environment(WorkerConfig(**settings), TORCHRUN | variables)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_the_embedded_models_kv_heads_are_divided_or_shared(embedded: DecoderDescription) -> None:
    two = [shard_of(embedded, ranks) for ranks in grid(2, 1)]
    assert [(list(s.kv_heads), list(s.heads)) for s in two] == [([0], [0, 1, 2]), ([1, 2], [3, 4, 5, 6, 7, 8])]
    four = [shard_of(embedded, ranks) for ranks in grid(4, 1)]
    assert [(list(s.kv_heads), list(s.heads)) for s in four] == [
        ([0], [0]),
        ([0], [1, 2]),
        ([1], [3, 4, 5]),
        ([2], [6, 7, 8]),
    ]


def test_the_first_stage_has_fewer_layers_because_it_has_the_head(embedded: DecoderDescription) -> None:
    """The head's 49,152 * 576 multiplications cost as much as 8 layers of 576 * (576 + 576 + 384 + 3 * 1,536)."""
    assert stage_layers(embedded, 2) == [range(11), range(11, 30)]
    assert stage_layers(embedded, 3) == [range(4), range(4, 17), range(17, 30)]
    # Every stage has at least one layer.
    assert list(map(len, stage_layers(embedded, 30))) == [1] * 30


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.data())
def test_every_part_is_held(kv_heads: int, queries: int, tensor: int, stages: int, data: st.DataObject) -> None:
    heads = kv_heads * queries
    num_layers = data.draw(st.integers(stages, 9))
    description = replace(
        _DESCRIPTION,
        num_heads=heads,
        num_kv_heads=kv_heads,
        num_layers=num_layers,
        rotary=(None,) * num_layers,
        chunks=(None,) * num_layers,
        mixtures=(None,) * num_layers,
        intermediate_size=data.draw(st.integers(8, 400)),
        vocab_size=data.draw(st.integers(8, 100)),
    )
    description = replace(description, windows=tuple(range(1, description.num_layers + 1)))
    if tensor > heads or (tensor > kv_heads and -(-tensor // kv_heads) > queries):
        with pytest.raises(ConfigError):
            list(map(partial(shard_of, description), grid(tensor, stages)))
        return
    shards = [shard_of(description, ranks) for ranks in grid(tensor, stages)]
    stage = shards[:tensor]
    assert [head for shard in stage for head in shard.heads] == list(range(heads))
    assert [feature for shard in stage for feature in shard.features] == list(range(description.intermediate_size))
    assert [layer for shard in shards[::tensor] for layer in shard.layers] == list(range(description.num_layers))
    tokens = [token for shard in stage for token in shard.tokens]
    assert tokens[: description.vocab_size] == list(range(description.vocab_size))
    assert len({len(shard.tokens) for shard in stage}) == 1
    for shard in shards:
        assert shard.part.num_heads % shard.part.num_kv_heads == 0
        per_kv_head = shard.part.num_heads // shard.part.num_kv_heads
        for place, head in enumerate(shard.heads):
            assert shard.kv_heads[place // per_kv_head] == head // queries
        assert shard.part.windows == tuple(layer + 1 for layer in shard.layers)
    assert whole_shard(description).part == description


def test_experts_that_cannot_be_divided_are_rejected() -> None:
    two = Ranks(0, 2, tensor_size=2)
    description = replace(_DESCRIPTION, num_heads=2, num_kv_heads=2, intermediate_size=2)
    with pytest.raises(ConfigError, match="no experts") as error:
        shard_of(description, two, expert_parallel=True)
    assert error.value.field == "expert_parallel"
    one_expert = replace(description, mixtures=(Mixture(num_experts=1, num_active=1, expert_size=8),))
    with pytest.raises(ConfigError, match="cannot be divided among 2 ranks"):
        shard_of(one_expert, two, expert_parallel=True)


_DESCRIPTION = DecoderDescription(
    architecture="llama",
    vocab_size=1,
    hidden_size=8,
    intermediate_size=1,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    norm_eps=1e-6,
    scale=1.0,
    rotary=(None,),
    windows=(None,),
    ties_embeddings=False,
    max_sequence_length=16,
)
