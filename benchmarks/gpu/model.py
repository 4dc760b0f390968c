"""A model with random weights, inputs for its steps, and a runner that needs no model folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gpu_worker.models.decoder import ForwardInputs, TorchDecoder
from gpu_worker.models.description import DecoderDescription, Mixture
from gpu_worker.models.families import describe
from gpu_worker.models.weights.layer_weights import FeedForwardWeights, LayerWeights, LinearWeights, MixtureWeights
from gpu_worker.parallel.shard import Shard, whole_shard
from gpu_worker.parallel.tensor_ranks import ONE_RANK, TensorRanks

if TYPE_CHECKING:
    from gpu_worker.model_runner import ModelRunner
    from gpu_worker.models.weights.decoder_weights import DecoderWeights
    from midstream.model.folder import ModelFolder

# The shape of Llama 3.1 8B.
CONFIG_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 32768,
}
# The shape of Llama 3.2 1B.
CONFIG_1B = CONFIG_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
}
# The shape of Qwen 3 30B-A3B.
CONFIG_MIXTURE = CONFIG_8B | {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
TINY = CONFIG_8B | {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
TINY_MIXTURE = TINY | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
TOKENS_PER_BLOCK = 16
_STANDARD_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class _Matrix:
    values: Tensor
    format: str = "bf16"

    def dense(self) -> Tensor:
        return self.values

    def as_blocks(self) -> list[object]:
        return []


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: _Matrix
    bias: None = None


class RandomWeights:
    """Random weights of a rank's shard, in the form that the loader returns, created on the device."""

    def __init__(self, shard: Shard, device: torch.device, dtype: torch.dtype) -> None:
        self._shard, self._description, self._device, self._dtype = shard, shard.part, device, dtype

    def embedding(self) -> _Matrix:
        return self._matrix(len(self._shard.tokens), self._description.hidden_size)

    def embedding_norm(self) -> None:
        return None

    def head(self) -> _Matrix:
        return self._matrix(len(self._shard.tokens), self._description.hidden_size)

    def head_bias(self) -> None:
        return None

    def positions(self) -> None:
        return None

    def final_norm(self) -> Tensor:
        return self._ones(self._description.hidden_size)

    def rope_factors(self) -> None:
        return None

    def layers(self) -> Iterator[LayerWeights]:
        d = self._description
        for mixture in d.mixtures:
            yield LayerWeights(
                input_norm=self._ones(d.hidden_size),
                qkv=self._linear((d.num_heads + 2 * d.num_kv_heads) * d.head_dim, d.hidden_size),
                q_norm=self._ones(d.head_dim) if d.qk_norm == "head" else None,
                k_norm=self._ones(d.head_dim) if d.qk_norm == "head" else None,
                attention_output=self._linear(d.hidden_size, d.num_heads * d.head_dim),
                ffn_norm=self._ones(d.hidden_size),
                feed_forward=self._feed_forward(d.intermediate_size) if mixture is None else None,
                mixture=None if mixture is None else self._mixture(mixture),
            )

    def _feed_forward(self, size: int) -> FeedForwardWeights:
        hidden_size = self._description.hidden_size
        return FeedForwardWeights(gate_up=self._linear(2 * size, hidden_size), down=self._linear(hidden_size, size))

    def _mixture(self, mixture: Mixture) -> MixtureWeights:
        return MixtureWeights(
            router=self._linear(mixture.num_experts, self._description.hidden_size, torch.float32),
            correction=None,
            experts=[self._feed_forward(mixture.expert_size) for _ in range(mixture.num_experts)],
            shared=None,
            shared_gate=None,
        )

    def _linear(self, num_rows: int, num_columns: int, dtype: torch.dtype | None = None) -> LinearWeights:
        return cast("LinearWeights", _Linear(self._matrix(num_rows, num_columns, dtype)))

    def _matrix(self, num_rows: int, num_columns: int, dtype: torch.dtype | None = None) -> _Matrix:
        values = torch.empty(num_rows, num_columns, device=self._device, dtype=dtype or self._dtype)
        return _Matrix(values.normal_(std=_STANDARD_DEVIATION))

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, device=self._device)


def random_decoder(
    config: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    shard: Shard | None = None,
    tensor_ranks: TensorRanks = ONE_RANK,
) -> TorchDecoder:
    """Return the native decoder of this shape, or a rank's shard of it."""
    description = describe(config)
    weights = cast("DecoderWeights", RandomWeights(shard or whole_shard(description), device, dtype))
    return TorchDecoder(description, weights, dtype, device, shard, tensor_ranks)


def weight_bytes(d: DecoderDescription, bytes_each: int) -> int:
    """Return the bytes that a step must read: all matrices except the embedding table, since it reads only a few of its
    rows.
    """
    heads = (2 * d.num_heads + 2 * d.num_kv_heads) * d.head_dim
    layer = heads * d.hidden_size + 3 * d.intermediate_size * d.hidden_size
    return bytes_each * (d.num_layers * layer + d.vocab_size * d.hidden_size)


def kv_bytes(d: DecoderDescription, num_tokens: int, bytes_each: int) -> int:
    """Return the size in bytes of the keys and values of this many tokens, in all layers."""
    return 2 * d.num_layers * d.num_kv_heads * d.head_dim * num_tokens * bytes_each


def prefill_operations(d: DecoderDescription, batch_size: int, length: int) -> float:
    """Return the floating-point operations of whole prompts: matrices, causal attention, and one row of logits per
    prompt.
    """
    heads = (2 * d.num_heads + 2 * d.num_kv_heads) * d.head_dim
    matrices = d.num_layers * (heads * d.hidden_size + 3 * d.intermediate_size * d.hidden_size)
    attention = 4 * d.num_layers * d.num_heads * d.head_dim * length * (length + 1) / 2
    return batch_size * (2 * matrices * length + attention + 2 * d.vocab_size * d.hidden_size)


def step_inputs(batch_size: int, num_queries: int, context: int, vocab_size: int) -> ForwardInputs:
    """Return a step on the CPU: each sequence computes the last `num_queries` tokens of its context and samples one
    token.
    """
    num_blocks = -(-context // TOKENS_PER_BLOCK)
    order = torch.randperm(batch_size * num_blocks, dtype=torch.int32)
    tables = order.view(batch_size, num_blocks)
    positions = torch.arange(context - num_queries, context, dtype=torch.int32)
    slots = tables[:, positions // TOKENS_PER_BLOCK] * TOKENS_PER_BLOCK + positions % TOKENS_PER_BLOCK
    starts = torch.arange(batch_size + 1, dtype=torch.int32) * num_queries
    return ForwardInputs(
        token_ids=torch.randint(vocab_size, (batch_size * num_queries,), dtype=torch.int32),
        positions=positions.repeat(batch_size),
        slot_mapping=slots.flatten().int(),
        query_starts=starts,
        context_lens=torch.full((batch_size,), context, dtype=torch.int32),
        block_tables=tables,
        sampled=starts[1:] - 1,
    )


def random_folder(config: dict[str, Any]) -> ModelFolder:
    """Return the description of a model folder, which does not exist."""
    from midstream.model.folder import ModelFolder

    return ModelFolder(
        path=Path("random"),
        name="random",
        architecture=config["model_type"],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        max_sequence_length=config["max_position_embeddings"],
        end_ids=(),
        pad_id=None,
        bos_id=None,
        chat_template=None,
        fingerprint="random",
        weights_format="safetensors",
        weight_files=(),
        config=config,
    )


def random_runner(
    config: dict[str, Any],
    decoder: TorchDecoder,
    device: torch.device,
    dtype: torch.dtype | None = None,
    runs_ahead: bool | None = None,
    adapter_bytes: int = 0,
    kv_dtype: torch.dtype | None = None,
    **settings: Any,
) -> ModelRunner:
    """Return the worker's runner with an existing decoder of `dtype` (default: bfloat16 on a GPU), which is also the
    KV type.
    """
    from gpu_worker.model_runner import ModelRunner
    from gpu_worker.models.loader import LoadedModel
    from midstream.config import WorkerConfig

    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    worker_config = WorkerConfig(tokens_per_block=TOKENS_PER_BLOCK, device=str(device), **settings)
    decoder.reserve_adapters(adapter_bytes, worker_config.lora_max_adapter_size)
    model = LoadedModel(describe(config), decoder, device, dtype, kv_dtype or dtype, adapter_bytes=adapter_bytes)
    return ModelRunner(worker_config, random_folder(config), model, runs_ahead=runs_ahead)
