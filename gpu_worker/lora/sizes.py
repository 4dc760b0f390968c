"""How large the caches of adapters are, from settings under TensorRT-LLM's names for its PEFT cache."""

from __future__ import annotations

import torch

from gpu_worker.kv.cache import free_memory_bytes
from gpu_worker.lora.adapter import module_layer_elements, module_shapes, padded_rank
from gpu_worker.models.description import DecoderDescription
from midstream.config import WorkerConfig
from midstream.errors import ConfigError

# In files: float32 at the most.
_HOST_ELEMENT_BYTES = 4
_USUAL_RANK = 8


def host_cache_bytes(config: WorkerConfig, description: DecoderDescription) -> int:
    """What adapters may take on the host, as they were read.

    Raises:
        ConfigError: A size is negative.
    """
    if config.lora_host_cache_bytes < 0 or config.lora_num_host_module_layer < 0:
        raise ConfigError("is negative", field="lora_host_cache_bytes")
    units = config.lora_num_host_module_layer
    return units * module_layer_elements(description) * _HOST_ELEMENT_BYTES or config.lora_host_cache_bytes


def device_cache_bytes(
    config: WorkerConfig, description: DecoderDescription, element_bytes: int, device: torch.device
) -> int:
    """What adapters may take on the device; call it once weights and KV pool have theirs.

    Raises:
        ConfigError: A size is out of its range.
    """
    if not 0.0 <= config.lora_device_cache_percent <= 1.0 or config.lora_num_device_module_layer < 0:
        raise ConfigError("is not in [0, 1]", field="lora_device_cache_percent")
    if config.lora_num_device_module_layer:
        return config.lora_num_device_module_layer * module_layer_elements(description) * element_bytes
    return int(free_memory_bytes(device) * config.lora_device_cache_percent)


def usual_adapter_bytes(description: DecoderDescription, element_bytes: int) -> int:
    """What an adapter of rank 8 on all modules takes on the device."""
    elements = sum(sum(shape) for shape in module_shapes(description).values())
    return elements * padded_rank(_USUAL_RANK) * description.num_layers * element_bytes
