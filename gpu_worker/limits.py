"""Limits on steps, sequences and the KV pool, which every rank derives from the settings, the model and the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gpu_worker.cuda_graphs import GraphDecoder, recorder_for
from gpu_worker.kv.cache import block_bytes, choose_num_blocks
from gpu_worker.lora.adapter import expert_shapes
from gpu_worker.models.decoder import TorchDecoder
from gpu_worker.models.loader import LoadedModel
from midstream.config import WorkerConfig
from midstream.errors import ConfigError
from midstream.model.folder import ModelFolder

# Large enough to use the machine fully, and small enough that decodes do not wait long for prefills in the same step.
_CPU_NUM_TOKENS, _GPU_NUM_TOKENS = 256, 2048


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a loaded model.

    Attributes:
        max_sequence_length: Prompt and output together, in tokens.
    """

    max_sequence_length: int
    max_num_tokens: int

    @classmethod
    def of(cls, config: WorkerConfig, folder: ModelFolder, model: LoadedModel) -> Limits:
        """Return the limits that follow from the settings, the model folder and the device. Raises ConfigError if
        max_sequence_length exceeds the model's limit, or a prompt of an encoder might not fit in a step.
        """
        length, longest = (
            config.max_sequence_length or folder.max_sequence_length,
            model.description.max_sequence_length,
        )
        if length > longest:
            raise ConfigError(f"{length} exceeds the model's limit of {longest}", field="max_sequence_length")
        default = _CPU_NUM_TOKENS if model.device.type == "cpu" else _GPU_NUM_TOKENS
        num_tokens = config.max_num_tokens or default
        if model.is_encoder and num_tokens < length - 1:
            if config.max_num_tokens:
                raise ConfigError(
                    f"is {num_tokens}; must be at least {length - 1}, the longest prompt, since an encoder computes "
                    "each prompt in one step; set max_sequence_length to limit prompts",
                    field="max_num_tokens",
                )
            num_tokens = length - 1
        return cls(length, num_tokens)


def may_run_ahead(config: WorkerConfig, model: LoadedModel) -> bool:
    """Return whether a step may be launched before the previous step has finished. Raises ConfigError if this is
    requested for a decoder that needs each step's inputs on the host.
    """
    if model.device.type == "cuda":
        return config.run_ahead != "off"
    if config.run_ahead == "on" and (model.takes_host_inputs or model.can_record is False):
        raise ConfigError(
            "on requires a GPU, or --kernels torch with a model that can be recorded as CUDA graphs", field="run_ahead"
        )
    return config.run_ahead == "on"


def graph_decoder(
    config: WorkerConfig,
    model: LoadedModel,
    limits: Limits,
    *,
    draws: bool = False,
    share: Callable[[Tensor], None] | None = None,
) -> GraphDecoder:
    """Wrap the model's decoder to copy inputs to the GPU and, where allowed, replay CUDA graphs.

    Args:
        share: Broadcasts a step's tokens from rank 0 to the other ranks that embed them; None if there are none.
    """
    is_recorded = config.cuda_graphs and model.can_record is not False
    return GraphDecoder(
        model.decoder,
        model.device,
        max_batch_size=config.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_blocks=-(-limits.max_sequence_length // config.tokens_per_block),
        make_recorder=recorder_for(model.device) if is_recorded else None,
        may_fail=model.can_record is None,
        takes_adapters=model.takes_lora and model.adapter_bytes > 0,
        adapts_experts=model.divided is None
        and isinstance(model.decoder, TorchDecoder)
        and bool(expert_shapes(model.description)),
        draws=draws,
        share=share,
    )


def local_num_blocks(config: WorkerConfig, limits: Limits, models: Sequence[LoadedModel], free_bytes: int) -> int:
    """Return how many KV blocks fit in `free_bytes` for each of these models. Raises ConfigError if no block fits."""
    return choose_num_blocks(
        sum(block_bytes(model.part, config.tokens_per_block, model.kv_dtype) for model in models),
        config.tokens_per_block,
        free_memory_fraction=config.free_memory_fraction,
        max_kv_tokens=config.max_kv_tokens,
        max_useful_tokens=config.max_batch_size * limits.max_sequence_length,
        device=models[0].device,
        free_bytes=free_bytes,
    )
